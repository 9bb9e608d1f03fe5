"""What a host agent finds written down, damaged: of how a job is held on a GPU it costs that job only."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_mps import FakeMps
from gpu_host import GpuHost
from support import wait_until

from cotenant.actors.enforcement.cuda import MPS_RECORD
from cotenant.actors.enforcement.host import RECORD

DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_text(""),
    "cut short": lambda path: path.write_text('{"method": "mp'),
    "a list": lambda path: path.write_text("[1]"),
    "a number": lambda path: path.write_text("7"),
    "without its fields": lambda path: path.write_text("{}"),
    "binary": lambda path: path.write_bytes(b"\xff\xfe\0"),
    "of other types": lambda path: path.write_text(
        '{"method": ["mps"], "gpu_ids": 3, "gpu_id": 7, "daemon": "x", "memory_bytes": "x", "compute": "x"}'
    ),
    "of another version": lambda path: path.write_text(
        '{"method": "magic", "gpu_ids": ["GPU-a"], "gpu": "GPU-a", "daemon": 1}'
    ),
}


@pytest.fixture
def host(tmp_path, monkeypatch):
    host = GpuHost(tmp_path, FakeMps(tmp_path, monkeypatch))
    yield host
    host.end()
    assert host.fake.daemons() == []


@pytest.mark.parametrize(
    ("record", "damage"),
    [*((RECORD, each) for each in DAMAGES if each != "gone"), *((MPS_RECORD, each) for each in DAMAGES)],
)
def test_a_damaged_record_costs_that_job_only(host, record, damage):
    damaged = host.launch("damaged")
    host.command_pid(damaged)
    host.command_pid(host.launch("sound", gpu="GPU-b"))
    DAMAGES[damage](damaged.job_dir / record)
    host.restart()
    assert host.launcher.guarantees("damaged") == "", "whoever asks meanwhile is not in for it"
    exited = host.exited("damaged")
    assert (exited.exit_code, exited.lost) == (-signal.SIGKILL, True)
    assert "cannot be read" in exited.reason
    host.launcher.tend()
    (sound,) = host.launcher.running()
    assert sound.job_id == "sound"
    assert host.launcher.report("sound") is not None
    assert "mps" in host.launcher.guarantees("sound")
    wait_until(lambda: not host.launcher.release("damaged", 1), 10, "it is let go")


def test_a_host_with_a_damaged_record_is_shut_down_all_the_same(host):
    damaged = host.launch("damaged")
    host.command_pid(damaged)
    DAMAGES["empty"](damaged.job_dir / RECORD)
    host.restart()
    assert host.launcher.close() == ()
    assert host.fake.daemons() == []
    host.exited("damaged")
