"""A program that holds a lease and saves, on a real scheduler with a fake host, without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from fake_client import job_view
from fake_hosts import FakeHost
from local_client import LocalCotenant
from support import wait_until

import cotenant
from cotenant.actors import leases
from cotenant.scheduler.core.model import JobState
from cotenant.scheduler.errors import NotAccepted
from cotenant.scheduler.views import JobView


class Bench(LocalCotenant):
    """A scheduler whose host reports all the time, and what a holder's neighbours and users do to its lease."""

    def __init__(self, home: Path) -> None:
        self.host = FakeHost(gpus=2)
        super().__init__(home, self.host)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._report_on)]
        self._threads[0].start()

    def state(self, job_id: str) -> str:
        return str(self.client.job(job_id).state)

    def meanwhile(self, job_id: str, state: str, then: Callable[[], object]) -> None:
        """Do something as soon as the job is in this state."""

        def act() -> None:
            wait_until(lambda: self.state(job_id) == state, 20, f"{job_id} is {state}")
            then()

        self._threads.append(threading.Thread(target=act))
        self._threads[-1].start()

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)
        super().close()

    def _report_on(self) -> None:
        while not self._over.wait(0.01):
            self.report()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    monkeypatch.setattr(leases.Client, "connect", lambda: bench.client)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(leases, "RENEW_S", 0.02)
    yield bench
    bench.close()


def take(**hints: Any) -> leases.GpuLease:
    return cotenant.lease(**({"compute": 1.0, "gpu_memory": "1GiB", "checkpoint": "own"} | hints))


def asked(bench: Bench, lease: leases.GpuLease) -> None:
    """Somebody suspends it, and its program hears of that."""
    bench.client.suspend(lease.job_id)
    wait_until(lambda: lease.stop_requested, 20, "the holder is told")


def test_it_goes_on_after_it_was_suspended(bench: Bench) -> None:
    terms: list[tuple[int, int]] = []
    with take() as lease:
        for term in lease.terms():
            terms.append((term, bench.client.job(lease.job_id).epoch))
            assert (lease.stop_requested, lease.stop_by, lease.lost) == (None, None, None)
            if term == 1:
                asked(bench, lease)
                view = bench.client.job(lease.job_id)
                assert view.stop_by == view.history[-1].at + 30.0
                assert (lease.stop_requested, lease.stop_by) == ("suspended by user", view.stop_by)
                bench.meanwhile(lease.job_id, "SUSPENDED", lambda: bench.client.resume(lease.job_id))
        lease.check()
    assert terms == [(1, 1), (2, 2)]
    ended = bench.client.wait(lease.job_id, 20)
    assert (ended.state, ended.reason, ended.restarts) == ("CANCELLED", "released", 0)


def test_it_goes_on_elsewhere_after_it_was_moved(bench: Bench) -> None:
    places = []
    with take() as lease:
        for term in lease.terms():
            places.append(lease.shares[0].gpu_id)
            if term == 1:
                bench.client.move(lease.job_id)
    assert len(set(places)) == len(places) == 2


def test_it_may_be_suspended_before_it_has_any_gpus(bench: Bench) -> None:
    with take(gpus=2, isolation="hard") as first, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take, timeout_s=30)
        wait_until(lambda: len(bench.client.jobs(active_only=True)) == 2, 20, "it waits")
        [job_id] = {view.job_id for view in bench.client.jobs(active_only=True)} - {first.job_id}
        bench.client.suspend(job_id)
        first.release()
        bench.client.wait(first.job_id, 20)
        assert bench.state(job_id) == "SUSPENDED"
        bench.client.resume(job_id)
        with waiting.result(20) as lease:
            assert (lease.job_id, lease.stop_requested) == (job_id, None)


def test_one_term_when_nobody_asks(bench: Bench) -> None:
    with take() as lease:
        assert list(lease.terms()) == [1]
    with take(checkpoint="none") as lease:
        assert list(lease.terms()) == [1]


def test_who_releases_it_is_done(bench: Bench) -> None:
    lease = take()
    for term in lease.terms():
        assert term == 1
        asked(bench, lease)
        lease.release()
    with pytest.raises(cotenant.LeaseLost, match="released"):
        lease.check()


def test_who_is_asked_and_stops_for_good_keeps_nothing(bench: Bench) -> None:
    with take() as lease:
        for _ in lease.terms():
            asked(bench, lease)
            break
    assert bench.client.wait(lease.job_id, 20).state == "CANCELLED"


def test_who_is_interrupted_while_waiting_keeps_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = take()

    renew = bench.client.renew

    def interrupt(job_id: str) -> JobView:
        view = renew(job_id)
        if view.state is JobState.SUSPENDED and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return view

    def work() -> None:
        with lease:
            for _ in lease.terms():
                asked(bench, lease)
                monkeypatch.setattr(bench.client, "renew", interrupt)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert bench.state(lease.job_id) == "CANCELLED"


