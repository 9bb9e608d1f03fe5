"""The drawings of the findings, as SVG files that are the same, byte for byte, whenever the data are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from benchmarks.colocation.analysis import RULES, UNEQUAL, Capped, MeasuredSet, Repeated, Triple, saving_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cotenant.forecasting.types import DemandProfile

_STYLE: dict[Any, Any] = {"svg.hashsalt": "cotenant", "svg.fonttype": "none", "font.size": 9.0}
_BLUE, _RED, _GREY, _GREEN = "#1f5fa8", "#c0392b", "#777777", "#2d8a4e"
_LINE_STYLES = {"utilisation rule": (_GREEN, "-"), "sum rule": (_RED, "--"), "no interference": (_GREY, ":")}
_SQUARE, _WIDE = (4.4, 4.2), (5.6, 3.6)


def slowdown(sets: Sequence[MeasuredSet], path: Path) -> None:
    """Slowdown of each member against the summed utilisation."""
    figure, axes = _begin(_WIDE, "sum of utilisations alone", "slowdown 1/n")
    groups: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ("lighter", "heavier", "equal")}
    for one in sets:
        for util, value in zip(one.utils, one.slowdowns, strict=True):
            other = one.util_sum - util
            who = "equal" if abs(util - other) < UNEQUAL else "lighter" if util < other else "heavier"
            groups[who][0].append(one.util_sum)
            groups[who][1].append(value)
    for (who, (xs, ys)), colour in zip(groups.items(), (_BLUE, _RED, _GREY), strict=True):
        if xs:
            axes.scatter(xs, ys, s=14, color=colour, label=f"{who} of the two" if who != "equal" else "equal")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.legend()
    _save(figure, path)


def saving(sets: Sequence[MeasuredSet], path: Path) -> None:
    """Packing saving against the summed utilisation, with the simple rules for two equal members."""
    figure, axes = _begin(_WIDE, "sum of utilisations alone", "packing saving 1 − 1/Σn")
    for one in sets:
        middle, low, high = one.saving
        if low is not None and high is not None:
            axes.plot([one.util_sum] * 2, [low, high], color=_BLUE, linewidth=0.8, alpha=0.5)
        axes.scatter([one.util_sum], [middle], s=14, color=_BLUE)
    totals = np.linspace(0.02, max([2.0, *(one.util_sum for one in sets)]), 100)
    for name, rule in RULES.items():
        colour, style = _LINE_STYLES[name]
        values = [saving_of(rule([DemandProfile(u / 2, u / 2, None, source="history")] * 2)) for u in totals.tolist()]
        axes.plot(totals, values, color=colour, linestyle=style, label=f"{name}, equal members")
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.legend()
    _save(figure, path)


def asymmetry(sets: Sequence[MeasuredSet], path: Path) -> None:
    """Throughput of the lighter against that of the heavier of two."""
    figure, axes = _begin(_SQUARE, "n of the heavier", "n of the lighter")
    points = [(one, both) for one in sets if (both := one.lighter_first) is not None]
    colours = [one.util_sum for one, _ in points]
    dots = axes.scatter([b[1] for _, b in points], [b[0] for _, b in points], s=16, c=colours, cmap="viridis")
    figure.colorbar(dots, ax=axes, label="sum of utilisations alone")
    _diagonal(axes, [n for _, both in points for n in both])
    _save(figure, path)


def repeated(pairs: Sequence[Repeated], path: Path) -> None:
    """Throughput on the second occasion against the first."""
    figure, axes = _begin(_SQUARE, "n on the first occasion", "n on the second occasion")
    axes.scatter([one.first for one in pairs], [one.second for one in pairs], s=12, color=_BLUE)
    _diagonal(axes, [n for one in pairs for n in (one.first, one.second)])
    _save(figure, path)


def three(sets: Sequence[Triple], path: Path) -> None:
    """Throughput in a set of three against the product of the throughputs in the pairs."""
    figure, axes = _begin(_SQUARE, "product of the pairs' n", "n in the set of three")
    axes.scatter([one.product for one in sets], [one.measured for one in sets], s=14, color=_BLUE)
    _diagonal(axes, [n for one in sets for n in (one.product, one.measured)])
    _save(figure, path)


def capped(members: Sequence[Capped], path: Path) -> None:
    """Throughput under a cap against the throughput that the share allows alone, share / utilisation."""
    figure, axes = _begin(_SQUARE, "min(1, share / utilisation alone)", "n measured")
    for share, colour in zip(sorted({one.share for one in members}), _colours(members), strict=True):
        chosen = [one for one in members if one.share == share]
        axes.scatter(
            [one.reachable for one in chosen], [one.n for one in chosen], s=14, color=colour, label=f"share {share:g}"
        )
    _diagonal(axes, [one.n for one in members])
    axes.legend()
    _save(figure, path)


def heat_map(names: Sequence[str], ns: Sequence[Sequence[float | None]], path: Path) -> None:
    """Throughput of each workload (row) beside each other (column), sorted by utilisation."""
    side = max(3.5, 0.42 * len(names) + 2.2)
    figure, axes = _begin((side + 0.6, side), "beside …", "n of …")
    values = np.array([[np.nan if n is None else n for n in row] for row in ns])
    image = axes.pcolormesh(np.arange(len(names)), np.arange(len(names)), values, cmap="RdYlGn", vmin=0.3, vmax=1.0)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    axes.grid(visible=False)
    for (row, column), n in np.ndenumerate(values):
        if np.isfinite(n):
            axes.text(column, row, f"{n:.2f}".removeprefix("0"), ha="center", va="center", fontsize=6.5)
    figure.colorbar(image, ax=axes, label="n", shrink=0.8)
    _save(figure, path)


def _colours(members: Sequence[Capped]) -> list[tuple[float, ...]]:
    shares = len({one.share for one in members})
    return [tuple(mpl.colormaps["viridis"](i / max(1, shares - 1) * 0.85)) for i in range(shares)]


def _begin(size: tuple[float, float], x_label: str, y_label: str) -> tuple[Figure, Axes]:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
    return figure, axes


def _diagonal(axes: Axes, values: Sequence[float]) -> None:
    low, high = min([*values, 0.9]) - 0.03, max([*values, 1.0]) + 0.03
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal")


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_STYLE):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    # Matplotlib ends some lines with a space, which version control complains about.
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
