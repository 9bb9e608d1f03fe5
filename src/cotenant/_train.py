"""The commands ``cotenant train …``: from measured data to a version in the model registry."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from cotenant import __version__, _render
from cotenant._models import (
    RegistryFolder,
    active_version,
    card_json,
    figures,
    fitted_to,
    note_errors,
    note_licence,
    open_registry,
    put_in_force,
    told,
)
from cotenant.scheduler.errors import CotenantError, NotAccepted

if TYPE_CHECKING:
    from rich.progress import TaskID

    from cotenant.forecasting.datasets.pair_sources import PairData
    from cotenant.forecasting.datasets.series_sources import SeriesData
    from cotenant.forecasting.training.demand_artefact import Kind
    from cotenant.forecasting.training.recipes import Origin, Progress, Trained

T = TypeVar("T")

train = typer.Typer(no_args_is_help=True, help="Train a model on measured data; it becomes a version in the registry.")

PairDataArgument = Annotated[
    list[str],
    typer.Argument(metavar="DATA...", help="Runs of the measurement suite, shipped data sets, or published pairs."),
]
SeriesDataArgument = Annotated[
    list[Path], typer.Argument(metavar="DATA...", help="Signature stores, or recordings (docs/models.md).")
]
PairForm = Annotated[
    str | None,
    typer.Option("--format", help="suite, lucid, gavel, gpulet, alnair-mps or alnair-pairs; default: found out."),
]
SeriesForm = Annotated[
    str | None, typer.Option("--format", help="signatures, nvidia-smi or genai; default: found out.")
]
SharingMode = Annotated[
    str | None, typer.Option("--mode", help="timeslice or mps; default: as the data say, else timeslice.")
]
GpuType = Annotated[str | None, typer.Option("--gpu-type", help="GPU type; default: as the data say.")]
Licence = Annotated[
    str | None,
    typer.Option("--licence", help="Licence of the data in words; needed where it is not known, else kept beside it."),
]
Activate = Annotated[bool, typer.Option("--activate", help="Let the new version serve at once.")]
Experts = Annotated[str, typer.Option("--experts", help="Which, separated by commas.")]
Updates = Annotated[int, typer.Option("--updates", min=1, help="Updates of the nets' weights.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of everything random.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the card as plain JSON.")]
Ship = Annotated[
    bool, typer.Option("--ship", help="For developers: it becomes the one that comes with this source tree.")
]


@train.command("interference")
def train_interference(
    *,
    data: PairDataArgument,
    form: PairForm = None,
    mode: SharingMode = None,
    gpu_type: GpuType = None,
    licence: Licence = None,
    groups: Annotated[str, typer.Option("--groups", help="Held out to judge it: family or job.")] = "family",
    registry: RegistryFolder = None,
    activate: Activate = False,
    ship: Ship = False,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Fit how jobs on one GPU slow each other down, to measured pairs."""
    with told():
        read = read_pairs(data, form, mode, licence, gpu_type)
        from cotenant.forecasting.training import recipes  # noqa: PLC0415 - imports scikit-learn and torch

        held = chosen("groups", groups, recipes.GROUPS)
        with progress_bars() as progress:
            trained = recipes.train_interference(read, origin(), groups=held, seed=seed, progress=progress)
        if ship:
            ship_it(trained)
            return
    keep(trained, registry, activate, as_json)


