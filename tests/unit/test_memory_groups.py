"""Memory groups: where they can be made, on trees of files that look like the kernel's; and on the kernel itself."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.enforcement import host
from cotenant.actors.enforcement.cgroup import MemoryGroups, find_groups
from cotenant.actors.enforcement.cpu import CpuEnforcement
from cotenant.actors.shim.reportfile import ReportWriter
from cotenant.configs.settings import EnforcementSettings
from cotenant.placement.types import Share

MIB = 1 << 20
FILES = {
    2: {"memory.max": "max", "memory.current": "0"},
    1: {"memory.limit_in_bytes": "9", "memory.usage_in_bytes": "0"},
}
PROCS, CONTROLLERS, HANDED_ON = "cgroup.procs", "cgroup.controllers", "cgroup.subtree_control"
WRITE, MKDIR, RMDIR = Path.write_text, Path.mkdir, Path.rmdir


class Kernel:
    """A tree of files that does to whoever writes to it what the kernel does, the rules of version 2 included.

    Args:
        own: The group that this process is in.
        controllers: Those that the uppermost group has.
        real_root: Whether the uppermost group is the root of the hierarchy, which the rules do not hold for; else that
            of a container.
        closed: Groups that this user may not write to.
    """

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        version: int,
        *,
        own: str = "/own",
        controllers: str = "cpu memory",
        real_root: bool = True,
        closed: tuple[str, ...] = (),
    ) -> None:
        self.root = folder / "cgroup"
        self.version, self.real_root = version, real_root
        self.closed = {self.root / name.strip("/") for name in closed}
        MKDIR(self.root)
        self._fill(self.root, controllers)
        for part in reversed((self.root / own.strip("/")).relative_to(self.root).parents):
            self.make(self.root / part)
        self.make(self.root / own.strip("/"))
        self.own = folder / "own"
        self.mounts = folder / "mounts"
        kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,memory")
        self.own.write_text(f"0::{own}\n" if version == 2 else f"4:memory:{own}\n0::/\n")
        self.mounts.write_text(f"30 25 0:26 / {self.root} rw,relatime - {kind} cgroup {options}\n")
        self.attach(self.root / own.strip("/"), os.getpid())
        self._replace(monkeypatch)

    def _replace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def mkdir(path: Path, *args: Any, **more: Any) -> None:
            self._mkdir(path, *args, **more)

        def rmdir(path: Path) -> None:
            self._rmdir(path)

        def write_text(path: Path, text: str, **_: str) -> int:
            return self._write(path, text)

        for function in (mkdir, rmdir, write_text):
            monkeypatch.setattr(Path, function.__name__, function)

    def find(self) -> MemoryGroups | None:
        return find_groups("cotenant", self.own, self.mounts)

    def make(self, group: Path) -> None:
        if not group.exists():
            MKDIR(group)
            self._fill(group, (group.parent / HANDED_ON).read_text() if self.version == 2 else "memory")

    def groups(self) -> set[str]:
        return {f"/{path.relative_to(self.root)}" for path in self.root.rglob("*") if path.is_dir()}

    def attach(self, group: Path, pid: int) -> None:
        if self._bound(group) and (group / HANDED_ON).read_text():
            raise OSError(errno.EBUSY, "it hands controllers on")
        for procs in self.root.rglob(PROCS):
            WRITE(procs, "".join(f"{other}\n" for other in procs.read_text().split() if other != str(pid)))
        with (group / PROCS).open("a") as procs:
            procs.write(f"{pid}\n")

    def hand_on(self, group: Path, controller: str) -> None:
        if controller not in (group / CONTROLLERS).read_text().split():
            raise OSError(errno.ENOENT, "it does not have it")
        if self._bound(group) and (group / PROCS).read_text():
            raise OSError(errno.EBUSY, "it holds processes")
        WRITE(group / HANDED_ON, controller)
        for child in (path for path in group.iterdir() if path.is_dir()):
            self._fill(child, controller)

    def _bound(self, group: Path) -> bool:
        """Whether it may not both hold processes and hand controllers on."""
        return self.version == 2 and not (group == self.root and self.real_root)

    def _fill(self, group: Path, controllers: str) -> None:
        limits = FILES[self.version] if self.version == 1 or (group != self.root and "memory" in controllers) else {}
        files = {PROCS: "", **limits} | ({HANDED_ON: ""} if self.version == 2 else {})
        for name, text in files.items():
            if not (group / name).exists():
                WRITE(group / name, text)
        WRITE(group / CONTROLLERS, controllers)

    def _check(self, group: Path) -> None:
        if group in self.closed:
            raise PermissionError(errno.EACCES, "closed")

    def _mkdir(self, path: Path, *args: Any, **more: Any) -> None:
        if self.root not in path.parents or path.exists():
            MKDIR(path, *args, **more)
            return
        self._check(path.parent)
        self.make(path)

    def _rmdir(self, path: Path) -> None:
        alive = any(Path(f"/proc/{pid}").exists() for pid in (path / PROCS).read_text().split())
        if alive or any(entry.is_dir() for entry in path.iterdir()):
            raise OSError(errno.EBUSY, "in use")
        for entry in path.iterdir():
            entry.unlink()
        RMDIR(path)

    def _write(self, path: Path, text: str) -> int:
        if self.root not in path.parents:
            return WRITE(path, text)
        self._check(path.parent)
        if path.name == PROCS:
            self._attach_as_user(path.parent, int(text))
        elif path.name == HANDED_ON:
            self.hand_on(path.parent, text.removeprefix("+"))
        elif path.exists():
            WRITE(path, text)
        else:
            raise FileNotFoundError(path)
        return len(text)

    def _attach_as_user(self, group: Path, pid: int) -> None:
        """Whoever moves a process needs to write to the group that both groups lie in."""
        now = [procs.parent for procs in self.root.rglob(PROCS) if str(pid) in procs.read_text().split()]
        common = {group, *group.parents}.intersection(*({place, *place.parents} for place in now or [self.started_in]))
        self._check(max(common, key=lambda path: len(path.parts)))
        self.attach(group, pid)

    @property
    def started_in(self) -> Path:
        """Where processes are that this one has started."""
        return next(procs.parent for procs in self.root.rglob(PROCS) if str(os.getpid()) in procs.read_text().split())


@pytest.mark.parametrize(
    ("version", "layout", "base"),
    [
        pytest.param(1, {}, "/own/cotenant", id="version 1, below our own group"),
        pytest.param(2, {"own": "/"}, "/cotenant", id="the root of the hierarchy may do both"),
        pytest.param(2, {}, "/cotenant", id="beside our own group"),
        pytest.param(
            2, {"own": "/unit/agent"}, "/unit/cotenant", id="in a unit that is delegated, beside our subgroup"
        ),
        pytest.param(
            2, {"own": "/init", "real_root": False}, "/cotenant", id="in a container that has put us into a group"
        ),
    ],
)
def test_where_groups_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, layout: dict[str, Any], base: str
) -> None:
    kernel = Kernel(tmp_path, monkeypatch, version, **layout)
    if layout.get("own") == "/unit/agent":
        kernel.hand_on(kernel.root, "memory")  # as systemd does for a unit with Delegate=yes
    groups = kernel.find()
    assert groups == MemoryGroups(kernel.root / base.strip("/"), version)
    assert [entry for entry in groups.base.iterdir() if entry.is_dir()] == [], "the trial is gone"
    job = groups.create("job.1.0", MIB)
    with subprocess.Popen(["sleep", "60"]) as process:
        groups.add(job, [process.pid])
        assert groups.members(job) == {process.pid}
        assert kernel.find() == groups, "an agent that follows finds it again"
        process.kill()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"controllers": "cpu io"}, id="without the controller"),
        pytest.param({"own": "/", "real_root": False}, id="in a container, in its uppermost group"),
        pytest.param({"closed": ("/", "/own")}, id="nothing is ours to write"),
        pytest.param({"own": "/unit/agent", "closed": ("/unit",)}, id="the unit is not delegated"),
    ],
)
def test_where_version_2_cannot_limit_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any]
) -> None:
    kernel = Kernel(tmp_path, monkeypatch, 2, **layout)
    if layout.get("own") == "/unit/agent":
        kernel.hand_on(kernel.root, "memory")
    before = kernel.groups()
    assert kernel.find() is None
    assert kernel.groups() == before, "nothing is left behind"


def test_a_parent_that_holds_processes_of_others_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(tmp_path, monkeypatch, 2, own="/unit/agent")
    kernel.hand_on(kernel.root, "memory")
    kernel.attach(kernel.root / "unit", 1)
    before = kernel.groups()
    assert kernel.find() is None
    assert kernel.groups() == before


def test_where_processes_cannot_be_moved_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group can be made and limited: somebody has left one that is ours in a parent that is not."""
    kernel = Kernel(tmp_path, monkeypatch, 2, own="/unit/agent")
    kernel.hand_on(kernel.root, "memory")
    kernel.hand_on(kernel.root / "unit", "memory")
    kernel.make(kernel.root / "unit" / "cotenant")
    kernel.closed = {kernel.root / "unit"}
    assert kernel.find() is None
    assert "/unit/cotenant" not in kernel.groups()


