"""Retraining in the background, in a process of its own, from what a cluster has measured.

``python -m cotenant.forecasting.training.retrain --kind interference --registry DIR --evidence FILE`` or
``--kind demand --registry DIR --store DIR``.

A candidate that is not worse than the active model on groups that neither has seen (``candidates.py``) becomes a
version of the registry and the active one. Otherwise nothing changes. A process that is killed leaves the active
model as it was.

The last line of stdout is JSON: ``{"kind", "version", "adopted", "reason", "candidate", "active"}``; ``version`` is
null unless the candidate was adopted, the last two are errors by name. What was skipped or failed goes to stderr.

Exit codes: 0 done, adopted or not; 1 the data, the registry or the disk is at fault (no line of JSON then); 2 wrong
usage; 3 too little was measured so far.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from cotenant.forecasting.datasets.model_card import Kind, ModelFileError
from cotenant.forecasting.datasets.observation_file import load_observations
from cotenant.forecasting.datasets.registry import SHIPPED, Registry, load_demand, load_interference
from cotenant.forecasting.datasets.schema import DataError
from cotenant.forecasting.datasets.series import ValueSeries
from cotenant.forecasting.datasets.series_sources import from_signatures
from cotenant.forecasting.training.candidates import (
    MOST_TICKS,
    ActiveExperts,
    ActivePairs,
    Comparison,
    TooLittle,
    compare_demand,
    compare_interference,
)
from cotenant.forecasting.training.demand_artefact import KINDS
from cotenant.forecasting.training.demand_fit import TrainingOptions
from cotenant.forecasting.training.recipes import Origin

DONE, FAULT, TOO_LITTLE = 0, 1, 3
SPANS_S = (3600.0, 6 * 3600.0, 24 * 3600.0, 7 * 24 * 3600.0)  # a busy store is too large to read the whole of it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one retraining and return the exit code."""
    options = _options(arguments)
    if options.parent is not None:
        threading.Thread(target=_end_with, args=(options.parent,), daemon=True).start()
    registry = Registry(options.registry)
    origin = Origin(datetime.now(UTC).isoformat(timespec="milliseconds"), _program())
    kind: Kind = options.kind
    try:
        if kind == "interference":
            found = _interference(registry, options.evidence, origin)
        else:
            found = _demand(
                registry, options.store, origin, TrainingOptions(seed=options.seed, updates=options.updates)
            )
        version = None
        if found.trained is not None:
            version = registry.add(kind, found.trained.card, found.trained.write)
            registry.activate(kind, version)
    except TooLittle as error:
        _say(kind, Comparison(f"too little was measured: {error}", {}, {}, None), None)
        return TOO_LITTLE
    except (DataError, ModelFileError) as error:
        _complain(str(error))
        return FAULT
    except OSError as error:
        _complain(f"{error.filename or 'file'}: {error.strerror or error}")
        return FAULT
    _say(kind, found, version)
    return DONE


def _end_with(parent: int) -> None:
    """End this process once the one that started it has ended: nobody would learn of the outcome."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(FAULT)


def _interference(registry: Registry, evidence: Path, origin: Origin) -> Comparison:
    loaded = load_observations(evidence)
    for problem in loaded.problems:
        _complain(problem)
    version = _usable(registry, "interference")
    active = None
    if version is not None:
        active = ActivePairs(load_interference(registry, version), registry.card("interference", version))
    return compare_interference(loaded.observations, active, origin, withdrawn=loaded.withdrawn)


def _demand(registry: Registry, store: Path, origin: Origin, options: TrainingOptions) -> Comparison:
    util, memory = _recent(store, datetime.now(UTC).timestamp())
    version = _usable(registry, "demand")
    active = None
    if version is not None:
        active = ActiveExperts(load_demand(registry, version), registry.card("demand", version))
    return compare_demand({"util": util, "memory": memory}, active, origin, options, KINDS)


def _recent(store: Path, now_s: float) -> tuple[list[ValueSeries], list[ValueSeries]]:
    """Read back as far as needed for as many windows as are learnt from."""
    for span_s in SPANS_S:
        util, memory = from_signatures(store, since=now_s - span_s)
        if max(sum(len(each.values) for each in found) for found in (util, memory)) >= MOST_TICKS:
            return util, memory
    return from_signatures(store)


def _program() -> str:
    try:
        return metadata.version("cotenant")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


def _usable(registry: Registry, kind: Kind) -> str | None:
    """The active version; where it is damaged, what is shipped serves, so that is what a candidate must beat."""
    version = registry.active(kind)
    sound = {card.version for card in registry.versions(kind)}
    if version is None or version in sound:
        return version
    _complain(f"{kind}: the active version {version} cannot be used; compared with what is shipped")
    return SHIPPED if SHIPPED in sound else None


def _say(kind: Kind, found: Comparison, version: str | None) -> None:
    line = {
        "kind": kind,
        "version": version,
        "adopted": version is not None,
        "reason": found.reason,
        "candidate": dict(found.candidate),
        "active": dict(found.active),
    }
    print(json.dumps(line, allow_nan=False), flush=True)  # noqa: T201 - this is the output


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - for the log


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m cotenant.forecasting.training.retrain",
        description="Train a model again from what a cluster has measured; adopt it when it is not worse.",
    )
    parser.add_argument("--kind", choices=("interference", "demand"), required=True)
    parser.add_argument("--registry", type=Path, required=True, metavar="DIR", help="model registry")
    parser.add_argument("--evidence", type=Path, metavar="FILE", help="observations of the cluster (interference)")
    parser.add_argument("--store", type=Path, metavar="DIR", help="signature store of the cluster (demand)")
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process is no longer the parent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=TrainingOptions().updates, help="of the nets' weights (demand)")
    found = parser.parse_args(arguments)
    needed = "evidence" if found.kind == "interference" else "store"
    if getattr(found, needed) is None:
        parser.error(f"--kind {found.kind} needs --{needed}")
    return found


if __name__ == "__main__":
    sys.exit(main())
