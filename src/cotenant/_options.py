"""Options and arguments that several commands have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cotenant.scheduler.errors import CotenantError

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
