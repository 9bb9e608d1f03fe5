"""The commands ``cotenant tune …``: a search for better options of training. Heavy imports come when they run."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from cotenant import _render
from cotenant._models import RegistryFolder, told
from cotenant._train import (
    GpuType,
    Licence,
    PairDataArgument,
    PairForm,
    Seed,
    SeriesDataArgument,
    SeriesForm,
    SharingMode,
    chosen,
    keep,
    origin,
    progress_bars,
    read_pairs,
    read_series,
)
from cotenant.forecasting.datasets.model_card import NOT_STATED
from cotenant.scheduler.errors import CotenantError, NotAccepted
from cotenant.scheduler.names import home, prepare_ray_environment

if TYPE_CHECKING:
    import optuna

    from cotenant.forecasting.training.crews import Crew
    from cotenant.forecasting.training.problems import Options, Problem
    from cotenant.forecasting.training.recipes import Trained
    from cotenant.forecasting.training.studies import Outcome, Plan, Progress

INTERRUPTED = 130  # 128 + SIGINT
MEASURE = NOT_STATED  # nothing is kept of the data, so no licence need be known
_STUDY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

tune = typer.Typer(no_args_is_help=True, help="Search for better options of training, judged on held-out groups.")

Trials = Annotated[
    int, typer.Option("--trials", metavar="N", help="The study is to have so many; those of earlier runs count.")
]
Timeout = Annotated[
    float | None, typer.Option("--timeout", metavar="S", help="Begin no further trial after so many seconds.")
]
Study = Annotated[str | None, typer.Option("--study", metavar="NAME", help="Default: made of what is asked.")]
Storage = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="URL|DIR",
        help="Database URL, folder for SQLite files, or file *.journal; default: 'studies' in the state directory.",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", metavar="N", help="Trials at the same time; default: 1, with --ray one per core."),
]
OnRay = Annotated[bool, typer.Option("--ray", help="Trials are tasks of the Ray cluster, not processes here.")]
Address = Annotated[str | None, typer.Option("--address", envvar="COTENANT_ADDRESS", help="Ray address, with --ray.")]
TrainBest = Annotated[
    bool,
    typer.Option("--train-best", help="Train on everything with the result; it becomes a version in the registry."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result to this file.")]


@dataclass(frozen=True, slots=True)
class _How:
    """How a study is run, as the options say."""

    trials: int
    timeout: float | None
    study: str | None
    storage: str | None
    jobs: int | None
    ray: bool
    address: str | None
    seed: int

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise NotAccepted("trials", self.trials, "a whole number of at least 1")
        if self.timeout is not None and not 0.0 < self.timeout < math.inf:
            raise NotAccepted("timeout", self.timeout, "a number of seconds above 0")
        if self.jobs is not None and self.jobs < 1:
            raise NotAccepted("jobs", self.jobs, "a whole number of at least 1")
        if self.study is not None and not _STUDY.fullmatch(self.study):
            raise NotAccepted("study", self.study, 'letters, digits, ".", "_" and "-", at most 100')


@tune.command("interference")
def tune_interference(
    *,
    data: PairDataArgument,
    trials: Trials = 50,
    timeout: Timeout = None,
    study: Study = None,
    storage: Storage = None,
    jobs: Jobs = None,
    ray: OnRay = False,
    address: Address = None,
    seed: Seed = 0,
    form: PairForm = None,
    mode: SharingMode = None,
    gpu_type: GpuType = None,
    licence: Licence = None,
    train_best: TrainBest = False,
    registry: RegistryFolder = None,
    json_file: JsonFile = None,
) -> None:
    """Search for better options of the fit of interference. Ctrl-C keeps what is done."""
    how = _How(trials, timeout, study, storage, jobs, ray, address, seed)
    with _clearly():
        from cotenant.forecasting.training import problems, recipes  # noqa: PLC0415 - imports torch and optuna

        read = read_pairs(data, form, mode, licence if train_best else licence or MEASURE, gpu_type)
        observations, shared = recipes.pooled(read)
        fingerprint = problems.joint_fingerprint([each.source.fingerprint for each in read])
        problem = problems.PairProblem(observations, shared, fingerprint, seed)

        def train(options: Options) -> Trained:
            chosen_options = problems.interference_options(options)
            with progress_bars() as progress:
                return recipes.train_interference(read, origin(), options=chosen_options, progress=progress)

        _tune(problem, how, train if train_best else None, registry, json_file)


@tune.command("demand")
def tune_demand(
    *,
    data: SeriesDataArgument,
    trials: Trials = 50,
    timeout: Timeout = None,
    study: Study = None,
    storage: Storage = None,
    jobs: Jobs = None,
    ray: OnRay = False,
    address: Address = None,
    seed: Seed = 0,
    quantity: Annotated[str, typer.Option("--quantity", help="Whose experts: util or memory.")] = "util",
    form: SeriesForm = None,
    licence: Licence = None,
    train_best: TrainBest = False,
    registry: RegistryFolder = None,
    json_file: JsonFile = None,
) -> None:
    """Search for better options of training demand experts. Ctrl-C keeps what is done."""
    how = _How(trials, timeout, study, storage, jobs, ray, address, seed)
    with _clearly():
        from cotenant.forecasting.training import problems, recipes  # noqa: PLC0415 - imports torch and optuna
        from cotenant.forecasting.training.demand_artefact import KINDS  # noqa: PLC0415

        wanted = chosen("quantity", quantity, tuple(recipes.SETTINGS))
        read = read_series(data, form, licence if train_best else licence or MEASURE)
        series = recipes.by_quantity(read)[wanted]
        if not series:
            raise NotAccepted("quantity", quantity, f"what the data have; they have no series of {quantity}")
        fingerprint = problems.joint_fingerprint([each.source.fingerprint for each in read])
        kinds = recipes.expert_kinds(KINDS)[wanted]
        problem = problems.SeriesProblem(series, wanted, fingerprint, kinds=kinds, seed=seed)

        def train(options: Options) -> Trained:
            experts, chosen_options = problems.demand_options(options, seed)
            with progress_bars() as progress:
                return recipes.train_demand_experts(
                    read, origin(), experts=experts, options=chosen_options, progress=progress
                )

        _tune(problem, how, train if train_best else None, registry, json_file)


@contextmanager
def _clearly() -> Iterator[None]:
    """Turn what is wrong with data and studies into errors for users."""
    try:
        with told():
            yield
    except CotenantError:
        raise
    except ValueError as error:  # a study, or too little data for one
        raise CotenantError(str(error)) from error


def _tune(
    problem: Problem,
    how: _How,
    train: Callable[[Options], Trained] | None,
    registry: Path | None,
    json_file: Path | None,
) -> None:
    from cotenant.forecasting.training.crews import run  # noqa: PLC0415 - imports torch
    from cotenant.forecasting.training.studies import Plan, located, opened, outcome, quiet  # noqa: PLC0415

    quiet()
    name = how.study or _usual_name(problem)
    at_once = how.jobs or (2 if how.ray else 1)
    plan = Plan(problem, located(how.storage or str(home() / "studies"), name), name, how.seed, at_once)
    with opened(plan) as study, _crew(plan, study, how) as crew:
        _render.note(
            f"study {name} in {plan.location}; {len(problem.inner)} groups are held out in turn, "
            f"never seen: {', '.join(problem.outer)}"
        )
        with _watched(how.trials) as tell, _resumable(plan, how.trials, study):
            run(study, crew, how.trials, how.timeout, tell)
        found = outcome(plan, study)
    _report(problem, found)
    if json_file is not None:
        _write_json(json_file, plan, found)
    if train is not None:
        keep(_with_both_figures(train(found.chosen), found), registry, False, False)


def _usual_name(problem: Problem) -> str:
    """Other data, another question or another seed make another study."""
    asked = problem.identity.get("mode") or problem.identity["quantity"]
    return f"{problem.kind}-{asked}-{str(problem.identity['data'])[:8]}-{problem.identity['seed']}"


# -- running ----------------------------------------------------------------------------------------------------------


@contextmanager
def _crew(plan: Plan, study: optuna.Study, how: _How) -> Iterator[Crew]:
    from cotenant.forecasting.training.crews import Alone, Processes  # noqa: PLC0415

    if not how.ray:
        yield Alone(plan, study) if plan.at_once == 1 else Processes(plan, study)
        return
    prepare_ray_environment(local=False)
    import ray as cluster  # noqa: PLC0415

    from cotenant.actors.tuning import RayTasks  # noqa: PLC0415
    from cotenant.scheduler.transport import join  # noqa: PLC0415

    owned = not cluster.is_initialized()
    if owned:
        join(how.address)
    try:
        yield RayTasks(plan, study, how.jobs)
    finally:
        if owned:
            cluster.shutdown()


@contextmanager
def _watched(trials: int) -> Iterator[Callable[[Progress], None]]:
    """Show how far the study is, on stderr."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    columns = (TextColumn("trials"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    console = Console(file=sys.stderr)
    with Bar(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=trials)

        def told(now: Progress) -> None:
            best = "" if now.best is None else f"best {now.best:.4g}"
            usual = "" if now.default is None else f", default {now.default:.4g}"
            bar.update(task, completed=min(now.done, trials), description=best + usual)

        yield told


