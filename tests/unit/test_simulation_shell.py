"""The shipped core in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from simulating import CROWD_TRUTH, crowd, ends, halves, job, scenario
from typer.testing import CliRunner

from cotenant.cli import app
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.types import DemandProfile
from cotenant.scheduler.core.models import only
from cotenant.scheduler.simulation.page import render
from cotenant.scheduler.simulation.predictors import TablePredictor
from cotenant.scheduler.simulation.results import Result
from cotenant.scheduler.simulation.simulate import Scenario, shipped_core, simulate
from cotenant.scheduler.simulation.traces import write_own
from cotenant.scheduler.simulation.truth import PairTable
from cotenant.scheduler.simulation.workload import GIB, Cluster, Node, TraceJob, even_cluster, mixed_cluster, trace_of

LIGHT = {"workload": "light", "util": 0.2, "memory_bytes": 2 * GIB}


def shipped(*jobs: TraceJob, gpus: int = 1) -> Result:
    """The shipped core on these jobs, which get along, with the truth as its table."""
    truth = halves("light", n=0.9)
    models = only(TablePredictor(truth, error=0.0))
    return shipped_core(scenario(jobs, gpus, truth=truth), models=models, checked=True)


def test_a_job_alone_takes_its_time_and_the_start() -> None:
    assert ends(shipped(job("a", **LIGHT))) == {"a": 101.0}


def test_a_program_never_seen_is_measured_before_it_shares() -> None:
    """a starts at 1 and has been measured for 5 s in the report at 7; b starts 1 s later."""
    first, second = shipped(job("a", **LIGHT), job("b", **LIGHT)).world.runs
    assert (first.started_at, second.started_at) == (1.0, 8.0)
    assert first.ended_at == pytest.approx(8.0 + 93.0 / 0.9)


def test_a_program_that_is_known_shares_as_soon_as_there_is_memory() -> None:
    """a was started with all the memory; it gives back what it does not use once b waits for it, at 51."""
    runs = shipped(job("a", **LIGHT), job("b", 50, **LIGHT), job("c", 55, 10, **LIGHT)).world.runs
    assert [run.started_at for run in runs] == [1.0, 52.0, 56.0]


def test_jobs_on_several_hosts_start_and_end_together() -> None:
    result = shipped(job("wide", gpus=16, **LIGHT), gpus=16)
    assert ends(result) == {"wide": 101.0}
    assert len(result.world.stints[0].gpus) == 16


def test_programs_that_ran_before_are_known_by_gpu_type() -> None:
    """Twice as fast on the new GPU: told so, the job goes there; else it takes the first."""
    truth = PairTable({}, solo={("w", "old"): 0.5}, default=0.5)
    work = Scenario(trace_of("one", [job("a", workload="w")]), mixed_cluster((("old", 1), ("new", 1))), truth)
    starts = [shipped_core(work, known_programs=known).world.stints[0].gpus for known in (False, True)]
    assert starts == [(0,), (1,)]


def test_a_table_is_corrected_by_what_was_measured() -> None:
    """The very pair as measured; another pair of the same jobs by a part of what they were off."""
    a, b, c = (DemandProfile(0.2, 0.2, GIB, source="history", fingerprint=name) for name in "abc")
    table = TablePredictor(halves("a", "b", "c", n=0.9))
    learnt = table.with_evidence([Observation("gpu", a, (b,), 0.5, 0.48, 0.52, 60.0)])
    assert learnt.predict([a, b], "gpu")[0].mid == 0.5
    assert 0.5 < learnt.predict([a, c], "gpu")[0].mid < 0.9
    assert learnt.predict([c, b], "gpu")[0].mid < 0.9
    assert learnt.predict([c, a], "gpu")[0].mid == pytest.approx(0.9)
    assert table.predict([a, b], "gpu")[0].mid == pytest.approx(0.9)
    oracle = TablePredictor(halves("a", "b"), error=0.0)
    assert oracle.with_evidence([Observation("gpu", a, (b,), 0.5, 0.48, 0.52, 60.0)]) is oracle


def test_a_table_answers_for_sets_and_the_rule_for_strangers() -> None:
    known, stranger = (DemandProfile(0.2, 0.2, GIB, source="history", fingerprint=f) for f in ("light", "other"))
    predictor = TablePredictor(halves("light", n=0.8))
    assert [p.mid for p in predictor.predict([known, known], "gpu")] == [0.8, 0.8]
    assert [p.mid for p in predictor.predict([known], "gpu")] == [1.0]
    assert predictor.predict([], "gpu") == []
    assert "sum of utilisations" in predictor.predict([known, stranger], "gpu")[0].reason


def test_the_page_is_self_contained_and_names_every_policy() -> None:
    work = Scenario(crowd(20, largest=2), even_cluster(4), CROWD_TRUTH)
    page = render([simulate(work, name) for name in ("fifo", "static")])
    assert page.count("<td>fifo</td>") == page.count("<td>static</td>") == 1
    assert 'src="http' not in page
    assert "$" + "body" not in page
    with pytest.raises(ValueError, match="results: none were given"):
        render([])


def test_the_command(tmp_path: Path) -> None:
    write_own(crowd(20, largest=2), tmp_path / "work.json")
    pairs = [f"{a},{b},{n},{n}" for (a, b), n in CROWD_TRUTH.pairs.items()]
    (tmp_path / "pairs.csv").write_text("\n".join(["workload,neighbour,n,known", *pairs]) + "\n")
    words = [
        "simulate",
        str(tmp_path / "work.json"),
        "--policy",
        "fifo,cotenant",
        "--gpus",
        "4",
        "--out",
        str(tmp_path / "out"),
    ]
    words += ["--pairs", str(tmp_path / "pairs.csv"), "--known-column", "known", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    summaries = json.loads(result.output)
    assert [summary["policy"] for summary in summaries] == ["fifo", "cotenant"]
    assert all(summary["ended"] == 20 for summary in summaries)
    made = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    rows = {f"{name}/{file}" for name in ("fifo", "cotenant") for file in ("jobs.csv", "jobs.parquet", "summary.json")}
    assert made == rows | {"report.html"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "best"], "policy: 'best' is not accepted; give some of cotenant, fifo"),
        (["--gpus", "many"], "gpus: 'many' is not accepted"),
        (["--gpus", "0"], "gpus: '0' is not accepted"),
        (["--gpus", ":3"], "gpus: ':3' is not accepted"),
        (["--format", "sacct"], "format: 'sacct' is not accepted"),
        (["--known-column", "n"], "known-column: 'n' is not accepted"),
        (["--pairs", "nowhere.csv"], "pairs: nowhere.csv cannot be read"),
    ],
)
def test_what_the_command_refuses(tmp_path: Path, words: list[str], message: str) -> None:
    write_own(crowd(2), tmp_path / "work.json")
    result = CliRunner().invoke(app, ["simulate", str(tmp_path / "work.json"), "--out", str(tmp_path / "out"), *words])
    assert result.exit_code == 1
    assert message in result.output


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["simulate", str(tmp_path / "none.json"), "--out", str(tmp_path)])
    assert (result.exit_code, "cannot be read: No such file" in result.output) == (1, True)


@pytest.mark.parametrize(
    ("fields", "nodes"),
    [
        ({"cpus": 1.0}, (Node("a", 4, cpus=2.0), Node("b", 2, cpus=2.0))),
        ({"memory_bytes": 20 * GIB}, (Node("a", 4, "small", 8 * GIB), Node("b", 2), Node("c", 2))),
    ],
)
def test_a_gang_lies_on_several_hosts_where_no_single_one_could_have_it(
    fields: dict[str, Any], nodes: tuple[Node, ...]
) -> None:
    """A host has GPUs enough, but not the processors or the memory for all of them."""
    work = Scenario(trace_of("x", [job("g", gpus=4, **fields)]), Cluster(nodes))
    (run,) = shipped_core(work, checked=True).world.runs
    assert run.ended_at is not None
