"""Arrays that grow together, one row for each of many things."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cotenant.placement.fleet import Flags, Floats, Integers

_FIRST_SIZE = 64


class Columns:
    """Arrays that grow together; rows are taken and given back one at a time."""

    def __init__(self, **kinds: type) -> None:
        self._kinds = kinds
        self.size = 0
        for name, kind in kinds.items():
            setattr(self, f"_{name}", np.zeros(_FIRST_SIZE, dtype=kind))

    def grow(self) -> int:
        """Add a row and return its number."""
        row = self.size
        self.size += 1
        if row >= len(self.whole(next(iter(self._kinds)))):
            for name in self._kinds:
                old = self.whole(name)
                setattr(self, f"_{name}", np.concatenate([old, np.zeros_like(old)]))
        return row

    def shrink(self, row: int) -> int:
        """Give a row back: the last one takes its place. Returns the number the last one had."""
        self.size = last = self.size - 1
        for name in self._kinds:
            whole = self.whole(name)
            whole[row] = whole[last]
        return last

    def fill(self, row: int, **values: float) -> None:
        """Set the values of a row."""
        for name, value in values.items():
            self.whole(name)[row] = value

    def whole(self, name: str) -> NDArray[np.generic]:
        """Return an array with room for more."""
        array: NDArray[np.generic] = getattr(self, f"_{name}")
        return array

    def floats(self, name: str) -> Floats:
        """Return an array of numbers, shape (rows,)."""
        array: Floats = getattr(self, f"_{name}")[: self.size]
        return array

    def integers(self, name: str) -> Integers:
        """Return an array of whole numbers, shape (rows,)."""
        array: Integers = getattr(self, f"_{name}")[: self.size]
        return array

    def flags(self, name: str) -> Flags:
        """Return an array of truth values, shape (rows,)."""
        array: Flags = getattr(self, f"_{name}")[: self.size]
        return array
