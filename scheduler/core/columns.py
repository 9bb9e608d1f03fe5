"""Arrays that grow together, one row for each of many things."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_not

import numpy as np
from numpy.typing import NDArray

from cotenant.placement.fleet import Flags, Floats, Integers

_FIRST_SIZE = 64
_NOTHING = (object(),)


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


class NamedColumns(Columns):
    """The same, with the rows found by the ids of what they are of.

    Attributes:
        ids: The id of each row.
    """

    def __init__(self, **kinds: type) -> None:
        super().__init__(**kinds)
        self.ids: list[str] = []
        self._row: dict[str, int] = {}
        self._rests_on: dict[str, tuple[object, ...]] = {}

    def stale(self, name: str, *rests_on: object) -> int | None:
        """Return the row to be filled, a new one where there was none; None where it rests on the same objects."""
        if not any(map(is_not, self._rests_on.get(name, _NOTHING), rests_on)):
            return None
        self._rests_on[name] = rests_on
        row = self.row(name)
        return self.add(name) if row is None else row

    def row(self, name: str) -> int | None:
        """Return the row of that name; None when there is none."""
        return self._row.get(name)

    def row_of(self, name: str) -> int:
        """Return the row of that name; one that is not there is a KeyError."""
        return self._row[name]

    def add(self, name: str) -> int:
        """Add a row of a new name and return its number."""
        row = self._row[name] = self.grow()
        self.ids.append(name)
        return row

    def remove(self, name: str) -> None:
        """Forget a row if there is one."""
        row = self._row.pop(name, None)
        if row is None:
            return
        self._rests_on.pop(name, None)
        last, other = self.shrink(row), self.ids.pop()
        if last != row:
            self.ids[row] = other
            self._row[other] = row

    def rows_of(self, names: Iterable[str]) -> Integers:
        """Return the rows of those of these that have one."""
        known = (self._row.get(name) for name in names)
        return np.array([row for row in known if row is not None], dtype=np.int64)
