"""``cotenant logs``: what a job printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cotenant import _render
from cotenant.scheduler.errors import NotAccepted

if TYPE_CHECKING:
    from cotenant.scheduler.client import Client
    from cotenant.scheduler.views import JobView, LogChunk


def copy(client: Client, job_id: str, run: int | None, keep: bool, write: Callable[[bytes], None]) -> None:
    """Write the output of one run of a job; earlier runs are named to the user.

    Args:
        client: The connection.
        job_id: The job.
        run: The run, counted from 1; None = the last.
        keep: Stay until the job has ended.
        write: Takes the bytes.
    """
    newest, printed = client.job(job_id).epoch, False
    if run is None and newest > 1:
        _render.note(f"earlier runs: {_numbers(newest - 1)} (--run N)")
    if keep:
        for data in client.stream_logs(job_id):
            write(data)
            printed = printed or bool(data)
    else:
        offset, epoch = 0, run or newest or None  # named, so that what begins meanwhile is not mixed with it
        while (chunk := _piece(client, job_id, offset, epoch)).data:
            write(chunk.data)
            offset, printed = chunk.next_offset, True
    if not printed:
        _render.note(_why_nothing(client.job(job_id), run))


def _piece(client: Client, job_id: str, offset: int, epoch: int | None) -> LogChunk:
    """Return a piece of the output; a run that there is not is told of by the name under which it was asked for."""
    try:
        return client.logs(job_id, offset, epoch=epoch)
    except NotAccepted as error:
        raise NotAccepted("run" if error.field == "epoch" else error.field, error.value, error.accepted) from None


def _why_nothing(job: JobView, run: int | None) -> str:
    """Say what became of a job of which there is no output: an empty answer reads as if all were well."""
    if run is not None and run < job.epoch:
        return f"{job.job_id}: run {run} printed nothing"
    if job.epoch == 0 and not job.state.terminal:
        what = "has not been started yet"
    else:
        what = "printed nothing" if job.state.terminal else "has printed nothing yet"
    why = job.waits or job.reason
    return f"{job.job_id} {what}: {job.state}" + (f": {why}" if why else "")


def _numbers(last: int) -> str:
    return ", ".join(map(str, range(1, last + 1))) if last <= 5 else f"1 to {last}"
