"""The share word: how much of each of its devices a job may use now. Written by the host agent, read by the shim.

File layout (version 1, little-endian)::

    0   magic      8 bytes  b"CTSHARE\\0"
    8   version    u32      1
    12  count      u32      number of records
    16  stride     u32      128, bytes from one record to the next
    64  record 0            see ``records``; payload: epoch u64, revision u64, compute f64, memory_bytes u64
    64 + stride             record 1, and so on

Record *i* is the share with index *i* of the job on this host. A reader refuses a version it does not know.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from .records import RecordReader, RecordWriter

VERSION = 1
MAGIC = b"CTSHARE\0"
_HEADER = struct.Struct("<8sIII")
_PAYLOAD = struct.Struct("<QQdQ")
_FIRST = 64
_STRIDE = 128
_MAX_RECORDS = 4096


class ShareRecord(NamedTuple):
    """A share in force.

    Attributes:
        epoch: Fencing token of the lease.
        revision: Grows with every resize.
        compute: Fraction of the device's compute time, in (0, 1].
        memory_bytes: Device memory the job may use.
    """

    epoch: int
    revision: int
    compute: float
    memory_bytes: int


class ShareWordError(ValueError):
    """The file is not a share word this code can read."""


def create(path: str, shares: Sequence[ShareRecord]) -> ShareWriter:
    """Create the share word with one record per share and return its writer.

    Raises:
        ShareWordError: There is no share, or one has a value that is not accepted.
    """
    if not 1 <= len(shares) <= _MAX_RECORDS:
        raise ShareWordError(f"shares: {len(shares)} of them is not accepted; give 1 to {_MAX_RECORDS}")
    for share in shares:
        _check(share)
    temporary = f"{path}.new"
    with open(temporary, "wb") as file:
        file.write(_HEADER.pack(MAGIC, VERSION, len(shares), _STRIDE).ljust(_FIRST, b"\0"))
        file.write(bytes(_STRIDE * len(shares)))
    writer = ShareWriter(temporary)
    for index, share in enumerate(shares):
        writer.write(index, share)
    os.replace(temporary, path)  # readers only ever see a complete file
    return writer


class ShareWriter:
    """Writes the shares of one job. One writer at a time."""

    def __init__(self, path: str) -> None:
        self._buffer, self.count = _map(path, writable=True)
        self._records = [RecordWriter(self._buffer, _FIRST + i * _STRIDE, _PAYLOAD) for i in range(self.count)]

    def write(self, index: int, share: ShareRecord) -> None:
        """Put a new share in force.

        Raises:
            ShareWordError: A value is not accepted.
            IndexError: The job has no share with that index.
        """
        _check(share)
        self._records[index].write(*share)

    def close(self) -> None:
        """Unmap the file."""
        self._buffer.close()


class ShareReader:
    """Reads one share of a job.

    Raises:
        ShareWordError: The file is no share word, has an unknown version, or no record with that index.
        OSError: The file cannot be opened.
    """

    __slots__ = ("_buffer", "_record", "changed")

    def __init__(self, path: str, index: int) -> None:
        self._buffer, count = _map(path, writable=False)
        if not 0 <= index < count:
            self._buffer.close()
            raise ShareWordError(f"share index: {index} is not accepted; {path} has 0 to {count - 1}")
        self._record = RecordReader(self._buffer, _FIRST + index * _STRIDE, _PAYLOAD)
        self.changed = self._record.changed

    def read(self) -> ShareRecord | None:
        """Return the share in force; None when no complete record could be read."""
        values = self._record.read()
        return None if values is None else ShareRecord(*values)

    def close(self) -> None:
        """Unmap the file."""
        self._buffer.close()


def read_all(path: str) -> list[ShareRecord]:
    """Return all shares of a job, in index order.

    Raises:
        ShareWordError: The file is no share word or holds no complete record.
        OSError: The file cannot be opened.
    """
    shares = []
    for index in range(count_shares(path)):
        reader = ShareReader(path, index)
        share = reader.read()
        reader.close()
        if share is None:
            raise ShareWordError(f"{path}: record {index} holds no complete share")
        shares.append(share)
    return shares


def count_shares(path: str) -> int:
    """Return the number of shares the job has on this host."""
    buffer, count = _map(path, writable=False)
    buffer.close()
    return count


def _check(share: ShareRecord) -> None:
    if not 0.0 < share.compute <= 1.0:
        raise ShareWordError(f"compute: {share.compute!r} is not accepted; give a fraction in (0, 1]")
    for field in ("epoch", "revision", "memory_bytes"):
        value = getattr(share, field)
        if not 0 <= value < 1 << 64:
            raise ShareWordError(f"{field}: {value!r} is not accepted; give a whole number >= 0")


def _map(path: str, *, writable: bool) -> tuple[mmap.mmap, int]:
    descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if size < _FIRST:
            raise ShareWordError(f"{path}: {size} bytes is too short for a share word")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        buffer = mmap.mmap(descriptor, size, access=access)
    finally:
        os.close(descriptor)
    magic, version, count, stride = _HEADER.unpack_from(buffer, 0)
    if magic != MAGIC or version != VERSION or stride != _STRIDE or size < _FIRST + count * stride:
        buffer.close()
        raise ShareWordError(f"{path}: not a share word of version {VERSION}")
    return buffer, count
