"""Options and arguments that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Address = Annotated[
    str | None,
    typer.Option("--address", envvar="COTENANT_ADDRESS", help="Ray address; default: the cluster 'up' recorded."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print plain JSON.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Job id.")]
