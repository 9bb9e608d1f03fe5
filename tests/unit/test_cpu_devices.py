"""How a host is cut into devices, and what is read from Linux to do so."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.actors.devices.cpu import CpuBackend, cpu_gpus
from cotenant.actors.devices.procfs import (
    CoreClocks,
    Process,
    ProcessStat,
    ProcessTable,
    Reading,
    memory_limit_bytes,
    memory_total_bytes,
    parse_stat,
)
from cotenant.actors.devices.registry import create_backend
from cotenant.configs.settings import DeviceSettings

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cores_per_gpu", "count", "cores", "want"),
    [
        (1, None, [0, 1], [(0,), (1,)]),
        (2, None, [0, 1, 2, 3, 4], [(0, 1), (2, 3)]),
        (2, 2, [3, 5, 7, 9], [(3, 5), (7, 9)]),  # the cores this process may use, not those of the machine
        (1, 3, [0, 1], [(0,), (1,), (0,)]),  # used again
        (2, 2, [0, 1, 2], [(0, 1), (0, 2)]),
        (1, 1, [0, 1], [(0,)]),
    ],
)
def test_slices(cores_per_gpu: int, count: int | None, cores: list[int], want: list[tuple[int, ...]]) -> None:
    gpus = cpu_gpus(DeviceSettings(cores_per_gpu=cores_per_gpu), "h", count, cores)
    assert [gpu.cores for gpu in gpus] == want


@pytest.mark.parametrize(
    ("host", "want"),
    [("node-1", "cpu-node-1-0"), ("node.example_org-ab12cd", "cpu-node-example-org-ab12cd-0"), ("..a..", "cpu-a-0")],
)
def test_gpu_ids(host: str, want: str) -> None:
    assert cpu_gpus(DeviceSettings(), host, 1, [0])[0].gpu_id == want


def test_memory_is_the_setting_or_an_equal_part_of_the_host() -> None:
    assert [gpu.memory_bytes for gpu in cpu_gpus(DeviceSettings(memory_bytes=GIB), "h", 2, [0, 1])] == [GIB, GIB]
    found = cpu_gpus(DeviceSettings(), "h", 4, [0, 1])
    assert sum(gpu.memory_bytes for gpu in found) <= 0.8 * memory_total_bytes()
    assert all(gpu.physical_memory_bytes == memory_total_bytes() for gpu in found)


@pytest.mark.parametrize(
    ("settings", "host", "message"),
    [
        (DeviceSettings(cores_per_gpu=3), "h", "device.cores_per_gpu: 3 is not accepted; give 1 to 2"),
        (DeviceSettings(memory_bytes=1 << 60), "h", f"device.memory_bytes: {1 << 60} is not accepted; give 1 to "),
        (DeviceSettings(), "...", "host name: '...' is not accepted"),
    ],
)
def test_refused(settings: DeviceSettings, host: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        cpu_gpus(settings, host, None, [0, 1])


def test_devices_on_the_same_cores_say_so() -> None:
    backend = CpuBackend(DeviceSettings(), "h", count=200)
    notes = [device.note for device in backend.sample().devices]
    assert all("shares cores with device" in note for note in notes)
    backend.close()


@pytest.mark.parametrize(
    ("setting", "asked", "want"), [(3, None, 3), (3, 2, 2), (None, 2, 2)], ids=["setting", "host wins", "host"]
)
def test_the_registry_takes_the_count_of_the_host_before_the_setting(
    setting: int | None, asked: int | None, want: int
) -> None:
    backend = create_backend(DeviceSettings(count=setting), "h", asked)
    assert len(backend.discover()) == want
    backend.close()


def test_the_registry_wants_a_recording_for_replay() -> None:
    with pytest.raises(ValueError, match=r"device\.replay_file: None is not accepted"):
        create_backend(DeviceSettings(backend="replay"), "h", None)


def test_a_command_name_may_look_like_anything() -> None:
    after_name = "S 12 34 56 0 -1 4194304 98 0 0 0 1 2 300 45 20 0 1 0 88515 3133440 355"
    want = ProcessStat(parent_pid=12, session=56, reaped_ns=3_450_000_000, start_ticks=88515)
    for name in ("python", "a) R (b", "tmux: server", ")"):
        assert parse_stat(f"7 ({name}) {after_name}\n".encode()) == want


@pytest.mark.parametrize(
    ("own", "files", "want"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{GIB}\n"}, GIB),
        ("0::/a/b\n", {"a/b/memory.max": f"{GIB // 2}\n", "a/memory.max": f"{GIB}\n"}, GIB // 2),
        ("0::/\n", {}, None),
        ("0::/host/only\n", {"memory.max": f"{GIB}\n"}, GIB),  # inside a container
        ("4:cpu,memory:/j\n0::/\n", {"memory/j/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ("4:memory:/j\n", {"memory/j/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("3:cpuset:/j\n", {"memory/j/memory.limit_in_bytes": f"{GIB}\n"}, None),
    ],
)
def test_memory_limits_of_both_cgroup_versions(
    tmp_path: Path, own: str, files: dict[str, str], want: int | None
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        file = tmp_path / "mnt" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert memory_limit_bytes(tmp_path / "mnt", tmp_path / "own") == want


def test_core_clocks_run_with_the_machine() -> None:
    clocks = CoreClocks()
    idle = clocks.idle_s()
    clocks.close()
    assert sorted(idle) == list(range(len(idle)))
    assert all(seconds > 0 for seconds in idle.values())


class ScriptedProcess(Process):
    """A process whose readings a test sets. Nothing of the machine is opened."""

    __slots__ = ("alive", "cpu_ns", "line")

    def __init__(self, pid: int, line: ProcessStat) -> None:
        self.pid, self.line, self.cpu_ns, self.alive = pid, line, 0, True

    def read(self) -> Reading:
        self._check()
        return Reading(self.cpu_ns, {0}, 1000)

    def stat(self) -> ProcessStat:
        self._check()
        return self.line

    def io_bytes(self) -> tuple[int, int]:
        self._check()
        return 0, 0

    def _check(self) -> None:
        if not self.alive:
            raise ProcessLookupError(self.pid)

    def close(self) -> None:
        pass


class ScriptedTable(ProcessTable):
    """A machine whose processes a test makes."""

    def __init__(self) -> None:
        self.processes: dict[int, ScriptedProcess] = {}
        self.descriptors = 100
        self.begun = 0
        self.told = True  # new processes are, by the number that was given last
        self.listed = 0

    def newest(self) -> int:
        return self.begun

    def start(self, pid: int, parent: int, session: int = 1) -> ScriptedProcess:
        self.begun += self.told
        self.processes[pid] = ScriptedProcess(pid, ProcessStat(parent, session, 0, pid))
        return self.processes[pid]

    def end(self, pid: int) -> None:
        self.processes.pop(pid).alive = False

    def pids(self) -> set[int]:
        self.listed += 1
        return set(self.processes)

    def stat(self, pid: int) -> ProcessStat:
        if pid not in self.processes:
            raise ProcessLookupError(pid)
        return self.processes[pid].line

    def open(self, pid: int) -> Process:
        if pid not in self.processes:
            raise ProcessLookupError(pid)
        if self.descriptors == 0:
            raise OSError(24, "Too many open files")
        return self.processes[pid]


class Scripted:
    """A backend on a scripted machine, with one job of root 10."""

    def __init__(self) -> None:
        self.table = ScriptedTable()
        self.now = 0.0
        self.backend = CpuBackend(DeviceSettings(), "h", 1, processes=self.table, clock=lambda: self.now)
        self.gpu_id = self.backend.discover()[0].gpu_id
        self.root = self.table.start(10, parent=1)
        self.backend.watch("job", [self.gpu_id], 10)
        self.backend.sample()

    def busy_s(self) -> float | None:
        self.now += 2.0  # longer than any pause between two looks for new processes
        (job,) = self.backend.sample().jobs
        return job.busy_s

    def reaped(self, pid: int, seconds: float) -> None:
        """Let the process's stat line say that its ended children used so much."""
        process = self.table.processes[pid]
        process.line = ProcessStat(
            process.line.parent_pid, process.line.session, round(seconds * 1e9), process.line.start_ticks
        )


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


