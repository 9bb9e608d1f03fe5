"""The demo's page and tables: every figure of a made-up report is there, none is invented, nothing breaks the page."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HOSTILE = '<script>alert("x")</script>'

# name, family, solo utilisation, solo steps/s, measured and predicted slowdown, allowed, run time alone, neighbours
JOBS = (
    ("resnet-digits", "image classification", 0.93, 41.25, 1.00, 1.00, 1.2, 31.0, ()),
    ("wide-digits", "image classification", 0.55, 60.10, 1.21, 1.14, 1.5, 24.0, ("cartpole-a", "bert-news")),
    ("mobile-digits", "image classification", 0.35, 88.00, 1.12, 1.09, 1.5, 18.0, ("unet-digits",)),
    ("unet-digits", "image segmentation", 0.48, 12.80, 1.18, 1.22, 1.5, 27.0, ("mobile-digits", "cartpole-b")),
    ("cartpole-a", "reinforcement learning", 0.22, 140.00, 1.04, 1.03, None, 22.0, ("wide-digits",)),
    ("cartpole-b", "reinforcement learning", 0.24, 131.50, 1.56, 1.31, 1.5, 22.0, ("unet-digits", "dcgan")),
    ("dcgan", "generative adversarial", 0.62, 9.44, 1.29, 1.33, 1.5, 35.0, ("cartpole-b",)),
    ("bert-news", "text classification", 0.41, 0.85, 1.15, 1.20, 1.5, 29.0, ("wide-digits",)),
)
# start, run time over that alone, device; in the order of JOBS
SCHEDULES = {
    "exclusive": ((0, 1, 0), (0, 1, 1), (24, 1, 1), (31, 1, 0), (42, 1, 1), (58, 1, 0), (64, 1, 1), (80, 1, 0)),
    "static": ((0, 2, 0), (0, 1.9, 1), (0, 1.1, 0), (0, 1.4, 1), (20, 1, 0), (38, 1.1, 1), (42, 1.4, 0), (46, 1.3, 1)),
    "first": ((0, 1, 0), (0, 1.3, 1), (31, 1.2, 0), (31, 1.3, 0), (0, 1, 1), (31, 1.5, 1), (31, 1.4, 1), (58, 1, 0)),
    "cotenant": ((0, 1, 0), (0, 1.2, 1), (31, 1.1, 0), (31, 1.2, 0), (0, 1, 1), (31, 1.5, 1), (29, 1.3, 1), (52, 1, 0)),
}  # fmt: skip


def made_up() -> dict[str, Any]:
    """Return a report of the shape that the demo makes, with invented figures."""
    jobs = [
        {
            "name": name, "family": family, "utilisation": busy, "solo_rate": rate, "shared_rate": rate / measured,
            "slowdown_measured": measured, "slowdown_predicted": predicted, "max_slowdown": allowed,
            "neighbours": list(neighbours),
        }
        for name, family, busy, rate, measured, predicted, allowed, _, neighbours in JOBS
    ]  # fmt: skip
    return {
        "jobs": jobs,
        "modes": {name: made_up_mode(name) for name in SCHEDULES},
        "packed": {
            "first": made_up_packed([{**job, "slowdown_predicted": 1.4} for job in jobs], "utilisation rule", 0.062),
            "cotenant": made_up_packed(jobs, "learned", 0.031),
        },
        "sets": made_up_sets(),
        "demand": [
            {
                "quantity": quantity, "ahead_s": ahead, "forecasts": 740, "persistence": 0.05 * unit,
                "error": {"first": 0.06 * unit, "cotenant": 0.045 * unit},
                "coverage": {"first": 0.883, "cotenant": 0.951},
            }
            for quantity, unit in (("utilisation", 1.0), ("memory", 1e8))
            for ahead in (1, 5)
        ],
        "note": "",
        "packing_saving_measured": 0.314,
        "packing_saving_predicted": 0.352,
        "unfairness": 1.56,
        "decisions": [
            {"job": "resnet-digits", "at_s": 0.4, "text": "on cpu-0 alone: nothing is known of it yet"},
            {"job": "cartpole-a", "at_s": 6.2, "text": "on cpu-1 beside wide-digits: predicted saving 38%, own 1.03"},
            {"job": "dcgan", "at_s": 29.1, "text": "on cpu-1 beside wide-digits: predicted saving 21%, own 1.33"},
        ],
        "refusals": [
            {"job": "dcgan", "text": "2 GPUs: predicted slowdown 1.61 > 1.20 of resnet-digits, 1.58 > 1.50 of unet"},
        ],
        "machine": {"cores": 2, "system": "Linux"},
        "versions": {"python": "3.11.2", "ray": "2.60.0", "torch": "2.13.0"},
        "settings": {"packing_bias": 0.5, "devices": 2},
        "seconds": 287.4,
    }  # fmt: skip


def made_up_packed(jobs: list[dict[str, Any]], serving: str, error: float) -> dict[str, Any]:
    return {
        "serving": f"interference: {serving}", "jobs": jobs, "saving_measured": 0.25, "saving_predicted": 0.25 + error,
        "saving_error": error, "throughput_error": 2 * error, "unfairness": 1.5,
    }  # fmt: skip


def made_up_sets() -> dict[str, Any]:
    rows = [
        {
            "gpu_type": "cpu-core", "mode": "cotenant", "seconds": 12.0, "saving": 0.375,
            "saving_predicted": {"first": 0.3, "cotenant": 0.36},
            "members": [
                {"name": "unet-digits", "measured": 0.85, "predicted": {"first": 0.7, "cotenant": 0.82}},
                {"name": "wide-digits", "measured": 0.75, "predicted": {"first": 0.73, "cotenant": 0.74}},
            ],
        }
    ]  # fmt: skip
    return {
        "least_s": 5.0, "together": 4, "rows": rows, "members": 2,
        "throughput_error": {"first": 0.085, "cotenant": 0.02}, "saving_error": {"first": 0.075, "cotenant": 0.015},
    }  # fmt: skip


def made_up_mode(mode: str) -> dict[str, Any]:
    runs = []
    for (name, family, *_, alone_s, neighbours), (start, stretch, device) in zip(JOBS, SCHEDULES[mode], strict=True):
        beside = list(neighbours) if mode in {"first", "cotenant"} else []
        end = start + alone_s * stretch
        span = {"start_s": start + 1.0, "end_s": end, "neighbours": beside, "slowdown_predicted": 1.2}
        runs.append({
            "name": name, "family": family, "device": f"host-a/cpu-{device}", "queued_s": 0.0, "start_s": start,
            "end_s": end, "state": "SUCCEEDED", "neighbours": beside, "colocations": [span],
        })  # fmt: skip
    makespan = max(run["end_s"] for run in runs)
    return {
        "makespan_s": makespan,
        "mean_completion_s": sum(run["end_s"] for run in runs) / len(runs),
        "device_hours": 2 * makespan / 3600,
        "runs": runs,
        "devices": {
            f"host-a/cpu-{device}": [
                [t / 2, None if t % 67 == 30 else 0.7 + 0.25 * math.sin(t / (3 + device)) * math.cos(t / 19)]
                for t in range(int(2 * makespan))
            ]
            for device in (0, 1)
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def report_module() -> Iterator[ModuleType]:
    """Import the module as the demo does, with its own folder on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import demo_report

        yield demo_report
    for name in ("demo_report", "demo_charts", "demo_values", "demo_versus"):
        sys.modules.pop(name, None)


