"""A demand forecaster that goes on whatever happens to it: a strong one, watched, with a simple one beside it.

The scheduler would rather have a plain forecast than none. So the primary forecaster (a mixture, perhaps with trained
experts) and the simple one are fed side by side, and what the primary says is looked at before it is passed on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from cotenant.forecasting.demand.ewquantile import EwQuantileForecaster
from cotenant.forecasting.demand.hostside import Foreseen
from cotenant.forecasting.types import HORIZONS_S, DemandProfile, Forecast, Quantiles, Signature
from cotenant.forecasting.windows import MOST_BYTES

ENOUGH_WINDOWS = 30  # of every job, after which a new primary knows what it will be asked about
PATIENCE = 3  # times as many windows of some job: those that sent fewer by then are not waited for
FIRST_RETRY = 16  # batches without a primary after it failed; every further failure doubles them …
LAST_RETRY = 16_384  # … up to here
FORGIVEN_AFTER = 4_096  # batches without a failure, after which the next counts as the first
KEPT_FAULTS = 32
NAMED_JOBS = 8  # in a fault and in the note
PRIOR_WINDOWS = 3.0  # as in ``calibration``
PRIOR_UTIL = 0.5
PRIOR_MEMORY = 0.25  # the first margin of the peak memory
LEAST_PRIOR = 0.01  # less is not worth writing new numbers
_MOST_UTIL = 1.0 + 1e-6  # rounding of float32
_MOST_PEAK = 2.0 * MOST_BYTES

T = TypeVar("T")


class BatchForecaster(Protocol):
    """What a primary forecaster must be able to do; ``MixtureForecaster`` is one."""

    name: str

    def prime(self, job_id: str, profile: DemandProfile) -> None:
        """Tell what is known of a job before its first window."""
        ...

    def observe_batch(self, signatures: Sequence[Signature], foreseen: Foreseen | None = None) -> None:
        """Take in many windows at once, in order, with what hosts foresaw at their end."""
        ...

    def forecast_batch(self, job_ids: Sequence[str]) -> dict[str, Forecast]:
        """Return the forecasts of those of the jobs that have one."""
        ...

    def forget(self, job_id: str) -> None:
        """Drop the state of a job that ended."""
        ...


Factory = Callable[[], BatchForecaster]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something the primary forecaster, or one that was to replace it, did wrong.

    Attributes:
        at_window: How many windows had been taken in, all jobs together.
        text: What happened.
        jobs: Which jobs it concerned, the first few; empty = all.
    """

    at_window: int
    text: str
    jobs: tuple[str, ...] = ()


