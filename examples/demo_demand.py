"""Compares the forecasters of demand on the same windows, all modes' in order. Pure: no I/O, no clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from demo_figures import Mode
from demo_values import mean

from cotenant.forecasting.demand import EwQuantileForecaster, MixtureForecaster
from cotenant.forecasting.profiles import ProfileBook
from cotenant.forecasting.types import Forecast, Quantiles, Signature
from cotenant.forecasting.windows import usable_memory, usable_util

AHEAD_S = (1, 5)
NEAR = 0.5  # of a second: a window counts as that of a moment when it starts this close to it
ROUNDING = 1e-6  # forecasters count in single precision

Forecaster = EwQuantileForecaster | MixtureForecaster


@dataclass(frozen=True, slots=True)
class _Quantity:
    name: str
    actual: Callable[[Signature], float | None]
    forecast: Callable[[Forecast], Mapping[int, Quantiles]]


QUANTITIES = (
    _Quantity("utilisation", usable_util, lambda said: said.util),
    _Quantity("memory", lambda window: None if (read := usable_memory(window)) is None else read[0],
              lambda said: said.memory),
)  # fmt: skip


@dataclass(slots=True)
class _Score:
    """Absolute errors and whether the actual value was at most the 95th percentile, one each per forecast."""

    errors: list[float] = field(default_factory=list)
    covered: list[float] = field(default_factory=list)

    def add(self, said: Quantiles, actual: float) -> None:
        self.errors.append(abs(said.p50 - actual))
        self.covered.append(float(actual <= said.p95 + ROUNDING * max(1.0, actual)))


def compare_forecasts(
    modes: Sequence[Mode], forecasters: Mapping[str, Forecaster] | None = None
) -> list[dict[str, Any]]:
    """Return how far the forecasts were off, per quantity and horizon.

    The windows of all modes are replayed in order; every forecaster takes them in as it would in the running system:
    what is known of a job's earlier runs first, then one window after the other. A forecast counts when all forecasters
    made one and the window it is about was measured. "The last value stays" (persistence) is judged on the same.

    Args:
        modes: What was measured.
        forecasters: By name; None = the first one ("first") and the present one ("cotenant").

    Returns:
        Rows with ``quantity`` ("utilisation": fraction of the device, "memory": bytes), ``ahead_s``, ``forecasts`` (how
        many), ``persistence`` (mean absolute error), ``error`` (that of the median, by forecaster) and ``coverage``
        (of the 95th percentile, by forecaster); None where there was no forecast.
    """
    forecasters = forecasters or {"first": EwQuantileForecaster(), "cotenant": MixtureForecaster()}
    keys = [(quantity.name, ahead) for quantity in QUANTITIES for ahead in AHEAD_S]
    scores = {key: {name: _Score() for name in forecasters} for key in keys}
    stays: dict[tuple[str, int], list[float]] = {key: [] for key in keys}
    series = {job_id: list(windows) for mode in modes for job_id, windows in mode.windows.items()}
    starts = {job_id: [window.start_s for window in windows] for job_id, windows in series.items()}
    for window, said in _replayed(modes, forecasters):
        if any(each is None for each in said.values()):
            continue
        for ahead in AHEAD_S:
            later = _at(series[window.job_id], starts[window.job_id], window.start_s + ahead)
            if later is None:
                continue
            for quantity in QUANTITIES:
                now, then = quantity.actual(window), quantity.actual(later)
                if now is None or then is None:
                    continue
                stays[quantity.name, ahead].append(abs(now - then))
                for name, each in said.items():
                    scores[quantity.name, ahead][name].add(quantity.forecast(each)[ahead], then)
    return [
        {
            "quantity": quantity,
            "ahead_s": ahead,
            "forecasts": len(stays[quantity, ahead]),
            "persistence": mean(stays[quantity, ahead]),
            "error": {name: mean(score.errors) for name, score in scores[quantity, ahead].items()},
            "coverage": {name: mean(score.covered) for name, score in scores[quantity, ahead].items()},
        }
        for quantity, ahead in keys
    ]


def _replayed(
    modes: Sequence[Mode], forecasters: Mapping[str, Forecaster]
) -> Iterator[tuple[Signature, dict[str, Any]]]:
    """Yield every window with what each forecaster says right after it, None where it says nothing."""
    fingerprints = {view.job_id: view.fingerprint for mode in modes for view in mode.views}
    book = ProfileBook()
    moments: dict[float, list[Signature]] = {}
    for mode in modes:
        for job_id, windows in mode.windows.items():
            if job_id in fingerprints:
                for window in windows:
                    moments.setdefault(window.start_s, []).append(window)
    seen: set[str] = set()
    for _, windows in sorted(moments.items()):
        jobs = [window.job_id for window in windows]
        for job_id in set(jobs) - seen:
            for each in forecasters.values():
                if isinstance(each, MixtureForecaster):
                    each.prime(job_id, book.profile(None, fingerprints[job_id]))
        seen.update(jobs)
        for each in forecasters.values():
            each.observe_batch(windows)
        for window in windows:
            book.observe(window, fingerprints[window.job_id])
        said = {name: each.forecast_batch(jobs) for name, each in forecasters.items()}
        for window in windows:
            yield window, {name: found.get(window.job_id) for name, found in said.items()}


def _at(windows: Sequence[Signature], starts: Sequence[float], at_s: float) -> Signature | None:
    """Return the window that starts at a moment, give or take; None when there is none."""
    place = bisect_left(starts, at_s - NEAR)
    return windows[place] if place < len(starts) and starts[place] < at_s + NEAR else None
