"""The drift detector: silent on what stays as it is, quick on what moves."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from cotenant.forecasting import drift
from cotenant.forecasting.drift import LEARNING, DriftDetector

Floats = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]
SHAPES: dict[str, Draw] = {
    "normal": lambda rng, count: rng.normal(0.0, 0.1, count),
    "absolute": lambda rng, count: np.abs(rng.normal(0.0, 0.1, count)),
    "uniform": lambda rng, count: rng.uniform(0.0, 0.3, count),
    "exponential": lambda rng, count: rng.exponential(0.1, count),
}


def alarm(errors: Floats, detector: DriftDetector | None = None, covered: Floats | None = None) -> int | None:
    """After how many scores the first alarm comes; None: never."""
    detector = detector or DriftDetector()
    for number, error in enumerate(errors.tolist()):
        if detector.update("key", error, None if covered is None else bool(covered[number])) is not None:
            return number + 1
    return None


@pytest.mark.parametrize("draw", SHAPES.values(), ids=SHAPES)
def test_hardly_ever_an_alarm_in_ten_thousand_scores_of_the_same(draw: Draw) -> None:
    alarms = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        alarms += alarm(draw(rng, 10_000), covered=rng.random(10_000) < 0.8) is not None
    assert alarms == 0


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("draw", SHAPES.values(), ids=SHAPES)
def test_a_shift_by_two_standard_deviations_is_found(draw: Draw, sign: float) -> None:
    for seed in range(20):
        errors = draw(np.random.default_rng(seed), 1100)
        errors[1000:] += 2.0 * sign * errors[:1000].std()
        found = alarm(errors)
        assert found is not None
        assert 1000 < found <= 1080


def test_the_reason_says_what_was_seen_and_the_key_begins_anew() -> None:
    detector = DriftDetector()
    rng = np.random.default_rng(0)
    for error in rng.normal(0.0, 0.02, 500).tolist():
        assert detector.update(("rule", "A100"), error) is None
    found = next(filter(None, (detector.update(("rule", "A100"), e) for e in rng.normal(0.2, 0.02, 100).tolist())))
    assert (found.key, found.kind) == (("rule", "A100"), "error")
    assert "errors are 0.2" in found.reason
    assert all(detector.update(("rule", "A100"), e) is None for e in rng.normal(0.2, 0.02, 2000).tolist())


def test_intervals_that_hold_too_little_alarm() -> None:
    rng = np.random.default_rng(0)
    detector = DriftDetector(0.8)
    found = [detector.update("key", 0.0, bool(covered)) for covered in rng.random(400) < 0.4]
    first = next(filter(None, found))
    assert first.kind == "coverage"
    assert "80% should have" in first.reason
    assert first.samples <= 60


def test_wide_intervals_are_no_drift() -> None:
    detector = DriftDetector(0.8)
    assert all(detector.update("key", 0.0, True) is None for _ in range(5000))


@pytest.mark.parametrize(
    "errors",
    [
        pytest.param([], id="none"),
        pytest.param([0.3], id="a single one"),
        pytest.param([1e300], id="a single absurd one"),
        pytest.param([0.1] * 3000, id="constant"),
        pytest.param([0.0] * 3000, id="none wrong"),
        pytest.param([math.nan] * 3000, id="no numbers"),
        pytest.param([math.inf, -math.inf] * 1000, id="infinite"),
        pytest.param([None] * 3000, id="not scored"),
        pytest.param([0.0] * 1000 + [5.0] + [0.0] * 1000, id="one wild one"),
        pytest.param([0.1, math.nan] * 1000, id="holes"),
    ],
)
def test_what_says_nothing_never_alarms(errors: list[float | None]) -> None:
    detector = DriftDetector()
    assert [detector.update("key", error, None) for error in errors] == [None] * len(errors)


def test_keys_do_not_mix_and_can_be_reset() -> None:
    detector = DriftDetector()
    rng = np.random.default_rng(1)
    for error in rng.normal(0.0, 0.1, LEARNING + 100).tolist():
        detector.update("a", error)
        detector.update("b", error + 1.0)
    detector.reset("a")
    detector.reset("never seen")
    assert all(detector.update("a", 1.0 + error) is None for error in rng.normal(0.0, 0.1, 1000).tolist())
    assert any(detector.update("b", 3.0) is not None for _ in range(100))


def test_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "MOST_KEYS", 20)
    detector = DriftDetector()
    for number in range(100):
        detector.update(number, 0.1)
    assert list(detector._watches) == list(range(80, 100))


@pytest.mark.parametrize("level", [0.0, 1.0, -0.5, math.nan])
def test_a_level_that_is_none_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match=r"level: .* is not accepted"):
        DriftDetector(level)
