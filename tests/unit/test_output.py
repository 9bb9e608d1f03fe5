"""Whose output is read, from which host, and when it is over."""

from __future__ import annotations

from typing import Any

import pytest
from fake_client import job_view

from cotenant.scheduler.client import Client
from cotenant.scheduler.core.model import JobState
from cotenant.scheduler.errors import NotAccepted, OutputNotKept
from cotenant.scheduler.output import LOG_CHUNK
from cotenant.scheduler.views import FrozenView, HistoryView, JobView

STARTED = [JobState.QUEUED, JobState.STARTING, JobState.RUNNING]


class Cluster:
    """One job that goes through ``views``, one at each look, and what its runs have printed on host h1, h2, ..."""

    def __init__(self, *views: JobView, **kept: bytes) -> None:
        self.views = list(views)
        self.kept = kept
        self.renewed = 0

    def scheduler(self, method: str, _asked: object) -> Any:
        if method == "location":
            newest = self.views[0].epoch
            return [(f"h{epoch}", epoch) for epoch in range(newest, 0, -1)]
        if method == "renew":
            self.renewed += 1
            return [self.views[0]]
        assert method == "job"
        return self.views.pop(0) if len(self.views) > 1 else self.views[0]

    def read_output(
        self, host_id: str, _job: str, epoch: int, offset: int, limit: int
    ) -> tuple[bytes, int, bool] | None:
        everything = self.kept.get(host_id)
        if host_id != f"h{epoch}" or everything is None:
            return None
        data = everything[offset : offset + limit]
        return data, offset + len(data), offset + len(data) == len(everything)


def job(state: JobState, epoch: int, *states: JobState) -> JobView:
    history = [HistoryView(at=1.0, state=each, reason="") for each in (*(states or STARTED), state)]
    return job_view(state=state, epoch=epoch, history=history)


def client(*views: JobView, **kept: bytes) -> Client:
    return Client(Cluster(*views, **kept))  # type: ignore[arg-type]


def test_the_answer_says_of_which_run_it_is() -> None:
    connected = client(job(JobState.RUNNING, 2), h1=b"old", h2=b"new")
    newest = connected.logs("job-1")
    assert (newest.data, newest.epoch, newest.eof) == (b"new", 2, False)
    assert client(job(JobState.QUEUED, 0, JobState.PENDING)).logs("job-1").epoch == 0


@pytest.mark.parametrize(
    ("state", "epoch", "over"),
    [
        (JobState.RUNNING, 1, True),
        (JobState.RUNNING, 2, False),
        (JobState.QUEUED, 2, True),
        (JobState.SUSPENDED, 2, True),
        (JobState.SUCCEEDED, 2, True),
        (JobState.SUSPENDED, None, False),
        (JobState.SUCCEEDED, None, True),
    ],
)
def test_the_end_of_a_named_run_is_told_when_it_is_over(state: JobState, epoch: int | None, over: bool) -> None:
    chunk = client(job(state, 2), h1=b"old", h2=b"new").logs("job-1", 1, epoch=epoch)
    assert (chunk.data, chunk.eof) == (b"ld" if epoch == 1 else b"ew", over)


def test_a_frozen_job_goes_on_in_its_run() -> None:
    frozen = FrozenView(host_id="h1", host="h1", gpu_type="t", memory_bytes=1, since=1.0)
    view = job(JobState.SUSPENDED, 1).model_copy(update={"frozen": frozen})
    assert not client(view, h1=b"so far").logs("job-1", epoch=1).eof


@pytest.mark.parametrize(("newest", "epoch"), [(2, 3), (2, 0), (2, -1), (2, True), (0, 1)])
def test_a_run_that_has_not_begun_is_refused(newest: int, epoch: int) -> None:
    with pytest.raises(NotAccepted, match="epoch"):
        client(job(JobState.RUNNING, newest), h1=b"", h2=b"").logs("job-1", epoch=epoch)


def test_output_that_is_not_kept_is_an_error() -> None:
    with pytest.raises(OutputNotKept, match=r"^the output of job job-1 is not kept any more \(it was on host h1\)$"):
        client(job(JobState.SUCCEEDED, 1)).logs("job-1")
    with pytest.raises(OutputNotKept, match=r"^the output of run 1 of job job-1 is not kept any more"):
        client(job(JobState.RUNNING, 2), h2=b"new").logs("job-1", epoch=1)
    with pytest.raises(OutputNotKept):
        next(client(job(JobState.SUCCEEDED, 1)).stream_logs("job-1"))


@pytest.mark.parametrize(
    "view",
    [
        job(JobState.STARTING, 1, JobState.QUEUED),
        job(JobState.FAILED, 1, JobState.QUEUED, JobState.STARTING),
        job(JobState.CANCELLED, 0, JobState.QUEUED),
    ],
)
def test_a_job_that_has_not_run_has_printed_nothing(view: JobView) -> None:
    chunk = client(view).logs("job-1")
    assert (chunk.data, chunk.eof) == (b"", view.state.terminal)


def test_following_reads_every_run_to_its_end() -> None:
    """The new run began between two looks: what the old one printed at its end is not skipped."""
    views = [job(JobState.QUEUED, 0), job(JobState.RUNNING, 1), job(JobState.RUNNING, 2), job(JobState.SUCCEEDED, 2)]
    old = b"x" * (LOG_CHUNK + 1)
    assert b"".join(client(*views, h1=old, h2=b"new").stream_logs("job-1")) == old + b"new"


def test_following_goes_on_when_a_run_is_lost_with_its_host() -> None:
    views = [job(JobState.RUNNING, 1), job(JobState.QUEUED, 1), job(JobState.RUNNING, 2), job(JobState.SUCCEEDED, 2)]
    assert b"".join(client(*views, h2=b"new").stream_logs("job-1")) == b"new"


def test_the_client_of_a_job_sees_it_end_without_output() -> None:
    cluster = Cluster(job(JobState.RUNNING, 1), job(JobState.FAILED, 1))
    assert list(Client(cluster).stream_logs("job-1", renew=True)) == []  # type: ignore[arg-type]
    assert cluster.renewed == 1
