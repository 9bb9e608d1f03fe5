"""The command ``cotenant simulate``. Everything heavy is imported when it runs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant import _render
from cotenant._options import ConfigFile, settings_of, writable_folder
from cotenant.scheduler.errors import CotenantError, NotAccepted

if TYPE_CHECKING:
    from cotenant.configs.settings import Settings
    from cotenant.scheduler.core.models import ModelSource
    from cotenant.scheduler.simulation.results import Result
    from cotenant.scheduler.simulation.simulate import Scenario
    from cotenant.scheduler.simulation.truth import Truth
    from cotenant.scheduler.simulation.workload import Cluster, Trace
    from cotenant.scheduler.simulation.world import World

GIB = 1 << 30
REPORT_HTML, SUMMARY = "report.html", "summary.json"
_DAY_S = 86_400.0
_MOST = 1e6  # hours or days between two faults, GiB


def simulate(
    *,
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Trace of jobs (docs/simulation.md).")],
    policy: Annotated[
        str,
        typer.Option("--policy", metavar="NAME[,NAME…]", help="Policies to compare; 'cotenant' is the shipped core."),
    ] = "cotenant",
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="N | TYPE:N,…", help="Number of GPUs, or numbers of several types.")
    ] = "8",
    out: Annotated[Path, typer.Option("--out", help="Folder for the results and report.html.")],
    gpus_per_host: Annotated[int, typer.Option("--gpus-per-host", help="GPUs of one host.")] = 8,
    gpu_memory: Annotated[
        float, typer.Option("--gpu-memory", metavar="GIB", help="Memory of a GPU that jobs may use.")
    ] = 24.0,
    form: Annotated[
        str | None, typer.Option("--format", help="Form of the trace; default: told by its columns.")
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option("--pairs", metavar="CSV", help="Measured pairs: the truth; default: no slowdown.")
    ] = None,
    pairs_column: Annotated[str, typer.Option("--pairs-column", help="Column of --pairs that is true.")] = "n",
    throughputs: Annotated[
        Path | None,
        typer.Option("--throughputs", metavar="JSON", help="Gavel's measured throughputs; its traces need them."),
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option("--speeds", metavar="TYPE=X,…", help="Speeds of the GPU types; default: all run alike."),
    ] = None,
    config: ConfigFile = None,
    known_column: Annotated[
        str | None, typer.Option("--known-column", help="Column of --pairs that 'cotenant' is told; default: none.")
    ] = None,
    restart_cost: Annotated[
        float, typer.Option("--restart-cost", metavar="S", help="Work lost by a suspension or a move.")
    ] = 60.0,
    job_mtbf: Annotated[
        float | None, typer.Option("--job-mtbf", metavar="HOURS", help="Mean run time between crashes.")
    ] = None,
    node_mtbf: Annotated[
        float | None, typer.Option("--node-mtbf", metavar="DAYS", help="Mean time between losses of a host.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first jobs of the trace.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of everything random.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summaries as plain JSON.")] = False,
) -> None:
    """Run a trace of jobs through one or several schedulers in virtual time and compare them."""
    from cotenant.scheduler.simulation.remarks import remarks_on  # noqa: PLC0415
    from cotenant.scheduler.simulation.rows import LONGEST_S  # noqa: PLC0415
    from cotenant.scheduler.simulation.simulate import Scenario, policy_names  # noqa: PLC0415
    from cotenant.scheduler.simulation.simulate import simulate as run  # noqa: PLC0415 - imports pandas
    from cotenant.scheduler.simulation.workload import MOST_GPUS  # noqa: PLC0415
    from cotenant.scheduler.simulation.world import Costs, Faults  # noqa: PLC0415

    names = list(dict.fromkeys(name.strip() for name in policy.split(",")))
    for name in names:
        if name not in policy_names():
            raise NotAccepted("policy", name, f"some of {', '.join(policy_names())}, with commas between")
    _limited("gpus-per-host", gpus_per_host, 1, MOST_GPUS)
    _limited("gpu-memory", gpu_memory, 0.001, _MOST)
    _limited("restart-cost", restart_cost, 0, LONGEST_S)
    _limited("job-mtbf", job_mtbf, 0.001, _MOST)
    _limited("node-mtbf", node_mtbf, 0.001, _MOST)
    _limited("limit", limit, 1)
    _limited("seed", seed, 0)
    settings = settings_of(config)
    scenario = Scenario(
        _trace(trace, form, limit),
        _cluster(gpus, gpus_per_host, gpu_memory),
        costs=Costs(restart_cost, restart_cost),
        faults=Faults(
            None if job_mtbf is None else job_mtbf * 3600.0,
            None if node_mtbf is None else node_mtbf * _DAY_S,
            seed=seed,
        ),
    )
    conditions = _conditions(context, settings)
    writable_folder(out)
    known = _known(scenario, _Sources(pairs, pairs_column, known_column, throughputs, speeds))
    asked = (remark for name in names for remark in remarks_on(name, known.scenario.trace))
    for remark in dict.fromkeys((*known.scenario.remarks, *asked)):
        _render.note(remark)
    if not known.scenario.world().unfinished:
        raise CotenantError("no job of the trace fits these GPUs: nothing to simulate; give more or larger ones")
    if known.speeds and not settings.placement.speeds:
        placement = settings.placement.model_copy(update={"speeds": known.speeds})
        settings = settings.model_copy(update={"placement": placement})

    def one(name: str) -> Result:
        with _progress(name) as look:
            watched = replace(known.scenario, look=look)
            result = run(watched, name, models=known.models, seed=seed, settings=settings, rates=known.rates)
        return replace(result, conditions=conditions)

    _compare(names, one, out, as_json=as_json)


def _conditions(context: typer.Context, settings: Settings) -> dict[str, str]:
    """Return what figures depend on, by option, and the settings that are not the usual ones."""
    own = {"policy", "out", "as_json"}  # say nothing of the work
    found = {
        max(option.opts, key=len).removeprefix("--"): str(context.params[option.name])
        for option in context.command.params
        if option.name not in own and context.params.get(option.name or "") is not None
    }
    changed = settings.model_dump(mode="json", exclude_defaults=True)
    return found | ({"settings": json.dumps(changed)} if changed else {})


def _compare(names: Sequence[str], one: Callable[[str], Result], out: Path, *, as_json: bool) -> None:
    """Simulate the policies and write what comes of each: one that cannot end takes nothing from the others."""
    from cotenant.scheduler.simulation.errors import SimulationError  # noqa: PLC0415
    from cotenant.scheduler.simulation.page import render  # noqa: PLC0415 - imports plotly

    results: list[Result] = []
    failed: list[str] = []
    for name in names:
        try:
            result = one(name)
        except SimulationError as error:
            failed.append(f"{name}: {error}")
            continue
        results.append(result)
        if not as_json:
            typer.echo(_line(result))
        with _writing(out):
            result.write(out / name)
    if results:
        with _writing(out):
            (out / REPORT_HTML).write_text(render(results, failed), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps([result.summary() for result in results], indent=2, allow_nan=False))
    elif results:
        typer.echo(f"written: {out / REPORT_HTML}")
    _name_stale(out, [result.policy for result in results])
    if failed:
        raise CotenantError(". ".join(failed))


def _name_stale(out: Path, written: Sequence[str]) -> None:
    """Say which results of an earlier simulation the folder keeps: of other work, for all that is known."""
    from cotenant.scheduler.simulation.simulate import policy_names  # noqa: PLC0415

    stale = [name for name in policy_names() if name not in written and (out / name / SUMMARY).is_file()]
    if not written and (out / REPORT_HTML).is_file():
        stale.insert(0, REPORT_HTML)
    if stale:
        _render.note(f"{out} keeps results of an earlier simulation: {', '.join(stale)}")


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CotenantError(f"out: {out} cannot be written: {error.strerror}") from error


@contextmanager
def _progress(name: str) -> Iterator[Callable[[World], None]]:
    """Show on a terminal how many jobs have ended: a long trace takes minutes."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(name, total=None)
        yield lambda world: bar.update(task, total=len(world.runs), completed=len(world.runs) - world.unfinished)


