"""Warm member processes: started a few at a time, the least recently used one ended where memory or number runs out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.colocation.mps import MpsError, MpsRefused
from benchmarks.colocation.process import Launch, Member, MemberFailure, MemberKey, wait_for_any
from benchmarks.colocation.reaper import Reaper

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """What the pool may use.

    Attributes:
        members: Largest number of processes.
        memory_bytes: What all members together may take, by what they report; None if that is not known.
        member_bytes: What a member takes beyond what it reports, and what one that has not reported takes at least.
        parallel: How many start at a time.
        start_s: How long one may take to start.
    """

    members: int
    memory_bytes: int | None
    member_bytes: int
    parallel: int
    start_s: float = 180.0


class Pool:
    """The members that are warm.

    Attributes:
        stuck: Numbers of processes that could not be killed.

    Args:
        launch: How members are started.
        limits: What they may use.
    """

    def __init__(self, launch: Launch, limits: Limits) -> None:
        self._launch = launch
        self._limits = limits
        self._reaper = Reaper()
        self._warm: dict[MemberKey, Member] = {}  # the least recently used first
        self._sizes: dict[str, int] = {}
        self.stuck: list[int] = []

    def __len__(self) -> int:
        return len(self._warm)

    @property
    def warm(self) -> tuple[MemberKey, ...]:
        """The members that are ready."""
        return tuple(self._warm)

    def get(self, keys: Sequence[MemberKey]) -> list[Member]:
        """The members, started where they are not warm; others are ended for them where the limits ask for it.

        A member that finds no memory or no place gets a second chance after all others have been ended.

        Raises:
            MemberFailure: One does not start.
        """
        self._make_room(keys)
        failures = self._start([key for key in dict.fromkeys(keys) if key not in self._warm])
        if any(failure.kind in ("does_not_fit", "mps_refused") for failure in failures.values()):
            self.end_all_but(lambda key: key in keys)
            failures = self._start([key for key in dict.fromkeys(keys) if key not in self._warm])
        for failure in failures.values():
            raise failure
        for key in keys:
            self._warm[key] = self._warm.pop(key)
        return [self._warm[key] for key in keys]

    def prepare(self, keys: Iterable[MemberKey]) -> None:
        """Start members that will be needed, as far as they fit beside those that are warm.

        What fails is left to ``get``, which says so when its turn has come.
        """
        chosen: list[MemberKey] = []
        for key in dict.fromkeys(keys):
            if key not in self._warm and self._fits([*self._warm, *chosen, key]):
                chosen.append(key)
        self._start(chosen)

    def note_memory(self, workload: str, memory_bytes: float | None) -> None:
        """A workload was seen to take this much."""
        self._sizes[workload] = max(self._sizes.get(workload, 0), int(memory_bytes or 0))

    def end(self, key: MemberKey) -> None:
        """End a member, if it is there."""
        if (member := self._warm.pop(key, None)) is not None:
            self._kill(member)

    def end_at_work(self, keys: Iterable[MemberKey], take_off: Callable[[int], None]) -> None:
        """End members that may be at work.

        Args:
            keys: Which.
            take_off: Takes a process, by its number, from the device in good order before it is killed.
        """
        for key in keys:
            if key in self._warm:
                with suppress(MpsError, MpsRefused):  # it is killed all the same
                    take_off(self._warm[key].pid)
                self.end(key)

    def end_all_but(self, wanted: Callable[[MemberKey], bool]) -> None:
        """End every member that is not wanted."""
        for key in self.warm:
            if not wanted(key):
                self.end(key)

    def close(self) -> None:
        """End everything that was started."""
        self.end_all_but(lambda key: False)
        self._reaper.close()

    def _kill(self, member: Member) -> None:
        if not member.kill():
            self.stuck.append(member.pid)

    def _make_room(self, keys: Sequence[MemberKey]) -> None:
        idle = [key for key in self._warm if key not in keys]
        kept = set(idle)
        for key in idle:
            if self._fits({*kept, *keys}):
                break
            kept.discard(key)
            self.end(key)

    def _fits(self, keys: Iterable[MemberKey]) -> bool:
        keys = list(keys)
        if len(keys) > self._limits.members:
            return False
        need = sum(self._sizes.get(key.workload, 0) + self._limits.member_bytes for key in keys)
        return self._limits.memory_bytes is None or need <= self._limits.memory_bytes

    def _start(self, keys: Sequence[MemberKey]) -> Mapping[MemberKey, MemberFailure]:
        todo = deque(keys)
        starting: dict[Member, float] = {}
        failures: dict[MemberKey, MemberFailure] = {}
        try:
            while todo or starting:
                while todo and len(starting) < self._limits.parallel:
                    member = Member(todo.popleft(), self._launch, self._reaper)
                    starting[member] = time.monotonic() + self._limits.start_s
                wait_for_any(starting, min(starting.values()))
                for member, deadline in list(starting.items()):
                    try:
                        answer = member.answer()
                        if answer is None and time.monotonic() >= deadline:
                            raise MemberFailure(member.key, "hung", f"not ready within {self._limits.start_s:.0f} s")
                    except MemberFailure as failure:
                        failures[member.key] = failure
                        del starting[member]
                        self._kill(member)
                        continue
                    if answer is not None:
                        del starting[member]
                        member.ready = answer
                        self._warm[member.key] = member
                        self.note_memory(member.key.workload, answer["memory_bytes"])
        finally:
            for member in starting:  # only after an exception, such as a signal's
                self._kill(member)
        return failures
