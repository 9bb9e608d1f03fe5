"""The PRM without Ray: what it sends on, many hosts at once, and windows that nobody could have measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorUnavailableError
from trained_trees import add_trees

from cotenant.actors.demand import UNTRAINED, Named
from cotenant.actors.messages import WindowBatch
from cotenant.actors.prm_actor import Prm
from cotenant.configs.settings import Settings
from cotenant.forecasting.datasets.registry import Registry, load_demand
from cotenant.forecasting.demand import MixtureForecaster
from cotenant.forecasting.demand.arrays import Array
from cotenant.forecasting.demand.engine import Moment
from cotenant.forecasting.demand.trees import TreesExpert
from cotenant.forecasting.demand.trial import TICKS
from cotenant.forecasting.types import (
    HORIZONS_S,
    DemandProfile,
    Forecast,
    JobMeasurement,
    Signature,
    ThroughputPrediction,
)
from cotenant.scheduler.core.events import EvidenceGathered, MeasurementsReported
from cotenant.scheduler.core.models import Models

START = 1_900_000_000.0


class Recorder:
    """The scheduler, as the PRM sees it."""

    def __init__(self) -> None:
        self.reports: list[MeasurementsReported] = []
        self.evidences: list[EvidenceGathered] = []
        self.measurements = Remote(self.reports)
        self.evidence = Remote(self.evidences)
        self.away = False

    def answer(self, _call: object) -> None:
        """What waiting for an answer of it comes to."""
        if self.away:
            raise ActorUnavailableError("it is restarting", None)


class Remote:
    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def remote(self, event: Any) -> None:
        self._calls.append(event)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(ray, "get_actor", lambda *_names: recorder)
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: (calls, []))
    monkeypatch.setattr(ray, "get", recorder.answer)
    return recorder


@pytest.fixture
def prm(tmp_path: Path, scheduler: Recorder) -> Iterator[Prm]:
    manager = Prm(str(tmp_path), Settings().model_dump_json())
    yield manager
    manager.close()


def window(job_id: str, second: float, util: float = 0.5, rate: float | None = 10.0, neighbours: int = 0) -> Signature:
    return Signature(
        job_id, f"gpu of {job_id[0]}", START + second, 1.0, 10, util, util, 1e9, 1e9, rate, 0.0, 0.0, neighbours, 1.0
    )


def batch(host: str, *windows: Signature) -> WindowBatch:
    names = {each.job_id: f"program {each.job_id}" for each in windows}
    gpu_types = {each.gpu_id: "cpu-core" for each in windows}
    return WindowBatch(host, windows[0].start_s + 1.0, windows, names, (), gpu_types)


def test_every_window_leads_to_a_forecast_and_a_profile_that_knows_its_program(prm: Prm, scheduler: Recorder) -> None:
    for second in range(20):
        prm.observe(batch("h", window("a", second)))
    (last,) = scheduler.reports[-1].measurements
    assert last.profile.fingerprint == "program a"
    assert last.profile.source == "history"
    assert 0.4 < last.forecast.util[5].p50 < 0.6 <= last.forecast.util[5].p95 + 0.2
    assert {each.horizon_s for each in prm.forecast_scores("a") or []} == {1, 5}


def test_what_a_job_was_placed_with_reaches_its_forecast_until_its_program_is_known(
    prm: Prm, scheduler: Recorder
) -> None:
    hinted = DemandProfile(0.8, 0.9, 8 << 30, source="hints")
    prm.observe(replace(batch("h", window("told", 0)), planned={"told": hinted}))
    prm.observe(batch("h2", window("not told", 0)))
    told, unknown = (report.measurements[0].forecast for report in scheduler.reports)
    assert told.peak_memory_bytes >= 8 << 30
    assert told.memory[5].p99 >= 8 << 30 > 5e9 > unknown.memory[5].p99
    for second in range(1, 15):
        prm.observe(replace(batch("h", window("told", second)), planned={"told": hinted}))
    again = replace(batch("h3", window("again", 20)), fingerprints={"again": "program told"})
    prm.observe(replace(again, planned={"again": hinted}))
    assert scheduler.reports[-1].measurements[0].forecast.memory[5].p99 < 5e9


def test_the_forecast_of_a_job_is_told_until_it_ends(prm: Prm, scheduler: Recorder) -> None:
    assert prm.forecast("a") is None
    for second in range(20):
        prm.observe(batch("h", replace(window("a", second), memory_source="device"), window("b", second)))
    told = prm.forecast("a")
    assert told is not None
    sent = next(each.forecast for each in scheduler.reports[-1].measurements if each.job_id == "a")
    assert [each.horizon_s for each in told.util] == list(HORIZONS_S) == [each.horizon_s for each in told.memory]
    assert {each.horizon_s: each.p95 for each in told.util} == {h: each.p95 for h, each in sent.util.items()}
    assert told.memory[0].p99 == sent.memory[1].p99
    assert (told.peak_memory_bytes, told.windows) == (sent.largest_memory_bytes, 20)
    assert told.peak_memory_bytes >= max(each.p99 for each in told.memory)
    assert (told.measured_at, told.served_by) == (START + 20.0, "mixture, no trained experts")
    assert (told.util_estimated, told.memory_estimated) == (False, True)
    prm.observe(batch("h", window("b", 20)))
    assert prm.forecast("a") is None
    assert prm.forecast("b") is not None


def test_a_forecast_says_who_made_it_when_the_mixture_has_failed(prm: Prm, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise FloatingPointError("overflow")

    prm.observe(batch("h", window("a", 0)))
    monkeypatch.setattr(MixtureForecaster, "forecast_batch", broken)
    prm.observe(batch("h", window("a", 1)))
    told = prm.forecast("a")
    assert told is not None
    assert told.served_by == "weighted history, in the place of: mixture, no trained experts"


def test_a_forecast_says_that_a_new_model_only_learns_so_far(prm: Prm) -> None:
    prm.observe(batch("h", window("a", 0)))
    prm._forecaster.swap(Named(UNTRAINED, MixtureForecaster))
    prm.observe(batch("h", window("a", 1)))
    told = prm.forecast("a")
    assert told is not None
    assert told.served_by.endswith("; it is still learning, the one before it forecasts")
    for second in range(2, 40):
        prm.observe(batch("h", window("a", second)))
    after = prm.forecast("a")
    assert after is not None
    assert after.served_by == "mixture, no trained experts"


def test_jobs_that_share_become_evidence_for_the_scheduler(prm: Prm, scheduler: Recorder) -> None:
    for second in range(12):
        prm.observe(batch("h", window("ga", second)))
        prm.observe(batch("other", window("xb", second)))
    for second in range(12, 60):
        both = [replace(window(j, second, rate=7.0, neighbours=1), gpu_id="gpu of g") for j in ("ga", "xb")]
        prm.observe(batch("h", *both))
    assert all(event.complete for event in scheduler.evidences)
    found = [each for event in scheduler.evidences for each in event.observations]
    assert {each.focal.fingerprint for each in found} >= {"program ga"}
    assert all(each.throughput == pytest.approx(0.7, abs=0.02) for each in found)
    assert prm.predictions().slowdowns[0].scored >= len(found)


def sharing(prm: Prm, seconds: range) -> None:
    for second in seconds:
        both = [replace(window(j, second, rate=7.0, neighbours=1), gpu_id="gpu of g") for j in ("ga", "xb")]
        prm.observe(batch("h", *both))


def test_evidence_is_told_again_until_the_scheduler_has_it(
    prm: Prm, scheduler: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    for second in range(12):
        prm.observe(batch("h", window("ga", second)))
        prm.observe(batch("other", window("xb", second)))
    scheduler.away = True
    sharing(prm, range(12, 62))
    tries = len(scheduler.evidences)
    assert tries >= 3
    assert "the scheduler did not take evidence in: ActorUnavailableError" in capsys.readouterr().out
    scheduler.away = False
    sharing(prm, range(62, 74))
    told = {each.key: each.seconds for event in scheduler.evidences[tries:] for each in event.observations}
    assert told.keys() == {each.key for event in scheduler.evidences for each in event.observations}


def test_a_prm_started_anew_knows_what_was_measured_and_tells_it(prm: Prm, scheduler: Recorder, tmp_path: Path) -> None:
    for second in range(12):
        prm.observe(batch("h", window("ga", second)))
        prm.observe(batch("other", window("xb", second)))
    sharing(prm, range(12, 60))
    prm.close()
    known = {each.key for event in scheduler.evidences for each in event.observations}
    del scheduler.evidences[:]
    again = Prm(str(tmp_path), Settings().model_dump_json())
    again.observe(batch("h", window("zz", 100)))
    again.close()
    assert {each.key for each in scheduler.evidences[0].observations} == known
    assert again._watch._book.observations() == again._evidence.book.observations() != ()


def test_the_windows_of_many_hosts_at_once_give_what_they_give_one_by_one(tmp_path: Path, scheduler: Recorder) -> None:
    def life(folder: str, at_once: bool) -> list[JobMeasurement]:
        manager = Prm(str(tmp_path / folder), Settings().model_dump_json())
        del scheduler.reports[:]
        for second in range(15):
            batches = [batch(f"h{k}", window(f"{k}job", second, 0.1 * k + 0.01 * (second % 3))) for k in range(1, 6)]
            if at_once:
                manager._waiting = batches
                manager.work_off()
            else:
                for each in batches:
                    manager.observe(each)
        manager.close()
        return [each for report in scheduler.reports for each in report.measurements]

    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    one, many = life("one", False), life("many", True)
    assert [each.job_id for each in one] == [each.job_id for each in many]
    for a, b in zip(one, many, strict=True):
        assert a.profile == b.profile
        assert a.forecast.util[5].p95 == pytest.approx(b.forecast.util[5].p95, abs=1e-6)


def test_a_job_of_which_only_steps_are_known_is_told_of_with_its_pace(prm: Prm, scheduler: Recorder) -> None:
    """No driver told its utilisation or memory: how fast it is beside others still says when it is slowed down."""
    silent = {"util_mean": None, "util_peak": None, "memory_bytes": None, "memory_peak_bytes": None}
    for second in range(20):
        prm.observe(batch("h", replace(window("a", second, neighbours=0), **silent)))  # type: ignore[arg-type]
    for second in range(20, 40):
        prm.observe(batch("h", replace(window("a", second, rate=4.0, neighbours=1), **silent)))  # type: ignore[arg-type]
    assert len(scheduler.reports) == 40
    (last,) = scheduler.reports[-1].measurements
    assert (last.forecast.util, last.forecast.memory, last.forecast.peak_memory_bytes) == ({}, {}, 0.0)
    assert (last.profile.source, last.profile.solo_step_rate) == ("unknown", pytest.approx(10.0))
    assert prm.forecast("a") is None


ABSURD = [
    replace(window("a", 1), util_mean=2.5, util_peak=2.5),
    replace(window("a", 1), util_mean=math.nan),
    replace(window("a", 1), memory_bytes=18446744073707737660.0, memory_peak_bytes=18446744073707737660.0),
    replace(window("a", 1), step_rate=math.inf),
    replace(window("a", 1), window_s=0.0),
    replace(window("a", 1), start_s=-5.0),
    replace(window("a", 1), start_s=math.nan),
    replace(window("a", 1), util_mean=None, util_peak=None, memory_bytes=None, memory_peak_bytes=None, step_rate=None),
    replace(window("a", 1), throttled_fraction=40.0, neighbours=-3),
    window("a", 0),
    window("a", -100),
    window("a", 10_000_000),
]


@pytest.mark.parametrize("bad", ABSURD, ids=range(len(ABSURD)))
def test_a_window_nobody_could_have_measured_stops_nobody(prm: Prm, scheduler: Recorder, bad: Signature) -> None:
    prm.observe(batch("h", window("a", 0), window("b", 0)))
    prm.observe(WindowBatch("h", START + 2.0, (bad, window("b", 1)), {"a": "program a", "b": "program b"}, ()))
    prm.observe(batch("h", window("b", 2)))
    assert scheduler.reports[-1].measurements[0].job_id == "b"
    for report in scheduler.reports:
        for each in report.measurements:
            for quantiles in (*each.forecast.util.values(), *each.forecast.memory.values()):
                assert 0.0 <= quantiles.p10 <= quantiles.p50 <= quantiles.p99 < math.inf


def test_a_window_of_a_job_without_a_program_is_left_out(prm: Prm, scheduler: Recorder) -> None:
    prm.observe(WindowBatch("h", START + 1.0, (window("a", 0), window("b", 0)), {"b": "program b"}, ()))
    assert [each.job_id for each in scheduler.reports[-1].measurements] == ["b"]


def test_what_was_learnt_survives_the_actor(tmp_path: Path, scheduler: Recorder) -> None:
    first = Prm(str(tmp_path), Settings().model_dump_json())
    for second in range(15):
        first.observe(batch("h", window("a", second)))
    first.close()
    again = Prm(str(tmp_path), Settings().model_dump_json())
    later = replace(batch("h", window("new", 99, util=0.0, rate=None)), fingerprints={"new": "program a"})
    again.observe(later)
    (measured,) = scheduler.reports[-1].measurements
    assert measured.profile.solo_step_rate == pytest.approx(10.0)
    again.close()


@pytest.mark.parametrize("kept", [False, True])
def test_a_damaged_profile_book_stops_no_start_whether_it_can_be_kept_or_not(
    tmp_path: Path, scheduler: Recorder, kept: bool
) -> None:
    (tmp_path / "profiles.json").write_text("{")
    if not kept:
        (tmp_path / "profiles.unreadable").mkdir()
    manager = Prm(str(tmp_path), Settings().model_dump_json())
    manager.observe(batch("h", window("a", 0)))
    manager.close()
    assert len(scheduler.reports) == 1
    assert json.loads((tmp_path / "profiles.json").read_text())["jobs"]
    assert (tmp_path / "profiles.unreadable").is_file() == kept


def test_one_host_with_a_newer_agent_does_not_silence_the_others(prm: Prm, scheduler: Recorder) -> None:
    newer = window("a", 0)
    object.__setattr__(newer, "schema_version", 99)
    prm._waiting = [batch("new", newer), batch("h", window("b", 0))]
    prm.work_off()
    assert [each.job_id for report in scheduler.reports for each in report.measurements] == ["b"]


def test_learning_goes_on_while_the_scheduler_is_away(prm: Prm, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_names: str) -> None:
        raise ValueError("no such actor")

    monkeypatch.setattr(ray, "get_actor", away)
    for second in range(12):
        prm.observe(batch("h", window("a", second)))
    assert {each.horizon_s for each in prm.forecast_scores("a") or []} == {1, 5}


def test_a_rate_alone_on_one_type_of_gpu_says_nothing_about_another(prm: Prm, scheduler: Recorder) -> None:
    for second in range(20):
        prm.observe(replace(batch("h", window("a", second, rate=100.0)), gpu_types={"gpu of a": "fast"}))
    for second in range(20, 80):
        both = tuple(replace(window(j, second, rate=20.0, neighbours=1), gpu_id="slow-0") for j in ("a", "b"))
        prm.observe(replace(batch("h", *both), gpu_types={"slow-0": "slow"}))
    assert not scheduler.evidences
    assert scheduler.reports[-1].measurements[0].profile.solo_step_rate is None


def test_a_full_disk_is_told_and_learning_goes_on(
    tmp_path: Path, scheduler: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = Prm(str(tmp_path), Settings().model_dump_json())
    (tmp_path / "profiles.tmp").mkdir()  # nothing can be written there
    for second in range(30):
        manager.observe(batch("h", window("a", second)))
    assert "profiles.json cannot be written" in capsys.readouterr().out
    assert len(scheduler.reports) == 30
    manager.close()


# -- models that serve ------------------------------------------------------------------------------------------------


def served(prm: Prm, scheduler: Recorder, seconds: range) -> list[Forecast]:
    """Forecasts of a job with a demand that goes up and down, as the scheduler is told them."""
    del scheduler.reports[:]
    for second in seconds:
        prm.observe(batch("h", window("a", second, 0.2 + 0.1 * (second % 7))))
    return [report.measurements[0].forecast for report in scheduler.reports]


def failing_after(steps: int) -> Callable[[TreesExpert, Moment], Array]:
    """A step of trees that goes well so many times."""
    sound, left = TreesExpert.step, iter(range(steps))

    def step(expert: TreesExpert, moment: Moment) -> Array:
        if next(left, None) is None:
            raise RuntimeError("no more")
        return sound(expert, moment)

    return step


def test_experts_that_become_active_serve_in_the_running_prm(tmp_path: Path, prm: Prm, scheduler: Recorder) -> None:
    registry = Registry(tmp_path / "models")
    version = add_trees(registry)
    served(prm, scheduler, range(10))
    assert prm.predictions().serving == {"demand": UNTRAINED}
    assert prm.serving() == f"demand: {UNTRAINED}"
    registry.activate("demand", version)
    said = served(prm, scheduler, range(10, 90))[-1]
    assert prm.predictions().serving == {"demand": f"mixture with trained experts, version {version}"}
    assert not prm.predictions().warnings
    wanted, untrained = load_demand(registry, version).forecaster(), MixtureForecaster()
    begun = 90 - said.windows  # when the PRM took the version up; it learnt before it served
    for second in range(begun, 90):
        for forecaster in (wanted, untrained):
            forecaster.observe(window("a", second, 0.2 + 0.1 * (second % 7)))
    theirs, plain = wanted.forecast("a"), untrained.forecast("a")
    assert 10 < begun <= 20
    assert said.util == (theirs and theirs.util)
    assert said.util != (plain and plain.util)


def test_experts_that_fail_before_they_take_over_are_not_said_to_serve(
    tmp_path: Path, prm: Prm, scheduler: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path / "models")
    version = add_trees(registry)
    served(prm, scheduler, range(10))
    monkeypatch.setattr(TreesExpert, "step", failing_after(2 * TICKS + 10))  # twice it is found fit to serve
    registry.activate("demand", version)
    said = served(prm, scheduler, range(10, 90))[-1]
    view, told = prm.predictions(), prm.forecast("a")
    assert told is not None
    assert view.serving == {"demand": UNTRAINED}
    assert told.served_by == UNTRAINED
    assert said.windows == 90
    assert any("did not take over" in each for each in view.warnings)
    registry.activate("demand", None)
    said = served(prm, scheduler, range(90, 100))[-1]
    assert said.windows == 100  # what served goes on with all that it knows
    assert prm.predictions().warnings == []


class Foolish:
    """A predictor that is always wrong in the same way."""

    name = "foolish"

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[ThroughputPrediction]:
        return [ThroughputPrediction(0.1, 0.123, 0.2)] * len(members)


def test_a_slowdown_is_judged_by_the_interference_model_that_has_become_active(
    prm: Prm, scheduler: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prm._shelf, "wanted", lambda: {"interference": "another"})
    monkeypatch.setattr(prm._shelf, "load", lambda _versions: Models(Foolish()))
    for second in range(12):
        prm.observe(batch("h", window("ga", second)))
        prm.observe(batch("other", window("xb", second)))
    sharing(prm, range(12, 30))
    (score,) = prm.predictions().slowdowns
    assert score.error is not None
    assert score.error * score.scored >= 0.7 - 0.123 - 0.02


def test_windows_are_counted_for_the_next_training_over_restarts(tmp_path: Path, scheduler: Recorder) -> None:
    for life in (1, 2):
        manager = Prm(str(tmp_path), Settings().model_dump_json())
        for second in range(20):
            manager.observe(batch("h", window("a", 100 * life + second)))
        manager.close()
        assert json.loads((tmp_path / "training.json").read_text()) == {"windows": 20 * life}


def test_demand_that_has_changed_for_good_is_drift(prm: Prm, scheduler: Recorder) -> None:
    rng = np.random.default_rng(0)
    for second in range(1150):
        noise, changed = float(rng.random()), second >= 1020
        util, memory = (noise, 1e9 * (1.0 + noise)) if changed else (0.5 + 0.01 * noise, 1e9)
        each = replace(window("a", second, util), memory_bytes=memory, memory_peak_bytes=2e9)
        prm.observe(batch("h", each))
        assert changed or not prm.predictions().drift
    told = prm.predictions().drift
    assert any(" demand, program program a: " in text for text in told)
    assert any(" demand, memory of program program a: " in text for text in told)