def _trace(path: Path, form: str | None, limit: int | None) -> Trace:
    from cotenant.scheduler.simulation.errors import TraceError  # noqa: PLC0415
    from cotenant.scheduler.simulation.traces import FORMATS, load  # noqa: PLC0415

    if form is not None and form not in FORMATS:
        raise NotAccepted("format", form, f"one of {', '.join(FORMATS)}")
    try:
        trace = load(path, form)
    except TraceError as error:
        raise CotenantError(str(error)) from error
    except OSError as error:
        raise CotenantError(f"trace: {path} cannot be read: {error.strerror}") from error
    return trace if limit is None else replace(trace, jobs=trace.jobs[:limit])


def _cluster(gpus: str, per_host: int, memory_gib: float) -> Cluster:
    from cotenant.scheduler.simulation.workload import MOST_GPUS, even_cluster, mixed_cluster  # noqa: PLC0415

    memory = round(memory_gib * GIB)
    counts: list[tuple[str, int]] = []
    for part in gpus.split(","):
        kind, colon, number = part.strip().rpartition(":")
        if not number.isdecimal() or len(number) > 20 or int(number) < 1 or (colon and not kind):
            raise NotAccepted("gpus", gpus, "a number such as 64, or types with numbers such as v100:8,k80:24")
        if (kind or "gpu") in dict(counts):
            raise NotAccepted("gpus", gpus, f"each type once: {kind or 'gpu'} comes twice")
        counts.append((kind or "gpu", int(number)))
    if sum(number for _, number in counts) > MOST_GPUS:
        raise NotAccepted("gpus", gpus, f"at most {MOST_GPUS:,} GPUs")
    if len(counts) == 1 and counts[0][0] == "gpu":
        return even_cluster(counts[0][1], per_host, memory_bytes=memory)
    return mixed_cluster(counts, per_host, memory)


