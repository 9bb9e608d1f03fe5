"""Trained models on disk: versions by kind, one of them active.

Layout: ``ROOT/<kind>/<version>/`` holds ``card.json`` and the files of one model, ``ROOT/active.json`` names the active
versions. A version appears whole or not at all and is never changed. What comes with the package is the version
``shipped`` of its kind and is active until another one is. ``docs/models.md`` tells more.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cotenant.forecasting.characterisation import coldstart
from cotenant.forecasting.datasets.interference_models import load_models
from cotenant.forecasting.datasets.model_card import (
    CARD_FILE,
    KINDS,
    Card,
    DataSource,
    Kind,
    ModelFileError,
    check_files,
    digest,
    read_card,
    refused,
    write_card,
)
from cotenant.forecasting.demand.engine import Expert
from cotenant.forecasting.demand.features import FEATURES_VERSION
from cotenant.forecasting.demand.mixture import MEMORY_SCALES, UTIL_SCALES, MixtureForecaster
from cotenant.forecasting.demand.streams import Streams
from cotenant.forecasting.demand.trial import SERIES, check_serves
from cotenant.forecasting.interference.bundle import InterferenceModels
from cotenant.forecasting.interference.observations import SCHEMA_VERSION
from cotenant.forecasting.training.demand_artefact import BrokenArtefact, DemandArtefact, load_artefact

SHIPPED = "shipped"
SHIPPED_MODELS = Path(__file__).parent / "shipped" / "models"
ACTIVE_FILE, UNREADABLE_FILE = "active.json", "active.unreadable"
INTERFERENCE_FILE, CLASSES_FILE = "interference.json", "classes.json"
DEMAND_HORIZONS = UTIL_SCALES[0][1].horizons
_JOINED = {"util": UTIL_SCALES[0][1], "memory": MEMORY_SCALES[0][1]}
FEATURES: Mapping[Kind, int] = {
    "interference": SCHEMA_VERSION,
    "demand": FEATURES_VERSION,
    "coldstart": coldstart.VERSION,
}
STALE_S = 3600.0  # an unfinished folder this old is of a writer that was killed

_VERSION = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}")
_DEMAND_FILE = re.compile(r"(util|memory)-[a-z]+\.npz")
_UNFINISHED = ".part-"
_ANEW = "what is shipped serves; delete it, or activate a version anew"


class DamagedChoices(ModelFileError):
    """The file that says which versions are active holds something else."""


@dataclass(frozen=True, slots=True, eq=False)
class DemandExperts:
    """Trained experts for the mixture that forecasts demand, for 1, 2 and 5 s in ticks of a second.

    Attributes:
        util: Those for utilisation.
        memory: Those for memory.
    """

    util: tuple[DemandArtefact, ...]
    memory: tuple[DemandArtefact, ...]

    def forecaster(self) -> MixtureForecaster:
        """Return a mixture that the experts have joined.

        Raises:
            ValueError: An expert was made for something else than this program's mixture.
        """
        rows = Streams().size

        def served(artefacts: tuple[DemandArtefact, ...]) -> list[Expert]:
            return [artefact.expert(DEMAND_HORIZONS, rows) for artefact in artefacts]

        return MixtureForecaster(served(self.util), served(self.memory))


class Registry:
    """The versions in one folder, and the shipped ones. Any number of processes may use the same folder.

    Args:
        root: The folder; made when something is first written.
        shipped: Where the models that come with the package lie, by kind.
    """

    def __init__(self, root: Path, shipped: Path = SHIPPED_MODELS) -> None:
        self.root = root
        self._shipped = shipped

    def add(self, kind: Kind, card: Card, write: Callable[[Path], None]) -> str:
        """Add a version.

        Args:
            kind: What it predicts.
            card: Its card; ``version`` and ``files`` are filled in here.
            write: Writes its files into the folder it is given.

        Returns:
            The version's name, ``<UTC date and time of made_at>-<8 hexadecimal digits of its content>``. The same
            model with the same card is the same version.

        Raises:
            ModelFileError: A field of the card is not accepted, or ``write`` left no files.
            OSError: The disk is full, or another reason not to write; there is no new version then.
        """
        home = self.root / _known(kind, self.root)
        home.mkdir(parents=True, exist_ok=True)
        _sweep(home)
        folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=home))
        try:
            name = _fill(folder, replace(card, kind=kind), write)
            folder.chmod(0o755)
            try:
                folder.rename(home / name)
            except OSError:
                if not (home / name / CARD_FILE).exists():
                    raise  # else another process has just added the very same
            _sync(home)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return name

    def versions(self, kind: Kind) -> list[Card]:
        """Return the cards of all versions that can be used, the oldest first; broken ones are left out."""
        return [found for found in self._every(kind) if isinstance(found, Card)]

    def broken(self, kind: Kind) -> list[ModelFileError]:
        """Return what is wrong with the versions that ``versions`` leaves out."""
        return [found for found in self._every(kind) if not isinstance(found, Card)]

    def card(self, kind: Kind, version: str) -> Card:
        """Return the card of a version.

        Raises:
            ModelFileError: There is no such version, or its card is damaged or of another program.
        """
        return read_card(self.folder(kind, version), kind, version, FEATURES[kind])

    def verified(self, kind: Kind, version: str) -> tuple[Card, Path]:
        """Return card and folder of a version whose files have the checksums in its card.

        Raises:
            ModelFileError: There is no such version, or something in it is damaged or of another program.
        """
        card, folder = self.card(kind, version), self.folder(kind, version)
        check_files(folder, card)
        return card, folder

    def folder(self, kind: Kind, version: str) -> Path:
        """Return where a version lies.

        Raises:
            ModelFileError: There is no such version.
        """
        folder = self._shipped / _known(kind, self.root) if version == SHIPPED else self.root / kind / version
        if not (version == SHIPPED or _VERSION.fullmatch(version)) or not folder.is_dir():
            known = ", ".join(self.names(kind)) or "there are none yet"
            raise refused(self.root / kind, "version", version, f"one of: {known}")
        return folder

    def ships(self, kind: Kind) -> bool:
        """Whether a model of this kind comes with the package."""
        return (self._shipped / kind / CARD_FILE).exists()

    def active(self, kind: Kind) -> str | None:
        """Return the active version: the one chosen, else the shipped one, else None.

        Raises:
            ModelFileError: The file that says so is damaged.
        """
        chosen = self._choices().get(_known(kind, self.root))
        if chosen is not None:
            return chosen
        return SHIPPED if self.ships(kind) else None

    def serving(self, kind: Kind) -> str | None:
        """Return the version that serves: the active one if it is sound, else the shipped one, else None."""
        try:
            active = self.active(kind)
            if active is not None:
                return self.verified(kind, active)[0].version
        except ModelFileError:
            return SHIPPED if self.ships(kind) else None
        return None

    def activate(self, kind: Kind, version: str | None) -> Path | None:
        """Make a version the active one; None goes back to what is shipped.

        Returns:
            Where the file of choices lies now if it was damaged: nothing in it was heeded any more, so it is put aside
            and begun anew. None if it was not.

        Raises:
            ModelFileError: There is no such version, it is damaged, or the file of choices cannot be read.
        """
        if version is not None:
            _LOADERS[_known(kind, self.root)](self, version)
        with self._locked():
            choices, aside = self._mended_choices()
            if version is not None and version != SHIPPED:
                self.folder(kind, version)  # it may have been pruned meanwhile
                choices[kind] = version
            else:
                choices.pop(_known(kind, self.root), None)
            _write_whole(self.root / ACTIVE_FILE, json.dumps(choices, indent=1) + "\n")
        return aside

    def prune(self, kind: Kind, keep: int) -> list[str]:
        """Delete all but the newest versions; the active one and the shipped one always stay.

        Args:
            kind: What the versions predict.
            keep: How many stay, the active one not counted.

        Returns:
            The names of the deleted versions, the oldest first.

        Raises:
            ModelFileError: The file of choices is damaged, so nobody knows which version is active.
        """
        if keep < 0:
            raise ValueError(f"keep: {keep} is not accepted; give a number of at least 0")
        with self._locked():
            active = self.active(kind)
            old = [name for name in self.names(kind) if name not in {active, SHIPPED}]
            gone = old[: max(0, len(old) - keep)]
            for name in gone:
                away = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.root / kind))
                (self.root / kind / name).rename(away / name)  # gone at once, whatever the deletion takes
                shutil.rmtree(away)
        return gone

    def names(self, kind: Kind) -> list[str]:
        """Return the names of all versions there are, sound or not, the oldest first."""
        home = self.root / _known(kind, self.root)
        own = [path.name for path in home.iterdir() if _VERSION.fullmatch(path.name)] if home.is_dir() else []
        return [SHIPPED] * self.ships(kind) + sorted(own, key=lambda n: self._age(kind, n))

    def _age(self, kind: Kind, name: str) -> tuple[str, str]:
        """Sort key: versions of the same second are told apart by their cards, where these can be read."""
        try:
            return name[:15], datetime.fromisoformat(self.card(kind, name).made_at).isoformat()
        except ModelFileError:
            return name[:15], ""

    def _every(self, kind: Kind) -> Iterator[Card | ModelFileError]:
        for name in self.names(kind):
            try:
                yield self.verified(kind, name)[0]
            except ModelFileError as error:
                yield error

    def _choices(self) -> dict[str, str]:
        path = self.root / ACTIVE_FILE
        try:
            raw: Any = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error}; delete it to go back to what is shipped") from error
        except (ValueError, RecursionError) as error:
            raise DamagedChoices(f"{path}: cannot be read: {error}; {_ANEW}") from error
        if not isinstance(raw, dict) or not all(
            name in KINDS and isinstance(version, str) and _VERSION.fullmatch(version) for name, version in raw.items()
        ):
            wrong = refused(path, "active versions", raw, f"a version for any of {', '.join(KINDS)}")
            raise DamagedChoices(f"{wrong}; {_ANEW}")
        return dict(raw)

    def _mended_choices(self) -> tuple[dict[str, str], Path | None]:
        """Return the choices, and where they are kept if they were damaged."""
        try:
            return self._choices(), None
        except DamagedChoices:
            aside = self.root / UNREADABLE_FILE
            (self.root / ACTIVE_FILE).replace(aside)
            return {}, aside

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the registry against other processes that choose or delete versions."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def load_interference(registry: Registry, version: str) -> InterferenceModels:
    """Load interference models.

    Raises:
        ModelFileError: There is no such version, or something in it is damaged or of another program.
    """
    card, folder = registry.verified("interference", version)
    return load_models(_file(card, folder, INTERFERENCE_FILE))


def load_demand(registry: Registry, version: str) -> DemandExperts:
    """Load trained demand experts.

    Raises:
        ModelFileError: There is no such version, or something in it is damaged or of another program.
    """
    card, folder = registry.verified("demand", version)
    found: dict[str, list[DemandArtefact]] = {"util": [], "memory": []}
    for name in sorted(card.files):
        if not _DEMAND_FILE.fullmatch(name):
            raise refused(folder / CARD_FILE, "files", name, "util-<kind>.npz or memory-<kind>.npz")
        try:
            artefact = load_artefact(folder / name)
            check_serves(artefact.expert(DEMAND_HORIZONS, SERIES), _JOINED[name.partition("-")[0]])
        except BrokenArtefact as error:
            raise ModelFileError(f"{folder}: {error}") from error
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{folder / name}: {error}") from error
        found[name.partition("-")[0]].append(artefact)
    return DemandExperts(tuple(found["util"]), tuple(found["memory"]))


def load_coldstart(registry: Registry, version: str) -> coldstart.ColdStartClasses:
    """Load cold-start classes.

    Raises:
        ModelFileError: There is no such version, or something in it is damaged or of another program.
    """
    card, folder = registry.verified("coldstart", version)
    path = _file(card, folder, CLASSES_FILE)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ModelFileError(f"{path}: not a model file of this kind; it must hold one JSON object")
        return coldstart.ColdStartClasses.from_dict(raw)
    except ModelFileError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: {error}") from error


_LOADERS: Mapping[Kind, Callable[[Registry, str], object]] = {
    "interference": load_interference,
    "demand": load_demand,
    "coldstart": load_coldstart,
}


def write_shipped(folder: Path, card: Card, write: Callable[[Path], None]) -> None:
    """Write the model that comes with the package; what was in the folder is replaced.

    Args:
        folder: ``shipped/models/<kind>`` of the source tree.
        card: Its card; ``version`` and ``files`` are filled in here.
        write: Writes its files into the folder it is given.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent))
    try:
        _fill(fresh, replace(card, version=SHIPPED), write)
        fresh.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _fill(folder: Path, card: Card, write: Callable[[Path], None]) -> str:
    """Write files and card of a version, to the disk, and return its name."""
    write(folder)
    files = sorted(path for path in folder.iterdir())
    bad = next((path for path in files if not path.is_file() or path.name == CARD_FILE), None)
    if bad is not None or not files:
        raise ModelFileError(f"{folder}: a model is one or more files beside {CARD_FILE}; {bad} is not accepted")
    card = replace(card, files={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files})
    if card.version != SHIPPED:
        card = replace(card, version="")
        write_card(folder, card)  # checks what the name is made of
        moment = datetime.fromisoformat(card.made_at).astimezone(UTC)
        card = replace(card, version=f"{moment:%Y%m%dT%H%M%SZ}-{digest(card)[:8]}")
    write_card(folder, card)
    for path in (*files, folder / CARD_FILE, folder):
        _sync(path)
    return card.version


def _known(kind: str, root: Path) -> Kind:
    for each in KINDS:
        if each == kind:
            return each
    raise refused(root, "kind", kind, f"one of {', '.join(KINDS)}")


def _file(card: Card, folder: Path, name: str) -> Path:
    if name not in card.files:
        raise refused(folder / CARD_FILE, "files", list(card.files), f"a file {name}")
    return folder / name


def _sweep(home: Path) -> None:
    """Delete what killed writers left."""
    for path in home.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_S:
                shutil.rmtree(path)


def _write_whole(path: Path, text: str) -> None:
    half = path.with_name(f".{path.name}.part")
    with half.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Make sure that a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


__all__ = [
    "CLASSES_FILE",
    "INTERFERENCE_FILE",
    "KINDS",
    "SHIPPED",
    "Card",
    "DamagedChoices",
    "DataSource",
    "DemandExperts",
    "Kind",
    "ModelFileError",
    "Registry",
    "load_coldstart",
    "load_demand",
    "load_interference",
    "write_shipped",
]
