"""Gives a command one option per hint, made from ``hints.describe()`` so that there is only one list of hints."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated

import typer

from cotenant.scheduler.hints import HintDoc, describe


def with_hint_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter ``hints`` of a Typer command by the options of all hints.

    The command gets what was said as a mapping of hint name to text, unread: it decides what else to merge before
    ``parse_hints`` reads them all.
    """
    signature = inspect.signature(command, eval_str=True)
    options = [_option(doc) for doc in describe()]

    @wraps(command)
    def wrapper(**given: object) -> None:
        said = {option.name: given.pop(option.name) for option in options}
        command(**given, hints={name: text for name, text in said.items() if text is not None})

    own = [parameter for parameter in signature.parameters.values() if parameter.name != "hints"]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *options)]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {"return": None}
    return wrapper


def _option(doc: HintDoc) -> inspect.Parameter:
    option = typer.Option(
        f"--{doc.name.replace('_', '-')}",
        help=f"{doc.meaning} Give {doc.accepted}. When not said: {doc.default}.",
        rich_help_panel="Hints (all optional)",
        show_default=False,
    )
    return inspect.Parameter(
        doc.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )
