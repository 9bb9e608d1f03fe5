"""The measurement suite with real member processes and tiny workloads: whole runs, every fault, nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from benchmarks.colocation import cli, facts, visits
from benchmarks.colocation.modes import Mode, modes_for
from benchmarks.colocation.mps import MpsError, MpsRefused
from benchmarks.colocation.pool import Limits, Pool
from benchmarks.colocation.process import Launch, MemberFailure, MemberKey, collect
from benchmarks.colocation.records import DiskFull
from support import alive, wait_until

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
MODULE = "colocation_spin"
MANY = Limits(members=10, memory_bytes=None, member_bytes=0, parallel=2, start_s=10.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Members find the tiny workloads, and one that says nothing is given up soon."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(cli, "Method", partial(visits.Method, answer_s=0.8, lead_s=0.02, mix_steps=3))


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the command on an output folder of the test's own; gives its exit code and what it printed."""

    def run(*options: str) -> tuple[int, str]:
        code = cli.main(["--out", str(tmp_path / "out"), "--window", "0.1", *options], MODULE)
        assert members_of(os.getpid()) == []
        output = capsys.readouterr()
        return code, output.out + output.err

    return run


@pytest.fixture
def pool(tmp_path):
    """Makes pools that are closed in the end."""
    pools: list[Pool] = []

    def make(limits: Limits = MANY) -> Pool:
        pools.append(Pool(Launch("cpu", "cpu", None, MODULE, tmp_path), limits))
        return pools[-1]

    yield make
    for one in pools:
        one.close()


