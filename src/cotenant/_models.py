"""The commands ``cotenant models …``: what models there are, and which one serves. Heavy imports happen in them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.table import Table
from rich.text import Text

from cotenant import _render
from cotenant.scheduler.errors import CotenantError, NotAccepted

if TYPE_CHECKING:
    from cotenant.forecasting.datasets.registry import Card, Kind, Registry

models = typer.Typer(
    no_args_is_help=True, help="Trained models: list them, choose the one that serves, delete old ones."
)

RegistryFolder = Annotated[
    Path | None,
    typer.Option("--registry", metavar="DIR", help="Model registry; default: 'models' in the state directory."),
]
KindArgument = Annotated[str, typer.Argument(metavar="KIND", help="interference, demand or coldstart.")]
VersionArgument = Annotated[str, typer.Argument(metavar="VERSION", help="A version as listed; its start is enough.")]

# By kind: the figures a model is judged by, the first before all, and the same figures of what is simpler.
_FIGURES = {
    "interference": (("MAE", ("utilisation rule", "half of the excess", "constant mean")),),
    "demand": (
        ("util: MAE / persistence", ("util: untrained mixture, MAE / persistence",)),
        ("memory: MAE / persistence", ("memory: untrained mixture, MAE / persistence",)),
    ),
    "coldstart": (("MAE", ("mean of the other families' runs",)),),
}


def open_registry(folder: Path | None) -> Registry:
    """Return the registry in a folder, or the one in the state directory."""
    from cotenant.forecasting.datasets.registry import Registry  # noqa: PLC0415 - imports numpy
    from cotenant.scheduler.names import home  # noqa: PLC0415

    return Registry(home() / "models" if folder is None else folder)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turn what is wrong with data, models and disks into errors for users."""
    from cotenant.forecasting.datasets.registry import ModelFileError  # noqa: PLC0415 - imports numpy
    from cotenant.forecasting.datasets.schema import DataError  # noqa: PLC0415

    try:
        yield
    except (DataError, ModelFileError) as error:
        raise CotenantError(str(error)) from error
    except OSError as error:
        raise CotenantError(f"{error.filename or 'file'}: {error.strerror or error}") from error


def checked_kind(kind: str) -> Kind:
    """Return the kind; an error names those there are."""
    from cotenant.forecasting.datasets.model_card import Kind  # noqa: PLC0415

    known: tuple[Kind, ...] = get_args(Kind)
    for each in known:
        if each == kind:
            return each
    raise NotAccepted("kind", kind, f"one of {', '.join(known)}")


def full_version(registry: Registry, kind: Kind, said: str) -> str:
    """Return the version that is meant by its name or by the start of it."""
    from cotenant.forecasting.datasets.registry import SHIPPED  # noqa: PLC0415 - imports numpy

    known = registry.names(kind)  # damaged ones too: whoever means one is told what is wrong with it
    if said == SHIPPED and said not in known:
        raise CotenantError(f"no {kind} model ships; to have no trained one serve: cotenant models deactivate {kind}")
    meant = [version for version in known if version.startswith(said)] if said else []
    if said in known or not meant:
        return said  # what is not known is told by the registry
    if len(meant) > 1:
        raise CotenantError(f"version: {said!r} is ambiguous; it begins {', '.join(meant)}")
    return meant[0]


def put_in_force(registry: Registry, kind: Kind, version: str | None) -> None:
    """Make a version the active one, None what ships; say so if the choices were damaged and are begun anew."""
    aside = registry.activate(kind, version)
    if aside is not None:
        _render.note(f"the choices were damaged: kept as {aside}; of every other kind what is shipped is active")


