"""What every benchmark shares: its options, its rows, the printed table and the JSON report."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import operator
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_STARTED = time.perf_counter()
_COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq}
_DRAWS = 200
_PACKAGES = ("ray", "torch", "numpy", "scikit-learn")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        case: What was measured, for example ``"lenet, batch 32"``.
        method: Who is measured: ``"cotenant"`` for ours, the baseline's name otherwise.
        metric: The name of the figure, for example ``"solo utilisation"``.
        value: The figure, in ``unit``.
        unit: Its unit; ``"1"`` for a bare fraction.
        spread: The figure's spread in the same unit (standard deviation unless the benchmark says otherwise).
        goal: A comparison such as ``"<= 0.040"``, in ``unit``, or None.
        met: Whether the goal is met; worked out from ``goal`` when it is None.
        commit: Of the checkout it was measured with, where that is not the report's: it was kept from an earlier one.
    """

    case: str
    method: str
    metric: str
    value: float
    unit: str
    spread: float | None = None
    goal: str | None = None
    met: bool | None = None
    commit: str | None = None


def meets(goal: str, value: float) -> bool:
    """Whether ``value`` meets ``goal``, for example ``"<= 0.040"``; ValueError when the goal cannot be read."""
    sign, _, bound = goal.partition(" ")
    if sign not in _COMPARISONS:
        raise ValueError(f"goal {goal!r} is not accepted; give one of {', '.join(_COMPARISONS)}, a space and a number")
    return bool(_COMPARISONS[sign](value, float(bound)))


def spread_over(
    groups: Sequence[npt.NDArray[Any]], figure: Callable[[npt.NDArray[Any]], float], seed: int = 0
) -> float | None:
    """The spread of a figure over what it was measured on, for methods that have nothing random in them.

    The standard deviation over 200 draws of as many groups as there are, with replacement (a bootstrap of clusters):
    rows of one group err together, so they are drawn together.

    Args:
        groups: The rows of every group, along the first axis.
        figure: Makes the figure of rows.
        seed: Of the draws.

    Returns:
        The standard deviation; None of fewer than two groups.
    """
    if len(groups) < 2:
        return None
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(groups), size=(_DRAWS, len(groups)))
    return float(np.std([figure(np.concatenate([groups[i] for i in each])) for each in drawn], ddof=1))


def options(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has: ``--json FILE`` and ``--quick``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE as JSON")
    parser.add_argument("--quick", action="store_true", help="a short version: under a minute, wider spreads")
    return parser


def write_report(name: str, rows: Sequence[Row], json_path: Path | None, seconds: float | None = None) -> None:
    """Print the rows as a table and, with ``json_path``, write them with machine and commit as JSON.

    Args:
        name: The benchmark's name.
        rows: The figures.
        json_path: Where to write the JSON report; None writes none.
        seconds: How long the benchmark took; None counts from the import of this module.
    """
    seconds = time.perf_counter() - _STARTED if seconds is None else seconds
    judged = [_judged(row) for row in rows]
    _print_table(judged)
    print(f"{name}: {len(rows)} figures in {seconds:.1f} s")
    if json_path is None:
        return
    report = {
        "benchmark": name,
        "machine": machine(),
        "commit": commit(),
        "seconds": round(seconds, 3),
        "rows": judged,
    }
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What the figures were measured on: processor, cores, memory, system and the versions that matter."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in _PACKAGES},
    }


def commit() -> str | None:
    """The commit of this checkout, with ``-dirty`` when tracked files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine
        return None
    return answer.stdout.strip() or None


def _judged(row: Row) -> dict[str, Any]:
    record = asdict(row)
    if row.goal is not None and row.met is None:
        record["met"] = meets(row.goal, row.value)
    if row.commit is None:
        del record["commit"]
    return record


def _print_table(records: Sequence[dict[str, Any]]) -> None:
    head = ("case", "method", "metric", "value", "unit", "spread", "goal", "met")
    lines = [head, *(tuple(_cell(record[column]) for column in head) for record in records)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    sys.stdout.flush()


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
