"""Records that grow: how one that an older version wrote is read, and one of a newer version refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

Record = TypeVar("Record")


class UnknownVersion(ValueError):
    """A record was written by a version of cotenant that is newer than this one."""

    def __init__(self, version: object, newest: int) -> None:
        super().__init__(
            f"schema_version: {version!r} is not accepted; give 0 to {newest} (a newer cotenant wrote this)"
        )


def check_version(version: int, newest: int) -> None:
    """Refuse what this code cannot know.

    Raises:
        UnknownVersion: ``version`` is not one of 0 … ``newest``.
    """
    if not 0 <= version <= newest:
        raise UnknownVersion(version, newest)


def restorable(cls: type[Record]) -> type[Record]:
    """Have pickles of this dataclass with slots read by ``restore``.

    A decorator, above ``dataclass``: early versions of Python 3.11 put their own over the ``__setstate__`` of a class.
    """
    cls.__setstate__ = restore  # type: ignore[attr-defined]
    return cls


def restore(record: Any, state: Sequence[object]) -> None:
    """Fill an unpickled dataclass with slots from the values of its fields, in order.

    An older version had fewer fields: the missing ones, which are the last, get their defaults. Then the
    record checks itself, as it does when it is made.

    Raises:
        ValueError: More values than fields, so a newer version wrote them; or one without a default is missing.
    """
    known = fields(record)
    if len(state) > len(known):
        name = type(record).__name__
        raise ValueError(f"{name}: {len(state)} values are not accepted; give {len(known)} (a newer cotenant wrote it)")
    for index, field in enumerate(known):
        made = field.default if field.default_factory is MISSING else field.default_factory()
        value = state[index] if index < len(state) else made
        if value is MISSING:
            raise ValueError(f"{type(record).__name__}: {field.name} is missing")
        object.__setattr__(record, field.name, value)
    if hasattr(record, "__post_init__"):
        record.__post_init__()
