"""The command line. Ray, torch and pydantic are imported by the commands that need them, so that help is instant.

Exit codes: 0 done; 2 the job can never be placed on this cluster; 1 anything else, also wrong usage. ``run`` and
``submit --wait`` pass the job's own exit code on (128 + n when signal n ended it).
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from cotenant import __version__, _accounts, _attach, _listing, _logs, _predictions, _preflight, _render, _steering
from cotenant._characterise import characterise
from cotenant._evaluate import evaluate
from cotenant._hint_options import with_hint_options
from cotenant._models import models
from cotenant._options import Address, AsJson, ConfigFile, JobArgument, refusal_of, settings_of
from cotenant._simulate import simulate
from cotenant._train_coldstart import train
from cotenant._tune import tune
from cotenant.scheduler.errors import CotenantError, NotPlaceable
from cotenant.scheduler.hints import check_job_id, metadata_hints, parse_hints
from cotenant.scheduler.specs import check_name

if TYPE_CHECKING:
    from cotenant.scheduler.client import Client
    from cotenant.scheduler.core.model import Hints
    from cotenant.scheduler.views import JobView

DONE, FAILED, NOT_PLACEABLE = 0, 1, _attach.NOT_PLACEABLE
REFRESH_S = 1.0


class _Group(TyperGroup):
    """Ends with this program's exit codes and one line per error, whatever Typer would do."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.TyperException as error:
            if message := refusal_of(error):  # empty when the help was printed instead
                where = getattr(getattr(error, "ctx", None), "command_path", "cotenant")
                message = message if message.endswith("?") else f"{message.rstrip('.')}."
                _render.problem(f"{message} See: {where} --help")
            code = FAILED
        except NotPlaceable as error:
            _render.problem(f"not placeable: {error}")
            code = NOT_PLACEABLE
        except CotenantError as error:
            _render.problem(str(error))
            code = FAILED
        if standalone_mode:
            sys.exit(code)
        return code


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="cotenant: many jobs on one GPU of a Ray cluster, measured, forecast, packed and enforced.",
)

_COMMAND = {"allow_interspersed_args": False}  # what follows the first word of the command belongs to the command