@train.command("demand")
def train_demand(
    *,
    data: SeriesDataArgument,
    form: SeriesForm = None,
    experts: Experts = "gru,tcn,trees",
    updates: Updates = 400,
    licence: Licence = None,
    registry: RegistryFolder = None,
    activate: Activate = False,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train further experts for the mixture that forecasts demand, on recorded utilisation and memory."""
    with told():
        from cotenant.forecasting.training import recipes  # noqa: PLC0415 - imports scikit-learn and torch
        from cotenant.forecasting.training.demand_fit import TrainingOptions  # noqa: PLC0415

        kinds = expert_kinds(experts)
        read = read_series(data, form, licence)
        options = TrainingOptions(seed=seed, updates=updates)
        with progress_bars() as progress:
            trained = recipes.train_demand_experts(read, origin(), experts=kinds, options=options, progress=progress)
        for each in read:
            if each.tick_s != 1.0:
                _render.note(
                    f"{each.source.source}: its values are {each.tick_s:g} s apart; experts serve windows of 1 s"
                )
    keep(trained, registry, activate, as_json)


def read_pairs(
    data: Sequence[str], form: str | None, mode: str | None, licence: str | None, gpu_type: str | None = None
) -> list[PairData]:
    """Read measured pairs as the options say."""
    from cotenant.forecasting.datasets.pair_sources import PAIR_FORMATS, Mode, read_pair_data  # noqa: PLC0415

    modes: tuple[Mode, ...] = ("timeslice", "mps")
    known = None if form is None else chosen("format", form, PAIR_FORMATS)
    shared = None if mode is None else chosen("mode", mode, modes)
    return [read_pair_data(each, known, shared, licence, gpu_type) for each in data]


def read_series(data: Sequence[Path], form: str | None, licence: str | None) -> list[SeriesData]:
    """Read recorded series as the options say."""
    from cotenant.forecasting.datasets.series_sources import SERIES_FORMATS, read_series_data  # noqa: PLC0415

    known = None if form is None else chosen("format", form, SERIES_FORMATS)
    return [read_series_data(each, known, licence) for each in data]


def chosen(option: str, said: str, accepted: Sequence[T]) -> T:
    """Return which of the accepted values was said; an error names them."""
    for each in accepted:
        if each == said:
            return each
    raise NotAccepted(option, said, ", ".join(map(str, accepted)))


def expert_kinds(said: str) -> tuple[Kind, ...]:
    """Return which demand experts were named, each once."""
    from cotenant.forecasting.training.demand_artefact import KINDS  # noqa: PLC0415 - imports numpy

    return tuple(dict.fromkeys(chosen("experts", word.strip(), KINDS) for word in said.split(",")))


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Show bars on stderr where it is a terminal; a bar per kind of work."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def progress(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=of)
            bars.update(tasks[what], completed=done, total=of)

        yield progress


def now() -> str:
    """Return the time, ISO 8601 in UTC; tests put another clock here."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def origin() -> Origin:
    from cotenant.forecasting.training.recipes import Origin  # noqa: PLC0415

    return Origin(now(), __version__)


def ship_it(trained: Trained) -> None:
    """Make the model the one that comes with this source tree.

    Raises:
        CotenantError: Its data may not be passed on.
    """
    from cotenant.forecasting.datasets import registry as shelf  # noqa: PLC0415 - imports numpy

    kind = trained.card.kind
    if trained.card.restricted:
        raise CotenantError(
            f"{kind}: fitted to data whose licence forbids to pass it on; it cannot come with the package"
        )
    shelf.write_shipped(shelf.SHIPPED_MODELS / kind, trained.card, trained.write)
    _render.note(f"written: {shelf.SHIPPED_MODELS / kind}")


def keep(trained: Trained, folder: Path | None, activate: bool, as_json: bool) -> None:
    """Put the model into the registry and say so."""
    from cotenant.forecasting.datasets.registry import ModelFileError  # noqa: PLC0415 - imports numpy

    registry, kind = open_registry(folder), trained.card.kind
    with told():
        version = registry.add(kind, trained.card, trained.write)
        try:
            if activate:
                put_in_force(registry, kind, version)
        except (ModelFileError, OSError) as error:
            raise CotenantError(f"{kind} {version} is in {registry.root}, but it is not active: {error}") from error
        card, fitted = registry.card(kind, version), fitted_to(registry, kind, version)
        active = active_version(registry, kind, []) == version
    note_licence(card)
    note_errors(card)
    if as_json:
        _render.print_json(card_json(card) | {"active": active, "folder": str(registry.folder(kind, version))})
        return
    typer.echo(f"{kind} {version}, in {registry.folder(kind, version)}")
    for name, value, rival, theirs in figures(card):
        beside = "" if theirs is None else f"; {rival}: {theirs:.4g}"
        typer.echo(f"{name}: {value:.4g}{beside}")
    typer.echo(f"({card.protocol})")
    typer.echo(f"it is active{fitted}" if active else f"let it serve with: cotenant models activate {kind} {version}")
