"""What the core makes of a job that was never measured: its hints, completed by its cold-start class."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd
import pytest
from scheduling import GIB, Driver, host, measurement, profile, report, settings, spec

from cotenant.forecasting.characterisation.coldstart import LEVELS, QUANTITIES, ColdStartClasses, Descriptors
from cotenant.forecasting.coldstart_profile import profile_from
from cotenant.forecasting.datasets.runs import make_runs
from cotenant.forecasting.training.coldstart import fit
from cotenant.forecasting.types import DemandProfile, ThroughputPrediction
from cotenant.placement.shares import memory_need
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import HostJoined, HostLost, ModelsChanged, Tick
from cotenant.scheduler.core.model import Host
from cotenant.scheduler.core.models import Models
from cotenant.scheduler.core.state import State

GPU_TYPE = "cpu-1"  # of scheduling.host
BERT = {"model": "bert", "batch_size": 8}


@pytest.fixture(scope="module")
def classes() -> ColdStartClasses:
    """Smooth curves, so that the interval of a known architecture is narrow; bert was measured at 6 and 12."""
    rows = [
        {
            "family": f"f{i}",
            "architecture": f"net{i}",
            "batch": batch,
            "util_max": 9.0 * i + step,
            "memory_max": 5.0 + i,
        }
        for i in range(1, 6)
        for step, batch in enumerate((4, 8, 16, 32))
    ]
    rows += [
        {"family": "nlp", "architecture": "bert", "batch": batch, "util_max": util, "memory_max": 10.0}
        for batch, util in ((6, 30.0), (12, 32.0))
    ]
    return replace(fit(make_runs(pd.DataFrame(rows), "made up", 8.0 * GIB)), gpu_types=(GPU_TYPE,))


def wide(classes: ColdStartClasses) -> ColdStartClasses:
    """The same, as if they had been far off on runs they had not seen."""
    far = dict.fromkeys(QUANTITIES, (-0.7, -0.6, 0.0, 0.6, 0.7))
    return replace(classes, errors=dict.fromkeys(LEVELS, far))


def driver(classes: ColdStartClasses | None, *hosts: Host) -> Driver:
    def source(versions: Mapping[str, str]) -> Models:
        return Models(cold_start=classes if versions.get("coldstart") != "off" else None)

    made = Driver()
    made.core = Core(settings(profile_s=5.0), source)
    made.do(*(HostJoined(one) for one in hosts or (host(),)))
    return made


def occupied(classes: ColdStartClasses | None, util: float = 0.3) -> Driver:
    """One GPU with one job that was measured."""
    made = driver(classes)
    made.run(spec("resident", gpu_memory=2 * GIB))
    made.do(report("h1", measurement("resident", "h1-0", profile(util))))
    return made


# -- the profile ------------------------------------------------------------------------------------------------------

KNOWN = Descriptors(None, "bert", batch=8)
FAMILY_ONLY = Descriptors("nlp", batch=8)


@pytest.mark.parametrize(
    ("job", "hints", "gpu_type", "source"),
    [
        (KNOWN, (None, None), GPU_TYPE, "class"),
        (KNOWN, (0.9, None), GPU_TYPE, "class"),
        (KNOWN, (None, GIB), GPU_TYPE, "class"),
        (KNOWN, (0.9, GIB), GPU_TYPE, "hints"),
        (FAMILY_ONLY, (None, None), GPU_TYPE, "unknown"),  # a family alone says nothing about memory
        (FAMILY_ONLY, (0.9, None), GPU_TYPE, "unknown"),
        (FAMILY_ONLY, (None, GIB), GPU_TYPE, "class"),
        (Descriptors(None, "gpt", batch=8), (None, GIB), GPU_TYPE, "unknown"),
        (Descriptors(None, "bert"), (None, None), GPU_TYPE, "unknown"),
        (Descriptors(), (None, GIB), GPU_TYPE, "unknown"),
        (KNOWN, (None, GIB), "H100", "unknown"),
        (KNOWN, (None, GIB), None, "unknown"),
        (KNOWN, (None, GIB), "", "unknown"),
    ],
)
def test_hints_count_and_the_class_fills_in_the_rest(
    classes: ColdStartClasses,
    job: Descriptors,
    hints: tuple[float | None, int | None],
    gpu_type: str | None,
    source: str,
) -> None:
    compute, memory = hints
    found = profile_from(job, compute, memory, classes, gpu_type)
    assert found.source == source
    if source == "class":
        expected = classes.describe(job)
        assert found.util_p95 == (compute if compute is not None else expected.util_p95[-1])
        assert found.util_mean == (compute if compute is not None else expected.util_mean[-1])
        assert found.memory_bytes == memory or (memory is None and found.memory_bytes is not None)
    else:
        assert (found.util_p95, found.memory_bytes) == (1.0 if compute is None else compute, memory)


def test_without_classes_it_is_what_the_hints_say() -> None:
    assert profile_from(KNOWN, 0.4, GIB, None, GPU_TYPE) == DemandProfile(0.4, 0.4, GIB, source="hints")
    assert profile_from(Descriptors("nlp"), None, None, None, None) == DemandProfile(1.0, 1.0, None, family="nlp")


def test_classes_whose_gpu_type_is_not_known_say_nothing(classes: ColdStartClasses) -> None:
    assert profile_from(KNOWN, None, None, replace(classes, gpu_types=()), GPU_TYPE).source == "unknown"


# -- placement --------------------------------------------------------------------------------------------------------


def test_a_job_the_classes_know_shares_a_gpu_without_being_profiled_first(classes: ColdStartClasses) -> None:
    made = occupied(classes)
    made.submit(spec("new", **BERT))
    assert made.state("new") == "STARTING"
    assert made.job("new").profile is not None
    assert made.job("new").profile.source == "class"  # type: ignore[union-attr]


@pytest.mark.parametrize("hints", [{}, {"model": "gpt", "batch_size": 8}, {"batch_size": 8}, {"model_family": "cv"}])
def test_a_job_they_do_not_know_waits_for_a_gpu_of_its_own(classes: ColdStartClasses, hints: dict[str, object]) -> None:
    made = occupied(classes)
    made.submit(spec("new", gpu_memory=GIB, **hints))
    assert made.state("new") == "QUEUED"
    assert [error.kind for error in made.core.state.refused["new"]][-1] == "unprofiled_self"


def test_an_interval_too_wide_for_the_neighbours_limit_keeps_it_out(classes: ColdStartClasses) -> None:
    made = occupied(wide(classes), util=0.6)
    made.submit(spec("new", gpu_memory=GIB, **BERT))
    assert made.state("new") == "QUEUED"
    assert [error.kind for error in made.core.state.refused["new"]][-1] in {"slowdown_self", "slowdown_neighbour"}
    made = occupied(classes, util=0.6)
    made.submit(spec("new", gpu_memory=GIB, **BERT))
    assert made.state("new") == "STARTING"


def test_nothing_is_expected_where_gpus_differ_or_are_of_another_type(classes: ColdStartClasses) -> None:
    other = replace(host("h2").gpus[0], gpu_type="H100")
    for hosts in ((host(), replace(host("h2"), gpus=(other,))), (replace(host("h2"), gpus=(other,)),)):
        made = driver(classes, *hosts)
        made.do()
        made.submit(*(spec(f"j{i}", **BERT) for i in range(3)))
        assert made.core.state.profile_of(made.job("j2")).source == "unknown"
    made = driver(classes, host(), replace(host("h2"), gpus=(other,)))
    made.submit(*(spec(f"j{i}", **BERT) for i in range(3)))
    made.do(HostLost("h2", "gone"))
    assert made.core.state.profile_of(made.job("j2")).source == "class"


def test_a_class_never_makes_a_job_unplaceable(classes: ColdStartClasses) -> None:
    made = driver(classes, host(memory=GIB // 2))
    made.submit(spec("new", **BERT))
    assert made.state("new") == "STARTING"
    (share,) = made.job("new").lease.shares  # type: ignore[union-attr]
    assert share.memory_bytes == GIB // 2
    request = made.core.state.request_of(made.job("new"))
    view = made.core.state.view("h1-0")
    assert request.profile.memory_bytes is not None
    assert request.profile.memory_bytes > view.memory_bytes
    measured = replace(request, profile=replace(request.profile, source="history"))
    assert memory_need(measured, view, 0.1) == request.profile.memory_bytes


def test_what_was_measured_counts_more_than_a_class(classes: ColdStartClasses) -> None:
    made = driver(classes, host(gpus=2))
    made.run(spec("first", **BERT))
    made.do(report("h1", measurement("first", "h1-0", profile(0.7))))
    assert made.job("first").profile.util_mean == 0.7  # type: ignore[union-attr]
    made.submit(replace(spec("again", **BERT), fingerprint="fp-first"))
    assert made.job("again").profile.source == "history"  # type: ignore[union-attr]
    made.submit(spec("else", **BERT))
    assert made.core.state.profile_of(made.job("else")).source == "class"


def test_a_class_is_asked_again_for_a_job_that_lost_its_host_unmeasured(classes: ColdStartClasses) -> None:
    made = driver(classes)
    made.run(spec("new", **BERT))
    made.do(HostLost("h1", "gone"), ModelsChanged({"coldstart": "off"}))
    assert made.job("new").profile.source == "class"  # type: ignore[union-attr]
    made.do(HostJoined(host()))
    assert made.job("new").profile.source == "unknown"  # type: ignore[union-attr]


def test_switching_classes_off_and_on_reaches_the_jobs_that_wait(classes: ColdStartClasses) -> None:
    made = occupied(classes)
    made.do(ModelsChanged({"coldstart": "off"}))
    made.submit(spec("new", **BERT))
    assert made.state("new") == "QUEUED"
    made.do(ModelsChanged({"coldstart": "on"}))
    assert made.state("new") == "STARTING"


# -- explanations -----------------------------------------------------------------------------------------------------


def test_explain_says_what_the_numbers_rest_on(classes: ColdStartClasses) -> None:
    made = occupied(classes)
    made.submit(spec("new", **BERT), spec("unknown"))
    details = queries.explain(made.core.state, "new", made.now).details
    (line,) = [line for line in details if line.startswith("never measured")]
    assert line.startswith("never measured: planned with utilisation 0.3")
    assert line.endswith("level architecture: bert at batch 8: measured at 6 and 12")
    assert not any("never measured" in line for line in queries.explain(made.core.state, "unknown", made.now).details)
    made.do(ModelsChanged({"coldstart": "off"}))
    details = queries.explain(made.core.state, "new", made.now).details
    assert any(line.endswith("from cold-start classes that are no longer in use") for line in details)
    made.do(report("h1", measurement("new", "h1-0")))
    assert not any("never measured" in line for line in queries.explain(made.core.state, "new", made.now).details)


# -- by what measured pairs are found ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hints", "family"),
    [
        ({}, ""),
        ({"model_family": "vision"}, "vision"),
        (BERT, "nlp"),
        ({"model": "bert"}, "nlp"),
        ({"model": "bert", "model_family": "mine"}, "mine"),
        ({"model": "gpt"}, ""),
        ({"compute": 0.3, "gpu_memory": GIB, "model": "bert"}, "nlp"),
    ],
)
def test_every_profile_has_the_fingerprint_and_the_family(
    classes: ColdStartClasses, hints: dict[str, object], family: str
) -> None:
    made = driver(classes, host(gpus=2))
    made.run(spec("a", **hints))
    assert made.job("a").profile is not None
    for _ in range(2):
        known = made.core.state.profile_of(made.job("a"))
        assert (known.fingerprint, known.family) == ("fp-a", family)
        made.do(report("h1", measurement("a", "h1-0")))
    made.submit(replace(spec("b", gpus=2, **hints), fingerprint="fp-a"))
    assert made.core.state.profile_of(made.job("b")).fingerprint == "fp-a"
    assert made.core.state.profile_of(made.job("b")).family == family


def test_a_measurement_that_says_the_same_again_changes_nothing(classes: ColdStartClasses) -> None:
    made = occupied(classes)
    before = made.job("resident").profile
    made.do(report("h1", measurement("resident", "h1-0", profile(0.3))))
    assert made.job("resident").profile is before


class AllBut:
    """Predicts full speed but in sets with one program."""

    name = "all but"

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[ThroughputPrediction]:
        good = len(members) == 1 or not any(member.fingerprint == "fp-bad" for member in members)
        return [ThroughputPrediction(*[1.0 if good else 0.1] * 3)] * len(members)


def test_the_refusal_of_one_program_is_not_that_of_another() -> None:
    made = Driver()
    made.core = Core(settings(), lambda _versions: Models(interference=AllBut()))
    made.do(HostJoined(host()))
    hints = {"gpu_memory": GIB, "compute": 0.3}
    made.run(spec("resident", **hints))
    for name in ("bad", "good"):
        made.core.state.learn(f"fp-{name}", profile(0.3), "cpu-1")
    made.submit(spec("bad", **hints), spec("good", **hints), spec("unknown1"), spec("unknown2"))
    assert [made.state(name) for name in ("bad", "good")] == ["QUEUED", "STARTING"]
    refused = made.core.state.refused
    assert refused["unknown1"] is refused["unknown2"], "jobs that were never measured share one refusal"


# -- records --------------------------------------------------------------------------------------------------------


def test_a_state_read_back_expects_the_same(classes: ColdStartClasses) -> None:
    made = occupied(classes)
    made.submit(spec("new", **BERT), spec("wide", gpus=2, gang="cluster", **BERT))
    copy = State.from_json(made.core.state.to_json())
    again = Core.from_state(copy, lambda _versions: Models(cold_start=classes))
    for name in ("resident", "new"):
        assert again.state.profile_of(copy.jobs[name]) == made.core.state.profile_of(made.job(name))
    assert again.handle([Tick()], made.now) == made.core.handle([Tick()], made.now)


def test_a_state_from_before_these_hints_is_read(classes: ColdStartClasses) -> None:
    made = occupied(classes)
    record = json.loads(made.core.state.to_json())
    for job in record[0]["jobs"]:
        for name in ("model", "model_family", "parameters", "operator_mix"):
            del job["spec"]["hints"][name]
        for name in ("fingerprint", "family", "membw_util"):
            del job["profile"][name]
    old = State.from_json(json.dumps(record).encode())
    assert old.jobs["resident"].spec.hints == made.job("resident").spec.hints
