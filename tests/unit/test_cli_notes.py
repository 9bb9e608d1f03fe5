"""What the command line says on stderr beside its output, so that nobody takes silence for success."""

from __future__ import annotations

import pytest
from command_line import invoke
from fake_client import FakeClient, job_view

from cotenant.scheduler.core.model import JobState
from cotenant.scheduler.errors import NotAccepted
from cotenant.scheduler.views import JobView, LogChunk


@pytest.mark.parametrize("command", [("submit",), ("submit", "--wait"), ("run",)])
def test_a_checkpoint_hint_that_counts_as_none_is_told_on_stderr(client: FakeClient, command: tuple[str, ...]) -> None:
    told = "warning: checkpoint: 'driver' counts as none for job-new: the driver can freeze processes on no GPU"
    client.final = job_view("job-new", JobState.SUCCEEDED, no_freezing="the driver can freeze processes on no GPU")
    code, out, err = invoke(*command, "--checkpoint", "driver", "--", "true")
    assert (code, told in err, told in out) == (0, True, False)
    client.final = job_view("job-new", JobState.SUCCEEDED)
    assert "warning" not in invoke(*command, "--checkpoint", "driver", "--", "true")[2]


def test_a_deadline_that_cannot_be_met_is_told_at_once(client: FakeClient) -> None:
    """Whoever submits a job and leaves looked for it only when it was late."""
    for deadline, warned in [
        ("deadline in 5 min; needs 10 min even if it starts now: cannot be met", True),
        ("deadline in 11 min; needs 10 min once it runs: at risk", False),
        ("", False),
    ]:
        client.final = job_view("job-new", JobState.QUEUED, deadline=deadline)
        code, out, err = invoke("submit", "--deadline", "5m", "--", "true")
        assert (code, out) == (0, "job-new\n")
        assert (f"warning: job-new: {deadline}" in err) is warned


@pytest.mark.parametrize("follow", [(), ("-f",)])
@pytest.mark.parametrize(
    ("view", "told"),
    [
        (
            job_view("j", JobState.FAILED, reason="could not be started: no space left"),
            "printed nothing: FAILED: could not",
        ),
        (job_view("j", JobState.FAILED, epoch=0, reason="no device"), "j printed nothing: FAILED: no device"),
        (job_view("j", JobState.SUCCEEDED, reason="exit code 0"), "j printed nothing: SUCCEEDED: exit code 0"),
        (
            job_view("j", JobState.QUEUED, epoch=0, reason="submitted", waits="1 GPU: busy"),
            "started yet: QUEUED: 1 GPU: busy",
        ),
        (job_view("j", JobState.RUNNING), "j has printed nothing yet: RUNNING\n"),
    ],
)
def test_logs_of_a_job_that_printed_nothing_say_what_became_of_it(
    client: FakeClient, follow: tuple[str, ...], view: JobView, told: str
) -> None:
    client.known["j"], client.final, client.output = view, view, ()
    code, out, err = invoke("logs", "j", *follow)
    assert (code, out, told in err, err.count("\n")) == (0, "", True, 1)


def test_a_run_that_there_is_not_is_told_of_as_it_was_asked_for(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, epoch: int) -> LogChunk:
        raise NotAccepted("epoch", epoch, "a run that has begun, 1 to 2")

    client.known["j"] = job_view("j", JobState.FAILED, epoch=2)
    monkeypatch.setattr(client, "logs", refused)
    assert invoke("logs", "j", "--run", "9")[2] == (
        "error: run: 9 is not accepted; give a run that has begun, 1 to 2\n"
    )


def test_logs_of_an_earlier_run_that_printed_nothing_do_not_tell_of_the_last(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.known["j"] = job_view("j", JobState.FAILED, epoch=2, reason="exit code 1")
    monkeypatch.setattr(client, "logs", lambda *_, epoch: LogChunk(data=b"", next_offset=0, eof=True, epoch=epoch))
    assert invoke("logs", "j", "--run", "1")[2] == "cotenant: j: run 1 printed nothing\n"
