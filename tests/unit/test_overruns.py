"""When the host agent tells that a job uses more memory than its share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant.actors.overruns import PATIENCE_WINDOWS, Overrun, OverrunWatch
from cotenant.forecasting.types import Signature
from cotenant.placement.types import Share

MIB = 1 << 20
SHARES = {"job": (Share("gpu", 100 * MIB, 0.5),)}
EPOCHS = {"job": 1}


def window(memory_bytes: float | None, gpu_id: str = "gpu") -> list[Signature]:
    return [
        Signature(
            job_id="job",
            gpu_id=gpu_id,
            start_s=0.0,
            window_s=1.0,
            samples=10,
            util_mean=0.5,
            util_peak=0.6,
            memory_bytes=memory_bytes,
            memory_peak_bytes=memory_bytes,
            step_rate=1.0,
            throttled_fraction=0.0,
            host_cores=0.0,
            neighbours=0,
            compute_share=0.5,
        )
    ]


@pytest.mark.parametrize(
    ("memory_mib", "told_in_windows"),
    [
        ([150, 150, 150], [2]),
        ([150, 150, 90, 150, 150], []),  # not in a row
        ([150, None, 150, None, 150], [4]),  # a missing reading neither counts nor clears
        ([115, 115, 115, 115], []),  # within the tolerance
        ([150] * 7, [2, 5]),  # told again only after patience
    ],
)
def test_told_after_patience(memory_mib, told_in_windows):
    watch = OverrunWatch()
    told = []
    for i, mib in enumerate(memory_mib):
        if watch.observe(window(None if mib is None else mib * MIB), SHARES, EPOCHS):
            told.append(i)
    assert told == told_in_windows


@pytest.mark.parametrize(
    ("sources", "estimated"),
    [
        (["process"] * 3, [False]),
        ([None] * 3, [False]),  # a backend that knows no other
        (["device"] * 3, [True]),
        (["process", "device", "process"], [True]),
        (["device", *["process"] * 5], [True, False]),
    ],
)
def test_it_is_a_fact_only_when_every_window_is(sources, estimated):
    watch = OverrunWatch()
    told = []
    for source in sources:
        (signature,) = window(150 * MIB)
        told += watch.observe([replace(signature, memory_source=source)], SHARES, EPOCHS).values()
    assert told == [Overrun(150 * MIB, each) for each in estimated]


@pytest.mark.parametrize("fact_first", [True, False])
def test_of_two_gpus_that_of_which_it_is_known_counts(fact_first):
    watch = OverrunWatch()
    shares = {"job": (Share("gpu", 100 * MIB, 0.5), Share("other", 100 * MIB, 0.5))}
    (fact,), (guess,) = window(150 * MIB), window(190 * MIB, gpu_id="other")
    windows = [fact, replace(guess, memory_source="device")]
    for _ in range(PATIENCE_WINDOWS):
        told = watch.observe(windows if fact_first else windows[::-1], shares, EPOCHS)
    assert told == {"job": Overrun(150 * MIB, estimated=False)}


def test_an_ended_job_leaves_no_count_behind():
    watch = OverrunWatch()
    for _ in range(PATIENCE_WINDOWS - 1):
        watch.observe(window(150 * MIB), SHARES, EPOCHS)
    watch.observe([], {}, {})
    assert watch.observe(window(150 * MIB), SHARES, EPOCHS) == {}


def test_a_run_does_not_inherit_the_count_of_the_one_before_it():
    """It may have begun within a second: no window is without the job."""
    watch = OverrunWatch()
    for _ in range(PATIENCE_WINDOWS - 1):
        watch.observe(window(150 * MIB), SHARES, {"job": 1})
    told = [bool(watch.observe(window(150 * MIB), SHARES, {"job": 2})) for _ in range(PATIENCE_WINDOWS)]
    assert told == [False] * (PATIENCE_WINDOWS - 1) + [True]


def test_a_job_without_a_share_here_is_not_judged():
    watch = OverrunWatch()
    for _ in range(PATIENCE_WINDOWS):
        assert watch.observe(window(150 * MIB, gpu_id="other"), SHARES, EPOCHS) == {}
