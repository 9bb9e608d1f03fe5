"""Readings that are missing, from the first window on or now and then: what is forecast and learnt all the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interference_tables import measured
from packing import GIB, profile, window

from cotenant.actors.forecasts import forecast_view
from cotenant.forecasting.demand import EwQuantileForecaster, MixtureForecaster
from cotenant.forecasting.scoring import ForecastScores
from cotenant.forecasting.training.interference import fit_interference
from cotenant.forecasting.types import DemandProfile, MemorySource, Quantiles, Signature

Readings = list[tuple[int, bool, bool]]  # GPU, whether utilisation and memory are read; one a second

readings: st.SearchStrategy[Readings] = st.lists(
    st.tuples(st.integers(0, 1), st.booleans(), st.booleans()), min_size=1, max_size=60
)
forecasters = pytest.mark.parametrize("kind", [MixtureForecaster, EwQuantileForecaster])


def windows(of: Readings) -> list[Signature]:
    """A job on two GPUs, its memory and utilisation of a simple pattern."""
    return [
        window(
            second,
            (second * 7 % 10) / 10 if util else None,
            memory=(1.0 + second % 3 / 10) * GIB if memory else None,
            gpu_id=f"g{gpu}",
            rate=5.0,
        )
        for second, (gpu, util, memory) in enumerate(of)
    ]


def levels(quantiles: Mapping[int, Quantiles] | None) -> list[float]:
    return [value for _, each in sorted((quantiles or {}).items()) for value in astuple(each)]


@forecasters
@settings(max_examples=60, deadline=None)
@given(of=readings)
def test_what_is_not_read_is_forecast_as_if_there_had_been_no_window(
    kind: type[MixtureForecaster | EwQuantileForecaster], of: Readings
) -> None:
    """Above all, what was forecast for a moment is not judged by the next reading, minutes later.

    Both GPUs are read at first, so that all number them alike: the work of a tick is spread over ticks by number.
    """
    every = windows([(0, True, True), (1, True, True), *of])
    whole, utils, memories = kind(), kind(), kind()
    whole.observe_batch(every)
    utils.observe_batch([each for each in every if each.util_mean is not None])
    memories.observe_batch([each for each in every if each.memory_bytes is not None])
    said, util, memory = (each.forecast("job") for each in (whole, utils, memories))
    assert levels(said and said.util) == pytest.approx(levels(util and util.util))
    assert levels(said and said.memory) == pytest.approx(levels(memory and memory.memory))
    assert (said.peak_memory_bytes if said else 0.0) == (memory.peak_memory_bytes if memory else 0.0)


@settings(max_examples=60, deadline=None)
@given(of=readings, primed=st.booleans())
def test_what_was_never_read_is_not_forecast_whatever_was_known_before(of: Readings, primed: bool) -> None:
    forecaster = MixtureForecaster()
    if primed:
        forecaster.prime("job", profile(0.4, 3 * GIB))
    every = windows(of)
    forecaster.observe_batch(every)
    said = forecaster.forecast("job")
    read = [any(getattr(each, name) is not None for each in every) for name in ("util_mean", "memory_bytes")]
    if not any(read):
        assert (said is not None) == primed  # nothing but what was known before: that is all there is to say
        return
    assert said is not None
    assert [bool(said.util), bool(said.memory), said.peak_memory_bytes > 0.0] == [*read, read[1]]


def scored(seen: Sequence[Signature]) -> ForecastScores:
    forecaster, scores = MixtureForecaster(), ForecastScores()
    for each in seen:
        scores.observe([each])
        forecaster.observe(each)
        said = forecaster.forecast("job")
        scores.expect({"job": said} if said else {}, each.start_s + 1.0, [each])
    return scores


def test_a_peak_that_was_not_forecast_is_not_held_against_forecasts() -> None:
    late = [replace(window(second, 0.5), memory_bytes=None, memory_peak_bytes=None) for second in range(400)]
    assert scored([*late, *(window(second, 0.5) for second in range(400, 500))]).overall().peaks_scored == 0


def from_source(second: int, gpu_id: str, source: MemorySource | None) -> Signature:
    return replace(window(second, gpu_id=gpu_id), util_source=source, memory_source=source)


@pytest.mark.parametrize(
    ("sources", "estimated"),
    [
        ([("g0", "process"), ("g1", "process")], False),
        ([("g0", "device"), ("g1", "process")], True),
        ([("g0", "device"), ("g1", None), ("g0", None)], True),
        ([("g0", "device"), ("g0", "process"), ("g0", None)], False),
        ([("g0", None)], False),
    ],
)
def test_a_forecast_rests_on_an_estimate_when_the_last_reading_of_any_gpu_is_one(
    sources: list[tuple[str, MemorySource | None]], estimated: bool
) -> None:
    forecaster = MixtureForecaster()
    seen = [from_source(second, *of) for second, of in enumerate(sources)]
    forecaster.observe_batch(seen)
    said = forecaster.forecast("job")
    assert said is not None
    view = forecast_view(said, seen, "mixture")
    assert (view.util_estimated, view.memory_estimated) == (estimated, estimated)


def blind(job: DemandProfile) -> DemandProfile:
    """What is known of a job on a MIG instance, whose driver tells no utilisation."""
    return replace(job, util_mean=1.0, util_p95=1.0, observed_s=0.0, source="unknown")


def test_a_gpu_type_without_utilisation_spoils_the_models_of_no_other() -> None:
    seen = measured()
    unread = [
        replace(each, gpu_type="mig", focal=blind(each.focal), others=tuple(map(blind, each.others))) for each in seen
    ]
    (gpu_type,) = {each.gpu_type for each in seen}
    alone, beside = (fit_interference(each, "test", "none", "timeslice") for each in (seen, [*unread, *seen]))
    assert set(beside.models) == {gpu_type}
    members = [[each.focal, *each.others] for each in seen[:5]]
    for there in (gpu_type, "mig", "another"):
        for each in members:
            assert beside.predictor(()).predict(each, there) == alone.predictor(()).predict(each, there)
    met = beside.predictor(unread).predict([unread[0].focal, *unread[0].others], "mig")[0]
    assert met.mid == pytest.approx(unread[0].throughput, abs=0.15)  # what was measured there is known all the same
    with pytest.raises(ValueError, match="util_mean: no measured job has one"):
        fit_interference(unread, "test", "none", "timeslice")
