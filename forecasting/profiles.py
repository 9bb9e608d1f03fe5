"""What jobs do alone on a GPU, learnt per job and per fingerprint.

Placement asks one question before a job shares a GPU: what would it do alone? The answer comes from windows in which
the job really was alone and not held back. Only where there is none does it come from windows beside others, marked as
such, because there a job shows less than it could use.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cotenant.forecasting.clock import WindowClock
from cotenant.forecasting.types import UNKNOWN_PROFILE, DemandProfile, Signature
from cotenant.forecasting.windows import (
    MOST_BYTES,
    MOST_RATE,
    finite,
    usable_memory,
    usable_rate,
    usable_util,
    usable_window,
)

CLEAN_THROTTLE = 0.02  # held back for less than this fraction of a window counts as not held back
WARM_UP_WINDOWS = 2  # windows with steps that still contain start-up work
TRUSTED_S = 5.0  # a job's own measurement replaces its fingerprint's once it is this long

_KEEP = 64  # windows a statistic rests on
_BLOCK_STEPS = 8.0  # steps a rate is measured over: one window of a fast job, many of a slow one
_KEEP_BLOCKS = 15
_SPAN_S = 5.0  # what a pair is first measured for, at least: rates are compared over as long
_KEEP_SPANS = 64
_LEAST_SPANS = 6
_ONE_RATE = 1.5  # the upper quartile of a program's rates over the lower one: beyond, it has no rate of its own
_FORMAT = "cotenant-profiles-1"
# Kinds of windows, the most trustworthy first. "solo": alone, not held back, past the warm-up; "shared": the same
# beside others or held back; "early…": before the first steps (for a program that never steps: all there is).
_KINDS = ("solo", "shared", "early", "early_shared")


@dataclass(slots=True)
class _Usage:
    """Recent windows of one kind, and how many seconds of that kind there were in all."""

    utils: deque[float] = field(default_factory=lambda: deque(maxlen=_KEEP))
    seconds: float = 0.0

    def add(self, util: float, window_s: float) -> None:
        self.utils.append(util)
        self.seconds += window_s


@dataclass(slots=True)
class _Running:
    """Steps and seconds that become a rate once they are enough."""

    steps: float = 0.0
    seconds: float = 0.0

    def add(self, steps: float, seconds: float, least_s: float = 0.0) -> float | None:
        """Count steps; return the rate and begin anew when they are enough, and have taken long enough."""
        self.steps += steps
        self.seconds += seconds
        if self.steps < _BLOCK_STEPS or self.seconds < least_s:
            return None
        rate = self.steps / self.seconds
        self.steps = self.seconds = 0.0
        return rate


@dataclass(slots=True)
class _Record:
    """What is known of one job or fingerprint."""

    usages: dict[str, _Usage] = field(default_factory=lambda: {kind: _Usage() for kind in _KINDS})
    memory_peak: float = 0.0
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_KEEP_BLOCKS))
    block: _Running = field(default_factory=_Running)
    spans: deque[float] = field(default_factory=lambda: deque(maxlen=_KEEP_SPANS))
    span: _Running = field(default_factory=_Running)
    varies: bool = (
        False  # it goes through phases, each with a rate of its own; kept, as it is asked more than it changes
    )

    def __post_init__(self) -> None:
        self.compare()

    def add_steps(self, steps: float, window_s: float) -> None:
        """Count steps into the running block and span; a full one becomes one rate."""
        rate = self.block.add(steps, window_s)
        if rate is not None:
            self.rates.append(rate)
        rate = self.span.add(steps, window_s, _SPAN_S)
        if rate is not None:
            self.spans.append(rate)
            self.compare()

    def compare(self) -> None:
        """Note whether the rates over spans are one."""
        if len(self.spans) >= _LEAST_SPANS:
            lower, _, upper = statistics.quantiles(self.spans, n=4)
            self.varies = upper > _ONE_RATE * lower

    def rate(self) -> float | None:
        """Return the median rate of the recent blocks, or that of an unfinished first block of two steps or more."""
        if self.rates:
            return statistics.median(self.rates)
        return self.block.steps / self.block.seconds if self.block.steps >= 2.0 else None

    def best(self) -> str | None:
        """Return the most trustworthy kind of windows there is."""
        return next((kind for kind in _KINDS if self.usages[kind].utils), None)


@dataclass(slots=True)
class _JobRecord:
    record: _Record = field(default_factory=_Record)
    stepped_windows: int = 0
    clocks: dict[str, WindowClock] = field(default_factory=dict)  # by GPU


class ProfileBook:
    """Learns a ``DemandProfile`` per job and per fingerprint from measured windows. Bounded, serialisable.

    * Solo utilisation and solo step rate: only windows without neighbours in which the job was held back for at most
      2 % of the time (a device that cannot say holds nobody back), after the first two windows with steps. Mean and
      95th percentile of the last 64 windows; the rate is the median over blocks of at least eight steps, so
      evaluation phases, stray slow windows and the rounding of few steps per window do not move it.
    * A program whose rates over spans of five seconds alone (the last 64) have quartiles more than 1.5 times apart
      goes through phases and has no solo step rate: beside others nobody could tell its phases from its neighbours.
    * Until the first steps, or for programs that never take any, all windows count.
    * Memory: the largest ever seen, in any window.
    * Each of the three is learnt wherever it can be read; without utilisation the source stays "unknown".
    * A job's own measurement replaces its fingerprint's after five seconds of it.
    * When a host's clock is set back, its windows are ignored until ten of them have advanced.

    The least recently seen jobs and fingerprints are dropped beyond the limits. Not thread-safe.

    Args:
        max_jobs: Largest number of jobs kept.
        max_fingerprints: Largest number of fingerprints kept.
    """

    def __init__(self, max_jobs: int = 20_000, max_fingerprints: int = 20_000) -> None:
        self.max_jobs = max_jobs
        self.max_fingerprints = max_fingerprints
        self._jobs: dict[str, _JobRecord] = {}
        self._classes: dict[str, _Record] = {}

    def observe(self, signature: Signature, fingerprint: str) -> None:
        """Take in one window. Out-of-order, absurd or empty windows are ignored."""
        util, memory, rate = usable_util(signature), usable_memory(signature), usable_rate(signature)
        if not usable_window(signature) or (util is None and memory is None and rate is None):
            return
        job = self._jobs.pop(signature.job_id, None) or _JobRecord()
        self._jobs[signature.job_id] = job  # most recently seen last
        if job.clocks.setdefault(signature.gpu_id, WindowClock()).advance(signature.start_s) is None:
            return
        common = self._classes.pop(fingerprint, None) or _Record()
        self._classes[fingerprint] = common
        warm = _advance(job, rate)
        for record in (job.record, common):
            _learn(record, signature, util, memory, rate, warm=warm)
        trim(self._jobs, self.max_jobs)
        trim(self._classes, self.max_fingerprints)

    def profile(self, job_id: str | None, fingerprint: str) -> DemandProfile:
        """Return what the job would do alone: its own measurements, else its fingerprint's, else unknown.

        Args:
            job_id: The job; None asks for its class of runs only.
            fingerprint: Key of its class of runs.
        """
        job = self._jobs.get(job_id) if job_id is not None else None
        common = self._classes.get(fingerprint)
        own = _summary(job.record) if job else UNKNOWN_PROFILE
        known = _summary(common) if common else UNKNOWN_PROFILE
        chosen = own if _own_is_better(job.record if job else None, common) else known
        peaks = [peak for peak in (own.memory_bytes, known.memory_bytes) if peak is not None]
        rate = own.solo_step_rate if own.solo_step_rate is not None else known.solo_step_rate
        if self.goes_through_phases(job_id, fingerprint):
            rate = None  # what it is beside others would say nothing of these
        return replace(chosen, memory_bytes=max(peaks, default=None), solo_step_rate=rate)

    def goes_through_phases(self, job_id: str | None, fingerprint: str) -> bool:
        """Whether a job, or its class of runs, was seen to have several rates alone; False also while nobody can tell.

        Args:
            job_id: The job; None asks for its class of runs only.
            fingerprint: Key of its class of runs.
        """
        job = self._jobs.get(job_id) if job_id is not None else None
        common = self._classes.get(fingerprint)
        return (job is not None and job.record.varies) or (common is not None and common.varies)

    def forget(self, job_id: str) -> None:
        """Drop what was kept for a job that ended; its fingerprint keeps what was learnt."""
        self._jobs.pop(job_id, None)

    def to_json(self) -> str:
        """Return everything learnt as JSON."""
        jobs = {
            job_id: {
                "record": _dump(job.record),
                "stepped_windows": job.stepped_windows,
                "last_start": {gpu_id: clock.last_s for gpu_id, clock in job.clocks.items()},
            }
            for job_id, job in self._jobs.items()
        }
        classes = {fingerprint: _dump(record) for fingerprint, record in self._classes.items()}
        limits = {"max_jobs": self.max_jobs, "max_fingerprints": self.max_fingerprints}
        return json.dumps({"format": _FORMAT, **limits, "jobs": jobs, "fingerprints": classes})

    @classmethod
    def from_json(cls, text: str) -> ProfileBook:
        """Return the book that ``to_json`` wrote.

        Raises:
            ValueError: The text is not such a book.
        """
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT:
                raise ValueError(f"format: {data['format']!r} is not accepted; give {_FORMAT!r}")
            book = cls(int(data["max_jobs"]), int(data["max_fingerprints"]))
            if book.max_jobs < 1 or book.max_fingerprints < 1:
                raise ValueError(f"limits: {book.max_jobs}, {book.max_fingerprints} are not accepted; give at least 1")
            for job_id, job in data["jobs"].items():
                clocks = {gpu_id: WindowClock(float(start)) for gpu_id, start in job["last_start"].items()}
                book._jobs[job_id] = _JobRecord(_load(job["record"]), int(job["stepped_windows"]), clocks)
            book._classes.update((name, _load(record)) for name, record in data["fingerprints"].items())
            for record in (*book._classes.values(), *(job.record for job in book._jobs.values())):
                _require_sound(record)
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"not a profile book: {type(error).__name__} at {error}") from error
        return book


def from_hints(compute: float | None, memory: int | None) -> DemandProfile:
    """Return the profile that hints alone give; unknown (worst case) where the submitter said nothing.

    Args:
        compute: Compute hint in (0, 1] or None.
        memory: Memory hint in bytes or None.
    """
    known = compute is not None and memory is not None
    util = 1.0 if compute is None else compute
    return DemandProfile(util_mean=util, util_p95=util, memory_bytes=memory, source="hints" if known else "unknown")


def on_type(name: str, gpu_type: str) -> str:
    """The key of what a job or program does on GPUs of one type: its rate there says nothing about another.

    The name itself where one of the two is not known.
    """
    return f"{name} on {gpu_type}" if name and gpu_type else name


def _advance(job: _JobRecord, rate: float | None) -> bool:
    """Count a window with steps and return whether the job is past its warm-up."""
    if rate is not None and rate > 0.0:
        job.stepped_windows += 1
    return job.stepped_windows > WARM_UP_WINDOWS


def _learn(
    record: _Record,
    signature: Signature,
    util: float | None,
    memory: tuple[float, float] | None,
    rate: float | None,
    *,
    warm: bool,
) -> None:
    if memory is not None:
        record.memory_peak = max(record.memory_peak, memory[1])
    throttled = signature.throttled_fraction
    clean = signature.neighbours == 0 and (not finite(throttled) or throttled <= CLEAN_THROTTLE)
    if util is not None:
        kind = ("solo" if clean else "shared") if warm else ("early" if clean else "early_shared")
        record.usages[kind].add(util, signature.window_s)
    if clean and warm and rate is not None:
        record.add_steps(rate * signature.window_s, signature.window_s)


def _summary(record: _Record) -> DemandProfile:
    memory = round(record.memory_peak) if record.memory_peak > 0.0 else None
    kind = record.best()
    if kind is None:
        return replace(UNKNOWN_PROFILE, memory_bytes=memory, solo_step_rate=record.rate())
    usage = record.usages[kind]
    ranked = sorted(usage.utils)
    return DemandProfile(
        util_mean=statistics.fmean(ranked),
        util_p95=ranked[min(len(ranked) - 1, int(0.95 * len(ranked)))],
        memory_bytes=memory,
        solo_step_rate=record.rate(),
        observed_s=usage.seconds,
        source="history",
        from_shared=kind.endswith("shared"),
    )


def _own_is_better(own: _Record | None, common: _Record | None) -> bool:
    """Return whether the job's own windows say more than those of its class of runs."""
    mine, theirs = own.best() if own else None, common.best() if common else None
    if own is None or common is None or mine is None or theirs is None:
        return mine is not None
    if mine != theirs:
        return _KINDS.index(mine) < _KINDS.index(theirs)
    return own.usages[mine].seconds >= min(TRUSTED_S, common.usages[theirs].seconds)


