"""What measurements do to shares and predictions, and what happens to a job that outgrows its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scheduling import GIB, Driver, half, host, measurement, profile, report, settings, sharer, spec, without

from cotenant.scheduler.core import colocation, queries, slowdowns
from cotenant.scheduler.core.events import (
    HostJoined,
    JobExited,
    JobHeldBack,
    JobStarted,
    MemoryOverrun,
)
from cotenant.scheduler.core.model import Bounds, Colocation
from cotenant.scheduler.resources import resources_view


class TestMemoryOverrun:
    """A job that uses more memory than its share."""

    def test_it_grows_where_there_is_room(self) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        driver.do(MemoryOverrun("a", 1, "h1", 4 * GIB))
        (resize,) = driver.resizes()
        assert resize.shares[0].memory_bytes == pytest.approx(4.8 * GIB, abs=1)
        assert (driver.state("a"), resize.revision) == ("RUNNING", 1)

    def test_it_gets_what_is_left_when_that_is_just_enough(self) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        driver.do(MemoryOverrun("a", 1, "h1", int(7.5 * GIB)))
        assert driver.resizes()[0].shares[0].memory_bytes == 8 * GIB

    def test_an_estimate_has_it_grow_where_there_is_room_and_teaches_nothing(self) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        driver.do(MemoryOverrun("a", 1, "h1", 4 * GIB, estimated=True))
        (resize,) = driver.resizes()
        assert resize.shares[0].memory_bytes == pytest.approx(4.8 * GIB, abs=1)
        assert driver.job("a").memory_hint_corrected is None

    def test_an_estimate_stops_nobody(self) -> None:
        """Processes that are nobody's job may hold that memory: neither it nor a neighbour that saves has to go."""
        driver = Driver(host())
        driver.run(spec("a", gpu_memory=4 * GIB, compute=0.4), sharer("small", compute=0.4))
        before = driver.job("a")
        for used in (6, 9, 20):
            assert driver.do(MemoryOverrun("a", 1, "h1", used * GIB, estimated=True)) == []
            assert driver.job("a") == before
        assert not driver.core.state.outgrown
        driver.do(MemoryOverrun("a", 1, "h1", 6 * GIB))
        assert [stop.job_id for stop in driver.stops()] == ["small"]

    def test_it_is_tried_once_more_with_what_was_learnt_and_then_fails(self) -> None:
        driver = Driver(host(gpus=2))
        driver.run(spec("n", gpu_memory=5 * GIB, compute=0.4), spec("m", gpu_memory=5 * GIB, compute=0.4))
        driver.run(half("a"))
        driver.do(MemoryOverrun("a", 1, "h1", 4 * GIB))
        assert (driver.kinds(), driver.state("a")) == ([("stop", "a")], "STOPPING")
        driver.do(JobExited("a", 1, "h1", -15))
        assert (driver.state("a"), driver.job("a").memory_hint_corrected) == ("QUEUED", round(4.8 * GIB + 0.5))
        driver.do(JobExited("n", 1, "h1", 0))
        assert driver.state("a") == "STARTING"
        driver.do(JobStarted("a", 2, "h1"))
        driver.do(MemoryOverrun("a", 2, "h1", 9 * GIB))
        driver.do(JobExited("a", 2, "h1", 0))
        assert driver.state("a") == "FAILED"
        assert "it had been restarted with more memory before" in driver.job("a").reason

    def test_more_than_any_gpu_has_is_never_placeable(self) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        driver.do(MemoryOverrun("a", 1, "h1", 20 * GIB))
        driver.do(JobExited("a", 1, "h1", -9))
        assert (driver.state("a"), driver.job("a").not_placeable) == ("FAILED", True)


