"""Predicted against actual: forecasts are kept until their moment comes, then scored beside the last value.

Everything here is plain arithmetic per window, without arrays: windows come in small lots, one per host.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from cotenant.forecasting.clock import WindowClock
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.interference.rule import UtilisationRule
from cotenant.forecasting.types import LEVELS, Forecast, Quantiles, Signature, ThroughputPrediction
from cotenant.forecasting.windows import MOST_BYTES, usable_memory, usable_util, usable_window

# Seconds between forecasts of the same job and horizon that are kept; with many jobs, longer (``JOBS_PER_SECOND``).
# 2 s lies between two that are scored, from the same machinery, and would make the log half as long again.
SCORED_HORIZONS: dict[int, int] = {1: 1, 5: 1, 60: 10, 300: 60, 900: 60}
PEAK_HORIZON_S = 300  # a peak forecast is for the whole future; it is judged by so much of it
JOBS_PER_SECOND = 100  # whose forecasts of one horizon are kept: with more jobs they take turns
JOB_MEMORY = 200.0  # scored forecasts per job and horizon that the rolling figures rest on …
ALL_MEMORY = 20_000.0  # … and of all jobs
MOST_JOBS = 20_000
MOST_SLOWDOWNS = 2_000
MOVED_AFTER_S = 5.0  # without a window of the GPU a job was scored on, another one of its GPUs takes its place

Quantity = Literal["util", "memory", "peak"]


@dataclass(frozen=True, slots=True)
class ScoredForecast:
    """One forecast whose moment came.

    Attributes:
        job_id: The job.
        gpu_id: The GPU it was judged on.
        made_at: When it was made, Unix seconds.
        horizon_s: How far ahead it looked.
        quantity: "util" (demand: corrected for being held back, in [0, 1]), "memory" (bytes) or "peak" (largest memory
            so far, bytes; all quantiles are the one number forecast).
        p50: Predicted median.
        p90: Predicted 90th percentile.
        p95: Predicted 95th percentile.
        p99: Predicted 99th percentile.
        actual: What was measured.
        persistence: The last value when it was made: the forecast to beat.
    """

    job_id: str
    gpu_id: str
    made_at: float
    horizon_s: int
    quantity: Quantity
    p50: float
    p90: float
    p95: float
    p99: float
    actual: float
    persistence: float


@dataclass(frozen=True, slots=True)
class HorizonScore:
    """How good the forecasts of one horizon were lately. None: nothing was scored.

    Attributes:
        scored: Forecasts of utilisation scored in all.
        util_error: Mean absolute error of p50.
        util_persistence_error: That of the last value.
        coverage_p90: Part of the utilisations at or below p90; good is 0.90.
        coverage_p95: The same of p95.
        pinball: Mean pinball loss of the five quantiles of utilisation.
        memory_violations: Part of the memory readings above p99; good is 0.01.
        memory_waste_percent: Mean of what p99 was above the reading, in percent of the reading.
    """

    scored: int
    util_error: float | None
    util_persistence_error: float | None
    coverage_p90: float | None
    coverage_p95: float | None
    pinball: float | None
    memory_violations: float | None
    memory_waste_percent: float | None


@dataclass(frozen=True, slots=True)
class JobScore:
    """How good the forecasts of a job, or of all jobs, were lately.

    Attributes:
        job_id: The job; "" for all of them.
        horizons: By horizon in seconds; only those of which something was scored.
        peaks_scored: Forecasts of the peak memory scored in all.
        peaks_under: Part of them that were exceeded within five minutes; None: nothing was scored.
    """

    job_id: str
    horizons: Mapping[int, HorizonScore]
    peaks_scored: int
    peaks_under: float | None


@dataclass(slots=True)
class _Means:
    """Means of several numbers in which older ones fade: plain at first, then over about ``memory`` of them."""

    memory: float
    values: list[float]
    count: int = 0

    def add(self, values: Sequence[float]) -> None:
        self.count += 1
        gain = max(1.0 / self.count, 1.0 / self.memory)
        self.values = [old + gain * (new - old) for old, new in zip(self.values, values, strict=True)]


@dataclass(slots=True)
class _Tally:
    """The rolling figures of one job or of all."""

    memory: float
    utils: dict[int, _Means] = field(default_factory=dict)
    memories: dict[int, _Means] = field(default_factory=dict)
    peaks: _Means = field(default_factory=lambda: _Means(JOB_MEMORY, [0.0]))

    def add_util(self, horizon: int, figures: Sequence[float]) -> None:
        means = self.utils.get(horizon)
        if means is None:
            means = self.utils[horizon] = _Means(self.memory, [0.0] * 5)
        means.add(figures)

    def add_memory(self, horizon: int, figures: Sequence[float]) -> None:
        means = self.memories.get(horizon)
        if means is None:
            means = self.memories[horizon] = _Means(self.memory, [0.0] * 2)
        means.add(figures)

    def score(self, job_id: str) -> JobScore:
        horizons = {}
        for horizon in SCORED_HORIZONS:
            util, memory = self.utils.get(horizon), self.memories.get(horizon)
            if util is not None or memory is not None:
                known: Sequence[float | None] = util.values if util else [None] * 5
                held: Sequence[float | None] = memory.values if memory else [None] * 2
                horizons[horizon] = HorizonScore(util.count if util else 0, *known, *held)
        return JobScore(job_id, horizons, self.peaks.count, self.peaks.values[0] if self.peaks.count else None)


@dataclass(frozen=True, slots=True)
class _Expected:
    """A forecast that waits for its moment."""

    target_s: float
    horizon: int
    made_at: float
    util: Quantiles | None
    memory: Quantiles | None
    last_util: float | None
    last_memory: float | None
    peak: float
    last_peak: float


@dataclass(slots=True)
class _Job:
    number: int
    gpu_id: str
    clock: WindowClock = field(default_factory=WindowClock)
    peak: float = 0.0
    due_s: float = math.inf  # from when on a window may be an expected one
    turn_s: float = -math.inf  # from when on a forecast is kept again
    expected: list[_Expected] = field(default_factory=list)
    tally: _Tally = field(default_factory=lambda: _Tally(JOB_MEMORY))

    def begin_anew(self, gpu_id: str) -> None:
        """Wait for nothing any more."""
        self.gpu_id, self.expected, self.due_s, self.turn_s = gpu_id, [], math.inf, -math.inf


class ForecastScores:
    """Scores demand forecasts of 1, 5, 60, 300 and 900 s when their moment comes. Pure, bounded.

    A forecast made from the window that began at s is judged by the window that begins nearest to s + horizon, within
    half a window. Is that window missing, late or without a reading, it is not scored. Utilisation is demand, corrected
    for being held back as the forecasters do (``windows.usable_util``). A peak forecast is judged by the largest memory
    until 300 s later. A job on several GPUs is judged on the one it was first seen on.

    1 and 5 s: every forecast is scored; 60 s: one in ten seconds; 300 and 900 s: one a minute. From 100 jobs on they
    take turns: every job one in about jobs / 100 seconds. Figures are means in which the last 200 scores of a job
    (20,000 of all) weigh most. The oldest jobs are dropped beyond 20,000. Not thread-safe.

    Each second, for one host: ``observe`` its windows, make the forecasts, ``expect`` them.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._numbers = 0
        self._all = _Tally(ALL_MEMORY, peaks=_Means(ALL_MEMORY, [0.0]))

    def expect(self, forecasts: Mapping[str, Forecast], at: float, signatures: Sequence[Signature]) -> None:
        """Keep forecasts until their moment comes.

        Args:
            forecasts: By job id; those of jobs without a window here are not kept.
            at: When they were made, Unix seconds.
            signatures: The last windows they were made from.
        """
        turns = 1 + len(self._jobs) // JOBS_PER_SECOND
        for signature in signatures:
            start_s = signature.start_s
            job = self._jobs.get(signature.job_id)
            # Not observed, another GPU, late or a duplicate; or it is not the job's turn.
            if job is None or start_s != job.clock.last_s or start_s < job.turn_s or job.gpu_id != signature.gpu_id:
                continue
            forecast = forecasts.get(signature.job_id)
            if forecast is not None:
                self._keep(job, forecast, signature, at=at, turns=turns)

    def _keep(self, job: _Job, forecast: Forecast, signature: Signature, *, at: float, turns: int) -> None:
        start_s = signature.start_s
        second = int(start_s) + job.number
        left = {horizon: -second % max(every, turns) for horizon, every in SCORED_HORIZONS.items()}
        util, memory = usable_util(signature), usable_memory(signature)
        for horizon in (horizon for horizon, seconds in left.items() if seconds == 0):
            expected = _Expected(
                target_s=start_s + horizon,
                horizon=horizon,
                made_at=at,
                util=forecast.util.get(horizon),
                memory=forecast.memory.get(horizon),
                last_util=util,
                last_memory=None if memory is None else memory[0],
                peak=forecast.largest_memory_bytes,
                last_peak=job.peak,
            )
            job.expected.append(expected)
            job.due_s = min(job.due_s, expected.target_s - 0.5 * signature.window_s)
        wait_s = min(seconds or max(SCORED_HORIZONS[horizon], turns) for horizon, seconds in left.items())
        job.turn_s = math.floor(start_s) + wait_s

    def observe(self, signatures: Sequence[Signature]) -> list[ScoredForecast]:
        """Take in windows; returns the forecasts whose moment they are, for a log."""
        rows: list[ScoredForecast] = []
        for signature in signatures:
            start_s = signature.start_s
            job = self._jobs.get(signature.job_id)
            # Nearly every window is an ordinary one of which nothing is due: it has to cost next to nothing.
            if job is None or (clock := job.clock).refused or not clock.last_s < start_s < job.due_s:
                job = self._look_at(job, signature, rows)
                if job is None:
                    continue
            elif job.gpu_id == signature.gpu_id:
                clock.last_s = start_s
            elif not self._look_at(job, signature, rows):
                continue
            peak = signature.memory_peak_bytes
            if peak is not None and job.peak < peak <= MOST_BYTES:
                job.peak = peak
        return rows

    def score(self, job_id: str) -> JobScore | None:
        """Return how good the forecasts of a job were lately; None when it is not known."""
        job = self._jobs.get(job_id)
        return None if job is None else job.tally.score(job_id)

    def overall(self) -> JobScore:
        """Return how good the forecasts of all jobs were lately."""
        return self._all.score("")

    def forget(self, job_id: str) -> None:
        """Drop a job that ended; what it told of all jobs stays. Unknown ids are ignored."""
        self._jobs.pop(job_id, None)

    def _look_at(self, job: _Job | None, signature: Signature, rows: list[ScoredForecast]) -> _Job | None:
        """Take in a window that is not an ordinary one; None when it does not count."""
        if not usable_window(signature):
            return None
        if job is None:
            job = self._jobs[signature.job_id] = self._new_job(signature.gpu_id)
        if signature.gpu_id != job.gpu_id:
            if signature.start_s - job.clock.last_s <= MOVED_AFTER_S:
                return None
            job.begin_anew(signature.gpu_id)
        elapsed = job.clock.advance(signature.start_s)
        if elapsed is None:
            return None
        if elapsed < 0.0:
            job.begin_anew(signature.gpu_id)  # the clock was set back: the moments are none any more
        elif signature.start_s >= job.due_s:
            self._mature(job, signature, rows)
        return job

    def _new_job(self, gpu_id: str) -> _Job:
        while len(self._jobs) >= MOST_JOBS:
            del self._jobs[next(iter(self._jobs))]
        self._numbers += 1
        return _Job(self._numbers, gpu_id)

    def _mature(self, job: _Job, signature: Signature, rows: list[ScoredForecast]) -> None:
        start_s, half_s = signature.start_s, 0.5 * signature.window_s
        come = [each for each in job.expected if each.target_s - half_s <= start_s]
        job.expected = [each for each in job.expected if each.target_s - half_s > start_s]
        job.due_s = min((each.target_s for each in job.expected), default=math.inf) - half_s
        util, memory = usable_util(signature), usable_memory(signature)
        peak_now = max(job.peak, 0.0 if memory is None else memory[1])
        for each in come:
            if start_s >= each.target_s + half_s:
                continue  # its window is missing
            if util is not None and each.util is not None and each.last_util is not None:
                figures = _util_figures(each.util, util, each.last_util)
                job.tally.add_util(each.horizon, figures)
                self._all.add_util(each.horizon, figures)
                rows.append(_row("util", signature, each, each.util, actual=util, last=each.last_util))
            if memory is not None and each.memory is not None and each.last_memory is not None:
                p99, held = each.memory.p99, memory[0]
                # Of less than a byte there is no part.
                waste = 100.0 * max(0.0, p99 - held) / held if held >= 1.0 else 0.0
                exceeded = (float(held > p99), waste)
                job.tally.add_memory(each.horizon, exceeded)
                self._all.add_memory(each.horizon, exceeded)
                rows.append(_row("memory", signature, each, each.memory, actual=held, last=each.last_memory))
            if each.horizon == PEAK_HORIZON_S and peak_now > 0.0 and each.memory is not None:
                under = (float(peak_now > each.peak),)
                job.tally.peaks.add(under)
                self._all.peaks.add(under)
                peak = Quantiles(*[each.peak] * 5)
                rows.append(_row("peak", signature, each, peak, actual=peak_now, last=each.last_peak))


