"""The key under which runs of the same program share what was learnt about them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import PurePath

_VOLATILE = ("--seed", "--out", "--steps", "--seconds", "--epochs", "--run-name", "--checkpoint-every")


def fingerprint(command: Sequence[str]) -> str:
    """Return a key that is equal for runs of the same program with the same arguments.

    Directories are dropped from paths, and options that change how long or where a program runs but not what it does
    to a GPU (seed, output directory, number of steps) are left out.

    Args:
        command: Argument vector, not empty.
    """
    kept: list[str] = []
    skip_value = False
    for word in command:
        if skip_value:
            skip_value = False
            continue
        option, separator, _ = word.partition("=")
        if option in _VOLATILE:
            skip_value = not separator
            continue
        kept.append(PurePath(word).name if "/" in word else word)
    return hashlib.sha256("\0".join(kept).encode(errors="surrogateescape")).hexdigest()[:16]


NAMELESS = fingerprint(("lease",))  # of leases of programs that have no name: nothing says that they are alike
