"""The hard constraints: may this GPU take this job beside its residents, and if so, what would happen?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.profiles import from_hints
from cotenant.forecasting.types import DemandProfile, InterferencePredictor, ThroughputPrediction, predict_sets
from cotenant.placement.objective import packing_saving, score
from cotenant.placement.shares import FLOOR, TOLERANCE, free_memory, memory_need, reservable_compute
from cotenant.placement.types import FitError, GpuView, NoFit, Request


@dataclass(frozen=True, slots=True)
class Candidate:
    """A GPU that may take the job, with what is predicted to happen there.

    Attributes:
        gpu: The GPU.
        order: Its position in the snapshot, the last tie-breaker.
        memory_bytes: Memory the job would reserve.
        predicted: Normalised throughput of the job and of every resident, by job id.
        saving: Packing saving of the GPU afterwards.
        gain: Score of the GPU afterwards minus its score now (0 for an empty GPU).
    """

    gpu: GpuView
    order: int
    memory_bytes: int
    predicted: Mapping[str, ThroughputPrediction]
    saving: float
    gain: float

    @property
    def empty(self) -> bool:
        """True when nobody is on the GPU yet."""
        return not self.gpu.residents


@dataclass(frozen=True, slots=True)
class _Fitting:
    """A GPU that everything but the interference lets take the job, its position and the memory it would reserve."""

    gpu: GpuView
    order: int
    memory_bytes: int


def with_hinted_profile(request: Request) -> Request:
    """Return the request with the profile its hints give, when it has both hints and nothing was ever measured."""
    if request.profile.source == "unknown" and request.compute is not None and request.memory_bytes is not None:
        return replace(request, profile=from_hints(request.compute, request.memory_bytes))
    return request


def unprofiled(profile: DemandProfile, settings: PlacementSettings) -> bool:
    """Return whether too little is known of a running job to give it a neighbour."""
    if profile.source == "unknown":
        return True
    return profile.source == "history" and profile.observed_s < settings.profile_s


def basic_error(request: Request, gpu: GpuView, memory_bytes: int) -> FitError | None:
    """Check what holds under every policy: the GPU takes jobs at all, memory, exclusiveness."""
    residents = gpu.residents
    if memory_bytes > gpu.memory_bytes > 0:  # 0: a broken GPU that does not say what it has
        return FitError("memory_never", gpu.gpu_id, memory_bytes, gpu.memory_bytes, never=True)
    if not gpu.schedulable:
        return FitError("not_schedulable", gpu.gpu_id)
    if any(resident.exclusive for resident in residents):
        return FitError("exclusive_resident", gpu.gpu_id)
    if request.exclusive and residents:
        return FitError("exclusive_wanted", gpu.gpu_id)
    if memory_bytes > free_memory(gpu):
        return FitError("memory_short", gpu.gpu_id, memory_bytes, free_memory(gpu))
    return None


def examine(
    request: Request, gpus: Sequence[GpuView], predictor: InterferencePredictor, settings: PlacementSettings
) -> tuple[list[Candidate], list[FitError]]:
    """Return what would happen on each GPU that may take the job, and why each other one may not.

    Cheap checks come first; the interference is predicted only where everything else fits, for all GPUs at once.
    """
    found: list[Candidate | FitError | _Fitting] = []
    for order, gpu in enumerate(gpus):
        memory_bytes = memory_need(request, gpu, settings.memory_margin)
        error = basic_error(request, gpu, memory_bytes)
        if error is None and gpu.residents:
            error = _sharing_error(request, gpu, settings)
        found.append(error or _Fitting(gpu, order, memory_bytes))
    fitting = [each for each in found if isinstance(each, _Fitting)]
    sets = [(each.gpu.gpu_type, [resident.profile for resident in each.gpu.residents]) for each in fitting]
    now = predict_sets(predictor, sets)
    then = predict_sets(predictor, [(gpu_type, [*members, request.profile]) for gpu_type, members in sets])
    judged = iter([_judged(request, *each, settings.packing_bias) for each in zip(fitting, now, then, strict=True)])
    ended = [next(judged) if isinstance(each, _Fitting) else each for each in found]
    return [x for x in ended if isinstance(x, Candidate)], [x for x in ended if isinstance(x, FitError)]


def _judged(
    request: Request,
    fitting: _Fitting,
    before: Sequence[ThroughputPrediction],
    after: Sequence[ThroughputPrediction],
    bias: float,
) -> Candidate | FitError:
    """Check what is predicted, and weigh it against how the GPU does now."""
    gpu = fitting.gpu
    error = _slowdown_error(request, gpu, after) if gpu.residents else None
    if error is not None:
        return error
    names = [*(resident.job_id for resident in gpu.residents), request.job_id]
    throughputs = [prediction.mid for prediction in after]
    shared = bool(gpu.residents)
    return Candidate(
        gpu,
        fitting.order,
        fitting.memory_bytes,
        dict(zip(names, after, strict=True)),
        saving=packing_saving(throughputs) if shared else 0.0,
        gain=score(throughputs, bias) - score([prediction.mid for prediction in before], bias) if shared else 0.0,
    )


def _sharing_error(request: Request, gpu: GpuView, settings: PlacementSettings) -> FitError | None:
    count = len(gpu.residents)
    if count >= settings.max_jobs_per_gpu:
        return FitError("share_limit", gpu.gpu_id, count + 1, settings.max_jobs_per_gpu)
    if request.profile.source == "unknown":
        return FitError("unprofiled_self", gpu.gpu_id)
    if any(unprofiled(resident.profile, settings) for resident in gpu.residents):
        return FitError("unprofiled_resident", gpu.gpu_id)
    needed = request.compute or FLOOR
    available = reservable_compute(gpu)
    if needed > available + TOLERANCE:
        return FitError("compute_short", gpu.gpu_id, needed, available)
    return None


def _slowdown_error(request: Request, gpu: GpuView, after: Sequence[ThroughputPrediction]) -> FitError | None:
    """Check every affected job's predicted slowdown against its limit.

    The slowdown checked is 1/mid, the most likely one: with 1/low, the pessimistic one, hardly any pair would ever be
    packed, because the band of a first, untrained rule is wide.
    """
    own = after[-1].slowdown
    if own > request.max_slowdown + TOLERANCE:
        return FitError("slowdown_self", gpu.gpu_id, own, request.max_slowdown)
    for resident, prediction in zip(gpu.residents, after, strict=False):
        if prediction.slowdown > resident.max_slowdown + TOLERANCE:
            return FitError("slowdown_neighbour", gpu.gpu_id, prediction.slowdown, resident.max_slowdown)
    saving = packing_saving([prediction.mid for prediction in after])
    if saving <= 0.0:  # one after the other would be faster, whatever slowdown the users accept
        return FitError("no_saving", gpu.gpu_id, 0.0, saving)
    return None


def refuse(request: Request, gpus: Sequence[GpuView], errors: Sequence[FitError], usable: Sequence[GpuView]) -> NoFit:
    """Return the refusal, having decided whether waiting can help.

    Waiting helps when the same GPUs, all empty and all usable again, could take the job. A cluster without a single GPU
    says nothing about the ones that will join, so there waiting may help too.

    Args:
        request: What was asked.
        gpus: All GPUs.
        errors: One error per GPU that cannot take the job now.
        usable: The GPUs that could take one share of it now.
    """
    impossible = {error.gpu_id for error in errors if error.never}
    possible = [gpu for gpu in gpus if gpu.gpu_id not in impossible]
    never = bool(gpus) and _most(possible, request.one_host) < request.gpus
    summary: list[FitError] = []
    if never and (len(possible) > 0 or len(gpus) < request.gpus):
        summary.append(FitError("gpus_never", None, request.gpus, _most(possible, request.one_host), never=True))
    elif not never and (usable or request.gpus > 1 or not gpus):
        summary.append(FitError("too_few_gpus", None, request.gpus, len(usable)))
        if request.one_host and len(usable) >= request.gpus:
            summary.append(FitError("too_few_on_host", None, request.gpus, _most(usable, one_host=True)))
    return NoFit(request.job_id, (*summary, *errors), never)


def _most(gpus: Sequence[GpuView], one_host: bool) -> int:
    if not one_host:
        return len(gpus)
    counts: dict[str, int] = {}
    for gpu in gpus:
        counts[gpu.host_id] = counts.get(gpu.host_id, 0) + 1
    return max(counts.values(), default=0)


def best_fit_key(candidate: Candidate) -> tuple[float, int, int, int]:
    """Sort key of candidates, best first: gain, then the fuller GPU, then the tightest memory, then the index."""
    left = free_memory(candidate.gpu) - candidate.memory_bytes
    gain = round(candidate.gain / TOLERANCE)  # equal up to rounding errors counts as equal
    return (-gain, -len(candidate.gpu.residents), left, candidate.order)
