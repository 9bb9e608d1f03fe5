"""Options and arguments that several commands have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cotenant.scheduler.errors import CotenantError, NotAccepted

if TYPE_CHECKING:
    from cotenant.configs.settings import Settings

Address = Annotated[
    str | None,
    typer.Option("--address", envvar="COTENANT_ADDRESS", help="Ray address; default: the cluster 'up' recorded."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print plain JSON.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="YAML file of settings.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Job id.")]


def settings_of(config: Path | None) -> Settings:
    """Return the settings: the defaults, the file of ``--config`` (else of ``$COTENANT_CONFIG``), the environment.

    Raises:
        CotenantError: One of them is not accepted.
    """
    from cotenant.configs.loader import SettingsError, load  # noqa: PLC0415 - imports pydantic

    try:
        return load(config, os.environ)
    except SettingsError as error:
        raise CotenantError(str(error)) from error


def writable_folder(out: Path) -> None:
    """Make the folder of ``--out`` before the work begins whose results it shall hold.

    Raises:
        CotenantError: It cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CotenantError(f"out: {out} cannot be written: {error.strerror}; give another folder") from error


def refusal_of(error: Exception) -> str:
    """Return in one sentence what is wrong with how a command was used; values out of range as everywhere.

    Empty when the help was printed instead.
    """
    said = str(error.format_message()) if isinstance(error, typer.TyperException) else str(error)
    param, why = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
    found = why()[0] if callable(why) else {}
    words = _ACCEPTED.get(found.get("type", ""))
    if param is None or words is None:
        return said
    limit = next(iter(found.get("ctx", {}).values()), "")
    accepted = words.format(f"{limit:g}" if isinstance(limit, int | float) else limit)
    return str(NotAccepted(max(param.opts, key=len).lstrip("-"), found["input"], accepted))


_ACCEPTED = {  # by what Typer's checks call it
    "greater_than_equal": "at least {}",
    "less_than_equal": "at most {}",
    "greater_than": "more than {}",
    "less_than": "less than {}",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
}