@dataclass(frozen=True, slots=True)
class _Sources:
    """The options that say how fast jobs run."""

    pairs: Path | None
    true: str
    told: str | None
    throughputs: Path | None
    speeds: str | None


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of how fast jobs run, and by whom.

    Attributes:
        scenario: With its truth.
        models: What the shipped core predicts with.
        speeds: Of the GPU types, which the shipped core is told where the settings say nothing.
        rates: What the policy ``gavel`` is told.
    """

    scenario: Scenario
    models: ModelSource
    speeds: Mapping[str, float]
    rates: Truth


def _known(scenario: Scenario, sources: _Sources) -> _Known:
    from cotenant.scheduler.core.models import first_models  # noqa: PLC0415
    from cotenant.scheduler.simulation.errors import TraceError  # noqa: PLC0415
    from cotenant.scheduler.simulation.truth import NoInterference  # noqa: PLC0415

    if sources.told is not None and sources.pairs is None:
        raise NotAccepted("known-column", sources.told, "a column of --pairs, which is missing")
    try:
        if sources.throughputs is not None:
            return _with_throughputs(scenario, sources, sources.throughputs)
        if scenario.trace.counts == "steps":
            words = f"Gavel's simulation_throughputs.json: the jobs of {scenario.trace.name} count in steps"
            raise NotAccepted("throughputs", None, words)
        speeds = {} if sources.speeds is None else _speeds(sources.speeds, scenario.cluster)
        alike = NoInterference(speeds)
        if sources.pairs is None:
            return _Known(replace(scenario, truth=alike), first_models, speeds, alike)
        truth, models = _pairs(scenario.trace, sources, sources.pairs, speeds)
    except TraceError as error:
        raise CotenantError(str(error)) from error
    return _Known(replace(scenario, truth=truth), models, speeds, alike)


def _pairs(trace: Trace, sources: _Sources, path: Path, speeds: Mapping[str, float]) -> tuple[Truth, ModelSource]:
    """Return what pairs really do, and what the shipped core predicts with."""
    from cotenant.scheduler.core.models import first_models, only  # noqa: PLC0415
    from cotenant.scheduler.simulation.predictors import TablePredictor  # noqa: PLC0415
    from cotenant.scheduler.simulation.tables import load_pairs, utilisations  # noqa: PLC0415
    from cotenant.scheduler.simulation.truth import PairTable  # noqa: PLC0415

    utils = utilisations(trace)
    try:
        truth = PairTable(load_pairs(path, sources.true), utils, speeds=speeds)
        if sources.told is None:
            return truth, first_models
        return truth, only(TablePredictor(PairTable(load_pairs(path, sources.told), utils)))
    except OSError as error:
        raise CotenantError(f"pairs: {path} cannot be read: {error.strerror}") from error


def _with_throughputs(scenario: Scenario, sources: _Sources, path: Path) -> _Known:
    """Steps per second alone and in pairs, by GPU type: they say it all, and policy ``gavel`` is told them."""
    from cotenant.scheduler.core.models import first_models  # noqa: PLC0415
    from cotenant.scheduler.simulation.tables import GavelTruth, keep_off  # noqa: PLC0415

    for option, value in (("pairs", sources.pairs), ("speeds", sources.speeds)):
        if value is not None:
            raise NotAccepted(option, str(value), "nothing beside --throughputs, which says it")
    if scenario.trace.counts != "steps":
        raise NotAccepted("throughputs", str(path), f"nothing: the jobs of {scenario.trace.name} count in seconds")
    try:
        truth = GavelTruth(path)
    except OSError as error:
        raise CotenantError(f"throughputs: {path} cannot be read: {error.strerror}") from error
    types = list(dict.fromkeys(node.gpu_type for node in scenario.cluster.nodes))
    for gpu_type in types:
        if gpu_type not in truth.pairs:
            words = f"types that {path.name} has, such as v100:8,k80:24: {', '.join(truth.pairs)}"
            raise NotAccepted("gpus", gpu_type, words)
    trace, cluster = keep_off(truth.in_seconds(scenario.trace), scenario.cluster, truth)
    usual = truth.usual_speeds()
    whole = replace(scenario, trace=trace, cluster=cluster, truth=truth)
    return _Known(whole, first_models, {gpu_type: usual[gpu_type] for gpu_type in types}, truth)


def _speeds(text: str, cluster: Cluster) -> dict[str, float]:
    """Read speeds of GPU types, of each type of the cluster one."""
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415

    from cotenant.configs.settings import Speed  # noqa: PLC0415

    types = list(dict.fromkeys(node.gpu_type for node in cluster.nodes))
    given = [part.strip().partition("=") for part in text.split(",")]
    example = ",".join(f"{name}={1 if name == types[0] else 0.5}" for name in types)
    wanted = f"a speed from 0.000001 to 1000000 for each of {', '.join(types)}, such as {example}"
    if sorted(name for name, _, _ in given) != sorted(types):
        raise NotAccepted("speeds", text, wanted)
    try:
        return {name: TypeAdapter(Speed).validate_python(float(number)) for name, _, number in given}
    except (ValueError, ValidationError) as error:
        raise NotAccepted("speeds", text, wanted) from error


def _limited(option: str, number: float | None, least: float, most: float = math.inf) -> None:
    """Refuse a number beyond the limits of an option."""
    if number is not None and not least <= number <= most:
        words = f"a number of at least {least:g}" + ("" if most == math.inf else f" and at most {most:g}")
        raise NotAccepted(option, number, words)


def _line(result: Result) -> str:
    summary: dict[str, Any] = result.summary()
    large = summary["unplaceable"]
    missing = f"; {large:,} {'job needs' if large == 1 else 'jobs need'} more than this cluster has" if large else ""
    if not summary["ended"]:
        return f"{result.policy}: no job ended{missing}"
    return (
        f"{result.policy}: mean completion {summary['jct_s']['mean']:,.0f} s (p99 {summary['jct_s']['p99']:,.0f} s), "
        f"queueing {summary['queue_s']['mean']:,.0f} s, run/duration {summary['slowdown']['mean']:.3f}, "
        f"{100 * summary['saving']:.1f} % of GPU time saved, makespan {summary['makespan_s']:,.0f} s{missing}"
    )
