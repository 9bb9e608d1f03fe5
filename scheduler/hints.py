"""The one place where hints are read, whether they come from a command line, Ray metadata, HTTP, YAML or Python.

Every reader takes any value and either returns what :class:`Hints` holds or raises ``_Refused``, which
:func:`parse_hints` turns into a :class:`HintError` naming the hint, the value and what is accepted.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from numbers import Integral, Real
from typing import NamedTuple, cast, get_args

from cotenant.scheduler.core.model import Checkpoint, Gang, Hints, Isolation, PriorityClass, RestartPolicy
from cotenant.scheduler.errors import HintError

METADATA_PREFIX = "cotenant."

_MAX_TEXT = 64  # longer texts are mistakes, and converting them could take long
_MAX_BYTES = 2**60
_MAX_SECONDS = 10 * 365 * 86400.0
_MAX_GRACE_S = 3600.0
_MAX_UNIX_S = 2.0**38  # beyond the year 9999
_MAX_COUNT = 2**31 - 1
_MAX_PARAMETERS = 10**15
_MAX_GPUS = 4096
_MAX_CPUS = 4096
_LEAST_CPUS = 0.001
_MAX_SLOWDOWN = 100.0
_BYTES_PER_UNIT = {
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
    **{unit: 1024**power for power, unit in enumerate(("kib", "mib", "gib", "tib"), start=1)},
}
_MAX_LABELS = 32
_LABEL_KINDS = ("group", "tenant")
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_PER_COUNT_UNIT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
_SIZE = re.compile(rf"({_NUMBER.pattern})\s*([a-zA-Z]*)")
_DURATION = re.compile(
    rf"(?:({_NUMBER.pattern})d)?\s*(?:({_NUMBER.pattern})h)?\s*(?:({_NUMBER.pattern})m)?\s*(?:({_NUMBER.pattern})s)?"
)
_DURATION_UNITS_S = (86400.0, 3600.0, 60.0, 1.0)
_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_JOB_ID_ACCEPTED = 'letters, digits, ".", "_", "-", starting with a letter or digit (at most 128 characters)'


class _Refused(ValueError):
    """The value is not accepted; the caller knows for which hint."""


def _text(value: object) -> str:
    """Return a non-empty, stripped text of bounded length."""
    if not isinstance(value, str):
        raise _Refused
    text = value.strip()
    _require(0 < len(text) <= _MAX_TEXT)
    return text


def _real(value: object) -> float:
    """Return a finite number given as a number or as plain decimal text."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError as error:
            raise _Refused from error
    else:
        text = _text(value)
        _require(_NUMBER.fullmatch(text) is not None)
        number = float(text)
    _require(math.isfinite(number))
    return number


def _require(condition: bool) -> None:
    if not condition:
        raise _Refused


def _within(number: float, low: float, high: float) -> float:
    _require(low <= number <= high)
    return number