def records(folder: Path, name: str) -> list[dict[str, object]]:
    file = folder / "out" / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def members_of(controller: int) -> list[int]:
    """Members that a process started, and that live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"benchmarks.colocation.member" in words and words[words.index(b"--parent") + 1] == b"%d" % controller:
                found.append(int(entry.name))
    return found


def test_a_run_measures_everything_and_another_has_nothing_left_to_do(run, tmp_path):
    code, text = run("--workloads", "spin-4,noisy-2", "--modes", "timeslice")
    assert code == 0, text
    windows = records(tmp_path, "windows.jsonl")
    assert [window["visit"] for window in windows[:6]] == 3 * ["timeslice/noisy-2#1"] + 3 * ["timeslice/spin-4#1"]
    assert len(windows) == 2 * 3 + 3 * 8
    assert all(window["rate"] > 0 and window["util_mean"] > 0 and window["foreign_s"] >= 0 for window in windows)
    pair = [window for window in windows if window["visit"] == "timeslice/noisy-2+spin-4#1"]
    assert [(window["kind"], window["position"], window["slot"]) for window in pair] == [
        ("solo", 0, 0),
        ("solo", 1, 1),
        ("shared", 2, 0),
        ("shared", 2, 1),
        ("solo", 3, 0),
        ("solo", 4, 1),
        ("shared", 5, 0),
        ("shared", 5, 1),
    ]
    extras = records(tmp_path, "solo_extras.jsonl")
    assert {extra["member"] for extra in extras} == {"spin-4", "noisy-2"}
    assert all(extra["mix"] == {"gemm": 1.0} and extra["start_s"] > 0 for extra in extras)
    assert (tmp_path / "out" / "tables" / "pairs.parquet").exists()
    assert '{"event": "window"}' in (tmp_path / "out" / "logs" / "noisy-2.log").read_text()

    code, text = run("--workloads", "spin-4,noisy-2", "--modes", "timeslice")
    assert code == 0, text
    assert records(tmp_path, "windows.jsonl") == windows


def test_a_duty_cycle_is_kept_together_and_not_alone(run, tmp_path):
    code, text = run("--workloads", "spin-4", "--modes", "duty", "--window", "0.2")
    assert code == 0, text
    shared = [window for window in records(tmp_path, "windows.jsonl") if window["kind"] == "shared"]
    assert {window["share"] for window in shared} == {0.5, 0.7, 0.3}
    for window in shared:
        assert window["busy_s"] / window["window_s"] <= window["share"] + 0.15
    alone = [window for window in records(tmp_path, "windows.jsonl") if window["kind"] == "solo"]
    assert {window["share"] for window in alone} == {None}


def test_what_goes_wrong_in_one_member_is_noted_and_the_rest_goes_on(run, tmp_path):
    names = "dies-20,hangs-20,oom-late,spin-4"
    code, text = run("--workloads", names, "--modes", "timeslice")
    assert code == 0, text
    events = records(tmp_path, "events.jsonl")
    kinds = {(event["member"], event["event"]) for event in events}
    assert kinds == {
        ("dies-20", "died"),
        ("hangs-20", "hung"),
        ("oom-late", "does_not_fit"),
    }
    messages = {event["member"]: event["message"] for event in events}
    assert messages["dies-20"].startswith("it ended with exit code 3")
    assert "no more memory" in messages["oom-late"]
    for name in ("dies-20", "hangs-20"):
        assert sum(event["member"] == name for event in events) == 2
        assert f"workload {name}: it has failed 2 times; its remaining visits are skipped" in text
    assert sum(event["member"] == "oom-late" for event in events) == 1
    assert "workload oom-late: it does not fit into memory even alone" in text
    visited = {window["visit"] for window in records(tmp_path, "windows.jsonl")}
    assert visited == {"timeslice/spin-4#1", "timeslice/spin-4+spin-4#1"}


class RefusingMps(Mode):
    """A mode whose daemon does not start, or whose server takes no clients."""

    name = "mps"
    limits_memory = True

    def __init__(self, device, *, starts: bool, clients: bool) -> None:
        super().__init__(device)
        self._starts, self._clients = starts, clients
        self.running = 0

    def member_env(self, share=None, memory_bytes=None):
        refused = "CUDA error: MPS client failed to connect to the MPS control daemon or the MPS server"
        return super().member_env() | ({} if self._clients else {"SPIN_REFUSES": refused})

    def start(self) -> None:
        if not self._starts:
            raise MpsError("nvidia-cuda-mps-control -d failed (1): no permission")
        self.running += 1

    def stop(self) -> None:
        self.running -= 1


@pytest.mark.parametrize(
    ("works", "reason"),
    [
        ({"starts": False, "clients": True}, "no permission"),
        ({"starts": True, "clients": False}, "MPS client failed to connect"),
    ],
)
def test_a_mode_that_is_refused_is_given_up(run, tmp_path, monkeypatch, works, reason):
    made: list[RefusingMps] = []

    def modes(device):
        made.append(RefusingMps(device, **works))
        return modes_for(device) | {"mps": made[-1]}

    monkeypatch.setattr(cli, "modes_for", modes)
    code, text = run("--workloads", "spin-4", "--modes", "mps,timeslice")
    assert code == 0, text
    (event,) = records(tmp_path, "events.jsonl")
    assert (event["event"], event["member"]) == ("mps_refused", None)
    assert reason in event["message"]
    assert "mode mps is given up, its visits are skipped" in text
    modes_seen = {window["mode"] for window in records(tmp_path, "windows.jsonl")}
    assert modes_seen == {"timeslice"}
    assert made[0].running == 0


def test_without_a_mode_left_the_run_ends(run, monkeypatch):
    monkeypatch.setattr(cli, "modes_for", lambda device: {"mps": RefusingMps(device, starts=False, clients=True)})
    code, text = run("--workloads", "spin-4", "--modes", "mps")
    assert code == 0, text
    assert "0 visits, 0 windows; 1 mps_refused" in text


class FaultyMps(RefusingMps):
    """A mode that refuses clients from a member's death to its next start."""

    def __init__(self, device) -> None:
        super().__init__(device, starts=True, clients=True)
        self.taken_off: list[int] = []
        self.starts = 0

    def start(self) -> None:
        super().start()
        self.starts += 1

    def check(self) -> None:
        if self.taken_off and self.starts == 1:
            raise MpsRefused("MPS server 1 is in state FAULT")

    def terminate_client(self, pid: int) -> None:
        self.taken_off.append(pid)


def test_a_faulty_mps_server_is_replaced_and_the_run_goes_on(run, tmp_path, monkeypatch):
    made: list[FaultyMps] = []

    def modes(device):
        made.append(FaultyMps(device))
        return {"mps": made[-1]}

    monkeypatch.setattr(cli, "modes_for", modes)
    code, text = run("--workloads", "dies-20,spin-4", "--modes", "mps")
    assert code == 0, text
    (mps,) = made
    assert (mps.starts, mps.running) == (2, 0)
    assert mps.taken_off
    visited = {window["visit"] for window in records(tmp_path, "windows.jsonl")}
    assert visited == {"mps/spin-4#1", "mps/spin-4+spin-4#1"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minutes", "0.001"], "--minutes: 0.001 is not accepted; the next visit needs at least 0."),
        (["--minutes", "-1"], "--minutes: -1 is not accepted; give a number above 0"),
        (["--minutes", "nan"], "--minutes: nan is not accepted"),
        (["--window", "0"], "--window: 0 is not accepted; give seconds from 0.1 to 600"),
        (["--occasion", "0"], "--occasion: 0 is not accepted; give 1 or more"),
        (["--workloads", "spin-4,x"], "--workloads: 'x' is not accepted; give some of spin-4, wait-4"),
        (["--workloads", ","], "--workloads: ',' is not accepted"),
        (["--modes", "mps"], "--modes: 'mps' is not accepted; give some of timeslice, duty"),
        (["--dry-run"], "--dry-run is for --device cuda"),
    ],
)
def test_what_is_not_accepted_starts_nothing(run, tmp_path, options, message):
    code, text = run("--workloads", "spin-4", *options)
    assert code == 2
    assert message in text
    assert records(tmp_path, "windows.jsonl") == []


