"""One self-contained HTML page of a characterisation: nothing is loaded from elsewhere when it is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from html import escape
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from cotenant.forecasting.characterisation import charts, packing
from cotenant.forecasting.characterisation.charts import table
from cotenant.forecasting.characterisation.findings import THRESHOLD, told_p
from cotenant.forecasting.characterisation.tables import MEMORY, TARGET_NAMES, TARGETS, UTIL

_VERDICT_CLASSES = {"holds": "good", "holds in part": "part", "does not hold": "bad", "cannot be told": "none"}

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>cotenant: what kinds of workloads there are</title>
<style>
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --page: #fff; --line: #d5dae0; --stripe: #f5f7f9;
  --shade: #0003; --good: #1a7f37; --part: #9a6700; --bad: #b3261e; --none: #59636e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9da7b1; --page: #0f1419; --line: #343b44; --stripe: #171d24;
    --shade: #fff4; --good: #57c778; --part: #e3b341; --bad: #ff8a80; --none: #9da7b1; }
}
* { box-sizing: border-box; }
html { overflow-y: scroll; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 12px; }
h2 { font-size: 1.25rem; margin: 40px 0 8px; padding-top: 14px; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 22px 0 6px; }
p { margin: 0 0 12px; max-width: 90ch; }
.soft { color: var(--soft); }
table { border-collapse: collapse; font-size: .9rem; margin-bottom: 12px; min-width: 50%; }
th, td { padding: 5px 12px 5px 8px; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
tbody tr:nth-child(even) { background: var(--stripe); }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide, .chart { overflow-x: auto; background:
  linear-gradient(to right, var(--page) 30%, transparent) left / 40px 100% no-repeat local,
  linear-gradient(to left, var(--page) 30%, transparent) right / 40px 100% no-repeat local,
  linear-gradient(to right, var(--shade), transparent) left / 12px 100% no-repeat,
  linear-gradient(to left, var(--shade), transparent) right / 12px 100% no-repeat; }
.findings { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 14px;
  padding: 0; margin: 0; list-style: none; }
.findings li { border: 1px solid var(--line); border-left-width: 5px; border-radius: 6px; padding: 12px 14px; }
.findings p { margin: 6px 0 0; font-size: .9rem; }
.findings strong { display: block; }
.good { border-left-color: var(--good) !important; } .good .verdict { color: var(--good); }
.part { border-left-color: var(--part) !important; } .part .verdict { color: var(--part); }
.bad { border-left-color: var(--bad) !important; } .bad .verdict { color: var(--bad); }
.none { border-left-color: var(--none) !important; } .none .verdict { color: var(--none); }
.verdict { font-weight: 600; font-size: .85rem; text-transform: uppercase; letter-spacing: .03em; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; margin: 0 0 8px;
  font-size: .9rem; }
.legend span { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px; }
.chart { width: 100%; overflow-y: hidden; margin-bottom: 14px; }
.chart > div { min-width: 700px; }
@media (max-width: 739px) { .chart::before { content: "goes on to the right →"; display: block; position: sticky;
  left: 0; width: max-content; color: var(--soft); font-size: .8rem; } }
details { margin: 0 0 14px; }
summary { cursor: pointer; }
.infolayer text, .xaxislayer-above text, .yaxislayer-above text { fill: var(--ink) !important; }
.barlayer text { fill: var(--ink) !important; }
.barlayer .bartext-inside { fill: #fff !important; }
.gridlayer path { stroke: var(--line) !important; }
</style>
<script>$plotly</script>
</head>
<body>
<main>
<h1>What kinds of workloads there are</h1>
<p class="soft">$source</p>
$body
</main>
</body>
</html>
""")


def render(report: Mapping[str, Any]) -> str:
    """Return the page of a report of ``pipeline.characterise``."""
    data = report["data"]
    source = (
        f"{escape(data['source'])}: {data['runs']} single runs of {data['families']} families, {data['features']} "
        f"features, {data['pairs']} measured pairs. All numbers of this page are in report.json."
    )
    sections = (_findings, _clusters, _features, _synthesis, _pairs, _prediction, _cold_start)
    body = "\n".join("".join(section(report)) for section in sections)
    return _PAGE.substitute(plotly=get_plotlyjs(), source=source, body=body)