def _util_figures(said: Quantiles, actual: float, last: float) -> tuple[float, float, float, float, float]:
    values = (said.p10, said.p50, said.p90, said.p95, said.p99)
    pinball = 0.0
    for level, value in zip(LEVELS, values, strict=True):
        pinball += level * (actual - value) if actual > value else (level - 1.0) * (actual - value)
    return (
        abs(actual - said.p50),
        abs(actual - last),
        float(actual <= said.p90),
        float(actual <= said.p95),
        pinball / len(LEVELS),
    )


def _row(
    quantity: Quantity, signature: Signature, expected: _Expected, said: Quantiles, *, actual: float, last: float
) -> ScoredForecast:
    return ScoredForecast(
        job_id=signature.job_id,
        gpu_id=signature.gpu_id,
        made_at=expected.made_at,
        horizon_s=expected.horizon,
        quantity=quantity,
        p50=said.p50,
        p90=said.p90,
        p95=said.p95,
        p99=said.p99,
        actual=actual,
        persistence=last,
    )


@dataclass(frozen=True, slots=True)
class ScoredSlowdown:
    """One measured throughput beside what was predicted.

    Attributes:
        gpu_type: Type of the GPU.
        focal: Fingerprint of the job whose throughput it is.
        others: Fingerprints of the jobs beside it.
        measured: Measured throughput, at most 1, which predictions never exceed.
        low: Low end of the predicted 80 % interval.
        predicted: The prediction.
        high: High end.
        rule: What the utilisation rule predicts.
        seconds: How long it was measured.
    """

    gpu_type: str
    focal: str
    others: tuple[str, ...]
    measured: float
    low: float
    predicted: float
    high: float
    rule: float
    seconds: float

    @property
    def covered(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, slots=True)
