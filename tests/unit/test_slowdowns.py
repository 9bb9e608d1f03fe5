"""How a job is told that its neighbours slow it down: how much, how sure, on which GPU, and what drives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from interference_tables import measured
from scheduling import Driver, half, host, measurement, profile, report

from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.training.interference import fit_interference
from cotenant.forecasting.types import DemandProfile, InterferencePredictor
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.models import GuardedInterference
from cotenant.scheduler.views import Explanation, SlowdownView

LEARNED = GuardedInterference(fit_interference(measured(), "made up", "none", "timeslice").predictor())


def sharing(*utils: float) -> Driver:
    """Jobs a, b, … on one GPU, of which these utilisations were measured."""
    driver = Driver(host())
    names = "abc"[: len(utils)]
    driver.run(*(half(name, compute=0.3, gpu_memory=1 << 30, max_slowdown=9.0) for name in names))
    known = zip(names, utils, strict=True)
    driver.do(report("h1", *(measurement(name, "h1-0", profile(util)) for name, util in known)))
    return driver


def told(driver: Driver, predictor: InterferencePredictor = LEARNED, job_id: str = "a") -> Explanation:
    return queries.explain(driver.core.state, job_id, driver.now, predictor=predictor)


def of(explanation: Explanation) -> SlowdownView:
    assert explanation.slowdown is not None
    return explanation.slowdown


def test_the_slowdown_has_its_interval_and_its_reason() -> None:
    driver = sharing(0.9, 0.8)
    (expected, _) = LEARNED.predict([profile(0.9), profile(0.8)], "cpu-1")
    explanation = told(driver)
    view = of(explanation)
    assert (view.gpu_id, view.neighbours) == ("h1-0", ["b"])
    assert view.slowdown == pytest.approx(1.0 / expected.mid, rel=0.05)
    assert view.low < view.slowdown < view.high
    line = (
        f"predicted slowdown {view.slowdown:.2f}, with 80 % certainty {view.low:.2f} to {view.high:.2f}: {view.reason}"
    )
    assert line in explanation.details
    assert "utilisations alone give" in view.reason


def test_what_drives_it_comes_first_and_small_things_not_at_all() -> None:
    explanation = told(sharing(0.9, 0.8))
    by_util = of(explanation).causes["neighbours' util"]
    assert by_util > 0.2
    (line,) = [line for line in explanation.details if line.startswith("what drives it: ")]
    assert line.startswith(f"what drives it: its neighbours' utilisation costs {by_util:.0%} of its speed")
    assert "these neighbours" not in line


def test_three_together_are_told_as_the_cause() -> None:
    assert "it wants 120% of the GPU" in of(told(sharing(0.4, 0.4, 0.4))).reason


def test_of_several_gpus_the_one_that_slows_down_most_counts() -> None:
    driver = Driver(host(gpus=2))
    driver.run(half("both", gpus=2, max_slowdown=9.0), half("light", max_slowdown=9.0))
    driver.run(half("heavy", max_slowdown=9.0))
    places = {name: driver.job(name).lease for name in ("light", "heavy")}
    gpus = {name: lease.shares[0].gpu_id for name, lease in places.items() if lease}
    assert len(set(gpus.values())) == 2
    driver.do(
        report(
            "h1",
            *(measurement("both", gpu_id, profile(0.7)) for gpu_id in gpus.values()),
            measurement("light", gpus["light"], profile(0.1)),
            measurement("heavy", gpus["heavy"], profile(0.9)),
        )
    )
    assert of(told(driver, job_id="both")).gpu_id == gpus["heavy"]


def test_alone_nothing_slows_it_down() -> None:
    explanation = told(sharing(0.9))
    view = of(explanation)
    assert (view.slowdown, view.low, view.high, view.neighbours, view.causes) == (1.0, 1.0, 1.0, [], {})
    assert not [line for line in explanation.details if "predicted slowdown" in line]


def test_a_job_that_waits_is_slowed_down_by_nobody() -> None:
    driver = Driver()
    driver.submit(half("a"))
    assert told(driver).slowdown is None


def test_the_rule_has_a_reason_but_no_causes() -> None:
    explanation = told(sharing(0.9, 0.8), GuardedInterference(UtilisationRule()))
    assert of(explanation).causes == {}
    assert "sum of utilisations 1.70" in of(explanation).reason
    assert not [line for line in explanation.details if line.startswith("what drives it")]


class Mute(UtilisationRule):
    """Cannot say why: it raises, says too little, or no numbers."""

    def __init__(self, causes: Sequence[Mapping[str, float]] | None) -> None:
        self._causes = causes

    def explain(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[Mapping[str, float]]:
        if self._causes is None:
            raise ZeroDivisionError(f"{len(members)} on {gpu_type}")
        return self._causes


@pytest.mark.parametrize("causes", [None, [], [{"own": float("nan")}, {}]])
def test_a_predictor_that_fails_to_say_why_still_predicts(causes: Sequence[Mapping[str, float]] | None) -> None:
    view = of(told(sharing(0.9, 0.8), GuardedInterference(Mute(causes))))
    assert view.causes == {}
    assert view.slowdown > 1.5
