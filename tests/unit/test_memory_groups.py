"""Memory groups: where they can be made, on trees of files that look like the kernel's; and on the kernel itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.enforcement.cgroup import MemoryGroups, find_groups
from cotenant.actors.enforcement.cpu import CpuEnforcement
from cotenant.actors.shim.reportfile import ReportWriter
from cotenant.placement.types import Share

MIB = 1 << 20
FILES = {
    2: {"memory.max": "max", "memory.current": "0"},
    1: {"memory.limit_in_bytes": "9", "memory.usage_in_bytes": "0"},
}


class Kernel:
    """Files that look like the kernel's, and a ``mkdir`` that fills a new group."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, version: int, controllers: str = "cpu memory"
    ) -> None:
        self.root = folder / "cgroup"
        (self.root / "own").mkdir(parents=True)
        (self.root / "own" / "cgroup.controllers").write_text(controllers)
        self.own = folder / "own"
        self.mounts = folder / "mounts"
        kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,memory")
        self.own.write_text("0::/own\n" if version == 2 else "4:memory:/own\n0::/\n")
        self.mounts.write_text(f"30 25 0:26 / {self.root} rw,relatime - {kind} cgroup {options}\n")
        plain = Path.mkdir

        def mkdir(path: Path, *args: object, **more: object) -> None:
            plain(path, *args, **more)  # type: ignore[arg-type]
            if self.root in path.parents:
                for name, text in FILES[version].items():
                    (path / name).write_text(text)

        def rmdir(path: Path) -> None:
            for entry in path.iterdir():
                entry.unlink()
            os.rmdir(path)  # noqa: PTH106

        monkeypatch.setattr(Path, "mkdir", mkdir)
        monkeypatch.setattr(Path, "rmdir", rmdir)

    def find(self) -> MemoryGroups | None:
        return find_groups("cotenant", self.own, self.mounts)


@pytest.mark.parametrize("version", [1, 2])
def test_both_versions_are_found(tmp_path, monkeypatch, version):
    kernel = Kernel(tmp_path, monkeypatch, version)
    groups = kernel.find()
    assert groups == MemoryGroups(kernel.root / "own" / "cotenant", version)
    assert [entry for entry in groups.base.iterdir() if entry.is_dir()] == [], "the trial is gone"


def test_version_2_without_the_controller_is_none(tmp_path, monkeypatch):
    assert Kernel(tmp_path, monkeypatch, 2, "cpu io").find() is None


@pytest.mark.parametrize("text", ["", "0::/elsewhere\n", "9:name=systemd:/\n"])
def test_where_nothing_can_be_made_there_is_none(tmp_path, monkeypatch, text):
    kernel = Kernel(tmp_path, monkeypatch, 2)
    kernel.own.write_text(text)
    assert kernel.find() is None
    assert find_groups("x", tmp_path / "missing") is None


def test_a_limit_is_never_less_than_what_is_in_use(tmp_path, monkeypatch):
    groups = Kernel(tmp_path, monkeypatch, 2).find()
    group = groups.create("job.1.0", 100)
    assert (group / "memory.max").read_text() == "100"
    (group / "memory.current").write_text("300")
    groups.limit(group, 200)
    assert (group / "memory.max").read_text() == "300"


def test_a_job_that_is_kept_apart_gets_a_group_and_others_do_not(tmp_path, monkeypatch):
    cpu = CpuEnforcement([0], Kernel(tmp_path, monkeypatch, 1).find())
    gpus = [GpuInfo("g", "cpu-core", 0, 1 << 30, {"CUDA_VISIBLE_DEVICES": ""}, (0,))]
    for name, isolation in (("soft.1", "soft"), ("hard.1", "hard")):
        job_dir = tmp_path / name
        job_dir.mkdir()
        cpu.admit(job_dir, gpus, [Share("g", 600 * MIB, 1.0)], isolation)
        cpu.apply(job_dir, [Share("g", 600 * MIB, 1.0)], 1, 0)
    groups = cpu._groups
    limit = groups.base / "hard.1.0" / "memory.limit_in_bytes"
    assert limit.read_text() == str(856 * MIB)  # its share and the slack of the limit that only refuses
    assert not (groups.base / "soft.1.0").exists()

    cpu.apply(tmp_path / "hard.1", [Share("g", 4096 * MIB, 1.0)], 1, 1)
    assert limit.read_text() == str(5120 * MIB)
    ReportWriter(str(tmp_path / "hard.1"), 0).write(1, 0.0, 0.0, 0)
    cpu.report(tmp_path / "hard.1", 0.0)
    assert (groups.base / "hard.1.0" / "cgroup.procs").read_text() == str(os.getpid())
    assert "killed when together they outgrow" in cpu.guarantees(
        tmp_path / "hard.1", cpu.report(tmp_path / "hard.1", 0.0)
    )

    cpu.tend([tmp_path / "hard.1"])
    assert limit.exists()
    cpu.tend([])
    assert not limit.exists()
    cpu.close()
    assert not groups.base.exists()


def test_the_kernel_kills_who_outgrows_its_group():
    groups = find_groups(f"cotenant-test-{os.getpid()}")
    if groups is None:
        pytest.skip("no memory group can be made here (no rights, or a container)")
    code = (
        "import sys; sys.stdin.readline(); size = int(sys.argv[1]); block = bytearray(size); print(sum(block[::4096]))"
    )
    try:
        group = groups.create("job", 64 * MIB)
        outcomes = []
        for size in (16 * MIB, 512 * MIB):
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", code, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            groups.add(group, [process.pid])
            assert process.pid in groups.members(group)
            process.communicate(b"go\n", timeout=30)
            outcomes.append(process.returncode)
        assert outcomes == [0, -9]
        groups.add(group, [1 << 22])  # one that has ended
    finally:
        groups.remove_all_but(())
        with contextlib.suppress(OSError):
            groups.base.rmdir()
    assert not groups.base.exists()
