"""What is claimed about the ``cpu`` device, and how each claim is put to the test."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.colocation.checkpoint import suspend_times
from benchmarks.colocation.devices import CpuDevice
from benchmarks.colocation.facts.checks import (
    GIB,
    MIB,
    SHARE_ERROR,
    Check,
    Context,
    Evidence,
    Finding,
    Unknown,
    core_of,
    share_of_core,
    state_of,
    wait_for,
)
from benchmarks.colocation.facts.groups import GROUP_CHECKS

_SPIN = "import os, sys\nos.nice(int(sys.argv[1]))\nprint('go', flush=True)\nwhile True: pass"
_DOZE = "import time\nprint('go', flush=True)\ntime.sleep(600)"
_CLOCK_ERROR_S = 0.005


def clock_is_exact(context: Context) -> Finding:
    """Read the CPU clock of a training process from outside and compare with its own."""
    load = context.load(core=context.core)
    load.answer()
    before = _cpu_s(load.pid)
    own = load.ask("run", seconds=1.0)["cpu_s"]
    outside = _cpu_s(load.pid) - before
    return Finding(
        abs(outside - own) < _CLOCK_ERROR_S,
        {"own_s": own, "outside_s": outside, "difference_ms": 1000 * (outside - own)},
    )


def affinity_is_live(context: Context) -> Finding:
    """Move a running training process to another core."""
    others = sorted(os.sched_getaffinity(0) - {context.core})
    if not others:
        raise Unknown("this program may use one core only")
    load = context.load(core=context.core)
    load.answer()
    load.tell("run", seconds=1.0)
    if wait_for(lambda: state_of(load.pid) == "R" and core_of(load.pid) == context.core, 0.5) is None:
        raise Unknown("the load was not seen on its core")
    for thread in Path(f"/proc/{load.pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {others[0]})
    moved_s = wait_for(lambda: core_of(load.pid) == others[0], 0.5)
    answer = load.answer()
    return Finding(moved_s is not None and moved_s < 0.1, {"moved_after_s": moved_s, "steps": answer["steps"]})


def stopping_pauses(context: Context) -> Finding:
    """SIGSTOP in the middle of training, half a second of nothing, SIGCONT."""
    load = context.load(core=context.core)
    load.answer()
    typical = load.ask("run", seconds=0.5)
    load.tell("run", seconds=2.5)
    time.sleep(0.5)
    began = time.monotonic()
    load.kill(signal.SIGSTOP)
    stopped_s = wait_for(lambda: state_of(load.pid) == "T", 1.0)
    cpu_s = _cpu_s(load.pid)
    time.sleep(0.5)
    used_s = _cpu_s(load.pid) - cpu_s
    resumed = time.monotonic()
    load.kill(signal.SIGCONT)
    running_s = wait_for(lambda: state_of(load.pid) != "T", 1.0)
    answer = load.answer()
    evidence = {
        "stopped_after_s": stopped_s,
        "cpu_while_stopped_s": used_s,
        "running_after_s": running_s,
        "first_step_done_after_s": answer["longest"][1] - resumed,
        "step_s": 1 / typical["rate"] if typical["rate"] else None,
        "gap_covers_the_pause": answer["longest"][0] <= began + 0.1 and answer["longest"][1] >= resumed,
        "suspend_times": suspend_times(load.pid, CpuDevice()),
    }
    return Finding(stopped_s is not None and used_s == 0.0 and bool(evidence["gap_covers_the_pause"]), evidence)


def memory_limit_fails_alone(context: Context) -> Finding:
    """A limit set by the process itself: an allocation over it is an error inside it, and nothing happens next door."""
    load, neighbour = context.load(core=context.core), context.load(core=context.core)
    load.answer()
    neighbour.answer()
    neighbour.tell("run", seconds=2.0)
    evidence: Evidence = {}
    for which in ("data", "as"):
        load.ask("limit", which=which, mib=256)
        evidence[f"below_{which}"] = load.ask("hold", mib=64)["ok"]
        over = load.ask("hold", mib=512)
        evidence[f"over_{which}"] = over.get("error", "it was given")
        load.ask("drop")
        load.ask("limit", which=which, mib=8 * GIB // MIB)
    evidence["steps_after"] = load.ask("run", seconds=0.2)["steps"]
    evidence["neighbour_longest_s"] = neighbour.answer()["longest_s"]
    refused = all(evidence[f"below_{w}"] and evidence[f"over_{w}"] != "it was given" for w in ("data", "as"))
    return Finding(refused and evidence["steps_after"] > 0, evidence)


def memory_limit_is_live(context: Context) -> Finding:
    """Set, tighten and lift RLIMIT_DATA of a running process from outside with prlimit(2)."""
    load = context.load(core=context.core)
    load.answer()
    data = int(Path(f"/proc/{load.pid}/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
    hard = resource.prlimit(load.pid, resource.RLIMIT_DATA)[1]
    resource.prlimit(load.pid, resource.RLIMIT_DATA, (data + 256 * MIB, hard))
    evidence: Evidence = {"below": load.ask("hold", mib=64)["ok"], "over": load.ask("hold", mib=512)["ok"]}
    resource.prlimit(load.pid, resource.RLIMIT_DATA, (hard, hard))
    evidence["lifted"] = load.ask("hold", mib=512)["ok"]
    resource.prlimit(load.pid, resource.RLIMIT_DATA, (data, hard))
    try:
        evidence["steps_below_what_is_in_use"] = load.ask("run", seconds=0.2)["steps"]
    except Unknown as error:
        evidence["steps_below_what_is_in_use"] = str(error)
    return Finding(evidence["below"] and not evidence["over"] and evidence["lifted"], evidence)


def neighbour_survives_a_kill(context: Context) -> Finding:
    """SIGKILL of a training process while another trains on the same core."""
    victim, neighbour = context.load(core=context.core), context.load(core=context.core)
    victim.answer()
    neighbour.answer()
    victim.tell("run", seconds=10.0)
    neighbour.tell("run", seconds=2.0)
    time.sleep(1.0)
    victim.kill()
    answer = neighbour.answer()
    alone = neighbour.ask("run", seconds=0.5)
    evidence = {"neighbour_steps": answer["steps"], "longest_s": answer["longest_s"], "rate_alone_after": alone["rate"]}
    return Finding(answer["steps"] > 0 and answer["longest_s"] < 0.5, evidence)


def duty_is_kept(context: Context) -> Finding:
    """A cap on CPU time at step boundaries at three targets."""
    load = context.load(core=context.core)
    load.answer()
    reached = {target: share_of_core(load, duty=target) for target in (0.25, 0.5, 0.75)}
    errors = {target: value - target for target, value in reached.items()}
    return Finding(max(map(abs, errors.values())) <= SHARE_ERROR, {"reached": reached, "error": errors})


def sampler_is_cheap(context: Context) -> Finding:
    """Ten readings a second of four processes."""
    device = CpuDevice()
    pids = {f"member {number}": _python(context, _DOZE).pid for number in range(4)}
    device.start_sampling(pids)
    time.sleep(3.0)
    readings = device.stop_sampling()
    share = readings.cost_s / readings.seconds
    return Finding(share < 0.01, {"share_of_a_core": share, "ticks": readings.ticks, "processes": len(pids)})


def torch_starts_quickly(context: Context) -> Finding:
    """Start a process that imports torch and trains one step."""
    load = context.load(core=context.core)
    ready = load.answer()
    evidence = {
        "ready_after_s": time.monotonic() - load.started,
        **{key: ready[key] for key in ("import_s", "build_s", "first_step_s", "resident_bytes")},
    }
    return Finding(evidence["ready_after_s"] < 10 and ready["resident_bytes"] < GIB // 2, evidence)


def nice_separates(context: Context) -> Finding:
    """Two busy processes of one session on one core, one of them at nice 10."""
    polite = _polite_share(context, own_session=False)
    return Finding(polite < 0.2, {"share_of_the_nice_one": polite})


def nice_separates_sessions(context: Context) -> Finding:
    """The same with a session for each: autogroups, where the kernel has them, are equal to each other."""
    polite = _polite_share(context, own_session=True)
    switch = Path("/proc/sys/kernel/sched_autogroup_enabled")
    enabled = switch.read_text(encoding="ascii").strip() if switch.exists() else None
    return Finding(polite < 0.2, {"share_of_the_nice_one": polite, "sched_autogroup_enabled": enabled})


def _polite_share(context: Context, *, own_session: bool) -> float:
    pids = [_python(context, _SPIN, niceness, core=context.core, own_session=own_session).pid for niceness in (0, 10)]
    before = [_cpu_s(pid) for pid in pids]
    time.sleep(2.0)
    used = [_cpu_s(pid) - since for pid, since in zip(pids, before, strict=True)]
    return used[1] / sum(used)


def foreign_load_is_seen(context: Context) -> Finding:
    """What the device calls foreign, against the CPU time of a stranger that is known here."""
    device = CpuDevice()
    member = context.load(core=context.core)
    member.answer()
    share_of_core(member, seconds=0.5)  # there must be no other strangers
    stranger = _python(context, _SPIN, 0, core=context.core)
    member.tell("run", seconds=3.0, duty=0.5)
    time.sleep(0.2)
    device.start_sampling({"member": member.pid})
    before = _cpu_s(stranger.pid)
    time.sleep(2.0)
    used = _cpu_s(stranger.pid) - before
    readings = device.stop_sampling()
    assert readings.foreign_s is not None
    evidence = {"told_s": readings.foreign_s, "true_s": used, "difference_s": readings.foreign_s - used}
    return Finding(abs(evidence["difference_s"]) < 0.06, {**evidence, "window_s": readings.seconds})


def _python(
    context: Context, code: str, *arguments: int, core: int | None = None, own_session: bool = False
) -> subprocess.Popen[bytes]:
    """A small Python process that has said it is there; it ends with the check."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, start_new_session=own_session
    )
    context.stack.callback(_end, process)
    if core is not None:
        os.sched_setaffinity(process.pid, {core})
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _cpu_s(pid: int) -> float:
    """CPU time of a process with all its threads, see ``clock_getcpuclockid(3)``."""
    return time.clock_gettime((~pid << 3) | 2)


