"""One writer, many readers: a small record in a memory-mapped file that nobody ever sees half written.

A record is ``generation`` (8 bytes) followed by two slots. The writer fills the slot that the present generation does
not name and then publishes it by advancing ``generation``, so the last complete value stays readable at every moment,
even when the writer is killed in the middle. Each slot repeats its generation and carries a CRC-32; a reader that meets
a slot being overwritten (the writer was two ahead) notices and reads again. All numbers are little-endian.
"""

from __future__ import annotations

import mmap
import struct
from binascii import crc32
from typing import Any

_GENERATION = struct.Struct("<Q")
_CRC = struct.Struct("<I4x")
_READ_ATTEMPTS = 100


def slot_size(payload: struct.Struct) -> int:
    """Return the bytes of one slot: generation, payload, checksum and padding."""
    return _GENERATION.size + payload.size + _CRC.size


def record_size(payload: struct.Struct) -> int:
    """Return the bytes of one record: generation and two slots."""
    return _GENERATION.size + 2 * slot_size(payload)


class RecordWriter:
    """Writes one record. There must be only one writer of a record at a time."""

    __slots__ = ("_buffer", "_generation", "_offset", "_slot", "_slot_size")

    def __init__(self, buffer: mmap.mmap, offset: int, payload: struct.Struct) -> None:
        self._buffer = buffer
        self._offset = offset
        self._slot = struct.Struct("<Q" + payload.format.lstrip("<"))
        self._slot_size = slot_size(payload)
        self._generation: int = _GENERATION.unpack_from(buffer, offset)[0]

    def write(self, *values: float) -> None:
        """Publish new values."""
        generation = self._generation + 1
        body = self._slot.pack(generation, *values)
        start = self._offset + 8 + (generation & 1) * self._slot_size
        self._buffer[start : start + self._slot_size] = body + _CRC.pack(crc32(body))
        self._buffer[self._offset : self._offset + 8] = _GENERATION.pack(generation)
        self._generation = generation


class RecordReader:
    """Reads one record; remembers which generation it saw last."""

    __slots__ = ("_buffer", "_end", "_offset", "_seen", "_slot", "_slot_size")

    def __init__(self, buffer: mmap.mmap, offset: int, payload: struct.Struct) -> None:
        self._buffer = buffer
        self._offset = offset
        self._end = offset + 8
        self._slot = struct.Struct("<Q" + payload.format.lstrip("<"))
        self._slot_size = slot_size(payload)
        self._seen = b""

    def changed(self) -> bool:
        """True when something was published since the last successful ``read`` (a few hundred nanoseconds)."""
        return self._buffer[self._offset : self._end] != self._seen

    def read(self) -> tuple[Any, ...] | None:
        """Return the published values, or None when there are none (or no complete ones) yet."""
        for _ in range(_READ_ATTEMPTS):
            seen = self._buffer[self._offset : self._end]
            (generation,) = _GENERATION.unpack(seen)
            if generation == 0:
                return None
            start = self._end + (generation & 1) * self._slot_size
            raw = self._buffer[start : start + self._slot_size]
            body = raw[: self._slot.size]
            if _CRC.unpack_from(raw, self._slot.size)[0] != crc32(body):
                continue
            stored, *values = self._slot.unpack(body)
            if stored != generation:
                continue
            self._seen = seen
            return tuple(values)
        return None