class TestMeasurements:
    """What is measured changes profiles, shares and predictions."""

    def test_a_job_nothing_is_known_of_is_alone_until_it_is_profiled(self) -> None:
        driver = Driver(host())
        driver.run(spec("a"))
        driver.submit(half("b"))
        assert driver.state("b") == "QUEUED"
        driver.do(report("h1", measurement("a", "h1-0")))
        driver.do(report("h1", measurement("a", "h1-0")), after_s=6.0)  # unused memory is taken back with patience
        assert driver.state("b") == "STARTING"

    def test_profiles_are_kept_by_fingerprint_and_the_longest_observation_wins(self) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        long, short = profile(util=0.5, seconds=90.0), profile(util=0.1, seconds=5.0)
        driver.do(report("h1", measurement("a", "h1-0", long)))
        driver.do(report("h1", measurement("a", "h1-0", short)))
        assert driver.core.state.profiles == {"fp-a": replace(long, fingerprint="fp-a")}
        assert driver.job("a").profile == replace(short, fingerprint="fp-a")
        assert driver.core.state.reported_at == {"h1": driver.now}

    def test_where_gpus_differ_a_program_is_known_by_type(self) -> None:
        """Measured on both types, twice as fast on the other: a third run of it starts there, with what is known."""
        other = host("h2")
        driver = Driver(host("h1"), replace(other, gpus=tuple(replace(gpu, gpu_type="new") for gpu in other.gpus)))
        driver.run(half("a"), replace(half("a2"), fingerprint="fp-a"))
        on = {job.lease.shares[0].gpu_id: job.spec.job_id for job in driver.core.state.jobs.values() if job.lease}
        old, new = profile(util=0.9, rate=1.0), profile(util=0.4, rate=2.0)
        driver.do(report("h1", measurement(on["h1-0"], "h1-0", old)))
        driver.do(report("h2", measurement(on["h2-0"], "h2-0", new)))
        driver.do(*(JobExited(job_id, 1, gpu_id[:2], 0) for gpu_id, job_id in on.items()))
        driver.submit(replace(half("a3"), fingerprint="fp-a"))
        job = driver.job("a3")
        assert job.lease is not None
        assert (job.lease.shares[0].gpu_id, job.profile) == ("h2-0", replace(new, fingerprint="fp-a"))

    @pytest.mark.parametrize("hints", [{"compute": 0.3}, {"compute": 0.3, "gpu_memory": 3 * GIB}])
    def test_where_utilisation_cannot_be_read_a_job_stays_what_its_hints_say(self, hints: dict[str, Any]) -> None:
        driver = Driver(host())
        driver.run(spec("a", **hints))
        for _ in range(9):
            driver.do(report("h1", without(measurement("a", "h1-0"), "util")))
        known = driver.job("a").profile
        assert known is not None
        assert (known.util_mean, known.util_p95, known.solo_step_rate) == (0.3, 0.3, 10.0)
        driver.run(spec("b", compute=0.6, gpu_memory=3 * GIB))
        if "gpu_memory" in hints:
            assert driver.state("b") == "RUNNING"
            assert driver.job("a").lease.shares[0].compute < 0.4  # type: ignore[union-attr]

    def test_where_memory_cannot_be_read_it_stays_as_planned_and_is_not_learnt(self) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        driver.do(report("h1", without(measurement("a", "h1-0", profile(util=0.2)), "memory")))
        known, learnt = driver.job("a").profile, driver.core.state.profiles["fp-a"]
        assert known is not None
        assert (known.util_mean, known.memory_bytes) == (0.2, 3 * GIB)
        assert (learnt.util_mean, learnt.memory_bytes) == (0.2, None)
        driver.do(report("h1", measurement("a", "h1-0", profile(util=0.2, memory=GIB))))
        assert driver.core.state.profiles["fp-a"].memory_bytes == GIB
        driver.do(report("h1", without(measurement("a", "h1-0", profile(util=0.3, seconds=900.0)), "memory")))
        learnt = driver.core.state.profiles["fp-a"]
        assert (learnt.util_mean, learnt.memory_bytes) == (0.3, GIB)  # readings come and go

    def test_what_cannot_be_read_on_one_type_is_not_learnt_of_it(self) -> None:
        """Neither is the rate on another type taken for that on this one: nobody is slower than alone for that."""
        other = host("h2")
        driver = Driver(host("h1"), replace(other, gpus=tuple(replace(gpu, gpu_type="mig") for gpu in other.gpus)))
        driver.run(replace(half("a"), fingerprint="fp"), replace(half("b"), fingerprint="fp"))
        on = {job.lease.shares[0].gpu_id: job.spec.job_id for job in driver.core.state.jobs.values() if job.lease}
        driver.do(report("h1", measurement(on["h1-0"], "h1-0", profile(rate=50.0))))
        late = driver.job(on["h2-0"])
        driver.core.state.put(replace(late, profile=driver.core.state.profiles["fp"]))  # as a later run of it has it
        for rate in (None, 10.0):
            seen = without(measurement(on["h2-0"], "h2-0", neighbours=1), "util")
            driver.do(report("h2", replace(seen, profile=replace(seen.profile, solo_step_rate=rate))))
            known = driver.job(on["h2-0"]).profile
            assert known is not None
            assert (known.util_mean, known.solo_step_rate) == (0.4, rate)
            assert driver.core.state.moves.hurt_since == {}
        assert set(driver.core.state.typed_profiles["fp"]) == {"cpu-1"}

    def test_a_job_of_which_only_steps_are_known_is_found_slowed_down(self) -> None:
        driver = Driver(host())
        driver.run(half("a"), half("b"))
        slow = measurement("a", "h1-0", neighbours=1, step_rate=2.0)
        driver.do(report("h1", without(slow, "util memory")))
        assert driver.core.state.moves.hurt_since == {"a": driver.now}
        assert slowdowns.measured(driver.core.state, driver.job("a")) == pytest.approx(5.0)
        (share,) = (share for share in driver.job("a").lease.shares)  # type: ignore[union-attr]
        assert share.memory_bytes == 3 * GIB

    @pytest.mark.parametrize(
        ("hints", "missing", "told"),
        [
            ({}, "util", ["utilisation"]),
            ({}, "util memory", ["utilisation", "memory"]),
            ({}, "memory", ["memory"]),
            ({"compute": 0.3}, "util", ["utilisation"]),
            ({"gpu_memory": 3 * GIB}, "memory", []),
            ({"compute": 0.3, "gpu_memory": 3 * GIB}, "util memory", []),
            ({"isolation": "hard"}, "util memory", []),
        ],
    )
    def test_why_nobody_may_join_a_job_that_cannot_be_read(
        self, hints: dict[str, Any], missing: str, told: list[str]
    ) -> None:
        driver = Driver(host())
        driver.run(spec("a", **hints))
        for _ in range(9):
            driver.do(report("h1", without(measurement("a", "h1-0"), missing)))
        lines = queries.explain(driver.core.state, "a", driver.now).details
        assert [line.split()[0] for line in lines if "cannot be read there" in line] == told
        driver.submit(half("b"))
        assert (driver.state("b") == "QUEUED") == bool(told or "isolation" in hints)

    @pytest.mark.parametrize("missing", ["util", "memory", "util memory"])
    def test_a_sum_in_which_a_reading_is_missing_is_not_known(self, missing: str) -> None:
        driver = Driver(host(gpus=2))
        driver.run(half("a", gpus=2), half("b"))
        (beside,) = (share.gpu_id for share in driver.job("b").lease.shares)  # type: ignore[union-attr]
        seen = [measurement(*place) for place in (("a", "h1-0"), ("a", "h1-1"), ("b", beside))]
        driver.do(report("h1", *(without(each, missing) if each.job_id == "b" else each for each in seen)))
        of = {gpu.gpu_id: gpu for gpu in queries.gpus(driver.core.state)}
        here, other = of.pop(beside), of.popitem()[1]
        assert (here.util is None, here.memory_used_bytes is None) == ("util" in missing, "memory" in missing)
        assert (other.util, other.memory_used_bytes) == (0.4, 2 * GIB)
        used = queries.job(driver.core.state, "a").usage
        assert used is not None
        assert (used.util_mean, used.memory_bytes) == (0.4, 4 * GIB)
        driver.do(report("h1", without(measurement("a", beside), missing)))
        used = queries.job(driver.core.state, "a").usage
        assert used is not None
        assert used.util_mean == 0.4  # a mean: of what is read
        assert used.memory_bytes == (None if "memory" in missing else 4 * GIB)

    def test_a_job_of_a_known_fingerprint_starts_with_its_profile(self) -> None:
        driver = Driver(host(gpus=2))
        driver.run(half("a"))
        driver.do(report("h1", measurement("a", "h1-0", profile(util=0.3))))
        again = replace(spec("a2"), fingerprint="fp-a")
        driver.submit(again)
        assert driver.job("a2").profile == replace(profile(util=0.3), fingerprint="fp-a")
        assert driver.job("a2").lease.shares[0].memory_bytes < 8 * GIB  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        ("sources", "flags", "told"),
        [
            (("process", "process"), (False, False), None),
            (("counter", "device"), (False, True), "memory is an estimate"),
            (("device", "device"), (True, True), "utilisation and memory are estimates"),
        ],
    )
    def test_readings_of_the_whole_device_are_told_as_estimates(
        self, sources: tuple[Any, Any], flags: tuple[bool, bool], told: str | None
    ) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        driver.do(report("h1", measurement("a", "h1-0", util_source=sources[0], memory_source=sources[1])))
        usage = queries.job(driver.core.state, "a").usage
        assert usage is not None
        assert (usage.util_estimated, usage.memory_estimated) == flags
        resources = resources_view(driver.core.state, driver.job("a"))
        assert (resources.compute.used_estimated, resources.memory.used_estimated) == flags
        details = [line for line in queries.explain(driver.core.state, "a", driver.now).details if "estimate" in line]
        assert details == ([f"{told}: the device says what it does as a whole, not by job"] if told else [])

    def test_shares_follow_use(self) -> None:
        driver = Driver(host())
        driver.run(half("a", compute=0.3), half("b", compute=0.3))
        busy = measurement("b", "h1-0", profile(util=0.65), throttled_fraction=0.5)
        for _ in range(8):
            driver.do(report("h1", measurement("a", "h1-0", profile(util=0.05)), busy))
        a, b = (driver.job(job_id).lease.shares[0].compute for job_id in "ab")  # type: ignore[union-attr]
        assert (a >= 0.3, b > 0.6, a + b <= 1.0) == (True, True, True)

    def test_a_job_that_begins_to_be_held_back_has_its_share_before_its_window_ends(self) -> None:
        driver = Driver(host())
        driver.run(half("a", compute=0.1), half("b", compute=0.1))
        quiet, busy = measurement("a", "h1-0", profile(util=0.05)), measurement("b", "h1-0", profile(util=1.0))
        for _ in range(12):
            driver.do(report("h1", quiet, busy))
        (before,) = driver.job("a").lease.shares  # type: ignore[union-attr]
        assert before.compute < 0.2
        driver.do(JobHeldBack("a", 1, "h1", 0.9), after_s=0.3)
        a, b = (resize.shares[0].compute for resize in sorted(driver.resizes(), key=lambda each: each.job_id))
        assert (a, b) == (0.5, 0.5)

    @pytest.mark.parametrize(
        ("event", "counted"),
        [
            (JobHeldBack("a", 2, "h1", 0.9), "stale epoch"),
            (JobHeldBack("a", 1, "h2", 0.9), "host has no part in the job"),
            (JobHeldBack("x", 1, "h1", 0.9), "unknown job"),
            (JobHeldBack("a", 1, "h1", 1.5), "absurd measurement"),
            (JobHeldBack("a", 1, "h1", float("nan")), "absurd measurement"),
        ],
    )
    def test_who_cannot_be_held_back_changes_nothing(self, event: JobHeldBack, counted: str) -> None:
        driver = Driver(host())
        driver.run(half("a"), half("b"))
        driver.do(report("h1", measurement("a", "h1-0"), measurement("b", "h1-0")))
        driver.do(event)
        assert (driver.resizes(), driver.core.state.ignored) == ([], {counted: 1})

    def test_a_job_that_was_never_measured_is_not_judged_by_a_moment(self) -> None:
        driver = Driver(host())
        driver.run(half("a"), half("b"))
        driver.do(JobHeldBack("a", 1, "h1", 0.9))
        assert driver.resizes() == []

    def test_a_little_more_than_the_whole_device_counts_as_the_whole(self) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        driver.do(report("h1", measurement("a", "h1-0", profile(util=1.02))))
        assert driver.job("a").profile.util_mean == 1.0  # type: ignore[union-attr]

    def test_predictions_are_kept_over_time(self) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        driver.do(report("h1", measurement("a", "h1-0")))
        assert driver.job("a").predicted == 1.0
        driver.run(half("b"))
        joined = driver.now - 1.0
        driver.do(report("h1", measurement("a", "h1-0", profile(util=0.8))))
        beside = driver.job("a").predicted
        assert beside is not None
        assert beside < 0.9
        driver.do(JobExited("b", 1, "h1", 0))
        log = driver.job("a").colocation_log
        assert [line.neighbours for line in log] == [(), ("b",), ("b",), ()]
        assert (log[0].end, log[1].start) == (joined, joined)
        assert (log[2].predicted, log[3].predicted, log[3].end) == (beside, 1.0, None)
        driver.do(JobExited("a", 1, "h1", 0))
        assert all(line.end is not None for line in driver.job("a").colocation_log)
        shared_s = log[2].end - log[1].start  # type: ignore[operator]
        assert (
            f"shared its GPUs with b for {shared_s:.0f} s"
            in queries.explain(driver.core.state, "a", driver.now).details
        )

    def test_of_many_neighbours_the_longest_are_named(self) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        job = driver.job("a")
        lines = [Colocation(0.0, "g0", (f"n{i}", "always"), 0.9, end=10.0 + i) for i in range(12)]
        told = colocation.tell(replace(job, colocation_log=tuple(lines)))
        assert told[0].startswith("shared its GPUs with always for 3 min, n11 for 21 s, n10 for 20 s, ")
        assert told[0].endswith(", n5 for 15 s, 5 more")
        assert colocation.tell(replace(job, colocation_log=())) == []