def test_orphans_reaped_by_a_subreaper_at_once_are_counted_once(scripted: Scripted) -> None:
    table = scripted.table
    command, worker = table.start(11, parent=10), table.start(12, parent=11)
    command.cpu_ns, worker.cpu_ns = 2_000_000_000, 1_000_000_000
    assert scripted.busy_s() == 3.0
    # Command and worker end and are reaped by the root between two looks: the worker's last known parent is gone.
    for pid in (11, 12):
        table.end(pid)
    scripted.reaped(10, 3.1)
    assert scripted.busy_s() == pytest.approx(3.1)
    assert scripted.busy_s() == pytest.approx(3.1)


def test_the_time_of_a_child_that_nobody_waits_for_is_kept(scripted: Scripted) -> None:
    child = scripted.table.start(11, parent=10)
    child.cpu_ns = 500_000_000
    assert scripted.busy_s() == 0.5
    scripted.table.end(11)
    assert scripted.busy_s() == 0.5


def test_a_number_given_again_inside_the_job_is_a_new_process(scripted: Scripted) -> None:
    first = scripted.table.start(11, parent=10)
    first.cpu_ns = 500_000_000
    assert scripted.busy_s() == 0.5
    scripted.table.end(11)
    second = scripted.table.start(11, parent=10)
    second.cpu_ns = 200_000_000
    scripted.busy_s()
    assert scripted.busy_s() == pytest.approx(0.7)


