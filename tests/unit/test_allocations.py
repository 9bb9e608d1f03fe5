"""What jobs ask of their own leases: a table of answers, and what holds whatever they ask."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from scheduling import GIB, Driver, half, host, measurement, profile, report, settings, spec, without

from cotenant.configs.settings import AccountSettings, SchedulingSettings
from cotenant.forecasting.types import Forecast, Quantiles
from cotenant.scheduler.core.allocations import KEPT_ANSWERS
from cotenant.scheduler.core.commands import ResizeShares
from cotenant.scheduler.core.events import HostJoined, JobExited, JobStarted, ResourcesAsked, StopRequested
from cotenant.scheduler.core.model import Bounds, Job, JobState, ResourceAnswer, Wish
from cotenant.scheduler.core.state import State
from cotenant.scheduler.errors import HintError, NotAccepted, NotPermitted
from cotenant.scheduler.resources import answer_view, asked, resources_view

MIB = 1 << 20


class Asking(Driver):
    """A driver whose jobs ask for things."""

    count = 0

    def ask(self, job_id: str, action: str, resource: str, amount: float | None, **more: object) -> ResourceAnswer:
        Asking.count += 1
        epoch = more.pop("epoch", self.job(job_id).epoch)
        event = ResourcesAsked(job_id, epoch, f"ask-{Asking.count}", action, resource, amount)  # type: ignore[arg-type]
        self.do(event)
        return self.job(job_id).answers[-1]

    def share(self, job_id: str) -> tuple[int, float]:
        (share,) = self.job(job_id).lease.shares
        return share.memory_bytes, share.compute


@pytest.fixture
def two() -> Asking:
    """Two jobs with 3 GiB and 0.4 each on a GPU of 8 GiB, both busy with 0.4 of it."""
    driver = Asking(host())
    driver.run(half("a"), half("b"))
    for _ in range(8):  # until it is believed
        driver.do(report("h1", *(measurement(job_id, "h1-0", profile()) for job_id in "ab")))
    return driver


def test_memory_is_reserved_from_what_is_free(two):
    answer = two.ask("a", "request", "memory", GIB)
    assert (answer.status, answer.granted, answer.reason) == ("granted", GIB, "there is room for it")
    assert two.share("a")[0] == 4 * GIB
    (resize,) = [command for command in two.commands if isinstance(command, ResizeShares) and command.job_id == "a"]
    assert resize.shares[0].memory_bytes == 4 * GIB
    assert "the job's own request" in resize.reason

    answer = two.ask("b", "request", "memory", 2 * GIB)
    assert (answer.status, answer.granted) == ("partly", GIB)
    assert answer.reason == "as much as there is room for: 1.0 GiB are free on h1-0"
    answer = two.ask("a", "request", "memory", 1)
    assert (answer.status, answer.reason) == ("refused", "0 MiB are free on h1-0")
    assert two.commands == []


def test_memory_that_was_asked_for_stays_however_idle(two):
    two.ask("a", "request", "memory", GIB)
    two.submit(half("waits"))  # somebody could use it
    for _ in range(20):
        two.do(report("h1", *(measurement(job_id, "h1-0", profile(memory=GIB)) for job_id in "ab")))
    assert two.share("a")[0] == 4 * GIB
    assert two.share("b")[0] < 3 * GIB, "what nobody asked for is taken"


def test_memory_is_given_back_as_far_as_it_is_free(two):
    answer = two.ask("a", "release", "memory", 2 * GIB)  # 2 of 3 GiB are in use
    assert answer.status == "partly"
    assert answer.reason == "2.0 GiB are in use, 2.2 GiB with what is forecast and kept spare"
    assert two.share("a")[0] == 3 * GIB - answer.granted == 2256 * MIB
    two.do(report("h1", measurement("a", "h1-0", profile())))
    assert two.share("a")[0] == 2256 * MIB
    assert two.ask("a", "release", "memory", 1).status == "refused"
    assert two.ask("b", "request", "memory", 2.5 * GIB).status == "granted"


def test_what_is_in_use_stays_before_the_first_step_too(two):
    """What a known program will need is not judged by how it starts up; what it uses is not given back all the same."""
    two.do(report("h1", measurement("a", "h1-0", profile(), step_rate=None)))
    answer = two.ask("a", "release", "memory", 100 * GIB)
    assert (answer.status, two.share("a")[0]) == ("partly", 2 * GIB)


def test_of_memory_that_was_never_read_nobody_says_that_none_is_in_use():
    driver = Asking(host())
    driver.run(half("a"))
    driver.do(report("h1", without(measurement("a", "h1-0"), "memory")))
    assert resources_view(driver.core.state, driver.job("a")).memory.used is None
    answer = driver.ask("a", "release", "memory", GIB)
    assert (answer.status, driver.share("a")[0]) == ("granted", 2 * GIB)
    answer = driver.ask("a", "release", "memory", 100 * GIB)
    assert answer.reason == "what is in use cannot be read now; all that was reserved is given back"


def test_while_no_memory_is_read_what_was_read_before_is_not_given_back(two):
    """Readings come and go: what they said stays true, however often it is asked."""
    for _ in range(3):
        now = measurement("a", "h1-0", profile(), memory_bytes=None, memory_peak_bytes=None)
        two.do(report("h1", now))
        answer = two.ask("a", "release", "memory", 100 * GIB)
        assert answer.reason == "what is in use cannot be read now, 2.2 GiB with what is forecast and kept spare"
        assert two.share("a")[0] == 2256 * MIB


@pytest.mark.parametrize("forecast", [None, GIB // 2, 2 * GIB, 5 * GIB])
def test_what_is_told_to_be_given_back_is_what_the_share_falls_by(two, forecast):
    """Also where it once used more, or is forecast to: what would be reserved for it again is not given back."""
    two.do(report("h1", measurement("a", "h1-0", profile(memory=int(2.9 * GIB)))))
    now = measurement("a", "h1-0", profile(memory=GIB))
    if forecast is not None:
        memory = Quantiles(*[float(forecast)] * 5)
        now = replace(now, forecast=Forecast("a", now.forecast.util, {1: memory, 60: memory}, float(forecast), 60))
    two.do(report("h1", now))
    had = two.share("a")[0]
    answer = two.ask("a", "release", "memory", 100 * GIB)
    assert had - two.share("a")[0] == answer.granted
    assert (answer.status == "refused") is (forecast == 5 * GIB), answer.reason
    after = two.share("a")[0]
    two.do(report("h1", now))
    assert two.share("a")[0] == after, "and stays"


def test_compute_is_guaranteed_from_what_the_others_do_not_need(two):
    answer = two.ask("a", "request", "compute", 0.9)
    assert answer.status == "partly"
    assert answer.reason == "as much as there is room for: the other jobs on h1-0 need 0.46 of it"
    assert two.job("a").guarantee == pytest.approx(1.0 - 0.46, abs=0.01)
    assert two.share("a")[1] >= two.job("a").guarantee - 1e-9
    for _ in range(10):  # the guarantee lasts
        two.do(report("h1", measurement("a", "h1-0", profile(util=0.1)), measurement("b", "h1-0", profile(util=1.0))))
    assert two.share("a")[1] >= two.job("a").guarantee - 1e-9
    answer = two.ask("a", "release", "compute", 0.3)
    assert answer.status == "granted"
    for _ in range(8):
        two.do(report("h1", measurement("a", "h1-0", profile(util=0.1)), measurement("b", "h1-0", profile(util=1.0))))
    assert two.share("a")[1] < 0.3


def test_compute_that_is_not_guaranteed_cannot_be_given_back():
    driver = Asking(host())
    driver.run(spec("a", gpu_memory=GIB))
    answer = driver.ask("a", "release", "compute", 0.1)
    assert (answer.status, answer.reason) == (
        "refused",
        "no compute is guaranteed to it: what it does not use goes to others by itself",
    )
    answer = driver.ask("a", "request", "compute", 0.1)
    assert (answer.status, answer.reason) == ("refused", "h1-0 has no more")


def test_a_job_can_limit_itself(two):
    answer = two.ask("a", "limit", "compute", 0.25)
    assert (answer.status, answer.granted) == ("granted", 0.25)
    assert two.share("a")[1] == 0.25
    busy = [measurement(job_id, "h1-0", profile(util=1.0)) for job_id in "ab"]
    two.do(report("h1", *busy))
    assert two.share("a")[1] == 0.25
    assert two.ask("a", "request", "compute", 0.1).reason == "it has limited itself (set_resource_limits)"
    two.ask("a", "limit", "compute", None)
    two.do(report("h1", *busy))
    assert two.share("a")[1] > 0.25

    assert two.ask("b", "limit", "memory", GIB).status == "refused"  # 2 GiB are in use
    assert two.ask("b", "limit", "memory", 2 * GIB).status == "granted"
    assert two.share("b")[0] == 2 * GIB
    assert two.ask("b", "request", "memory", GIB).status == "refused"


def test_what_a_restarted_job_asked_for_it_asks_for_again(two):
    two.ask("a", "request", "memory", GIB)
    two.ask("a", "limit", "compute", 0.3)
    job = two.job("a")
    two.do(JobExited("a", job.epoch, "h1", -9, lost=True))
    two.start_all(two.do(after_s=5.0))
    assert two.job("a").state is JobState.RUNNING
    assert two.share("a") == (4 * GIB, pytest.approx(0.3, abs=1 / 4096))


def test_what_processes_were_capped_at_takes_a_restart():
    driver = Asking(host())
    (start,) = driver.submit(half("a"))
    driver.do(JobStarted("a", start.epoch, "h1", 1, Bounds(3 * GIB, 0.8)))
    answer = driver.ask("a", "request", "memory", GIB)
    assert answer.status == "refused"
    assert answer.reason == "its processes were capped when they started: more takes effect when it starts anew"
    for _ in range(3):
        driver.do(report("h1", measurement("a", "h1-0", profile(memory=6 * GIB))))
    assert driver.share("a")[0] == 3 * GIB, "a reservation that could not be used would be wasted"


@pytest.mark.parametrize(
    ("asked", "more", "reason"),
    [
        (("request", "power", 100.0), {}, "power belongs to whole GPUs"),
        (("limit", "power", 100.0), {}, "power belongs to whole GPUs"),
        (("request", "memory", GIB), {"epoch": 0}, "the lease of epoch 0 is not held any more"),
        (("request", "memory", GIB), {"epoch": 2}, "the lease of epoch 2 is not held any more"),
    ],
)
def test_refusals_name_their_reason(two, asked, more, reason):
    before = two.job("a")
    answer = two.ask("a", *asked, **more)
    assert (answer.status, answer.granted) == ("refused", 0.0)
    assert reason in answer.reason
    assert replace(two.job("a"), answers=()) == before


def test_a_job_that_is_being_stopped_gets_nothing(two):
    two.do(StopRequested("a", "enough"))
    assert two.ask("a", "request", "memory", 1).reason == "the job is being stopped"


def test_a_job_whose_gpu_is_gone_gets_nothing():
    """As a MIG instance that is destroyed: it is being stopped, and its last questions are answered."""
    driver = Driver(host(gpus=2))
    driver.run(spec("job", gpu_memory=2 * GIB, compute=0.4, isolation="hard"), half("other"))
    (share,) = driver.job("job").lease.shares
    left = host(gpus=2)
    driver.do(HostJoined(replace(left, gpus=tuple(gpu for gpu in left.gpus if gpu.gpu_id != share.gpu_id))))
    assert driver.state("job") == "STOPPING"
    for number, action in enumerate(("request", "release", "limit")):
        driver.do(ResourcesAsked("job", 1, f"r{number}", action, "memory", 1.0 * GIB))
        answer = answer_view(driver.core.state, driver.job("job"), f"r{number}")
        assert (answer.status, answer.reason) == ("refused", "the job is being stopped")
    seen = resources_view(driver.core.state, driver.job("job"))
    assert (seen.memory.share, seen.memory.note) == (None, "the job holds a GPU that is gone: it is STOPPING")


def test_slots_of_fixed_size_do_not_change():
    driver = Asking(host(), configured=settings(policy="static"))
    driver.run(spec("a", gpu_memory=GIB))
    assert "slots of fixed size" in driver.ask("a", "request", "memory", GIB).reason


def test_a_quota_is_kept():
    terms = SchedulingSettings(tenants={"t": AccountSettings(most_gpus=0.5)})
    driver = Asking(host(), configured=settings().model_copy(update={"scheduling": terms}))
    driver.run(spec("a", gpu_memory=3 * GIB, compute=0.4, tenant="t"))
    answer = driver.ask("a", "request", "memory", 3 * GIB)
    assert (answer.status, answer.granted) == ("refused", 0.0)
    assert answer.reason == "tenant t holds 0.40 of 0.5 GPUs, and this would be 0.35 more"
    assert driver.share("a")[0] == 3 * GIB
    assert driver.ask("a", "request", "memory", GIB).status == "granted"


def test_the_same_request_twice_is_one(two):
    event = ResourcesAsked("a", 1, "once", "request", "memory", MIB)
    two.do(event, event)
    two.do(event)
    assert two.share("a")[0] == 3 * GIB + MIB
    assert two.core.state.ignored["resources asked again"] == 2


def test_a_job_that_is_not_there_is_counted(two):
    two.do(ResourcesAsked("nobody", 1, "x", "request", "memory", 1.0))
    assert two.core.state.ignored["resources asked for a job that is not there"] == 1


def test_answers_are_bounded_and_survive_the_journal(two):
    for _ in range(KEPT_ANSWERS + 3):
        two.ask("a", "request", "memory", MIB)
    assert len(two.job("a").answers) == KEPT_ANSWERS
    again = State.from_json(two.core.state.to_json())
    assert again.jobs["a"] == two.job("a")
    assert again.to_json() == two.core.state.to_json()


def test_what_could_be_had_is_what_is_granted(two):
    view = resources_view(two.core.state, two.job("a"))
    assert (view.memory.share, view.memory.available, view.memory.used) == (3 * GIB, 2 * GIB, 2 * GIB)
    assert view.memory.note == "more than that: 2.0 GiB are free on h1-0"
    assert view.compute.guaranteed == 0.4
    assert view.power.share is None
    assert two.ask("a", "request", "memory", view.memory.available).status == "granted"
    assert resources_view(two.core.state, two.job("a")).memory.available == 0


@pytest.mark.parametrize(
    ("wish", "field", "accepted"),
    [
        (Wish("request", "memory", "lots", "r"), "amount", "bytes"),
        (Wish("request", "memory", None, "r"), "amount", "an amount"),
        (Wish("request", "memory", -1, "r"), "amount", "bytes"),
        (Wish("request", "compute", 1.5, "r"), "amount", "fraction"),
        (Wish("limit", "compute", 0.001, "r"), "limit", "from 0.02 to 1"),
        (Wish("limit", "memory", [1], "r"), "limit", "bytes"),
        (Wish("request", "power", "much", "r"), "amount", "watts above 0"),
        (Wish("request", "bandwidth", 1, "r"), "resource_type", "memory, compute or power"),
        (Wish("take", "memory", 1, "r"), "action", "request, release or limit"),
        (Wish("take", ["memory"], 1, "r"), "action", "request, release or limit"),
    ],
)
def test_what_is_not_accepted_is_named(two, wish, field, accepted):
    with pytest.raises(NotAccepted, match=accepted) as caught:
        asked(two.job("a"), wish)
    assert caught.value.field == field


def test_amounts_are_read_as_hints_are(two):
    job = two.job("a")
    assert asked(job, Wish("request", "memory", "1.5GiB", "r")).amount == 1.5 * GIB
    assert asked(job, Wish("request", "compute", "20%", "r")).amount == 0.2
    assert asked(job, Wish("limit", "memory", None, "r")).amount is None
    assert asked(job, Wish("request", "memory", 1, "r", epoch=7)).epoch == 7
    with pytest.raises(HintError, match="job_id"):
        asked(job, Wish("request", "memory", 1, "../r"))


def test_a_job_that_has_ended_holds_nothing(two):
    two.do(JobExited("a", 1, "h1", 0))
    with pytest.raises(NotPermitted, match="holds no lease any more: it is SUCCEEDED"):
        asked(two.job("a"), Wish("request", "memory", 1, "r"))
    with pytest.raises(NotPermitted, match="SUCCEEDED"):
        answer_view(two.core.state, two.job("a"), "r")
    assert "it is SUCCEEDED" in resources_view(two.core.state, two.job("a")).memory.note


def test_an_answer_shows_the_share_as_it_is_now(two):
    two.do(ResourcesAsked("a", 1, "r", "request", "memory", float(GIB)))
    view = answer_view(two.core.state, two.job("a"), "r")
    assert (view.status, view.granted, view.share) == ("granted", GIB, 4 * GIB)


WISHES = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["request", "release", "limit"]),
        st.sampled_from(["memory", "compute"]),
        st.floats(0.001, 1.0),
        st.floats(0.0, 1.0),
    ),
    max_size=12,
)


@examples(max_examples=25)
@given(wishes=WISHES)
def test_whatever_jobs_ask_the_invariants_hold(wishes):
    """``Driver.do`` checks them after every event; nobody falls below its guarantee or gets more than its limit."""
    driver = Asking(host(memory=9 * GIB))
    driver.run(*(spec(job_id, gpu_memory=2 * GIB, compute=0.2, max_slowdown=4.0) for job_id in "abc"))
    here = [job_id for job_id in "abc" if driver.job(job_id).lease]
    for job_id, action, resource, size, util in wishes:
        if job_id not in here:
            continue
        amount = round(size * 4 * GIB) if resource == "memory" else max(0.02, size)
        answer = driver.ask(job_id, action, resource, amount)
        assert 0.0 <= answer.granted <= amount
        driver.do(report("h1", *(measurement(each, "h1-0", profile(util=util, memory=GIB)) for each in here)))
        for each in here:
            job: Job = driver.job(each)
            memory, compute = driver.share(each)
            assert compute >= (job.guarantee or 0.0) - 1e-3
            assert job.limits.compute is None or compute <= job.limits.compute + 1e-9
            assert job.limits.memory_bytes is None or memory <= job.limits.memory_bytes
            assert memory >= min(job.wanted.memory_bytes or 0, job.limits.memory_bytes or memory)
    assert isinstance(driver.core.state.to_json(), bytes)
