"""One real Ray node with two cpu devices: submitting, output, exit codes, sharing, stopping, leases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import alive, wait_until

from cotenant.scheduler.core.model import Hints
from cotenant.scheduler.errors import HintError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

BUSY = "import time\nend = time.time() + float({seconds})\nwhile time.time() < end: pass\n"


def test_gpus_are_claimed_in_rays_own_accounting(single):
    import ray

    assert [gpu.gpu_type for gpu in single.client.gpus()] == ["cpu-core", "cpu-core"]
    assert ray.cluster_resources()["GPU"] == 2
    assert ray.available_resources().get("GPU", 0) == 0
    assert single.client.hosts()[0].claim == "2 of Ray's GPUs claimed on this node"


@pytest.mark.parametrize(
    ("script", "state", "exit_code"),
    [
        ("print('hello')", "SUCCEEDED", 0),
        ("import sys; print('hello'); sys.exit(7)", "FAILED", 7),
        ("import os, signal; print('hello', flush=True); os.kill(os.getpid(), signal.SIGKILL)", "FAILED", -9),
        ("print('hello', flush=True); import no_such_module", "FAILED", 1),
    ],
)
def test_output_and_exit_code_pass_through(single, script, state, exit_code):
    view = single.finish(single.run(script))
    assert (view.state, view.exit_code) == (state, exit_code), view
    assert single.output(view).startswith("hello\n")


def test_the_same_job_id_twice_is_one_job(single):
    first = single.run("print('once')", job_id="same")
    second = single.run("print('once')", job_id="same")
    assert second.submitted_at == first.submitted_at
    assert single.output(single.finish(first)) == "once\n"
    with pytest.raises(HintError, match="job_id"):
        single.run("print('something else')", job_id="same")


@pytest.mark.parametrize(
    ("hints", "reason"),
    [(Hints(gpu_memory=1 << 40), "GiB"), (Hints(cpus=4000.0), "1 host: too few processors: 4000 wanted")],
)
def test_a_job_that_no_device_can_take_says_so_at_once(single, hints, reason):
    view = single.run("pass", hints=hints)
    assert view.state == "FAILED"
    assert view.not_placeable
    assert reason in view.reason


def test_stopping_reaches_the_whole_process_tree_even_if_sigterm_is_ignored(single, tmp_path):
    pids = tmp_path / "pids"
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
    )
    view = single.run(script)
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2, 20, "the job has started its child")
    single.client.stop(view.job_id)
    assert single.finish(view).state == "CANCELLED"
    for pid in map(int, pids.read_text().split()):
        wait_until(lambda pid=pid: not alive(pid), 5, f"process {pid} is gone")


def test_two_busy_jobs_share_a_device_and_are_measured(single):
    hints = Hints(gpu_memory=200 << 20, compute=0.4, max_slowdown=5.0)
    views = [single.run(BUSY.format(seconds=120), hints=hints, name=f"busy-{i}") for i in range(3)]
    for view in views:
        single.reach(view, "RUNNING")
    shared = [gpu for gpu in single.client.gpus() if len(gpu.jobs) > 1]
    assert shared, "three jobs on two devices must share one"
    wait_until(
        lambda: all((job := single.client.job(v.job_id)).usage and job.usage.util_mean for v in views),
        30,
        "every job has been measured",
    )
    together = [single.client.job(job_id) for job_id in shared[0].jobs]
    wait_until(
        lambda: 0.8 < sum(single.client.job(j.job_id).usage.util_mean for j in together) < 1.2,
        30,
        "the two that share a device use it up together",
    )
    assert sum(share.compute for job in together for share in job.shares) <= 1.0 + 1e-9
    single.settle()


def test_a_killed_client_frees_its_lease_by_ttl(single, tmp_path):
    marker = tmp_path / "held"
    program = (
        "import cotenant, pathlib, time\n"
        "lease = cotenant.lease(compute=0.5, gpu_memory='100MiB', name='orphan')\n"
        f"pathlib.Path({str(marker)!r}).write_text(lease.job_id)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "RAY_ADDRESS": single.cluster.address}
    client = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        wait_until(lambda: marker.exists() and marker.read_text(), 40, "the client holds its lease")
    finally:
        client.send_signal(signal.SIGKILL)
        client.wait()
    view = single.client.job(marker.read_text())
    assert view.state == "RUNNING"
    wait_until(lambda: single.client.job(view.job_id).state == "CANCELLED", 40, "the lease of the dead client ends")


def test_tasks_and_actors_run_under_a_lease(single):
    import ray

    import cotenant

    @ray.remote
    def look() -> tuple[dict[str, str], int, set[int]]:
        return (
            {k: v for k, v in os.environ.items() if k.startswith("COTENANT_")},
            os.getpid(),
            os.sched_getaffinity(0),
        )

    with cotenant.lease(gpus=2, gpu_memory="200MiB", compute=0.5) as lease:
        assert len(lease) == 2
        assert len({share.gpu_id for share in lease.shares}) == 2
        seen = ray.get([look.options(**lease.options(i)).remote() for i in range(2)], timeout=60)
        assert [environment["COTENANT_SHARE_INDEX"] for environment, _, _ in seen] == ["0", "1"]
        assert {environment["COTENANT_JOB_ID"] for environment, _, _ in seen} == {lease.job_id}
        worker = seen[0][1]
    wait_until(lambda: not alive(worker), 15, "the leased worker ends with its lease")
    assert single.client.job(lease.job_id).state in ("CANCELLED", "STOPPING")


def test_thousands_of_jobs_at_once(single):
    hints = Hints(compute=1.0, gpu_memory=100 << 20)
    blockers = [single.run("import time; time.sleep(600)", hints=hints) for _ in range(2)]
    for view in blockers:
        single.reach(view, "RUNNING")
    specs = [single.client.spec(["true"], hints, env={}, name=f"n{i}") for i in range(3_000)]
    views = single.client.submit_many(specs)
    assert {view.state for view in views} == {"QUEUED"}
    assert single.client.health().ok
    assert "waits" in single.client.explain(views[-1].job_id).summary.lower()
    single.settle()


def test_unreadable_working_directory_and_missing_program_are_explained(single, tmp_path):
    missing = single.finish(single.client.submit(["no-such-program-here"], Hints()))
    assert (missing.state, missing.exit_code) == ("FAILED", 127)
    assert "no-such-program-here" in missing.reason
    nowhere = single.finish(single.client.submit(["true"], Hints(), cwd=str(tmp_path / "nowhere")))
    assert nowhere.state == "FAILED"
    assert str(tmp_path / "nowhere") in nowhere.reason


def test_a_hundred_megabytes_of_output_arrive_whole(single):
    view = single.run("import sys\nfor _ in range(100): sys.stdout.write('x' * (1 << 20))")
    assert single.finish(view).state == "SUCCEEDED"
    assert sum(len(piece) for piece in single.client.stream_logs(view.job_id)) == 100 << 20


def test_nothing_is_left_behind(single):
    single.settle()
    run_dir = Path(os.environ["COTENANT_RUN_DIR"])
    leftovers = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if (
                str(run_dir).encode() in (process / "environ").read_bytes()
                and b"COTENANT_JOB_ID" in (process / "environ").read_bytes()
            ):
                leftovers.append((process / "cmdline").read_bytes().replace(b"\0", b" "))
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked, or is not ours
    assert leftovers == []
