"""What people read of the command line: tables in narrow terminals, where errors point, how a client ends."""

from __future__ import annotations

import io
import json
import signal
import time

import pytest
from command_line import COMMAND, RUNNER, invoke
from fake_client import FORECAST, PREDICTIONS, SHARE, FakeClient, job_view
from rich.console import Console
from rich.table import Table

from cotenant import _predictions, _render, cli
from cotenant.scheduler.client import Client
from cotenant.scheduler.core.model import JobState
from cotenant.scheduler.views import DemandScoreView, HistoryView, PlannedJob, PlanView, SlowdownScoreView

JOB_ID = "job-20301231-235959-abcdef"
SUBMITTED = {"submitted_at": time.time() - 86399.0, "started_at": time.time() - 43199.0}
LONG = [
    job_view(
        JOB_ID,
        name="a-name-of-some-length",
        shares=[SHARE.model_copy(update={"gpu_id": "cpu-vm-4f84ed-1"})],
        **SUBMITTED,
    ),
    job_view(
        "job-20301231-235959-000000",
        JobState.QUEUED,
        shares=[],
        reason="2 GPUs: predicted slowdown 1.88 > 1.50",
        **SUBMITTED,
    ),
]


@pytest.mark.parametrize("width", [80, 100, 132, 1000])
def test_no_terminal_cuts_what_is_needed_to_go_on(width: int) -> None:
    """Ids must be copied from these tables, and states be read; nothing may end in an ellipsis."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(_render.jobs(LONG))
    console.print(_render.gpus([FakeClient().gpus()[0].model_copy(update={"jobs": [JOB_ID]})]))
    text = console.export_text()
    assert text.count(JOB_ID) == 2
    assert [word for word in ("RUNNING", "QUEUED", "predicted") if word not in text] == []
    assert "…" not in text
    assert ("STEPS/S" in text) == (width >= 132)


def test_the_prediction_for_a_job_that_has_ended_is_not_shown() -> None:
    ended = job_view("job-9", JobState.SUCCEEDED, slowdown_predicted=1.1, slowdown_measured=None, ended_at=1.0)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(_render.jobs([ended]))
    assert "1.10x" not in console.export_text()


@pytest.mark.parametrize(("factor", "told"), [(0.74, "<1x"), (0.996, "1.00x"), (1.2, "1.20x"), (0.9, "<1x")])
def test_a_job_that_is_faster_than_alone_is_not_shown_as_a_slowdown(factor: float, told: str) -> None:
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(_render.jobs([job_view("m", slowdown_measured=factor), job_view("p", slowdown_predicted=factor)]))
    planned = PlannedJob(
        name="x",
        placeable="now",
        shares=[],
        slowdown_predicted=factor,
        neighbours={"n": factor},
        explanation="",
    )
    console.print(_render.plan(PlanView(jobs=[planned], packing_saving_predicted=0.1)))
    assert [
        text for text in (f" {told} ", f"~{told} ", f"n {told}") if text not in console.export_text(clear=False)
    ] == []
    assert "0.74" not in console.export_text()


@pytest.mark.parametrize(
    ("jobs", "saving", "told"),
    [
        (1, 0.1, "predicted packing saving: 10% (nothing was done)"),
        (1, 0.0, "predicted packing saving: 0% (nothing was done)"),
        (1, None, "no packing saving is predicted: none of these jobs would share a GPU now (nothing was done)"),
        (0, None, "nothing was done"),
    ],
)
def test_a_plan_in_which_nobody_shares_says_so(jobs: int, saving: float | None, told: str) -> None:
    """It said "predicted packing saving: -"."""
    console = Console(width=300, record=True, file=io.StringIO())
    planned = PlannedJob(
        name="x", placeable="now", shares=[], slowdown_predicted=None, neighbours={}, explanation="alone"
    )
    console.print(_render.plan(PlanView(jobs=[planned] * jobs, packing_saving_predicted=saving)))
    assert console.export_text().splitlines()[-1].strip() == told


@pytest.mark.parametrize(
    ("displaced", "told"), [(0, "looked at)"), (2, "looked at; 2 would not get their GPUs again as it is")]
)
def test_a_plan_says_what_is_no_matter_of_the_settings(displaced: int, told: str) -> None:
    """Two jobs on a GPU that may have one were no news, since they slowed each other down too much anyway."""
    console = Console(width=300, record=True, file=io.StringIO())
    view = PlanView(jobs=[], packing_saving_predicted=None, reconsidered=4, running=4, displaced=displaced)
    console.print(_render.plan(view))
    assert f"nothing would be different for the other jobs (4 of 4 running ones {told}" in console.export_text()


@pytest.mark.parametrize(
    ("state", "times", "ran"),
    [
        (JobState.QUEUED, [], "-"),
        (JobState.RUNNING, [("RUNNING", 100)], "1m40s"),
        (JobState.STOPPING, [("RUNNING", 100), ("STOPPING", 90)], "1m40s"),
        (JobState.SUSPENDED, [("RUNNING", 100), ("STOPPING", 90), ("SUSPENDED", 60)], "40s"),
        (JobState.STARTING, [("RUNNING", 100), ("QUEUED", 70), ("STARTING", 5)], "30s"),
        (JobState.FAILED, [("RUNNING", 100), ("FAILED", 80)], "20s"),
        (JobState.FAILED, [("STARTING", 100), ("FAILED", 80)], "-"),
    ],
)
def test_ps_says_how_old_a_job_is_and_how_long_its_run_lasted(
    monkeypatch: pytest.MonkeyPatch, state: JobState, times: list[tuple[str, float]], ran: str
) -> None:
    """Two columns with one meaning each, in every state: time that waits or stays suspended is not time that runs."""
    now = 1e6
    monkeypatch.setattr(time, "time", lambda: now)
    history = [HistoryView(at=now - ago, state=JobState(name), reason="") for name, ago in times]
    job = job_view(
        state=state,
        submitted_at=now - 7200,
        started_at=next((change.at for change in history if change.state is JobState.RUNNING), None),
        ended_at=history[-1].at if state.terminal else None,
        history=history,
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(_render.jobs([job]))
    heads, row = console.export_text().splitlines()[:2]
    age_at, ran_at = heads.index("AGE"), heads.index("RAN")
    assert (row[age_at:].split()[0], row[ran_at:].split()[0]) == ("2h", ran)


@pytest.mark.parametrize(
    ("args", "where"), [(["explain"], "cotenant explain"), (["nope"], "cotenant"), (["ps", "-x"], "cotenant ps")]
)
def test_wrong_usage_points_to_the_help_of_that_command(client: FakeClient, args: list[str], where: str) -> None:
    assert invoke(*args)[2].endswith(f" See: {where} --help\n")


def test_a_connected_client_dies_of_sigterm_without_rays_stack_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    connected = FakeClient()

    def connect(_address: str | None) -> FakeClient:
        signal.signal(signal.SIGTERM, lambda *_: None)  # as importing Ray does
        return connected

    monkeypatch.setattr(Client, "connect", connect)
    try:
        assert cli._client(None) is connected
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("width", [80, 132])
def test_predictions_are_readable_and_warnings_seen(client: FakeClient, width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(_predictions.shown(client.predictions()))
    text = console.export_text()
    said = ("interference: shipped", "warning: coldstart", "3.4", "0.066", "79%", "evidence: 7", "not adopted")
    assert [word for word in said if word not in text] == []
    assert "…" not in text


def test_every_score_of_predictions_is_shown() -> None:
    demand = DemandScoreView(
        horizon_s=300,
        scored=917,
        util_error=0.021,
        util_persistence_error=0.034,
        util_coverage_p95=0.93,
        memory_violations=0.08,
        memory_waste=0.16,
        memory_peaks_under=0.0125,
    )
    slowdown = SlowdownScoreView(gpu_type="A1", scored=618, error=0.041, rule_error=0.066, bias=-0.012, coverage=0.79)
    view = PREDICTIONS.model_copy(update={"demand": [demand], "slowdowns": [slowdown]})
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(_predictions.shown(view))
    text = console.export_text()
    said = {
        **{"horizon_s": "5m", "scored": "917", "util_error": "2.1", "util_persistence_error": "3.4"},
        **{"util_coverage_p95": "93%", "memory_violations": " 8%", "memory_waste": "16%", "memory_peaks_under": "1.2%"},
    }
    assert said.keys() == demand.model_fields_set == DemandScoreView.model_fields.keys()
    assert [name for name, word in said.items() if word not in text] == []
    said = {"gpu_type": "A1", "error": "0.041", "rule_error": "0.066", "bias": "-0.012", "coverage": "79%"}
    assert {*said, "scored"} == SlowdownScoreView.model_fields.keys()
    assert [name for name, word in {**said, "scored": "618"}.items() if word not in text] == []
    assert "exceeded within 5m" in text


def test_predictions_before_anything_was_scored_say_so() -> None:
    view = PREDICTIONS.model_copy(update={"demand": [], "slowdowns": [], "trainings": []})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(_predictions.shown(view))
    assert console.export_text().count("nothing scored yet") == 2


def test_predictions_of_one_job_as_a_table_and_as_json(client: FakeClient) -> None:
    code, table, _ = invoke("predictions", "job-1")
    assert (code, "P95 HOLDS" in table, "15m" in table) == (0, True, True)
    code, text, _ = invoke("predictions", "job-1", "--json")
    told = json.loads(text)
    assert (code, told["scores"][0]["horizon_s"]) == (0, 5)
    assert told["forecast"] == FORECAST.model_dump(mode="json")
    assert invoke("predictions", "job-nope")[0] == 1
    assert json.loads(invoke("predictions", "--json")[1])["evidence"] == 7


def test_a_job_that_has_ended_has_no_forecast(client: FakeClient) -> None:
    client.known["job-1"] = job_view("job-1", JobState.SUCCEEDED)
    assert invoke("predictions", "job-1")[1].startswith("no forecast: it has no GPU or has ended, or")
    assert json.loads(invoke("predictions", "job-1", "--json")[1])["forecast"] is None


@pytest.mark.parametrize(("estimated", "mark"), [(False, ""), (True, "~")])
def test_a_forecast_is_readable_in_80_columns(estimated: bool, mark: str) -> None:
    view = FORECAST.model_copy(
        update={"measured_at": time.time() - 2.0, "util_estimated": estimated, "memory_estimated": estimated}
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(_predictions.of_job(view, PREDICTIONS.demand))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert "from 90 measured windows, the last 2.0 s ago" in "\n".join(lines)
    rows = [line.split() for line in lines]
    assert ["5m", *(f"{mark}{part}%" for part in (31, 42, 53, 64, 75))] in rows
    assert ["1s", *(f"{mark}{part}GiB" for part in (1.1, 1.2, 1.3, 1.4, 1.5))] in rows
    assert f"largest until it ends: {mark}1.6GiB" in lines


def test_what_cannot_be_read_is_said_instead_of_an_empty_table() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(_predictions.of_job(FORECAST.model_copy(update={"util": []}), PREDICTIONS.demand))
    console.print(_predictions.of_job(FORECAST.model_copy(update={"memory": []}), PREDICTIONS.demand))
    text = console.export_text()
    assert text.count("cannot be read on its GPUs") == 2
    assert text.count("largest until it ends") == 1


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", [[], ["submit"], ["models", "list"], ["tune", "demand"]])
def test_help_has_its_short_form_everywhere(command: list[str], option: str) -> None:
    code, out, _ = invoke(*command, option)
    assert (code, "Usage: cotenant" in out) == (0, True)


def test_the_version_is_an_option_too() -> None:
    assert invoke("--version") == invoke("version")


def test_a_question_in_an_error_ends_with_its_mark() -> None:
    assert "Did you mean 'submit'? See: cotenant --help" in invoke("submt")[2]


def test_logs_of_earlier_runs_are_named_and_can_be_asked_for(client: FakeClient) -> None:
    client.known["job-9"] = job_view("job-9", JobState.SUCCEEDED, epoch=3)
    result = RUNNER.invoke(COMMAND, ["logs", "job-9"])
    assert result.stdout_bytes.endswith(b"step 2\n")
    assert result.stderr == "cotenant: earlier runs: 1, 2 (--run N)\n"
    earlier = RUNNER.invoke(COMMAND, ["logs", "job-9", "--run", "2"])
    assert (earlier.stdout_bytes, earlier.stderr) == (b"run 2\n", "")
    assert invoke("logs", "job-9", "--run", "2", "-f")[0] == 1


@pytest.mark.parametrize("cells", [("a", "b"), ("a" * 50, "b"), ("a", "b" * 50), ("", "")])
def test_what_is_piped_has_no_blanks_at_the_ends_of_lines(
    capsys: pytest.CaptureFixture[str], cells: tuple[str, str]
) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_row("name", "value")
    grid.add_row(*cells)
    _render.out().print(grid)
    _render.out().print("asks: ", end="")
    printed = capsys.readouterr().out
    assert printed.endswith("asks: ")
    lines = printed.removesuffix("asks: ").splitlines()
    assert len(lines) == 2
    assert lines == [line.rstrip() for line in lines]
    assert cells[0] in lines[1]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["plan", "--count", "0"], "count: '0' is not accepted; give at least 1. See: cotenant plan --help"),
        (["plan", "--count", "x"], "count: 'x' is not accepted; give a whole number. See: cotenant plan --help"),
        (["plan", "--count", "1.5"], "count: '1.5' is not accepted; give a whole number. See: cotenant plan --help"),
        (
            ["plan", "--count", "9999999"],
            "count: '9999999' is not accepted; give at most 1000. See: cotenant plan --help",
        ),
        (["ps", "--limit", "0"], "limit: '0' is not accepted; give at least 1. See: cotenant ps --help"),
        (["ps", "-n", "-1"], "limit: '-1' is not accepted; give at least 1. See: cotenant ps --help"),
        (["up", "--devices", "0"], "devices: '0' is not accepted; give at least 1. See: cotenant up --help"),
        (
            ["characterise", "cpu", "--device-memory", "0"],
            "device-memory: '0' is not accepted; give at least 0.001. See: cotenant characterise --help",
        ),
        (["characterise", "cpu", "--device-memory", "x"], "device-memory: 'x' is not accepted; give a number."),
    ],
)
def test_options_out_of_range_are_told_as_all_that_is_not_accepted(
    client: FakeClient, args: list[str], told: str
) -> None:
    code, out, err = invoke(*args)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {told}")


@pytest.mark.parametrize("args", [["ps"], ["ps", "--json"]])
def test_ps_says_that_there_are_jobs_that_it_leaves_out(client: FakeClient, args: list[str]) -> None:
    """``no jobs`` where all had ended, and the newest two of twenty, passed for all there is."""
    ended = {f"old-{number}": job_view(f"old-{number}", JobState.SUCCEEDED) for number in range(3)}
    client.known = dict(ended)
    assert invoke(*args)[2] == "cotenant: all jobs have ended: 'cotenant ps --all' lists them\n"
    assert invoke(*args, "--all")[2] == ""
    assert invoke(*args, "--all", "-n", "3")[2] == ""
    code, out, said = invoke(*args, "--all", "-n", "2")
    assert (code, said) == (0, "cotenant: there are older ones too: these are the newest 2\n")
    assert [job_id for job_id in ended if job_id in out] == ["old-0", "old-1"]
    client.known.clear()
    assert invoke(*args)[2] == ""
