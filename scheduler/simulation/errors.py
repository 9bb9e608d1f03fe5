"""What can go wrong in a simulation."""

from __future__ import annotations

from pathlib import Path

Place = int | str  # a line from 1, or the name of what stands for one


class TraceError(ValueError):
    """A trace file cannot be used. The message names the file, the place, the field, the value and what is accepted.

    A place is a line, or what stands for one where a file is not read line by line: ``jobs[0]``.
    """

    def __init__(self, path: Path, place: Place | None, field: str, value: object, accepted: str) -> None:
        where = f"{path}" if place is None else f"{path}, {named(place)}"
        super().__init__(f"{where}: {field}: {value!r} is not accepted; give {accepted}")


def named(place: Place) -> str:
    """Return a place in a file as messages call it."""
    return f"line {place}" if isinstance(place, int) else place


def counted(number: int, thing: str) -> str:
    """Return so many things in words: "1 job", "1,200 jobs"."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


class SimulationError(Exception):
    """The simulation cannot go on, or a policy did what is impossible. The message says what."""
