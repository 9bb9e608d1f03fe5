"""What a cluster measured of sets of jobs, on disk: one JSON object per line, only ever appended to.

A line that cannot be read (cut short by a killed writer, of a newer cotenant, absurd) is skipped and told of; it never
hides the others. A line may also withdraw a program: what those before it say of the program's speed counts no more.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from cotenant.forecasting.interference.observations import Observation, Program
from cotenant.forecasting.types import DemandProfile, ProfileSource
from cotenant.forecasting.versions import check_version

OBSERVATION_VERSION = 1
_FIELDS = ("gpu_type", "focal", "others", "throughput", "low", "high", "seconds")
_PROFILE = {each.name: each for each in fields(DemandProfile)}
_TEXTS, _FLAGS = frozenset({"source", "fingerprint", "family"}), frozenset({"from_shared"})
_ALWAYS = frozenset({"util_mean", "util_p95", "observed_s"})  # numbers that are never None


@dataclass(frozen=True, slots=True)
class LoadedObservations:
    """What was read from a file.

    Attributes:
        observations: In the order of the file, so the oldest first; without those that were withdrawn later.
        problems: One text per line that was skipped: file, line and reason.
        withdrawn: Programs that were withdrawn; what is there of them was measured later.
    """

    observations: tuple[Observation, ...]
    problems: tuple[str, ...]
    withdrawn: tuple[Program, ...] = ()


def save_observations(path: Path, observations: Iterable[Observation | Program]) -> None:
    """Append observations; the file is made when there is none. Several processes may append to the same file.

    A program among them withdraws what came before it of the program's own speed. Readers that do not know such lines
    yet skip them.

    Raises:
        OSError: The disk is full, or another reason not to write; nothing was written then.
    """
    lines = [
        json.dumps(
            {"schema_version": OBSERVATION_VERSION}
            | ({"withdrawn": asdict(each)} if isinstance(each, Program) else asdict(each)),
            allow_nan=False,
        )
        for each in observations
    ]
    if not lines:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":  # a writer was killed: its half line must not swallow ours
                lines.insert(0, "")
        left = memoryview(("\n".join(lines) + "\n").encode())
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)  # the whole of it will come again: what is here already would count twice
            raise


def load_observations(path: Path) -> LoadedObservations:
    """Read observations.

    Raises:
        OSError: The file cannot be read.
    """
    found: list[Observation] = []
    problems: list[str] = []
    withdrawn: dict[Program, None] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                read = _read(json.loads(line))
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:  # broken text: ValueError
                problems.append(f"{path}, line {number}: skipped: {error}")
                continue
            if isinstance(read, Program):
                found = [each for each in found if each.program != read]
                withdrawn[read] = None
            else:
                found.append(read)
    return LoadedObservations(tuple(found), tuple(problems), tuple(withdrawn))


def _read(raw: object) -> Observation | Program:
    if not isinstance(raw, dict):
        raise ValueError(f"{raw!r:.80} is not accepted; give an object with {', '.join(_FIELDS)}")
    if "schema_version" not in raw:
        raise ValueError("schema_version is missing")
    version = raw["schema_version"]
    check_version(version if isinstance(version, int) else -1, OBSERVATION_VERSION)
    if "withdrawn" in raw:
        return _program(raw["withdrawn"])
    missing = [name for name in _FIELDS if name not in raw]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    if not isinstance(raw["gpu_type"], str) or not isinstance(raw["others"], list):
        raise ValueError("gpu_type must be a text and others a list of profiles")
    numbers = {name: _number(name, raw[name]) for name in ("throughput", "low", "high", "seconds")}
    focal, others = _profile(raw["focal"]), tuple(_profile(each) for each in raw["others"])
    return Observation(raw["gpu_type"], focal, others, **numbers)


def _program(raw: object) -> Program:
    names = [raw.get(each.name) for each in fields(Program)] if isinstance(raw, Mapping) else []
    texts = [name for name in names if isinstance(name, str)]
    if len(texts) != len(fields(Program)):
        raise ValueError(f"withdrawn: {raw!r:.80} is not accepted; give a GPU type and a fingerprint")
    return Program(*texts)


def _profile(raw: object) -> DemandProfile:
    if not isinstance(raw, Mapping):
        raise ValueError(f"profile: {raw!r:.80} is not accepted; give an object")
    known: dict[str, Any] = {name: value for name, value in raw.items() if name in _PROFILE}
    for name, value in known.items():
        if name in _TEXTS:
            good = isinstance(value, str)
        elif name in _FLAGS:
            good = isinstance(value, bool)
        else:
            good = (value is None and name not in _ALWAYS) or _number(name, value) >= 0.0
        if not good:
            raise ValueError(f"profile: {name}: {value!r:.80} is not accepted")
    if known.get("source", "unknown") not in get_args(ProfileSource):
        raise ValueError(f"profile: source: {known['source']!r:.80} is not accepted")
    return DemandProfile(**known)  # a TypeError names what is missing


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name}: {value!r:.80} is not accepted; give a finite number")
    return float(value)


__all__ = ["OBSERVATION_VERSION", "LoadedObservations", "load_observations", "save_observations"]
