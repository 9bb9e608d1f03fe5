"""Keeps the tables of columns in ``docs/colocation.md`` equal to their declaration.

``python -m cotenant.forecasting.datasets.document docs/colocation.md`` writes them between the marks
``<!-- columns NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cotenant.forecasting.datasets.columns import CARD, TABLES, Column

_BLOCK = re.compile(r"(<!-- columns (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def columns_table(columns: Sequence[Column]) -> str:
    """The Markdown table of declared columns."""
    lines = [
        "| column | type | unit | what | source | accepted | missing |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{column.name}` | {column.kind} | {column.unit} | {column.meaning} | {column.source} | {_accepted(column)} "
        f"| {column.na or 'never'} |"
        for column in columns
    ]
    return "\n".join(lines) + "\n"


def with_tables(text: str) -> str:
    """The page with all tables of columns brought up to date."""
    declared = TABLES | {"card": CARD}
    return _BLOCK.sub(lambda match: match[1] + columns_table(declared[match[2]]) + match[3], text)


def main(arguments: Sequence[str]) -> None:
    """Bring the given pages up to date."""
    for name in arguments:
        page = Path(name)
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


def _accepted(column: Column) -> str:
    if column.kind in {"string", "flag"} and not column.values:
        return ""
    return column.accepted.removeprefix("a number in ").removeprefix("a whole number in ").removeprefix("one of ")


if __name__ == "__main__":
    main(sys.argv[1:])
