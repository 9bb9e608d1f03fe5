"""Loaded by every Python of a job, because this folder is first on its PYTHONPATH.

Starts the shim, then makes way: the folder leaves ``sys.path`` and a ``sitecustomize`` of the user's own, if there is
one, is executed in this one's place.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start_shim() -> None:
    """Load the shim by path: the job's interpreter need not know the package it belongs to."""
    package = type(sys)("_cotenant_shim")
    package.__path__ = [os.path.dirname(_HERE)]
    sys.modules["_cotenant_shim"] = package
    from _cotenant_shim.bootstrap import install  # type: ignore[import-not-found]  # noqa: PLC0415

    install()


def _chain() -> None:
    """Execute the next ``sitecustomize`` on the path, under its own name."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec  # noqa: PLC0415 - only where there is something to chain to

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("COTENANT_JOB_DIR"):
    try:
        _start_shim()
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the shim, the user's program must start
        if sys.stderr is not None:
            sys.stderr.write(f"cotenant: the shim did not start, shares are not enforced: {error!r}\n")
_chain()