def body_of(module: ModuleType, report: dict[str, Any]) -> str:
    return "".join(module.page_parts(report).values())


def on_terminal(module: ModuleType, report: dict[str, Any], width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(module.render_console(report))
    return capture.get()


def replaced(value: Any, is_lost: Callable[[object], bool]) -> Any:
    """Return a copy in which every value that ``is_lost`` is null."""
    if isinstance(value, dict):
        return {key: replaced(item, is_lost) for key, item in value.items()}
    if isinstance(value, list):
        return [replaced(item, is_lost) for item in value]
    return None if is_lost(value) else value


def test_page_is_one_file_with_its_script_and_no_placeholder_left(report_module: ModuleType, tmp_path: Path) -> None:
    report_module.write_html(made_up(), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    own = page.replace(report_module.get_plotlyjs(), "")
    assert len(page) - len(own) > 1_000_000
    assert not re.search(r"""(src|href)\s*=|@import|url\(""", own)
    assert not re.search(r"\$[a-z]+\b", own)
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]


@pytest.mark.parametrize(
    ("cotenant_s", "static_s", "said"),
    [
        (60.0, 80.0, "60.0 s: 40 % sooner than with one job per device (100.0 s)"),
        (60.0, 80.0, "(100.0 s), 25 % sooner than with static halves of a device (80.0 s) and 14 % sooner"),
        (60.0, 80.0, "(80.0 s) and 14 % sooner than with its first predictors (70.0 s)"),
        (110.0, 80.0, "10 % later than with one job per device (100.0 s), 38 % later than with static halves"),
        (100.1, 80.0, "the same as with one job per device (100.0 s)"),
        (None, 80.0, "after n/a: not comparable with one job per device (100.0 s)"),
        (60.0, None, "not comparable with static halves of a device (n/a)"),
        (60.0, 0.0, "not comparable with static halves of a device (0.0 s)"),
    ],
)  # fmt: skip
def test_headline_says_what_was_measured(
    report_module: ModuleType, cotenant_s: float | None, static_s: float | None, said: str
) -> None:
    report = made_up()
    for mode, makespan in (("exclusive", 100.0), ("static", static_s), ("first", 70.0), ("cotenant", cotenant_s)):
        report["modes"][mode]["makespan_s"] = makespan
    text = report_module.headline(report).replace("\N{NO-BREAK SPACE}", " ")
    assert said in text
    assert "Packing saved 31 % of the device time; 35 % was predicted." in text
    assert "Unfairness (largest slowdown over smallest) was 1.56." in text


def test_page_shows_every_job_with_its_figures_and_reasons(report_module: ModuleType) -> None:
    body = body_of(report_module, made_up()).replace("\N{NO-BREAK SPACE}", " ")
    for name, family, *_ in JOBS:
        assert f"<span>{name}</span>" in body
        assert f"</span>{family}</li>" in body  # in the legend
    row = re.search(r"<tr[^>]*>(?:(?!</tr>).)*<span>wide-digits</span>.*?</tr>", body)
    assert row is not None
    cells = re.findall(r"<span>(.*?)</span>", row[0])
    assert cells == [
        *("wide-digits", "image classification", "60.10", "49.67", "1.21", "1.14", "1.50", "-6 %", "55 %"),
        "cartpole-a, bert-news",
    ]
    assert "0.4 s</span> <b>resnet-digits</b>: on cpu-0 alone" in body
    assert "<b>dcgan</b>: 2 GPUs: predicted slowdown 1.61 &gt; 1.20" in body
    assert "python: 3.11.2" in body


def test_jobs_slower_than_allowed_and_jobs_that_failed_are_named(report_module: ModuleType) -> None:
    report = made_up()
    assert report_module.page_parts(report)["over_limit"] == "cartpole-b"
    assert report_module.page_parts(report)["failures"] == ""
    report["modes"]["static"]["runs"][3]["state"] = "FAILED"
    assert "unet-digits (static halves of a device: FAILED)" in report_module.page_parts(report)["failures"]


def test_all_time_scales_are_the_same(report_module: ModuleType) -> None:
    body = body_of(report_module, made_up())
    longest = max(mode["makespan_s"] for mode in made_up()["modes"].values())
    ends = [float(end) for end in re.findall(r'"range":\[0,([\d.]+)\],"ticksuffix":" s"', body)]
    assert len(ends) == 12  # 4 + 8: a Gantt per mode, a panel per mode and device
    assert ends == pytest.approx([longest * 1.02] * 12)


def test_a_bars_box_tells_its_neighbours_and_how_much_they_were_predicted_to_cost(report_module: ModuleType) -> None:
    gantts = report_module.page_parts(made_up())["gantts"].replace("\\u00a0", " ")
    boxes = [box.replace("\\u003cbr\\u003e", " ") for box in re.findall(r'"hovertext":"(.*?)"', gantts)]
    assert len(boxes) == 4 * len(JOBS)
    assert any("22.0 s beside wide-digits: slowdown 1.20 predicted" in box for box in boxes)
    assert sum("neighbours: -" in box for box in boxes) == 2 * len(JOBS) + 2


def test_the_names_on_the_bars_can_be_read(report_module: ModuleType) -> None:
    """WCAG 2.2, level AA, wants a contrast of 4.5 for text of this size; Plotly's own grey on green has 2.9."""
    charts = sys.modules["demo_charts"]
    assert [charts.contrast(*pair) for pair in (("#ffffff", "#000000"), ("#777777", "#ffffff"))] == pytest.approx(
        [21.0, 4.478], abs=1e-3
    ), "the definition's own examples"
    gantts = report_module.page_parts(made_up())["gantts"]
    bars = re.findall(r'\{[^{}]*"insidetextfont":\{"color":"(#\w{6})"\}.*?"marker":\{"color":"(#\w{6})"\}', gantts)
    assert len(bars) == 4 * len(JOBS)
    every = {*bars, *((charts.text_on(colour), colour) for colour in report_module.COLOURS)}
    assert {pair: ratio for pair in every if (ratio := charts.contrast(*pair)) < 4.5} == {}


def test_a_long_device_name_keeps_its_ends_in_the_charts(report_module: ModuleType) -> None:
    report = made_up()
    report["modes"]["cotenant"]["devices"] = {"127.0.0.1-0123456789abcdef/GPU-deadbeef-0000-1111": [[0.0, 0.5]]}
    assert "127.0.0.1-\\u2026eadbeef-0000-1111" in report_module.page_parts(report)["utilisation"]


def test_utilisation_is_not_drawn_where_there_is_no_reading(report_module: ModuleType) -> None:
    report = made_up()
    for mode in report["modes"].values():
        mode["devices"] = {}
    report["modes"]["static"]["devices"] = {"cpu-0": [[0, 0.5], [1, 0.5], [2, None], [3, None], [4, 0.25], [5, 0.25]]}
    chart = report_module.page_parts(report)["utilisation"]
    assert re.findall(r'"x":(\[.*?\])', chart)[:2] == ["[0.0,1.0]", "[4.0,5.0]"]
    report["modes"]["static"]["devices"] = {"cpu-0": [[0, None], [1, None]]}
    assert "static halves of a device: cpu-0" in report_module.page_parts(report)["utilisation"]
    report["modes"]["static"]["devices"] = {}
    assert report_module.page_parts(report)["utilisation"] == "<p>No utilisation was recorded.</p>"


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 5), (5, 9), (9, 12)], [0, 0, 0]),
        ([(0, 5), (1, 3), (4, 8), (5, 6)], [0, 1, 1, 0]),
        ([(0, 9), (0, 9), (0, 9)], [0, 1, 2]),
        ([], []),
    ],
)
def test_overlapping_runs_lie_in_different_lanes(
    report_module: ModuleType, spans: list[tuple[float, float]], expected: list[int]
) -> None:
    runs = [{"start_s": start, "end_s": end} for start, end in spans]
    placed = sys.modules["demo_charts"].lanes(runs)
    assert [lane for lane, _ in placed] == expected
    assert [run for _, run in placed] == runs


