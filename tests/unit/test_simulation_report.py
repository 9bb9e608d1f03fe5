"""The figures of a simulation worked out by hand, and the page that shows them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from simulating import CROWD_TRUTH, crowd, halves, job, run

from cotenant.scheduler.simulation.page import render
from cotenant.scheduler.simulation.policies.packing import FirstFit
from cotenant.scheduler.simulation.policies.queueing import Fifo
from cotenant.scheduler.simulation.results import Result
from cotenant.scheduler.simulation.simulate import Scenario, baseline, policy_names, simulate
from cotenant.scheduler.simulation.truth import NoInterference, PairTable, Truth
from cotenant.scheduler.simulation.workload import GIB, even_cluster, mixed_cluster, trace_of

CHARTS = 6  # three distributions, three curves over time; and one Gantt chart for each policy


def queue_of_three() -> Result:
    """One after the other on one GPU: a 50 to 150, b 150 to 180, c 180 to 400; nobody comes before 50."""
    return run("fifo", [job("a", 50, 100, util=0.5), job("b", 70, 30, util=0.2), job("c", 80, 220, util=1.0)])


def test_figures_of_a_trace_that_begins_late() -> None:
    summary = queue_of_three().summary()
    assert summary["jct_s"] == pytest.approx({"mean": 530 / 3, "p50": 110, "p90": 278, "p99": 315.8, "max": 320})
    assert summary["queue_s"] == pytest.approx({"mean": 60, "p50": 80, "p90": 96, "p99": 99.6, "max": 100})
    assert summary["slowdown"] == {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}
    assert summary["makespan_s"] == 350.0
    assert (summary["occupied"], summary["saving"]) == (1.0, 0.0)
    assert summary["gpu_hours_occupied"] == pytest.approx(350 / 3600)
    assert summary["utilisation"] == pytest.approx((100 * 0.5 + 30 * 0.2 + 220) / 350)


@pytest.mark.parametrize(
    ("utils", "n", "want"),
    [
        ((0.8, 0.6), 0.5, 0.7),  # each uses half of what it does alone
        ((0.8, 0.6), 1.0, 1.0),  # more than all of a GPU is not to be had
        ((0.2, 0.1), 1.0, 0.3),
        ((0.2, None), 1.0, None),  # of one of them nobody knows
    ],
)
def test_utilisation_of_a_shared_gpu(utils: tuple[float, float | None], n: float, want: float | None) -> None:
    jobs = [job(name, workload="w", util=util) for name, util in zip("ab", utils, strict=True)]
    got = run(FirstFit(), jobs, truth=halves("w", n=n)).summary()["utilisation"]
    assert got == (None if want is None else pytest.approx(want))


def test_utilisation_counts_gpus_that_are_idle_slow_or_wait_for_another() -> None:
    """The second GPU is idle; a slow GPU is as busy as a fast one, but for 200 s; a gang waits for its slowest."""
    assert run("fifo", [job("a", util=0.6)], gpus=2).summary()["utilisation"] == pytest.approx(0.3)
    slow = NoInterference({"old": 0.5})
    alone = Scenario(trace_of("t", [job("a", util=0.6)]), mixed_cluster((("old", 1),)), slow)
    assert baseline(alone, Fifo()).summary()["utilisation"] == pytest.approx(0.6)
    both = Scenario(trace_of("t", [job("a", gpus=2, util=0.6)]), mixed_cluster((("old", 1), ("new", 1))), slow)
    assert baseline(both, Fifo()).summary()["utilisation"] == pytest.approx((0.6 + 0.3) / 2)


def test_jobs_that_never_run_need_not_say_their_utilisation() -> None:
    summary = run("fifo", [job("a", util=0.5), job("huge", gpus=9)]).summary()
    assert summary["utilisation"] == pytest.approx(0.5)


def test_utilisation_follows_a_neighbour_that_speeds_up_on_another_gpu() -> None:
    """x on both GPUs runs at half beside b on the second until 100, and uses half of the first GPU until then, too."""
    truth = PairTable({("x", "w"): 0.5, ("w", "x"): 0.4})
    jobs = [job("wide", gpus=2, length=100, workload="x", util=0.8), job("b", length=40, workload="w", util=0.5)]
    result = run("best-fit", jobs, gpus=2, truth=truth)
    first = 100 * (0.4 + (0.4 + 0.2)) + 50 * (0.8 + 0.8)  # b ends at 100, x has 50 left
    assert result.summary()["utilisation"] == pytest.approx(first / (2 * 150))


# -- the page -----------------------------------------------------------------------------------------------------


def cells(page: str, policy: str) -> list[str]:
    """The row of a policy in the table of figures."""
    row = re.search(rf"<tr><td>{policy}</td>(.*?)</tr>", page)
    assert row is not None
    return re.findall(r"<td>(.*?)</td>", row[1])


def test_the_page_shows_the_figures_under_their_names() -> None:
    page = render([queue_of_three()])
    heads = re.findall(r"<th>(.*?)</th>", page)
    assert dict(zip(heads[1:4], cells(page, "fifo")[:3], strict=True)) == {
        "completion, mean": "177 s",
        "p50": "110 s",
        "p99": "316 s",
    }
    rest = dict(zip(heads[4:], cells(page, "fifo")[3:], strict=True))
    assert rest == {
        "queueing, mean": "60 s",
        "run / duration, mean": "1.000",
        "p99": "1.00",
        "makespan": "350 s",
        "GPU hours saved": "0.0 %",
        "GPUs occupied": "100.0 %",
        "their utilisation": "78.9 %",
        "Jain": "0.828",
        "treated unfairly": "33.3 %",
        "suspensions": "0",
        "crashes": "0",
    }
    assert "not known" in cells(render([run("fifo", [job("a")])]), "fifo")


@pytest.mark.parametrize("policies", [("fifo",), ("fifo", "static")])
def test_the_page_has_all_its_sections_and_charts(policies: tuple[str, ...]) -> None:
    work = Scenario(crowd(20, largest=2), even_cluster(4), CROWD_TRUTH)
    page = render([simulate(work, name) for name in policies])
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["Figures", "Distributions", "Over time", "Who ran where"]
    assert page.count('<div class="chart">') == CHARTS + len(policies)
    body = page[page.index("<h2>Figures</h2>") :]
    assert all(body.count(f'"name":"{name}"') == CHARTS for name in policies)  # its curve in every chart
    gantt = body[body.index("Who ran where") :]
    assert all(f'"{each.job_id}"' in gantt for each in work.trace.jobs)
    assert all(f'"text":"{name}"' in gantt for name in policies)


def test_a_page_of_what_never_ran_says_so_without_charts_of_it() -> None:
    page = render([run("fifo", [job("huge", gpus=9)])])
    assert "<td colspan='14'>no job ended</td>" in page
    assert "1 job needs more than this cluster of 1 GPU has, and never runs: huge (9 GPUs).</p>" in page
    assert '"name":"fifo"' not in page


def figures(page: str) -> list[dict[str, Any]]:
    """What every picture of the page is drawn from: its curves or bars, and its layout."""
    found = []
    for start in re.finditer(r'Plotly\.newPlot\(\s*"[^"]*",\s*', page):
        data, end = json.JSONDecoder().raw_decode(page, start.end())
        layout, _ = json.JSONDecoder().raw_decode(page, page.index("{", end))
        found.append({"data": data, "layout": layout})
    return found


def test_no_two_policies_look_alike() -> None:
    work = Scenario(crowd(5, largest=1), even_cluster(2), CROWD_TRUTH)
    for figure in figures(render([simulate(work, name) for name in policy_names()]))[:CHARTS]:
        looks = [(curve["line"]["color"], curve["line"]["dash"]) for curve in figure["data"]]
        assert len(set(looks)) == len(looks) == len(policy_names())


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        (NoInterference(), "jobs that share a GPU run as if alone. "),
        (halves("w"), "the speeds of jobs that share a GPU follow from measured pairs. "),
    ],
)
def test_the_page_says_what_was_simulated(truth: Truth, words: str) -> None:
    work = Scenario(trace_of("t", [job("a", workload="w")]), even_cluster(1), truth)
    page = render([replace(simulate(work, "fifo"), conditions={"seed": "7", "job-mtbf": "<1>"})])
    assert f"1 job on 1 GPU with 24 GiB in 1 host. Virtual time; {words}" in page
    assert "<tr><th>seed</th><td>7</td></tr><tr><th>job-mtbf</th><td>&lt;1&gt;</td></tr>" in page
    mixed = mixed_cluster((("v100", 2), ("k80", 1)), memory_bytes=GIB)
    result = simulate(Scenario(trace_of("t", [job("a"), job("b")]), mixed, truth), "fifo")
    assert "2 jobs on 3 GPUs (2 v100, 1 k80) with 1 GiB in 2 hosts. " in render([result])
    assert result.summary()["gpu_types"] == {"v100": 2, "k80": 1}


def test_all_policies_have_one_scale_of_time_and_rows_name_their_types() -> None:
    work = Scenario(crowd(40, largest=1), mixed_cluster((("v100", 8), ("k80", 40))), NoInterference({"k80": 0.2}))
    drawn = figures(render([simulate(work, name) for name in ("fifo", "best-fit")]))[CHARTS:]
    assert len({tuple(figure["layout"]["xaxis"]["range"]) for figure in drawn}) == 1
    for figure in drawn:
        names = figure["layout"]["yaxis"]["ticktext"]
        assert names == [f"v100 {gpu}" for gpu in range(8)] + [f"k80 {gpu}" for gpu in range(8, 32)]


@pytest.mark.parametrize(("jobs", "cut"), [(1500, False), (1501, True)])
def test_a_picture_that_is_cut_off_says_where(*, jobs: int, cut: bool) -> None:
    result = run("fifo", [job(f"j{number}", length=3600.0) for number in range(jobs)])
    figure = figures(render([result]))[-1]
    marked = "fifo: the first 1,500 of 1,501 stretches of time, to hour 1.5e+03"
    assert figure["layout"]["title"]["text"] == (marked if cut else "fifo")
    assert [(shape["x0"], shape["x1"]) for shape in figure["layout"].get("shapes", [])] == [(1500, 1501)] * cut


def test_whole_numbers_have_whole_ticks() -> None:
    drawn = figures(render([run("fifo", [job("a")])]))
    for figure in drawn[3:CHARTS]:
        axis = figure["layout"]["yaxis"]
        assert (axis["range"], axis["dtick"]) == ([0.0, 1.05], 1)
    assert drawn[-1]["layout"]["yaxis"]["ticktext"] == ["0"]


def test_no_figure_is_a_little_below_zero() -> None:
    """What was left of rounding was told as "queueing -0 s" and "-0.0 % of GPU time saved"."""
    jobs = [job(f"j{k}", 0.1 * k * k, 10.1 + 1.7 * (k * 7 % 11), util=0.3, gpus=1 + k % 3) for k in range(120)]
    for policy, gpus in (("fifo", 4), ("first-fit", 400)):
        result = run(policy, jobs, gpus=gpus, per_node=4)
        summary = result.summary()
        assert min(result.jobs()["queue_s"]) >= 0.0
        assert summary["queue_s"]["mean"] >= 0.0
        assert summary["saving"] == 0.0 or policy != "fifo"
        assert not re.search(r"-0(\.0+)?( s| %|<)", render([result]))
