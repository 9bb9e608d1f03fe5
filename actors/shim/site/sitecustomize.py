"""Loaded by every Python of a job, because this folder is first on its PYTHONPATH.

Starts the shim, then makes way: the folder leaves ``sys.path`` and a ``sitecustomize`` of the user's own, if there is
one, is executed in this one's place.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start_shim() -> None:
    """Load the shim by path: the job's interpreter need not know the package it belongs to."""
    folder = os.path.dirname(_HERE)
    spec = importlib.util.spec_from_file_location(
        "_cotenant_shim", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        return
    package = importlib.util.module_from_spec(spec)
    sys.modules["_cotenant_shim"] = package
    spec.loader.exec_module(package)
    importlib.import_module("_cotenant_shim.bootstrap").install()


def _chain() -> None:
    """Execute the next ``sitecustomize`` on the path, under its own name."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("COTENANT_JOB_DIR"):
    try:
        _start_shim()
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the shim, the user's program must start
        if sys.stderr is not None:
            sys.stderr.write(f"cotenant: the shim did not start, shares are not enforced: {error!r}\n")
_chain()