def emptied() -> dict[str, Any]:
    return {"jobs": [], "modes": {}, "decisions": [], "refusals": [], "machine": {}, "versions": {}, "settings": {}}


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(replaced(made_up(), lambda leaf: isinstance(leaf, int | float)), id="no number known"),
        pytest.param(replaced(made_up(), lambda leaf: True), id="nothing known"),
        pytest.param(replaced(made_up(), lambda leaf: isinstance(leaf, str)), id="no text known"),
        pytest.param(emptied(), id="nothing ran"),
        pytest.param({}, id="no key"),
    ],
)
def test_missing_figures_are_shown_as_such(report_module: ModuleType, report: dict[str, Any]) -> None:
    body = body_of(report_module, report)
    assert "n/a" in body
    assert not re.search(r"\b(None|nan|inf)\b", body)
    assert "n/a" in on_terminal(report_module, report)


@pytest.mark.parametrize("value", [math.nan, math.inf, "fast", True])
def test_what_is_no_figure_is_shown_as_missing(report_module: ModuleType, value: object) -> None:
    report = {**made_up(), "unfairness": value}
    assert "(largest slowdown over smallest) was n/a" in report_module.headline(report)


def test_texts_of_the_report_cannot_become_markup(report_module: ModuleType) -> None:
    report = replaced(made_up(), lambda leaf: False)
    report["modes"]["cotenant"]["devices"] = {HOSTILE: [[0.0, 0.5]]}
    for row in [*report["jobs"], *report["decisions"], *report["refusals"], *report["modes"]["cotenant"]["runs"]]:
        row.update({key: HOSTILE for key, value in row.items() if isinstance(value, str)}, neighbours=[HOSTILE])
    for member in report["sets"]["rows"][0]["members"]:
        member["name"] = HOSTILE
    report["packed"]["first"]["serving"] = report["note"] = report["demand"][0]["quantity"] = HOSTILE
    report["machine"] = {HOSTILE: HOSTILE}
    body = body_of(report_module, report)
    assert "alert(" in body
    assert "<script>alert" not in body
    # In a chart's data the markup is escaped twice: for the page's script, and for the chart, which reads HTML too.
    assert "\\u003cscript" not in body