@pytest.mark.parametrize("text", ["", "0::/elsewhere/below\n", "9:name=systemd:/\n"])
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
    kernel = Kernel(tmp_path, monkeypatch, 1)
    cpu = CpuEnforcement([0], kernel.find())
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
    assert groups.members(groups.base / "hard.1.0") == {os.getpid()}
    assert "killed when together they outgrow" in cpu.guarantees(
        tmp_path / "hard.1", cpu.report(tmp_path / "hard.1", 0.0)
    )

    cpu.tend([tmp_path / "hard.1"])
    assert limit.exists()
    kernel.attach(kernel.root / "own", os.getpid())
    cpu.tend([])
    assert not limit.exists()
    cpu.close()
    assert not groups.base.exists()


def test_on_a_host_the_group_follows_the_share(tmp_path, monkeypatch):
    """Shares were put in force past the way of the job: one that had grown was killed at what it had first."""
    kernel = Kernel(tmp_path, monkeypatch, 1)
    monkeypatch.setattr(host, "find_groups", lambda _: kernel.find())
    gpus = [GpuInfo("g", "cpu-core", 0, 1 << 30, {"CUDA_VISIBLE_DEVICES": ""}, (0,))]
    backend, job_dir = host.HostEnforcement(tmp_path, gpus, EnforcementSettings()), tmp_path / "hard.1"
    job_dir.mkdir()
    backend.admit(job_dir, gpus, [Share("g", 600 * MIB, 1.0)], "hard")
    (limit,) = kernel.root.rglob("hard.1.0/memory.limit_in_bytes")
    for revision, (size, allowed) in enumerate(((600, 856), (4096, 5120), (600, 856))):
        backend.apply(job_dir, [Share("g", size * MIB, 1.0)], 1, revision)
        assert limit.read_text() == str(allowed * MIB)
    assert backend.in_force(job_dir) == (1, 2)
    backend.close()


