"""The ``cpu`` backend on real process trees: what is counted, where, and what is never lost or counted twice."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import wait_until

from cotenant.actors.devices.base import JobSample
from cotenant.actors.devices.cpu import CpuBackend
from cotenant.configs.settings import DeviceSettings

TOLERANCE_S = 0.06  # start and end of an interpreter, and the 10 ms steps in which reaped children are told
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")

PRELUDE = """
import ctypes, os, signal, subprocess, sys, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
def fork(child):
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(0)
    return pid
def step(word):
    print(word, flush=True)
    sys.stdin.readline()
"""

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core that is not the device's")


class Root:
    """A job's root process that runs a test's program, one step at a time."""

    def __init__(self, program: str, cores: set[int] | None) -> None:
        pin = "" if cores is None else f"os.sched_setaffinity(0, {cores})\n"
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", PRELUDE + pin + textwrap.dedent(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def next(self, word: str) -> None:
        """Wait until the program says ``word``, then let it go on."""
        self.wait_for(word)
        self.go()

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == word + "\n"

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        with self.process as process:
            process.kill()


class Bench:
    """A backend of two devices with one job on the first."""

    def __init__(self) -> None:
        self.backend = CpuBackend(DeviceSettings(), "host-a", count=2)
        self.gpu = self.backend.discover()[0]
        self.roots: list[Root] = []

    def start(self, program: str, pinned: bool = True) -> Root:
        root = Root(program, set(self.gpu.cores) if pinned else None)
        self.roots.append(root)
        return root

    def watch(self, root: Root) -> None:
        self.backend.watch("job", [self.gpu.gpu_id], root.pid)

    def read(self) -> JobSample:
        (job,) = self.backend.sample().jobs
        return job


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for root in bench.roots:
        root.end()
    bench.backend.close()


@two_cores
def test_time_counts_for_the_device_while_pinned_to_it_and_for_the_host_otherwise(bench: Bench) -> None:
    root = bench.start(
        f"""
        step("a"); burn(0.2); step("b")
        os.sched_setaffinity(0, {os.sched_getaffinity(0)}); step("c"); burn(0.1); step("d")
        """
    )
    root.wait_for("a")
    bench.watch(root)
    assert bench.read().memory_bytes > 1e6
    root.go()
    root.wait_for("b")
    bench.read()
    root.go()
    root.next("c")
    root.wait_for("d")
    job = bench.read()
    assert (job.busy_s, job.host_busy_s) == pytest.approx((0.2, 0.1), abs=TOLERANCE_S)
    assert job.memory_bytes == 0  # nothing of the job is on the device any more


def test_what_a_process_used_before_it_was_watched_does_not_count(bench: Bench) -> None:
    root = bench.start('burn(0.2); child = fork(lambda: (burn(0.1))); os.waitpid(child, 0); step("a")')
    root.wait_for("a")
    bench.watch(root)
    bench.backend.sample()
    assert bench.read().busy_s == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("sampled", [True, False], ids=["seen alive", "never seen"])
def test_the_time_of_ended_children_is_kept_and_counted_once(bench: Bench, sampled: bool) -> None:
    root = bench.start(
        """
        step("a")
        for _ in range(4):
            out, into = os.pipe(), os.pipe()
            child = fork(lambda: (burn(0.05), os.write(out[1], b"x"), os.read(into[0], 1)))
            os.read(out[0], 1)
            step("child")
            os.write(into[1], b"x")
            os.waitpid(child, 0)
            step("reaped")
        step("b")
        """
    )
    root.wait_for("a")
    bench.watch(root)
    root.go()
    for _ in range(4):
        for word in ("child", "reaped"):
            root.wait_for(word)
            if sampled:
                bench.read()
            root.go()
    root.wait_for("b")
    wait_until(lambda: bench.read().busy_s > 0.15, 10.0, "the children's time in the counter")
    assert bench.read().busy_s == pytest.approx(0.2, abs=TOLERANCE_S)


def test_a_whole_tree_counts_and_ends_without_loss(bench: Bench) -> None:
    root = bench.start(
        """
        step("a")
        def middle():
            kids = [fork(lambda: (burn(0.05))) for _ in range(3)]
            burn(0.05)
            for kid in kids: os.waitpid(kid, 0)
        os.waitpid(fork(middle), 0)
        step("b")
        """
    )
    root.wait_for("a")
    bench.watch(root)
    root.go()
    readings = []
    wait_until(lambda: readings.append(bench.read().busy_s) or readings[-1] > 0.17, 5.0, "the tree's time", 0.005)
    root.wait_for("b")
    wait_until(lambda: bench.read().busy_s == bench.read().busy_s, 10.0, "a counter at rest")
    assert bench.read().busy_s == pytest.approx(0.2, abs=TOLERANCE_S)
    assert readings == sorted(readings)


@pytest.mark.parametrize(
    ("setup", "detach"),
    [
        ("", ""),
        # PR_SET_CHILD_SUBREAPER, as the process that owns a command job has it.
        ("ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)", "os.setsid()"),
    ],
    ids=["same session", "own session under an adopting root"],
)
def test_a_daemon_whose_parent_has_ended_still_belongs_to_the_job(bench: Bench, setup: str, detach: str) -> None:
    root = bench.start(
        f"""
        {setup}
        step("a")
        into, out = os.pipe(), os.pipe()
        def daemon():
            os.read(into[0], 1); burn(0.1); os.write(out[1], b"x"); os.read(into[0], 1)
        def middle():
            {detach}
            fork(daemon)
        os.waitpid(fork(middle), 0)
        step("b"); os.write(into[1], b"x"); os.read(out[0], 1)
        step("c"); os.write(into[1], b"x"); step("d")
        """
    )
    root.wait_for("a")
    bench.watch(root)
    root.go()
    root.wait_for("b")
    bench.read()
    root.go()
    root.wait_for("c")
    assert bench.read().busy_s == pytest.approx(0.1, abs=TOLERANCE_S)
    root.go()
    root.wait_for("d")


def test_a_root_that_ended_but_was_not_waited_for_has_no_readings(bench: Bench) -> None:
    root = bench.start('step("a")')
    root.wait_for("a")
    bench.watch(root)
    assert bench.read().memory_bytes is not None
    root.process.kill()
    wait_until(lambda: bench.read().memory_bytes is None, 10.0, "no reading of a zombie")
    assert bench.read().busy_s is None


def test_a_job_lives_as_long_as_one_of_its_roots(bench: Bench) -> None:
    roots = [bench.start('step("a")') for _ in range(2)]
    for root in roots:
        root.wait_for("a")
        bench.watch(root)
    roots[0].end()
    assert bench.read().busy_s is not None
    roots[1].end()
    assert bench.read().busy_s is None


def test_a_root_that_does_not_exist_gives_no_readings(bench: Bench) -> None:
    root = bench.start("")
    root.end()
    bench.watch(root)
    assert bench.read().busy_s is None


@pytest.mark.skipif(not os.access(LAST_PID, os.W_OK), reason="choosing a process number takes root")
def test_a_stranger_with_the_number_of_a_dead_root_is_not_the_job(bench: Bench) -> None:
    root = bench.start('step("a")')
    root.wait_for("a")
    bench.watch(root)
    before = bench.read().busy_s
    assert before is not None
    root.end()
    for _ in range(50):  # another process of the machine may be faster
        LAST_PID.write_text(str(root.pid - 1))
        stranger = bench.start('burn(0.1); step("b")')
        if stranger.pid == root.pid:
            break
        stranger.end()
    else:
        pytest.skip("the number was always taken by others")
    stranger.wait_for("b")
    assert bench.read().busy_s is None
    bench.backend.unwatch("job")
    bench.watch(stranger)
    assert bench.read().busy_s == pytest.approx(0.0, abs=TOLERANCE_S)


def test_a_device_reads_what_its_jobs_do(bench: Bench) -> None:
    root = bench.start('step("a"); burn(0.2); step("b"); step("c")')
    root.wait_for("a")
    bench.watch(root)
    before = bench.backend.sample()
    root.go()
    root.wait_for("b")
    after = bench.backend.sample()
    device, other = after.devices
    assert device.util * (after.monotonic_s - before.monotonic_s) == pytest.approx(0.2, abs=TOLERANCE_S)
    assert device.memory_bytes == bench.read().memory_bytes
    assert (other.util, other.memory_bytes) == (0.0, 0.0)


def test_load_of_others_on_the_cores_is_noted(bench: Bench) -> None:
    stranger = bench.start('step("a"); burn(30)')
    stranger.next("a")
    wait_until(
        lambda: "other work uses" in bench.backend.sample().devices[0].note, 5.0, "a note about the load of others", 0.1
    )