def test_page_has_every_set_with_what_either_predictor_says_of_it(report_module: ModuleType) -> None:
    parts = {key: text.replace("\N{NO-BREAK SPACE}", " ") for key, text in report_module.page_parts(made_up()).items()}
    assert re.findall(r"<span>(.*?)</span>", parts["sets"]) == [
        *("unet-digits + wide-digits", "present", "12.0 s", "0.85, 0.75", "0.70, 0.73", "0.82, 0.74"),
        *("38 %", "30 %", "36 %"),
    ]
    points = re.findall(r'"x":\[(0\.\d+)\],"y":\[(0\.\d+)\]', parts["set_scatter"])
    assert points == [("0.85", "0.7"), ("0.75", "0.73"), ("0.85", "0.82"), ("0.75", "0.74")]
    assert len(re.findall(r"#d9822b", parts["set_scatter"])) == len(re.findall(r"#2f81f7", parts["set_scatter"])) == 2
    assert "beside unet-digits" in parts["set_scatter"]
    assert len(re.findall("<tr>", parts["both_jobs"])) == 1 + len(JOBS)
    assert "for 5.0 s or more in one of them are compared here: 1 set, with 2 jobs in all" in parts["counted"]
    assert "first predictors: interference: utilisation rule" in parts["served"]


