"""A host agent that freezes jobs and thaws them: real processes, two GPUs and a driver played by stand-ins."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import make_agent
from fake_driver import COUNT
from freezing_hosts import GIB, GPUS, SETTINGS, Host, freezing_host
from nvml_standin import Standin

from cotenant.actors import freezing, hostmemory, jobfiles, runner
from cotenant.actors.enforcement.pausing import CheckpointPause
from cotenant.configs.settings import DeviceSettings
from cotenant.placement.types import Share
from cotenant.scheduler.core.commands import ResizeShares, StartJob


@pytest.fixture
def host(standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with freezing_host(standin, tmp_path, monkeypatch) as host:
        yield host


def test_a_frozen_job_is_off_its_gpu_and_goes_on_when_it_is_thawed(host):
    host.start()
    pid, said = host.pid, host.agent._launcher.guarantees("job")
    assert "can be frozen" in said, said
    host.frozen()
    (frozen,) = [event for event in host.events if event.kind == "job_frozen"]
    assert (frozen.host_id, frozen.epoch, frozen.revision, frozen.memory_bytes) == ("h1", 1, 0, GIB)
    assert (host.driver.on(0), host.states(), host.item()) == (set(), {"T"}, ("running", 0, True))
    assert host.agent._launcher.guarantees("job") == "frozen: 1024 MiB of its device memory are in the host's"
    at = host.count()
    host.thaw()
    host.until(lambda: host.told() == ["job_started", "job_frozen", "job_started"], "it is told")
    assert (host.driver.on(0), host.pid, host.item()) == ({pid}, pid, ("running", 1, False))
    assert host.count() >= at
    host.counts()
    assert host.agent._launcher.shares("job") == (Share("GPU-a", 2 * GIB, 0.4),)
    assert not (host.job_dir / jobfiles.FREEZE).exists()


def test_it_goes_on_on_another_gpu_as_often_as_need_be(host):
    host.start()
    pid = host.pid
    for revision, gpu in ((1, "GPU-c"), (2, "GPU-b"), (3, "GPU-a")):
        host.freeze(revision - 1)
        host.until(lambda: host.last() == "job_frozen", "it is frozen")
        host.thaw(gpu, revision)
        host.until(lambda: host.last() == "job_started", "it is thawed")
        assert host.driver.on("abc".index(gpu[-1])) == {pid}
        host.counts()
        host.is_sampled_on(gpu)
        host.restart()
        (launched,) = host.agent._launcher.running()
        assert [share.gpu_id for share in launched.shares] == [gpu], "another agent knows where it is"
    assert host.agent._launcher.guarantees("job").startswith("timeslice")


def test_a_frozen_job_is_not_sampled_and_nothing_is_told_of_it(host, monkeypatch):
    batches = []
    host.start()
    monkeypatch.setattr(host.agent.scheduler, "observe", None, raising=False)
    host.agent.scheduler.observe = type("Observe", (), {"remote": staticmethod(batches.append)})
    host.agent._close_window()
    host.frozen()
    host.agent._close_window()
    for _ in range(5):
        host.agent._look()
    host.agent._close_window()
    host.agent._launcher.tend()
    assert [len(batch.signatures) for batch in batches] == [1, 0, 0]
    assert host.agent._profiler.newest.jobs == ()
    assert host.agent._controls["job"].startswith("frozen: ")
    host.thaw("GPU-b")
    host.until(lambda: host.last() == "job_started", "it is thawed")
    host.until(lambda: host.agent._profiler.newest.jobs, "it is sampled again")
    host.agent._close_window()
    (signature,) = batches[-1].signatures
    assert signature.gpu_id == "GPU-b"


@pytest.mark.parametrize("grace_s", [0.0, 30.0])
def test_a_frozen_job_that_is_to_end_ends_at_once(host, grace_s):
    host.start()
    host.frozen()
    began = time.monotonic()
    host.stop(grace_s)
    ended = host.ended()
    assert time.monotonic() - began < 20.0, "it cannot react: nobody waits for it"
    assert (ended.exit_code, ended.stopped, ended.lost) == (-signal.SIGKILL, True, False)
    host.thaw()
    host.freeze()
    assert host.last() == "job_exited", "what comes late changes nothing"


def test_a_job_that_is_to_end_while_it_is_being_frozen_ends_in_good_order(host):
    host.start(program=f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)){COUNT}")
    host.until(lambda: host.driver.on(0), "it is on its GPU")
    host.driver.say("hangs-checkpoint")
    host.freeze()
    host.until(lambda: "checkpoint" in host.driver.calls, "the driver is at it")
    host.stop(30.0)
    host.driver.say()
    ended = host.ended()
    assert (ended.exit_code, ended.stopped, ended.lost) == (7, True, False), ended
    assert "job_frozen" not in host.told()


def test_a_job_that_is_killed_while_it_is_being_frozen_ends(host):
    host.start()
    host.driver.say("hangs-lock")
    host.freeze()
    host.until(lambda: "lock" in host.driver.calls, "the driver is at it")
    host.stop(0.0)
    host.driver.say()
    assert host.ended().stopped
    assert host.told() == ["job_started", "job_exited"]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("fails-lock", "checkpoint: CUDA_ERROR_NOT_SUPPORTED: lock"),
        ("fails-checkpoint", "checkpoint: CUDA_ERROR_NOT_SUPPORTED: checkpoint"),
        ("keeps", r"still (have device memory|in use)"),
    ],
)
def test_what_cannot_be_frozen_goes_on_and_is_told(host, fault, says):
    host.start()
    host.driver.say(fault)
    host.freeze()
    host.until(lambda: host.last() == "freeze_failed", "it is told")
    failed = host.events[-1]
    assert (failed.host_id, failed.epoch, failed.revision) == ("h1", 1, 0)
    assert re.search(says, failed.reason), failed.reason
    assert "T" not in host.states()
    host.counts()
    assert host.item() == ("running", 0, False)
    host.driver.say()
    host.agent.recorded((failed,))
    assert not (host.job_dir / jobfiles.FREEZE).exists()
    host.freeze()
    host.until(lambda: host.last() == "job_frozen", "another try is made")


def test_a_driver_that_hangs_is_given_up(host, monkeypatch):
    monkeypatch.setattr(freezing, "CheckpointPause", lambda: CheckpointPause(timeout_s=5.0))
    host.start()
    host.driver.say("hangs-lock")
    host.freeze()
    host.until(lambda: host.last() == "freeze_failed", "it is told")
    assert "does not answer within 5 s" in host.events[-1].reason
    host.counts()


@pytest.mark.parametrize("fault", ["fails-restore", "fails-unlock"])
def test_a_job_that_cannot_be_thawed_ends_as_one_that_its_host_let_down(host, fault):
    host.start()
    host.frozen()
    host.driver.say(fault)
    host.thaw("GPU-b")
    ended = host.ended()
    assert ended.lost
    assert "its frozen processes could not go on: resume: CUDA_ERROR_NOT_SUPPORTED" in ended.reason


def test_a_job_that_can_neither_be_frozen_nor_brought_back_ends_as_one_that_its_host_let_down(host):
    host.start()
    host.driver.say("fails-checkpoint", "fails-unlock")
    host.freeze()
    ended = host.ended()
    assert ended.lost
    assert "could not be brought back" in ended.reason


def test_there_must_be_memory_for_it(host, monkeypatch):
    host.start()
    monkeypatch.setattr(hostmemory, "room_bytes", lambda _: freezing.MARGIN_BYTES + (512 << 20))
    host.freeze()
    host.until(lambda: host.last() == "freeze_failed", "it is told")
    assert host.events[-1].reason == "its device memory takes 1024 MiB of the host's, of which it may have 512 MiB"
    assert host.driver.calls == []
    host.counts()


def test_what_does_not_say_who_has_memory_cannot_be_frozen(host, monkeypatch, standin):
    monkeypatch.setattr(freezing, "LISTED_S", 1.0)
    host.start()
    lists = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3")
    standin.set(*standin.state.read_text().split("\n"), *(f"fault {name} 3" for name in lists))
    host.until(lambda: host.agent._backend.contexts(("GPU-a",), ()) is None, "it says no more")
    host.freeze()
    host.until(lambda: host.last() == "freeze_failed", "it is told")
    assert host.events[-1].reason == "the driver does not say which of its processes have memory on its GPUs"


def test_a_program_that_is_on_no_gpu_yet_is_frozen_once_it_is(host, tmp_path):
    """Its environment names the GPU that it would get onto, whichever it was to go on on."""
    go = tmp_path / "go"
    host.start(program=f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n{COUNT}")
    host.freeze()
    host.until(lambda: host.last() != "job_started", "that has come to an end")
    failed = host.events[-1]
    assert (failed.kind, failed.again, host.driver.calls) == ("freeze_failed", True, []), failed
    assert failed.reason == "none of its processes is on its GPUs yet: they would use those of its start"
    assert "T" not in host.states()
    host.agent.recorded((failed,))
    go.touch()
    host.until(lambda: host.driver.on(0), "it is on its GPU")
    host.freeze()
    host.until(lambda: host.last() == "job_frozen", "it is frozen")
    host.thaw("GPU-b")
    host.until(lambda: host.last() == "job_started", "it is thawed")
    assert (host.driver.on(0), host.driver.on(1)) == (set(), {host.pid})


@pytest.mark.parametrize("what", ["freeze", "thaw"])
def test_a_command_that_is_repeated_is_carried_out_once(host, what):
    host.start()
    for _ in range(2):
        host.freeze()
    host.until(lambda: host.last() == "job_frozen", "it is frozen")
    calls = len(host.driver.calls)
    host.freeze()
    assert host.told() == ["job_started", "job_frozen", "job_frozen"], "it is told again: somebody has asked"
    for _ in range(2):
        host.thaw()
    host.until(lambda: host.last() == "job_started", "it is thawed")
    host.thaw()
    assert host.told()[3:] == ["job_started", "job_started"]
    host.counts()
    assert host.driver.calls[:calls] == ["lock", "checkpoint"]
    assert host.driver.calls[calls:] == ["restore", "unlock"]
    assert what


def test_what_is_told_is_of_the_newest_revision_that_was_asked_for(host):
    host.start()
    host.freeze(revision=3)  # a resize before it has been lost
    host.until(lambda: host.last() == "job_frozen", "it is frozen")
    assert host.events[-1].revision == 3
    host.freeze(revision=4)
    assert host.events[-1].revision == 4


def test_what_is_older_than_the_shares_is_not_carried_out(host):
    host.start()
    host.frozen()
    host.thaw(revision=1)
    host.until(lambda: host.last() == "job_started", "it is thawed")
    host.freeze(revision=0)
    assert host.item() == ("running", 1, False)
    host.freeze(revision=1)
    host.until(lambda: host.last() == "job_frozen", "it is frozen")
    old = StartJob("h1", host.spec, 1, 0, (Share("GPU-b", 2 * GIB, 0.4),), "", thaws=True)
    assert len(host.agent.apply([old])) == 1
    assert len(host.agent.apply([ResizeShares("h1", "job", 1, 5, (Share("GPU-a", GIB, 0.4),), "")])) == 1
    assert host.item() == ("running", 1, True)


def test_a_thaw_that_comes_while_it_is_being_frozen_follows(host):
    host.start()
    host.driver.say("hangs-checkpoint")
    host.freeze()
    host.until(lambda: "checkpoint" in host.driver.calls, "the driver is at it")
    host.thaw("GPU-b", 1)
    host.driver.say()
    host.until(lambda: host.told() == ["job_started", "job_started"], "it is thawed")
    assert host.driver.on(1) == {host.pid}
    host.counts()


def test_a_job_that_was_never_frozen_goes_on_where_it_is_and_nowhere_else(host):
    host.start()
    host.thaw("GPU-a", 1)
    assert host.told() == ["job_started", "job_started"]
    assert host.item() == ("running", 1, False)
    host.thaw("GPU-b", 2)
    ended = host.ended()
    assert ended.lost
    assert "it was not frozen, and cannot go on elsewhere" in ended.reason


def test_the_thaw_of_a_job_that_is_not_here_tells_its_end(host):
    host.start()
    host.frozen()
    host.agent._launcher._jobs.pop(("job", 1))  # as after its release
    host.thaw()
    ended = host.events[-1]
    assert (ended.kind, ended.epoch, ended.lost) == ("job_exited", 1, True)
    host.agent._launcher._jobs.clear()
    os.kill(int((runner.read_json(str(host.job_dir / runner.RUNNER)) or {})["pid"]), signal.SIGTERM)


def test_a_job_that_dies_while_it_is_frozen_has_ended(host):
    host.start()
    host.frozen()
    os.kill(host.pid, signal.SIGKILL)
    ended = host.ended()
    assert (ended.exit_code, ended.lost) == (-signal.SIGKILL, False)


def test_frozen_jobs_end_with_the_leases_of_their_host(host):
    host.start()
    host.frozen()
    host.agent._launcher.renew(time.monotonic())
    ended = host.ended()
    assert ended.lost
    assert "lease expired" in ended.reason


def test_a_thaw_that_comes_after_a_newer_freeze_is_not_carried_out(host):
    host.start()
    host.frozen()
    host.freeze(revision=1)
    assert host.events[-1].revision == 1, "it is told so, and its GPU is given to others"
    late = StartJob("h1", host.spec, 1, 1, (Share("GPU-a", 2 * GIB, 0.4),), "", thaws=True)
    assert len(host.agent.apply([late])) == 1
    assert (host.states(), host.item()) == ({"T"}, ("running", 0, True))


def test_it_goes_on_although_its_old_gpu_is_not_managed_any_more(host, monkeypatch, tmp_path):
    host.start("GPU-c")
    host.frozen()
    few = SETTINGS.model_copy(update={"device": DeviceSettings(backend="nvml", count=2)})
    host.agent.shut_down()
    host.agent = make_agent(monkeypatch, tmp_path, few)
    host.thaw("GPU-a")
    host.until(lambda: host.last() == "job_started", "it is thawed")
    assert host.driver.on(0) == {host.pid}
    host.counts()


def test_the_driver_is_told_of_gpus_too_that_are_not_managed(host, monkeypatch, tmp_path):
    few = SETTINGS.model_copy(update={"device": DeviceSettings(backend="nvml", count=2)})
    host.agent.shut_down()
    host.agent = make_agent(monkeypatch, tmp_path, few)
    host.start()
    host.frozen()
    host.thaw("GPU-b")
    host.until(lambda: host.last() == "job_started", "it is thawed")
    assert host.driver.on(1) == {host.pid}


@pytest.mark.parametrize("fault", ["fault * 15 2", "hang nvmlDeviceGetUUID 2"])
def test_a_gpu_that_is_lost_or_hangs_keeps_no_frozen_job_from_going_on_on_others(host, standin, fault):
    host.start()
    host.frozen()
    standin.set(*standin.state.read_text().split("\n"), fault)
    host.thaw("GPU-b")
    host.until(lambda: host.last() != "job_frozen", "that has come to an end")
    assert host.last() == "job_started", host.events[-1]
    assert host.driver.on(1) == {host.pid}
    host.counts()


def test_a_driver_that_is_too_old_is_found_out(host, standin):
    standin.set(*GPUS, "cuda 12040")
    host.until(lambda: host.agent._enforcement.no_checkpoints() is not None, "it is known")
    assert host.agent._enforcement.no_checkpoints() == ("probe: the driver is of CUDA 12.4; 12.8 and later can do it")
    assert host.checkpoints() == [False, False, False]
    assert "12.8 and later" in host.agent.report(1, (), "").no_freezing
    host.start()
    host.freeze()
    host.until(lambda: host.last() == "freeze_failed", "it is told")
    assert "12.8 and later" in host.events[-1].reason


def test_the_host_says_which_gpus_can_be_frozen_once_it_is_known(host):
    host.until(lambda: host.agent._enforcement.no_checkpoints() is not None, "it is known")
    assert host.checkpoints() == [True, True, True]
    assert host.agent.report(1, (), "").no_freezing == ""


def test_another_agent_says_at_once_what_the_one_before_has_found_out(host, monkeypatch):
    """The scheduler would take frozen jobs for lost, as their host can thaw none."""
    before = host.checkpoints()
    host.until(lambda: host.agent._enforcement.no_checkpoints() == "", "it is known")
    known = threading.Event()
    monkeypatch.setattr(CheckpointPause, "missing", lambda _: str(known.wait(60.0) and "not any more"))
    host.restart()
    assert (before, host.checkpoints()) == ([False] * 3, [True] * 3)
    known.set()
    host.until(lambda: host.checkpoints() == [False] * 3, "it is found out anew")