class SlowdownScore:
    """How good predictions of throughput were, over the last measurements; each counts the same.

    Attributes:
        scored: Number of measurements it rests on.
        error: Mean absolute error of the throughput.
        bias: Mean of predicted − measured: above 0, jobs were slowed down more than predicted.
        coverage: Part of the measurements inside the 80 % interval.
        rule_error: Mean absolute error of the utilisation rule on the same measurements.
    """

    scored: int
    error: float
    bias: float
    coverage: float
    rule_error: float


class SlowdownScores:
    """Predicted against measured throughput of jobs that share a GPU. Pure; keeps the last 2,000.

    What is given as predicted must not have known the measurement: ask before it becomes evidence.
    """

    def __init__(self) -> None:
        self._rows: deque[ScoredSlowdown] = deque(maxlen=MOST_SLOWDOWNS)
        self._rule = UtilisationRule()

    def add(self, observation: Observation, predicted: ThroughputPrediction) -> ScoredSlowdown:
        """Score one prediction; returns the row for a log. The utilisation rule is asked here."""
        rule = self._rule.predict([observation.focal, *observation.others], observation.gpu_type)[0]
        row = ScoredSlowdown(
            gpu_type=observation.gpu_type,
            focal=observation.focal.fingerprint,
            others=tuple(each.fingerprint for each in observation.others),
            measured=min(1.0, observation.throughput),
            low=predicted.low,
            predicted=predicted.mid,
            high=predicted.high,
            rule=rule.mid,
            seconds=observation.seconds,
        )
        self._rows.append(row)
        return row

    def rows(self) -> tuple[ScoredSlowdown, ...]:
        """Return what is kept, oldest first."""
        return tuple(self._rows)

    def by_type(self) -> dict[str, SlowdownScore]:
        """Return the scores of every GPU type."""
        types = dict.fromkeys(row.gpu_type for row in self._rows)
        return {
            gpu_type: _slowdown_score([row for row in self._rows if row.gpu_type == gpu_type]) for gpu_type in types
        }

    def overall(self) -> SlowdownScore | None:
        """Return the score over all types; None when nothing was scored."""
        return _slowdown_score(self._rows) if self._rows else None


def _slowdown_score(rows: Iterable[ScoredSlowdown]) -> SlowdownScore:
    kept = list(rows)
    return SlowdownScore(
        scored=len(kept),
        error=fmean(abs(row.predicted - row.measured) for row in kept),
        bias=fmean(row.predicted - row.measured for row in kept),
        coverage=fmean(row.covered for row in kept),
        rule_error=fmean(abs(row.rule - row.measured) for row in kept),
    )
