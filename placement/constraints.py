"""The hard constraints: which GPUs may take this job beside their residents, and what would happen there?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.profiles import from_hints
from cotenant.forecasting.types import InterferencePredictor, ThroughputPrediction, predict_sets
from cotenant.placement.fleet import Flags, Fleet, Floats, Integers
from cotenant.placement.objective import cautious, packing_saving, score, slowness
from cotenant.placement.shares import FLOOR, TOLERANCE, free_memory, memory_need, memory_needs
from cotenant.placement.types import FitError, FitErrorKind, GpuView, NoFit, Request, Resident

NEVER: frozenset[FitErrorKind] = frozenset({"memory_never", "instance"})
MOST_PREDICTED = 128  # shared GPUs that one decision looks at closely: predicting thousands would take too long


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is predicted for one GPU.

    Attributes:
        after: Normalised throughput of every resident, in order, and last of the job.
        saving: Packing saving of the GPU afterwards; 0 when the job is alone there.
        gain: Score of the GPU afterwards minus its score now, less what a slower GPU type costs the job.
        harm: What the job loses against the fastest GPU type alone, plus what its neighbours lose, by their weight.
    """

    after: Sequence[ThroughputPrediction]
    saving: float
    gain: float
    harm: float


@dataclass(frozen=True, slots=True)
class Examined:
    """The GPUs that may take a job, and why the others may not.

    Attributes:
        fleet: All GPUs.
        places: Positions of those that may take it, ascending, shape (candidates,).
        needs: Memory the job would reserve on each GPU of the fleet, bytes.
        gain: ``Outlook.gain`` of each candidate.
        harm: ``Outlook.harm`` of each candidate.
        shared: What is predicted for each shared GPU that may take it, by position.
        alone: What is predicted for an empty GPU, by number of its type.
        errors: Why the others may not, one per kind of reason.
        possible: Whether each GPU of the fleet could take the job if it were empty and available.
    """

    fleet: Fleet
    places: Integers
    needs: Integers
    gain: Floats
    harm: Floats
    shared: Mapping[int, Outlook]
    alone: Mapping[int, Outlook]
    errors: Sequence[FitError]
    possible: Flags

    @property
    def empty(self) -> Flags:
        """Which candidates carry nobody."""
        nobody: Flags = self.fleet.crowd[self.places] == 0
        return nobody

    def outlook(self, place: int) -> Outlook:
        """Return what is predicted for the candidate at this position of the fleet."""
        found = self.shared.get(place)
        return self.alone[int(self.fleet.kind[place])] if found is None else found


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
    """Whether the GPU could take one share of the job if it were empty and available."""
    return memory_need(request, gpu, margin) <= gpu.memory_bytes and not (request.gpus > 1 and gpu.instance)


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
        ("exclusive_resident", any(resident.exclusive for resident in gpu.residents)),
        ("exclusive_wanted", request.exclusive and bool(gpu.residents)),
        ("anti_affinity", kept_apart(request, gpu.residents)),
    )
    return next((kind for kind, holds in checks if holds), None)


def examine(
    request: Request,
    fleet: Fleet,
    predictor: InterferencePredictor,
    settings: PlacementSettings,
    most_jobs: int | None = None,
) -> Examined:
    """Return which GPUs may take the job and what would happen there, and why each other one may not.

    Cheap checks come first, over all GPUs at once. The interference is predicted only where everything else fits: for
    one empty GPU of each type, and for the ``MOST_PREDICTED`` least used of the shared ones.

    Args:
        request: What the job asks.
        fleet: All GPUs.
        predictor: Predicts how jobs on one GPU slow each other down.
        settings: How jobs are packed.
        most_jobs: Most jobs on a GPU; None = as the settings say.
    """
    needs = memory_needs(request, fleet.capacity, settings.memory_margin)
    limit = settings.max_jobs_per_gpu if most_jobs is None else most_jobs
    fits, errors = _screened(request, fleet, needs, limit, settings)
    possible = (needs <= fleet.capacity) | (fleet.capacity == 0)
    if request.gpus > 1:
        possible &= ~fleet.instance
    if not np.count_nonzero(fits):
        return Examined(
            fleet, np.array([], dtype=np.int64), needs, np.array([]), np.array([]), {}, {}, errors, possible
        )
    crowded = np.flatnonzero(fits & (fleet.crowd > 0))
    close = _least_used(fleet, crowded, max(MOST_PREDICTED, 4 * request.gpus))
    shared, refused = _judged(request, fleet, close, predictor, settings)
    errors.extend(folded(refused))
    if len(close) < len(crowded):
        errors.append(FitError("not_tried", None, count=len(crowded) - len(close)))
    empty = np.flatnonzero(fits & (fleet.crowd == 0))
    alone = {
        kind: _outlook_alone(request, fleet.kinds[kind], predictor, settings)
        for kind in (np.unique(fleet.kind[empty]).tolist() if len(empty) else ())
    }
    gain, harm = np.zeros(len(fleet)), np.zeros(len(fleet))
    for kind, outlook in alone.items():
        mine = empty[fleet.kind[empty] == kind]
        gain[mine], harm[mine] = outlook.gain, outlook.harm
    for place, outlook in shared.items():
        gain[place], harm[place] = outlook.gain, outlook.harm
    places = np.sort(np.concatenate([empty, np.fromiter(shared, dtype=np.int64, count=len(shared))]))
    return Examined(fleet, places, needs, gain[places], harm[places], shared, alone, errors, possible)