def test_the_minutes_that_are_said_to_be_needed_are_enough(run, tmp_path):
    options = ["--workloads", "spin-4", "--modes", "timeslice"]
    _, text = run(*options, "--minutes", "0.001")
    needed = text.strip().rpartition(" ")[2]
    code, text = run(*options, "--minutes", needed)
    assert code == 0, text
    assert records(tmp_path, "windows.jsonl")[0]["visit"] == "timeslice/spin-4#1"


def test_a_plan_runs_nothing_and_writes_nothing(run, tmp_path):
    code, text = run("--workloads", "spin-4,wait-4", "--plan")
    assert code == 0
    assert "timeslice/spin-4+wait-4#1" in text
    assert "5 visits (2 alone, 3 pairs)" in text
    assert not (tmp_path / "out").exists()


def test_tables_are_left_for_later_where_their_libraries_are_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cotenant.forecasting.datasets.colocation", None)
    cli._make_tables(tmp_path)
    assert f"where it is, run: python -m benchmarks.colocation.tables {tmp_path}" in capsys.readouterr().out


def test_lists(run):
    code, text = run("--list")
    assert code == 0
    assert "spin-4" in text
    assert "mode duty" in text


def test_facts_are_checked_alone_or_before_measuring(run, tmp_path, monkeypatch):
    asked: list[tuple[str, Path, float]] = []
    monkeypatch.setattr(facts, "run", lambda device, out, dry_run, budget_s: asked.append((device, out, budget_s)))
    options = ["--workloads", "spin-4", "--modes", "timeslice", "--facts"]
    assert run(*options)[0] == 0
    assert records(tmp_path, "windows.jsonl") == []
    assert run(*options, "--minutes", "0.3")[0] == 0
    assert records(tmp_path, "windows.jsonl")
    assert asked == [("cpu", tmp_path / "out", facts.BUDGET_S), ("cpu", tmp_path / "out", pytest.approx(18.0))]


def test_a_damaged_last_line_costs_one_visit_and_another_method_is_refused(run, tmp_path):
    options = ["--workloads", "spin-4", "--modes", "timeslice"]
    assert run(*options)[0] == 0
    file = tmp_path / "out" / "windows.jsonl"
    whole = records(tmp_path, "windows.jsonl")
    file.write_bytes(file.read_bytes()[:-20])
    code, text = run(*options)
    assert code == 0, text
    again = records(tmp_path, "windows.jsonl")
    assert again[:3] == whole[:3]
    assert [window["visit"] for window in again] == [window["visit"] for window in whole]

    code, text = run(*options, "--window", "0.2")
    assert code == 2
    assert "holds figures with method" in text


def test_a_full_disk_ends_the_run_with_a_reason(run, monkeypatch):
    def full(path, records):
        raise DiskFull(errno.ENOSPC, "No space left on device; earlier visits are kept", str(path))

    monkeypatch.setattr("benchmarks.colocation.records._append", full)
    code, text = run("--workloads", "spin-4", "--modes", "timeslice")
    assert code == 1
    assert "No space left on device; earlier visits are kept" in text
    assert "make room and run the same command again" in text