def test_page_without_any_set_says_so(report_module: ModuleType) -> None:
    report = made_up()
    report["sets"] = {
        **report["sets"], "together": 3, "rows": [], "members": 0,
        "throughput_error": {"first": None, "cotenant": None}, "saving_error": {"first": None, "cotenant": None},
    }  # fmt: skip
    report["note"] = "The shipped interference model cannot be used: version 'shipped' is not accepted"
    parts = report_module.page_parts(report)
    assert "No set of jobs was together long enough" in parts["set_scatter"]
    assert "No set of jobs was together long enough to compare" in parts["headline"]
    assert "3 different sets of jobs" in parts["counted"]
    assert "version &#x27;shipped&#x27; is not accepted." in parts["served"]
    assert "<td" not in parts["sets"]


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_has_both_tables_with_aligned_numbers(report_module: ModuleType, width: int) -> None:
    lines = [line.rstrip() for line in on_terminal(report_module, made_up(), width).splitlines()]
    assert all(len(line) <= width for line in lines)
    assert any(re.match(r"packed, present predictors +81\.0.s +-26.% +51\.9.s +0\.0450", line) for line in lines)
    rows = [line for line in lines if line.startswith(tuple(name for name, *_ in JOBS))]
    assert len(rows) == len(JOBS)
    assert {tuple(match.start() for match in re.finditer(r"\.\d\d\b", row)) for row in rows if "n/a" not in row} == {
        tuple(match.start() for match in re.finditer(r"\.\d\d\b", rows[0]))
    }
    assert {len(row) for row in rows} == {len(rows[0])}


def test_terminal_markup_in_a_name_is_plain_text(report_module: ModuleType) -> None:
    report = made_up()
    report["jobs"][0]["name"] = "[red]x[/red]"
    assert "[red]x[/red]" in on_terminal(report_module, report)


@pytest.mark.parametrize(("cores", "warned"), [(0.3, False), (None, False), (1.4, True)])
def test_a_disturbed_run_says_that_it_is_not_to_be_trusted(
    report_module: ModuleType, cores: float | None, warned: bool
) -> None:
    report = made_up()
    report["modes"]["static"]["foreign_cores"] = cores
    assert ("Do not trust these figures" in report_module.headline(report)) is warned
