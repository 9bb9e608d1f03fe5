"""The key under which runs of the same program share what was learnt about them."""

from __future__ import annotations

import hashlib
import os.path
from collections.abc import Sequence
from pathlib import PurePath

_LENGTH = ("--seed", "--out", "--steps", "--seconds", "--epochs", "--run-name", "--checkpoint-every")
_STEP_SIZE = ("--lr", "--learning-rate", "--weight-decay")
_VOLATILE = {*_LENGTH, *_STEP_SIZE}
_CODE = (".py", ".sh")
_PROGRAMS = ("bin", "sbin")  # folders in which a program is known by its name, such as Python in an environment


def fingerprint(command: Sequence[str], cwd: str = "/") -> str:
    """Return a key that is equal for runs of the same program with the same arguments.

    Options that change how long or where a program runs, or the numbers it computes with, but not what it does to a GPU
    (seed, output directory, number of steps, learning rate) are left out. Paths below the working directory count as
    seen from there: ``a/train.py`` and ``b/train.py`` are two programs, and ``./train.py`` is ``train.py``. Elsewhere
    scripts count by their whole paths, other files and folders by their names: data may lie in another place on every
    host. So one project is the same in another directory.

    Args:
        command: Argument vector, not empty.
        cwd: Absolute path of the directory that it runs in.
    """
    kept: list[str] = []
    skip_value = False
    for position, word in enumerate(command):
        if skip_value:
            skip_value = False
            continue
        option, separator, _ = word.partition("=")
        if option in _VOLATILE:
            skip_value = not separator
            continue
        kept.append(_known_as(word, cwd, program=position == 0))
    return hashlib.sha256("\0".join(kept).encode(errors="surrogateescape")).hexdigest()[:16]


def _known_as(word: str, cwd: str, *, program: bool) -> str:
    """Return what of a word tells programs apart; it is looked at, not what it may name."""
    if "/" not in word or len(word.split()) > 1:  # a text is no path
        return word
    here, path = (PurePath(os.path.normpath(each)) for each in (cwd, PurePath(cwd, word)))
    if program and path.parent.name in _PROGRAMS:
        return path.name
    below = path.is_relative_to(here) if here.name else not word.startswith("/")  # all that there is is below the root
    if below and "://" not in word:
        return str(path.relative_to(here))
    return str(path) if program or path.suffix in _CODE else PurePath(word).name


NAMELESS = fingerprint(("lease",))  # of leases of programs that have no name: nothing says that they are alike
