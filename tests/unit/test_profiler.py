"""The profiler: from samples to signatures, with everything that samples can get wrong."""

from __future__ import annotations

import pytest
from profiling import GIB, UNIX_S, Machine, job

from cotenant.actors.devices.base import DeviceSample
from cotenant.actors.devices.recording import Fault, Levels, RecordedGpu, RecordedSample, Recording
from cotenant.actors.devices.replay import ReplayBackend
from cotenant.actors.profiler import Profiler
from cotenant.actors.reports import JobReport
from cotenant.configs.settings import ProfilerSettings
from cotenant.placement.types import Share


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.mark.parametrize(
    ("readings", "mean", "peak", "rejected"),
    [
        pytest.param([0.0, 0.05, 0.10, 0.15], 0.5, 0.5, 0, id="steady"),
        pytest.param([0.0, 0.0, 0.0], 0.0, 0.0, 0, id="idle is 0"),
        pytest.param([0.0, 0.02, 0.04, 0.14], 0.14 / 0.3, 1.0, 0, id="phase change"),
        pytest.param([0.0, 0.1004], 1.0, 1.0, 0, id="a hair above 1"),
        pytest.param([None, None, None], None, None, 0, id="nothing is none, not 0"),
        pytest.param([0.5], None, None, 0, id="one reading is no rate"),
        pytest.param([0.0, None, None, 0.15], 0.5, 0.5, 0, id="a gap inside is bridged"),
        pytest.param([0.0, 0.05, None], 0.5, 0.5, 0, id="missing at the end"),
        pytest.param([0.0, 0.05, 9.00, 9.05], 0.5, 0.5, 1, id="absurd step left out"),
        pytest.param([0.0, 9.00], None, None, 1, id="nothing but absurd"),
        pytest.param([5.0, 5.05, 0.01, 0.06], None, None, 1, id="backwards: the window is unknown"),
    ],
)
def test_utilisation_from_a_counter(
    machine: Machine, readings: list[float | None], mean: float | None, peak: float | None, rejected: int
) -> None:
    signature = machine.window(*readings)
    assert (signature.util_mean, signature.util_peak) == pytest.approx((mean, peak))
    assert signature.samples == len(readings)
    assert machine.profiler.rejected == rejected


def test_windows_join_without_a_gap(machine: Machine) -> None:
    machine.window(0.0, 0.1)
    assert machine.window(0.15, 0.20).util_mean == pytest.approx(0.5)


def test_a_gap_between_windows_belongs_to_neither(machine: Machine) -> None:
    machine.window(0.0, 0.1, None)
    assert machine.window(None, None).util_mean is None
    assert machine.window(None, 5.0, 5.05).util_mean == pytest.approx(0.5)
    assert machine.profiler.rejected == 0


def test_after_a_counter_went_backwards_the_next_window_is_good(machine: Machine) -> None:
    machine.window(5.0, 0.0)
    assert machine.window(0.05, 0.10).util_mean == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("readings", "mean", "peak", "rejected"),
    [
        ([0.2, 0.4, 0.6], 0.4, 0.6, 0),
        ([0.2, None, 0.4], 0.3, 0.4, 0),
        ([0.2, 2.5, 0.4], 0.3, 0.4, 1),
        ([0.2, -0.1], 0.2, 0.2, 1),
        ([None], None, None, 0),
    ],
)
def test_utilisation_from_a_ratio(
    machine: Machine, readings: list[float | None], mean: float | None, peak: float | None, rejected: int
) -> None:
    for util in readings:
        machine.tick(job(None, util=util))
    (signature,) = machine.collect()
    assert (signature.util_mean, signature.util_peak) == pytest.approx((mean, peak))
    assert machine.profiler.rejected == rejected


@pytest.mark.parametrize(
    ("readings", "last", "peak", "rejected"),
    [
        ([1e9, 3e9, 2e9], 2e9, 3e9, 0),
        ([1e9, None], None, 1e9, 0),
        ([1e9, 18446744073707737660.0], 1e9, 1e9, 1),
        ([None], None, None, 0),
        ([20 * GIB], 20 * GIB, 20 * GIB, 0),  # over its budget, within what the hardware has twice over: true
    ],
)
def test_memory(
    machine: Machine, readings: list[float | None], last: float | None, peak: float | None, rejected: int
) -> None:
    for memory in readings:
        machine.tick(job(0.0, memory))
    (signature,) = machine.collect()
    assert (signature.memory_bytes, signature.memory_peak_bytes) == (last, peak)
    assert machine.profiler.rejected == rejected


