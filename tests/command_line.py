"""Runs the command line in this process."""

from __future__ import annotations

from click.testing import CliRunner
from typer.main import get_command

from cotenant import cli

RUNNER = CliRunner()
COMMAND = get_command(cli.app)  # once: making it takes fifty times as long as running it


def invoke(*args: str) -> tuple[int, str, str]:
    """Return (exit code, stdout, stderr); an exception that is no exit is a failure of the test."""
    result = RUNNER.invoke(COMMAND, list(args), catch_exceptions=False, prog_name="cotenant")
    return result.exit_code, result.stdout, result.stderr
