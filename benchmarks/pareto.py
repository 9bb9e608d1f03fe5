"""What the packing bias trades: slowdown of the jobs against GPU time saved, on measured pairs.

Jobs are drawn at random and placed by the shipped policy on as many empty GPUs, while more wait behind them, so that
only the bias decides who shares. The predictor says what was measured. ``--figure FILE`` draws the curves.

The pairs are our own, of training jobs on a shared CPU core. With ``--lucid`` they are those of the workloads of the
Philly week on an RTX 3090 (needs ``--data``, ``$COTENANT_DATA`` or ``../shared/data`` beside the checkout).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import Row, options, write_report
from measured_pairs import GPU_TYPE, MeasuredPairs, load, lucid
from peers_work import data_folder

from cotenant.configs.settings import PlacementSettings
from cotenant.placement.batch import rearrange
from cotenant.placement.engine import policy
from cotenant.placement.fleet import Fleet
from cotenant.placement.statement import Statement
from cotenant.placement.types import GpuView, Placement, Request

GIB = 1 << 30
SEED = 5
JOBS = 12
BACKLOG = 1000  # GPUs that jobs behind these wait for: no empty GPU is there for everybody
BIASES = tuple(round(0.05 * step, 2) for step in range(21))
LIMITS = (1.25, 1.5, 10.0)
NO_LIMIT = LIMITS[-1]


@dataclass(frozen=True, slots=True)
class Point:
    """One bias (or one simple rule): means over the draws.

    Attributes:
        saving: Part of the GPU time saved against running each job alone, 1 - GPUs used / sum of n.
        slowdown: Mean of s - 1 over the jobs.
        worst: Mean over the draws of the largest s - 1.
    """

    saving: float
    slowdown: float
    worst: float


def draws(pairs: MeasuredPairs, count: int) -> list[list[str]]:
    """Names of the jobs of each draw."""
    rng = np.random.default_rng(SEED)
    names = sorted(pairs.profiles)
    return [[names[i] for i in rng.integers(len(names), size=JOBS)] for _ in range(count)]


def packed(pairs: MeasuredPairs, names: Sequence[str], bias: float, limit: float, most: int) -> list[list[str]]:
    """Which jobs the policy puts together."""
    settings = PlacementSettings(packing_bias=bias, max_jobs_per_gpu=most)
    gpus = [GpuView(f"g{i}", "h0", GPU_TYPE, 24 * GIB) for i in range(len(names))]
    engine, statement = policy("cotenant"), Statement(gpus)
    placed: list[tuple[Request, Placement]] = []
    for number, name in enumerate(names):
        job = Request(f"{number} {name}", 1, pairs.profiles[name].memory_bytes, None, pairs.profiles[name], limit)
        answer = engine.place(job, statement.fleet, pairs, settings, BACKLOG)
        if not isinstance(answer, Placement):
            raise RuntimeError(f"job {job.job_id} found no place on as many GPUs as there are jobs")
        statement.place(job, answer)
        placed.append((job, answer))
    placed = rearrange(engine, Fleet(gpus), placed, (), predictor=pairs, settings=settings) or placed
    carried: dict[str, list[str]] = {}
    for job, answer in placed:
        carried.setdefault(answer.shares[0].gpu_id, []).append(job.profile.fingerprint)
    return list(carried.values())


def in_order(pairs: MeasuredPairs, names: Sequence[str], most_util: float) -> list[list[str]]:
    """Pairs whose utilisations add up to at most this, in the order in which the jobs came."""
    sets: list[list[str]] = []
    for name in names:
        used = pairs.profiles[name].util_mean
        fits = (each for each in sets if len(each) == 1 and pairs.profiles[each[0]].util_mean + used <= most_util)
        mine = next(fits, None)
        if mine is None:
            sets.append([name])
        else:
            mine.append(name)
    return sets


def point(pairs: MeasuredPairs, found: Sequence[Sequence[Sequence[str]]]) -> Point:
    """What these sets, one list per draw, come to."""
    savings, slowdowns, worst = [], [], []
    for sets in found:
        n = [each.mid for names in sets for each in pairs.predict([pairs.profiles[name] for name in names], GPU_TYPE)]
        savings.append(1.0 - len(sets) / math.fsum(n))
        slowdowns.append(float(np.mean([1.0 / each - 1.0 for each in n])))
        worst.append(max(1.0 / each - 1.0 for each in n))
    return Point(float(np.mean(savings)), float(np.mean(slowdowns)), float(np.mean(worst)))


def curves(pairs: MeasuredPairs, drawn: Sequence[Sequence[str]]) -> dict[tuple[float, int], dict[float, Point]]:
    """Points by bias, by largest accepted slowdown and most jobs on a GPU."""
    return {
        (limit, most): {
            bias: point(pairs, [packed(pairs, names, bias, limit, most) for names in drawn]) for bias in BIASES
        }
        for limit, most in (*((limit, 2) for limit in LIMITS), (NO_LIMIT, 4))
    }


def simple(pairs: MeasuredPairs, drawn: Sequence[Sequence[str]]) -> dict[str, Point]:
    """The same for two rules that predict nothing."""
    return {
        "pairs in order of arrival": point(pairs, [in_order(pairs, names, math.inf) for names in drawn]),
        "pairs of at most 100 % utilisation": point(pairs, [in_order(pairs, names, 1.0) for names in drawn]),
    }


def label(limit: float, most: int) -> str:
    """The curve in words."""
    return f"up to {most} a GPU, " + ("no limit" if limit == NO_LIMIT else f"slowdown at most {limit:g}")


def rows(found: dict[tuple[float, int], dict[float, Point]], rules: dict[str, Point]) -> Iterator[Row]:
    """The figures."""
    for (limit, most), points in found.items():
        for bias, each in points.items():
            case = f"{label(limit, most)}, packing_bias {bias:g}"
            yield Row(case, "cotenant", "GPU time saved", each.saving, "1")
            yield Row(case, "cotenant", "mean slowdown above 1", each.slowdown, "1")
            yield Row(case, "cotenant", "worst slowdown above 1", each.worst, "1")
    for name, each in rules.items():
        yield Row("two a GPU", name, "GPU time saved", each.saving, "1")
        yield Row("two a GPU", name, "mean slowdown above 1", each.slowdown, "1")
        yield Row("two a GPU", name, "worst slowdown above 1", each.worst, "1")


def draw(found: dict[tuple[float, int], dict[float, Point]], rules: dict[str, Point], file: Path) -> None:
    """Draw the curves to a file, of the kind its name says."""
    import matplotlib as mpl  # noqa: PLC0415 - only for the figure

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "cotenant"
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7.0, 4.5), layout="constrained")
    for (limit, most), points in found.items():
        x = [100.0 * each.saving for each in points.values()]
        y = [100.0 * each.slowdown for each in points.values()]
        axes.plot(x, y, marker="o", markersize=3, linewidth=1, label=label(limit, most))
        if (limit, most) == (NO_LIMIT, 2):
            for bias in (0.0, 0.3, 0.5, 0.7, 1.0):
                at = points[bias]
                axes.annotate(
                    f"{bias:g}", (100 * at.saving, 100 * at.slowdown), xytext=(4, 4), textcoords="offset points"
                )
    for name, each in rules.items():
        axes.plot([100 * each.saving], [100 * each.slowdown], marker="x", linestyle="none", color="black")
        axes.annotate(
            name, (100 * each.saving, 100 * each.slowdown), xytext=(-4, 6), textcoords="offset points", ha="right"
        )
    axes.set_xlabel("GPU time saved, %")
    axes.set_ylabel("mean slowdown, %")
    axes.set_title("What packing_bias trades (numbers: the bias)")
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    """Run the benchmark."""
    parser = options(str(__doc__).partition("\n")[0])
    parser.add_argument("--lucid", action="store_true", help="pairs of an RTX 3090 instead of our own")
    parser.add_argument("--data", type=Path, help="folder with traces/ (default: $COTENANT_DATA or ../shared/data)")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the curves to FILE (SVG or PNG)")
    arguments = parser.parse_args()
    if arguments.lucid and not (data := data_folder(arguments.data)).exists():
        print(f"pareto: skipped, there is no {data}; give --data or set COTENANT_DATA", file=sys.stderr)
        return
    pairs = lucid(data) if arguments.lucid else load()
    drawn = draws(pairs, 8 if arguments.quick else 60)
    found, rules = curves(pairs, drawn), simple(pairs, drawn)
    write_report("pareto", list(rows(found, rules)), arguments.json)
    if arguments.figure is not None:
        draw(found, rules, arguments.figure)


if __name__ == "__main__":
    main()
