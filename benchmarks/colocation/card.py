"""The data card: what the figures of a folder were measured on, with what and how."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.colocation.records import FORMAT, FolderError

CARD = "card.json"
# One folder holds figures that can be compared: these must be the same in every run that adds to it. The very board may
# change, since boards of one type are told apart by nothing that the tables use.
SAME = ("format", "device", "gpu_type", "driver", "cuda", "torch", "dry_run", "method")

Card = dict[str, Any]


def make_card(device: str, identity: Mapping[str, Any], method: Mapping[str, Any], *, dry_run: bool) -> Card:
    """A card for a new folder.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        identity: What the device says about itself and its host.
        method: How windows are run.
        dry_run: Whether tensors are on the CPU although the device is a GPU.
    """
    return {
        "format": FORMAT,
        "run_id": uuid.uuid4().hex[:12],
        "device": device,
        **identity,
        "gpu_type": identity.get("gpu_type") or "unknown",
        "torch": version_of("torch"),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "method": dict(method),
        "workloads": {},
        "dry_run": dry_run,
        "limits": limits(device, identity, dry_run=dry_run),
    }


def limits(device: str, identity: Mapping[str, Any], *, dry_run: bool) -> list[str]:
    """What a reader of the figures should know, in sentences."""
    known: list[str] = []
    if dry_run:
        known.append("Dry run: tensors are on the CPU, so no figure says anything about a GPU.")
    if device == "cpu":
        known.append("The device is one core; utilisation is CPU time of a member's main process over wall time.")
        if identity.get("host_cores", 2) < 2:
            known.append("The machine has one core: helper processes and the controller share it with the members.")
    known.extend(f"The device does not say: {name}." for name in ("driver", "cuda") if _silent(device, identity, name))
    return known


def settle_card(path: Path, card: Card) -> Card:
    """The folder's card: the one that is there, when this run may add to it, else the new one.

    Args:
        path: The output folder.
        card: The card this run would have in a new folder.

    Raises:
        FolderError: The folder holds figures of another device, type, driver, version or method, or no readable card.
    """
    file = path / CARD
    if not file.exists():
        write_card(path, card)
        return card
    try:
        there: Card = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise FolderError(f"{file}: cannot be read: {error}; give another --out") from error
    for field in SAME:
        if there.get(field) != card[field]:
            raise FolderError(
                f"--out {path} holds figures with {field} = {there.get(field)!r}; this run has {card[field]!r}; "
                "give another --out"
            )
    return there


def add_workload(path: Path, card: Card, name: str, traits: Mapping[str, Any]) -> None:
    """Note what a workload is.

    Raises:
        FolderError: The folder knows a workload of that name with other traits.
    """
    known = card["workloads"].get(name)
    if known == traits:
        return
    if known is not None:
        raise FolderError(
            f"--out {path}: workload {name!r} was {known} there and is {dict(traits)} now; give another --out"
        )
    card["workloads"][name] = dict(traits)
    write_card(path, card)


def write_card(path: Path, card: Card) -> None:
    """Write the card in one piece: a crash leaves the old one or the new one."""
    file = path / f"{CARD}.new"
    file.write_text(json.dumps(card, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    file.replace(path / CARD)


def version_of(package: str) -> str | None:
    """A package's version; None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of this checkout, with ``-dirty`` when tracked files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine
        return None
    return answer.stdout.strip() or None


def _silent(device: str, identity: Mapping[str, Any], name: str) -> bool:
    return device == "cuda" and identity.get(name) is None