class TestRefusedGrowth:
    """What stands in the way of a share that should grow is told."""

    def told(self, driver: Driver, job_id: str) -> list[str]:
        details = queries.explain(driver.core.state, job_id, driver.now).details
        return [line for line in details if line.startswith(("held back", "needs"))]

    def crowded(self, **policy: Any) -> Driver:
        """Two jobs that want the whole GPU; "a" is forecast to need more memory than is left."""
        driver = Driver(host(), configured=settings(**policy))
        driver.run(half("a"), half("b"))
        a = measurement("a", "h1-0", profile(util=1.0, memory=6 * GIB), throttled_fraction=0.5)
        b = measurement("b", "h1-0", profile(util=1.0), throttled_fraction=0.5)
        for _ in range(8):
            driver.do(report("h1", a, b))
        return driver

    def test_neighbours_and_what_is_free(self) -> None:
        driver = self.crowded()
        assert self.told(driver, "a") == [
            "held back 50% of the time on h1-0: would use compute 1.00, has 0.50; "
            "the other jobs on h1-0 need 0.50 of it",
            "needs 6.6 GiB on h1-0, has 5.0 GiB; 0 MiB are free on h1-0",
        ]
        driver.do(JobExited("b", 1, "h1", 0))
        assert self.told(driver, "a") == []

    def test_caps_from_the_start(self) -> None:
        driver = Driver(host())
        driver.submit(half("a", compute=0.2, gpu_memory=2 * GIB))
        driver.do(JobStarted("a", 1, "h1", ceiling=Bounds(2 * GIB, 0.4)))
        driver.do(report("h1", measurement("a", "h1-0", profile(util=0.4, memory=3 * GIB), throttled_fraction=0.5)))
        assert self.told(driver, "a")[-1].endswith(
            "its processes were capped when they started: more takes effect when it starts anew"
        )

    def test_shares_that_do_not_follow_use(self) -> None:
        assert all("slots of fixed size" in line for line in self.told(self.crowded(policy="static"), "a"))

    def test_who_has_what_it_needs_is_told_nothing(self) -> None:
        driver = Driver(host())
        driver.run(half("a"))
        driver.do(report("h1", measurement("a", "h1-0", profile(util=1.0))))
        assert self.told(driver, "a") == []

    def test_on_a_gpu_that_is_gone_nothing_stands_in_its_way(self) -> None:
        driver = self.crowded()
        driver.do(HostJoined(host(gpus=0)))
        assert driver.state("a") == "STOPPING"
        assert self.told(driver, "a") == []
