"""Processes on a GPU: suspending one, and what killing one does to its neighbour."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.colocation.checkpoint import CheckpointError, CudaCheckpoint, checkpoint_and_restore
from benchmarks.colocation.facts.checks import GIB, Check, Context, Evidence, Finding, Load, Unknown
from benchmarks.colocation.facts.cuda_support import PLAIN, as_client, mps_mode, opened_reader, process_bytes
from benchmarks.colocation.mps import MpsDaemon, MpsError, MpsRefused

_STEPS = 100
_HOLD_MIB = 4096
_ANSWER_S = 8.0  # the neighbour has 1.5 s left to run; a fault may leave it stuck


def checkpoint_works(context: Context) -> Finding:
    """Lock, checkpoint, restore and unlock a process in the middle of training; its twin is left alone."""
    context.needs_gpu()
    try:
        driver = CudaCheckpoint()
    except CheckpointError as error:
        raise Unknown(str(error)) from error
    reader = opened_reader(context)
    load, twin = context.load(PLAIN), context.load(PLAIN)
    for process in (load, twin):
        process.answer()
    held = load.ask("hold", mib=_HOLD_MIB)
    twin.tell("train", steps=2 * _STEPS)
    load.ask("train", steps=_STEPS)
    before = process_bytes(reader, load.pid)
    load.tell("train", steps=_STEPS)
    time.sleep(0.1)
    suspended: Evidence = {}
    try:
        times = checkpoint_and_restore(
            load.pid, driver, lambda: suspended.update(bytes=process_bytes(reader, load.pid))
        )
    except CheckpointError as error:
        return Finding(False, {"error": str(error)})
    state, expected = load.answer(), twin.answer()
    gib = held["reserved_bytes"] / GIB
    evidence = {
        **times,
        "gib": gib,
        "checkpoint_s_per_gib": times["checkpoint_s"] / gib,
        "restore_s_per_gib": times["restore_s"] / gib,
        "bytes_before": before,
        "bytes_while_suspended": suspended["bytes"],
        "state_is_right": state["checksum"] == expected["checksum"],
    }
    return Finding(bool(evidence["state_is_right"]), evidence)


def kill_without_mps(context: Context) -> Finding:
    """SIGKILL in the middle of a step, under time-slicing."""
    return _kill(context, PLAIN, _just_kill)


def kill_under_mps(context: Context) -> Finding:
    """SIGKILL in the middle of a step, under MPS."""
    with mps_mode(context) as (mode, daemon):
        return _kill(context, as_client(mode), _just_kill, daemon)


def terminate_under_mps(context: Context) -> Finding:
    """terminate_client first, SIGKILL after, under MPS."""
    with mps_mode(context) as (mode, daemon):

        def end(victim: Load) -> str:
            answer = daemon.terminate_client(victim.pid)
            victim.kill()
            return "it was no client" if answer is None else f"terminate_client said {answer!r}"

        return _kill(context, as_client(mode), end, daemon)


def _kill(
    context: Context, env: dict[str, str], end: Callable[[Load], str], daemon: MpsDaemon | None = None
) -> Finding:
    """End one of two loads at work; the other must go on, and a third must find its place."""
    victim, neighbour = context.load(env), context.load(env)
    victim.answer()
    neighbour.answer()
    victim.tell("run", seconds=20.0)
    neighbour.tell("run", seconds=3.0)
    time.sleep(1.5)
    began = time.monotonic()
    how = end(victim)
    evidence: Evidence = {"how": how, "ended_after_s": time.monotonic() - began}
    try:
        answer = neighbour.answer(_ANSWER_S)
        evidence["neighbour"] = {key: answer[key] for key in ("steps", "longest_s")}
        evidence["neighbour_steps_after"] = neighbour.ask("run", seconds=0.5)["steps"]
    except Unknown as error:
        evidence["neighbour"] = str(error)
    evidence["server"] = _server_state(daemon)
    neighbour.kill()
    third = context.load(env)
    try:
        third.answer()
        evidence["newcomer_steps"] = third.ask("run", seconds=0.5)["steps"]
    except Unknown as error:
        evidence["newcomer"] = str(error)
    third.kill()
    survived = bool(evidence.get("neighbour_steps_after")) and answer["longest_s"] < 1.0
    return Finding(survived and bool(evidence.get("newcomer_steps")), evidence)


def _just_kill(victim: Load) -> str:
    victim.kill()
    return "SIGKILL"


def _server_state(daemon: MpsDaemon | None) -> str | None:
    if daemon is None:
        return None
    try:
        daemon.check()
    except (MpsRefused, MpsError) as error:
        return str(error)
    return "accepts clients"


PROCESS_CHECKS = (
    Check(
        "checkpoint",
        "Lock, checkpoint, restore and unlock work on a training process and leave its state right",
        checkpoint_works,
        60.0,
    ),
    Check("kill", "Without MPS, killing a process does not disturb its neighbour", kill_without_mps, 40.0),
    Check("mps_kill", "Under MPS, killing a client does not disturb its neighbour", kill_under_mps, 40.0),
    Check(
        "mps_terminate",
        "Under MPS, terminate_client before the kill leaves the neighbour alone",
        terminate_under_mps,
        40.0,
    ),
)
