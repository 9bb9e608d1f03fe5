"""Cases that need a whole cotenant: memory that runs out, a job that moves, shares that follow demand."""

from __future__ import annotations

import json
import time

from benchmarks.common import Row
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.shell import Shell
from benchmarks.reaction import Change, followed

from cotenant.actors.enforcement.pausing import CheckpointPause
from cotenant.scheduler.core.events import MoveRequested
from cotenant.scheduler.core.model import JobState

GROWN = {"alone": 0.4, "beside a neighbour": 0.7}  # of the GPU's memory: a quarter is its share, half its neighbour's
PHASES, PHASE_S = 12, 6.0
DRY_PHASES, DRY_PHASE_S = 3, 1.2


def rescued(bench: Bench) -> list[Row]:
    """Whether a job that outgrows its memory share gets what it needs, and nobody fails for it."""
    return [row for case, part in GROWN.items() for row in _rescued(bench, case, int(part * bench.gpu.memory_bytes))]


def _rescued(bench: Bench, case: str, needed: int) -> list[Row]:
    with bench.shell() as shell:
        memory = bench.gpu.memory_bytes
        saves = {"checkpoint": "own", "priority": "low", "grace": 5}
        if case != "alone":
            neighbour = {"gpu_memory": memory // 2, "compute": 0.4, "max_slowdown": 9} | saves | bench.sharing
            shell.submit("neighbour", neighbour, "grow", str(int(0.45 * memory)), "0")
            shell.until(lambda: shell.steps("neighbour") > 100, "the neighbour to step")
        hints = {
            "gpu_memory": memory // 4,
            "compute": 0.4,
            "priority": "high",
            "max_slowdown": 9,
            "restart": "on_failure",
        } | bench.sharing
        shell.submit("growing", hints, "grow", str(needed), str(bench.window_s / 2))
        shell.until(lambda: shell.steps("growing") > 0, "the growing job to step")
        took_s = shell.until(lambda: _holds(shell, "growing", needed), f"a share of {needed} bytes")
        jobs = shell.core.state.jobs.values()
        failed = sum(job.state is JobState.FAILED for job in jobs)
        made_room = float(sum(job.interruptions for job in jobs))
        name = f"memory runs out, {case}"
        return [
            Row(name, "cotenant", "from its first step to a share that holds it", took_s, "s"),
            Row(name, "cotenant", "jobs that failed", float(failed), "1", goal="== 0", met=failed == 0),
            Row(name, "cotenant", "neighbours that made room", made_room, "1"),
            Row(name, "cotenant", "restarts of the job itself", float(shell.job("growing").restarts), "1"),
        ]


def _holds(shell: Shell, job_id: str, needed: int) -> bool:
    """Whether the job runs with a share of that much memory, and has made steps in it."""
    shares = shell.shares(job_id)
    return bool(shares) and shares[0].memory_bytes >= needed and shell.steps(job_id) > 0


def migrated(bench: Bench) -> list[Row]:
    """How long a job is away that moves to another GPU of this host."""
    gpus = bench.backend.discover()
    if len(gpus) < 2:
        bench.skipped.append("migrated: this host has one GPU, and a job needs two to move between them")
        return []
    rows = []
    with bench.shell(gpus) as shell:
        shell.submit(
            "moving", {"gpu_memory": bench.gpu.memory_bytes // 2, "compute": 0.9, "checkpoint": "own"}, "train"
        )
        shell.until(lambda: shell.steps("moving") > 0, "the job to step")
        (before,) = shell.shares("moving")
        shell.tell(MoveRequested("moving", "measured"))
        took_s = shell.until(lambda: shell.job("moving").epoch == 2 and shell.steps("moving") > 0, "the job to go on")
        moved = shell.shares("moving")[0].gpu_id != before.gpu_id
        rows.append(Row("moved to another GPU", "stop and start", "from the request to its first step", took_s, "s"))
        rows.append(Row("moved to another GPU", "stop and start", "is there", float(moved), "1", goal="== 1"))
        if bench.no_checkpoints:
            bench.skipped.append(f"migrated, driver checkpoints: {bench.no_checkpoints}")
        else:
            rows += _by_driver(shell, [gpu.gpu_id for gpu in gpus])
    return rows


def _by_driver(shell: Shell, gpu_ids: list[str]) -> list[Row]:
    """Move the running job's processes back with the driver's checkpoints; the core is not told of it."""
    (launched,) = shell.launcher.running()
    pids = [int(path.name.removeprefix("report-")) for path in launched.job_dir.glob("report-*")]
    rotated = dict(zip(gpu_ids, [*gpu_ids[1:], gpu_ids[0]], strict=True))
    pause, began, steps = CheckpointPause(), time.monotonic(), shell.steps("moving")
    pause.pause(launched.root_pid or 0, pids)
    pause.resume(launched.root_pid or 0, pids, rotated)
    while shell.steps("moving") <= steps:
        shell.step()
    took_s = time.monotonic() - began
    return [Row("moved to another GPU", "driver checkpoint", "from the request to its next step", took_s, "s")]


def followed_demand(bench: Bench) -> list[Row]:
    """How soon shares follow demand, without the ways between actors that a cluster has."""
    phase_s, phases = (PHASE_S, PHASES) if bench.dry is None else (DRY_PHASE_S, DRY_PHASES)
    out = bench.folder / "phases.json"
    with bench.shell() as shell:
        hints = {"gpu_memory": bench.gpu.memory_bytes // 4, "compute": 0.05, "max_slowdown": 20} | bench.sharing
        shell.submit("changing", hints, "phases", str(phases), str(phase_s), str(out))
        shell.submit("steady", hints, "train")
        changes: list[Change] = []

        def ended() -> bool:
            for share in shell.shares("changing"):
                if not changes or share.compute != changes[-1].compute:
                    changes.append(Change(time.monotonic(), share.compute))
            return shell.job("changing").state.terminal

        shell.until(ended, "the job with phases to end", 60.0 + 2 * phases * phase_s)
    told = [(float(at), bool(busy)) for at, busy in json.loads(out.read_text(encoding="utf-8"))]
    rows = []
    for busy, case in ((True, "demand rises"), (False, "demand falls")):
        for metric, found in followed(told, changes, busy=busy)._asdict().items():
            known = sorted(seconds for seconds in found if seconds is not None)
            rows.append(Row(case, "cotenant", f"{metric} change, times of {len(found)}", float(len(known)), "1"))
            for quantile, name in ((0.5, "p50"), (0.99, "p99")) if known else ():
                value = known[min(len(known) - 1, int(quantile * len(known)))]
                rows.append(Row(case, "cotenant", f"{metric} change, {name}", value, "s"))
    return rows
