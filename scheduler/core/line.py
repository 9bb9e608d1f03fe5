"""The waiting jobs as arrays, so that a cycle over fifty thousand of them looks at few objects.

Jobs that ask placement for the same thing share one ``Ask``. Once an ask was refused it is *settled*: it is refused
for as long as no GPU changes, and when some do, only those are looked at (``Screen``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from cotenant.configs.settings import PlacementSettings
from cotenant.placement.fleet import Flags, Fleet, Floats, Integers
from cotenant.placement.shares import FLOOR, TOLERANCE, thousandths
from cotenant.placement.types import FitError, NoFit, Request
from cotenant.scheduler.core.attempts import Attempts
from cotenant.scheduler.core.columns import Columns, NamedColumns
from cotenant.scheduler.core.deadlines import left_of
from cotenant.scheduler.core.model import Job
from cotenant.scheduler.core.priority import (
    AGE_WORTH_A_CLASS_S,
    Standing,
    lasting_parts,
    paces_of,
    pressing_parts,
    size_part,
)
from cotenant.scheduler.core.requests import Key
from cotenant.scheduler.core.snapshot import Told

_NO_DEADLINE = math.inf
_UNKNOWN = math.nan
_ANY_MEMORY = np.iinfo(np.int64).max


@dataclass(slots=True, eq=False)
class Ask:
    """What some waiting jobs have in common.

    Attributes:
        key: What tells it apart from others.
        number: Its place in arrays with one entry per ask.
        jobs: Ids of the jobs.
        refusal: Why they wait, as of when all GPUs were last looked at; None = that never happened.
        settled: They are refused on every GPU that has not changed since the last cycle.
        over_quota: They are refused for their tenant's or queue's sake.
        request: What it asks of placement, once the arrays of the screen say what it needs; None until then.
    """

    key: Key
    number: int
    jobs: dict[str, None] = field(default_factory=dict)
    refusal: NoFit | None = None
    settled: bool = False
    over_quota: bool = False
    request: Request | None = None

    @property
    def limited(self) -> bool:
        """Whether a limit of a tenant or queue applies to the jobs."""
        return bool(self.key[1].queue)

    @property
    def one_host(self) -> bool:
        """Whether a job needs its GPUs on one host."""
        return self.key[1].gang == "host"

    @property
    def pinned(self) -> bool:
        """Whether the jobs may run on one host only."""
        return self.key[3] is not None


class Line:
    """The waiting jobs, with what each ask was last told.

    Attributes:
        asks: By number; None where there is none.
        attempts: Attempts to have others make room for one of them that failed.
    """

    def __init__(self) -> None:
        self.attempts = Attempts()
        self.asks: list[Ask | None] = []
        self._by_key: dict[Key, Ask] = {}
        self._free: list[int] = []
        self._programs: dict[str, dict[str, None]] = {}  # waiting jobs by their program
        self._of_program: dict[str, dict[int, Ask]] = {}  # asks by the program whose profile counts
        self._program: dict[str, str] = {}
        self._rows = NamedColumns(
            points=float, critical=float, small=float, deadline=float, duration=float, left=float,
            queued_at=float, not_before=float, slowdown=float, seq=int, gpus=int, ask=int, tenant=int, queue=int,
        )  # fmt: skip
        self._names: dict[str, int] = {}
        self._screen = Columns(
            fixed=int, peak=int, padded=int, compute=float, alone=bool, gpus=int, one_host=bool, settled=bool,
            limited=bool, never=bool, over_quota=bool, cpus=int,
        )  # fmt: skip

    def __len__(self) -> int:
        """Return the number of waiting jobs."""
        return len(self._rows.ids)

    def __contains__(self, job_id: object) -> bool:
        """Whether the job waits."""
        return isinstance(job_id, str) and self._rows.row(job_id) is not None

    def different(self) -> int:
        """Return how many asks wait."""
        return len(self._by_key)

    # -- who waits --------------------------------------------------------------------------------------------------

    def put(self, job: Job, key: Key, max_slowdown: float) -> None:
        """Take in a waiting job, or what has changed about it."""
        job_id, hints = job.spec.job_id, job.spec.hints
        row = self._rows.row(job_id)
        if row is not None and self._ask_at(row).key != key:
            self.remove(job_id)
            row = None
        if row is None:
            row = self._rows.add(job_id)
            ask = self._join(job_id, key)
            self._rows.fill(row, ask=ask.number)
            self._program[job_id] = job.spec.fingerprint
            self._programs.setdefault(job.spec.fingerprint, {})[job_id] = None
        left_s = left_of(hints, job.done_s)
        points, critical, small = lasting_parts(job)
        self._rows.fill(
            row,
            points=points,
            critical=critical,
            small=small,
            deadline=_NO_DEADLINE if hints.deadline_s is None else hints.deadline_s,
            duration=_UNKNOWN if hints.expected_duration_s is None else hints.expected_duration_s,
            left=_UNKNOWN if left_s is None else left_s,
            queued_at=job.queued_at,
            not_before=job.not_before,
            slowdown=max_slowdown,
            seq=job.seq,
            gpus=hints.gpus,
            tenant=self._names.setdefault(hints.tenant, len(self._names)),
            queue=self._names.setdefault(hints.queue, len(self._names)),
        )

    def remove(self, job_id: str) -> None:
        """Forget a job that no longer waits; one that is not there is no error."""
        row = self._rows.row(job_id)
        if row is None:
            return
        ask = self._ask_at(row)
        del ask.jobs[job_id]
        program = self._program.pop(job_id)
        del self._programs[program][job_id]
        if not self._programs[program]:
            del self._programs[program]
        if not ask.jobs:
            del self._by_key[ask.key]
            del self._of_program[ask.key[0]][ask.number]
            if not self._of_program[ask.key[0]]:
                del self._of_program[ask.key[0]]
            self.asks[ask.number] = None
            self._free.append(ask.number)
        self._rows.remove(job_id)

    def _join(self, job_id: str, key: Key) -> Ask:
        ask = self._by_key.get(key)
        if ask is None:
            number = self._free.pop() if self._free else self._screen.grow()
            ask = self._by_key[key] = Ask(key, number)
            if number == len(self.asks):
                self.asks.append(ask)
            self.asks[number] = ask
            asked = key[1]
            self._screen.fill(
                number,
                settled=False,
                limited=ask.limited,
                never=False,
                over_quota=False,
                gpus=asked.gpus,
                one_host=ask.one_host,
            )
            self._of_program.setdefault(key[0], {})[number] = ask
        elif ask.refusal is not None and ask.refusal.never:
            # Those that wait all the same were given their chance earlier: whoever comes now is told.
            self.unsettle([ask])
        ask.jobs[job_id] = None
        return ask

    def _ask_at(self, row: int) -> Ask:
        ask = self.asks[int(self._rows.whole("ask")[row])]
        assert ask is not None
        return ask

    def ask_of(self, job_id: str) -> Ask:
        """Return what the job asks.

        Raises:
            KeyError: It does not wait.
        """
        return self._ask_at(self.row(job_id))

    def of_program(self, fingerprint: str) -> list[str]:
        """Return the ids of the waiting jobs of a program."""
        return list(self._programs.get(fingerprint, ()))

    def asks_of(self, fingerprint: str) -> list[Ask]:
        """Return the asks that rest on what is known of a program."""
        return list(self._of_program.get(fingerprint, {}).values())

    def job_id(self, row: int) -> str:
        """Return the id of the job in this row."""
        return self._rows.ids[row]

    def row(self, job_id: str) -> int:
        """Return the row of a job.

        Raises:
            KeyError: It does not wait.
        """
        return self._rows.row_of(job_id)

    def seqs(self, rows: Integers) -> Integers:
        """Return the order of submission of the jobs in these rows."""
        return self._rows.integers("seq")[rows]

    def gpus_wanted(self) -> int:
        """Return the GPUs all waiting jobs ask for together."""
        return int(self._rows.integers("gpus").sum())

    # -- what they were told ----------------------------------------------------------------------------------------

    def unsettle(self, asks: Iterable[Ask] | None = None) -> None:
        """Have asks looked at again in full; None = all."""
        for ask in list(self._by_key.values()) if asks is None else asks:
            ask.settled, ask.request = False, None
            self._screen.fill(ask.number, settled=False)

    def forget(self) -> None:
        """Forget what everybody was told."""
        self.unsettle()
        for ask in self._by_key.values():
            ask.refusal = None

    def settle(self, ask: Ask) -> None:
        """Note that an ask is refused on every GPU there is."""
        ask.settled = True
        self._screen.fill(ask.number, settled=True)

    def describe(self, ask: Ask, request: Request, margin: float) -> None:
        """Note what an ask needs, for the screen (see ``shares.memory_needs``)."""
        peak, certain = request.profile.memory_bytes, request.profile.source != "class"
        self._screen.fill(
            ask.number,
            fixed=-1 if request.memory_bytes is None else request.memory_bytes,
            peak=peak if peak is not None and certain else -1,
            padded=_ANY_MEMORY if peak is None else min(_ANY_MEMORY, math.ceil(peak * (1.0 + margin))),
            compute=request.compute or FLOOR,
            alone=request.exclusive or request.profile.source == "unknown",
            cpus=thousandths(request.cpus) * (request.gpus if request.one_host else 1),
        )
        ask.request = request

    def refusals(self) -> Iterator[Ask]:
        """Yield the asks that were told why they wait."""
        return (ask for ask in self._by_key.values() if ask.refusal is not None)

    def refused_rows(self) -> Integers:
        """Return the rows of the jobs that were told why they wait, and not for their tenant's or queue's sake."""
        told = [ask is not None and ask.refusal is not None and not ask.over_quota for ask in self.asks]
        return np.flatnonzero(np.array(told, dtype=np.bool_)[self.ask_numbers()])

    def why(self, job_id: str) -> tuple[FitError, ...]:
        """Return what the job was told; empty when it was not looked at, or does not wait."""
        refusal = self.ask_of(job_id).refusal if job_id in self else None
        return refusal.errors if refusal else ()

    def told(self, seq_of: Callable[[str], int]) -> Iterator[Told]:
        """Yield what asks were told, each once however many jobs it has, in order of submission."""
        groups = ((ask, sorted(ask.jobs, key=seq_of)) for ask in self.refusals())
        for ask, job_ids in sorted(groups, key=lambda each: seq_of(each[1][0])):
            if ask.refusal is not None:
                yield Told(ask.refusal, ask.settled, ask.over_quota, tuple(job_ids))

    def tell(self, told: Told) -> None:
        """Take over what ``told`` yielded once."""
        ask = self.ask_of(told.job_ids[0])
        ask.refusal, ask.over_quota = told.refusal, told.over_quota
        self.note_never(ask)
        if told.settled:
            self.settle(ask)

    def undescribed(self) -> list[Ask]:
        """Return the asks that are settled without the screen knowing what they need."""
        return [ask for ask in self._by_key.values() if ask.settled and ask.request is None]

    def note_never(self, ask: Ask) -> None:
        """Note in the arrays what an ask was told."""
        never = ask.refusal is not None and ask.refusal.never
        self._screen.fill(ask.number, never=never, over_quota=ask.over_quota)

    @property
    def settled(self) -> Flags:
        """By number, whether the ask is settled."""
        return self._screen.flags("settled")

    @property
    def limited(self) -> Flags:
        """By number, whether a limit of a tenant or queue applies."""
        return self._screen.flags("limited")

    @property
    def single(self) -> Flags:
        """By number, whether the jobs ask for one GPU each."""
        return np.asarray(self._screen.integers("gpus") == 1)

    @property
    def never(self) -> Flags:
        """By number, whether waiting does not help."""
        return self._screen.flags("never")

    @property
    def over_quota(self) -> Flags:
        """By number, whether the jobs wait for their tenant's or queue's sake."""
        return self._screen.flags("over_quota")

    def gpus_of(self, ask: Ask) -> int:
        """Return the GPUs each of the jobs asks for."""
        return ask.key[1].gpus

    def screen(
        self, fleet: Fleet, places: Integers, settings: PlacementSettings, numbers: Integers | None = None
    ) -> Flags:
        """Return which asks everything but the interference lets onto these GPUs, shape (asks, places).

        It repeats ``Examination``'s own questions for all asks at once; jobs kept apart from others count as let in.

        Args:
            fleet: All GPUs.
            places: Positions of those asked about.
            settings: How jobs are packed.
            numbers: The only asks to look at; None = all.
        """
        columns, which = self._screen, slice(None) if numbers is None else numbers
        fixed, peak = columns.integers("fixed")[which, None], columns.integers("peak")[which, None]
        capacity = fleet.capacity[places]
        guessed = np.where(peak > capacity, peak, np.minimum(columns.integers("padded")[which, None], capacity))
        needs = np.where(fixed >= 0, fixed, guessed)
        crowd = fleet.crowd[places]
        joins = (crowd < settings.max_jobs_per_gpu) & (fleet.observed_s[places] >= settings.profile_s)
        shares = joins & ~columns.flags("alone")[which, None]
        shares &= columns.floats("compute")[which, None] <= fleet.reservable[places] + TOLERANCE
        fits: Flags = (needs <= fleet.free[places]) & (shares | (crowd == 0))
        fits &= fleet.schedulable[places] & ~fleet.exclusive[places]
        cpus = columns.integers("cpus")[which, None]
        if np.count_nonzero(cpus):
            fits &= (cpus == 0) | (cpus <= fleet.spare()[fleet.host[places]])
        return fits

    def screen_gangs(self, lets_in: Flags, fleet: Fleet, places: Integers, settings: PlacementSettings) -> None:
        """Take out of what ``screen`` returned the jobs of several GPUs that do not find enough of them together.

        Args:
            lets_in: Changed in place, shape (asks, places).
            fleet: All GPUs.
            places: Positions of the GPUs it is about.
            settings: How jobs are packed.
        """
        gpus, on_one = self._screen.integers("gpus"), self._screen.flags("one_host")
        gangs = (gpus > 1) & lets_in.any(axis=1)
        spread, together = np.flatnonzero(gangs & ~on_one), np.flatnonzero(gangs & on_one)
        if len(spread):
            fits = self.screen(fleet, fleet.everywhere, settings, spread)
            lets_in[spread[fits.sum(axis=1) < gpus[spread]]] = False
        if len(together):
            near = fleet.on_hosts(fleet.host[places])
            fits = self.screen(fleet, near, settings, together)
            hosts, host_of = np.unique(fleet.host[near], return_inverse=True)
            counts = fits.astype(np.int64) @ (host_of[:, None] == np.arange(len(hosts)))  # by ask and host
            enough = counts >= gpus[together, None]
            lets_in[together] &= enough[:, np.searchsorted(hosts, fleet.host[places])]

    # -- who comes first --------------------------------------------------------------------------------------------

    def due(self, now: float) -> Flags:
        """Return which rows may be placed now."""
        flags: Flags = self._rows.floats("not_before") <= now
        return flags

    def ask_numbers(self) -> Integers:
        """Return the number of each row's ask."""
        return self._rows.integers("ask")

    def waiting_since(self, rows: Integers) -> Floats:
        """Return since when the jobs in these rows have waited, Unix seconds."""
        return self._rows.floats("queued_at")[rows]

    def waited_since(self, at: float) -> Flags:
        """Return which rows have waited at least since then."""
        flags: Flags = self._rows.floats("queued_at") <= at
        return flags

    def gone_by(self, now: float, at: float) -> Flags:
        """Return which rows say that they are gone by then if they start now, as slowed down as they accept."""
        rows = self._rows
        flags: Flags = now + rows.floats("duration") * rows.floats("slowdown") <= at  # never so for unknown ones
        return flags

    def scores(self, rows: Integers | slice, now: float, standing: Standing) -> Floats:
        """Return ``priority.score`` of the jobs in these rows; a slice copies less than their numbers do."""
        columns, rules = self._rows, standing.settings
        total = columns.floats("points")[rows]
        deadline = columns.floats("deadline")[rows]
        urgency, risk = np.zeros(len(deadline)), np.zeros(len(deadline))
        dated = np.flatnonzero(deadline < _NO_DEADLINE)
        if len(dated):
            left_s, alone_s = deadline[dated] - now, columns.floats("left")[rows][dated]
            urgency[dated], risk[dated] = pressing_parts(left_s, alone_s)
        tenants = np.array([standing.tenants.get(name, 1.0) for name in self._names])
        queues = np.array([standing.queues.get(name, 1.0) for name in self._names])
        fair = 0.5 * (tenants[columns.integers("tenant")[rows]] + queues[columns.integers("queue")[rows]])
        size = size_part(columns.floats("small")[rows], rules)
        total = total + rules.urgency_weight * urgency
        total = total + rules.criticality_weight * columns.floats("critical")[rows]
        total = total + rules.size_weight * size
        total = total + rules.fair_share_weight * fair
        total = total + risk
        waited: Floats = np.maximum(0.0, now - columns.floats("queued_at")[rows])
        waited = paces_of(size) * waited / AGE_WORTH_A_CLASS_S
        value: Floats = total + waited
        return value

    def order(self, rows: Integers, scores: Floats) -> Integers:
        """Return how to sort these rows: highest score first, then by submission."""
        return np.lexsort((self._rows.integers("seq")[rows], -scores))

    def first(self, rows: Integers, scores: Floats) -> int:
        """Return which of these rows comes first, as an index into ``rows``; there is at least one."""
        best = np.flatnonzero(scores == scores.max())
        return int(best[self._rows.integers("seq")[rows[best]].argmin()])

    def rank(self, row: int, score: float) -> tuple[float, int]:
        """Return what a row is sorted by: smaller comes first."""
        return -score, int(self._rows.whole("seq")[row])


def lanes(line: Line, rows: Integers, scores: Floats, extra: Flags) -> Sequence[tuple[int, bool, Integers, Floats]]:
    """Return the rows by ask and flag, each group in no order: number of the ask, flag, rows, scores."""
    if not len(rows):
        return []
    keys = line.ask_numbers()[rows] * 2 + extra
    grouped = np.argsort(keys.astype(np.min_scalar_type(keys.max())), kind="stable")  # few keys: in linear time
    keys = keys[grouped]
    starts = np.flatnonzero(np.r_[True, np.diff(keys) != 0])
    ends = np.r_[starts[1:], len(rows)]
    return [
        (int(keys[start]) // 2, bool(keys[start] % 2), rows[mine], scores[mine])
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        for mine in (grouped[start:end],)
    ]
