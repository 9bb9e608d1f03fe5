"""Tables of one or several runs: ``python -m benchmarks.colocation.tables OUT [OUT ...] --to DIR``.

Each OUT is what the measurement suite wrote, or a folder of tables. Several are merged: runs on the same type of device
are pooled, types stay apart. ``--to`` may be left out for one run; its tables then go to OUT/tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cotenant.forecasting.datasets.colocation import DataError, Tables, load_colocation, merge, save


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when the tables are written, 2 when something in the runs is not accepted."""
    options = _parser().parse_args(arguments)
    if options.to is None and len(options.runs) > 1:
        _parser().error("--to: give the folder for the merged tables")
    try:
        tables = make(options.runs, options.allow_dry_run)
        to = options.runs[0] / "tables" if options.to is None else options.to
        save(tables, to)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary(tables))
    print(f"written to {to}")
    return 0


def make(runs: Sequence[Path], allow_dry_run: bool = False) -> Tables:
    """The tables of one run, or of several merged.

    Raises:
        DataError: Something in the runs is not accepted.
    """
    if len(runs) == 1:
        return load_colocation(runs[0], allow_dry_run)
    return merge(runs, allow_dry_run)


def summary(tables: Tables) -> str:
    """A few lines on what is in it and what was left out."""
    rejected = tables.samples["rejected"]
    rules = rejected[rejected != ""].value_counts()
    by_rule = ", ".join(f"{rule} {count}" for rule, count in sorted(rules.items(), key=lambda item: str(item[0])))
    dropped = ", ".join(f"{reason.replace('_', ' ')} {count}" for reason, count in tables.dropped.items())
    return "\n".join(
        [
            f"{len(tables.cards)} runs on {', '.join(tables.gpu_types)}",
            f"{len(tables.samples)} samples, {len(tables.solo)} rows of solo, {len(tables.pairs)} of pairs",
            f"rejected: {int((rejected != '').sum())} ({by_rule or 'none'})",
            f"dropped while reading: {dropped or 'nothing'}",
            f"failures: {len(tables.failures)}",
        ]
    )


def _parser() -> argparse.ArgumentParser:
    description = "Make the tables of one or several runs of the measurement suite."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.colocation.tables", description=description)
    parser.add_argument("runs", nargs="+", type=Path, metavar="OUT", help="what the suite wrote, or a folder of tables")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where the tables go")
    parser.add_argument("--allow-dry-run", action="store_true", help="accept figures that were made up")
    return parser


if __name__ == "__main__":
    sys.exit(main())
