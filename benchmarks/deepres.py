"""Three applications on one device: shares that follow use, priorities and deadlines, against static equal thirds.

(a) In virtual time: eight mixes of image classification, object detection and speech recognition (``deepres_mixes.py``)
on a device whose shares are enforced (``deepres_device.py``); what decides is what ships. (b) With ``--real``: three
mixes of real training programs on one core of this machine (``deepres_real.py``), with a real Ray.

Throughput is the work of a mix, in seconds alone, over the time until all of it is done. Fairness is Jain's index of
how fast the applications go compared with running alone, waiting included; of the mixes whose jobs are alike to their
owner. Nobody knows the phases; every program is known from one run before.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from common import Row, options, write_report
from deepres_device import Outcome, run
from deepres_mixes import Mix, mixes

from cotenant.configs.settings import PlacementSettings, Settings

APPLICATIONS = 3
METHODS = {
    "static thirds": Settings(placement=PlacementSettings(policy="static", static_slots=APPLICATIONS)),
    "cotenant": Settings(),
}
SEEDS = 3


@dataclass(frozen=True, slots=True)
class Figures:
    """What one mix came to under one method.

    Attributes:
        throughput: Seconds of work alone per second.
        progress: Speed of each application relative to alone, waiting included.
        missed: Deadlines that were missed.
        deadlines: Deadlines there were.
    """

    throughput: float
    progress: tuple[float, ...]
    missed: int = 0
    deadlines: int = 0


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index, (sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has everything."""
    return math.fsum(values) ** 2 / (len(values) * math.fsum(value * value for value in values))


def figures_of(outcomes: Sequence[Outcome]) -> Figures:
    """Return the figures of a mix that has ended."""
    ends = [outcome.ended_s or math.inf for outcome in outcomes]
    work: dict[str, float] = {}
    time: dict[str, float] = {}
    for outcome, end in zip(outcomes, ends, strict=True):
        name = outcome.work.application.name
        work[name] = work.get(name, 0.0) + outcome.work.solo_s
        time[name] = time.get(name, 0.0) + end - outcome.submitted_s
    return Figures(
        throughput=math.fsum(work.values()) / (max(ends) - outcomes[0].begin_s),
        progress=tuple(work[name] / time[name] for name in work),
        missed=sum(outcome.missed for outcome in outcomes),
        deadlines=sum(outcome.work.deadline_s is not None for outcome in outcomes),
    )


Found = dict[str, dict[str, list[Figures]]]  # by mix and method, one a seed


def simulated(seeds: int, length: float) -> tuple[Found, list[Mix]]:
    """Run every mix under both methods, with so many seeds, jobs of so many times their length."""
    found: Found = {}
    for seed in range(seeds):
        for mix in mixes(seed, length):
            for method, settings in METHODS.items():
                outcomes = run(mix.works, settings, seed)
                found.setdefault(mix.name, {}).setdefault(method, []).append(figures_of(outcomes))
    return found, mixes(0, length)


def rows_of(where: str, found: Found, fair: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of one device: every mix, then the mean over the mixes.

    Args:
        where: Which device.
        found: The figures.
        fair: Mixes whose fairness is judged.
    """
    ratios, speeds, indices = [], [], []
    for mix, methods in found.items():
        static, ours = methods["static thirds"], methods["cotenant"]
        case = f"{where}: {mix}"
        for method, runs in methods.items():
            yield _row(case, method, "throughput", [each.throughput for each in runs], "s/s")
            yield _row(case, method, "mean speed relative to alone", [_mean(each.progress) for each in runs], "1")
            yield _row(case, method, "Jain fairness", [jain(each.progress) for each in runs], "1")
            if any(each.deadlines for each in runs):
                missed = sum(each.missed for each in runs) / sum(each.deadlines for each in runs)
                yield Row(case, method, "deadlines missed", missed, "1")
        gains = [a.throughput / b.throughput - 1.0 for a, b in zip(ours, static, strict=True)]
        faster = [_mean(a.progress) / _mean(b.progress) - 1.0 for a, b in zip(ours, static, strict=True)]
        yield _row(case, "cotenant", "throughput gained over static thirds", gains, "1")
        ratios.append(_mean(gains))
        speeds.append(_mean(faster))
        if mix in fair:
            indices.append(_mean([jain(each.progress) for each in ours]))
    case = f"{where}: mean of {len(found)} mixes"
    yield Row(case, "cotenant", "throughput gained over static thirds", _mean(ratios), "1", goal=">= 0.35")
    yield Row(case, "cotenant", "mean speed gained over static thirds", _mean(speeds), "1")
    yield Row(case, "cotenant", "worst throughput gained over static thirds", min(ratios), "1")
    fairness = _mean(indices)
    yield Row(f"{where}: mean of {len(indices)} mixes", "cotenant", "Jain fairness", fairness, "1", goal=">= 0.95")


def _row(case: str, method: str, metric: str, values: Sequence[float], unit: str) -> Row:
    return Row(case, method, metric, _mean(values), unit, float(np.std(values)) if len(values) > 1 else None)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def main() -> None:
    """Run the benchmark."""
    parser = options(str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--real", action="store_true", help="also with real programs on a core of this machine (10 min)"
    )
    arguments: argparse.Namespace = parser.parse_args()
    found, known = simulated(*((1, 0.4) if arguments.quick else (SEEDS, 1.0)))
    rows = list(rows_of("virtual time", found, [mix.name for mix in known if mix.equal]))
    if arguments.real:
        from deepres_real import measured  # noqa: PLC0415 - starts a Ray cluster

        real = measured()
        rows += rows_of("one core, real programs", real, list(real))
    write_report("deepres", rows, arguments.json)


if __name__ == "__main__":
    main()
