"""The hard constraints: which GPUs may take this job beside their residents, and what would happen there?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.profiles import from_hints
from cotenant.forecasting.types import InterferencePredictor, ThroughputPrediction
from cotenant.placement.fleet import Flags, Fleet, Floats, Integers, Part, does_not_share, part_of
from cotenant.placement.objective import slowness
from cotenant.placement.processors import most_of, rooms
from cotenant.placement.prospects import Outlooks
from cotenant.placement.room import cost, free_parts, parts_of, room_lost
from cotenant.placement.shares import FLOOR, TOLERANCE, free_memory, memory_need, memory_needs, thousandths
from cotenant.placement.types import FitError, FitErrorKind, GpuView, NoFit, Request, Resident

NEVER: frozenset[FitErrorKind] = frozenset({"memory_never", "cpus_never", "instance"})
OF_HOSTS: frozenset[FitErrorKind] = frozenset({"cpus_short", "cpus_never"})  # they count hosts, not GPUs
MOST_PREDICTED = 128  # shared GPUs that one decision looks at closely: predicting thousands would take too long

_NONE: Integers = np.zeros(0, dtype=np.int64)
_NOTHING: Floats = np.zeros(0)

_Numbers = Integers | Floats | float | None
_Test = tuple[FitErrorKind, Flags, _Numbers, _Numbers]
"""What may be in the way, where it is, what is needed there and what there is."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is predicted for one GPU.

    Attributes:
        after: Normalised throughput of every resident, in order, and last of the job.
        saving: Packing saving of the GPU afterwards; 0 when the job is alone there.
        gain: Score of the GPU afterwards minus its score now, less what a slower GPU type costs the job. Where it is
            known what jobs typically ask for, what the place costs them counts instead of the saving.
        harm: What the job loses against the fastest GPU type alone, plus what its neighbours lose, by their weight.
    """

    after: Sequence[ThroughputPrediction]
    saving: float
    gain: float
    harm: float


@dataclass(frozen=True, slots=True)
class Candidates:
    """GPUs that may take a job, in order.

    Attributes:
        fleet: All GPUs.
        places: Their positions, ascending, shape (candidates,).
        needs: Memory the job would reserve on each, bytes.
        gain: ``Outlook.gain`` of each.
        harm: ``Outlook.harm`` of each.
    """

    fleet: Fleet
    places: Integers = field(default_factory=lambda: _NONE)
    needs: Integers = field(default_factory=lambda: _NONE)
    gain: Floats = field(default_factory=lambda: _NOTHING)
    harm: Floats = field(default_factory=lambda: _NOTHING)

    def only(self, keep: Flags) -> Candidates:
        """Return those for which ``keep`` holds."""
        return Candidates(self.fleet, self.places[keep], self.needs[keep], self.gain[keep], self.harm[keep])

    def joined(self, other: Candidates) -> Candidates:
        """Return these and others of the same fleet, in order."""
        if not len(other.places) or not len(self.places):
            return self if len(self.places) else other
        places = np.concatenate([self.places, other.places])
        order = np.argsort(places, kind="stable")
        return Candidates(
            self.fleet,
            places[order],
            np.concatenate([self.needs, other.needs])[order],
            np.concatenate([self.gain, other.gain])[order],
            np.concatenate([self.harm, other.harm])[order],
        )


class Examination:
    """Looks for GPUs that may take one job, the cheap questions first: interference is predicted only when asked for.

    Args:
        request: What the job asks.
        gpus: The GPUs.
        predictor: Predicts how jobs on one GPU slow each other down.
        settings: How jobs are packed.
        most_jobs: Most jobs on a GPU; None = as the settings say.
    """

    def __init__(
        self,
        request: Request,
        gpus: Sequence[GpuView],
        predictor: InterferencePredictor,
        settings: PlacementSettings,
        most_jobs: int | None = None,
    ) -> None:
        self.request, self._part = request, part_of(gpus)
        self.fleet, places, self._rows = self._part.fleet, self._part.places, self._part.rows
        self._predictor, self._settings = predictor, settings
        self._limit = settings.max_jobs_per_gpu if most_jobs is None else most_jobs
        self._needs = memory_needs(request, self.fleet.capacity[self._rows], settings.memory_margin)
        self.rooms = rooms(self.fleet, request)
        self._shared: Outlooks | None = None
        self._gain, self._harm = _NOTHING, _NOTHING  # of the same GPUs
        self._alone: dict[int, Outlook] = {}
        self._apart = self._kept_apart()
        fits, busy = self._screen(), self.fleet.crowd[self._rows] > 0
        self._empty, self._crowded = places[fits & ~busy], places[fits & busy]

    def empty(self) -> Candidates:
        """Return the GPUs that carry nobody and may take the job."""
        fleet, settings, places = self.fleet, self._settings, self._empty
        if not len(places):
            return Candidates(fleet)
        gain, harm = np.zeros(len(places)), np.zeros(len(places))
        kinds = fleet.kind[places]
        for kind in np.unique(kinds).tolist():
            slower = slowness(fleet.kinds[kind], self.request, settings) - 1.0
            after = self._predictor.predict([self.request.on(fleet.kinds[kind])], fleet.kinds[kind])
            outlook = self._alone[kind] = Outlook(after, 0.0, -(1.0 - settings.packing_bias) * slower, slower)
            gain[kinds == kind], harm[kinds == kind] = outlook.gain, outlook.harm
        return Candidates(fleet, places, self._needs_at(places), gain - self._cost(places), harm)

    def shared(self) -> Candidates:
        """Return the GPUs that carry somebody and may take the job.

        Only the ``MOST_PREDICTED`` least used of those are looked at where everything but the interference fits.
        """
        if not len(self._crowded):
            return Candidates(self.fleet)
        close = self._close()
        views, settings = self.fleet.views, self._settings
        found = self._shared = self.fleet.prospects.of(self.request, close, views, self._predictor, settings)
        if not found.good.any():
            return Candidates(self.fleet)
        places = np.array(close, dtype=np.int64)[found.good]
        self._gain, self._harm = self._worth(found)
        gain = self._gain[found.good] - self._cost(places)
        return Candidates(self.fleet, places, self._needs_at(places), gain, self._harm[found.good])

    def _worth(self, found: Outlooks) -> tuple[Floats, Floats]:
        """Return ``Outlook.gain`` and ``Outlook.harm`` of shared GPUs."""
        weight, bias, fleet = self.request.weight, self._settings.packing_bias, self.fleet
        slower_on = np.array([slowness(kind, self.request, self._settings) for kind in fleet.kinds])
        slower = slower_on[fleet.kind[np.array(found.places, dtype=np.int64)]]
        gain = found.gain(weight, bias) - (1.0 - bias) * (slower - 1.0)
        if fleet.demand is not None:
            gain = gain - bias * (found.saving - found.saved)
        return gain, slower * (1.0 + found.own) - 1.0 + found.grown / weight

    def outlook(self, place: int) -> Outlook:
        """Return what is predicted for a candidate, by its position."""
        found = self._shared
        if found is None or not self.fleet.crowd[place]:
            return self._alone[int(self.fleet.kind[place])]
        index = found.places.index(place)
        gain, harm = float(self._gain[index]), float(self._harm[index])
        return Outlook(found.after(index), float(found.saving[index]), gain, harm)

    def refusal(self, usable: Candidates) -> NoFit:
        """Return the refusal, once these were found to be all that may take the job, and too few."""
        if not self._part.why:
            return NoFit(self.request.job_id, (), never=False)
        needs, capacity = self._needs, self.fleet.capacity[self._rows]
        looked_at = 0 if self._shared is None else len(self._shared.places)
        errors = [
            *first_errors(self._part, self._tests()),
            *folded(() if self._shared is None else self._shared.errors()),
        ]
        if looked_at < len(self._crowded):
            errors.append(FitError("not_tried", None, count=len(self._crowded) - looked_at))
        possible = (needs <= capacity) | (capacity == 0)
        if self.request.gpus > 1:
            possible &= ~self.fleet.instance[self._rows]
        return refuse(self.request, self._part, errors, usable.places, self._part.places[possible])

    def _needs_at(self, places: Integers) -> Integers:
        """Return the memory the job would reserve on some of the GPUs asked about, by position in the fleet."""
        asked = self._part.places
        return self._needs[places if len(asked) == len(self.fleet) else np.searchsorted(asked, places)]

    def _parts(self, places: Integers) -> Integers:
        """Return the part of these GPUs that the job would take, hundredths."""
        return parts_of(self.request, self._needs_at(places), self.fleet.capacity[places])

    def _cost(self, places: Integers) -> Floats:
        """Return by how much the gain falls since the job takes from others what they typically ask for."""
        demand = self.fleet.demand
        if demand is None or not len(places):
            return np.zeros(len(places))
        return self._settings.packing_bias * cost(demand, free_parts(self.fleet)[places], self._parts(places))

    def _screen(self) -> Flags:
        """Return where everything but the interference lets the job in."""
        fleet, request, rows = self.fleet, self.request, self._rows
        crowd = fleet.crowd[rows]
        joins = (crowd < self._limit) & (fleet.observed_s[rows] >= self._settings.profile_s)
        joins &= fleet.reservable[rows] + TOLERANCE >= (request.compute or FLOOR)
        if request.exclusive or request.profile.source == "unknown":
            joins[:] = False
        if self._apart is not None:
            joins &= ~self._apart
        open_ = fleet.schedulable[rows] & ~fleet.exclusive[rows] & (self._needs <= fleet.free[rows])
        if request.gpus > 1:
            open_ &= ~fleet.instance[rows]
        if self.rooms is not None:
            open_ &= self.rooms[fleet.host[rows]] > 0
        if not request.shares_instance:
            open_ &= ~fleet.instance[rows] | (crowd == 0)
        fits: Flags = open_ & (joins | (crowd == 0))
        return fits

    def _tests(self) -> Iterator[_Test]:
        """Yield what may be in the way besides the interference, the first reason first; worked out when asked for."""
        request, fleet, needs, rows = self.request, self.fleet, self._needs, self._rows
        capacity, crowd, busy = fleet.capacity[rows], fleet.crowd[rows], fleet.crowd[rows] > 0
        unknown, wanted = request.profile.source == "unknown", request.compute or FLOOR
        never, short = processor_tests(request, self._part)
        yield from never
        yield "memory_never", (needs > capacity) & (capacity > 0), needs, capacity
        if request.gpus > 1:
            yield "instance", fleet.instance[rows], None, None
        yield "not_schedulable", ~fleet.schedulable[rows], None, None
        yield "exclusive_resident", fleet.exclusive[rows], None, None
        if self._apart is not None:
            yield "anti_affinity", self._apart, None, None
        if request.exclusive:
            yield "exclusive_wanted", busy, None, None
        if not request.shares_instance:
            yield "instance_wanted", busy & fleet.instance[rows], None, None
        if unknown and request.memory_bytes is None:
            # It would reserve the whole GPU: by how much that is more than what is free says nothing of the job.
            yield "unprofiled_self", busy, None, None
        yield "memory_short", needs > fleet.free[rows], needs, fleet.free[rows]
        yield "share_limit", busy & (crowd >= self._limit), crowd + 1, float(self._limit)
        if unknown and request.memory_bytes is not None:
            yield "unprofiled_self", busy, None, None
        yield "unprofiled_resident", fleet.observed_s[rows] < self._settings.profile_s, None, None
        reservable = fleet.reservable[rows]
        yield "compute_short", busy & (wanted > reservable + TOLERANCE), wanted, reservable
        yield from short

    def _kept_apart(self) -> Flags | None:
        """Return where the job or a resident keeps the two apart; None when nobody says anything of the kind."""
        fleet, rows = self.fleet, self._rows
        asked = np.flatnonzero(fleet.crowd[rows] > 0 if self.request.anti_affinity else fleet.particular[rows])
        if not len(asked):
            return None
        apart = np.zeros(len(self._part), dtype=np.bool_)
        apart[[place for place in asked.tolist() if kept_apart(self.request, self._part[place].residents)]] = True
        return apart

    def _close(self) -> list[int]:
        """Return the shared GPUs that are looked at closely, ascending: those whose residents use the GPU least.

        Where it is known what jobs typically ask for, those that cost them least.
        """
        places, most = self._crowded, max(MOST_PREDICTED, 4 * self.request.gpus)
        if len(places) > most and self.fleet.demand is not None:
            lost = room_lost(self.fleet, self.fleet.demand, self.request, places, self._parts(places))
            places = np.sort(places[np.lexsort((lost, self._cost(places)))[:most]])
        if len(places) > most:
            used = np.minimum(self.fleet.util[places] * 1000.0, 32767.0).astype(np.int16)  # sorted in linear time
            places = np.sort(places[np.argsort(used, kind="stable")[:most]])
        found: list[int] = places.tolist()
        return found


def with_hinted_profile(request: Request) -> Request:
    """Return the request with the profile its hints give, when it has both hints and nothing was ever measured."""
    if request.profile.source == "unknown" and request.compute is not None and request.memory_bytes is not None:
        return replace(request, profile=from_hints(request.compute, request.memory_bytes))
    return request


def kept_apart(request: Request, residents: Iterable[Resident]) -> bool:
    """Whether the job and one of these must not share a GPU, whichever of the two says so."""
    return any(
        not request.anti_affinity.isdisjoint(resident.labels) or not resident.anti_affinity.isdisjoint(request.labels)
        for resident in residents
    )


def could_take(request: Request, gpu: GpuView, margin: float) -> bool:
    """Whether the GPU could take one share of the job if its host were empty and available."""
    cpus = request.cpus * (request.gpus if request.one_host else 1)
    if gpu.host_cpus is not None and thousandths(cpus) > thousandths(gpu.host_cpus):
        return False
    return memory_need(request, gpu, margin) <= gpu.memory_bytes and not (request.gpus > 1 and gpu.instance)


def processor_tests(request: Request, gpus: Part) -> tuple[list[_Test], list[_Test]]:
    """Return what speaks against GPUs for want of processors on their hosts: for ever, and now."""
    each = thousandths(request.cpus)
    if not each:
        return [], []
    fleet, together = gpus.fleet, each * (request.gpus if request.one_host else 1)
    hosts = fleet.host[gpus.rows]
    there, left = fleet.limit[hosts], np.maximum(fleet.spare(), 0)[hosts]
    wanted = together / 1000.0
    return (
        [("cpus_never", together > there, wanted, there / 1000.0)],
        [("cpus_short", together > left, wanted, left / 1000.0)],
    )


def first_errors(gpus: Part, tests: Iterable[_Test]) -> list[FitError]:
    """Return the first thing in the way of each of these GPUs, one error per kind."""
    left = np.ones(len(gpus), dtype=np.bool_)
    errors: list[FitError] = []
    for kind, fails, needed, available in tests:
        failing = left & fails
        if np.count_nonzero(failing):  # several times as fast as any()
            left &= ~failing
            errors.append(_error(kind, gpus, np.flatnonzero(failing), needed, available))
            if not np.count_nonzero(left):
                break
    return errors


def basic_error(request: Request, gpu: GpuView, memory_bytes: int) -> FitError | None:
    """Check what holds under every policy: the GPU takes jobs at all, memory, exclusiveness."""
    if memory_bytes > gpu.memory_bytes > 0:  # 0: a broken GPU that does not say what it has
        return FitError("memory_never", gpu.gpu_id, memory_bytes, gpu.memory_bytes, never=True)
    kind = _closed(request, gpu)
    if kind is not None:
        return FitError(kind, gpu.gpu_id, never=kind in NEVER)
    if memory_bytes > free_memory(gpu):
        return FitError("memory_short", gpu.gpu_id, memory_bytes, free_memory(gpu))
    return None


def _closed(request: Request, gpu: GpuView) -> FitErrorKind | None:
    checks: tuple[tuple[FitErrorKind, bool], ...] = (
        ("instance", request.gpus > 1 and gpu.instance),
        ("not_schedulable", not gpu.schedulable),
        ("exclusive_resident", any(does_not_share(resident, gpu) for resident in gpu.residents)),
        ("exclusive_wanted", request.exclusive and bool(gpu.residents)),
        ("instance_wanted", does_not_share(request, gpu) and bool(gpu.residents)),
        ("anti_affinity", kept_apart(request, gpu.residents)),
    )
    return next((kind for kind, holds in checks if holds), None)


def _error(
    kind: FitErrorKind,
    gpus: Part,
    places: Integers,
    needed: _Numbers,
    available: _Numbers,
) -> FitError:
    """Return one error for these of the GPUs, with the numbers of the one nearest to fitting."""
    never = kind in NEVER
    count = len(np.unique(gpus.fleet.host[gpus.rows][places])) if kind in OF_HOSTS else len(places)
    if needed is None or available is None:
        return FitError(kind, gpus[int(places[0])].gpu_id, never=never, count=count)
    asked = needed[places] if isinstance(needed, np.ndarray) else np.full(len(places), needed)
    there = available[places] if isinstance(available, np.ndarray) else np.full(len(places), available)
    near = int(np.abs(asked - there).argmin())
    varies = bool(np.count_nonzero(asked != asked[0]) or np.count_nonzero(there != there[0]))
    numbers = asked[near].item(), there[near].item()
    return FitError(kind, gpus[int(places[near])].gpu_id, *numbers, never, count=count, varies=varies)


def folded(errors: Iterable[FitError]) -> list[FitError]:
    """Return one error per kind, with the numbers of the GPU nearest to fitting and the count of all."""
    groups: dict[FitErrorKind, list[FitError]] = {}
    for error in errors:
        groups.setdefault(error.kind, []).append(error)
    return [_folded(group) for group in groups.values()]


def _folded(group: Sequence[FitError]) -> FitError:
    near = min(group, key=lambda error: abs((error.needed or 0.0) - (error.available or 0.0)))
    differ = len({(error.needed, error.available) for error in group}) > 1
    return replace(
        near, count=sum(error.count for error in group), varies=differ or any(error.varies for error in group)
    )


def refuse(request: Request, gpus: Part, errors: Sequence[FitError], usable: Integers, possible: Integers) -> NoFit:
    """Return the refusal, having decided whether waiting can help.

    Waiting helps when the same GPUs, all empty and all usable again, could take the job. A cluster without a single GPU
    says nothing about the ones that will join, so there waiting may help too.

    Args:
        request: What was asked.
        gpus: The GPUs it asked about.
        errors: Why GPUs cannot take the job now, one error per kind.
        usable: Positions of the GPUs that could take one share of it now.
        possible: Positions of those that could if they were empty and available.
    """
    fleet, room = gpus.fleet, rooms(gpus.fleet, request)
    able = most_of(fleet.host[possible], rooms(fleet, request, empty=True))
    now = most_of(fleet.host[usable], room)
    never = len(gpus) > 0 and _most(able, request.one_host) < request.gpus
    summary: list[FitError] = []
    if never and (len(able) > 0 or len(gpus) < request.gpus):
        summary.append(FitError("gpus_never", None, request.gpus, _most(able, request.one_host), never=True))
    elif not never and (len(now) or request.gpus > 1 or not len(gpus)):
        summary.append(FitError("too_few_gpus", None, request.gpus, len(now)))
        if request.one_host and len(now) >= request.gpus:
            summary.append(FitError("too_few_on_host", None, request.gpus, _most(now, one_host=True)))
    return NoFit(request.job_id, (*summary, *errors, *_too_few_processors(request, fleet, usable, room)), never)


def _too_few_processors(request: Request, fleet: Fleet, usable: Integers, room: Integers | None) -> list[FitError]:
    """Return, for a job on several hosts, those that have processors for fewer shares than they have GPUs for."""
    if room is None:
        return []
    hosts, counts = np.unique(fleet.host[usable], return_counts=True)
    tight = np.flatnonzero(np.minimum(counts, request.gpus) > room[hosts])
    if not len(tight):
        return []
    host = hosts[tight[0]]
    needed = min(int(counts[tight[0]]), request.gpus) * request.cpus
    gpu_id = fleet.views[int(usable[fleet.host[usable] == host][0])].gpu_id
    return [FitError("cpus_short", gpu_id, needed, float(fleet.spare()[host]) / 1000.0, count=len(tight))]


def _most(hosts: Integers, one_host: bool) -> int:
    """Return how many of these GPUs, given by host, one job can have."""
    if not one_host or not len(hosts):
        return len(hosts)
    return int(np.bincount(hosts).max())