def test_the_group_of_a_job_that_is_being_started_stays(tmp_path, monkeypatch):
    """The enforcement loop knows of a job only once it runs; its group is empty until then."""
    kernel = Kernel(tmp_path, monkeypatch, 1)
    cpu = CpuEnforcement([0], kernel.find())
    gpus = [GpuInfo("g", "cpu-core", 0, 1 << 30, {"CUDA_VISIBLE_DEVICES": ""}, (0,))]
    started, failed = tmp_path / "started.1", tmp_path / "failed.1"
    for job_dir in (started, failed):
        job_dir.mkdir()
        cpu.admit(job_dir, gpus, [Share("g", 600 * MIB, 1.0)], "hard")
    base = cpu._groups.base
    cpu.tend([])
    assert (base / "started.1.0").is_dir()
    assert (base / "failed.1.0").is_dir()
    shutil.rmtree(failed)  # as the launcher does when a start fails
    cpu.tend([])
    assert (base / "started.1.0").is_dir()
    assert not (base / "failed.1.0").exists()
    cpu.tend([started])
    cpu.tend([])  # it ran, and has ended
    assert not (base / "started.1.0").exists()


def test_a_group_that_is_gone_is_not_said_to_hold(tmp_path, monkeypatch):
    kernel = Kernel(tmp_path, monkeypatch, 1)
    cpu = CpuEnforcement([0], kernel.find())
    gpus = [GpuInfo("g", "cpu-core", 0, 1 << 30, {"CUDA_VISIBLE_DEVICES": ""}, (0,))]
    job_dir = tmp_path / "hard.1"
    job_dir.mkdir()
    cpu.admit(job_dir, gpus, [Share("g", 600 * MIB, 1.0)], "hard")
    assert "killed when together" in cpu.guarantees(job_dir, cpu.report(job_dir, 0.0))
    (cpu._groups.base / "hard.1.0").rmdir()
    said = cpu.guarantees(job_dir, cpu.report(job_dir, 0.0))
    assert said.endswith("its memory group is gone: its processes are not held together")


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