def test_a_number_given_to_a_stranger_is_not_the_jobs(scripted: Scripted) -> None:
    scripted.table.start(11, parent=10)
    scripted.busy_s()
    scripted.table.end(11)
    scripted.table.start(11, parent=1).cpu_ns = 900_000_000
    scripted.busy_s()
    assert scripted.busy_s() == 0.0


def test_watching_another_job_loses_no_new_process_of_the_first(scripted: Scripted) -> None:
    scripted.table.start(11, parent=10).cpu_ns = 500_000_000
    scripted.table.start(20, parent=1)
    scripted.backend.watch("other", [scripted.gpu_id], 20)
    scripted.now += 2.0
    assert {job.job_id: job.busy_s for job in scripted.backend.sample().jobs} == {"job": 0.5, "other": 0.0}


def test_without_descriptors_the_job_has_no_readings_until_there_are_some(scripted: Scripted) -> None:
    scripted.table.descriptors = 0
    child = scripted.table.start(11, parent=10)
    child.cpu_ns = 500_000_000
    assert scripted.busy_s() is None
    grandchild = scripted.table.start(12, parent=11)
    grandchild.cpu_ns = 250_000_000
    assert scripted.busy_s() is None
    scripted.table.descriptors = 100
    assert scripted.busy_s() == 0.75


def test_processes_are_listed_only_when_some_have_come_or_gone(scripted: Scripted) -> None:
    """Else once a second, in case that somebody has come unannounced."""
    table, found = scripted.table, []

    def looked() -> bool:
        before = table.listed
        scripted.now += 0.1
        found.extend(scripted.backend.sample().jobs)
        return table.listed > before

    scripted.now += 2.0
    assert [looked() for _ in range(5)] == [True, False, False, False, False]
    table.start(11, parent=10).cpu_ns = 500_000_000
    assert (looked(), found[-1].busy_s, looked()) == (True, 0.5, False)
    table.end(11)
    scripted.reaped(10, 0.6)
    looked()
    assert (looked(), found[-1].busy_s, looked()) == (True, pytest.approx(0.6), False)
    table.told = False  # as where /proc/loadavg is somebody else's
    table.start(12, parent=10).cpu_ns = 500_000_000
    while not looked():
        assert len(found) < 40
    assert found[-1].busy_s == pytest.approx(1.1)
    table.start(13, parent=10).cpu_ns = 500_000_000
    assert (looked(), found[-1].busy_s) == (True, pytest.approx(1.6))


@pytest.mark.parametrize("ends", [False, True])
def test_a_root_that_could_not_be_opened_at_first(scripted: Scripted, ends: bool) -> None:
    scripted.backend.unwatch("job")
    scripted.table.descriptors = 0
    scripted.backend.watch("job", [scripted.gpu_id], 10)
    assert scripted.busy_s() is None
    if ends:
        scripted.table.end(10)
    scripted.table.descriptors = 100
    assert scripted.busy_s() == (None if ends else 0.0)