def test_helper_processes_are_cores(machine: Machine) -> None:
    for tick in range(5):
        machine.tick(job(0.0, host_s=tick * 0.2))
    assert machine.collect()[0].host_cores == pytest.approx(2.0)


def test_duplicate_ticks_make_no_peaks(machine: Machine) -> None:
    machine.play(0.0, 0.05)
    machine.tick(job(0.055), after_s=0.001)  # 5.5 times a device's worth in a millisecond
    machine.tick(job(0.055), after_s=0.0)
    machine.play(0.1005)
    (signature,) = machine.collect()
    assert signature.util_mean == pytest.approx(0.1005 / 0.201)
    assert (signature.samples, machine.profiler.rejected) == (3, 0)


def test_a_clock_that_goes_back_makes_one_unknown_step(machine: Machine) -> None:
    machine.play(0.0, 0.05)
    machine.tick(job(0.10), after_s=-30.0)
    machine.play(0.15)
    (signature,) = machine.collect()
    assert signature.util_mean == pytest.approx(0.5)


def test_windows_are_placed_by_the_wall_clock_and_measured_by_the_other(machine: Machine) -> None:
    first = machine.window(0.0, 0.05)
    assert (first.start_s, first.window_s) == pytest.approx((UNIX_S, 0.2))
    machine.wall_offset += 3600.0
    second = machine.window(0.10, 0.15)
    assert (second.start_s, second.window_s) == pytest.approx((UNIX_S + 3600.2, 0.2))
    assert second.util_mean == pytest.approx(0.5)


def test_a_job_that_ends_inside_a_window_has_a_last_signature(machine: Machine) -> None:
    machine.play(0.0, 0.05)
    machine.tick()
    machine.shares = {}
    (signature,) = machine.collect()
    assert (signature.util_mean, signature.samples, signature.compute_share) == (pytest.approx(0.5), 2, None)
    machine.tick()
    assert machine.collect() == []


def test_a_job_with_a_share_that_is_not_sampled_any_more_reads_none(machine: Machine) -> None:
    machine.window(0.0, 0.05)
    machine.tick()
    (signature,) = machine.collect()
    assert (signature.samples, signature.util_mean, signature.memory_bytes) == (0, None, None)


def test_a_job_that_was_never_sampled_has_no_signature(machine: Machine) -> None:
    machine.tick()
    assert machine.collect() == []


def test_a_job_started_again_under_its_name_is_not_compared_with_its_past(machine: Machine) -> None:
    machine.play(5.0, 5.05)
    machine.tick()
    machine.play(0.0, 0.02)
    (signature,) = machine.collect()
    assert signature.util_mean == pytest.approx(0.07 / 0.2)
    assert machine.profiler.rejected == 0


def test_neighbours_and_shares(machine: Machine) -> None:
    machine.shares = {
        "a": [Share("g0", GIB, 0.25), Share("g1", GIB, 0.75)],
        "b": [Share("g0", GIB, 0.5)],
        "c": [Share("g0", GIB, 0.1)],  # starting: has its share, is not sampled yet
    }
    machine.tick(job(0.0, name="a"), job(0.0, name="a", gpu="g1"), job(0.0, name="b"))
    rows = [(s.job_id, s.gpu_id, s.neighbours, s.compute_share) for s in machine.collect()]
    assert rows == [("a", "g0", 2, 0.25), ("a", "g1", 0, 0.75), ("b", "g0", 2, 0.5)]


def report(steps: int | None, age_s: float | None = 0.0, throttled_s: float | None = None) -> JobReport:
    return JobReport(steps, throttled_s, age_s, controls="", processes=1)


