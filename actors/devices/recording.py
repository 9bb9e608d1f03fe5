"""Recordings: what devices and jobs read over time, and the faults to inject, as a file of JSON lines.

The first line is the head, every other line a sample or a fault; ``docs/devices.md`` shows the format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from cotenant.forecasting.types import DeviceActivity, Reading

FORMAT = 1
_ACTIVITY = tuple(each.name for each in fields(DeviceActivity) if each.name != "util")
FaultKind = Literal["lost", "hang", "absurd", "pid_reuse", "missing"]


@dataclass(frozen=True, slots=True)
class RecordedGpu:
    """A GPU of the recording. Its id is made by the backend, so that many hosts can play one file."""

    gpu_type: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Levels:
    """Readings that hold from one sample to the next.

    Attributes:
        util: Utilisation, fraction of the device.
        memory_bytes: Device memory.
        host_cores: CPU cores used outside the device (jobs only).
        activity: What else the device says (devices only).
    """

    util: Reading = None
    memory_bytes: Reading = None
    host_cores: Reading = None
    activity: DeviceActivity | None = None


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """Readings from ``at_s`` on.

    ``devices`` is empty (a device then reads what its jobs add up to) or has one entry per GPU, None where the device
    says nothing. ``jobs`` goes by pattern (``*`` and ``?``): the first that matches a job's id is the job's; a job that
    none matches has no readings.
    """

    at_s: float
    devices: tuple[Levels | None, ...]
    jobs: Mapping[str, Levels]


@dataclass(frozen=True, slots=True)
class Fault:
    """A scripted fault.

    Attributes:
        at_s: When it begins, seconds after the backend was made.
        kind: "lost": the GPU is gone; "hang": the driver does not answer; "absurd": impossible values; "pid_reuse":
            the job's counters begin again at 0, as if a stranger had got its process number; "missing": no reading.
        gpu: The GPU it hits; None = all. "pid_reuse" and "missing" hit jobs only, on whatever GPU for "pid_reuse".
        job: Pattern of the jobs hit; "*" = all, and only then the GPU's own readings.
        for_s: How long it lasts; None = for ever. "pid_reuse" has no length.
    """

    at_s: float
    kind: FaultKind
    gpu: int | None = None
    job: str = "*"
    for_s: float | None = None

    def holds(self, now_s: float) -> bool:
        """Whether the fault is on at ``now_s``."""
        return now_s >= self.at_s and (self.for_s is None or now_s < self.at_s + self.for_s)


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording.

    Attributes:
        gpus: The GPUs, in index order.
        samples: In order of time; the first is at 0.
        faults: The faults.
        period_s: The samples begin again after this time; None = the last one holds for ever.
    """

    gpus: tuple[RecordedGpu, ...]
    samples: tuple[RecordedSample, ...]
    faults: tuple[Fault, ...] = ()
    period_s: float | None = None


class RecordingError(ValueError):
    """A recording that cannot be played; names line and field."""

    def __init__(self, line: int, field: str, value: object, accepted: str) -> None:
        super().__init__(f"line {line}, {field}: {value!r} is not accepted; give {accepted}")


def load_recording(path: Path) -> Recording:
    """Read a recording.

    Raises:
        RecordingError: The first thing wrong with it.
        OSError: The file cannot be read.
    """
    lines = [
        _Line(number, _parse(number, text))
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if text.strip()
    ]
    if not lines:
        raise RecordingError(1, "file", "", 'a head such as {"cotenant_replay": 1, "gpus": [...]}')
    head, *rest = lines
    if head.get("cotenant_replay") != FORMAT:
        raise head.error("cotenant_replay", str(FORMAT))
    gpus = tuple(_gpu(head.number, index, entry) for index, entry in enumerate(head.list("gpus")))
    if not gpus:
        raise head.error("gpus", "at least one GPU")
    period_s = head.optional_number("period_s")
    head.check_fields("cotenant_replay", "gpus", "period_s")
    faults = tuple(_fault(line, len(gpus)) for line in rest if "fault" in line.fields)
    samples = tuple(_sample(line, len(gpus)) for line in rest if "fault" not in line.fields)
    _check_times(samples, [line for line in rest if "fault" not in line.fields], head, period_s)
    return Recording(gpus, samples, faults, period_s)


def save_recording(recording: Recording, path: Path) -> None:
    """Write a recording so that ``load_recording`` returns an equal one."""
    head: dict[str, Any] = {
        "cotenant_replay": FORMAT,
        "gpus": [asdict(gpu) for gpu in recording.gpus],
        "period_s": recording.period_s,
    }
    samples = (
        {
            "t": sample.at_s,
            "devices": [None if levels is None else _device_fields(levels) for levels in sample.devices],
            "jobs": {
                pattern: {name: getattr(levels, name) for name in ("util", "memory_bytes", "host_cores")}
                for pattern, levels in sample.jobs.items()
            },
        }
        for sample in recording.samples
    )
    faults = (
        {"t": fault.at_s, "fault": fault.kind, "gpu": fault.gpu, "job": fault.job, "for_s": fault.for_s}
        for fault in recording.faults
    )
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in (head, *samples, *faults))
    path.write_text(text, encoding="utf-8")


