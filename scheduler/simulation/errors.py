"""What a user of the simulator can do wrong."""

from __future__ import annotations

from pathlib import Path


class TraceError(ValueError):
    """A trace file cannot be used. The message names the file, the line, the field, the value and what is accepted."""

    def __init__(self, path: Path, line: int | None, field: str, value: object, accepted: str) -> None:
        where = f"{path}" if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {field}: {value!r} is not accepted; give {accepted}")