def _findings(report: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>What holds of what was claimed</h2>"
    yield "<p>The claims of the authors of the alnair data set, on these data.</p>"
    yield '<ul class="findings">'
    for finding in report["findings"]:
        verdict = finding["verdict"]
        yield (
            f'<li class="{_VERDICT_CLASSES[verdict]}"><span class="verdict">{verdict}</span>'
            f"<strong>{escape(finding['claim'])}</strong><p>{escape(finding['why'])}</p></li>"
        )
    yield "</ul>"


def _clusters(report: Mapping[str, Any]) -> Iterator[str]:
    section = report["clusters"]
    yield "<h2>Runs and clusters</h2>"
    if isinstance(section, str):
        yield _why_not(section)
        return
    yield (
        f"<p>Every run by its largest utilisation and memory, coloured by its cluster (K-means on standardised values, "
        f"{section['k']} clusters).</p>"
    )
    yield charts.runs_chart(report)
    rows = [(str(c["cluster"]), str(c["runs"]), _percent(c[UTIL]), _percent(c[MEMORY])) for c in section["summary"]]
    yield table(("cluster", "runs", "mean of max utilisation", "mean of max memory"), rows)
    yield "<h3>How many clusters there are</h3>"
    yield charts.sweep_chart(report)
    yield table(
        ("scaling", "elbow, inertia", "elbow, distortion", "best silhouette", "gap statistic"),
        [
            (escape(name), *(str(s[key]) for key in ("elbow_inertia", "elbow_distortion", "by_silhouette", "by_gap")))
            for name, s in section["sweeps"].items()
        ],
    )
    if "agreement_with_synthetic" in section:
        yield (
            "<p>Synthetic rows give weight to whoever was measured at many batch sizes: the runs' clusters with them "
            f"agree with those without to {section['agreement_with_synthetic']:.2f} (adjusted Rand index).</p>"
        )


def _features(report: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Features that go with the targets</h2>"
    sections = report["selection"]
    if any(isinstance(sections[target], str) for target in TARGETS):
        yield _why_not(next(s for s in sections.values() if isinstance(s, str)))
        return
    yield (
        "<p>Average rank by Pearson, Spearman and Kendall coefficient; in brackets the lowest and highest place when "
        "one family is left out. What is measured during the run cannot be used to place it.</p>"
    )
    spans = (
        f'<li><span style="background:{c}"></span>{charts.ROLE_NAMES[r]}</li>' for r, c in charts.ROLE_COLOURS.items()
    )
    yield f'<ul class="legend">{"".join(spans)}</ul>'
    yield charts.features_chart(report)
    for target in TARGETS:
        constant = [s["name"] for s in sections[target]["features"] if s["average_rank"] is None]
        for first, second in sections[target]["identities"]:
            yield f"<p>{_title(target)} = {escape(first)} + {escape(second)}: they contain it by definition.</p>"
    if constant:
        yield f'<p class="soft">Constant, so without a rank: {escape(", ".join(constant))}.</p>'


def _synthesis(report: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Values between measured batch sizes</h2>"
    sections = report["synthesis"]
    for target in TARGETS:
        if isinstance(sections[target], str):
            yield _why_not(f"{_title(target)}: {sections[target]}")
    if all(isinstance(sections[target], str) for target in TARGETS):
        return
    yield charts.curves_chart(report)
    yield (
        "<h3>Error on held-out measured batch sizes</h3><p>Every measured batch size between two others is left out "
        "and predicted from the rest of its curve. The scale is logarithmic.</p>"
    )
    yield charts.interpolation_chart(report)
    for target in TARGETS:
        section = sections[target]
        if isinstance(section, str):
            continue
        best, honest = section["best"], section["chosen_on_other_families"]
        yield (
            f"<p>{_title(target)}: {best['method']} over {charts.ABSCISSA_NAMES[best['abscissa']]} is best. "
            f"Choosing on the other families gives MAE {honest['mae']:.2f}, RMSE {honest['rmse']:.2f} percentage "
            f"points on {honest['points']} points.{_published(section)}</p>"
        )
        yield f"<details><summary>{_title(target)}: all errors</summary>{_all_errors(section)}</details>"


def _published(section: Mapping[str, Any]) -> str:
    if not section["published"]:
        return ""
    best = section["published"][0]
    return (
        f" The authors' synthetic values are reproduced best ({best['mae']:.2f} points) by {best['method']} over "
        f"the {charts.ABSCISSA_NAMES[best['abscissa']]}."
    )


def _all_errors(section: Mapping[str, Any]) -> str:
    rows = [
        (
            f"{score['method']} over {charts.ABSCISSA_NAMES[score['abscissa']]}",
            *(f"{score['interior'][key]:.2f}" for key in ("mae", "rmse", "mse")),
            f"{score['extrapolated']['mae']:.1f}",
            f"{score['self_consistency']['mae']:.2f}",
        )
        for score in sorted(section["scores"], key=lambda score: score["interior"]["mae"])
    ]
    return table(("interpolation", "MAE", "RMSE", "MSE", "MAE, extrapolated", "MAE, self-consistency"), rows)


def _pairs(report: Mapping[str, Any]) -> Iterator[str]:
    section = report["interference"]
    yield "<h2>Pairs that share a device</h2>"
    if isinstance(section, str):
        yield _why_not(section)
        return
    if section["in_seconds"]:
        yield charts.savings_chart(report)
    for name, words in (("given", "Clusters that came with the data"), ("own", "Our clusters")):
        compared = section["by"].get(name)
        if isinstance(compared, str):
            yield _why_not(f"{words}: {compared}")
        elif compared:
            yield f"<h3>{words}</h3>{_contrast_table(compared)}"
    yield "<h3>Slowdown by utilisation alone</h3>"
    yield charts.slowdowns_chart(report, THRESHOLD)
    for key, words in (("below", "Pairs"), ("second_matrix", "Second matrix (MPS)")):
        rows = [
            (
                escape(row["group"]),
                str(row["pairs"]),
                *(f"{row[column]:.2f}" for column in ("mean", "median", "p90", "worst")),
                _percent(100 * row["over_10"]),
            )
            for row in section.get(key, [])
            if row["threshold"] == THRESHOLD
        ]
        if rows:
            head = (f"{words}, {THRESHOLD:.0f} %", "directions", "mean", "median", "p90", "worst", "slowed > 10 %")
            yield table(head, rows)
    if section["contradictions"]:
        wrong = ", ".join(f"{row['a']} + {row['b']}" for row in section["contradictions"])
        yield f'<p class="soft">Reported figures that contradict their own times: {escape(wrong)}.</p>'


def _contrast_table(compared: Mapping[str, Any]) -> str:
    rows = [
        (
            packing.MEASURES.get(name, "most that could be saved"),
            _percent(100 * c["across"]),
            _percent(100 * c["within"]),
            _percent(100 * c["across_median"]),
            _percent(100 * c["within_median"]),
            escape(told_p(c["p"]).removeprefix("p ").removeprefix("= ")),
        )
        for name, c in compared["contrast"].items()
    ]
    first = compared["contrast"]["saving"]
    across, within = f"across ({first['pairs_across']})", f"within ({first['pairs_within']})"
    return table(("mean", across, within, "median across", "median within", "p"), rows)


def _prediction(report: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Predicting a family that was never measured</h2>"
    if isinstance(report["prediction"], str):
        yield _why_not(report["prediction"])
        return
    yield "<p>Every family is predicted from the others; the best model of each set of features is shown.</p>"
    yield charts.prediction_chart(report)


def _cold_start(report: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Cold-start classes</h2>"
    section = report["cold_start"]
    if isinstance(section, str):
        yield _why_not(section)
        return
    memory = section["device_memory_bytes"]
    rows = [
        (str(index), _percent(100 * util), f"{part * memory / 2**30:.1f} GiB")
        for index, (util, part) in enumerate(section["centres"])
    ]
    yield table(("class", "utilisation", "memory"), rows)
    yield "<p>How far off a guess may be (80 % interval of the error, percentage points), by what it rests on:</p>"
    show: Callable[[list[float]], str] = lambda errors: f"{100 * errors[1]:+.0f} … {100 * errors[3]:+.0f}"  # noqa: E731
    widths = [(escape(level), show(e["util_p95"]), show(e["memory"])) for level, e in section["errors"].items()]
    yield table(("level", "utilisation", "memory"), widths)
    for name, score in report.get("cold_start_scores", {}).items():
        if isinstance(score, str):
            yield _why_not(f"{name}: {score}")
            continue
        yield (
            f"<p>{escape(name.capitalize())}: off by {score['mae']['util_p95']:.1f} points of utilisation and "
            f"{score['mae']['memory']:.1f} of memory on average; 80 % intervals cover "
            f"{_percent(100 * score['coverage']['util_p95'])} and {_percent(100 * score['coverage']['memory'])}; "
            f"{_percent(100 * score['reserved'])} stay within the memory reserved.</p>"
        )


def _title(target: str) -> str:
    name = TARGET_NAMES[target]
    return name[0].upper() + name[1:]


def _percent(value: float) -> str:
    return f"{value:.1f} %"


def _why_not(sentence: str) -> str:
    return f'<p class="soft">Not available: {escape(sentence)}.</p>'
