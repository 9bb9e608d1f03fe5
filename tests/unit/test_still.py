"""Time in which a job's processes were held still: no step takes it, and nobody pays for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cotenant.actors.reports import JobReport
from cotenant.actors.shim import devices, process, reportfile, still
from cotenant.actors.shim.process import Config, DeviceProcess
from cotenant.actors.shim.shareword import ShareRecord, create

HOUR_S = 3600.0


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The training process of a job with half a GPU, on a clock that the test moves."""
    job = SimpleNamespace(dir=str(tmp_path), now=1000.0, when_asleep=lambda: None)

    def sleep(seconds: float) -> None:
        job.now += seconds
        job.when_asleep()

    def clock() -> float:
        return job.now

    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    for name in ("clock", "own_clock"):
        monkeypatch.setattr(devices.CudaDevice, name, staticmethod(clock))
    create(str(tmp_path / "share"), [ShareRecord(1, 0, 0.5, 1 << 30)]).close()
    job.process = DeviceProcess(Config(job.dir, (frozenset(),), frozenset(), 0))
    job.process._throttle._clock = clock
    job.process._throttle.restart()
    return job


def step(job, took_s: float) -> reportfile.ProcessReport:
    job.now += took_s
    job.process.on_step(job)
    (report,) = reportfile.read_reports(job.dir)
    return report


@pytest.mark.parametrize("over", [True, False])
def test_a_step_in_which_the_process_was_held_still_took_no_longer_for_that(job, over):
    """The host may write that it is over a moment after the process goes on."""
    for _ in range(3):
        step(job, 2.0)
    before = step(job, 2.0)
    still.begin(job.dir, job.now)
    job.now += HOUR_S
    if over:
        still.end(job.dir, job.now)
    after = step(job, 2.0 if over else 0.0)
    if not over:
        still.end(job.dir, job.now)
    assert after.steps == before.steps + 1
    assert max(after.step_times_s) <= 2.0 + 2.0 + 1e-6, "a step, and what it was held back"
    assert after.throttled_s - before.throttled_s <= 2.0 + 1e-6, "what was used is paid for, and no more"
    assert step(job, 2.0).throttled_s - after.throttled_s == pytest.approx(2.0)


def test_a_process_that_is_held_back_when_it_is_held_still_was_not_held_back_for_so_long(job):
    step(job, 2.0)
    before = step(job, 2.0)

    def held_still() -> None:
        job.when_asleep = lambda: None
        still.begin(job.dir, job.now)
        job.now += HOUR_S
        still.end(job.dir, job.now)

    job.when_asleep = held_still
    after = step(job, 2.0)
    assert after.throttled_s - before.throttled_s == pytest.approx(2.0, abs=2 * process.POLL_S)
    assert step(job, 2.0).throttled_s - after.throttled_s == pytest.approx(2.0, abs=2 * process.POLL_S)


def test_what_was_held_still_adds_up_and_damage_is_nothing(tmp_path):
    folder = str(tmp_path)
    assert still.held_still_s(folder, 5.0) == 0.0
    for begin, end in ((10.0, 12.0), (20.0, 23.0)):
        still.begin(folder, begin)
        still.begin(folder, begin + 1.0)  # it is already
        assert still.held_still_s(folder, end) == end - begin + (2.0 if begin > 10 else 0.0)
        still.end(folder, end)
        still.end(folder, end + 9.0)
    assert still.held_still_s(folder, 99.0) == 5.0
    (tmp_path / still.STILL).write_text("a b")
    assert still.held_still_s(folder, 99.0) == 0.0


@pytest.mark.parametrize(("age_s", "went_on_s", "known"), [(5.0, 90.0, True), (15.0, 90.0, False), (None, 90.0, False)])
def test_how_long_ago_a_step_was_is_not_told_across_a_freeze(age_s, went_on_s, known):
    report = JobReport(3, 0.0, age_s, "", 1).since(went_on_s, 100.0)
    assert report.last_step_age_s == (age_s if known else None)
    assert report.steps == 3
