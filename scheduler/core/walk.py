"""A walk along the line of waiting jobs, in order, that stops only where something may have changed.

What was refused stays refused while GPUs only fill up. So of the asks that were refused before, those are offered again
that some GPU lets in which has changed since the last cycle, and only those GPUs are looked at: one ask after the other
as long as some find a place, and all of the rest at once when several in a row have not. Two things depend on
the whole line: GPUs are held for the first job that has waited long, even if nothing has changed for it; and jobs that
are gone in time may use held GPUs (see ``waiting``).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from cotenant.placement.engine import Cotenant
from cotenant.placement.fleet import Flags, Floats, Integers
from cotenant.placement.prospects import too_slow
from cotenant.placement.types import NoFit, Placement
from cotenant.scheduler.core.line import Ask, Line, lanes
from cotenant.scheduler.core.model import Job
from cotenant.scheduler.core.proposal import MOST_EXCHANGED, Proposal, is_over_quota
from cotenant.scheduler.core.waiting import RESERVE_AFTER_S

FEW_GPUS, FEW_ASKS = 64, 32  # of so few, all are looked at whenever a GPU has changed: then what jobs are told is fresh
MOST_LATE = 8  # refused jobs that may change places with others
REFUSED_IN_A_ROW = 8  # asks, before all of the rest are weighed at once


def walk(proposal: Proposal) -> list[Ask]:
    """Offer places to the waiting jobs of the state.

    Returns:
        The asks that were found to be never possible.
    """
    return _Walk(proposal).go()


@dataclass(slots=True)
class _Lane:
    """Waiting jobs with the same ask; ``early``: they are gone in time to use held GPUs.

    They are put in order when the turn of the second one comes: mostly it does not.
    """

    ask: Ask
    early: bool
    rows: Integers
    scores: Floats
    at: int
    in_order: bool = False

    @property
    def row(self) -> int:
        """The row of the next one."""
        return int(self.rows[self.at])

    def advance(self, line: Line) -> None:
        """Go on to the next one."""
        if not self.in_order:
            order = line.order(self.rows, self.scores)
            self.rows, self.scores, self.at, self.in_order = self.rows[order], self.scores[order], 0, True
        self.at += 1

    def left(self) -> tuple[Integers, Floats]:
        """Return rows and scores of all whose turn has not passed, the next one included."""
        return (self.rows[self.at :], self.scores[self.at :]) if self.in_order else (self.rows, self.scores)


@dataclass(slots=True, order=True)
class _Stop:
    """Where the walk stops: smaller ranks come first. ``lane`` None: at a job that may have GPUs held for it."""

    rank: tuple[float, int]
    row: int = field(compare=False)
    lane: _Lane | None = field(compare=False, default=None)


class _Walk:
    def __init__(self, proposal: Proposal) -> None:
        self._proposal, self._state = proposal, proposal.state
        self._line, self._now = self._state.line, self._state.now
        self._standing = self._state.standing()
        self._hopeless: list[Ask] = []
        self._scores: Floats | None = None
        self._offered = np.zeros(len(self._line), dtype=np.bool_)
        self._due = self._line.due(self._now)
        self._offer_claimed()
        self._screen_all()

    def _screen_all(self) -> None:
        """Note which asks may find a place. GPUs that were kept are open by now to whoever they may take besides."""
        line, state, fleet = self._line, self._state, self._proposal.fleet
        for ask in line.undescribed():
            self._describe(ask)
        self._news = np.array(sorted(map(fleet.position, state.floor.changed)), dtype=np.int64)
        self._column = {place: column for column, place in enumerate(self._news.tolist())}
        self._lets_in = self._screen(self._news)
        if isinstance(self._proposal.policy, Cotenant) and len(self._news):
            line.screen_gangs(self._lets_in, fleet, self._news, self._proposal.packing)
        self._all_anew = len(fleet) <= FEW_GPUS and line.different() <= FEW_ASKS and len(self._news) > 0
        self._open = ~line.settled | line.limited | self._lets_in.any(axis=1)  # asks that may find a place
        self._open |= self._all_anew
        self._refused = np.zeros(len(self._open), dtype=np.bool_)
        self._refused_early = self._refused.copy()
        self._narrowed = self._refused.copy()  # refused when some GPUs were closed to them
        self._cannot_hold = np.zeros(len(self._open), dtype=np.bool_)
        self._in_a_row = 0  # asks that were refused
        self._held_open: Integers = np.zeros(0, dtype=np.int64)
        self._lets_in_early = self._screen(self._held_open)

    def _describe(self, ask: Ask) -> None:
        job = self._state.jobs[next(iter(ask.jobs))]
        self._line.describe(ask, self._state.request_of(job), self._proposal.packing.memory_margin)

    def go(self) -> list[Ask]:
        """Walk."""
        self._offer_to_holder()
        stops = self._stops()
        while stops:
            stop = heapq.heappop(stops)
            held = self._proposal.plan.held.reservation
            if stop.lane is None:
                if held is None and self._hold_for(stop.row):
                    stops = self._stops(after=stop.rank)
                elif held is None:
                    self._push_waiter(stops, None)
                continue
            if (self._refused_early if stop.lane.early else self._refused)[stop.lane.ask.number]:
                continue
            if self._place(stop.lane):
                self._in_a_row = 0
                self._push_lane(stops, stop.lane)
                continue
            self._in_a_row += 1
            if held is None and self._may_hold(stop.lane.ask):
                self._push_waiter(stops, stop.lane)
            if self._in_a_row == REFUSED_IN_A_ROW and self._weigh():
                stops = self._stops(after=stop.rank)
        self._exchange()
        self._settle()
        return self._hopeless

    # -- where to stop ----------------------------------------------------------------------------------------------

    def _screen(self, places: Integers) -> Flags:
        """Return which asks may fit on these GPUs, shape (asks, places)."""
        line, proposal = self._line, self._proposal
        if isinstance(proposal.policy, Cotenant):
            return line.screen(proposal.fleet, places, proposal.packing)
        return np.ones((len(line.settled), len(places)), dtype=np.bool_)

    def _stops(self, after: tuple[float, int] | None = None) -> list[_Stop]:
        """Return where to stop, as a heap: at the first job of each lane, and at the first that waited long."""
        line, numbers = self._line, self._line.ask_numbers()
        early = self._early()
        wanted = self._due & ~self._offered & ((self._open & ~self._refused)[numbers] | early)
        rows = np.flatnonzero(wanted)
        scores = self._scores_of(rows)
        if after is not None:
            behind = (-scores > after[0]) | ((-scores == after[0]) & (line.seqs(rows) > after[1]))
            rows, scores = rows[behind], scores[behind]
        stops: list[_Stop] = []
        for number, is_early, mine, their_scores in lanes(line, rows, scores, early[rows]):
            ask = line.asks[number]
            if ask is not None:
                self._push_lane(stops, _Lane(ask, is_early, mine, their_scores, line.first(mine, their_scores)))
        if self._proposal.plan.held.reservation is None:
            self._push_waiter(stops, None)
        return stops

    def _scores_of(self, rows: Integers) -> Floats:
        """Return the priority values of these rows; once many are asked for, all are worked out and kept."""
        line = self._line
        if self._scores is None and 2 * len(rows) < len(line):
            return line.scores(rows, self._now, self._standing)
        if self._scores is None:
            self._scores = line.scores(slice(None), self._now, self._standing)
        return np.asarray(self._scores[rows])

    def _early(self) -> Flags:
        """Return which rows may use held GPUs before these are needed."""
        held, line = self._proposal.plan.held, self._line
        if not held.open_until:
            return np.zeros(len(line), dtype=np.bool_)
        proposal, until = self._proposal, max(held.open_until.values())
        self._held_open = np.array(sorted(map(proposal.fleet.position, held.open_until)), dtype=np.int64)
        proposal.show_held(-np.inf)
        self._lets_in_early = self._screen(self._held_open)
        proposal.show_held()
        may = self._lets_in_early.any(axis=1) | (self._open & ~self._refused)
        flags: Flags = may[line.ask_numbers()] & line.gone_by(self._now, until)
        return flags

    def _push_lane(self, stops: list[_Stop], lane: _Lane) -> None:
        if lane.at < len(lane.rows):
            rank = self._line.rank(lane.row, float(lane.scores[lane.at]))
            heapq.heappush(stops, _Stop(rank, lane.row, lane))

    def _push_waiter(self, stops: list[_Stop], lane: _Lane | None) -> None:
        """Stop at the first refused job that waited long: of this lane, or of all asks that nothing changed for."""
        line, since = self._line, self._now - RESERVE_AFTER_S
        if lane is not None:
            rows, scores = lane.left()
            late = line.waited_since(since)[rows]
            rows, scores = rows[late], scores[late]
        else:
            may = line.settled & ~self._open & ~line.never & ~self._cannot_hold
            rows = np.flatnonzero(self._due & ~self._offered & line.waited_since(since) & may[line.ask_numbers()])
            scores = self._scores_of(rows)
        if len(rows):
            first = line.first(rows, scores)
            heapq.heappush(stops, _Stop(line.rank(int(rows[first]), float(scores[first])), int(rows[first])))

    # -- at a stop --------------------------------------------------------------------------------------------------

    def _job(self, row: int) -> Job:
        return self._state.jobs[self._line.job_id(row)]

    def _offer_claimed(self) -> None:
        """Jobs that GPUs are kept for come before all others."""
        claimants = (job_id for job_id in self._state.moves.claims if job_id in self._line)
        rows = np.array([row for row in map(self._line.row, claimants) if self._due[row]], dtype=np.int64)
        scores = self._scores_of(rows)
        for row in rows[self._line.order(rows, scores)].tolist():
            self._offered[row] = self._proposal.offer_claimed(self._job(row))

    def _offer_to_holder(self) -> None:
        """The job that GPUs are held for comes first."""
        held = self._state.reservation
        if held is None or held.job_id not in self._line:
            return
        row = self._line.row(held.job_id)
        if not self._due[row] or self._offered[row]:
            return
        self._offered[row] = True
        ask, job = self._line.ask_of(held.job_id), self._job(row)
        answer = self._answer(ask, job, early=False) if self._open[ask.number] else ask.refusal
        if isinstance(answer, NoFit) and not is_over_quota(answer) and not answer.never:
            self._proposal.hold_for(job)

    def _place(self, lane: _Lane) -> bool:
        """Offer a place to the next job of the lane; whether it took one."""
        answer = self._answer(lane.ask, self._job(lane.row), early=lane.early)
        if not isinstance(answer, Placement):
            return False
        self._offered[lane.row] = True
        lane.advance(self._line)
        self._note_filled(answer)
        return True

    def _note_filled(self, placement: Placement) -> None:
        """Note which asks the GPUs of a placement let in no more: nobody need ask about each of them."""
        fleet, line, proposal = self._proposal.fleet, self._line, self._proposal
        places = (fleet.position(share.gpu_id) for share in placement.shares)
        columns = np.array([self._column[place] for place in places if place in self._column], dtype=np.int64)
        if len(columns) and isinstance(proposal.policy, Cotenant):
            waits = line.single & self._open & ~self._refused  # a gang may yet have the other GPUs of such a host
            asks = np.flatnonzero(waits & self._lets_in[:, columns].any(axis=1))
            still = line.screen(fleet, self._news[columns], proposal.packing, asks)
            self._lets_in[np.ix_(asks, columns)] &= still

    def _answer(self, ask: Ask, job: Job, *, early: bool) -> Placement | NoFit:
        """Place the job, or note why all with this ask have to wait."""
        places = self._places(ask, early=early)
        nowhere = places is not None and not len(places) and not ask.limited
        answer = NoFit(job.spec.job_id, (), never=False) if nowhere else self._proposal.answer(job, places)
        if isinstance(answer, Placement):
            return answer
        over_quota = is_over_quota(answer)
        if places is None or over_quota:
            ask.refusal, ask.over_quota = answer, over_quota
            self._line.note_never(ask)
            if answer.never:
                self._hopeless.append(ask)
        self._refused[ask.number] = True
        self._refused_early[ask.number] |= early
        self._narrowed[ask.number] |= self._proposal.narrowed and not (ask.pinned or nowhere)
        if over_quota:
            self._proposal.waiting_gpus -= self._line.gpus_of(ask) * self._count(ask)
        return answer if places is None or ask.refusal is None else ask.refusal

    def _count(self, ask: Ask) -> int:
        mine = self._line.ask_numbers() == ask.number
        return int(np.count_nonzero(mine & self._due & ~self._offered))

    def _places(self, ask: Ask, *, early: bool) -> Integers | None:
        """Return the GPUs to look at; None = all."""
        if not ask.settled or ask.pinned or self._all_anew:
            return None
        news = self._news[self._lets_in[ask.number]]
        if early:
            news = np.union1d(news, self._held_open[self._lets_in_early[ask.number]])
        if self._line.gpus_of(ask) == 1:
            return np.asarray(news, dtype=np.int64)
        fleet = self._proposal.fleet
        return fleet.on_hosts(fleet.host[news]) if ask.one_host else None

    def _weigh(self) -> bool:
        """Note for which of the asks not looked at yet sharing a changed GPU would slow somebody down too much.

        The same is found one by one, at a hundred times the cost. More company makes nobody faster: who is turned away
        now would be after others were placed.

        Returns:
            Whether asks need not be looked at any more: no GPU is left for them, and GPUs are held already.
        """
        proposal, line, fleet = self._proposal, self._line, self._proposal.fleet
        if not isinstance(proposal.policy, Cotenant) or self._all_anew:
            return False
        shared = np.flatnonzero(fleet.crowd[self._news] > 0)
        rest = np.flatnonzero(line.single & line.settled & ~line.limited & self._open & ~self._refused)
        asks = [ask for ask in map(line.asks.__getitem__, rest.tolist()) if ask is not None and not ask.pinned]
        asked = [ask.request for ask in asks if ask.request is not None]
        if not len(shared) or len(asked) < REFUSED_IN_A_ROW:
            return False
        numbers = np.array([ask.number for ask in asks if ask.request is not None], dtype=np.int64)
        who, where = np.nonzero(self._lets_in[np.ix_(numbers, shared)])
        views = [fleet.views[place] for place in self._news[shared].tolist()]
        pairs = [asked[row] for row in who.tolist()], [views[column] for column in where.tolist()]
        slow = too_slow(*pairs, proposal.predictor, proposal.packing)
        self._lets_in[numbers[who[slow]], shared[where[slow]]] = False
        if proposal.plan.held.reservation is None:
            return False
        self._refused[numbers[~self._lets_in[numbers].any(axis=1)]] = True
        return True

    def _may_hold(self, ask: Ask) -> bool:
        refusal = ask.refusal
        return refusal is not None and not refusal.never and not ask.over_quota

    def _hold_for(self, row: int) -> bool:
        if self._proposal.hold_for(self._job(row)):
            return True
        self._cannot_hold[self._line.ask_numbers()[row]] = True
        return False

    # -- at the end -------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        proposal, line = self._proposal, self._line
        late: list[Job] = []
        if proposal.plan.held.reservation is None and 0 < len(proposal.plan.placed) <= MOST_EXCHANGED:
            may = ~line.over_quota
            rows = np.flatnonzero(self._due & ~self._offered & may[line.ask_numbers()])
            scores = self._scores_of(rows)
            if len(rows) > MOST_LATE:
                worst = np.partition(scores, len(scores) - MOST_LATE)[-MOST_LATE]
                rows, scores = rows[scores >= worst], scores[scores >= worst]
            late = [self._job(row) for row in rows[line.order(rows, scores)][:MOST_LATE].tolist()]
        placed = [self._state.jobs[each.job_id] for each in proposal.plan.placed]
        for job_id in proposal.exchange(late, placed):
            self._offered[line.row(job_id)] = True

    def _settle(self) -> None:
        """Note which asks are refused everywhere now; GPUs with more room than they were offered count as changed."""
        line, proposal, state = self._line, self._proposal, self._state
        for number in np.flatnonzero(self._open).tolist():
            ask = line.asks[number]
            if ask is None:
                continue
            if self._refused[number] and not ask.over_quota and not self._narrowed[number]:
                if ask.request is None:
                    self._describe(ask)
                line.settle(ask)
            else:
                line.unsettle([ask])
        state.floor.changed = proposal.unseen()