@dataclass(slots=True)
class _Coming:
    """A forecaster that is fed alongside until it may take over.

    Attributes:
        factory: What made it.
        forecaster: It.
        seen: Windows it has seen of every job that is older than it.
    """

    factory: Factory
    forecaster: BatchForecaster
    seen: dict[str, int] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether it has seen enough of every job; a job that is silent for long is not waited for."""
        counts = self.seen.values()
        return not counts or min(counts) >= ENOUGH_WINDOWS or max(counts) >= PATIENCE * ENOUGH_WINDOWS

    def count(self, signatures: Sequence[Signature]) -> None:
        """Count windows it was given."""
        for each in signatures:
            if each.job_id in self.seen:
                self.seen[each.job_id] += 1


class GuardedForecaster:
    """A primary forecaster and the simple one side by side (see ``DemandForecaster``); never raises.

    * A forecast of the primary's is passed on if it has all horizons and its quantiles are numbers, in order,
      utilisations in [0, 1] and memory in [0, 1 PiB]. Otherwise, and where the primary has none but the simple one has,
      the simple one's is served for that job, and a fault is noted.
    * What the simple one says of a young job is widened: of one window it knows one number.
    * When the primary raises anything, its state is in doubt. It is dropped, the simple one serves all jobs, and after
      16 batches a fresh one is made; after every further failure it takes twice as long, up to 16,384 batches.
    * A new primary, fresh after a failure or given to ``swap``, is fed alongside until it has seen 30 windows of every
      job, or all windows of a job that is younger than it. Then it takes over between two batches. Until then whoever
      served goes on. A job that sent nothing while another sent 90 windows is not waited for. What a job was primed
      with, a new primary is told too.
    * A new primary that fails before it takes over is dropped; whoever serves does not notice.

    Not thread-safe.

    Args:
        factory: Makes a primary.
        simple: Makes the simple forecaster; it is begun anew, without its past, should it ever raise.
    """

    name = "guarded"

    def __init__(self, factory: Factory, simple: Callable[[], EwQuantileForecaster] = EwQuantileForecaster) -> None:
        self.fault_count = 0
        self._faults: deque[Fault] = deque(maxlen=KEPT_FAULTS)
        self._factory = factory
        self._make_simple = simple
        self._simple = simple()
        self._primary: BatchForecaster | None = None
        self._coming: _Coming | None = None
        self._windows = 0
        self._batches = 0
        self._retry_at = 0
        self._retry_after = FIRST_RETRY
        self._failed_at = 0
        self._jobs: set[str] = set()  # seen and not forgotten
        self._primed: dict[str, DemandProfile] = {}
        self._fallen: dict[str, str] = {}  # why the simple one serves a job although there is a primary
        self._failure = ""  # why there is no primary
        self._refused = ""  # why the last new primary never took over
        self._begin(factory)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The last 32 faults, oldest first; ``fault_count`` counts all."""
        return tuple(self._faults)

    @property
    def degraded(self) -> bool:
        """Whether the simple forecaster serves some job in the primary's place."""
        return self._primary is None or bool(self._fallen)

    def note(self) -> str:
        """Say in words what is wrong now; empty when all is well."""
        if self._primary is None:
            begins = (
                "a fresh one is learning" if self._coming else f"next try in {self._retry_at - self._batches} batches"
            )
            return f"demand forecasts come from the simple forecaster: {self._failure}; {begins}"
        if self._fallen:
            named = ", ".join(sorted(self._fallen)[:NAMED_JOBS])
            more = len(self._fallen) - NAMED_JOBS
            jobs = f"{named} and {more} more" if more > 0 else named
            why = next(iter(self._fallen.values()))
            return f"the simple forecaster serves {jobs}: {_name(self._primary)}: {why}"
        if self._refused:
            return f"the new forecaster did not take over: {self._refused}; the one before goes on"
        return ""

    def swap(self, factory: Factory) -> None:
        """Replace the primary by another one, newly trained for example, without a gap (see above).

        It also makes the fresh ones after later failures, once it has taken over. A swap under way is given up.
        """
        self._refused = ""
        self._begin(factory)

    def stay(self) -> None:
        """What serves is what is wanted: a swap under way is given up, one that failed is no fault any more."""
        self._coming, self._refused = None, ""

    def prime(self, job_id: str, profile: DemandProfile) -> None:
        """Tell what is known of a job before its first window: from hints or from earlier runs of its program."""
        self._primed[job_id] = profile
        self._both(f"prime of {job_id}", lambda forecaster: forecaster.prime(job_id, profile))

    def observe(self, signature: Signature) -> None:
        """Take in one window. Out-of-order, absurd or empty windows are ignored, never fatal."""
        self.observe_batch((signature,))

    def observe_batch(self, signatures: Sequence[Signature], foreseen: Foreseen | None = None) -> None:
        """Take in many windows at once, in order; with what hosts foresaw at their end."""
        self._batches += 1
        self._windows += len(signatures)
        self._jobs.update(each.job_id for each in signatures)
        self._simply("windows", lambda simple: simple.observe_batch(signatures))
        self._both("windows", lambda forecaster: forecaster.observe_batch(signatures, foreseen))
        if self._coming is not None:
            self._coming.count(signatures)
        elif self._primary is None and self._batches >= self._retry_at:
            self._begin(self._factory)
        self._take_over()

    def forecast(self, job_id: str) -> Forecast | None:
        """Return the forecast of a job, or None when nothing usable was observed yet."""
        return self.forecast_batch((job_id,)).get(job_id)

    def forecast_batch(self, job_ids: Sequence[str]) -> dict[str, Forecast]:
        """Return the forecasts of those of the jobs that have one."""
        primary = self._primary
        if primary is None:
            return self._plain(job_ids)
        failure, said = self._attempt(_name(primary), "forecasts", lambda: dict(primary.forecast_batch(job_ids)))
        if said is None:
            self._drop(failure)
            return self._plain(job_ids)
        wrong = {job_id: why for job_id in job_ids if (why := _wrong(job_id, said.get(job_id)))}
        for job_id in job_ids:
            self._fallen.pop(job_id, None)
        plain = self._plain(list(wrong)) if wrong else {}
        # A job that neither knows anything of yet is no fault.
        blamed = {job_id: why for job_id, why in wrong.items() if job_id in plain or job_id in said}
        for why in dict.fromkeys(blamed.values()):
            self._blame(f"{_name(primary)}: {why}", [job_id for job_id, each in blamed.items() if each == why])
        self._fallen.update((job_id, why) for job_id, why in blamed.items() if job_id in self._jobs)
        return {job_id: said[job_id] for job_id in job_ids if job_id in said and job_id not in wrong} | plain

    def forget(self, job_id: str) -> None:
        """Drop the state of a job that ended. Unknown ids are ignored."""
        self._jobs.discard(job_id)
        self._primed.pop(job_id, None)
        self._fallen.pop(job_id, None)
        self._simply(f"end of {job_id}", lambda simple: simple.forget(job_id))
        self._both(f"end of {job_id}", lambda forecaster: forecaster.forget(job_id))
        if self._coming is not None:
            self._coming.seen.pop(job_id, None)
            self._take_over()

    def _plain(self, job_ids: Sequence[str]) -> dict[str, Forecast]:
        found = self._simply("forecasts", lambda simple: simple.forecast_batch(job_ids)) or {}
        return {job_id: _widened(forecast) for job_id, forecast in found.items()}

    def _simply(self, what: str, call: Callable[[EwQuantileForecaster], T]) -> T | None:
        simple = self._simple
        failure, result = self._attempt(_name(simple), what, lambda: call(simple))
        if failure:
            self._simple = self._make_simple()
        return result

    def _both(self, what: str, call: Callable[[BatchForecaster], None]) -> None:
        """Do something with the primary and with the one that is to replace it."""
        primary, coming = self._primary, self._coming
        if primary is not None:
            failure, _ = self._attempt(_name(primary), what, lambda: call(primary))
            if failure:
                self._drop(failure)
        if coming is not None:
            failure, _ = self._attempt(f"new {_name(coming.forecaster)}", what, lambda: call(coming.forecaster))
            if failure:
                self._coming = None
                self._missing(failure)

    def _begin(self, factory: Factory) -> None:
        """Have a new primary learn."""
        self._coming = None
        failure, forecaster = self._attempt("new primary", "start", factory)
        if forecaster is None:
            self._missing(failure or "none was made")
            return
        failure, _ = self._attempt(f"new {_name(forecaster)}", "prime", lambda: self._tell(forecaster))
        if failure:
            self._missing(failure)
            return
        self._coming = _Coming(factory, forecaster, dict.fromkeys(self._jobs, 0))
        self._take_over()

    def _tell(self, forecaster: BatchForecaster) -> None:
        for job_id, profile in self._primed.items():
            forecaster.prime(job_id, profile)

    def _take_over(self) -> None:
        if self._coming is not None and self._coming.ready:
            self._factory, self._primary, self._coming = self._coming.factory, self._coming.forecaster, None
            self._failure = self._refused = ""
            self._fallen.clear()

    def _drop(self, failure: str) -> None:
        self._primary = None
        self._fallen.clear()
        self._missing(failure)

    def _missing(self, failure: str) -> None:
        """When there is no primary and none is coming, wait before the next try, longer every time."""
        if self._primary is not None:
            self._refused = failure
            return
        self._failure = failure
        if self._coming is not None:
            return
        if self._batches - self._failed_at > FORGIVEN_AFTER + self._retry_after:
            self._retry_after = FIRST_RETRY
        self._failed_at = self._batches
        self._retry_at = self._batches + self._retry_after
        self._retry_after = min(LAST_RETRY, 2 * self._retry_after)

    def _attempt(self, who: str, what: str, call: Callable[[], T]) -> tuple[str, T | None]:
        """Call; return what went wrong ("" = nothing) and the result."""
        try:
            return "", call()
        except Exception as error:  # noqa: BLE001 - a fault of a forecaster's can be of any kind, and must end here
            failure = f"{type(error).__name__}: {error}"
            self._blame(f"{who}: {what}: {failure}")
            return failure, None

    def _blame(self, text: str, jobs: Sequence[str] = ()) -> None:
        self.fault_count += 1
        self._faults.append(Fault(self._windows, text, tuple(jobs[:NAMED_JOBS])))


