"""What one process of a job reports: written by the shim at step boundaries, read by the host agent.

File ``report-<pid>`` (version 1, little-endian)::

    0   magic    8 bytes  b"CTREPRT\\0"
    8   version  u32      1
    12  size     u32      bytes of the payload
    64  record            see ``records``; payload: pid u32, share_index u32, start_ticks u64, steps u64,
                          last_step_s f64, throttled_s f64, controls u64

Later versions append fields; the reader refuses a version it does not know.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
from typing import NamedTuple

from .records import RecordReader, RecordWriter, record_size

VERSION = 1
MAGIC = b"CTREPRT\0"
PREFIX = "report-"
_HEADER = struct.Struct("<8sII")
_PAYLOAD = struct.Struct("<IIQQddQ")
_FIRST = 64
_SIZE = _FIRST + record_size(_PAYLOAD)


class Controls(enum.IntFlag):
    """What of a process is under control."""

    PINNED = 1  # runs on the device's cores only
    STEPS = 2  # an optimizer step was seen: compute is held to the share at step boundaries
    COMPUTE = 4  # the share is below 1, so the cap is in force now
    MEMORY = 8  # an allocation beyond the memory share fails in this process


class ProcessReport(NamedTuple):
    """One process' report.

    Attributes:
        pid: The process.
        share_index: Which of the job's shares it uses.
        start_ticks: Its start time as in field 22 of ``/proc/PID/stat``; with the pid, its identity.
        steps: Optimizer rounds so far.
        last_step_s: ``time.monotonic()`` at the last step; 0 when there was none.
        throttled_s: Seconds it was held back by its own compute share.
        controls: A ``Controls`` bit field.
    """

    pid: int
    share_index: int
    start_ticks: int
    steps: int
    last_step_s: float
    throttled_s: float
    controls: int


class ReportWriter:
    """Writes the report of the calling process into ``job_dir``.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, job_dir: str, share_index: int) -> None:
        self._identity = (os.getpid(), share_index, start_ticks("self") or 0)
        self.path = f"{job_dir}/{PREFIX}{os.getpid()}"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, _HEADER.pack(MAGIC, VERSION, _PAYLOAD.size).ljust(_SIZE, b"\0"))
            buffer = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._record = RecordWriter(buffer, _FIRST, _PAYLOAD)

    def write(self, steps: int, last_step_s: float, throttled_s: float, controls: int) -> None:
        """Publish the present state (about a microsecond)."""
        self._record.write(*self._identity, steps, last_step_s, throttled_s, controls)


def read_report(path: str) -> ProcessReport | None:
    """Return the report in ``path``; None when the file is gone, foreign or not complete yet."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if os.fstat(descriptor).st_size != _SIZE:
            return None
        with mmap.mmap(descriptor, _SIZE, access=mmap.ACCESS_READ) as buffer:
            if _HEADER.unpack_from(buffer, 0) != (MAGIC, VERSION, _PAYLOAD.size):
                return None
            values = RecordReader(buffer, _FIRST, _PAYLOAD).read()
    finally:
        os.close(descriptor)
    return None if values is None else ProcessReport(*values)


def read_reports(job_dir: str) -> list[ProcessReport]:
    """Return the reports of all processes of a job, those that have ended included; in pid order.

    There are none when the directory is gone: a guest may outlive the lease it was under.
    """
    try:
        names = sorted(name for name in os.listdir(job_dir) if name.startswith(PREFIX))
    except FileNotFoundError:
        return []
    reports = [read_report(f"{job_dir}/{name}") for name in names]
    return sorted(report for report in reports if report is not None)


def start_ticks(pid: int | str) -> int | None:
    """Return when a process started, in clock ticks since boot; None when there is none (or only its exit status)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_alive(report: ProcessReport) -> bool:
    """True while the process that wrote the report still exists."""
    return start_ticks(report.pid) == report.start_ticks
