"""Runs the command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from cotenant import cli

RUNNER = CliRunner()


def invoke(*args: str) -> tuple[int, str, str]:
    """Return (exit code, stdout, stderr); an exception that is no exit is a failure of the test."""
    result = RUNNER.invoke(cli.app, list(args), catch_exceptions=False, prog_name="cotenant")
    return result.exit_code, result.stdout, result.stderr