def _screened(
    request: Request, fleet: Fleet, needs: Integers, limit: int, settings: PlacementSettings
) -> tuple[Flags, list[FitError]]:
    """Return where everything but the interference lets the job in, and the first reason against each other GPU."""
    wanted = request.compute or FLOOR
    busy = fleet.crowd > 0
    tests: list[tuple[FitErrorKind, Flags, Integers | Floats | float | None, Integers | Floats | float | None]] = [
        ("memory_never", (needs > fleet.capacity) & (fleet.capacity > 0), needs, fleet.capacity),
        ("not_schedulable", ~fleet.schedulable, None, None),
        ("exclusive_resident", fleet.exclusive, None, None),
        ("memory_short", needs > fleet.free, needs, fleet.free),
        ("share_limit", busy & (fleet.crowd >= limit), fleet.crowd + 1, float(limit)),
        ("unprofiled_resident", fleet.observed_s < settings.profile_s, None, None),
        ("compute_short", busy & (wanted > fleet.reservable + TOLERANCE), wanted, fleet.reservable),
    ]
    if request.exclusive:
        tests.insert(3, ("exclusive_wanted", busy, None, None))
    apart = _apart(request, fleet)
    if apart is not None:
        tests.insert(3, ("anti_affinity", apart, None, None))
    if request.gpus > 1:
        tests.insert(1, ("instance", fleet.instance, None, None))
    if request.profile.source == "unknown":
        tests.insert(-2, ("unprofiled_self", busy, None, None))
    fits = np.ones(len(fleet), dtype=np.bool_)
    errors: list[FitError] = []
    for kind, fails, needed, available in tests:
        failing = fits & fails
        if np.count_nonzero(failing):  # several times as fast as any()
            fits &= ~failing
            errors.append(_error(kind, fleet, np.flatnonzero(failing), needed, available))
    return fits, errors


def _apart(request: Request, fleet: Fleet) -> Flags | None:
    """Return where the job or a resident keeps the two apart; None when nobody says anything of the kind."""
    asked = np.flatnonzero(fleet.crowd > 0 if request.anti_affinity else fleet.particular)
    if not len(asked):
        return None
    apart = np.zeros(len(fleet), dtype=np.bool_)
    apart[[place for place in asked.tolist() if kept_apart(request, fleet[place].residents)]] = True
    return apart


def _error(
    kind: FitErrorKind,
    fleet: Fleet,
    places: Integers,
    needed: Integers | Floats | float | None,
    available: Integers | Floats | float | None,
) -> FitError:
    """Return one error for these GPUs, with the numbers of the one nearest to fitting."""
    never = kind in NEVER
    if needed is None or available is None:
        return FitError(kind, fleet[int(places[0])].gpu_id, never=never, count=len(places))
    asked = needed[places] if isinstance(needed, np.ndarray) else np.full(len(places), needed)
    there = available[places] if isinstance(available, np.ndarray) else np.full(len(places), available)
    near = int(np.abs(asked - there).argmin())
    varies = bool(np.count_nonzero(asked != asked[0]) or np.count_nonzero(there != there[0]))
    numbers = asked[near].item(), there[near].item()
    return FitError(kind, fleet[int(places[near])].gpu_id, *numbers, never, count=len(places), varies=varies)


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


def _least_used(fleet: Fleet, places: Integers, most: int) -> list[int]:
    """Return at most so many of these positions, ascending: those whose residents use the GPU least."""
    if len(places) > most:
        used = np.minimum(fleet.util[places] * 1000.0, 32767.0).astype(np.int16)  # whole numbers sort in linear time
        places = np.sort(places[np.argsort(used, kind="stable")[:most]])
    found: list[int] = places.tolist()
    return found