@models.command("list")
def list_models(
    *,
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", help="Only this kind.")] = None,
    registry: RegistryFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain JSON.")] = False,
) -> None:
    """List all models that can be used, the oldest first; what is wrong with others goes to stderr."""
    from cotenant.forecasting.datasets.registry import KINDS  # noqa: PLC0415 - imports numpy

    opened = open_registry(registry)
    kinds = KINDS if kind is None else (checked_kind(kind),)
    found: dict[Kind, tuple[list[Card], str | None]] = {}
    serving: dict[Kind, str | None] = {}
    broken: list[str] = []
    for each in kinds:
        with told():
            found[each] = (opened.versions(each), active_version(opened, each, broken))
            serving[each] = opened.serving(each)
            broken += [str(error) for error in opened.broken(each)]
    rows = [
        (card, card.version == active, card.version == serving[each])
        for each, (cards, active) in found.items()
        for card in cards
    ]
    if as_json:
        _render.print_json([card_json(card) | {"active": active, "serves": serves} for card, active, serves in rows])
    elif rows:
        _render.out().print(_table(rows))
    else:
        typer.echo("no models yet: train some with 'cotenant train'")
    for text in dict.fromkeys(broken):
        _render.problem(text)
    for each, (cards, active) in found.items():
        if active is not None and active not in {card.version for card in cards}:
            _render.problem(f"{each}: the active version {active} cannot be used; choose another")


