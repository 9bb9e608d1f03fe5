"""The run: plans, visits, and what to do when a visit goes wrong."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.colocation import summary
from benchmarks.colocation.card import Card, write_card
from benchmarks.colocation.checkpoint import CheckpointError, suspend_times
from benchmarks.colocation.console import Progress
from benchmarks.colocation.modes import Mode
from benchmarks.colocation.mps import MpsError, MpsRefused
from benchmarks.colocation.plan import BudgetTooSmall, ModeShares, Plan, Request, Timing, Traits, Visit, make_plan
from benchmarks.colocation.pool import Pool
from benchmarks.colocation.process import Member, MemberFailure, MemberKey, collect
from benchmarks.colocation.readings import Device
from benchmarks.colocation.records import FORMAT, Folder, Record
from benchmarks.colocation.visits import Cast, Method, Visited, profiler_overhead, run_visit

MOST_FAILURES = 2
_MIX_S = 120.0


@dataclass(frozen=True, slots=True)
class Task:
    """What a run is to do.

    Attributes:
        families: The workloads' families by name.
        modes: The sharing modes; the first is the one in which every pair is measured.
        method: How windows are run.
        timing: How long things take.
        occasion: The number of this repetition, from 1.
        until: When to end, seconds of the monotonic clock.
        matrix_only: Whether to end when every workload and every pair has been measured in the first mode.
    """

    families: Mapping[str, str]
    modes: Sequence[Mode]
    method: Method
    timing: Timing
    occasion: int
    until: float
    matrix_only: bool = False


class Suite:
    """Makes visits until nothing is left to do or the time is over.

    Args:
        task: What to do.
        folder: Where results go.
        card: The folder's card.
        device: The device.
        pool: The members.
        progress: What the user sees.
        clock: Monotonic clock.
    """

    def __init__(
        self,
        task: Task,
        folder: Folder,
        *,
        card: Card,
        device: Device,
        pool: Pool,
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._task = task
        self._folder = folder
        self._card = card
        self._device = device
        self._pool = pool
        self._progress = progress
        self._clock = clock
        self._modes = {mode.name: mode for mode in task.modes}
        self._mode: Mode | None = None
        self._tried: set[str] = set()
        self._failures: Counter[str] = Counter()
        self._dropped = {
            event["members"][0]
            for event in folder.events
            if event["event"] == "does_not_fit" and len(event["members"]) == 1
        }
        self._abandoned: set[str] = set()
        self._upcoming: Sequence[Visit] = ()
        self._can_suspend = True

    def run(self) -> None:
        """Make the visits.

        Raises:
            BudgetTooSmall: Not even the first visit fits into the time.
            DiskFull: Nothing more can be written.
        """
        for visit in self._visits():
            mode = self._enter(visit)
            if mode is not None:
                self._make(visit, mode)

    def close(self) -> None:
        """End every member and the sharing mode. Safe to call more than once."""
        self._pool.close()
        if self._pool.stuck:
            self._progress.say(f"processes that cannot be killed: {', '.join(map(str, self._pool.stuck))}")
        if self._mode is not None:
            self._mode.stop()
            self._mode = None

    def _visits(self) -> Iterator[Visit]:
        """What comes next; planned anew whenever a part of the plan is complete, with what was measured by then."""
        first = True
        while len(self._abandoned) < len(self._modes):
            try:
                plan = make_plan(self._request())
            except BudgetTooSmall:
                if first:
                    raise
                return
            self._progress.planned(plan)
            if not plan.visits:
                return
            first = False
            yield from self._stage(plan)
            if self._clock() >= self._task.until:
                return

    def _stage(self, plan: Plan) -> Iterator[Visit]:
        """The visits up to the end of the plan's first part, or of the time."""
        stage = plan.visits[0].stage
        for number, visit in enumerate(plan.visits):
            if visit.stage != stage or (number and self._clock() + self._task.timing.visit_s(visit) > self._task.until):
                return
            self._tried.add(visit.name)
            if self._is_skipped(visit):
                self._progress.skipped()
                continue
            self._upcoming = plan.visits[number:]
            yield visit

    def _request(self) -> Request:
        alone = summary.solos(self._folder.windows)
        return Request(
            workloads={
                name: Traits(family, alone[name].utilisation if name in alone else None)
                for name, family in self._task.families.items()
                if name not in self._dropped
            },
            modes=[
                ModeShares(mode.name, mode.shares, mode.restarts)
                for mode in self._task.modes
                if mode.name not in self._abandoned
            ],
            budget_s=self._task.until - self._clock(),
            matrix_only=self._task.matrix_only,
            timing=self._task.timing,
            occasion=self._task.occasion,
            done=self._folder.finished | self._tried,
            widths=summary.widths(summary.together(self._folder.windows)),
            warm=frozenset(
                (key.workload, key.instance, self._mode.name, None) for key in self._pool.warm if self._mode is not None
            ),
        )

    def _is_skipped(self, visit: Visit) -> bool:
        return visit.mode in self._abandoned or not self._dropped.isdisjoint(visit.members)

    def _enter(self, visit: Visit) -> Mode | None:
        """Change to the visit's mode; None when it cannot be had."""
        mode, before = self._modes[visit.mode], self._mode
        if mode is before:
            return mode
        try:
            mode.start()
        except (MpsError, MpsRefused) as error:
            self._give_up_mode(visit, mode, str(error))
            return None
        self._mode = mode
        environment = _environment(mode, None)
        self._pool.end_all_but(lambda key: key.environment == environment)
        if before is not None:
            before.stop()
        return mode

    def _make(self, visit: Visit, mode: Mode) -> None:
        """Make one visit; one that finds too little memory again after all other members have been ended."""
        for last in (False, True):
            try:
                visited = self._run(visit, mode)
            except MemberFailure as failure:
                self._end_members(visit, mode)
                alone = len(self._pool) == 0
                if failure.kind == "does_not_fit" and not alone and not last:
                    self._pool.end_all_but(lambda key: False)
                    continue
                self._failed(visit, mode, failure)
                return
            break
        extra = self._extra(visit, mode, visited) if len(visit.members) == 1 else None
        self._folder.add_visit(visited.windows, extra)
        self._note_limits(visited.notes)
        for window in visited.windows:
            self._pool.note_memory(window["member"], window["memory_bytes"])
        self._progress.visited(visit, visited.windows, self._left_s())

    def _run(self, visit: Visit, mode: Mode) -> Visited:
        alone, together = _keys(visit, mode)
        wanted = [*alone, *together]
        if not set(wanted) <= set(self._pool.warm):
            ahead = (_keys(other, mode) for other in self._upcoming if other.mode == visit.mode)
            self._pool.prepare(key for keys in (wanted, *(pair for keys in ahead for pair in keys)) for key in keys)
        members = self._pool.get(wanted)
        shares = visit.shares or (None,) * len(alone)
        cast = Cast(members[: len(alone)], members[len(alone) :], [mode.duty(share) for share in shares])
        return run_visit(visit, cast, self._device, self._task.method)

    def _extra(self, visit: Visit, mode: Mode, visited: Visited) -> Record:
        """What is measured once per visit of a single workload."""
        (key,) = _keys(visit, mode)[0]
        (member,) = self._pool.get([key])
        contexts = [
            held - window["memory_bytes"]
            for window, held in zip(visited.windows, visited.held_bytes, strict=True)
            if self._device.name == "cuda" and held is not None and window["memory_bytes"] is not None
        ]
        ready = member.ready
        extra: Record = {
            "format": FORMAT,
            "visit": visit.name,
            "mode": visit.mode,
            "member": visit.members[0],
            "start_s": ready["import_s"] + ready["build_s"] + ready["warm_s"],
            "context_bytes": max(contexts, default=None),
        }
        try:
            extra["profiler_overhead"] = profiler_overhead(member, visited.windows, self._task.method)
            extra |= self._suspended(mode, member)
            member.tell(cmd="mix", steps=self._task.method.mix_steps)
            (answer,) = collect([member], "mix", self._clock() + _MIX_S)
        except MemberFailure as failure:  # its windows are good
            self._note(visit, failure.kind, visit.members[0], f"after its windows: {failure.message}")
            self._end_members(visit, mode)
            return extra
        return {**extra, "mix": answer["fractions"], "launches_per_step": answer["launches_per_step"]}

    def _suspended(self, mode: Mode, member: Member) -> Record:
        """How long it takes to suspend and resume a member, which goes on afterwards; nothing where that is not known.

        After a failure the member may be broken, so it is ended, and no other is tried.
        """
        if not self._can_suspend or mode.limits_memory:  # the driver does not suspend clients of MPS
            return {}
        try:
            times = suspend_times(member.pid, self._device)
        except (CheckpointError, ProcessLookupError) as error:
            self._can_suspend = False
            self._note_limits([f"{member.key.workload} could not be suspended, no other was tried: {error}"])
            raise MemberFailure(member.key, "died", f"suspending it failed: {error}") from error
        return {} if times is None else {"suspend_s": times["suspend_s"], "resume_s": times["resume_s"]}

    def _failed(self, visit: Visit, mode: Mode, failure: MemberFailure) -> None:
        """Note a failed visit and what follows from it."""
        workload = failure.member.workload
        self._progress.failed(visit, self._left_s(), str(failure))
        if failure.kind == "mps_refused" and mode.limits_memory:  # no other mode has to do with MPS
            self._give_up_mode(visit, mode, failure.message)
            return
        self._note(visit, "died" if failure.kind == "mps_refused" else failure.kind, workload, failure.message)
        if failure.kind == "does_not_fit":
            if len(visit.members) == 1:
                self._drop(workload, "it does not fit into memory even alone")
            return
        self._failures[workload] += 1
        if self._failures[workload] >= MOST_FAILURES:
            self._drop(workload, f"it has failed {MOST_FAILURES} times")
        self._mend_mode(visit, mode)

    def _mend_mode(self, visit: Visit, mode: Mode) -> None:
        """After a member's violent end: start the mode anew if it does not take members any more."""
        try:
            mode.check()
        except (MpsError, MpsRefused):
            self._pool.end_all_but(lambda key: False)
            mode.stop()
            try:
                mode.start()
            except (MpsError, MpsRefused) as error:
                self._give_up_mode(visit, mode, str(error))

    def _give_up_mode(self, visit: Visit, mode: Mode, message: str) -> None:
        self._note(visit, "mps_refused", None, message)
        self._progress.say(f"mode {mode.name} is given up, its visits are skipped: {message}")
        self._abandoned.add(mode.name)
        if mode is self._mode:
            self._pool.end_all_but(lambda key: False)
            mode.stop()
            self._mode = None

    def _drop(self, workload: str, why: str) -> None:
        self._dropped.add(workload)
        self._progress.say(f"workload {workload}: {why}; its remaining visits are skipped")

    def _end_members(self, visit: Visit, mode: Mode) -> None:
        """End the members of a visit, which may be at work."""
        alone, together = _keys(visit, mode)
        self._pool.end_at_work({*alone, *together}, mode.terminate_client)

    def _note(self, visit: Visit, event: str, member: str | None, message: str) -> None:
        self._folder.add_event(
            {
                "format": FORMAT,
                "visit": visit.name,
                "mode": visit.mode,
                "members": list(visit.members),
                "event": event,
                "member": member,
                "message": message,
            }
        )

    def _note_limits(self, notes: Sequence[str]) -> None:
        new = [note for note in notes if note not in self._card["limits"]]
        if new:
            self._card["limits"].extend(new)
            write_card(self._folder.path, self._card)

    def _left_s(self) -> float:
        return max(0.0, self._task.until - self._clock())


def _environment(mode: Mode, share: float | None) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(mode.member_env(share).items()))


def _keys(visit: Visit, mode: Mode) -> tuple[list[MemberKey], list[MemberKey]]:
    """The processes that run alone, and those that run together: others where a share is fixed at the start."""
    alone, together = [], []
    for slot, name in enumerate(visit.members):
        instance = visit.members[:slot].count(name)
        share = visit.shares[slot] if visit.shares is not None and mode.restarts else None
        alone.append(MemberKey(name, instance, _environment(mode, None)))
        together.append(MemberKey(name, instance, _environment(mode, share)))
    return alone, together
