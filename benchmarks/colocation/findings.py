"""The page of findings of one data set: ``python -m benchmarks.colocation.findings OUT_OR_NAME --to docs``.

Writes ``colocation-NAME.md`` and its drawings under ``images/``. Every figure in the text is computed here from the
tables of the data set; nothing is written by hand.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from benchmarks.colocation import analysis, plots

from cotenant.forecasting.datasets.colocation import DataError, Tables, load_colocation

_MODE_NAMES = {
    "timeslice": "Time-slicing",
    "mps": "MPS without caps",
    "mps_cap": "MPS with capped shares",
    "duty": "Duty cycle",
}
_DESCRIBED = ("processor", "host_cores", "driver", "cuda", "torch", "python", "system", "commit")
_INTRODUCTION = (
    "Every figure below is computed from the tables of the data set alone. Their columns, the rules that reject "
    "windows and the 80 % intervals: [colocation.md](colocation.md). n is a member's rate together / its rate alone; "
    "slowdown is 1/n; the packing saving of a set is 1 − 1/Σn; U is the sum of the utilisations of its members alone."
)


class Page:
    """The text of the page, and where its drawings go.

    Attributes:
        lines: The text so far.
    """

    def __init__(self, name: str, to: Path) -> None:
        self.lines: list[str] = []
        self._name = name
        self._to = to

    def say(self, *lines: str) -> None:
        """Add a paragraph, or lines that stay together."""
        self.lines += [*lines, ""]

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Add a table."""
        self.say(*(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)))

    def draw(self, what: str, scope: str, caption: str, drawing: Callable[[Path], None]) -> None:
        """Add a drawing."""
        file = f"images/colocation-{self._name}-{scope}-{what}.svg"
        drawing(self._to / file)
        self.say(f"![{caption}]({file})")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when the page is written, 2 when the data set is not accepted."""
    options = _parser().parse_args(arguments)
    try:
        tables = load_colocation(options.source, options.allow_dry_run)
        page = write_page(tables, options.name or _name_of(options.source), options.to)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written: {page}")
    return 0


def write_page(tables: Tables, name: str, to: Path) -> Path:
    """Write the page and its drawings to the folder ``to``; the same data give the same bytes.

    Raises:
        DataError: ``name`` cannot be part of a file name.
    """
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise DataError(f"name: {name!r} is not accepted; give letters, digits, dots, dashes and underscores")
    page = Page(name, to)
    page.say(f"# What was measured: {name}")
    page.say(f"Made by `python -m benchmarks.colocation.findings {name}`. {_INTRODUCTION}")
    for gpu_type in tables.gpu_types:
        _device(page, tables, gpu_type)
        for mode in analysis.modes(tables, gpu_type):
            _mode(page, tables, gpu_type, mode)
    path = to / f"colocation-{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(page.lines).rstrip() + "\n", encoding="utf-8")
    return path


def _device(page: Page, tables: Tables, gpu_type: str) -> None:
    """The device, the method and the figures alone."""
    page.say(f"## {gpu_type}")
    cards = [card for card in tables.cards if card["gpu_type"] == gpu_type]
    for card in cards:
        page.say(_run(card))
    limits = dict.fromkeys(limit for card in cards for limit in card.get("limits", ()))
    if limits:
        page.say("Limits of the measurement:")
        page.say(*(f"* {limit}" for limit in limits))
    page.say(_counts(tables, gpu_type))
    events = Counter(failure["event"] for failure in tables.failures if failure["gpu_type"] == gpu_type)
    if events:
        told = ", ".join(f"{event.replace('_', ' ')} {count}" for event, count in sorted(events.items()))
        page.say(f"Visits that failed: {told}.")
    page.say("### Alone")
    head = ("workload", "family", "mode", "steps/s (80 % interval)", "utilisation", "memory, MiB")
    page.table((*head, "step p50 / p99, ms", "CV", "windows (rejected)"), _solo_cells(tables, gpu_type))


def _run(card: Mapping[str, Any]) -> str:
    known = [f"{field.replace('_', ' ')} {card[field]}" for field in _DESCRIBED if card.get(field) is not None]
    method = card["method"]
    return (
        f"Run `{card['run_id']}` of {card.get('date') or 'an unknown date'}, device `{card['device']}`: "
        f"{', '.join(known)}. Windows of {method['window_s']:g} s after {method['settle_s']:g} s to settle, solo and "
        "shared ones in turn."
    )


def _counts(tables: Tables, gpu_type: str) -> str:
    samples = tables.samples[tables.samples["gpu_type"] == gpu_type]
    rejected = Counter(rule for rule in samples["rejected"].tolist() if rule)
    rules = ", ".join(f"{rule.replace('_', ' ')} {count}" for rule, count in sorted(rejected.items())) or "none"
    workloads = tables.solo[tables.solo["gpu_type"] == gpu_type]["member"].nunique()
    pairs = tables.pairs[tables.pairs["gpu_type"] == gpu_type]
    sets = pairs[["mode", "shares", "set", "size", "fits"]].drop_duplicates()
    sizes = Counter(sets["size"].tolist())
    by_size = ", ".join(f"{count} of {size} members" for size, count in sorted(sizes.items())) or "nothing was shared"
    total = rejected.total()
    return (
        f"{workloads} workloads; {len(sets)} sets by mode and shares ({by_size}), {int((~sets['fits']).sum())} of them "
        f"did not fit into memory. {len(samples)} windows of a member, {total} rejected "
        f"({100 * total / len(samples):.1f} %): {rules}."
    )


def _solo_cells(tables: Tables, gpu_type: str) -> Iterator[tuple[str, ...]]:
    chosen = tables.solo[(tables.solo["gpu_type"] == gpu_type) & tables.solo["share"].isna()]
    for row in chosen.sort_values(["mode", "util_mean", "member"]).to_dict("records"):
        interval = "" if pd.isna(row["rate_low"]) else f" ({row['rate_low']:.3g}–{row['rate_high']:.3g})"
        yield (
            row["member"],
            "–" if pd.isna(row["family"]) else row["family"],
            row["mode"],
            _figure(row["rate"], ".3g") + interval,
            _figure(row["util_mean"], ".2f"),
            _figure(row["memory_bytes"] / 2**20, ".0f"),
            f"{_figure(row['step_p50_s'] * 1e3, '.3g')} / {_figure(row['step_p99_s'] * 1e3, '.3g')}",
            _figure(row["step_cv"], ".2f"),
            f"{row['windows']} ({row['rejected']})",
        )


def _mode(page: Page, tables: Tables, gpu_type: str, mode: str) -> None:
    scope = _slug(mode if len(tables.gpu_types) == 1 else f"{gpu_type}-{mode}")
    page.say(f"### {_MODE_NAMES[mode]}")
    pairs = analysis.measured_sets(tables, gpu_type, mode)
    if pairs:
        _pairs(page, pairs, scope)
        names, ns = analysis.matrix(pairs)
        page.say("n of each workload (row) beside each other (column), both sorted by utilisation:")
        page.draw("matrix", scope, "n of each beside each other", lambda path: plots.heat_map(names, ns, path))
    threes = analysis.triples(tables, gpu_type, mode)
    if threes:
        _triples(page, threes, scope)
    held = analysis.capped(tables, gpu_type, mode)
    if held:
        _capped(page, held, scope)
    widths = analysis.interval_widths(tables, gpu_type, mode)
    if widths:
        page.say(f"Width of the 80 % interval of n: median {statistics.median(widths):.3f} over {len(widths)} figures.")
    _repeatability(page, analysis.repeated(tables, gpu_type, mode), scope)


def _pairs(page: Page, pairs: Sequence[analysis.MeasuredSet], scope: str) -> None:
    """Slowdown and saving against the summed utilisation, the simple rules, asymmetry."""
    page.table(
        ("U", "pairs", "median slowdown", "worst slowdown", "median saving", "pairs that lost time"),
        (
            (
                _range(b),
                f"{b.pairs}",
                f"{b.slowdown:.2f}",
                f"{b.worst_slowdown:.2f}",
                _plain(b.saving),
                f"{b.lost}",
            )
            for b in analysis.bins(pairs)
        ),
    )
    page.draw("slowdown", scope, "slowdown against summed utilisation", lambda path: plots.slowdown(pairs, path))
    page.say(_extremes(pairs))
    page.draw("saving", scope, "saving against summed utilisation", lambda path: plots.saving(pairs, path))
    errors = analysis.rule_errors(pairs)
    best = min(errors, key=lambda error: error.saving_error)
    page.say(
        f"Simple rules on these {len(pairs)} pairs, none of which they were fitted to; nearest is “{best.rule}”, off "
        f"by {best.saving_error:.3f} in the saving on average:"
    )
    page.table(
        ("rule", "mean absolute error of the saving", "mean error, predicted − measured", "mean absolute error of n"),
        ((e.rule, f"{e.saving_error:.3f}", _signed(e.saving_bias), f"{e.n_error:.3f}") for e in errors),
    )
    unequal = [both for one in pairs if (both := one.lighter_first) is not None]
    if unequal:
        page.say(_asymmetry(unequal))
        page.draw("asymmetry", scope, "lighter against heavier", lambda path: plots.asymmetry(pairs, path))


def _extremes(pairs: Sequence[analysis.MeasuredSet]) -> str:
    best, worst = max(pairs, key=lambda one: one.saving[0]), min(pairs, key=lambda one: one.saving[0])
    lost = [one for one in pairs if one.saving[0] < 0.0]
    certain = [one for one in lost if one.saving[2] is not None and one.saving[2] < 0.0]
    verdict = "No pair lost time by sharing."
    if lost:
        verdict = (
            f"{len(lost)} of {len(pairs)} pairs lost time by sharing ({len(certain)} with the whole interval below 0), "
            f"the lightest of them at U = {min(one.util_sum for one in lost):.2f}."
        )
    return (
        f"{verdict} Largest saving: {_plain(best.saving[0])} ({' + '.join(best.names)}, U = {best.util_sum:.2f}); "
        f"smallest: {_plain(worst.saving[0])} ({' + '.join(worst.names)}, U = {worst.util_sum:.2f})."
    )


def _asymmetry(unequal: Sequence[tuple[float, float]]) -> str:
    paid = sum(heavier < lighter for lighter, heavier in unequal)
    light = statistics.median(lighter for lighter, _ in unequal)
    heavy = statistics.median(heavier for _, heavier in unequal)
    return (
        f"Who pays: in {paid} of {len(unequal)} pairs whose utilisations differ by at least {analysis.UNEQUAL:g} the "
        f"heavier is slowed down more. Median n: lighter {light:.2f}, heavier {heavy:.2f}."
    )


def _triples(page: Page, threes: Sequence[analysis.Triple], scope: str) -> None:
    off = [one.product - one.measured for one in threes]
    page.say(
        f"{len(threes)} members of sets of three: the product of a member's n beside each of the other two is off by "
        f"{statistics.fmean(map(abs, off)):.3f} on average (predicted − measured: {_signed(statistics.fmean(off))})."
    )
    page.draw("three", scope, "n among three against the product of pairs", lambda path: plots.three(threes, path))


def _capped(page: Page, held: Sequence[analysis.Capped], scope: str) -> None:
    page.say("Held to a share. A member that wants u of the device alone can reach min(1, share / u) at most:")
    rows = []
    for share in sorted({one.share for one in held}):
        chosen = [one for one in held if one.share == share]
        off = statistics.median(one.n - one.reachable for one in chosen)
        n, reachable = (statistics.median(values) for values in zip(*((c.n, c.reachable) for c in chosen), strict=True))
        rows.append((f"{share:g}", f"{len(chosen)}", f"{n:.2f}", f"{reachable:.2f}", _signed(off)))
    page.table(("share", "members", "median n", "median of min(1, share / u)", "median difference"), rows)
    page.draw("capped", scope, "n under a cap", lambda path: plots.capped(held, path))


def _repeatability(page: Page, repeated: Sequence[analysis.Repeated], scope: str) -> None:
    if not repeated:
        page.say("Nothing was repeated on a second occasion: the intervals miss what differs between occasions.")
        return
    off = [abs(one.first - one.second) for one in repeated]
    page.say(
        f"Repeatability: n on the second occasion differs from the first by {statistics.median(off):.3f} in the "
        f"median, by {statistics.fmean(off):.3f} on average and by {np.quantile(off, 0.9):.3f} or more in the worst "
        f"tenth, over {len(off)} figures."
    )
    page.draw("repeatability", scope, "second occasion against first", lambda path: plots.repeated(repeated, path))


def _range(one: analysis.Bin) -> str:
    if one.above == 0.0:
        return f"≤ {one.up_to:g}"
    return f"> {one.above:g}" if one.up_to == float("inf") else f"{one.above:g} – {one.up_to:g}"


def _plain(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _figure(value: float, form: str) -> str:
    return "–" if pd.isna(value) else format(value, form)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-")


def _name_of(source: str) -> str:
    path = Path(source)
    return path.parent.name if path.name == "tables" else path.name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.colocation.findings", description="Write the page of findings of one data set."
    )
    parser.add_argument("source", metavar="OUT_OR_NAME", help="a run, a folder of tables, or a shipped name")
    parser.add_argument("--to", type=Path, default=Path("docs"), metavar="DIR", help="where the page goes (docs)")
    parser.add_argument("--name", help="name of the page; the name or the folder of the data set when left out")
    parser.add_argument("--allow-dry-run", action="store_true", help="accept figures that were made up")
    return parser


if __name__ == "__main__":
    sys.exit(main())
