"""A window of a member on a made-up clock, and the figures that are made of it."""

from __future__ import annotations

import pytest
from benchmarks.colocation import console, summary
from benchmarks.colocation.member import out_of_memory
from benchmarks.colocation.plan import Plan, Visit
from benchmarks.colocation.readings import MemberReadings, Readings
from benchmarks.colocation.stepping import run_window
from benchmarks.colocation.visits import reading_columns, step_columns


class Machine:
    """A clock, a CPU clock, and steps that take some of both."""

    def __init__(self, wall_s: float, cpu_s: float) -> None:
        self.now = 0.0
        self.cpu = 0.0
        self._wall_s, self._cpu_s = wall_s, cpu_s
        self.starts: list[float] = []

    def step(self) -> None:
        self.starts.append(self.now)
        self.now += self._wall_s
        self.cpu += self._cpu_s

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, **options: object):
        clocks = {"clock": lambda: self.now, "cpu_clock": lambda: self.cpu, "sleep": self.sleep}
        return run_window(self.step, 1.0, 2.0, 5.0, **clocks, **options)


def test_steps_begin_together_and_only_whole_ones_inside_the_window_count():
    machine = Machine(wall_s=0.4, cpu_s=0.1)
    counted = machine.run()
    assert machine.starts[0] == 1.0
    assert counted.ends[0] == pytest.approx(2.2)
    assert counted.ends[-1] == pytest.approx(5.0)
    assert counted.step_s == pytest.approx([0.4] * 8)
    assert counted.busy_s == pytest.approx(0.8)
    assert machine.starts[-1] < 5.0


def test_counting_begins_once():
    seen: list[float] = []
    machine = Machine(0.4, 0.1)
    machine.run(on_count=lambda: seen.append(machine.now))
    assert seen == [pytest.approx(2.2)]


def test_a_step_longer_than_the_window_does_not_count():
    assert Machine(10.0, 1.0).run().ends == []


@pytest.mark.parametrize(("of_steps", "share"), [(False, 0.25), (True, 0.5)])
def test_a_duty_cycle_caps_cpu_time_or_time_in_steps(of_steps, share):
    machine = Machine(wall_s=0.02, cpu_s=0.01)
    counted = machine.run(duty=share, duty_of_steps=of_steps)
    used = sum(counted.step_s) if of_steps else counted.busy_s
    assert used / 3.0 == pytest.approx(share, abs=0.02)
    assert counted.step_s[0] == pytest.approx(0.02)


def test_a_member_that_waits_anyway_is_not_held_back():
    free = Machine(wall_s=0.1, cpu_s=0.02).run()
    held = Machine(wall_s=0.1, cpu_s=0.02).run(duty=0.5)
    assert len(held.ends) == len(free.ends)


def test_a_paused_member_ends_with_the_window():
    machine = Machine(wall_s=1.0, cpu_s=1.0)
    machine.run(duty=0.01)
    assert machine.now == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("x"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_that_ran_out_is_told_from_other_failures(error, expected):
    assert out_of_memory(error) is expected


def test_the_rate_does_not_depend_on_where_the_window_cuts():
    columns = step_columns({"steps": 5, "first_s": 10.3, "last_s": 12.3, "step_s": [0.5] * 5})
    assert columns["rate"] == pytest.approx(2.0)
    assert columns["step_p50_s"] == 0.5
    assert columns["step_cv"] == 0.0


@pytest.mark.parametrize("steps", [0, 1])
def test_too_few_steps_give_no_rate(steps):
    columns = step_columns({"steps": steps, "first_s": 1.0, "last_s": 1.0, "step_s": [0.5] * steps})
    assert columns["rate"] is None
    assert columns["step_cv"] is None
    assert columns["step_p50_s"] == (0.5 if steps else None)


def test_what_nobody_says_stays_missing():
    answer = {"busy_s": None, "wait_s": None, "host_busy_s": None, "memory_bytes": None}
    silent = reading_columns("a", answer, Readings(members={}, seconds=1.0, ticks=0, cost_s=0.0))
    assert set(silent.values()) == {None}
    seen = Readings(members={"a": MemberReadings(0.5, 0.6, 7)}, seconds=1.0, ticks=9, cost_s=0.0, power_w=300.0)
    told = reading_columns("a", answer, seen)
    assert (told["util_mean"], told["util_peak"], told["memory_bytes"], told["power_w"]) == (0.5, 0.6, 7, 300.0)


def rows(visit: str, members: list[str], rates: list[tuple[str, int, int, float | None]]) -> list[dict[str, object]]:
    return [
        {
            "visit": visit,
            "members": members,
            "member": members[slot],
            "kind": kind,
            "position": position,
            "slot": slot,
            "rate": rate,
            "util_mean": None,
            "device_util": 0.4,
            "memory_bytes": 1 << 20,
        }
        for kind, position, slot, rate in rates
    ]


PAIR = rows(
    "m/a+a#1",
    ["a", "a"],
    [
        ("solo", 0, 0, 10.0),
        ("solo", 1, 1, 20.0),
        ("shared", 2, 0, 5.0),
        ("shared", 2, 1, 15.0),
        ("shared", 5, 0, 7.0),
        ("shared", 5, 1, 13.0),
    ],
)


def test_throughputs_of_a_workload_beside_itself_are_told_apart():
    (one,) = summary.together(PAIR)
    assert one.throughputs == pytest.approx((0.6, 0.7))
    assert one.savings == pytest.approx((1 - 1 / 1.25, 1 - 1 / 1.35))
    assert summary.widths([one])["a", "a"] == pytest.approx(1 / 1.25 - 1 / 1.35)


def test_a_device_that_does_not_know_its_processes_gives_the_utilisation_alone():
    solo = summary.solos(PAIR)["a"]
    assert (solo.rate, solo.utilisation, solo.memory_bytes) == (15.0, 0.4, 1 << 20)


def test_a_set_without_a_rate_is_left_out():
    assert summary.together([{**row, "rate": None} for row in PAIR]) == []


def test_a_person_sees_plan_progress_and_result(capsys):
    visit = Visit("m", ("a", "a"), None, 1, "pairs")
    plan = Plan((visit,), 21.0, 2, 300.0)
    console.show_plan(plan, 3)
    progress = console.Progress()
    progress.planned(plan)
    progress.visited(visit, PAIR, 600.0)
    console.show_summary(PAIR, [{"event": "hung"}])
    console.show_summary([], [])
    text = capsys.readouterr().out
    for part in (
        "1 visits (1 pairs) in about 21 s; 3 are done already",
        "2 more would follow; everything takes about 5 min",
        "1/1] m/a+a#1    10 min left  a x0.60  a x0.70",
        "1 visits, 6 windows; 1 hung",
        "0 visits, 0 windows; nothing went wrong",
    ):
        assert part in text