def trim(kept: dict[Any, Any], most: int) -> None:
    """Drop what was put in first until no more than so many are left."""
    while len(kept) > most:
        del kept[next(iter(kept))]


def _dump(record: _Record) -> dict[str, Any]:
    return {
        "usages": {
            kind: {"utils": list(usage.utils), "seconds": usage.seconds} for kind, usage in record.usages.items()
        },
        "memory_peak": record.memory_peak,
        "rates": list(record.rates),
        "block": [record.block.steps, record.block.seconds],
        "spans": list(record.spans),
        "span": [record.span.steps, record.span.seconds],
    }


def _require_sound(record: _Record) -> None:
    """Refuse numbers no window could have left: they would spoil every later forecast of the same program."""
    utils = [util for usage in record.usages.values() for util in usage.utils]
    rates = (*record.rates, *record.spans)
    running = (record.block, record.span)
    numbers = [record.memory_peak, *(each for one in running for each in (one.steps, one.seconds)), *rates]
    numbers += [usage.seconds for usage in record.usages.values()]
    sound = all(0.0 <= util <= 1.0 for util in utils) and all(0.0 <= each < math.inf for each in numbers)
    possible = record.memory_peak <= MOST_BYTES and all(rate <= MOST_RATE for rate in rates)
    if not sound or not possible or (record.block.steps > 0.0 and record.block.seconds == 0.0):
        raise ValueError("not a profile book: it holds numbers that cannot have been measured")


def _load(data: Mapping[str, Any]) -> _Record:
    usages = {
        kind: _Usage(
            deque(map(float, data["usages"][kind]["utils"]), maxlen=_KEEP), float(data["usages"][kind]["seconds"])
        )
        for kind in _KINDS
    }
    return _Record(
        usages=usages,
        memory_peak=float(data["memory_peak"]),
        rates=deque(map(float, data["rates"]), maxlen=_KEEP_BLOCKS),
        block=_running(data["block"]),
        spans=deque(map(float, data.get("spans", ())), maxlen=_KEEP_SPANS),
        span=_running(data.get("span", (0.0, 0.0))),  # older books have none
    )


def _running(data: Sequence[Any]) -> _Running:
    steps, seconds = data
    return _Running(float(steps), float(seconds))