@models.command()
def show(
    kind: KindArgument,
    version: Annotated[str | None, typer.Argument(metavar="[VERSION]", help="Default: the active one.")] = None,
    registry: RegistryFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain JSON.")] = False,
) -> None:
    """Show the card of a model: data, licences, errors beside simpler predictors, how it was fitted."""
    opened, wanted = open_registry(registry), checked_kind(kind)
    with told():
        chosen = opened.active(wanted) if version is None else full_version(opened, wanted, version)
        if chosen is None:
            raise CotenantError(f"there is no active {wanted} model; train one with 'cotenant train {wanted}'")
        card, folder = opened.verified(wanted, chosen)
    if as_json:
        _render.print_json(card_json(card) | {"folder": str(folder)})
        return
    lines: list[tuple[str, str]] = [
        ("kind", card.kind),
        ("version", card.version),
        ("folder", str(folder)),
        ("made", f"{card.made_at} by cotenant {card.program}, features version {card.features_version}"),
        *(("data", f"{each.source}; {each.rows} rows; SHA-256 {each.fingerprint[:16]}…") for each in card.data),
        *(("licence", f"{each.licence}{' (RESTRICTED)' if each.restricted else ''}") for each in card.data),
        ("judged by", card.protocol),
        *((name, _number(value)) for name, value in sorted(card.metrics.items())),
        *((f"baseline: {name}", _number(value)) for name, value in sorted(card.baselines.items())),
        ("seed", "nothing is random" if card.seed is None else str(card.seed)),
        *((f"option: {name}", _short(value)) for name, value in sorted(card.options.items())),
        *((f"file: {name}", checksum) for name, checksum in sorted(card.files.items())),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in lines:
        grid.add_row(Text(_render.plain(name), "bold"), Text(_render.plain(value)))
    _render.out().print(grid)


@models.command()
def activate(kind: KindArgument, version: VersionArgument, registry: RegistryFolder = None) -> None:
    """Let a version serve; a running cotenant that uses this registry takes it up by itself."""
    opened, wanted = open_registry(registry), checked_kind(kind)
    with told():
        chosen = full_version(opened, wanted, version)
        put_in_force(opened, wanted, chosen)
        card, fitted = opened.card(wanted, chosen), fitted_to(opened, wanted, chosen)
    typer.echo(f"{wanted}: {chosen} is active{fitted}")
    note_licence(card)
    note_errors(card)


@models.command()
def deactivate(kind: KindArgument, registry: RegistryFolder = None) -> None:
    """Go back to the model that comes with the package."""
    opened, wanted = open_registry(registry), checked_kind(kind)
    with told():
        put_in_force(opened, wanted, None)
        left = opened.active(wanted)
    typer.echo(f"{wanted}: {'nothing trained is active' if left is None else f'{left} is active'}")


@models.command()
def prune(
    kind: KindArgument,
    keep: Annotated[int, typer.Option("--keep", min=0, help="How many of the newest stay.")] = 5,
    registry: RegistryFolder = None,
) -> None:
    """Delete old versions; the active one and the shipped one always stay."""
    opened, wanted = open_registry(registry), checked_kind(kind)
    with told():
        gone = opened.prune(wanted, keep)
    for version in gone:
        typer.echo(f"deleted {version}")
    if not gone:
        typer.echo("nothing to delete")


def note_licence(card: Card) -> None:
    """Say on stderr when the data of a model forbid some uses of it."""
    for licence in dict.fromkeys(each.licence for each in card.data if each.restricted):
        _render.note(f"this model was fitted to data under '{licence}': mind what that forbids")


def note_errors(card: Card) -> None:
    """Say on stderr where a model was no better than what serves without it, on groups that it had not seen."""
    for name, value, rival, theirs in figures(card):
        if theirs is None:
            continue
        ours, others = _number(value), _number(theirs)
        if float(ours) >= float(others):  # as they are told: one may be the other, summed in another order
            than = "worse" if float(ours) > float(others) else "no better"
            _render.note(f"{than} than what is simpler: {name} {ours}, {rival} {others}")


def card_json(card: Card) -> dict[str, Any]:
    """Return a card as plain JSON."""
    content: dict[str, Any] = json.loads(json.dumps(asdict(card)))
    return content | {"restricted": card.restricted}


def figures(card: Card) -> list[tuple[str, float, str, float | None]]:
    """Return names and values of the figures a model is judged by, each with the best baseline's name and value."""
    return [
        (name, card.metrics[name], *_best(card, rivals)) for name, rivals in _FIGURES[card.kind] if name in card.metrics
    ]


def main_figure(card: Card) -> tuple[str, float | None, str, float | None]:
    """Return name and value of the figure a model is judged by, and the best baseline's name and value."""
    for figure in figures(card):
        return figure
    name = next(iter(sorted(card.metrics)), "")  # a card of another making
    return name, card.metrics.get(name), "", None


def _best(card: Card, rivals: Sequence[str]) -> tuple[str, float | None]:
    known = {rival: card.baselines[rival] for rival in rivals if rival in card.baselines}
    best = min(known, key=lambda rival: known[rival], default="")
    return best, known.get(best)


def active_version(registry: Registry, kind: Kind, broken: list[str]) -> str | None:
    """Return the active version; what is wrong with the file of choices is added to what is broken."""
    from cotenant.forecasting.datasets.registry import ModelFileError  # noqa: PLC0415 - imports numpy

    try:
        return registry.active(kind)
    except ModelFileError as error:  # a damaged choice hides no version
        broken.append(str(error))
        return None


def fitted_to(registry: Registry, kind: Kind, version: str) -> str:
    """Return, in words, the types of GPUs that a version was fitted to; "" where it does not depend on them."""
    from cotenant.forecasting.datasets.registry import load_coldstart, load_interference  # noqa: PLC0415 - imports numpy

    if kind == "demand":
        return ""
    found = load_interference(registry, version).models if kind == "interference" else None
    types = load_coldstart(registry, version).gpu_types if found is None else sorted(found)
    return f"; it was fitted to {', '.join(types) or 'GPUs that are not told'}"


def _table(rows: list[tuple[Card, bool, bool]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("KIND", "VERSION", "ACTIVE", "MADE", "DATA", "LICENCE", "FIGURE", "BEST BASELINE"):
        table.add_column(column, overflow="fold")
    for card, active, serves in rows:
        name, value, rival, theirs = main_figure(card)
        licences = "; ".join(dict.fromkeys(each.licence for each in card.data))
        cells = (
            card.kind,
            card.version,
            "active" if active else "serves" if serves else "",
            card.made_at[:16].replace("T", " "),
            _data(card),
            licences,
            "-" if value is None else f"{name} {_number(value)}",
            "-" if theirs is None else f"{rival} {_number(theirs)}",
        )
        styles = ["", "", "green", "", "", "yellow" if card.restricted else "", "", ""]
        table.add_row(*(Text(_render.plain(cell), style) for cell, style in zip(cells, styles, strict=True)))
    return table


def _data(card: Card) -> str:
    """What a model was fitted to, short enough for a line; ``show`` tells all of it."""
    sources = [_cut(each.source) for each in card.data]
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return f"{sources[0] if sources else '-'}{more} ({sum(each.rows for each in card.data)} rows)"


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _short(value: object) -> str:
    return _cut(json.dumps(value), 200)
