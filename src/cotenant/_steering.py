"""The commands that end, suspend, resume and move jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from cotenant import _render
from cotenant._options import Address, AsJson, JobArgument
from cotenant.scheduler.errors import JobNotFound
from cotenant.scheduler.specs import check_reason

if TYPE_CHECKING:
    from cotenant.scheduler.client import Client
    from cotenant.scheduler.views import JobView

_KEPT = "Kept in the job's history."


def add_commands(app: typer.Typer, connect: Callable[[str | None], Client]) -> None:
    """Add the commands to the program.

    Args:
        app: The program.
        connect: Connects to an address.
    """

    @app.command()
    def stop(
        jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Job ids.")],
        reason: Annotated[str, typer.Option("--reason", help=_KEPT)] = "stopped by user",
        address: Address = None,
        as_json: AsJson = False,
    ) -> None:
        """Stop jobs: SIGTERM, then SIGKILL after the grace period. Jobs that have ended stay as they are."""
        check_reason(reason)
        stopped: list[JobView] = []
        unknown: list[JobNotFound] = []
        with connect(address) as client:
            try:
                for job in jobs:
                    try:
                        stopped.append(client.stop(job, reason))
                    except JobNotFound as error:  # the others are to be stopped all the same
                        unknown.append(error)
            finally:  # whatever comes in between: what was done is said
                if stopped:
                    _show(stopped, as_json)
        for each in unknown[:-1]:
            _render.problem(str(each))
        if unknown:
            raise unknown[-1]

    @app.command()
    def suspend(
        job: JobArgument,
        reason: Annotated[str, typer.Option("--reason", help=_KEPT)] = "suspended by user",
        address: Address = None,
        as_json: AsJson = False,
    ) -> None:
        """Take a job off its GPUs until it is resumed: SIGTERM, time to save its state, then its GPUs are free.

        A job with the hint checkpoint=driver is frozen instead, on its host, and notices nothing.
        """
        check_reason(reason)
        with connect(address) as client:
            view = client.suspend(job, reason)
        _show([view], as_json)
        _warn(view)

    @app.command()
    def resume(
        job: JobArgument,
        reason: Annotated[str, typer.Option("--reason", help=_KEPT)] = "resumed by user",
        address: Address = None,
        as_json: AsJson = False,
    ) -> None:
        """Let a suspended job go on: it waits for GPUs again and keeps the time it has waited."""
        check_reason(reason)
        with connect(address) as client:
            view = client.resume(job, reason)
        _show([view], as_json)

    @app.command()
    def move(
        job: JobArgument,
        to: Annotated[
            str | None, typer.Option("--to", metavar="HOST|GPU", help="Where to; default: elsewhere.")
        ] = None,
        reason: Annotated[str, typer.Option("--reason", help=_KEPT)] = "moved by user",
        address: Address = None,
        as_json: AsJson = False,
    ) -> None:
        """Move a running job to other GPUs with room for it: SIGTERM, time to save its state, start there.

        A job with the hint checkpoint=driver is frozen instead, and goes on on other GPUs of its host.
        """
        check_reason(reason)
        with connect(address) as client:
            view = client.move(job, to, reason)
        _show([view], as_json)
        _warn(view)


def _show(views: Sequence[JobView], as_json: bool) -> None:
    if as_json:
        _render.print_json(views)
    else:
        for view in views:
            typer.echo(f"{view.job_id} {view.state}")


def _warn(view: JobView) -> None:
    """Say so when a job is going to lose what it has done."""
    if view.starts_over:
        _render.note(view.starts_over)