def _widened(forecast: Forecast) -> Forecast:
    """Return a forecast of the simple one's that admits how little is known of a young job.

    Its quantiles are those of what was seen, which of a single window is one number. Three more windows, anywhere
    within half the GPU (a quarter of the memory) either way, count as seen: the share 3 / (3 + windows) of that.
    """
    share = PRIOR_WINDOWS / (PRIOR_WINDOWS + forecast.windows)
    if share < LEAST_PRIOR:
        return forecast
    return replace(
        forecast,
        util={horizon: _spread(each, PRIOR_UTIL * share, 1.0) for horizon, each in forecast.util.items()},
        memory={
            horizon: _spread(each, PRIOR_MEMORY * share * each.p99, MOST_BYTES)
            for horizon, each in forecast.memory.items()
        },
    )


def _spread(each: Quantiles, by: float, most: float) -> Quantiles:
    return Quantiles(
        p10=max(0.0, each.p10 - 0.8 * by),
        p50=each.p50,
        p90=max(each.p90, min(most, each.p90 + 0.8 * by)),
        p95=max(each.p95, min(most, each.p95 + 0.9 * by)),
        p99=max(each.p99, min(most, each.p99 + 0.98 * by)),
    )


def _name(forecaster: object) -> str:
    return str(getattr(forecaster, "name", type(forecaster).__name__))


def _wrong(job_id: str, forecast: object) -> str:
    """Say why a forecast cannot be passed on; "" when it can."""
    if forecast is None or (isinstance(forecast, Forecast) and not forecast.util and not forecast.memory):
        return "no forecast"
    if not isinstance(forecast, Forecast) or forecast.job_id != job_id:
        return "not a forecast of the job"
    try:
        if not (_all_sound(forecast.util, _MOST_UTIL) and _all_sound(forecast.memory, MOST_BYTES)):
            return "quantiles that are no numbers, not in order, or absurd"
        if not 0.0 <= forecast.peak_memory_bytes <= _MOST_PEAK:
            return f"a peak memory of {forecast.peak_memory_bytes} bytes"
    except (TypeError, AttributeError, KeyError) as error:
        return f"not a forecast of the job: {type(error).__name__} at {error}"
    return ""


def _all_sound(quantiles: Mapping[int, Quantiles], most: float) -> bool:
    for horizon in HORIZONS_S if quantiles != {} else ():  # what was never read is not forecast
        each = quantiles[horizon]
        if not 0.0 <= each.p10 <= each.p50 <= each.p90 <= each.p95 <= each.p99 <= most:  # also refuses NaN
            return False
    return True