def _parse(number: int, text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordingError(number, f"column {error.colno}", text[:40], f"JSON ({error.msg})") from error
    if not isinstance(fields, dict):
        raise RecordingError(number, "line", text[:40], "a JSON object")
    return fields


@dataclass(frozen=True, slots=True)
class _Line:
    """The fields of one line (or of an object inside it), taken out with checks."""

    number: int
    fields: dict[str, Any]
    inside: str = ""

    def error(self, field: str, accepted: str) -> RecordingError:
        return RecordingError(self.number, self.inside + field, self.get(field), accepted)

    def get(self, field: str) -> Any:
        return self.fields.get(field)

    def check_fields(self, *known: str) -> None:
        for field in self.fields:
            if field not in known:
                raise RecordingError(self.number, self.inside + field, self.get(field), f"only {', '.join(known)}")

    def optional_number(self, field: str) -> float | None:
        value = self.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise self.error(field, "a finite number >= 0, or null")
        return float(value)

    def number_of(self, field: str) -> float:
        value = self.optional_number(field)
        if value is None:
            raise self.error(field, "a finite number >= 0")
        return value

    def text(self, field: str) -> str:
        value = self.get(field)
        if not isinstance(value, str) or not value:
            raise self.error(field, "a text")
        return value

    def list(self, field: str) -> list[Any]:
        value = self.fields.get(field, [])
        if not isinstance(value, list):
            raise self.error(field, "a list")
        return value

    def object(self, field: str, value: Any) -> _Line:
        if not isinstance(value, dict):
            raise RecordingError(self.number, self.inside + field, value, "an object")
        return _Line(self.number, value, f"{self.inside}{field}.")


def _gpu(number: int, index: int, entry: Any) -> RecordedGpu:
    line = _Line(number, {}).object(f"gpus[{index}]", entry)
    line.check_fields("gpu_type", "memory_bytes")
    memory_bytes = line.number_of("memory_bytes")
    if memory_bytes < 1:
        raise line.error("memory_bytes", "a number >= 1")
    return RecordedGpu(line.text("gpu_type"), int(memory_bytes))


def _sample(line: _Line, gpus: int) -> RecordedSample:
    line.check_fields("t", "devices", "jobs")
    devices = line.list("devices")
    if len(devices) not in (0, gpus):
        raise line.error("devices", f"one entry for each of the {gpus} GPUs, or none")
    jobs = line.object("jobs", line.fields.get("jobs", {}))
    return RecordedSample(
        at_s=line.number_of("t"),
        devices=tuple(
            None if entry is None else _device_levels(line.object(f"devices[{index}]", entry))
            for index, entry in enumerate(devices)
        ),
        jobs={pattern: _job_levels(jobs.object(pattern, entry)) for pattern, entry in jobs.fields.items()},
    )


def _job_levels(line: _Line) -> Levels:
    line.check_fields("util", "memory_bytes", "host_cores")
    util, memory_bytes = line.optional_number("util"), line.optional_number("memory_bytes")
    return Levels(util, memory_bytes, line.optional_number("host_cores"))


def _device_levels(line: _Line) -> Levels:
    line.check_fields("util", "memory_bytes", *_ACTIVITY)
    activity = DeviceActivity(**{name: line.optional_number(name) for name in _ACTIVITY})
    return Levels(
        line.optional_number("util"),
        line.optional_number("memory_bytes"),
        activity=None if activity == DeviceActivity() else activity,
    )


def _device_fields(levels: Levels) -> dict[str, Reading]:
    said = {} if levels.activity is None else {name: getattr(levels.activity, name) for name in _ACTIVITY}
    known = {name: value for name, value in said.items() if value is not None}
    return {"util": levels.util, "memory_bytes": levels.memory_bytes, **known}


def _fault(line: _Line, gpus: int) -> Fault:
    line.check_fields("t", "fault", "gpu", "job", "for_s")
    kind = line.get("fault")
    if kind not in get_args(FaultKind):
        raise line.error("fault", f"one of {', '.join(get_args(FaultKind))}")
    gpu = line.get("gpu")
    if gpu is not None and (isinstance(gpu, bool) or not isinstance(gpu, int) or not 0 <= gpu < gpus):
        raise line.error("gpu", f"0 to {gpus - 1}, or null for all")
    job = "*" if line.get("job") is None else line.text("job")
    return Fault(line.number_of("t"), kind, gpu, job, line.optional_number("for_s"))


def _check_times(samples: tuple[RecordedSample, ...], lines: list[_Line], head: _Line, period_s: float | None) -> None:
    if not samples:
        raise RecordingError(head.number, "file", "no sample", "at least one line with t and jobs or devices")
    earlier = -math.inf
    for sample, line in zip(samples, lines, strict=True):
        if sample.at_s <= earlier:
            raise line.error("t", f"a time after {earlier:g}, that of the sample before")
        if earlier == -math.inf and sample.at_s != 0:
            raise line.error("t", "0 in the first sample")
        earlier = sample.at_s
    if period_s is not None and period_s <= earlier:
        raise head.error("period_s", f"a time after {earlier:g}, that of the last sample, or null")
