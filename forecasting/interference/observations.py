"""From profiles and measurements to what the model works on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.forecasting.interference.table import BANDWIDTH, MEMORY, STEP, UTIL, Jobs, PairTable
from cotenant.forecasting.types import DemandProfile

SCHEMA_VERSION = 1  # of the features below; a model of another version is refused
FEATURES: tuple[str, ...] = (UTIL, BANDWIDTH, STEP, MEMORY)

REPLACES_AFTER_S = 60.0  # together for this long, the measured throughput of a set replaces the prediction
MOST_THROUGHPUT = 2.0  # noise may carry a measured throughput above 1, not above this
INTERVAL_SIGMAS = 2.563  # width of an 80 % interval of a normal distribution, in standard deviations
_MOST_UTIL = 1.1  # a little above 1 is rounding; more is a broken reading
_MOST_BYTES = float(1 << 50)
_LEAST_RATE, _MOST_RATE = 1e-6, 1e9  # steps per second

SetKey = tuple[str, str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Program:
    """A program on one type of GPUs: what it does there says nothing of another."""

    gpu_type: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Observation:
    """One job's measured throughput while it shared a GPU.

    Attributes:
        gpu_type: The GPU's type.
        focal: The job whose throughput it is.
        others: The jobs it shared with, at least one.
        throughput: Shared rate / solo rate, in (0, 2].
        low: Low end of its 80 % interval.
        high: High end.
        seconds: How long they were measured together.
    """

    gpu_type: str
    focal: DemandProfile
    others: tuple[DemandProfile, ...]
    throughput: float
    low: float
    high: float
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.others:
            raise ValueError("others: a measurement of sharing needs at least one neighbour")
        if not 0.0 < self.low <= self.throughput <= self.high <= MOST_THROUGHPUT:  # also refuses NaN
            raise ValueError(
                f"throughput: {self.low} <= {self.throughput} <= {self.high} is not accepted; "
                f"give 0 < low <= throughput <= high <= {MOST_THROUGHPUT:g}"
            )
        if not 0.0 <= self.seconds < math.inf:
            raise ValueError(f"seconds: {self.seconds} is not accepted; give a finite number of at least 0")

    @property
    def key(self) -> SetKey | None:
        """By which the very same set is found again; None when a member has no fingerprint."""
        return set_key(self.gpu_type, self.focal, self.others)

    @property
    def program(self) -> Program:
        """Whose throughput it is."""
        return Program(self.gpu_type, self.focal.fingerprint)


@dataclass(frozen=True, slots=True)
class Measured:
    """All measurements of one job in one set, put together.

    Attributes:
        throughput: Their mean, weighted by time.
        low: Low end; spans all of them when they contradict each other.
        high: High end.
        seconds: Their length together.
        contradictory: Whether some two intervals do not overlap.
    """

    throughput: float
    low: float
    high: float
    seconds: float
    contradictory: bool


def set_key(gpu_type: str, focal: DemandProfile, others: Iterable[DemandProfile]) -> SetKey | None:
    """The key of a job in a set, whatever the order of the others; None when a member has no fingerprint."""
    names = tuple(sorted(other.fingerprint for other in others))
    return (gpu_type, focal.fingerprint, names) if focal.fingerprint and all(names) else None


def merged(observations: Sequence[Observation]) -> Measured:
    """Put measurements of the same job in the same set together."""
    weights = [max(1.0, each.seconds) for each in observations]
    whole = math.fsum(weights)

    def mean(values: Iterable[float]) -> float:
        return math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) / whole

    throughput = mean(each.throughput for each in observations)
    contradictory = max(each.low for each in observations) > min(each.high for each in observations)
    if contradictory:
        low, high = min(each.low for each in observations), max(each.high for each in observations)
    else:
        low, high = mean(each.low for each in observations), mean(each.high for each in observations)
    seconds = math.fsum(each.seconds for each in observations)
    return Measured(throughput, min(low, throughput), max(high, throughput), seconds, contradictory)


def features(profile: DemandProfile) -> dict[str, float]:
    """The features of one profile; what is missing or absurd is NaN."""
    known = profile.source != "unknown"
    rate = _within(profile.solo_step_rate, _LEAST_RATE, _MOST_RATE)
    memory = _within(profile.memory_bytes, 1.0, _MOST_BYTES)
    return {
        UTIL: _fraction(profile.util_mean) if known else math.nan,
        BANDWIDTH: _fraction(profile.membw_util),
        STEP: -math.log(rate),
        MEMORY: math.log(memory),
    }


def jobs_of(profiles: Sequence[DemandProfile], names: Sequence[str]) -> Jobs:
    """Profiles as rows of features, NaN where missing.

    Raises:
        ValueError: ``names`` has a feature that no profile can give.
    """
    foreign = [name for name in names if name not in FEATURES]
    if foreign:
        raise ValueError(f"features {', '.join(foreign)} are not accepted; a profile has {', '.join(FEATURES)}")
    rows = [[row[name] for name in names] for row in map(features, profiles)]
    values = np.array(rows, dtype=np.float64).reshape(len(profiles), len(names))
    return Jobs(tuple(each.fingerprint for each in profiles), tuple(each.family for each in profiles), values)


def pairs_of(observations: Iterable[Observation], names: Sequence[str]) -> PairTable:
    """The pairs among the observations as a table; measurements of the same ordered pair become one row.

    Left out are larger sets and jobs without fingerprint. Of several profiles of a job the longest measured one counts.
    """
    groups: dict[tuple[str, str], list[Observation]] = {}
    profiles: dict[str, DemandProfile] = {}
    for each in observations:
        if len(each.others) != 1 or each.key is None:
            continue
        groups.setdefault((each.focal.fingerprint, each.others[0].fingerprint), []).append(each)
        for profile in (each.focal, *each.others):
            best = profiles.get(profile.fingerprint)
            if best is None or profile.observed_s > best.observed_s:
                profiles[profile.fingerprint] = profile
    place: Mapping[str, int] = {name: k for k, name in enumerate(profiles)}
    results = [merged(group) for group in groups.values()]
    return PairTable(
        tuple(names),
        jobs_of(list(profiles.values()), names),
        np.array([place[focal] for focal, _ in groups], dtype=np.intp),
        np.array([place[other] for _, other in groups], dtype=np.intp),
        np.array([each.throughput for each in results], dtype=np.float64),
        np.array([(each.high - each.low) / INTERVAL_SIGMAS for each in results], dtype=np.float64),
    )


def most_informative(rows: PairTable, most: int) -> PairTable:
    """At most so many rows: every job keeps its best, the least noisy first and of those the latest.

    A row's rank is its place among those of its focal job plus its place among those of its neighbour. What a job does
    beside a tenth partner says little that the first nine did not.
    """
    if len(rows) <= most:
        return rows
    as_focal, as_other = (np.zeros(len(rows.jobs), dtype=np.intp) for _ in range(2))
    rank = np.zeros(len(rows), dtype=np.intp)
    for row in np.lexsort((-np.arange(len(rows)), rows.noise)):
        focal, other = rows.focal[row], rows.other[row]
        rank[row] = as_focal[focal] + as_other[other]
        as_focal[focal] += 1
        as_other[other] += 1
    return rows.rows(np.sort(np.argsort(rank, kind="stable")[:most]))


def _fraction(value: float | None) -> float:
    found = _within(value, 0.0, _MOST_UTIL)
    return found if math.isnan(found) else min(1.0, found)  # min alone would make 1 of NaN


def _within(value: float | None, least: float, most: float) -> float:
    if value is None or not least <= value <= most:  # also refuses NaN
        return math.nan
    return float(value)
