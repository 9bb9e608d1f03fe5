"""The first predictors against the present ones: the rows of the demo's tables about that, and their sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from demo_values import (
    NA,
    PACKED,
    Row,
    change,
    fine,
    hours,
    megabytes,
    mode_of,
    number,
    over_limit,
    part_of,
    percent,
    plain,
    points,
    points_off,
    prediction_error,
    ratio,
    rows_of,
    seconds,
    tenths,
    whole,
)

Text = Callable[[object], str]
Column = tuple[str, Callable[[Row], str], bool]  # heading, text of a row's cell, whether it is a number (aligned right)
WHO = {"first": "first", "cotenant": "present"}

FIGURE_COLUMNS: tuple[Column, ...] = (
    ("figure (n = speed together / alone)", lambda row: plain(row["figure"]), False),
    ("first", lambda row: plain(row["first"]), True),
    ("present", lambda row: plain(row["cotenant"]), True),
    ("change", lambda row: plain(row["change"]), True),
)
DEMAND_COLUMNS: tuple[Column, ...] = (
    ("demand forecast", lambda row: plain(row["figure"]), False),
    ("windows judged", lambda row: plain(row["forecasts"]), True),
    ("last value", lambda row: plain(row["persistence"]), True),
    ("first", lambda row: plain(row["first"]), True),
    ("present", lambda row: plain(row["cotenant"]), True),
    ("change", lambda row: plain(row["change"]), True),
    ("p95 first", lambda row: plain(row["first covers"]), True),
    ("p95 present", lambda row: plain(row["cotenant covers"]), True),
)
SET_COLUMNS: tuple[Column, ...] = (
    ("together", lambda row: " + ".join(plain(one.get("name")) for one in rows_of(row, "members")) or NA, False),
    ("chosen by", lambda row: WHO.get(plain(row.get("mode")), NA), False),
    ("measured for", lambda row: seconds(row.get("seconds")), True),
    ("n measured", lambda row: _each(row, lambda one: one.get("measured")), True),
    ("n by first", lambda row: _each(row, lambda one: part_of(one, "predicted").get("first")), True),
    ("n by present", lambda row: _each(row, lambda one: part_of(one, "predicted").get("cotenant")), True),
    ("saving measured", lambda row: percent(row.get("saving")), True),
    ("saving by first", lambda row: percent(part_of(row, "saving_predicted").get("first")), True),
    ("saving by present", lambda row: percent(part_of(row, "saving_predicted").get("cotenant")), True),
)
BOTH_JOB_COLUMNS: tuple[Column, ...] = (
    ("job", lambda row: plain(row["name"]), False),
    *(
        (f"{who}: {heading}", lambda row, name=name, text=text: text(row[name]), True)
        for name, who in WHO.items()
        for heading, text in (
            ("measured", lambda job: ratio(job.get("slowdown_measured"))),
            ("predicted", lambda job: ratio(job.get("slowdown_predicted"))),
            ("error", lambda job: change(prediction_error(job))),
        )
    ),
)


def figure_rows(report: Row) -> list[Row]:
    """Return the table of figures: what either packed mode came to, and how right its predictions were."""
    sets = part_of(report, "sets")
    where = f"same {_sets(len(rows_of(sets, 'rows')))}"
    rows = [
        _compared(figure, [mode_of(report, name).get(key) for name in PACKED], text, relative)
        for figure, key, text in (
            ("makespan", "makespan_s", seconds),
            ("mean completion", "mean_completion_s", seconds),
            ("device hours", "device_hours", hours),
        )
    ]
    rows += [
        _compared(figure, [packed_of(report, name).get(key) for name in PACKED], text, difference)
        for figure, key, text, difference in (
            ("unfairness", "unfairness", ratio, relative),
            ("packing saving, measured", "saving_measured", tenths, in_points),
            ("packing saving, predicted", "saving_predicted", tenths, in_points),
            ("error of that saving, own sets", "saving_error", points_off, relative),
            ("error of n per job, own sets", "throughput_error", fine, relative),
        )
    ]
    rows.append(_compared("jobs slower than they allow", [_too_slow(report, name) for name in PACKED], whole, more))
    rows += [
        _compared(f"{figure}, {where}", [part_of(sets, key).get(name) for name in PACKED], text, relative)
        for figure, key, text in (
            ("error of n per job", "throughput_error", fine),
            ("error of a saving", "saving_error", points_off),
        )
    ]
    return rows


def demand_rows(report: Row) -> list[Row]:
    """Return the table of demand forecasts: mean absolute errors of the median, and what the 95th percentile covers."""
    rows: list[Row] = []
    for row in rows_of(report, "demand"):
        text = megabytes if row.get("quantity") == "memory" else tenths
        figure = f"{plain(row.get('quantity'))} {plain(row.get('ahead_s'))} s ahead"
        errors, covers = part_of(row, "error"), part_of(row, "coverage")
        rows.append(
            {
                **_compared(figure, [errors.get(name) for name in PACKED], text, relative),
                "forecasts": row.get("forecasts"),
                "persistence": text(row.get("persistence")),
                **{f"{name} covers": tenths(covers.get(name)) for name in PACKED},
            }
        )
    return rows


def job_rows(report: Row) -> list[Row]:
    """Return every job with what was measured and predicted of it in either packed mode."""
    found: dict[str, dict[str, Row]] = {}
    for name in PACKED:
        for job in rows_of(packed_of(report, name), "jobs"):
            found.setdefault(plain(job.get("name")), {})[name] = job
    return [{"name": job, **{name: modes.get(name, {}) for name in PACKED}} for job, modes in found.items()]


def packed_of(report: Row, name: str) -> Row:
    """Return what sharing did in one packed mode."""
    return part_of(part_of(report, "packed"), name)


def verdict(report: Row) -> str:
    """Return the like-for-like comparison in a sentence."""
    sets = part_of(report, "sets")
    rows, errors = rows_of(sets, "rows"), part_of(sets, "throughput_error")
    if not rows:
        return "No set of jobs was together long enough to compare first and present predictors on it."
    asked = f"Asked about the same {_sets(len(rows))} of jobs"
    return (
        f"{asked}, the present predictor misses a job's speed by {tenths(errors.get('cotenant'))} of its speed alone "
        f"on average; the first one by {tenths(errors.get('first'))}."
    )


def counted(report: Row) -> str:
    """Return how many sets there are figures of."""
    sets = part_of(report, "sets")
    return (
        f"{plain(sets.get('together'))} different sets of jobs shared a device in the two packed modes. Those that "
        f"trained together for {seconds(sets.get('least_s'))} or more in one of them are compared here: "
        f"{_sets(len(rows_of(sets, 'rows')))}, with {plain(sets.get('members'))} jobs in all."
    )


def served(report: Row) -> str:
    """Return what predicted in either packed mode, and why it was not what it should have been."""
    said = [f"{who} predictors: {plain(packed_of(report, name).get('serving')) or NA}" for name, who in WHO.items()]
    note = report.get("note")
    return "; ".join(said) + "." + (f" {note}." if isinstance(note, str) and note else "")


def relative(first: float, present: float) -> str:
    """Return a change in percent."""
    return change(present / first - 1.0 if first else None)


def in_points(first: float, present: float) -> str:
    """Return a change of percentages in points."""
    return points(present - first)


def _compared(figure: str, values: Sequence[object], text: Text, difference: Callable[[float, float], str]) -> Row:
    first, present = (number(value) for value in values)
    return {
        "figure": figure,
        **{name: text(value) for name, value in zip(PACKED, values, strict=True)},
        "change": NA if first is None or present is None else difference(first, present),
    }


def more(first: float, present: float) -> str:
    """Return a change of a count."""
    return f"{present - first:+.0f}"


def _too_slow(report: Row, name: str) -> int | None:
    """Return how many jobs were slowed down by more than they allow; None where the mode has no figures."""
    jobs = rows_of(packed_of(report, name), "jobs")
    return sum(over_limit(job) for job in jobs) if jobs else None


def _each(row: Row, value: Callable[[Row], object]) -> str:
    return ", ".join(ratio(value(one)) for one in rows_of(row, "members")) or NA


def _sets(count: int) -> str:
    return f"{count} set" if count == 1 else f"{count} sets"