def test_who_gives_nothing_back_in_time_has_lost_it(bench: Bench) -> None:
    def work() -> None:
        with take() as lease:
            for _ in lease.terms():
                asked(bench, lease)
                bench.host.end(lease.job_id, 1, -9)
                wait_until(lambda: lease.lost, 20, "the holder is told")

    with pytest.raises(cotenant.LeaseLost, match="killed by signal 9"):
        work()


@pytest.mark.parametrize("state", ["STOPPING", "SUSPENDED"])
def test_a_stopped_lease_is_lost(bench: Bench, state: str) -> None:
    """Whether its program still has it or waits for it: nobody waits for ever."""

    def work() -> None:
        with take() as lease:
            for _ in lease.terms():
                bench.client.suspend(lease.job_id)
                if state == "STOPPING":
                    bench.client.stop(lease.job_id, "maintenance")
                else:
                    bench.meanwhile(lease.job_id, state, lambda: bench.client.stop(lease.job_id, "maintenance"))

    with pytest.raises(cotenant.LeaseLost, match="maintenance"):
        work()


def test_a_lease_of_a_program_that_does_not_save_stays(bench: Bench) -> None:
    with take(checkpoint="none") as lease:
        with pytest.raises(NotAccepted, match=r'a lease whose Ray program promises to save \(checkpoint="own"\)'):
            bench.client.suspend(lease.job_id)
        response = bench.http("POST", f"/jobs/{lease.job_id}/suspend", {})
        assert (response.status_code, "promises to save" in response.text) == (422, True), response.text


def test_a_process_that_would_attach_itself_cannot_leave(bench: Bench) -> None:
    with take() as lease, pytest.raises(ValueError, match="checkpoint: 'own' is not accepted for a process that att"):
        lease.attach()


class Scripted:
    """A client to whom the lease looks like this, one view after the other."""

    def __init__(self, *views: Any) -> None:
        self.views, self.returned = list(views), []

    def stop(self, _job_id: str, _reason: str) -> Any:
        return self.views.pop(0)

    def renew(self, _job_id: str) -> Any:
        return self.views.pop(0)

    def explain(self, _job_id: str) -> Any:
        return SimpleNamespace(summary=f"waits, {len(self.views)} to go")

    def return_lease(self, job_id: str, epoch: int) -> Any:
        self.returned.append((job_id, epoch))
        return self.views.pop(0)


def seen(state: JobState, epoch: int, checkpoint: str = "own") -> Any:
    return job_view("a", state, epoch=epoch, hints={"checkpoint": checkpoint})


@pytest.mark.parametrize(("checkpoint", "returned"), [("own", [("a", 4)]), ("none", [])])
def test_who_has_waited_too_long_leaves_no_gpus_held(checkpoint: str, returned: list[Any]) -> None:
    """It may have been granted at the last moment."""
    client = Scripted(seen(JobState.STOPPING, 4, checkpoint), seen(JobState.STOPPING, 4, checkpoint))
    leases._give_up(client, "a", "not waited for any longer")  # type: ignore[arg-type]
    assert client.returned == returned


def test_gpus_that_were_asked_for_before_anybody_knew_of_them_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "POLL_S", 0.0)
    later = [(JobState.STOPPING, 2), (JobState.QUEUED, 2), (JobState.STARTING, 3), (JobState.RUNNING, 3)]
    client = Scripted(*(seen(*each) for each in later))
    assert leases._granted(client, seen(JobState.STOPPING, 1), None, 1).epoch == 3  # type: ignore[arg-type]
    assert client.returned == [("a", 2)]


def test_whoever_waits_for_a_share_is_told_what_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once per reason; a share that is there at once is not worth a word."""
    monkeypatch.setattr(leases, "POLL_S", 0.0)
    leases._granted(Scripted(seen(JobState.RUNNING, 1)), seen(JobState.QUEUED, 0), None)  # type: ignore[arg-type]
    assert caplog.messages == []
    monkeypatch.setattr(leases, "TELL_AFTER_S", -1.0)
    monkeypatch.setattr(leases, "TELL_AGAIN_S", -1.0)
    client = Scripted(seen(JobState.QUEUED, 0), seen(JobState.RUNNING, 1))
    leases._granted(client, seen(JobState.QUEUED, 0), None)  # type: ignore[arg-type]
    assert caplog.messages == ["lease a has no share yet: waits, 2 to go", "lease a has no share yet: waits, 1 to go"]
    caplog.clear()
    monkeypatch.setattr(client, "explain", lambda _: SimpleNamespace(summary="the same"))
    client.views = [seen(JobState.QUEUED, 0), seen(JobState.RUNNING, 1)]
    leases._granted(client, seen(JobState.QUEUED, 0), None)  # type: ignore[arg-type]
    assert caplog.messages == ["lease a has no share yet: the same"]