Command = Annotated[
    list[str] | None, typer.Argument(metavar="[--] COMMAND...", help="Program to run and its arguments.")
]
Name = Annotated[str | None, typer.Option("--name", help="Name for people; default: the script's.")]
JobId = Annotated[str | None, typer.Option("--job-id", help="Unique id; twice with the same request is one job.")]
Cwd = Annotated[str | None, typer.Option("--cwd", help="Directory to run in; default: the current one.")]
Env = Annotated[list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Set a variable; repeatable.")]


def _client(address: str | None) -> Client:
    """Connect; tests put another client here."""
    from cotenant.scheduler.client import Client  # noqa: PLC0415 - imports pydantic

    client = Client.connect(address)
    # Ray's handler prints a stack dump; whoever stays with a job puts a handler of its own in place after this.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return client


# -- jobs -------------------------------------------------------------------------------------------------------------


@app.command(context_settings=_COMMAND)
@with_hint_options
def submit(
    *,
    hints: dict[str, object],
    command: Command = None,
    name: Name = None,
    job_id: JobId = None,
    cwd: Cwd = None,
    env: Env = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay: stream the output, exit as the job does.")] = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job and print its id. It keeps running when this terminal is closed, unless --wait is given."""
    parsed = parse_hints(hints, time.time())
    job_id = job_id if job_id is None else check_job_id(job_id)
    words, directory, variables = _checked(command, name, cwd, env)
    with _client(address) as client:
        if wait:
            raise typer.Exit(_stay(client, words, parsed, name=name, job_id=job_id, cwd=directory, env=variables))
        view = client.submit(words, parsed, name=name, job_id=job_id, cwd=directory, env=variables)
    if as_json:
        _render.print_json(view)
    else:
        typer.echo(view.job_id)
    _refuse_unplaceable(view)
    _warn(view)
    if view.deadline.endswith("cannot be met"):  # who stays with the job is told as it goes
        _render.note(f"warning: {view.job_id}: {view.deadline}")


@app.command(context_settings=_COMMAND)
@with_hint_options
def run(
    *,
    hints: dict[str, object],
    command: Command = None,
    name: Name = None,
    job_id: JobId = None,
    cwd: Cwd = None,
    env: Env = None,
    address: Address = None,
) -> None:
    """Run a job as if here: stream its output, pass signals on, exit as it does.

    Made for Ray jobs: ray job submit --metadata-json '{"cotenant.gpu_memory": "2GiB"}' -- cotenant run -- python a.py
    """
    metadata = _preflight.ray_job_metadata(os.environ)
    parsed = parse_hints({**metadata_hints(metadata), **hints}, time.time())
    job_id = metadata.get(_preflight.SUBMISSION_ID) if job_id is None else job_id
    job_id = job_id if job_id is None else check_job_id(job_id)
    words, directory, variables = _checked(command, name, cwd, env)
    with _client(address) as client:
        raise typer.Exit(_stay(client, words, parsed, name=name, job_id=job_id, cwd=directory, env=variables))


@app.command()
def ps(
    show_all: Annotated[bool, typer.Option("--all", "-a", help="Also jobs that have ended.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most so many, newest first.")] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    with _client(address) as client:
        views, note = _listing.some_jobs(client, show_all, limit)
    _render.print_json(views) if as_json else _render.out().print(_render.jobs(views))
    if note:
        _render.note(note)


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one frame as plain JSON and end.")] = False,
) -> None:
    """Watch GPUs and jobs, refreshed every second, until Ctrl-C."""
    from rich.live import Live  # noqa: PLC0415 - only here

    with _client(address) as client:
        if as_json:
            _render.print_json_lists(gpus=client.gpus(), jobs=client.jobs(active_only=True))
            return
        frame = _render.top(client.jobs(active_only=True), client.gpus())
        if once:
            _render.out().print(frame)
            return
        with Live(frame, console=_render.out(), screen=True, auto_refresh=False) as live, suppress(KeyboardInterrupt):
            while True:
                time.sleep(REFRESH_S)
                live.update(_render.top(client.jobs(active_only=True), client.gpus()), refresh=True)


@app.command()
def explain(job: JobArgument, address: Address = None, as_json: AsJson = False) -> None:
    """Say why a job is where it is, or why it waits and what would help."""
    with _client(address) as client:
        view = client.explain(job)
    if as_json:
        _render.print_json(view)
    else:
        _render.out().print(_render.explanation(view))


@app.command(context_settings=_COMMAND)
@with_hint_options
def plan(
    *,
    hints: dict[str, object],
    command: Command = None,
    name: Name = None,
    count: Annotated[int, typer.Option("--count", min=1, max=_preflight.MAX_PLANNED, help="So many such jobs.")] = 1,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="YAML file with several jobs.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Try a setting: placement.confidence=0.9; repeatable."),
    ] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Say what would happen to jobs if they were submitted now, or to all jobs under other settings. Nothing is done.

    With --set and no job described, only what would be different for the jobs that are there.
    """
    described = bool(hints or command or name or count > 1)
    if file is not None and described:
        raise CotenantError("file: give either --file or hints, a command, --name and --count, not both")
    if file is None and not described and not settings:
        raise CotenantError("nothing to plan: describe a job as for submit (hints, command), or give --file or --set")
    if file is not None:
        wanted = _preflight.read_plan(file)
    else:
        wanted = [{"name": name, "command": command or [], "hints": hints, "count": count}] if described else []
    jobs = [planned for job in wanted for planned in _preflight.planned_jobs(job)]
    changes = _accounts.read_changes(settings or [])
    with _client(address) as client:
        _accounts.note_dropped(client, changes)
        view = client.plan(jobs, changes)
    if as_json:
        _render.print_json(view)
    else:
        _render.out().print(_render.plan(view))
    if any(job.placeable == "never" for job in view.jobs):
        raise typer.Exit(NOT_PLACEABLE)


@app.command()
def logs(
    job: JobArgument,
    keep: Annotated[bool, typer.Option("--follow", "-f", help="Stay until the job has ended.")] = False,
    run: Annotated[int | None, typer.Option("--run", min=1, help="Of an earlier start; default: the last.")] = None,
    address: Address = None,
) -> None:
    """Print a job's output, stdout and stderr as they came, of the last time it was started."""
    if keep and run is not None:
        raise CotenantError("run: an earlier run is over; give either --run or --follow, not both")
    with _client(address) as client:
        _logs.copy(client, job, run, keep, _write)


_steering.add_commands(app, lambda address: _client(address))  # noqa: PLW0108 - tests replace _client


# -- cluster ----------------------------------------------------------------------------------------------------------


@app.command()
def gpus(address: Address = None, as_json: AsJson = False) -> None:
    """List GPUs with what they carry."""
    with _client(address) as client:
        views = client.gpus()
    if as_json:
        _render.print_json(views)
    else:
        _render.out().print(_render.gpus(views))


@app.command()
def hosts(address: Address = None, as_json: AsJson = False) -> None:
    """List hosts with their agents."""
    with _client(address) as client:
        views = client.hosts()
    if as_json:
        _render.print_json(views)
    else:
        _render.out().print(_render.hosts(views))


@app.command()
def up(
    local: Annotated[bool, typer.Option("--local", help="Start a Ray head on this machine first.")] = False,
    config: ConfigFile = None,
    devices: Annotated[int | None, typer.Option("--devices", min=1, help="GPUs per host (device.count).")] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Start cotenant on a Ray cluster. Where it runs already, nothing changes."""
    if local and address is not None:
        raise CotenantError("address: give either --local or --address, not both")
    settings = settings_of(config)
    if devices is not None:
        settings = settings.model_copy(update={"device": settings.device.model_copy(update={"count": devices})})
    from cotenant.scheduler.names import prepare_ray_environment  # noqa: PLC0415

    prepare_ray_environment(local=local)
    from cotenant.actors import cluster  # noqa: PLC0415 - imports Ray
    from cotenant.dashboards.server import Api  # noqa: PLC0415

    if local:
        _render.note("starting Ray and cotenant on this machine: half a minute, longer where others work")
    report = cluster.up(address, local, settings, Api)
    if as_json:
        _render.print_json(asdict(report))
        return
    typer.echo(
        f"cotenant runs on Ray at {report.address}: {_count(report.hosts, 'host')}, {_count(report.gpus, 'GPU')}"
    )
    if report.api_url:
        typer.echo(f"admin API: {report.api_url}" + (f" (token in {report.token_path})" if report.token_path else ""))
    for line in report.notes:
        _render.note(line)


@app.command()
def down(
    force: Annotated[bool, typer.Option("--force", help="Do not wait for running jobs to end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop cotenant and the jobs that run, and the Ray head if 'up --local' started it."""
    from cotenant.scheduler.names import prepare_ray_environment  # noqa: PLC0415

    prepare_ray_environment(local=False)
    from cotenant.actors import cluster  # noqa: PLC0415 - imports Ray

    report = cluster.down(force, _render.note)
    if as_json:
        _render.print_json(asdict(report))
        return
    if report.found:
        typer.echo(f"stopped; jobs stopped: {report.stopped_jobs}")
    for line in report.notes:
        _render.note(line)


@app.command()
def env() -> None:
    """Print what Ray's own tools need to reach this cluster: eval "$(cotenant env)"."""
    from cotenant.scheduler.names import ClusterRecord  # noqa: PLC0415

    record = ClusterRecord.load()
    if record is None:
        raise CotenantError("no cotenant was started from here: run 'cotenant up' first")
    for name, value in record.environment().items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@app.command()
def doctor(
    cluster: Annotated[bool, typer.Option("--cluster", help="Also ask the running cotenant.")] = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Check this host: what is missing, what that costs, how to fix it. Exit code 1 if cotenant cannot work here."""
    from cotenant.actors import doctor as examination  # noqa: PLC0415 - not light

    found = examination.checks()
    if cluster:
        found += examination.cluster_checks(lambda: _client(address))
    if as_json:
        _render.print_json([asdict(check) for check in found])
    else:
        _render.out().print(_render.checks(found))
    if any(check.essential and not check.ok for check in found):
        raise typer.Exit(FAILED)


@app.command(help=_predictions.DOC)
def predictions(job: _predictions.Job = None, address: Address = None, as_json: AsJson = False) -> None:
    with _client(address) as client:
        if job is not None:
            forecast, scores = client.forecast(job), client.forecast_scores(job)
            if as_json:
                _render.print_json(_predictions.as_json(forecast, scores))
            else:
                _render.out().print(_predictions.of_job(forecast, scores))
        else:
            view = client.predictions()
            _render.print_json(view) if as_json else _render.out().print(_predictions.shown(view))


@app.command(help=_accounts.DOC)
def accounts(address: Address = None, as_json: AsJson = False) -> None:
    with _client(address) as client:
        views = client.accounts()
    _render.print_json(views) if as_json else _render.out().print(_accounts.shown(views))


@app.command(help=_accounts.SETTINGS_DOC)
def settings(changes: _accounts.Changed = None, address: Address = None, as_json: AsJson = False) -> None:
    wanted = _accounts.read_changes(changes or [])
    with _client(address) as client:
        before, view = _accounts.change(client, wanted) if wanted else (None, client.tuning())
    told = _accounts.news(before, view, wanted) if before else _accounts.tuning(view)
    _render.print_json(view) if as_json else _render.out().print(told)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"cotenant {__version__}")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _program(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


app.command()(characterise)
app.command()(simulate)
app.add_typer(train, name="train")
app.add_typer(evaluate, name="evaluate")
app.add_typer(tune, name="tune")
app.add_typer(models, name="models")


# -- shared steps -----------------------------------------------------------------------------------------------------


def _checked(
    command: list[str] | None, name: str | None, cwd: str | None, env: list[str] | None
) -> tuple[list[str], str, dict[str, str]]:
    """Return (command, working directory, environment) after the checks that need no cluster."""
    if name is not None:
        check_name(name)
    directory = _preflight.working_directory(cwd)
    _preflight.check_command(command or [], directory)
    words, variables = list(command or []), _preflight.environment(env or [], os.environ)
    if doubt := _preflight.doubts(words, variables):
        _render.note(doubt)
    return words, directory, variables


def _stay(client: Client, command: list[str], hints: Hints, **how: Any) -> int:
    """Submit an attached job, stay with it to its end and return the exit code."""
    # Connecting is over by now: importing Ray puts its own SIGTERM handler in place, which would replace ours.
    with _attach.SignalInbox() as inbox:
        view = client.submit(command, hints, attached=True, **how)
        _refuse_unplaceable(view)
        _warn(view)
        return _attach.follow(client, view.job_id, inbox, sys.stdout.buffer, _render.note)


def _refuse_unplaceable(view: JobView) -> None:
    if view.not_placeable:
        raise NotPlaceable(f"{view.job_id}: {view.reason}")


def _warn(view: JobView) -> None:
    """Say on stderr what was asked for and will not be: whoever relies on it finds out too late otherwise."""
    if view.no_freezing:
        _render.note(f"warning: checkpoint: 'driver' counts as none for {view.job_id}: {view.no_freezing}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def main() -> None:
    """Entry point of the ``cotenant`` program."""
    app(prog_name="cotenant")


if __name__ == "__main__":
    main()
