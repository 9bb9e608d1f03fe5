"""``cotenant logs``: what a job printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cotenant import _render

if TYPE_CHECKING:
    from cotenant.scheduler.client import Client


def copy(client: Client, job_id: str, run: int | None, keep: bool, write: Callable[[bytes], None]) -> None:
    """Write the output of one run of a job; earlier runs are named to the user.

    Args:
        client: The connection.
        job_id: The job.
        run: The run, counted from 1; None = the last.
        keep: Stay until the job has ended.
        write: Takes the bytes.
    """
    newest = client.job(job_id).epoch
    if run is None and newest > 1:
        _render.note(f"earlier runs: {_numbers(newest - 1)} (--run N)")
    if keep:
        for data in client.stream_logs(job_id):
            write(data)
        return
    offset, epoch = 0, run or newest or None  # named, so that what begins meanwhile is not mixed with it
    while (chunk := client.logs(job_id, offset, epoch=epoch)).data:
        write(chunk.data)
        offset = chunk.next_offset


def _numbers(last: int) -> str:
    return ", ".join(map(str, range(1, last + 1))) if last <= 5 else f"1 to {last}"
