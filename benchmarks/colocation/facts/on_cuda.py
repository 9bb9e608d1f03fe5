"""What is claimed about a GPU and how it is shared, and how each claim is put to the test.

Nothing here changes the GPU: its modes, clocks and limits are read only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.colocation.facts.checks import Check, Context, Evidence, Finding, Load, Unknown
from benchmarks.colocation.facts.cuda_processes import PROCESS_CHECKS
from benchmarks.colocation.facts.cuda_support import (
    PLAIN,
    as_client,
    context_bytes,
    mps_mode,
    opened_device,
    opened_reader,
    process_bytes,
)
from benchmarks.colocation.mps import MpsError
from benchmarks.colocation.nvml import GPM_INTERVAL_S, GPM_METRICS, Tick

_HEAVY_MIB, _LIGHT_MIB = 2048, 1024
_GPM_READS = 10


def mps_is_usable(context: Context) -> Finding:
    """Start a private daemon and a client of it as this user."""
    with mps_mode(context) as (mode, daemon):
        load = context.load(as_client(mode))
        load.answer()
        answer = load.ask("run", seconds=0.5)
        servers = daemon.servers()
        clients = [pid for server in servers for pid in daemon.clients(server)]
        evidence = {"steps": answer["steps"], "servers": len(servers), "is_a_client": load.pid in clients}
        return Finding(bool(evidence["is_a_client"]) and answer["steps"] > 0, {**evidence, "uid": os.getuid()})


def readings_under_mps(context: Context) -> Finding:
    """Two clients of known size and activity."""
    with mps_mode(context) as (mode, _):
        return _readings(context, as_client(mode))


def readings_time_sliced(context: Context) -> Finding:
    """Two processes of known size and activity without MPS."""
    return _readings(context, PLAIN)


def _readings(context: Context, env: dict[str, str]) -> Finding:
    heavy, light = context.load(env), context.load(env)
    heavy.answer()
    light.answer()
    scale = 1 if context.on_gpu else 64  # a dry run holds it in the host's memory
    held = {"heavy": _held(heavy, _HEAVY_MIB // scale), "light": _held(light, _LIGHT_MIB // scale)}
    device = opened_device(context)
    heavy.tell("run", seconds=4.0)
    light.tell("run", seconds=4.0, duty=0.2)
    time.sleep(0.5)
    device.start_sampling({"heavy": heavy.pid, "light": light.pid})
    time.sleep(3.0)
    readings = device.stop_sampling()
    rates = {"heavy": heavy.answer()["rate"], "light": light.answer()["rate"]}
    evidence: Evidence = {"device_util": readings.device_util, "rate": rates, "notes": list(readings.notes)}
    right = []
    for name, expected in held.items():
        member = readings.members[name]
        evidence[name] = {
            "util_mean": member.util_mean,
            "util_age_s": member.util_age_s,
            "memory_bytes": member.memory_bytes,
            "torch_reserved_bytes": expected,
        }
        # Above what torch has lies the process's context: some hundred MiB, never GiB.
        right.append(
            member.memory_bytes is not None and expected is not None and 0 <= member.memory_bytes - expected < 2**30
        )
    shares = readings.members["heavy"].util_mean, readings.members["light"].util_mean
    ordered = shares[0] is not None and (shares[1] is None or shares[0] > shares[1])
    evidence["memory_right"], evidence["util_ordered"] = all(right), ordered
    if None in held.values():
        raise Unknown("torch does not tell what it has of the device", **evidence)
    return Finding(all(right) and ordered, evidence)


def _held(load: Load, mib: int) -> int | None:
    reserved: int | None = load.ask("hold", mib=mib)["reserved_bytes"]
    return reserved


def counters_work(context: Context) -> Finding:
    """Read the performance counters of a busy GPU as this user, and time the readings with and without them."""
    reader = opened_reader(context)
    if not reader.gpm_supported():
        return Finding(False, {"supported": reader.gpm_supported(), "notes": dict(reader.notes)})
    load = context.load(PLAIN)
    load.answer()
    load.tell("run", seconds=4.0)
    due: list[float] = []
    early: list[float] = []
    seen: dict[str, float | None] = {}
    for _ in range(_GPM_READS):
        time.sleep(1.5 * GPM_INTERVAL_S)
        tick, seconds = _timed(lambda: reader.tick(with_memory=False))
        due.append(seconds)
        early.append(_timed(lambda: reader.tick(with_memory=False))[1])  # too early for the counters: all but them
        seen |= {name: value for name, value in tick.gpm.items() if value is not None}
    load.answer()
    evidence = {
        "values": seen,
        "counters_ms": 1000 * (sorted(due)[_GPM_READS // 2] - sorted(early)[_GPM_READS // 2]),
        "everything_else_ms": 1000 * sorted(early)[_GPM_READS // 2],
        "process_lists_ms": 1000 * _timed(reader.process_memory)[1],
        "notes": dict(reader.notes),
    }
    return Finding(set(seen) == set(GPM_METRICS), evidence)


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.monotonic()
    return call(), time.monotonic() - began


def device_counters_grow(context: Context) -> Finding:
    """Energy and PCIe counters before and after a second of work that copies nothing."""
    reader = opened_reader(context)
    load = context.load(PLAIN)
    load.answer()
    first: Tick = reader.tick(with_memory=False)
    load.ask("run", seconds=1.0)
    last: Tick = reader.tick(with_memory=False)
    a, b = first.counters, last.counters
    evidence: Evidence = {"seconds": b.at_s - a.at_s, "power_now_w": last.power_w, "notes": dict(reader.notes)}
    for name in ("energy_j", "tx_bytes", "rx_bytes"):
        before, after = getattr(a, name), getattr(b, name)
        evidence[name] = None if before is None or after is None else after - before
    told = [evidence[name] is not None and evidence[name] >= 0 for name in ("energy_j", "tx_bytes", "rx_bytes")]
    return Finding(all(told) and evidence["energy_j"] > 0, evidence)


def mps_limits_memory(context: Context) -> Finding:
    """A client limited to 4 GiB, with the allocator's ordinary and its expandable segments."""
    context.needs_gpu()
    with mps_mode(context) as (mode, _):
        env = as_client(mode, memory_bytes=4 << 30)
        loads = {
            "ordinary": context.load(env),
            "expandable": context.load(env | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        }
        evidence: Evidence = {}
        for name, load in loads.items():
            load.answer()
            evidence[name] = {
                "below": load.ask("hold", mib=1024)["ok"],
                "over": load.ask("hold", mib=6144).get("error", "it was given"),
            }
            load.kill()
    return Finding(
        all(case["below"] and case["over"] != "it was given" for case in evidence.values()),
        {"limit_gib": 4, **evidence},
    )


def mps_caps_compute(context: Context) -> Finding:
    """The step rate of a client that fills the GPU, with all threads and with half of them."""
    with mps_mode(context, "mps_cap") as (mode, _):
        whole, half = context.load(as_client(mode)), context.load(as_client(mode, share=0.5))
        whole.answer()
        half.answer()
        rates = {
            "whole": whole.ask("run", seconds=2.0)["rate"],
            "half": half.ask("run", seconds=2.0)["rate"],
        }
    if not rates["whole"]:
        raise Unknown("the load made no step", rates=rates)
    ratio = rates["half"] / rates["whole"]
    return Finding(0.35 <= ratio <= 0.65, {"rate": rates, "ratio": ratio})


def allocator_fraction_is_live(context: Context) -> Finding:
    """Limit torch's allocator below, above and again below what is in use."""
    context.needs_gpu()
    reader = opened_reader(context)
    total = reader.identity()["memory_bytes"]
    if total is None:
        raise Unknown("NVML does not tell the device's memory")
    load = context.load(PLAIN)
    load.answer()
    load.ask("fraction", value=(3 << 30) / total)
    evidence: Evidence = {
        "below": load.ask("hold", mib=1024)["ok"],
        "over": load.ask("hold", mib=4096).get("error", "it was given"),
    }
    load.ask("fraction", value=(8 << 30) / total)
    evidence["raised"] = load.ask("hold", mib=4096)["ok"]
    in_use = load.ask("fraction", value=(1 << 30) / total)
    steps = load.ask("run", seconds=0.3)["steps"]
    evidence["lowered_below_what_is_in_use"] = {"reserved_bytes": in_use["reserved_bytes"], "steps": steps}
    evidence["reserved_after_drop_bytes"] = load.ask("drop")["reserved_bytes"]
    evidence["over_the_lower_limit"] = load.ask("hold", mib=2048).get("error", "it was given")
    held = evidence["below"] and evidence["over"] != "it was given" and evidence["raised"]
    return Finding(held and evidence["over_the_lower_limit"] != "it was given", evidence)


def contexts_cost_memory(context: Context) -> Finding:
    """Device memory of a process beyond what torch has, without and with MPS."""
    reader = opened_reader(context)
    evidence: Evidence = {"plain_bytes": _context_of(context, PLAIN, reader)}
    try:
        with mps_mode(context) as (mode, _):
            evidence["mps_bytes"] = _context_of(context, as_client(mode), reader)
    except (MpsError, Unknown) as error:
        evidence["mps_bytes"], evidence["mps"] = None, str(error)
    if evidence["plain_bytes"] is None:
        raise Unknown("NVML does not tell the memory of the process", **evidence)
    return Finding(evidence["plain_bytes"] < 2**30, evidence)


def _context_of(context: Context, env: dict[str, str], reader: Any) -> int | None:
    load = context.load(env)
    ready = load.answer()
    found = context_bytes(process_bytes(reader, load.pid), ready["reserved_bytes"])
    load.kill()
    return found


def duty_is_kept(context: Context) -> Finding:
    """A cap on the time inside steps at three targets, against the free rate."""
    load = context.load(PLAIN)
    load.answer()
    free = load.ask("run", seconds=1.5)["rate"]
    if not free:
        raise Unknown("the load made no step")
    reached = {target: load.ask("run", seconds=1.5, duty=target)["rate"] / free for target in (0.25, 0.5, 0.75)}
    worst = max(abs(value - target) for target, value in reached.items())
    return Finding(worst <= 0.05, {"free_rate": free, "rate_over_free": reached, "worst_error": worst})


def sampling_is_cheap(context: Context) -> Finding:
    """The step rate with and without ten readings a second, in turn."""
    load = context.load(PLAIN)
    load.answer()
    device = opened_device(context)
    rates: dict[str, list[float]] = {"without": [], "with": []}
    cost = []
    for _ in range(3):
        rates["without"].append(load.ask("run", seconds=1.0)["rate"])
        with _sampled(device, load.pid) as told:
            rates["with"].append(load.ask("run", seconds=1.0)["rate"])
        cost.append(told["share_of_a_core"])
    middle = {name: sorted(values)[1] for name, values in rates.items()}
    lost = 1 - middle["with"] / middle["without"] if middle["without"] else None
    evidence = {"rate": rates, "lost": lost, "share_of_a_core": sorted(cost)[1]}
    return Finding(lost is not None and lost < 0.01, evidence)


@contextmanager
def _sampled(device: Any, pid: int) -> Iterator[dict[str, float]]:
    told: dict[str, float] = {}
    device.start_sampling({"load": pid})
    try:
        yield told
    finally:
        readings = device.stop_sampling()
        told["share_of_a_core"] = readings.cost_s / readings.seconds


def green_contexts_exist(context: Context) -> Finding:
    """Make one with a quarter of the multiprocessors."""
    context.needs_gpu()
    load = context.load(PLAIN)
    load.answer()
    answer = load.ask("green")
    return Finding(answer.pop("ok"), answer)


def torch_starts_quickly(context: Context) -> Finding:
    """Start a process that imports torch and trains one step on the GPU."""
    load = context.load(PLAIN)
    ready = load.answer()
    evidence = {"ready_after_s": time.monotonic() - load.started}
    evidence |= {key: ready[key] for key in ("import_s", "build_s", "first_step_s", "resident_bytes")}
    return Finding(evidence["ready_after_s"] < 10, evidence)


def power_limit_is_told(context: Context) -> Finding:
    """Read the limit and its range. Whether it may be set is not tried."""
    reader = opened_reader(context)
    limits = reader.power_limits_w()
    if limits is None:
        return Finding(False, {"notes": dict(reader.notes)})
    limit, low, high = limits
    evidence = {"limit_w": limit, "lowest_w": low, "highest_w": high, "is_root": os.geteuid() == 0}
    return Finding(low <= limit <= high, evidence)


CHECKS = (
    Check("mps", "A private MPS daemon serves this user", mps_is_usable),
    Check("mps_readings", "Per-process utilisation and memory are right under MPS", readings_under_mps, 40.0),
    Check(
        "slice_readings", "Per-process utilisation and memory are right under time-slicing", readings_time_sliced, 40.0
    ),
    Check("gpm", "This user can read the performance counters (SM, tensor, FP32, memory bandwidth)", counters_work),
    Check("mps_memory", "The MPS memory limit holds, with expandable segments too", mps_limits_memory, 40.0),
    Check("mps_cap", "An MPS thread percentage of 50 leaves 35 to 65 % of the step rate", mps_caps_compute, 40.0),
    *PROCESS_CHECKS,
    Check(
        "fraction",
        "The allocator fraction of torch applies live, and never to what is in use",
        allocator_fraction_is_live,
    ),
    Check("context", "A process's context takes less than 1 GiB of device memory", contexts_cost_memory, 40.0),
    Check("duty", "A cap on the time inside steps gives .25, .5 and .75 of the free rate within .05", duty_is_kept),
    Check(
        "sampler_cost", "Ten readings a second cost a neighbourless job less than 1 % of its rate", sampling_is_cheap
    ),
    Check("counters", "Energy and PCIe byte counters are there and grow", device_counters_grow),
    Check("green", "torch makes green contexts here", green_contexts_exist),
    Check("power_limit", "The power limit and its range can be read", power_limit_is_told),
    Check("start_up", "A bare torch process is ready on the GPU within 10 s", torch_starts_quickly),
)
