"""What would happen: to hypothetical jobs, to those that wait and to those that run, under these or other settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scheduling import GIB, Driver, half, host, profile, settings, spec

from cotenant.configs.settings import AccountSettings, ResizeSettings, SchedulingSettings, Settings
from cotenant.scheduler.core import whatif
from cotenant.scheduler.core.events import SettingsChanged
from cotenant.scheduler.core.model import JobSpec
from cotenant.scheduler.tuning import tuning_of


class TestPlan:
    """What would happen, with nothing done."""

    def test_it_agrees_with_what_then_happens_and_changes_nothing(self) -> None:
        driver = Driver(host(gpus=2))
        driver.run(half("n"))
        before = driver.core.state.to_json()
        wanted = [half("a"), half("b"), half("c", gpus=2, gpu_memory=8 * GIB), half("d", gpu_memory=9 * GIB)]
        view = whatif.plan(driver.core, wanted, now=driver.now)
        assert driver.core.state.to_json() == before
        assert [job.placeable for job in view.jobs] == ["now", "now", "later", "never"]
        driver.submit(*wanted)
        for planned in view.jobs[:2]:
            shares = driver.job(planned.name).lease.shares  # type: ignore[union-attr]
            assert [share.gpu_id for share in planned.shares] == [share.gpu_id for share in shares]
        told = view.jobs[3].explanation
        assert "gpu_memory: 9.0 GiB cannot be met; give at most" in told
        assert driver.job("d").reason.endswith(told), "told beforehand as it is told afterwards"

    def test_jobs_planned_together_are_told_as_they_are_in_the_end(self) -> None:
        """Shares of one GPU sum to at most the whole of it, and jobs are called by their names."""
        driver = Driver(host())
        wanted = [spec(name, gpu_memory=GIB, compute=0.3) for name in ("train-1", "train-2")]
        first, second = whatif.plan(driver.core, wanted, now=driver.now).jobs
        assert (first.placeable, second.placeable) == ("now", "now")
        assert first.shares[0].gpu_id == second.shares[0].gpu_id
        assert first.shares[0].compute + second.shares[0].compute <= 1.0
        assert first.explanation.endswith("; then joined by train-2")
        assert "beside train-1" in second.explanation
        assert (list(first.neighbours), list(second.neighbours)) == (["train-2"], ["train-1"])
        driver.submit(*wanted)
        shares = [driver.job(name).lease.shares[0].compute for name in ("train-1", "train-2")]  # type: ignore[union-attr]
        assert [first.shares[0].compute, second.shares[0].compute] == pytest.approx(shares)

    def test_names_that_are_not_unique_are_told_apart(self) -> None:
        driver = Driver(host())
        wanted = [spec("same", gpu_memory=GIB, compute=0.3)] * 2
        first, second = whatif.plan(driver.core, wanted, now=driver.now).jobs
        assert list(first.neighbours) != list(second.neighbours)

    def test_it_predicts_slowdown_and_saving(self) -> None:
        driver = Driver(host())
        driver.run(half("n"))
        driver.core.state.learn("fp-a", profile(util=0.3), "cpu-1")
        view = whatif.plan(driver.core, [half("a")], now=driver.now)
        assert view.jobs[0].slowdown_predicted is not None
        assert list(view.jobs[0].neighbours) == ["n"]
        assert view.packing_saving_predicted == pytest.approx(0.45, abs=0.1)

    def test_without_hosts(self) -> None:
        view = whatif.plan(Driver().core, [half("a")], now=0.0)
        assert (view.jobs[0].placeable, view.jobs[0].explanation) == ("later", "no GPU host is known yet")


def tried(driver: Driver, *specs: JobSpec, **placement: Any) -> whatif.PlanView:
    """The plan under a changed section ``placement``; it must leave no trace."""
    before = driver.core.state.to_json()
    now = driver.core.state.settings
    view = whatif.plan(
        driver.core, specs, driver.now, now.model_copy(update={"placement": settings(**placement).placement})
    )
    assert driver.core.state.to_json() == before
    return view


class TestOtherSettings:
    """The same jobs, had an administrator chosen otherwise."""

    def test_a_packing_bias(self) -> None:
        driver = Driver(host(gpus=2))
        driver.run(half("n"))
        packed, spread = tried(driver, half("a"), packing_bias=1.0), tried(driver, half("a"), packing_bias=0.0)
        assert [len(view.jobs[0].neighbours) for view in (packed, spread)] == [1, 0]
        assert (packed.running, packed.reconsidered, packed.affected) == (1, 1, [])

    def test_a_limit_that_lets_waiting_jobs_start_which_then_happens(self) -> None:
        driver = Driver(host(), configured=settings(max_jobs_per_gpu=1))
        driver.run(half("a"))
        driver.submit(half("b"), half("c"))
        view = tried(driver, max_jobs_per_gpu=2)
        assert [(job.job_id, job.before, job.after) for job in view.affected] == [("b", "later", "now")]
        more = tuning_of(Settings(placement=settings(max_jobs_per_gpu=2).placement))
        driver.do(SettingsChanged(more.placement, more.resize, more.scheduling))
        assert [driver.state(job_id) for job_id in "bc"] == ["STARTING", "QUEUED"]

    @pytest.mark.parametrize(
        ("changed", "why"),
        [
            ({"max_jobs_per_gpu": 1}, "1 GPU: would carry 2 jobs, the limit is 1"),
            ({"default_max_slowdown": 1.0}, "1 GPU: predicted slowdown 1.04 > 1.00"),
            ({"policy": "exclusive"}, "1 GPU: would carry 2 jobs, the limit is 1"),
        ],
    )
    def test_one_that_running_jobs_would_not_meet(self, changed: dict[str, Any], why: str) -> None:
        driver = Driver(host(gpus=1))
        driver.run(half("a", compute=0.2), half("b", compute=0.2))
        view = tried(driver, **changed)
        told = [(job.job_id, job.before, job.after, job.why) for job in view.affected]
        assert told == [("b", "runs", "later", why)], "without it, the one that was there first may stay"

    @pytest.mark.parametrize(
        "changed", [{"max_jobs_per_gpu": 1}, {"default_max_slowdown": 1.0}, {"policy": "exclusive"}]
    )
    def test_a_running_job_that_would_get_another_gpu_does_not_wait(self, changed: dict[str, Any]) -> None:
        driver = Driver(host(gpus=2), configured=settings(packing_bias=1.0))
        driver.run(half("a", compute=0.2), half("b", compute=0.2))
        [told] = tried(driver, **{"packing_bias": 1.0, **changed}).affected
        assert (told.job_id, told.before, told.after) == ("b", "runs", "elsewhere")
        assert told.why.startswith("alone on h1-1")

    @pytest.mark.parametrize("kind", ["tenants", "queues", "other_tenants", "other_queues"])
    @pytest.mark.parametrize(
        ("limit", "affected"),
        [
            ({"most_gpus": 0.1}, {"a": "never", "b": "never"}),
            ({"most_jobs": 0}, {"a": "later", "b": "later"}),
            ({"most_jobs": 1}, {"b": "later"}),
            ({"most_gpus": 0.7}, {"b": "later"}),
            ({"most_gpus": 1.0}, {}),
            ({"most_jobs": 2}, {}),
        ],
    )
    def test_limits_that_running_jobs_would_not_meet(
        self, kind: str, limit: dict[str, Any], affected: dict[str, str]
    ) -> None:
        driver = Driver(host(gpus=2))
        driver.run(half("a", compute=0.3, queue="q", tenant="q"), half("b", compute=0.6, queue="q", tenant="q"))
        terms = AccountSettings(**limit)
        rules = SchedulingSettings(**{kind: terms if kind.startswith("other") else {"q": terms}})
        before = driver.core.state.to_json()
        now = driver.core.state.settings.model_copy(update={"scheduling": rules})
        view = whatif.plan(driver.core, [], driver.now, now)
        assert driver.core.state.to_json() == before
        assert {job.job_id: job.after for job in view.affected} == affected

    def test_a_limit_that_is_exceeded_already_is_no_news_of_another_setting(self) -> None:
        driver = Driver(host(gpus=2))
        driver.run(half("a"), half("b"))
        closed = SchedulingSettings(other_tenants=AccountSettings(most_jobs=1))
        driver.do(SettingsChanged(settings().placement, ResizeSettings(), closed))
        view = tried(driver, packing_bias=0.3)
        assert (view.affected, view.displaced) == ([], 1), "but that it is so is told"

    def test_a_gpu_that_is_kept_for_somebody_is_no_place_for_a_running_job(self) -> None:
        driver = Driver(host(gpus=2), configured=settings(packing_bias=1.0))
        driver.run(half("a", compute=0.2), half("b", compute=0.2))
        driver.core.state.moves.claim("a", ("h1-1",), driver.now + 60.0)
        [told] = tried(driver, packing_bias=1.0, max_jobs_per_gpu=1).affected
        assert (told.job_id, told.after) == ("b", "later")

    def test_running_jobs_that_are_still_being_measured_are_not_counted_against_it(self) -> None:
        driver = Driver(host())
        driver.core.state.learn("fp-a", profile(util=0.2, memory=GIB), "cpu-1")
        driver.run(spec("a"))
        view = tried(driver, packing_bias=1.0)
        assert (view.affected, view.displaced) == ([], 0)

    def test_weights_and_quotas(self) -> None:
        driver = Driver(host())
        driver.run(half("n", compute=0.9))
        driver.submit(half("a", tenant="ml"))
        closed = SchedulingSettings(tenants={"ml": AccountSettings(most_gpus=0.1)})
        now = driver.core.state.settings.model_copy(update={"scheduling": closed})
        (job,) = whatif.plan(driver.core, [], driver.now, now).affected
        assert (job.job_id, job.after) == ("a", "never")
        assert job.why == "the job takes 0.40 GPUs, the limit of tenant ml is 0.1"

    def test_hypothetical_jobs_may_take_what_a_waiting_one_would_have_had(self) -> None:
        driver = Driver(host(), configured=settings(max_jobs_per_gpu=1))
        driver.run(half("a"))
        driver.submit(half("b"))
        view = tried(driver, replace(half("c", priority="high"), name="c"), max_jobs_per_gpu=2)
        assert [job.placeable for job in view.jobs] == ["now"]
        assert view.affected == []
