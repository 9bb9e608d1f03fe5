"""One visit: each member alone in turn and all together, twice; every window from a common start to a common end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from benchmarks.colocation.plan import Visit
from benchmarks.colocation.process import Member, collect, wait_for_any
from benchmarks.colocation.readings import Device, MemberReadings, Readings
from benchmarks.colocation.records import FORMAT, SOLO_WINDOWS, Record

DEVICE_COLUMNS = (
    "device_util",
    "membw_util",
    "sm_active",
    "tensor_active",
    "fp32_active",
    "power_w",
    "clock_mhz",
    "temperature_c",
    "pcie_rx_bytes_s",
    "pcie_tx_bytes_s",
)


@dataclass(frozen=True, slots=True)
class Method:
    """How windows are run; all windows of a folder are run in the same way.

    Attributes:
        window_s: Length of the counted part.
        settle_s: How long members run before counting begins.
        lead_s: From the command to the common start, so that all have received it.
        answer_s: How long after its end a member may take to answer.
        mix_steps: Steps under the profiler in a visit of a single workload.
    """

    window_s: float = 3.0
    settle_s: float = 0.5
    lead_s: float = 0.05
    answer_s: float = 20.0
    mix_steps: int = 8

    def card(self) -> dict[str, Any]:
        """What the data card says about it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Cast:
    """The processes of a visit.

    Attributes:
        alone: The process that runs each slot's windows alone, never capped.
        together: The process that runs each slot's windows with the others; the same one where no cap is fixed at the
            start of a process.
        duties: The duty cycle that each slot keeps in the windows together; None does not hold it back.
    """

    alone: Sequence[Member]
    together: Sequence[Member]
    duties: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Visited:
    """What a visit gave.

    Attributes:
        windows: One record per member and window, in the form of README.md.
        held_bytes: For each record the memory that the device says the member held; None: it does not say.
        notes: What the device could not read, and why.
    """

    windows: list[Record]
    held_bytes: list[int | None]
    notes: tuple[str, ...]


def run_visit(visit: Visit, cast: Cast, device: Device, method: Method) -> Visited:
    """Run all windows of a visit.

    Raises:
        MemberFailure: A member failed; nothing of the visit counts, and the other members may still be at work.
    """
    slots = tuple(range(len(visit.members)))
    alone: list[tuple[int, ...]] = [(slot,) for slot in slots]
    turns = SOLO_WINDOWS * alone if len(slots) == 1 else _turns(alone, slots, visit.occasion)
    records: list[Record] = []
    held: list[int | None] = []
    notes: dict[str, None] = {}
    for position, turn in enumerate(turns):
        shared = len(turn) > 1
        members = [(cast.together if shared else cast.alone)[slot] for slot in turn]
        duties = [cast.duties[slot] if shared else None for slot in turn]
        started, answers, readings = run_window(members, duties, device, method)
        for slot, member, answer in zip(turn, members, answers, strict=True):
            records.append(
                {
                    "format": FORMAT,
                    "visit": visit.name,
                    "mode": visit.mode,
                    "kind": "shared" if shared else "solo",
                    "position": position,
                    "members": list(visit.members),
                    "member": visit.members[slot],
                    "slot": slot,
                    "share": visit.shares[slot] if shared and visit.shares is not None else None,
                    "started_unix_s": started,
                    "window_s": method.window_s,
                    **step_columns(answer),
                    **reading_columns(str(member.key), answer, readings),
                }
            )
            held.append(readings.members.get(str(member.key), MemberReadings()).memory_bytes)
        notes |= dict.fromkeys(readings.notes)
    return Visited(records, held, tuple(notes))


def _turns(alone: list[tuple[int, ...]], together: tuple[int, ...], occasion: int) -> list[tuple[int, ...]]:
    """Who runs in each window: alone and together twice, and the other way round on every second occasion.

    The device drifts. Of four turns the outermost shared one has windows alone on one side only; what it misses of a
    steady drift has the other sign on the next occasion.
    """
    turns = 2 * [*alone, together]
    return turns if occasion % 2 else turns[::-1]


def profiler_overhead(member: Member, windows: Sequence[Record], method: Method) -> float | None:
    """How much longer a step takes while the device is read at 10 Hz: one more window without, beside those with.

    Args:
        member: The member, alone on the device.
        windows: Its windows alone with the device being read, just before.
        method: How windows are run.

    Returns:
        Step time with over step time without - 1, from the rates; None where a window has too few steps. One value
        carries the noise of a rate, a few hundredths; the median over workloads is what tells something.

    Raises:
        MemberFailure: It failed.
    """
    until = _begin([member], [None], method)
    without = step_columns(collect([member], "window", until + method.answer_s)[0])["rate"]
    rates = [window["rate"] for window in windows if window["rate"]]
    return without / median(rates) - 1.0 if without and rates else None


def run_window(
    members: Sequence[Member],
    duties: Sequence[float | None],
    device: Device,
    method: Method,
) -> tuple[float, list[dict[str, Any]], Readings]:
    """Let members run from a common start to a common end while the device is read.

    A member that ends early ends the waiting; ``collect`` then finds the reason.

    Returns:
        When counting began in Unix seconds, each member's answer, and the device's readings of the counted part.

    Raises:
        MemberFailure: A member ended, reported a failure, or did not answer ``answer_s`` after the end.
    """
    until = _begin(members, duties, method)
    wait_for_any(members, until - method.window_s)
    counted_since = time.time()
    device.start_sampling({str(member.key): member.pid for member in members})
    try:
        wait_for_any(members, until)
    finally:
        readings = device.stop_sampling()
    return counted_since, collect(members, "window", until + method.answer_s), readings


def _begin(members: Sequence[Member], duties: Sequence[float | None], method: Method) -> float:
    """Tell members to run a window; its end on the monotonic clock."""
    start = time.monotonic() + method.lead_s
    count_from = start + method.settle_s
    until = count_from + method.window_s
    for member, duty in zip(members, duties, strict=True):
        member.tell(cmd="run", start=start, count_from=count_from, until=until, duty=duty)
    return until


def step_columns(answer: dict[str, Any]) -> Record:
    """Rate and distribution of the counted steps.

    The rate is (n - 1) / (last - first) over the times at which steps were completed, so that it does not depend on
    where the window's edges fall between two steps; None for fewer than two steps.
    """
    step_s = np.asarray(answer["step_s"], dtype=float)
    steps = int(answer["steps"])
    rate = (steps - 1) / (answer["last_s"] - answer["first_s"]) if steps > 1 else None
    quantiles = np.quantile(step_s, (0.1, 0.5, 0.9, 0.99)).tolist() if steps else [None] * 4
    p10, p50, p90, p99 = quantiles
    return {
        "steps": steps,
        "rate": rate,
        "step_p10_s": p10,
        "step_p50_s": p50,
        "step_p90_s": p90,
        "step_p99_s": p99,
        "step_cv": float(step_s.std() / step_s.mean()) if steps > 1 else None,
    }


def reading_columns(name: str, answer: dict[str, Any], readings: Readings) -> Record:
    """What the member says about itself and the device about the member and itself."""
    member = readings.members.get(name, MemberReadings())
    own = answer["memory_bytes"]
    return {
        "busy_s": answer["busy_s"],
        "util_mean": member.util_mean,
        "util_peak": member.util_peak,
        "wait_s": answer["wait_s"],
        "host_busy_s": answer["host_busy_s"],
        "foreign_s": readings.foreign_s,
        "memory_bytes": own if own is not None else member.memory_bytes,
        **{column: getattr(readings, column) for column in DEVICE_COLUMNS},
    }