@pytest.mark.parametrize(
    ("reports", "rates"),
    [
        pytest.param([report(5), report(15), report(25)], [None, 10.0, 10.0], id="steady"),
        # Steps of 0.4 s: two or three end in a second, the rate is the same in each.
        pytest.param([report(2, 0.2), report(5, 0.0), report(7, 0.2)], [None, 2.5, 2.5], id="between step ends"),
        # Steps of 2 s.
        pytest.param([report(1), report(1, 1.0), report(2), report(2, 1.0)], [None, None, 0.5, None], id="slow steps"),
        pytest.param(
            [report(10), report(20), report(20, 1.0), report(20, 2.0), report(25, 0.0)],
            [None, 10.0, 0.0, 0.0, 5.0],
            id="a pause is told once",
        ),
        pytest.param([report(0, None), report(3), report(6)], [None, None, 3.0], id="first steps"),
        pytest.param([report(50), report(3), report(6)], [None, None, 3.0], id="began anew"),
        pytest.param([report(5), report(None, None), report(9)], [None, None, None], id="nobody says"),
        pytest.param([report(5), None, report(25)], [None, None, 10.0], id="a report is late"),
        pytest.param([report(5, None), report(9, None), report(9, None)], [None, 4.0, 0.0], id="no ages"),
    ],
)
def test_step_rate(machine: Machine, reports: list[JobReport | None], rates: list[float | None]) -> None:
    got = []
    for each in reports:
        machine.tick(job(0.0), after_s=1.0)
        got.append(machine.collect(each)[0].step_rate)
    assert got == pytest.approx(rates)


@pytest.mark.parametrize(
    ("seconds", "fractions"),
    [
        ([1.0, 1.25, 1.25], [None, 0.25, 0.0]),
        ([1.0, 0.2, 0.4], [None, None, 0.2]),  # the process that counted was replaced
        ([None, 1.0, 1.5], [None, None, 0.5]),
        ([0.0, 1.01], [None, 1.0]),
    ],
)
def test_throttled_fraction(machine: Machine, seconds: list[float | None], fractions: list[float | None]) -> None:
    got = []
    for throttled_s in seconds:
        machine.tick(job(0.0), after_s=1.0)
        got.append(machine.collect(report(1, throttled_s=throttled_s))[0].throttled_fraction)
    assert got == pytest.approx(fractions)


def test_device_readings_are_the_last_windows_with_the_newest_state(machine: Machine) -> None:
    assert machine.profiler.device_readings() == ()
    for util, memory in [(0.2, 1e9), (0.4, 2e9), (2.5, 1e30)]:
        machine.devices = [DeviceSample("g0", util, memory)]
        machine.tick()
    machine.collect()
    machine.devices = [DeviceSample("g0", 0.9, 3e9, note="other work")]
    machine.tick()
    (reading,) = machine.profiler.device_readings()
    assert (reading.util, reading.memory_bytes) == pytest.approx((0.3, 2e9))
    assert (reading.note, reading.lost) == ("other work", False)
    assert machine.profiler.rejected == 2
    machine.devices = [DeviceSample("g0", None, None, lost=True)]
    machine.tick()
    (reading,) = machine.profiler.device_readings()
    assert (reading.util, reading.memory_bytes, reading.lost) == (None, None, True)


@pytest.mark.parametrize(
    ("fault", "for_s", "want", "rejected"),
    [
        ("lost", None, [0.5, None, None, None], 0),
        ("hang", 0.96, [0.5, None, 0.5, 0.5], 0),
        ("missing", 0.96, [0.5, None, 0.5, 0.5], 0),
        ("absurd", 0.95, [0.5, None, 0.5, 0.5], 10 + 3 * 9),  # the counter; the memory; what the device says of both
        ("pid_reuse", None, [0.5, None, 0.5, 0.5], 2),  # both counters
    ],
)
def test_scripted_faults_end_as_none(fault: str, for_s: float | None, want: list[float | None], rejected: int) -> None:
    """A job at half of a GPU, a fault in the second of four windows: never a wrong figure, never 0."""
    now = 0.0
    backend = ReplayBackend(
        Recording(
            (RecordedGpu("A", GIB),),
            (RecordedSample(0.0, (), {"*": Levels(0.5, 1e8, 0.1)}),),
            (Fault(1.05, fault, for_s=for_s),),  # type: ignore[arg-type]
        ),
        "host",
        clock=lambda: now,
    )
    (gpu,) = backend.discover()
    profiler = Profiler(backend, ProfilerSettings(), clock=lambda: now, monotonic=lambda: now)
    backend.watch("job", [gpu.gpu_id], 1)
    got = []
    for tick in range(1, 41):
        now = tick / 10
        profiler.tick()
        if tick % 10 == 0:
            (signature,) = profiler.collect({}, {"job": [Share(gpu.gpu_id, GIB, 1.0)]})
            got.append(signature.util_mean)
    assert got == pytest.approx(want)
    assert profiler.rejected == rejected
