"""Frozen jobs under a host agent that is restarted, or finds records that it cannot read or write."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from freezing_hosts import GIB, Host, freezing_host
from nvml_standin import Standin

from cotenant.actors import jobfiles, runner
from cotenant.actors.enforcement.host import RECORD
from cotenant.actors.enforcement.pausing import CheckpointPause
from cotenant.placement.types import Share
from cotenant.scheduler.core.commands import StartJob


@pytest.fixture
def host(standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with freezing_host(standin, tmp_path, monkeypatch) as host:
        yield host


def test_another_agent_finds_a_frozen_job_frozen(host):
    host.start()
    host.frozen()
    host.restart()
    assert host.told() == ["job_frozen"], "it may not have been told"
    assert host.item() == ("running", 0, True)
    host.thaw("GPU-b")
    host.until(lambda: host.last() == "job_started", "it is thawed")
    assert host.driver.on(1) == {host.pid}
    host.counts()


@pytest.mark.parametrize("reached", ["asked", "locked", "checkpointed", "still"])
def test_another_agent_undoes_a_freeze_that_was_cut_short(host, reached):
    host.start()
    host.frozen()
    freeze = jobfiles.read_freeze(host.job_dir)
    assert freeze is not None
    pid = host.pid
    if reached != "still":
        CheckpointPause().resume(host.root_pid, [] if reached == "checkpointed" else [pid])
    if reached == "locked":
        (host.driver.notes / str(pid)).write_text('["locked", []]')
    host.record(freeze._replace(phase="freezing", pids=() if reached == "asked" else freeze.pids))
    host.restart()
    host.until(lambda: host.told() == ["freeze_failed"], "it is told")
    assert host.events[-1].reason == "the host agent ended meanwhile"
    assert host.events[-1].again, "the job is not to blame"
    assert host.driver.on(0) == {pid}
    host.counts()
    host.restart()
    assert host.told() == ["freeze_failed"], "until it is recorded"


@pytest.mark.parametrize("reached", ["decided", "in force", "on the GPU"])
def test_another_agent_finishes_a_thaw_that_was_cut_short(host, reached):
    host.start()
    host.frozen()
    freeze = jobfiles.read_freeze(host.job_dir)
    assert freeze is not None
    pid = host.pid
    if reached != "decided":
        jobfiles.move_launch(host.job_dir, ["GPU-b"])
        host.agent._enforcement.move(host.job_dir, ["GPU-b"])
        host.agent._enforcement.apply(host.job_dir, [Share("GPU-b", GIB, 0.3)], 1, 1)
    if reached == "on the GPU":
        CheckpointPause().resume(host.root_pid, [pid], {"GPU-a": "GPU-b", "GPU-b": "GPU-a", "GPU-c": "GPU-c"})
    host.record(freeze._replace(phase="thawing", target=(1, [("GPU-b", GIB, 0.3)])))
    host.restart()
    host.until(lambda: host.told() == ["job_started"], "it is thawed")
    assert host.driver.on(1) == {pid}
    assert host.item() == ("running", 1, False)
    assert host.agent._launcher.shares("job") == (Share("GPU-b", GIB, 0.3),)
    assert (runner.read_json(str(host.job_dir / RECORD)) or {})["gpu_ids"] == ["GPU-b"]
    host.counts()


@pytest.mark.parametrize(
    "record",
    [
        '{"phase": ',
        "[]",
        '{"phase": "moving", "revision": 0, "gpu_ids": ["GPU-a"]}',
        '{"phase": "thawing", "revision": 0, "gpu_ids": ["GPU-a"]}',
        '{"phase": "frozen", "revision": 0, "gpu_ids": null}',
        '{"phase": "frozen", "revision": 0, "gpu_ids": ["GPU-a"], "pids": [[1]]}',
    ],
)
def test_a_record_of_a_freeze_that_cannot_be_read_ends_the_job(host, record):
    host.start()
    host.frozen()
    (host.job_dir / jobfiles.FREEZE).write_text(record)
    host.restart()
    assert host.ended().lost


@pytest.mark.parametrize("file", [jobfiles.FREEZE, runner.LAUNCH])
def test_what_cannot_be_written_down_stays_frozen_until_the_thaw_is_repeated(host, file, monkeypatch):
    host.start()
    host.frozen()
    with monkeypatch.context() as patch:
        write = runner.write_json

        def full(path: str, value: dict[str, Any]) -> None:
            if path.endswith(file):
                raise OSError(errno.ENOSPC, "No space left on device")
            write(path, value)

        patch.setattr(runner, "write_json", full)
        thaw = StartJob("h1", host.spec, 1, 1, (Share("GPU-b", 2 * GIB, 0.4),), "", thaws=True)
        assert host.agent.apply([thaw]) == ["[Errno 28] No space left on device"]
        host.restart()
        assert (host.states(), host.item()) == ({"T"}, ("running", 0, True))
    host.thaw("GPU-b")
    host.until(lambda: host.last() == "job_started", "it is thawed")
    assert (host.driver.on(1), host.item()) == ({host.pid}, ("running", 1, False))
    host.counts()