def _judged(
    request: Request,
    fleet: Fleet,
    places: Sequence[int],
    predictor: InterferencePredictor,
    settings: PlacementSettings,
) -> tuple[dict[int, Outlook], list[FitError]]:
    """Predict what the job would do on each of these shared GPUs; return what may be, and why the rest may not."""
    gpus = [fleet[place] for place in places]
    sets = [(gpu.gpu_type, [resident.profile for resident in gpu.residents]) for gpu in gpus]
    now = predict_sets(predictor, sets)
    then = predict_sets(predictor, [(gpu_type, [*members, request.on(gpu_type)]) for gpu_type, members in sets])
    good: dict[int, Outlook] = {}
    bad: list[FitError] = []
    for place, gpu, before, after in zip(places, gpus, now, then, strict=True):
        error = _slowdown_error(request, gpu, after, settings.confidence)
        if error is None:
            good[place] = _outlook(request, gpu, before, after, settings)
        else:
            bad.append(error)
    return good, bad


def _slowdown_error(
    request: Request, gpu: GpuView, after: Sequence[ThroughputPrediction], confidence: float
) -> FitError | None:
    """Check every affected job's predicted slowdown, at this confidence, against its limit."""
    own = 1.0 / cautious(after[-1], confidence)
    if own > request.max_slowdown + TOLERANCE:
        return FitError("slowdown_self", gpu.gpu_id, own, request.max_slowdown)
    for resident, prediction in zip(gpu.residents, after, strict=False):
        slowdown = 1.0 / cautious(prediction, confidence)
        if slowdown > resident.max_slowdown + TOLERANCE:
            return FitError("slowdown_neighbour", gpu.gpu_id, slowdown, resident.max_slowdown)
    saving = packing_saving([prediction.mid for prediction in after])
    if saving <= 0.0:  # one after the other would be faster, whatever slowdown the users accept
        return FitError("no_saving", gpu.gpu_id, 0.0, saving)
    return None


def _outlook(
    request: Request,
    gpu: GpuView,
    before: Sequence[ThroughputPrediction],
    after: Sequence[ThroughputPrediction],
    settings: PlacementSettings,
) -> Outlook:
    """Weigh how a shared GPU would do against how it does now."""
    bias, slower = settings.packing_bias, slowness(gpu.gpu_type, request, settings)
    weights = [resident.weight for resident in gpu.residents]
    then = [prediction.mid for prediction in after]
    now = [prediction.mid for prediction in before]
    gain = score(then, bias, [*weights, request.weight]) - score(now, bias, weights)
    harm = slower / then[-1] - 1.0
    for weight, old, new in zip(weights, now, then, strict=False):
        harm += weight / request.weight * (1.0 / new - 1.0 / old)
    return Outlook(after, packing_saving(then), gain - (1.0 - bias) * (slower - 1.0), harm)


def _outlook_alone(
    request: Request, gpu_type: str, predictor: InterferencePredictor, settings: PlacementSettings
) -> Outlook:
    slower = slowness(gpu_type, request, settings) - 1.0
    after = predictor.predict([request.on(gpu_type)], gpu_type)
    return Outlook(after, 0.0, -(1.0 - settings.packing_bias) * slower, slower)


def refuse(request: Request, fleet: Fleet, errors: Sequence[FitError], usable: Integers, possible: Flags) -> NoFit:
    """Return the refusal, having decided whether waiting can help.

    Waiting helps when the same GPUs, all empty and all usable again, could take the job. A cluster without a single GPU
    says nothing about the ones that will join, so there waiting may help too.

    Args:
        request: What was asked.
        fleet: All GPUs.
        errors: Why GPUs cannot take the job now, one error per kind.
        usable: Positions of the GPUs that could take one share of it now.
        possible: Whether each GPU could take one share of it if it were empty and available.
    """
    able, now = fleet.host[possible], fleet.host[usable]
    never = len(fleet) > 0 and _most(able, request.one_host) < request.gpus
    summary: list[FitError] = []
    if never and (len(able) > 0 or len(fleet) < request.gpus):
        summary.append(FitError("gpus_never", None, request.gpus, _most(able, request.one_host), never=True))
    elif not never and (len(now) or request.gpus > 1 or not len(fleet)):
        summary.append(FitError("too_few_gpus", None, request.gpus, len(now)))
        if request.one_host and len(now) >= request.gpus:
            summary.append(FitError("too_few_on_host", None, request.gpus, _most(now, one_host=True)))
    return NoFit(request.job_id, (*summary, *errors), never)


def _most(hosts: Integers, one_host: bool) -> int:
    """Return how many of these GPUs, given by host, one job can have."""
    if not one_host or not len(hosts):
        return len(hosts)
    return int(np.bincount(hosts).max())