@pytest.fixture
def background(tmp_path):
    """A run in a process of its own, once its first visit is complete; with the numbers of all that it started."""
    helpers = tmp_path / "helpers"
    helpers.mkdir()
    command = f"import sys; from benchmarks.colocation.cli import main; sys.exit(main(sys.argv[1:], {MODULE!r}))"
    options = ["--workloads", "helped-2,spin-4", "--modes", "timeslice", "--window", "0.2"]
    process = subprocess.Popen(
        [sys.executable, "-c", command, "--out", str(tmp_path / "out"), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{ROOT}:{ROOT / 'src'}", "SPIN_HELPERS": str(helpers)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: len(records(tmp_path, "windows.jsonl")) >= 6, 30, "two visits are complete")
        wait_until(lambda: len(members_of(process.pid)) >= 3, 10, "the members of the next visit run")
        started = [*members_of(process.pid), *(int(file.name) for file in helpers.iterdir())]
        started = [pid for pid in started if alive(pid)]  # a visit may be over in between
        assert started
        yield process, started
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_that_asks_for_an_end_gives_its_exit_code(number, capsys):
    handler, cores = signal.getsignal(number), os.sched_getaffinity(0)
    assert cli._under_signals(lambda: os.kill(os.getpid(), number)) == 128 + number
    assert f"ended by {number.name}" in capsys.readouterr().out
    assert signal.getsignal(number) is handler
    assert os.sched_getaffinity(0) == cores


def test_a_signal_ends_the_run_keeps_what_is_complete_and_leaves_nothing(background, tmp_path, run):
    process, started = background
    code, text = run("--workloads", "spin-4", "--window", "0.2")
    assert code == 2
    assert f"another run (process {process.pid}) works in it" in text
    before = records(tmp_path, "windows.jsonl")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "the visit in progress is discarded" in output
    assert "run the same command again to go on" in output
    wait_until(lambda: not [pid for pid in started if alive(pid)], 10, "all that it started has ended")
    after = records(tmp_path, "windows.jsonl")
    assert after[: len(before)] == before
    assert (tmp_path / "out" / "tables" / "samples.parquet").exists()


def test_a_killed_run_leaves_nothing_behind_and_can_go_on(background, tmp_path, run):
    process, started = background
    process.kill()
    wait_until(lambda: not [pid for pid in started if alive(pid)], 10, "everything it started is gone")
    process.wait()
    before = records(tmp_path, "windows.jsonl")
    code, text = run("--workloads", "spin-4", "--modes", "timeslice", "--window", "0.2", "--plan")
    assert (code, records(tmp_path, "windows.jsonl")) == (0, before), text


def test_the_least_recently_used_member_makes_room(pool):
    small = pool(Limits(members=2, memory_bytes=None, member_bytes=0, parallel=2, start_s=10.0))
    first, second, third = (MemberKey(name, 0) for name in ("spin-4", "wait-4", "noisy-2"))
    small.get([first])
    small.get([second])
    small.get([first])
    small.prepare([third])
    assert set(small.warm) == {first, second}
    small.get([third])
    assert set(small.warm) == {first, third}


def test_memory_limits_how_many_are_warm(pool):
    small = pool(Limits(members=9, memory_bytes=100, member_bytes=0, parallel=1, start_s=10.0))
    keys = [MemberKey("spin-4", 0), MemberKey("wait-4", 0)]
    small.get(keys[:1])
    small.note_memory("spin-4", 60)
    small.note_memory("wait-4", 60)
    small.get(keys[1:])
    assert small.warm == (keys[1],)
    assert len(small.get(keys)) == 2  # a visit's own members are started all the same


def test_a_member_that_never_becomes_ready_hangs(pool, monkeypatch):
    monkeypatch.setattr(Launch, "command", lambda self, workload: [sys.executable, "-S", "-c", "input(); input()"])
    slow = pool(Limits(members=2, memory_bytes=None, member_bytes=0, parallel=2, start_s=0.2))
    with pytest.raises(MemberFailure, match="hung: not ready within 0 s"):
        slow.get([MemberKey("spin-4", 0)])
    assert len(slow) == 0


def test_a_member_that_talks_nonsense_counts_as_dead(pool, monkeypatch):
    monkeypatch.setattr(Launch, "command", lambda self, workload: [sys.executable, "-S", "-c", "print('hello')"])
    with pytest.raises(MemberFailure, match=r"died: it said b'hello', which is not an answer"):
        pool().get([MemberKey("spin-4", 0)])


@pytest.mark.parametrize(
    ("name", "message"),
    [("broken-0", "died: RuntimeError: it cannot be built"), ("oom-0", "does_not_fit: MemoryError: no more memory")],
)
def test_a_member_that_cannot_start_says_why(pool, name, message):
    with pytest.raises(MemberFailure, match=message):
        pool().get([MemberKey(name, 0)])


def test_a_member_killed_from_outside_is_noticed_at_once(pool):
    (member,) = pool().get([MemberKey("spin-4", 0)])
    os.kill(member.pid, signal.SIGKILL)
    with pytest.raises(MemberFailure, match="died: it ended with signal SIGKILL"):
        collect([member], "window", deadline=time.monotonic() + 10.0)
