"""Reading what jobs print: which run it is of, on which host that lies, and when nothing more of it can come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from cotenant.scheduler.core.model import JobState
from cotenant.scheduler.errors import NotAccepted, OutputNotKept
from cotenant.scheduler.transport import Link
from cotenant.scheduler.views import JobView, LogChunk

POLL_S = 0.1
LOG_CHUNK = 1 << 20
_WAITING = (JobState.PENDING, JobState.QUEUED, JobState.SUSPENDED)
_RAN = (JobState.RUNNING, JobState.SUCCEEDED)


def read(link: Link, view: JobView, epoch: int | None, offset: int, limit: int) -> LogChunk:
    """Return a piece of the output of one run of a job.

    Args:
        link: Reaches the scheduler and the hosts.
        view: The job, as it is now.
        epoch: The run, counted from 1; None = the newest, and ``eof`` is told of the job, not of that run.
        offset: Where to start, in bytes.
        limit: Most bytes to return.

    Raises:
        NotAccepted: The job has not had such a run.
        OutputNotKept: The run is over, and its output cannot be read any more.
    """
    if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int) or not 1 <= epoch <= view.epoch):
        runs = f"a run that has begun, 1 to {view.epoch}" if view.epoch else "none: the job has not been started yet"
        raise NotAccepted("epoch", epoch, runs)
    over = _is_over(view, epoch)
    run = view.epoch if epoch is None else epoch
    host_id = _host_of(link, view, run)
    found = None if host_id is None else link.read_output(host_id, view.job_id, run, offset, limit)
    if found is not None:
        data, next_offset, end = found
        return LogChunk(data=data, next_offset=next_offset, eof=over and end, epoch=run)
    if over and _has_run(view, run):
        raise OutputNotKept(view.job_id, run, view.epoch, host_id)
    return LogChunk(data=b"", next_offset=offset, eof=over, epoch=run)


def follow(link: Link, look: Callable[[], JobView], renew: Callable[[], object] | None) -> Iterator[bytes]:
    """Yield a job's output as it comes, from its newest run on, each run to its end, until the job has ended.

    Args:
        link: Reaches the scheduler and the hosts.
        look: Returns the job as it is now.
        renew: Shows that the client of an attached job is alive. Such a client has been there from the beginning, and
            what its job printed is not missed because it is not kept; None = there is none.

    Raises:
        OutputNotKept: The job had ended before, and its output cannot be read any more.
    """
    view = look()
    epoch, offset, late = view.epoch, 0, view.state.terminal and renew is None
    while True:
        data, over = b"", epoch == 0
        if epoch:
            try:
                chunk = read(link, view, epoch, offset, LOG_CHUNK)
            except OutputNotKept:
                if late:
                    raise
                over = True  # lost with its host, most likely: what comes after it can still be told
            else:
                data, offset, over = chunk.data, chunk.next_offset, chunk.eof
        if data:
            yield data
        if over and view.epoch > epoch:
            epoch, offset = epoch + 1, 0
        elif over and view.state.terminal:
            return
        elif not data:
            time.sleep(POLL_S)
        if renew is not None:
            renew()
        view = look()


def _host_of(link: Link, view: JobView, epoch: int) -> str | None:
    places: list[tuple[str, int]] = link.scheduler("location", view.job_id)
    return next((host_id for host_id, held in places if held == epoch), None)


def _is_over(view: JobView, epoch: int | None) -> bool:
    """Whether nothing more is printed: by that run, or by the job when none is named."""
    if view.state.terminal or epoch is None:
        return view.state.terminal
    return epoch < view.epoch or (view.state in _WAITING and view.frozen is None)


def _has_run(view: JobView, epoch: int) -> bool:
    """Whether the run is known to have got as far as printing something. What could not be started has no output."""
    states = [change.state for change in view.history]
    latest = states[len(states) - states[::-1].index(JobState.STARTING) :] if JobState.STARTING in states else states
    return epoch < view.epoch or any(state in _RAN for state in latest)