@contextmanager
def _resumable(plan: Plan, trials: int, study: optuna.Study) -> Iterator[None]:
    """Say on Ctrl-C what is kept and how to go on."""
    from cotenant.forecasting.training.studies import progress  # noqa: PLC0415

    try:
        yield
    except KeyboardInterrupt:
        now = progress(study)
        best = "" if now.best is None else f", the best with {plan.problem.objective} {now.best:.4g}"
        _render.note(
            f"stopped: {now.done} of {trials} trials are done and kept{best}. To go on, give the same command again "
            f"(study {plan.study} in {plan.location})"
        )
        raise typer.Exit(INTERRUPTED) from None


# -- what comes out ---------------------------------------------------------------------------------------------------


def _with_both_figures(trained: Trained, found: Outcome) -> Trained:
    """Add what was found on groups that the study never saw: its own figures flatter what it chose."""
    unseen = found.best_unseen if found.holds else found.default_unseen
    metrics = {f"never seen: {name}": value for name, value in unseen.metrics.items()}
    baselines = {f"never seen: {name}": value for name, value in unseen.baselines.items()}
    card = replace(
        trained.card,
        metrics={**trained.card.metrics, **metrics},
        baselines={**trained.card.baselines, **baselines},
        protocol=f"{trained.card.protocol}; options chosen by {_trials(found.progress.done)} on all of these "
        f"groups but {unseen.group}, so only the figures called 'never seen' are not optimistic",
    )
    return replace(trained, card=card)


