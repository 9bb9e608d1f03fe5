"""What the host foresees from its samples: rhythms within windows, gaps, late samples, jobs that come and go."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from profiling import Machine, job

from cotenant.actors.devices.base import DeviceSample
from cotenant.actors.likeness import FIRST_ROWS, SETTLED, Likeness
from cotenant.actors.messages import WindowBatch
from cotenant.actors.profiler import Profiler
from cotenant.configs.settings import ProfilerSettings
from cotenant.forecasting.demand.hostside import HORIZONS, WIDTH
from cotenant.forecasting.types import Reading

KEY = ("job", "g0")


def rhythm(sample: int, period: int = 23) -> float:
    return 0.9 if sample % period < 11 else 0.1


def means(first: int) -> list[float]:
    """The windows that end 1, 2 and 5 windows after sample ``first`` − 1."""
    return [float(np.mean([rhythm(first + 10 * (h - 1) + i) for i in range(10)])) for h in HORIZONS]


def play(likeness: Likeness, samples: int, start: int = 0, key: tuple[str, str] = KEY) -> float:
    at_s = 0.0
    for sample in range(start, start + samples):
        at_s = 100.0 + 0.1 * sample
        likeness.take(at_s, {key: rhythm(sample)})
    return at_s


def by_horizon(said: tuple[float, ...]) -> np.ndarray:
    return np.array(said).reshape(len(HORIZONS), WIDTH)


def test_a_rhythm_within_the_windows_is_foreseen() -> None:
    likeness = Likeness(0.1, 10)
    at_s = play(likeness, 500)
    said = by_horizon(likeness.foreseen(at_s)[KEY])
    assert said == pytest.approx(np.repeat(np.array(means(500))[:, None], WIDTH, axis=1), abs=0.03)


def test_nothing_is_foreseen_of_a_new_job_or_one_not_read_lately() -> None:
    likeness = Likeness(0.1, 10)
    assert likeness.foreseen(0.0) == {}
    at_s = play(likeness, 10 * SETTLED - 1)
    assert likeness.foreseen(at_s) == {}
    at_s = play(likeness, 100)
    assert KEY in likeness.foreseen(at_s + 0.5)
    assert KEY not in likeness.foreseen(at_s + 1.1)


@pytest.mark.parametrize("missing", [1, 5])
def test_short_gaps_and_late_samples_keep_the_rhythm(missing: int) -> None:
    likeness = Likeness(0.1, 10)
    at_s = 0.0
    for sample in range(600):
        at_s = 100.0 + 0.1 * sample + 0.03 * (sample % 2)
        hole = sample % 100 < missing
        readings: dict[tuple[str, str], Reading] = {KEY: None} if hole else {KEY: rhythm(sample)}
        likeness.take(at_s, {} if hole and sample % 2 else readings)
    said = by_horizon(likeness.foreseen(at_s)[KEY])
    assert said.mean(axis=1) == pytest.approx(means(600), abs=0.1)


def test_after_a_long_gap_or_a_clock_set_back_the_job_begins_anew() -> None:
    likeness = Likeness(0.1, 10)
    play(likeness, 200)
    for start in (400, 100):
        at_s = play(likeness, 5, start=start)
        assert likeness.foreseen(at_s) == {}
        at_s = play(likeness, 30, start=start + 5)
        assert KEY in likeness.foreseen(at_s)


def test_jobs_do_not_mix_and_a_row_is_used_again() -> None:
    likeness, alone = Likeness(0.1, 10), Likeness(0.1, 10)
    many = [(f"job-{i}", "g0") for i in range(3 * FIRST_ROWS)]
    for sample in range(120):
        at_s = 0.1 * sample
        likeness.take(at_s, {key: rhythm(sample, 17 + i) for i, key in enumerate(many)})
        alone.take(at_s, {many[5]: rhythm(sample, 22)})
    said = likeness.foreseen(at_s)
    assert set(said) == set(many)
    assert said[many[5]] == alone.foreseen(at_s)[many[5]]
    likeness.keep(many[:2])
    assert set(likeness.foreseen(at_s)) == set(many[:2])
    at_s = play(likeness, 120, key=many[9])
    fresh = Likeness(0.1, 10)
    play(fresh, 120, key=many[9])
    assert likeness.foreseen(at_s)[many[9]] == fresh.foreseen(at_s)[many[9]]


def test_the_profiler_samples_into_it_and_ended_jobs_are_forgotten() -> None:
    machine, busy = Machine(), 0.0
    for sample in range(200):
        busy += 0.1 * rhythm(sample)
        machine.tick(job(busy), job(None, util=0.4, name="ratio", gpu="g1"))
        if sample % 10 == 9:
            machine.collect()
    said = machine.profiler.foreseen()
    # The counter's first reading gives no rate, so its samples are one behind.
    assert by_horizon(said["job", "g0"]).mean(axis=1) == pytest.approx(means(200), abs=0.1)
    assert said["ratio", "g1"] == pytest.approx([0.4] * len(HORIZONS) * WIDTH, abs=1e-3)
    machine.shares.clear()
    machine.tick()
    machine.collect()
    assert machine.profiler.foreseen() == {}


def test_too_slow_a_sampling_shows_no_more_than_the_windows() -> None:
    machine = Machine()
    slow = Profiler(
        machine.profiler._backend, ProfilerSettings(sample_hz=2.0), clock=lambda: 0.0, monotonic=lambda: machine.now
    )
    for _ in range(50):
        machine.now += 0.5
        machine.jobs = [job(0.1 * machine.now)]
        slow.tick()
    assert slow.foreseen() == {}


def test_the_message_of_a_host_agent_that_foresees_nothing_is_read() -> None:
    older = WindowBatch.__new__(WindowBatch)
    older.__setstate__(["h", 1e6, (), {}, (DeviceSample("g0", 0.5, 1.0),)])
    assert (older.host_id, older.foreseen, older.families) == ("h", {}, {})
    newer = WindowBatch("h", 1e6, (), {}, (), foreseen={KEY: (0.5,)})
    assert pickle.loads(pickle.dumps(newer)) == newer
