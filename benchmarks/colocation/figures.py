"""How good the co-location data are, and how far simple rules are off: ``python -m benchmarks.colocation.figures``.

Without arguments all shipped data sets are judged; nothing is measured, so ``--quick`` changes nothing.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence

from benchmarks.colocation import analysis
from benchmarks.common import Row, options, write_report

from cotenant.forecasting.datasets.colocation import DataError, Tables, load_colocation, shipped


def rows(name: str, tables: Tables) -> Iterator[Row]:
    """The figures of one data set."""
    for gpu_type in tables.gpu_types:
        for mode in analysis.modes(tables, gpu_type):
            case = f"{name}, {gpu_type}, {mode}"
            yield from _quality(case, tables, gpu_type, mode)
            sets = analysis.measured_sets(tables, gpu_type, mode)
            for error in analysis.rule_errors(sets):
                spread = statistics.pstdev(
                    analysis.saving_of(one.predicted[error.rule]) - one.saving[0] for one in sets
                )
                yield Row(case, error.rule, "MAE of the saving", error.saving_error, "1", spread)
                yield Row(case, error.rule, "mean error of the saving", error.saving_bias, "1")
                yield Row(case, error.rule, "MAE of n", error.n_error, "1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 2 when a data set is not accepted or there is none."""
    parser = options("Quality of the co-location data, and the errors of simple rules on them.")
    parser.add_argument("sources", nargs="*", metavar="OUT_OR_NAME", help="data sets; all shipped ones when left out")
    chosen = parser.parse_args(arguments)
    sources = chosen.sources or shipped()
    if not sources:
        print("error: no data set is shipped; give a run or a folder of tables", file=sys.stderr)
        return 2
    try:
        figures = [row for source in sources for row in rows(str(source), load_colocation(source))]
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_report("colocation", figures, chosen.json)
    return 0


def _quality(case: str, tables: Tables, gpu_type: str, mode: str) -> Iterator[Row]:
    rejected = analysis.rejected_fraction(tables, gpu_type, mode)
    yield Row(case, "cotenant", "rejected windows", rejected, "1")
    widths = analysis.interval_widths(tables, gpu_type, mode)
    if widths:
        yield Row(case, "cotenant", "median width of the 80 % interval of n", statistics.median(widths), "1")
    off = [abs(one.first - one.second) for one in analysis.repeated(tables, gpu_type, mode)]
    if off:
        spread = statistics.pstdev(off)
        yield Row(case, "cotenant", "MAE of n, second occasion against first", statistics.fmean(off), "1", spread)
        yield Row(case, "cotenant", "median |difference of n|, second occasion", statistics.median(off), "1")
    products = [abs(one.product - one.measured) for one in analysis.triples(tables, gpu_type, mode)]
    if products:
        yield Row(case, "product of pairs", "MAE of n in sets of three", statistics.fmean(products), "1")


if __name__ == "__main__":
    sys.exit(main())