def _report(problem: Problem, found: Outcome) -> None:
    objective, console = problem.objective, _render.out()
    options = Table("option", "default", "best", box=None)
    for name in sorted({*found.default, *found.best}):
        options.add_row(name, _shown(found.default.get(name)), _shown(found.best.get(name)))
    console.print(options)
    errors = Table(objective, "groups of the study", "groups it never saw", box=None)
    rows: Sequence[tuple[str, float, float]] = [
        ("best options", found.best_score.metrics[objective], found.best_unseen.metrics[objective]),
        ("default options", found.default_score.metrics[objective], found.default_unseen.metrics[objective]),
        *_baselines(objective, found.best_score.baselines, found.best_unseen.baselines),
    ]
    for name, inner, outer in rows:
        errors.add_row(name, f"{inner:.4f}", f"{outer:.4f}")
    console.print(errors)
    console.print(_verdict(problem, found), soft_wrap=True)


def _baselines(
    objective: str, inner: Mapping[str, float], outer: Mapping[str, float]
) -> Iterator[tuple[str, float, float]]:
    """The simpler predictors that are told in terms of the objective."""
    ending = f", {objective}"
    relative = any(name.endswith(ending) for name in inner)
    for name, value in inner.items():
        if not relative or name.endswith(ending):
            yield name.removesuffix(ending), value, outer[name]


def _verdict(problem: Problem, found: Outcome) -> str:
    now = found.progress
    tried = f"{_trials(now.done)} ({now.pruned} given up early, {now.unfit} impossible)"
    if found.best == found.default:
        return f"{tried}: nothing is better than the default options."
    inner = 1.0 - found.best_score.metrics[found.objective] / found.default_score.metrics[found.objective]
    outer = 1.0 - found.best_unseen.metrics[found.objective] / found.default_unseen.metrics[found.objective]
    seen = f"{tried}: {inner:.1%} less {found.objective} than the default options on the groups of the study"
    never = f"on {', '.join(problem.outer)}, which it never saw,"
    if found.holds:
        return f"{seen}; {never} {outer:.1%}."
    return f"{seen}; {never} {-outer:.1%} more. The gain does not hold: keep the default options."


def _trials(count: int) -> str:
    return "1 trial" if count == 1 else f"{count} trials"


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _write_json(file: Path, plan: Plan, found: Outcome) -> None:
    content = {
        "study": plan.study,
        "storage": plan.location,
        **plan.problem.identity,
        "groups": list(plan.problem.inner),
        "trials": asdict(found.progress),
        "best": dict(found.best),
        "default": dict(found.default),
        "best_score": asdict(found.best_score),
        "default_score": asdict(found.default_score),
        "best_never_seen": asdict(found.best_unseen),
        "default_never_seen": asdict(found.default_unseen),
        "gain_holds": found.holds,
    }
    try:
        file.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise CotenantError(f"json: {file} cannot be written: {error.strerror}") from error
