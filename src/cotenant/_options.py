"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotenant.scheduler.errors import CotenantError

Address = Annotated[
    str | None,
    typer.Option("--address", envvar="COTENANT_ADDRESS", help="Ray address; default: the cluster 'up' recorded."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print plain JSON.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Job id.")]


def writable_folder(out: Path) -> None:
    """Make the folder of ``--out`` before the work begins whose results it shall hold.

    Raises:
        CotenantError: It cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CotenantError(f"out: {out} cannot be written: {error.strerror}; give another folder") from error
