"""What a person sees on the terminal: the plan, a line per visit, what went wrong, and the table at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.colocation import summary
from benchmarks.colocation.plan import Plan, Visit
from benchmarks.colocation.records import Record

_SHOWN_SETS = 12


def show_plan(plan: Plan, done: int) -> None:
    """What would run and how long it takes."""
    for number, visit in enumerate(plan.visits, start=1):
        print(f"{number:4d}  {visit.stage:11}  {visit.name}")
    counts = Counter(visit.stage for visit in plan.visits)
    parts = ", ".join(f"{count} {stage}" for stage, count in counts.items()) or "nothing is left to do"
    print(f"{len(plan.visits)} visits ({parts}) in about {minutes(plan.seconds)}; {done} are done already")
    if plan.left_out:
        print(f"{plan.left_out} more would follow; everything takes about {minutes(plan.all_seconds)}")


class Progress:
    """Prints one line per visit."""

    def __init__(self) -> None:
        self._number = 0
        self._total = 0
        self._width = 1

    def planned(self, plan: Plan) -> None:
        """The visits that are still to come, planned anew."""
        self._total = self._number + len(plan.visits)
        self._width = max(self._width, *(len(visit.name) for visit in plan.visits), 1)

    def visited(self, visit: Visit, windows: Sequence[Record], left_s: float) -> None:
        """A visit is complete."""
        self._line(visit, left_s, _rates(visit, windows))

    def failed(self, visit: Visit, left_s: float, message: str) -> None:
        """A visit has failed."""
        self._line(visit, left_s, message)

    def skipped(self) -> None:
        """A planned visit is not made."""
        self._number += 1

    def say(self, message: str) -> None:
        """Anything else."""
        print(message, flush=True)

    def _line(self, visit: Visit, left_s: float, text: str) -> None:
        self._number += 1
        count = f"{self._number}/{self._total}"
        print(f"[{count:>9}] {visit.name:{self._width}}  {minutes(left_s):>8} left  {text}", flush=True)


def show_summary(windows: Sequence[Record], events: Sequence[Record]) -> None:
    """What the folder holds: every workload alone, and the sets that gain and lose most by sharing."""
    alone = summary.solos(windows)
    if alone:
        width = max(len(name) for name in alone)
        print(f"\n{'alone':{width}}  {'steps/s':>9}  {'util.':>6}  {'MiB':>7}")
        for name, solo in alone.items():
            memory = None if solo.memory_bytes is None else solo.memory_bytes / 2**20
            print(f"{name:{width}}  {_cell(solo.rate, 9, 2)}  {_cell(solo.utilisation, 6, 2)}  {_cell(memory, 7, 0)}")
    sets = sorted(summary.together(windows), key=lambda one: -sum(one.throughputs))
    if sets:
        shown = sets if len(sets) <= _SHOWN_SETS else [*sets[: _SHOWN_SETS // 2], *sets[-_SHOWN_SETS // 2 :]]
        width = max(len(one.visit) for one in shown)
        print(f"\n{'together (most and least saving)':{width}}  {'saving':>6}  rate together / rate alone, per member")
        for one in shown:
            saving = sum(one.savings) / len(one.savings)
            print(f"{one.visit:{width}}  {saving:6.2f}  {'  '.join(f'{n:.2f}' for n in one.throughputs)}")
    problems = Counter(event["event"] for event in events)
    text = ", ".join(f"{count} {kind}" for kind, count in sorted(problems.items())) or "nothing went wrong"
    print(f"\n{len({window['visit'] for window in windows})} visits, {len(windows)} windows; {text}", flush=True)


def minutes(seconds: float) -> str:
    """A length of time in words."""
    return f"{seconds:.0f} s" if seconds < 100.0 else f"{seconds / 60.0:.0f} min"


def _rates(visit: Visit, windows: Sequence[Record]) -> str:
    if len(visit.members) == 1:
        solo = summary.solos(windows)[visit.members[0]]
        return f"{_cell(solo.rate, 0, 2)} steps/s, utilisation {_cell(solo.utilisation, 0, 2)}"
    sets = summary.together(windows)
    if not sets:
        return "too few steps in a window"
    return "  ".join(f"{name} x{n:.2f}" for name, n in zip(visit.members, sets[0].throughputs, strict=True))


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"