def _whole(value: object) -> int:
    """Return a whole number; 2.0 counts as 2, since JSON knows only one kind of number."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    real = _real(value)
    _require(real == int(real))
    return int(real)


def _count(limit: int) -> Callable[[object, float], int]:
    def read(value: object, _now: float) -> int:
        number = _whole(value)
        _require(1 <= number <= limit)
        return number

    return read


def _size(value: object, _now: float) -> int:
    if isinstance(value, str):
        match = _SIZE.fullmatch(_text(value))
        if match is None:
            raise _Refused
        factor = _BYTES_PER_UNIT.get(match[2].lower() or "b")
        if factor is None:
            raise _Refused
        value = round(float(match[1]) * factor)
    number = _whole(value)
    _require(1 <= number <= _MAX_BYTES)
    return number


def _parameters(value: object, _now: float) -> int:
    if isinstance(value, str):
        match = _SIZE.fullmatch(_text(value))
        if match is None or match[2].lower() not in _PER_COUNT_UNIT:
            raise _Refused
        number, unit = match[1], match[2].lower()
        value = round(float(number) * _PER_COUNT_UNIT[unit]) if unit else number
    count = _whole(value)
    _require(1 <= count <= _MAX_PARAMETERS)
    return count


def _yes_or_no(value: object, _now: float) -> bool:
    if isinstance(value, bool):
        return value
    text = _text(value).lower()
    _require(text in _YES or text in _NO)
    return text in _YES


def _share(value: object) -> float:
    """Return a fraction given as 0.4 or "40%"."""
    if isinstance(value, str) and value.strip().endswith("%"):
        return _real(value.strip()[:-1]) / 100.0
    return _real(value)


def _compute(value: object, _now: float) -> float:
    fraction = _within(_share(value), 0.0, 1.0)
    _require(fraction > 0.0)
    return fraction


def _cpus(value: object, _now: float) -> float:
    return _within(round(_real(value), 3), _LEAST_CPUS, _MAX_CPUS)


def _criticality(value: object, _now: float) -> float:
    return _within(_share(value), 0.0, 1.0)


def _max_slowdown(value: object, _now: float) -> float:
    percent = isinstance(value, str) and value.strip().endswith("%")
    return _within(_share(value) + (1.0 if percent else 0.0), 1.0, _MAX_SLOWDOWN)


def _duration(value: object, _now: float) -> float:
    seconds = _seconds(value)
    _require(0.0 < seconds <= _MAX_SECONDS)
    return seconds


def _seconds(value: object) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if not isinstance(value, str) or _NUMBER.fullmatch(value.strip()):
        return _real(value)
    match = _DURATION.fullmatch(_text(value))
    if match is None:
        raise _Refused
    return sum(float(part) * unit for part, unit in zip(match.groups(), _DURATION_UNITS_S, strict=True) if part)


def _deadline(value: object, now: float) -> float:
    moment = value if isinstance(value, datetime) else _timestamp(value)
    if moment is None:
        until = now + _duration(value, now)
        _require(now < until)  # less than the clock can tell is no time
        return until
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise _Refused
    seconds = moment.timestamp()
    _require(now < seconds <= now + _MAX_SECONDS)
    return seconds


def _timestamp(value: object) -> datetime | None:
    """Return the moment an ISO 8601 text names; None when it is no such text (20260101 is a number of seconds)."""
    if not isinstance(value, str) or "-" not in value or len(value) > _MAX_TEXT:
        return None
    try:
        return datetime.fromisoformat(value.strip())
    except ValueError:
        return None


def _identifier(value: object, _now: float) -> str:
    text = _text(value)
    _require(_IDENTIFIER.fullmatch(text) is not None)
    return text


def _labels(value: object, now: float) -> str:
    """Return "group:NAME" and "tenant:NAME", separated by commas: sorted, and each once."""
    if not isinstance(value, str) or len(value) > _MAX_LABELS * 2 * _MAX_TEXT:
        raise _Refused
    found: set[str] = set()
    for text in value.split(","):
        kind, _, name = text.strip().partition(":")
        _require(kind in _LABEL_KINDS)
        found.add(f"{kind}:{_identifier(name, now)}")
    _require(len(found) <= _MAX_LABELS)
    return ",".join(sorted(found))


def _one_of(choices: tuple[str, ...]) -> Callable[[object, float], str]:
    def read(value: object, _now: float) -> str:
        text = _text(value).lower()
        _require(text in choices)
        return text

    return read


class HintDoc(NamedTuple):
    """One line of the manual. ``default`` is what holds when nothing is said."""

    name: str
    accepted: str
    default: str
    meaning: str


@dataclass(frozen=True, slots=True)
class _Hint:
    field: str  # of Hints
    read: Callable[[object, float], int | float | str | bool]
    accepted: str
    meaning: str
    default: str = ""  # "" = the default of the field of Hints


_DURATIONS = 'seconds (90) or a duration with units d, h, m, s ("2h", "1h30m", "90s")'
_NAME = 'a short name of letters, digits, ".", "_", "-" (at most 63 characters)'


def _choices(kind: object) -> tuple[str, ...]:
    return cast(tuple[str, ...], get_args(kind))


def _listed(kind: object) -> str:
    *first, last = _choices(kind)
    return f"{', '.join(first)} or {last}"


def _grace(value: object, _now: float) -> float:
    return _within(_duration(value, _now), 0.0, _MAX_GRACE_S)


_HINTS: Mapping[str, _Hint] = {
    "gpus": _Hint(
        "gpus", _count(_MAX_GPUS), f"a whole number from 1 to {_MAX_GPUS}", "Number of GPUs, granted all or nothing."
    ),
    "gpu_memory": _Hint(
        "gpu_memory",
        _size,
        f'a positive size ("2GiB", "512MiB", "8GB") or a whole number of bytes, at most {_MAX_BYTES >> 40}TiB',
        "Device memory to reserve on each GPU; what is not used of it goes to jobs that wait (docs/placement.md).",
        "forecast",
    ),
    "compute": _Hint(
        "compute",
        _compute,
        'a fraction in (0, 1] in plain decimals (0.4) or a percentage ("40%")',
        "Compute to guarantee on each GPU, as a fraction of its compute time.",
        "forecast",
    ),
    "cpus": _Hint(
        "cpus",
        _cpus,
        f"a number from {_LEAST_CPUS} to {_MAX_CPUS}",
        "Processor cores of the host to reserve for each GPU (docs/placement.md).",
        "not counted",
    ),
    "priority": _Hint("priority", _one_of(_choices(PriorityClass)), _listed(PriorityClass), "Priority class."),
    "deadline": _Hint(
        "deadline_s",
        _deadline,
        f'{_DURATIONS} from now, or a future ISO 8601 time with its zone ("2030-01-31T18:00:00+00:00")',
        "When the job should be done.",
        "none",
    ),
    "criticality": _Hint(
        "criticality",
        _criticality,
        'a fraction in [0, 1] (0.5) or a percentage ("50%")',
        "How bad it is when the job is late.",
        "none",
    ),
    "max_slowdown": _Hint(
        "max_slowdown",
        _max_slowdown,
        f'a factor from 1 to {_MAX_SLOWDOWN:.0f} (1.2) or a percentage of extra time ("20%")',
        "Largest slowdown the job accepts from its neighbours, compared with running alone.",
        "setting placement.default_max_slowdown",
    ),
    "isolation": _Hint(
        "isolation",
        _one_of(_choices(Isolation)),
        _listed(Isolation),
        'How strictly the job is kept apart: "hard" never shares a GPU, "none" is not capped (docs/enforcement.md).',
    ),
    "group": _Hint("group", _identifier, _NAME, "What the job is one of, as the replicas of a service.", "none"),
    "anti_affinity": _Hint(
        "anti_affinity",
        _labels,
        f'"group:NAME" or "tenant:NAME", or up to {_MAX_LABELS} of them with commas between ("group:web,tenant:ml")',
        "Jobs to share no GPU with, of a group or a tenant; holds both ways.",
        "none",
    ),
    "gang": _Hint(
        "gang",
        _one_of(_choices(Gang)),
        _listed(Gang),
        "Where the GPUs of one job may lie: all on one host, or anywhere in the cluster.",
    ),
    "expected_duration": _Hint(
        "expected_duration_s", _duration, _DURATIONS, "How long it would take alone on its fastest GPU.", "none"
    ),
    "framework": _Hint("framework", _identifier, _NAME, 'Framework of the program, for example "torch".', "none"),
    "batch_size": _Hint(
        "batch_size", _count(_MAX_COUNT), f"a whole number from 1 to {_MAX_COUNT}", "Samples per step.", "none"
    ),
    "model": _Hint(
        "model",
        _identifier,
        _NAME,
        'Architecture, for example "resnet50"; by it runs of other programs are found.',
        "none",
    ),
    "model_family": _Hint(
        "model_family", _identifier, _NAME, 'What the model belongs to, for example "image_classification".', "none"
    ),
    "parameters": _Hint(
        "parameters",
        _parameters,
        'a whole number from 1 to 1000T, in full or with K, M, B or T ("25.6M", "1.3B")',
        "Number of weights of the model.",
        "none",
    ),
    "operator_mix": _Hint(
        "operator_mix",
        _yes_or_no,
        "true or false (also yes, no, on, off, 1, 0)",
        "Whether the operators of a few steps are profiled (docs/signatures.md).",
        "setting profiler.operator_mix",
    ),
    "queue": _Hint(
        "queue", _identifier, _NAME, "Queue the job waits in; where the settings name queues, one of those."
    ),
    "tenant": _Hint("tenant", _identifier, _NAME, "Tenant the job is accounted to; any name will do."),
    "restart": _Hint(
        "restart", _one_of(_choices(RestartPolicy)), _listed(RestartPolicy), "When the job is queued again by itself."
    ),
    "checkpoint": _Hint(
        "checkpoint",
        _one_of(_choices(Checkpoint)),
        _listed(Checkpoint),
        'Whether the job saves its state on SIGTERM and continues from it when started again ("own"; for leases, '
        'docs/ray-programs.md), or the CUDA driver may freeze its processes ("driver"; commands on one host): only '
        "then may the scheduler suspend or move it by itself (docs/checkpointing.md).",
    ),
    "grace": _Hint(
        "grace_s",
        _grace,
        f"{_DURATIONS}, at most {_MAX_GRACE_S / 3600.0:g} h",
        "Time between SIGTERM and SIGKILL when the job is stopped, suspended or moved.",
        "setting checkpoints.grace_s with checkpoint own, else lease.stop_grace_s",
    ),
}

HINT_NAMES: tuple[str, ...] = tuple(_HINTS)


def parse_hints(raw: Mapping[str, object], now: float) -> Hints:
    """Read hints given as texts or Python values.

    Args:
        raw: Hint name -> value. ``None`` counts as not said.
        now: Unix seconds, from which relative deadlines count.

    Raises:
        HintError: An unknown name, or a value that is not accepted.
    """
    fields: dict[str, int | float | str | bool] = {}
    for name, value in raw.items():
        if not isinstance(name, str):
            raise HintError("hints", name, f"hint names: {', '.join(HINT_NAMES)}")
        if value is None:
            continue
        hint = _HINTS.get(name)
        if hint is None:
            raise HintError(name, value, _known(name))
        try:
            fields[hint.field] = hint.read(value, now)
        except _Refused as error:
            raise HintError(name, value, hint.accepted) from error
    return Hints(**fields)  # type: ignore[arg-type]  # each reader returns what its field holds


def from_metadata(metadata: Mapping[str, str], now: float) -> Hints:
    """Read the hints in the metadata of a Ray job: the keys that start with ``cotenant.``; the others are not ours.

    Raises:
        HintError: See :func:`parse_hints`.
    """
    return parse_hints(metadata_hints(metadata), now)


def metadata_hints(metadata: Mapping[str, str]) -> dict[str, object]:
    """Return the hints in a Ray job's metadata, unread, under their own names.

    Raises:
        HintError: An unknown name behind ``cotenant.``.
    """
    raw: dict[str, object] = {}
    for key, value in metadata.items():
        if not key.startswith(METADATA_PREFIX):
            continue
        name = key.removeprefix(METADATA_PREFIX)
        if name not in _HINTS:
            raise HintError(key, value, _known(name, METADATA_PREFIX))
        raw[name] = value
    return raw


def check_hints(hints: object) -> None:
    """Refuse what ``parse_hints`` could not have returned: ``Hints`` made by hand are not checked by themselves.

    Raises:
        HintError: Names the hint, the value and what is accepted.
    """
    if not isinstance(hints, Hints):
        raise HintError("hints", hints, "what cotenant.scheduler.hints.parse_hints returns")
    silent = Hints()
    for name, hint in _HINTS.items():
        value = getattr(hints, hint.field)
        if value is None and getattr(silent, hint.field) is None:
            continue
        try:
            read = _moment(value) if name == "deadline" else hint.read(value, 0.0)
            _require(read == value and (type(value) is type(read) or (type(value), type(read)) == (int, float)))
        except _Refused as error:
            raise HintError(name, value, hint.accepted) from error


def _moment(value: object) -> float:
    """Return an absolute deadline, Unix seconds; one that is over already is a late job, not a mistake."""
    return _within(_real(value), 0.0, _MAX_UNIX_S)


def check_job_id(job_id: object) -> str:
    """Return a job id that a user chose; it becomes part of file names on the hosts.

    Raises:
        HintError: It is none; named ``job_id``.
    """
    if not isinstance(job_id, str) or not _JOB_ID.fullmatch(job_id):
        raise HintError("job_id", job_id, _JOB_ID_ACCEPTED)
    return job_id


def describe() -> list[HintDoc]:
    """Return what the manual says about every hint; the help of the command line and the docs are made from it."""
    silent = Hints()
    return [
        HintDoc(name, hint.accepted, hint.default or str(getattr(silent, hint.field)), hint.meaning)
        for name, hint in _HINTS.items()
    ]


def _known(name: str, prefix: str = "") -> str:
    """Say which hints exist, the likeliest first."""
    close = difflib.get_close_matches(name, HINT_NAMES, n=3, cutoff=0.6)
    if close:
        return f"a known hint; did you mean {' or '.join(prefix + match for match in close)}?"
    return f"one of {', '.join(prefix + known for known in HINT_NAMES)}"
