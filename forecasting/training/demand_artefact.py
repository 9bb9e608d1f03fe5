"""Trained demand experts on disk: named arrays and a card in one ``.npz`` file, never pickled."""

from __future__ import annotations

import json
import lzma
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from cotenant.forecasting.demand.engine import Expert
from cotenant.forecasting.demand.nets import GruExpert, TcnExpert
from cotenant.forecasting.demand.trees import TreesExpert

Kind = Literal["gru", "tcn", "trees"]
KINDS: tuple[Kind, ...] = get_args(Kind)


# What numpy and the libraries below it raise of a damaged archive; RuntimeError: of one that is encrypted.
_DAMAGED = (
    *(ValueError, KeyError, EOFError, AttributeError, TypeError, OverflowError, SyntaxError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError),
)


class BrokenArtefact(ValueError):
    """A file that should hold a trained expert does not; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class DemandArtefact:
    """One trained expert.

    Attributes:
        kind: What it is.
        horizons: Ticks ahead it was trained for.
        arrays: Its weights.
        card: Where it comes from: sources, number of examples, seed, licence …; plain JSON values.
    """

    kind: Kind
    horizons: tuple[int, ...]
    arrays: Mapping[str, npt.NDArray[np.generic]]
    card: Mapping[str, Any]

    def expert(self, horizons: Sequence[int], rows: int) -> Expert:
        """Return the expert ready to serve ``rows`` series; ValueError when it was made for something else."""
        if self.kind == "gru":
            return GruExpert(self.arrays, horizons, rows)
        if self.kind == "tcn":
            return TcnExpert(self.arrays, horizons, rows)
        return TreesExpert(self.arrays, horizons)


def save_artefact(artefact: DemandArtefact, path: Path) -> None:
    """Write the artefact; the file appears whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    card = json.dumps({"kind": artefact.kind, **artefact.card}, allow_nan=False)
    with temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, card=np.array(card), **dict(artefact.arrays))
    temporary.replace(path)


def load_artefact(path: Path) -> DemandArtefact:
    """Read an artefact.

    Raises:
        BrokenArtefact: The file is cut short, is something else, or lacks what its kind needs.
        OSError: The file cannot be read.
    """
    try:
        with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        card = json.loads(str(arrays.pop("card")))
        kind = card.pop("kind")
        horizons = tuple(int(ahead) for ahead in arrays["horizons"].ravel())
    except _DAMAGED as error:
        raise BrokenArtefact(f"{path.name} holds no trained demand expert: {error}") from error
    if kind not in KINDS:
        raise BrokenArtefact(f"{path.name}: kind {kind!r} is not accepted; known are {', '.join(KINDS)}")
    artefact = DemandArtefact(kind, horizons, arrays, card)
    try:
        artefact.expert(horizons, 1)
    except ValueError as error:
        raise BrokenArtefact(f"{path.name}: {error}") from error
    return artefact
