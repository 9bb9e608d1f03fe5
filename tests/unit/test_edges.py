"""Edges that users of sharing schedulers run into, by name: through the whole core, and through the client, the command
line and the API where people meet them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke
from fake_hosts import FakeHost
from local_client import LocalCotenant
from scheduling import GIB, Driver, host, profile, settings, spec

from cotenant import cli
from cotenant.placement.explain import explain
from cotenant.placement.types import FitError
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.events import HostJoined, HostLost, JobExited, JobSubmitted, StartFailed, Tick
from cotenant.scheduler.core.model import Job, JobSpec, JobState
from cotenant.scheduler.core.unmet import unmet
from cotenant.scheduler.hints import parse_hints

MIB = 1 << 20


def started(driver: Driver) -> Counter[str]:
    """Jobs per GPU."""
    leases = [job.lease for job in driver.core.state.jobs.values() if job.lease is not None]
    return Counter(share.gpu_id for lease in leases for share in lease.shares)


def sharing(job_id: str, memory: int, compute: float, **hints: object) -> JobSpec:
    return spec(job_id, **({"gpu_memory": memory, "compute": compute, "max_slowdown": 100.0} | hints))


def test_sixteen_halves_on_eight_gpus() -> None:
    driver = Driver(host(gpus=8))
    driver.submit(*(sharing(f"j{number}", GIB, 0.5) for number in range(16)))
    assert started(driver) == {f"h1-{index}": 2 for index in range(8)}
    for index in range(8):
        shares = [resident.share.compute for resident in driver.core.state.view(f"h1-{index}").residents]
        assert shares == [0.5, 0.5]


def test_sixteen_halves_one_after_another_leave_nothing_over() -> None:
    driver = Driver(host(gpus=8), configured=settings(packing_bias=1.0))
    for number in range(16):
        driver.submit(sharing(f"j{number}", GIB, 0.5))
    assert set(started(driver).values()) == {2}


def test_twenty_four_small_memories() -> None:
    driver = Driver(host(memory=46_068 * MIB), configured=settings(max_jobs_per_gpu=48))
    driver.submit(*(sharing(f"j{number}", 2000 * MIB, 0.02, max_slowdown=100.0) for number in range(24)))
    assert started(driver) == {"h1-0": 23}
    (waiting,) = driver.core.state.queued
    assert explain(driver.core.state.refused[waiting]) == "1 GPU: 1.9 GiB short"


@pytest.mark.parametrize("order", list(itertools.permutations(["a", "b", "c", "host"])))
@pytest.mark.parametrize("together", [False, True])
def test_three_halves_of_memory_under_any_interleaving(order: tuple[str, ...], together: bool) -> None:
    driver = Driver()
    events = [
        HostJoined(host(memory=24 * GIB)) if name == "host" else JobSubmitted(sharing(name, 12 * GIB, 0.3))
        for name in order
    ]
    if together:
        driver.do(*events)
    else:
        for event in events:
            driver.do(event)
    assert started(driver) == {"h1-0": 2}
    first, second = [name for name in order if name != "host"][:2]
    assert {job_id for job_id, job in driver.core.state.jobs.items() if job.lease} == {first, second}
    driver.do(JobExited(first, 1, "h1", 0))
    assert started(driver) == {"h1-0": 2}


def test_fragments_that_do_not_add_up() -> None:
    """Two GPUs have 0.6 left each; 0.8 goes to the other node, and waits without one."""
    driver = Driver(host("h1", gpus=2), configured=settings(packing_bias=0.0))
    driver.submit(*(sharing(f"r{number}", GIB, 0.4) for number in range(2)))
    assert set(started(driver).values()) == {1}
    driver.submit(sharing("x", GIB, 0.8))
    assert explain(driver.core.state.refused["x"]) == "2 GPUs: compute 0.80 wanted, 0.60 free"
    driver.do(HostJoined(host("h2")))
    assert driver.job("x").hosts == ("h2",)


def test_four_free_but_at_most_two_on_one_host() -> None:
    hosts = [host(name, gpus=8) for name in ("h1", "h2", "h3")]
    driver = Driver(*hosts)
    for each, count in zip(hosts, (7, 6, 7), strict=True):
        for number in range(count):
            driver.submit(replace(spec(f"{each.host_id}-r{number}", isolation="hard"), pinned_host=each.host_id))
    driver.submit(spec("x", gpus=4, isolation="hard"))
    told = explain(driver.core.state.refused["x"])
    assert told.startswith("wants 4 GPUs, 4 free; wants 4 GPUs on one host, at most 2 free on one host")
    driver.submit(spec("y", gpus=4, isolation="hard", gang="cluster"))
    assert sorted(driver.job("y").hosts) == ["h1", "h2", "h3"]


def test_sixteen_halves_come_and_go_in_any_order_and_never_overfill() -> None:
    """Every event is checked by the driver: no GPU ever carries more than 1.0."""
    driver = Driver(host(gpus=8))
    driver.submit(*(sharing(f"j{number}", GIB, 0.5) for number in range(24)))
    for number in (3, 9, 0, 15, 7, 12, 1, 5):
        driver.do(JobExited(f"j{number}", 1, "h1", 0))
    assert set(started(driver).values()) == {2}
    assert not driver.core.state.queued


def test_one_gpu_serves_its_queue_in_order() -> None:
    driver = Driver(host())
    driver.submit(*(spec(f"j{number}", isolation="hard") for number in range(5)))
    for number in range(5):
        assert [job.spec.job_id for job in driver.core.state.jobs.values() if job.lease] == [f"j{number}"]
        driver.do(JobExited(f"j{number}", 1, "h1", 0))
    assert not driver.core.state.queued


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ({"gpus": 3}, "wants 3 GPUs, at most 2 of this cluster could ever serve it together"),
        ({"gpus": 2, "gpu_memory": 12 * GIB}, "wants 2 GPUs, at most 1 of this cluster could ever serve it together"),
        ({"gpu_memory": 17 * GIB}, "2 GPUs: too small: 17.0 GiB of memory wanted, at most 16.0 GiB can be had"),
    ],
)
def test_jobs_larger_than_the_cluster_end_at_once_and_say_why(hints: dict[str, Any], message: str) -> None:
    driver = Driver(host("h1", memory=8 * GIB), host("h2", memory=16 * GIB))
    driver.submit(spec("a", gang="cluster", **hints), spec("b"))
    assert driver.job("a").not_placeable
    assert message in driver.job("a").reason
    assert driver.job("b").lease is not None


@pytest.mark.parametrize(
    ("hints", "told", "accepted"),
    [
        (
            {"gpus": 3},
            "gpus: 3 cannot be met on one host; give at most 2, or gang cluster instead of host",
            {"gpus": 2},
        ),
        ({"gpus": 5, "gang": "cluster"}, "gpus: 5 cannot be met; give at most 4", {"gpus": 4, "gang": "cluster"}),
        (
            {"gpu_memory": 200 * GIB},
            "gpu_memory: 200.0 GiB cannot be met; give at most 15.9 GiB",
            {"gpu_memory": "15.9GiB"},
        ),
        ({"cpus": 9.0}, "cpus: 9 cannot be met; give at most 8", {"cpus": 8.0}),
        (
            {"gpus": 2, "cpus": 5.0},
            "cpus: 5 cannot be met for each of 2 GPUs on one host; give at most 4",
            {"gpus": 2, "cpus": 4.0},
        ),
    ],
)
def test_a_job_that_can_never_run_is_told_which_hint_cannot_be_met_and_what_is_accepted(
    hints: dict[str, Any], told: str, accepted: dict[str, Any]
) -> None:
    """What is said to be accepted is: 15.99 GiB are not rounded up to 16."""
    hosts = [host(f"h{number}", gpus=2, memory=16 * GIB - 10 * (1 << 20), cpus=8.0) for number in (1, 2)]
    driver = Driver(*hosts)
    driver.submit(spec("a", **hints))
    assert driver.job("a").reason.endswith(f"; {told}")
    again = parse_hints(accepted, driver.now)
    driver.submit(replace(spec("b"), hints=again))
    assert driver.job("b").lease is not None


def test_memory_that_was_measured_is_not_blamed_on_a_hint() -> None:
    job = Job(spec("a"), JobState.QUEUED, 0.0)
    assert unmet(job, [FitError("memory_never", "g", 17.0 * GIB, 16.0 * GIB, never=True)], 1) == [
        "gpu_memory: this program was measured to need more than the largest GPU has (16.0 GiB)"
    ]


@pytest.mark.parametrize("hints", [{"gpus": 3}, {"gpus": 3, "gpu_memory": 8 * GIB}, {"gpu_memory": 17 * GIB}])
def test_what_is_short_just_now_is_no_reason_why_a_job_could_never_run(hints: dict[str, Any]) -> None:
    """On a busy cluster the reason is the same as on an idle one."""
    busy, idle = Driver(host(gpus=2, memory=16 * GIB)), Driver(host(gpus=2, memory=16 * GIB))
    busy.submit(spec("first", gpus=2, gpu_memory=12 * GIB, compute=0.9))
    assert busy.job("first").lease is not None
    for driver in (busy, idle):
        driver.submit(spec("a", gang="cluster", **hints))
        assert driver.job("a").not_placeable
    assert busy.job("a").reason == idle.job("a").reason


def test_a_doomed_job_backs_off_while_others_start() -> None:
    driver = Driver(host())
    driver.submit(spec("doomed", isolation="hard", priority="high"))
    driver.submit(spec("other", isolation="hard", priority="low"))
    tries = 0
    while driver.state("doomed") != "FAILED":
        if driver.state("doomed") == "STARTING":
            tries += 1
            epoch = driver.job("doomed").epoch
            driver.do(StartFailed("doomed", epoch, "h1", "no such image", retry=True))
            assert driver.state("other") in {"STARTING", "RUNNING", "SUCCEEDED"}
        elif driver.state("other") == "STARTING":
            driver.do(JobExited("other", 1, "h1", 0))
        else:
            driver.do(Tick(), after_s=2.0)
    assert (tries, driver.state("other")) == (3, "SUCCEEDED")


def test_whoever_asks_about_a_failed_job_is_told_where_its_output_is() -> None:
    driver = Driver(host())
    driver.run(spec("a", restart="never"), spec("b", restart="never", gpus=2))
    driver.do(JobExited("a", 1, "h1", 3))
    state = driver.core.state
    assert (driver.state("a"), driver.state("b")) == ("FAILED", "FAILED")
    pointed = {job_id: "cotenant logs" in str(queries.explain(state, job_id, driver.now).details) for job_id in "ab"}
    assert pointed == {"a": True, "b": False}  # of what never ran there is no output


def test_an_empty_cluster_and_a_job_larger_than_the_cluster() -> None:
    driver = Driver()
    driver.submit(spec("a", gpus=4096))
    assert driver.state("a") == "PENDING"
    driver.do(HostJoined(host()))
    assert driver.job("a").not_placeable


@pytest.mark.parametrize("hints", [{"gpus": 4, "gang": "cluster"}, {"gpu_memory": 12 * GIB}, {"cpus": 6.0}])
def test_a_job_that_waits_outlasts_the_loss_of_the_host_it_needs(hints: dict[str, Any]) -> None:
    """It fitted the cluster when it was submitted: what was lost may come back, and then it starts."""
    large = host("h2", gpus=2, memory=16 * GIB, cpus=8.0)
    driver = Driver(host("h1", gpus=2, memory=8 * GIB, cpus=4.0), large)
    driver.submit(*(spec(f"r{number}", gpus=2, isolation="hard") for number in range(2)))
    driver.submit(spec("waits", isolation="hard", **hints))
    driver.do(HostLost("h2", "the node is lost"))
    driver.do(Tick(), after_s=5.0)
    assert driver.state("waits") == "QUEUED"
    assert any(error.never for error in driver.core.state.refused["waits"])
    driver.submit(spec("late", isolation="hard", **hints))
    assert driver.job("late").not_placeable  # whoever comes now is told at once
    driver.do(HostJoined(large), after_s=5.0)
    for job_id in ("r0", "r1"):
        job = driver.job(job_id)
        if job.lease is not None:
            for host_id in job.hosts:
                driver.do(JobExited(job_id, job.epoch, host_id, 0))
    assert driver.job("waits").lease is not None


def test_a_job_that_waits_ends_when_its_program_turns_out_to_need_more_than_there_is() -> None:
    driver = Driver(host(gpus=1, memory=8 * GIB))
    driver.submit(spec("r", isolation="hard"), spec("waits", isolation="hard"))
    driver.do(Tick(), after_s=5.0)
    assert driver.state("waits") == "QUEUED"
    driver.core.state.learn(driver.job("waits").spec.fingerprint, profile(memory=20 * GIB), "cpu-1")
    driver.do(HostJoined(host("h2", memory=4 * GIB)), after_s=5.0)
    assert driver.job("waits").not_placeable


def test_gpus_that_are_all_different() -> None:
    driver = Driver(*(host(f"h{size}", memory=size * GIB) for size in (4, 8, 16)))
    for need in (14, 6, 3):
        driver.submit(spec(f"m{need}", gpu_memory=need * GIB, isolation="hard"))
    assert {job_id: job.hosts for job_id, job in driver.core.state.jobs.items()} == {
        "m14": ("h16",),
        "m6": ("h8",),
        "m3": ("h4",),
    }


def test_the_same_id_twice_is_one_job() -> None:
    driver = Driver(host())
    driver.core.state.learn("fp-a", profile(), "cpu-1")
    driver.submit(spec("a"), spec("a"))
    assert started(driver) == {"h1-0": 1}


# -- where people meet them -------------------------------------------------------------------------------------------


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LocalCotenant]]:
    """Start a cotenant with these hosts; the command line talks to it."""
    begun: list[LocalCotenant] = []

    def begin(*hosts: FakeHost) -> LocalCotenant:
        begun.append(LocalCotenant(tmp_path, *hosts, settings=settings(max_jobs_per_gpu=48)))
        monkeypatch.setattr(cli, "_client", lambda address: begun[0].client)
        return begun[0]

    monkeypatch.chdir(tmp_path)
    yield begin
    for each in begun:
        each.close()


def submitted(*hints: str, job_id: str = "j") -> tuple[int, str, str]:
    return invoke("submit", "--job-id", job_id, *hints, "--", "python", "-c", "pass")


def test_an_empty_cluster_keeps_a_job_until_hosts_join(running: Callable[..., LocalCotenant]) -> None:
    local = running()
    assert submitted() == (0, "j\n", "")
    assert "waits: no GPU host is known yet" in invoke("explain", "j")[1]
    code, out, _ = invoke("plan", "--gpus", "2", "--json")
    assert (code, json.loads(out)["jobs"][0]["placeable"]) == (0, "later")
    assert invoke("gpus")[1].startswith("no GPUs")
    assert local.client.accounts()[0].waiting_jobs == 1


def test_a_job_larger_than_the_cluster_is_exit_code_2_and_a_conflict(running: Callable[..., LocalCotenant]) -> None:
    local = running(FakeHost())
    code, _, err = submitted("--gpus", "2")
    assert code == 2
    assert "not placeable: j: no device of this cluster could ever take it: wants 2 GPUs, at most 1" in err
    assert "; gpus: 2 cannot be met on one host; give at most 1\n" in err
    answer = local.http("POST", "/jobs", {"command": ["python", "-c", "pass"], "hints": {"gpu_memory": "9GiB"}})
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:cotenant:problem:not-placeable")
    assert "9.0 GiB of memory wanted, at most 8.0 GiB can be had even when empty" in answer.json()["detail"]
    assert answer.json()["detail"].endswith("; gpu_memory: 9.0 GiB cannot be met; give at most 8.0 GiB")


def test_what_fits_runs_and_the_rest_says_why(running: Callable[..., LocalCotenant]) -> None:
    local = running(FakeHost())
    for number in range(3):
        assert submitted("--gpu-memory", "4GiB", "--compute", "0.3", job_id=f"j{number}")[0] == 0
    local.report()
    assert [job.state for job in reversed(local.client.jobs())] == ["RUNNING", "RUNNING", "QUEUED"]
    assert "waits: 1 GPU: 4.0 GiB short" in invoke("explain", "j2")[1]
    assert "1 GPU: 4.0 GiB short" in local.http("GET", "/jobs/j2/explanation").json()["summary"]
    plan = local.http("POST", "/plan", {"settings": {"placement": {"max_jobs_per_gpu": 1}}}).json()
    # Placed anew, the first of them has the GPU.
    assert [(job["job_id"], job["before"], job["after"]) for job in plan["affected"]] == [("j1", "runs", "later")]
    assert local.client.tuning().placement.max_jobs_per_gpu == 48


def test_a_duplicate_id_is_the_same_job_or_a_mistake(running: Callable[..., LocalCotenant]) -> None:
    local = running(FakeHost())
    assert submitted()[0] == submitted()[0] == 0
    code, _, err = invoke("submit", "--job-id", "j", "--", "python", "-c", "another")
    assert (code, "a job with this id and another command is known" in err) == (1, True)
    assert len(local.client.jobs()) == 1


def test_a_duplicate_id_with_other_hints_is_refused_everywhere(running: Callable[..., LocalCotenant]) -> None:
    local = running(FakeHost())
    soon = ("--deadline", "2h", "--gpu-memory", "1GiB")
    assert submitted(*soon)[0] == submitted(*soon)[0] == 0  # each has its own moment
    told = "gpu_memory: 1073741824 there, 2147483648 here, priority: 'normal' there, 'high' here"
    code, _, err = submitted("--deadline", "2h", "--gpu-memory", "2GiB", "--priority", "high")
    assert (code, f"another one: a job with this id and other hints is known ({told})" in err) == (1, True), err
    code, _, err = submitted("--gpu-memory", "1GiB")
    assert (code, ", None here)" in err, "deadline: " in err) == (1, True, True), err
    body = {"command": ["python", "-c", "pass"], "hints": {"grace": "9s"}}
    for hints, status in (({"grace": "9s"}, 201), ({"grace": 9}, 201), ({"grace": "8s"}, 422), ({}, 422)):
        answer = local.http("POST", "/jobs", body | {"hints": hints}, {"Idempotency-Key": "k"})
        assert answer.status_code == status, answer.json()
    assert answer.json()["field"] == "job_id"
    assert "(grace: 9.0 there, None here)" in answer.json()["detail"]
    assert {job.job_id: job.hints["gpu_memory"] for job in local.client.jobs()} == {"j": GIB, "k": None}


TRACE = {"job_id": "a", "submit_s": 0.0, "gpus": 1, "duration_s": 60.0, "workload": "x"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"duration_s": 0}, "jobs[1]: duration_s: '0' is not accepted; give a number above 0"),
        ({"submit_s": -1}, "jobs[1]: submit_s: '-1' is not accepted; give a number of at least 0"),
        ({"job_id": "a"}, "jobs[1]: job_id: 'a' is not accepted; give an id that jobs[0] does not have"),
        ({"job_id": ""}, "jobs[1]: job_id: '' is not accepted; give a value"),
        ({"gpus": 0}, "jobs[1]: gpus: '0' is not accepted; give a number of at least 1"),
        ({"wokload": "x"}, "jobs[1]: 'wokload' is not accepted; give only"),
    ],
    ids=["zero duration", "negative time", "duplicate id", "no id", "no GPU", "misspelt"],
)
def test_trace_rows_that_cannot_be_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    rows = [TRACE, {**TRACE, "job_id": "b", **changes}]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"format": "cotenant-trace", "version": 1, "jobs": rows}))
    code, out, err = invoke("simulate", str(path), "--gpus", "1", "--out", str(tmp_path / "out"))
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


def test_trace_rows_that_are_no_jobs_are_left_out_and_told_of(tmp_path: Path) -> None:
    path = tmp_path / "pods.csv"
    head = (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
    )
    path.write_text(f"{head}\na,1,1,1,500,,LS,Running,0,9,0\nb,1,1,1,500,,LS,Pending,4,4,\n")
    out = tmp_path / "out"
    code, text, err = invoke("simulate", str(path), "--gpus", "1", "--policy", "fifo", "--out", str(out), "--json")
    (summary,) = json.loads(text)
    assert (code, summary["jobs"]) == (0, 1)
    assert "left out of the trace: pods that never ran (1)" in summary["remarks"]
    assert "cotenant: left out of the trace: pods that never ran (1)\n" in err
    assert "left out of the trace: pods that never ran (1)" in (out / "report.html").read_text(encoding="utf-8")


def test_a_table_of_no_known_form_is_told_which_there_are(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("job_id,submit_s,run_time\na,0,10\n")
    code, _, err = invoke("simulate", str(path), "--out", str(tmp_path / "out"))
    assert (code, "the head of one of cotenant-trace, philly-week" in err) == (1, True)


def test_a_table_of_ones_own_is_simulated(tmp_path: Path) -> None:
    path, out = tmp_path / "mine.csv", tmp_path / "out"
    path.write_text("job_id,submit_s,duration_s,gpus,estimate_s\na,5,10,,\nb,5,20,2,30\n")
    code, text, _ = invoke("simulate", str(path), "--gpus", "2", "--policy", "fifo", "--out", str(out), "--json")
    (summary,) = json.loads(text)
    assert (code, summary["jobs"], summary["makespan_s"]) == (0, 2, 30.0)


@pytest.mark.parametrize("command", ["simulate", "characterise"])
def test_results_that_could_not_be_kept_are_not_computed(tmp_path: Path, command: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"format": "cotenant-trace", "version": 1, "jobs": [TRACE]}))
    code, out, err = invoke(command, str(path), "--out", str(path))
    assert (code, out) == (1, "")
    assert f"out: {path} cannot be written" in err


def test_a_trace_row_without_a_model_is_named_where_the_form_needs_one(tmp_path: Path) -> None:
    path = tmp_path / "week.csv"
    head = "job_id,user,gpu_num,submit_time,duration,model,batchsize,amp,gpu_util,gmem_util,gmem,estimate_s"
    path.write_text(f"{head}\n1,u,1,2017-10-01 00:01:00,30,,64,0,10.5,2.0,2050.0,19\n")
    code, _, err = invoke("simulate", str(path), "--gpus", "1", "--out", str(tmp_path / "out"))
    assert (code, "line 2: model: '' is not accepted; give a value" in err) == (1, True)


@pytest.mark.parametrize("policy", ["cotenant", "fifo", "tiresias", "best-fit"])
def test_trace_jobs_larger_than_the_cluster_are_left_out_and_the_rest_ends(tmp_path: Path, policy: str) -> None:
    rows = [TRACE, {**TRACE, "job_id": "b", "gpus": 3}, {**TRACE, "job_id": "c", "memory_bytes": 1 << 50}]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"format": "cotenant-trace", "version": 1, "jobs": rows}))
    out = tmp_path / "out"
    code, text, _ = invoke("simulate", str(path), "--gpus", "2", "--policy", policy, "--out", str(out), "--json")
    (summary,) = json.loads(text)
    assert (code, summary["jobs"], summary["ended"], summary["unplaceable"]) == (0, 3, 1, 2)
    _, text, _ = invoke("simulate", str(path), "--gpus", "2", "--policy", policy, "--out", str(out))
    assert "; 2 jobs need more than this cluster has\n" in text
    path.write_text(json.dumps({"format": "cotenant-trace", "version": 1, "jobs": rows[:2]}))
    _, text, _ = invoke("simulate", str(path), "--gpus", "2", "--policy", policy, "--out", str(out))
    assert "; 1 job needs more than this cluster has\n" in text


@pytest.mark.parametrize("gpus", ["0", "v100:", "k80:-1", "²", "1000001", "a:999999,b:2", "1" + "0" * 5000])
def test_a_cluster_that_cannot_be_is_refused(tmp_path: Path, gpus: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"format": "cotenant-trace", "version": 1, "jobs": [TRACE]}))
    code, _, err = invoke("simulate", str(path), "--gpus", gpus, "--out", str(tmp_path / "out"))
    assert (code, err.startswith("error: gpus: "), err.count("\n")) == (1, True, 1), err