CHECKS = (
    Check("cpu_clock", "The CPU clock of another process agrees with its own within 5 ms", clock_is_exact),
    Check("affinity", "A new affinity takes effect on a running process within 0.1 s", affinity_is_live),
    Check("sigstop", "A stopped process uses no CPU time and goes on where it was", stopping_pauses),
    Check("duty", "A cap on CPU time at step boundaries is kept within .02 at .25, .5 and .75", duty_is_kept),
    Check("sampler_cost", "Reading four processes ten times a second takes less than 1 % of a core", sampler_is_cheap),
    Check("foreign_load", "Load of strangers on the core is told within 0.06 s of a 2 s window", foreign_load_is_seen),
    Check("kill_neighbour", "Killing a process does not disturb its neighbour", neighbour_survives_a_kill),
    Check(
        "memory_rlimit",
        "Over RLIMIT_DATA or RLIMIT_AS an allocation fails inside the process, which goes on, as does its neighbour",
        memory_limit_fails_alone,
    ),
    Check(
        "memory_prlimit", "RLIMIT_DATA of a running process can be set and lifted from outside", memory_limit_is_live
    ),
    *GROUP_CHECKS,
    Check("start_up", "A bare torch process is ready within 10 s and takes less than 0.5 GiB", torch_starts_quickly),
    Check("nice", "nice 10 leaves less than 20 % to the nicer of two processes of one session", nice_separates),
    Check(
        "nice_sessions",
        "nice 10 leaves less than 20 % to the nicer of two processes with a session each",
        nice_separates_sessions,
    ),
)
