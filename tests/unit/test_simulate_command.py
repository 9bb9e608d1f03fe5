"""`cotenant simulate`: what it is told of speeds, pairs and settings, and what it says of what nobody told it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulating import halves, job
from typer.testing import CliRunner, Result

from cotenant.cli import app
from cotenant.scheduler.simulation.errors import SimulationError
from cotenant.scheduler.simulation.page import render
from cotenant.scheduler.simulation.policies.queueing import Srtf
from cotenant.scheduler.simulation.remarks import remarks_on
from cotenant.scheduler.simulation.simulate import Scenario, policy_names, simulate
from cotenant.scheduler.simulation.traces import write_own
from cotenant.scheduler.simulation.truth import NoInterference
from cotenant.scheduler.simulation.workload import GIB, TraceJob, mixed_cluster, trace_of

BIG, SMALL = "ResNet-50 (batch size 128)", "LM (batch size 5)"
TABLE = {  # steps per second: on a K80 the big one does not run; beside each other both halve
    "v100": {
        f"('{BIG}', 1)": {"null": 10.0, f"('{SMALL}', 1)": [5.0, 10.0], f"('{BIG}', 1)": [5.0, 5.0]},
        f"('{SMALL}', 1)": {"null": 20.0, f"('{BIG}', 1)": [10.0, 5.0], f"('{SMALL}', 1)": [10.0, 10.0]},
    },
    "k80": {
        f"('{BIG}', 1)": {"null": 0.0},
        f"('{SMALL}', 1)": {"null": 5.0, f"('{SMALL}', 1)": [2.5, 2.5]},
    },
}
ALIKE = "all GPU types run alike (k80, v100): nothing was said of their speeds"
FREE = "jobs that share a GPU do not slow each other down: nothing was said of pairs"
COMPARED = "run times of the trace, and so run/duration and GPU time saved, are those on GPUs of the speed 1 "
UNSEEN = "for a program that it has never seen, and starts it alone on its GPUs"
NAMELESS = f"cotenant takes each {UNSEEN}"
LIGHT: Mapping[str, Any] = {"workload": "light", "util": 0.2, "memory_bytes": 2 * GIB}


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Result]:
    """Run `cotenant simulate` on a trace; the results go to `out`."""

    def called(trace: Path, *words: str) -> Result:
        return CliRunner().invoke(app, ["simulate", str(trace), "--out", str(tmp_path / "out"), *words])

    return called


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., Path]:
    """Write jobs in our own form."""

    def written(*jobs: TraceJob) -> Path:
        write_own(trace_of("own", jobs), tmp_path / "own.json")
        return tmp_path / "own.json"

    return written


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of throughputs."""
    path = tmp_path / "throughputs.json"
    path.write_text(json.dumps(TABLE))
    return path


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A trace in steps: 1,000 of the big one, 2,000 of the small one."""
    path = tmp_path / "jobs.trace"
    rows = [f"{name}\tmain.py\tdir\t-n\t1\t{count}\t1\t1\t-1\t0" for name, count in ((BIG, 1000), (SMALL, 2000))]
    path.write_text("\n".join(rows) + "\n")
    return path


def run_s(path: Path) -> dict[str, float]:
    """How long each job ran."""
    lines = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
    job_id, run = lines[0].index("job_id"), lines[0].index("run_s")
    return {line[job_id]: float(line[run]) for line in lines[1:]}


def test_a_policy_that_is_named_twice_runs_once(command: Callable[..., Result], own: Callable[..., Path]) -> None:
    result = command(own(job("a", **LIGHT)), "--gpus", "1", "--policy", "fifo,srtf, fifo")
    assert result.exit_code == 0
    assert [line.partition(": mean")[0] for line in result.stdout.splitlines() if ": mean" in line] == ["fifo", "srtf"]


@pytest.mark.parametrize("option", ["--gpus-per-host", "--gpu-memory", "--restart-cost", "--job-mtbf", "--node-mtbf"])
@pytest.mark.parametrize("number", ["-1", "1e300", "nan", "inf"])
def test_numbers_beyond_their_limits_are_refused_as_everything_is(
    command: Callable[..., Result], own: Callable[..., Path], option: str, number: str
) -> None:
    if option == "--gpus-per-host":
        number = "1000001" if number == "inf" else "0"
    result = command(own(job("a")), option, number)
    assert (result.exit_code, result.stdout) == (1, "")
    name = option.removeprefix("--")
    assert re.search(rf"{name}: \S+ is not accepted; give a number of at least \S+ and at most", result.stderr)


@pytest.mark.parametrize(("option", "least"), [("--limit", 1), ("--seed", 0)])
def test_so_are_counts(command: Callable[..., Result], own: Callable[..., Path], option: str, least: int) -> None:
    result = command(own(job("a")), option, str(least - 1))
    words = f"{option.removeprefix('--')}: {least - 1} is not accepted; give a number of at least {least}"
    assert (result.exit_code, result.stderr.endswith(f"{words}\n")) == (1, True)


@pytest.mark.parametrize("gpus", ["v100:2,v100:3", "8,8", "k80:1,v100:2,k80:1", "gpu:1,1"])
def test_a_gpu_type_that_is_named_twice_is_refused(
    command: Callable[..., Result], own: Callable[..., Path], gpus: str
) -> None:
    result = command(own(job("a")), "--gpus", gpus)
    assert result.exit_code == 1
    assert f"gpus: {gpus!r} is not accepted; give each type once: " in result.stderr


def test_what_figures_depend_on_is_kept_with_them(
    command: Callable[..., Result], own: Callable[..., Path], tmp_path: Path
) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("placement:\n  max_jobs_per_gpu: 2\n")
    words = ["--gpus", "v100:1,k80:1", "--speeds", "v100=1,k80=0.5", "--seed", "3", "--node-mtbf", "9", "--limit", "1"]
    result = command(own(job("a"), job("b")), *words, "--policy", "fifo", "--config", str(config))
    assert result.exit_code == 0
    summary = json.loads((tmp_path / "out" / "fifo" / "summary.json").read_text(encoding="utf-8"))
    given = dict(zip([word.removeprefix("--") for word in words[::2]], words[1::2], strict=True))
    given |= {"node-mtbf": "9.0", "config": str(config), "trace": str(tmp_path / "own.json")}
    assert summary["conditions"].items() >= given.items()
    assert json.loads(summary["conditions"]["settings"]) == {"placement": {"max_jobs_per_gpu": 2}}
    assert summary["gpu_types"] == {"v100": 1, "k80": 1}
    report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert all(f"<tr><th>{name}</th><td>{text}</td></tr>" in report for name, text in given.items())


def test_jobs_that_no_cluster_of_this_size_could_take_are_named_with_what_they_lack(
    command: Callable[..., Result], own: Callable[..., Path], tmp_path: Path
) -> None:
    large = [job(f"wide{number}", gpus=3) for number in range(5)] + [job("fat", memory_bytes=30 * GIB, gpus=2)]
    result = command(own(*large, job("a")), "--gpus", "2", "--policy", "fifo")
    wide = ", ".join(f"wide{number} (3 GPUs)" for number in range(5))
    said = f"6 jobs need more than this cluster of 2 GPUs has, and never run: {wide} …"
    assert f"cotenant: {said}\n" in result.stderr
    assert f"<p class='remark'>{said}.</p>" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    result = command(own(large[-1], job("a")), "--gpus", "2", "--policy", "fifo")
    said = "1 job needs more than this cluster of 2 GPUs has, and never runs: fat (2 GPUs with 30.0 GiB, 0 such here)"
    assert f"cotenant: {said}\n" in result.stderr
    result = command(own(large[0]), "--gpus", "2", "--policy", "fifo")
    assert (result.exit_code, "no job of the trace fits these GPUs" in result.stderr) == (1, True)


def test_so_are_jobs_that_do_not_run_on_these_types(command: Callable[..., Result], steps: Path, table: Path) -> None:
    result = command(steps, "--gpus", "k80:2", "--throughputs", str(table), "--policy", "fifo")
    assert (
        "1 job needs more than this cluster of 2 GPUs has, and never runs: row-1 (does not run on k80)" in result.stderr
    )


# -- several policies in one folder -------------------------------------------------------------------------------

CRASHES = ["--gpus", "1", "--job-mtbf", "0.001"]  # in 3.6 s on average: a long job gets nowhere


@pytest.mark.parametrize("policies", [("fifo", "srtf"), ("srtf", "fifo")])
def test_a_policy_that_cannot_end_takes_nothing_from_the_others(
    command: Callable[..., Result],
    own: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policies: tuple[str, str],
) -> None:
    def idle(policy: Srtf, desk: object) -> None: ...

    monkeypatch.setattr(Srtf, "schedule", idle)
    result = command(own(job("a", **LIGHT)), "--gpus", "1", "--policy", ",".join(policies))
    why = "srtf: at 0 s nothing happens any more and 1 job has not ended: a"
    assert (result.exit_code, why in result.stderr) == (1, True)
    assert "fifo: mean completion 100 s" in result.stdout
    assert run_s(tmp_path / "out" / "fifo" / "jobs.csv") == {"a": 100.0}
    report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert f"<p class='remark'>{why}.</p>" in report
    result = command(tmp_path / "own.json", "--gpus", "1", "--policy", ",".join(policies), "--json")
    assert (result.exit_code, [each["policy"] for each in json.loads(result.stdout)]) == (1, ["fifo"])


def test_every_policy_that_cannot_end_is_named(
    command: Callable[..., Result], own: Callable[..., Path], tmp_path: Path
) -> None:
    result = command(own(job("a", length=1e6)), "--policy", "fifo,srtf", *CRASHES)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(r"fifo: at .*\. srtf: at ", result.stderr.replace("\n", " "))
    assert list((tmp_path / "out").iterdir()) == []


def test_results_of_an_earlier_simulation_that_stay_in_the_folder_are_named(
    command: Callable[..., Result], own: Callable[..., Path]
) -> None:
    path = own(job("a", length=1e6))
    said = "keeps results of an earlier simulation: "
    assert said not in command(path, "--gpus", "1", "--policy", "fifo,srtf,static").stderr
    assert f"{said}srtf, static\n" in command(path, "--gpus", "1", "--policy", "fifo").stderr
    assert f"{said}report.html, fifo, srtf, static\n" in command(path, *CRASHES, "--policy", "fifo").stderr
    assert said not in command(path, "--gpus", "1", "--policy", "fifo,srtf,static").stderr


# -- throughputs --------------------------------------------------------------------------------------------------


def test_steps_are_never_taken_for_seconds(command: Callable[..., Result], steps: Path) -> None:
    result = command(steps, "--gpus", "k80:1,v100:1", "--policy", "fifo")
    assert result.exit_code == 1
    assert "throughputs: None is not accepted; give Gavel's simulation_throughputs.json" in result.output
    with pytest.raises(SimulationError, match="trace t: its jobs count in steps; turn them into seconds first"):
        simulate(Scenario(replace(trace_of("t", [job("a")]), counts="steps"), mixed_cluster((("v100", 1),))), "fifo")


@pytest.mark.parametrize("policy", ["fifo", "first-fit", "cotenant"])
def test_throughputs_say_how_long_jobs_take_and_where_they_run(
    command: Callable[..., Result], steps: Path, table: Path, tmp_path: Path, policy: str
) -> None:
    """On the V100 each takes 100 s; the big one cannot go to the K80, which comes first, the small one takes 400 s."""
    words = ["--gpus", "k80:1,v100:1", "--throughputs", str(table), "--policy", policy]
    result = command(steps, *words)
    assert result.exit_code == 0, result.output
    ran = run_s(tmp_path / "out" / policy / "jobs.csv")
    assert ran["row-1"] == 100.0
    assert ALIKE not in result.output
    assert FREE not in result.output
    if policy != "cotenant":  # which moves the small one once the V100 is free
        assert ran["row-2"] == 400.0


@pytest.mark.parametrize(("beside", "hours"), [(8.0, True), (4.0, False)])
def test_the_policy_gavel_is_told_the_throughputs(
    command: Callable[..., Result], steps: Path, table: Path, tmp_path: Path, *, beside: float, hours: bool
) -> None:
    """It has jobs share where both together do more than one at a time, and only there."""
    one, other = f"('{BIG}', 1)", f"('{SMALL}', 1)"
    pair = {one: {"null": 10.0, other: [beside, beside]}, other: {"null": 10.0, one: [beside, beside]}}
    table.write_text(json.dumps({"v100": pair}))
    assert command(steps, "--gpus", "v100:1", "--throughputs", str(table), "--policy", "gavel").exit_code == 0
    summary = json.loads((tmp_path / "out" / "gavel" / "summary.json").read_text(encoding="utf-8"))
    assert bool(summary["gpu_hours_shared"]) is hours


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--gpus", "8"],
            "gpus: 'gpu' is not accepted; give types that throughputs.json has, such as v100:8,k80:24: v100",
        ),
        (
            ["--gpus", "v100:1", "--speeds", "v100=1"],
            "speeds: 'v100=1' is not accepted; give nothing beside --throughputs",
        ),
        (["--gpus", "v100:1", "--pairs", "p.csv"], "pairs: 'p.csv' is not accepted; give nothing beside --throughputs"),
    ],
)
def test_what_goes_not_together_with_throughputs(
    command: Callable[..., Result], steps: Path, table: Path, words: list[str], message: str
) -> None:
    result = command(steps, "--throughputs", str(table), *words)
    assert (result.exit_code, message in result.output) == (1, True), result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "throughputs: 'Invalid JSON"),
        ("[]", "throughputs: 'Input should be"),
        ('{"v100": {"job": {"null": 1.0}}}', "job: 'job' is not accepted; give a job type with its number of GPUs"),
        (json.dumps({"v100": {f"('{BIG}', 1)": {}}}), "null: None is not accepted; give the steps per second alone"),
        (json.dumps({"v100": {f"('{BIG}', 1)": {"null": -1}}}), "throughputs: 'Input should be greater than or equal"),
        (json.dumps({"v100": {f"('{BIG}', 1)": {"null": 1.0}}}), "rate above 0: job row-2 needs it"),
        (
            json.dumps({"v100": {f"('{BIG}', 1)": {"null": 1e-9}}}),
            "steps of job row-1: 1000.0 is not accepted; give at",
        ),
        (json.dumps({"k80": {f"('{BIG}', 1)": {"null": 1.0}}}), "reference: 'v100' is not accepted; give one of k80"),
    ],
)
def test_tables_of_throughputs_that_cannot_be_used_are_named(
    command: Callable[..., Result], steps: Path, table: Path, text: str, message: str
) -> None:
    table.write_text(text)
    result = command(steps, "--gpus", "v100:1", "--throughputs", str(table))
    assert (result.exit_code, message in result.output) == (1, True), result.output
    assert str(table) in result.output


def test_throughputs_are_for_traces_in_steps(
    command: Callable[..., Result], own: Callable[..., Path], table: Path
) -> None:
    result = command(own(job("a")), "--gpus", "v100:1", "--throughputs", str(table))
    assert (result.exit_code, "give nothing: the jobs of own count in seconds" in result.output) == (1, True)
    result = command(own(job("a")), "--gpus", "v100:1", "--throughputs", str(table) + "x")
    assert result.exit_code == 1


# -- speeds of GPU types ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fifo", "gavel"])
def test_jobs_run_at_the_speed_of_their_gpu_type(
    command: Callable[..., Result], own: Callable[..., Path], tmp_path: Path, policy: str
) -> None:
    words = ["--gpus", "k80:1", "--policy", policy]
    assert command(own(job("a")), *words, "--speeds", "k80=0.2").exit_code == 0
    assert run_s(tmp_path / "out" / policy / "jobs.csv") == {"a": 500.0}


def test_the_core_is_told_the_speeds_unless_the_settings_say_others(
    command: Callable[..., Result], own: Callable[..., Path], tmp_path: Path
) -> None:
    """Nothing said: the first GPU. Told the speeds: the faster one. Settings that are wrong about them: the slower."""
    words = ["--gpus", "k80:1,v100:1"]
    config = tmp_path / "settings.yaml"
    config.write_text("placement:\n  speeds: {k80: 1.0, v100: 0.1}\n")
    took = []
    for more in ([], ["--speeds", "k80=0.2, v100=1"], ["--speeds", "k80=0.2,v100=1", "--config", str(config)]):
        assert command(own(job("a", **LIGHT)), *words, *more).exit_code == 0
        took.append(run_s(tmp_path / "out" / "cotenant" / "jobs.csv")["a"])
    assert took == [100.0, 100.0, 500.0]


@pytest.mark.parametrize(
    "text",
    [
        "k80=0.2",
        "v100=1,k80=0",
        "v100=1,k80=nan",
        "v100=1,k80=fast",
        "v100=1,k80=1,p100=1",
        "",
        "=1,k80=1",
        "v100=1,k80=1e9",
    ],
)
def test_speeds_that_cannot_be_are_refused(command: Callable[..., Result], own: Callable[..., Path], text: str) -> None:
    result = command(own(job("a")), "--gpus", "k80:1,v100:1", "--speeds", text)
    wanted = "a speed from 0.000001 to 1000000 for each of k80, v100, such as k80=1,v100=0.5"
    assert (result.exit_code, f"speeds: {text!r} is not accepted; give {wanted}" in result.output) == (1, True)


# -- what nobody said ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "pairs", "wanted"),
    [
        (["--gpus", "v100:1,k80:1"], False, [ALIKE, FREE]),
        (["--gpus", "v100:1,k80:1"], True, [ALIKE]),
        (["--gpus", "v100:1,k80:1", "--speeds", "v100=1,k80=0.2"], False, [f"{COMPARED}(v100)", FREE]),
        (["--gpus", "v100:1,k80:1", "--speeds", "v100=1,k80=0.2"], True, [f"{COMPARED}(v100)"]),
        (["--gpus", "v100:1,t4:1,a100:1", "--speeds", "v100=1,t4=1,a100=3"], True, [f"{COMPARED}(t4, v100)"]),
        (["--gpus", "k80:2", "--speeds", "k80=0.2"], True, [f"{COMPARED}(none is here)"]),
        (["--gpus", "v100:1,k80:1", "--speeds", "v100=2,k80=2"], True, [ALIKE, f"{COMPARED}(none is here)"]),
        (["--gpus", "2"], True, []),
    ],
)
def test_what_is_taken_for_granted_is_said_on_the_terminal_and_in_the_report(
    command: Callable[..., Result],
    own: Callable[..., Path],
    tmp_path: Path,
    *,
    words: list[str],
    pairs: bool,
    wanted: list[str],
) -> None:
    if pairs:
        (tmp_path / "pairs.csv").write_text("workload,neighbour,n\nlight,light,0.9\n")
        words = [*words, "--pairs", str(tmp_path / "pairs.csv")]
    result = command(own(job("a", **LIGHT)), *words, "--policy", "fifo")
    assert result.exit_code == 0
    report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    summary = json.loads((tmp_path / "out" / "fifo" / "summary.json").read_text(encoding="utf-8"))
    assert summary["remarks"] == wanted
    assert [line.removeprefix("cotenant: ") for line in result.stderr.splitlines()] == wanted
    assert report.count("<p class='remark'>") == len(wanted)
    assert all(f"<p class='remark'>{remark}.</p>" in report for remark in wanted)


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        (0, f"no job names a workload: {NAMELESS}"),
        (1, f"2 of 3 jobs do not name a workload: {NAMELESS.replace('each', 'each of these')}"),
        (3, None),
    ],
)
def test_why_programs_that_nobody_names_do_not_share_is_said_where_the_core_is_asked(
    command: Callable[..., Result], own: Callable[..., Path], tmp_path: Path, named: int, wanted: str | None
) -> None:
    jobs = [job(f"j{number}", **LIGHT | ({} if number < named else {"workload": ""})) for number in range(3)]
    for policies in ("fifo", "fifo,cotenant", "cotenant"):
        result = command(own(*jobs), "--gpus", "1", "--policy", policies)
        report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
        said = wanted is not None and policies != "fifo"
        assert (UNSEEN in result.stderr, UNSEEN in report) == (said, said)
        assert not said or f"cotenant: {wanted}\n" in result.stderr
    summary = json.loads((tmp_path / "out" / "cotenant" / "summary.json").read_text(encoding="utf-8"))
    assert summary["remarks"] == ([FREE] if wanted is None else [FREE, wanted])


FULL, LAST = "for one that fills its GPUs", "for endless: those come last, in order of arrival"


@pytest.mark.parametrize(
    ("gap", "policies", "words"),
    [
        ({"util": None}, ("cotenant", "threshold", "lucid"), (f"utilisation: {{}} takes {{}} {FULL}")),
        ({"estimate_s": None}, ("qssf", "lucid"), f"estimated run time: {{}} takes {{}} {LAST}"),
    ],
)
@pytest.mark.parametrize("lacking", [0, 1, 3])
def test_what_a_policy_goes_by_and_the_trace_does_not_say_is_told(
    gap: dict[str, Any], policies: tuple[str, ...], words: str, lacking: int
) -> None:
    """Without estimates qssf was fifo, and without utilisations nobody shared: nothing said so."""
    said = LIGHT | {"estimate_s": 10.0}
    trace = trace_of("t", [job(f"j{number}", **said | (gap if number < lacking else {})) for number in range(3)])
    who = "no job says its" if lacking == 3 else f"{lacking} of 3 jobs do not say their"
    for policy in policy_names():
        each = "each" if lacking == 3 else "each of these"
        wanted = [f"{who} {words.format(policy, each)}"] if lacking and policy in policies else []
        assert remarks_on(policy, trace) == wanted


# -- pairs that are not known -------------------------------------------------------------------------------------


def test_a_job_whose_pairs_cannot_be_known_is_named(
    command: Callable[..., Result], own: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "pairs.csv").write_text("workload,neighbour,n\nlight,light,0.9\n")
    words = ["--gpus", "1", "--policy", "first-fit", "--pairs", str(tmp_path / "pairs.csv")]
    result = command(own(job("a", **LIGHT), job("b")), *words)
    assert result.exit_code == 1
    assert "job a beside job b: no pair with job b can be known, it has no workload; give that field" in result.output
    result = command(own(job("a", **LIGHT), job("b", workload="other")), *words)
    assert "job a beside job b: the pair of 'light' and 'other' is not in the table; give a table" in result.output


# -- settings -----------------------------------------------------------------------------------------------------


def test_settings_come_from_a_file_and_the_environment_as_for_up(
    command: Callable[..., Result], own: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default the two share the GPU; where jobs get whole GPUs they do not."""
    config = tmp_path / "settings.yaml"
    config.write_text("placement:\n  policy: exclusive\n")
    path = own(job("a", **LIGHT), job("b", **LIGHT))

    def shared(*words: str) -> bool:
        result = command(path, "--gpus", "1", "--json", *words)
        assert result.exit_code == 0, result.output
        return bool(json.loads(result.stdout)[0]["gpu_hours_shared"])

    assert [shared(), shared("--config", str(config))] == [True, False]
    monkeypatch.setenv("COTENANT_PLACEMENT__POLICY", "exclusive")
    assert not shared()


def test_settings_that_are_not_accepted_are_named(
    command: Callable[..., Result], own: Callable[..., Path], tmp_path: Path
) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("placement:\n  packing_bias: 2\n")
    result = command(own(job("a")), "--config", str(config))
    assert result.exit_code == 1
    assert f"{config}: placement.packing_bias: 2 is not accepted; give a number >= 0 and <= 1" in result.output


def test_the_page_takes_its_remarks_from_the_world() -> None:
    work = Scenario(trace_of("t", [job("a", workload="w")]), mixed_cluster((("v100", 1), ("k80", 1))))
    assert ALIKE in render([simulate(work, "fifo")])
    told = Scenario(work.trace, work.cluster, NoInterference({"k80": 0.5}))
    assert told.remarks == [f"{COMPARED}(v100)", FREE]
    assert Scenario(work.trace, work.cluster, halves("w")).remarks == [ALIKE]
