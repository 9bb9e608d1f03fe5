"""What one process of a job reports: written by the shim at step boundaries, read by the host agent.

File ``report-<pid>`` (version 2, little-endian)::

    0    magic    8 bytes  b"CTREPRT\\0"
    8    version  u32      2
    12   size     u32      bytes of the payload of the first record
    64   record            see ``records``; payload: pid u32, share_index u32, start_ticks u64, steps u64,
                           last_step_s f64, throttled_s f64, controls u64
    200  record            the operator mix; payload: nine fractions f64, launches per step f64, step u64,
                           batch size u64 (0 = not known)
    432  step times        64 f64: how long step n took, in seconds, at place (n - 1) mod 64; 0 = not known

Version 1 ended after the first record. Later versions append; the reader refuses a version it does not know.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
from typing import NamedTuple

from .records import RecordReader, RecordWriter, record_size

VERSION = 2
MAGIC = b"CTREPRT\0"
PREFIX = "report-"
_HEADER = struct.Struct("<8sII")
_PAYLOAD = struct.Struct("<IIQQddQ")
_FIRST = 64
_SIZE_1 = _FIRST + record_size(_PAYLOAD)
_MIX = struct.Struct("<10dQQ")
_STEP = struct.Struct("<d")
_KEPT = 64
_RING = _SIZE_1 + record_size(_MIX)
_SIZES = {1: _SIZE_1, 2: _RING + _KEPT * _STEP.size}
_TOLD = 48  # the oldest of the kept ones may be overwritten while they are read
CLASSES = ("gemm", "conv", "attention", "elementwise", "normalisation", "reduce", "memcpy", "collective", "other")


class Controls(enum.IntFlag):
    """What of a process is under control."""

    PINNED = 1  # runs on the device's cores only
    STEPS = 2  # an optimizer step was seen: compute is held to the share at step boundaries
    COMPUTE = 4  # the share is below 1, so the cap is in force now
    MEMORY = 8  # an allocation beyond the memory share fails in this process


class MixReport(NamedTuple):
    """The operator mix of a process.

    Attributes:
        fractions: Of the operators' time, in the order of ``CLASSES``.
        launches_per_step: Kernels (``cpu`` device: operators) per step.
        step: The step at which it was measured.
        batch_size: Leading dimension of the first operator's input; 0 = not known.
    """

    fractions: tuple[float, ...]
    launches_per_step: float
    step: int
    batch_size: int


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
        step_times_s: How long the last steps took, the newest last; those that are not known are left out.
        mix: The operator mix; None when none was measured.
    """

    pid: int
    share_index: int
    start_ticks: int
    steps: int
    last_step_s: float
    throttled_s: float
    controls: int
    step_times_s: tuple[float, ...] = ()
    mix: MixReport | None = None


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
            size = _SIZES[VERSION]
            os.write(descriptor, _HEADER.pack(MAGIC, VERSION, _PAYLOAD.size).ljust(size, b"\0"))
            self._buffer = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._record = RecordWriter(self._buffer, _FIRST, _PAYLOAD)

    def write(self, steps: int, last_step_s: float, throttled_s: float, controls: int) -> None:
        """Publish the present state (about a microsecond)."""
        self._record.write(*self._identity, steps, last_step_s, throttled_s, controls)

    def note_step_time(self, step: int, seconds: float) -> None:
        """Note how long a step took; 0 = not known. Call before ``write`` tells of the step."""
        _STEP.pack_into(self._buffer, _RING + (step - 1) % _KEPT * _STEP.size, seconds)

    def write_mix(self, mix: MixReport) -> None:
        """Publish an operator mix."""
        RecordWriter(self._buffer, _SIZE_1, _MIX).write(*mix.fractions, mix.launches_per_step, mix.step, mix.batch_size)


def read_report(path: str) -> ProcessReport | None:
    """Return the report in ``path``; None when the file is gone, foreign or not complete yet."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(descriptor).st_size
        if size not in _SIZES.values():
            return None
        with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as buffer:
            if not _is_report(buffer):
                return None
            values = RecordReader(buffer, _FIRST, _PAYLOAD).read()
            if values is None or size == _SIZES[1]:
                return None if values is None else ProcessReport(*values)
            report = ProcessReport(*values)
            return report._replace(step_times_s=_step_times(buffer, report.steps), mix=_mix(buffer))
    finally:
        os.close(descriptor)


class ThrottleReader:
    """Follows how long one process has been held back, through a file that stays open: two microseconds a look.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no report, of no version that is known, or not complete yet.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if not _is_report(self._buffer):
            self._buffer.close()
            raise ValueError(f"{path} is no report")
        self._record = RecordReader(self._buffer, _FIRST, _PAYLOAD)

    def read(self) -> tuple[int, float] | None:
        """Return the index of its share and the seconds so far; None when it has told nothing yet."""
        values = self._record.read()
        return None if values is None else (values[1], values[5])

    def close(self) -> None:
        """Close the file. Call once."""
        self._buffer.close()


def _is_report(buffer: mmap.mmap) -> bool:
    if len(buffer) < _HEADER.size:
        return False
    magic, version, payload = _HEADER.unpack_from(buffer, 0)
    return (magic, _SIZES.get(version), payload) == (MAGIC, len(buffer), _PAYLOAD.size)


def _step_times(buffer: mmap.mmap, steps: int) -> tuple[float, ...]:
    ring = struct.unpack_from(f"<{_KEPT}d", buffer, _RING)
    numbers = range(max(1, steps - _TOLD + 1), steps + 1)
    return tuple(seconds for number in numbers if (seconds := ring[(number - 1) % _KEPT]) > 0.0)


def _mix(buffer: mmap.mmap) -> MixReport | None:
    values = RecordReader(buffer, _SIZE_1, _MIX).read()
    return None if values is None else MixReport(values[:9], *values[9:])


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
