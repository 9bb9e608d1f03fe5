"""Where a job goes: one small class per policy, all behind ``PlacementPolicy``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.types import InterferencePredictor, ThroughputPrediction
from cotenant.placement.constraints import (
    Candidate,
    basic_error,
    best_fit_key,
    examine,
    refuse,
    with_hinted_profile,
)
from cotenant.placement.objective import packing_saving, score
from cotenant.placement.shares import TOLERANCE, first_shares, free_memory, memory_need, round_down
from cotenant.placement.types import FitError, GpuView, NoFit, Placement, Request, Share


class PlacementPolicy(Protocol):
    """Decides which GPUs a job gets. Pure: same input, same answer; nothing is remembered between calls."""

    name: str

    def place(
        self,
        request: Request,
        gpus: Sequence[GpuView],
        predictor: InterferencePredictor,
        settings: PlacementSettings,
        waiting_gpus: int,
    ) -> Placement | NoFit:
        """Return shares for the job, or every reason why there are none.

        Args:
            request: What the job asks.
            gpus: Every GPU of the cluster with what it carries now, also those that take nothing new.
            predictor: Predicts how jobs on one GPU slow each other down.
            settings: How jobs are packed.
            waiting_gpus: Number of GPUs all waiting jobs ask for together, this job included (>= request.gpus).
        """
        ...


class Cotenant:
    """Greedy packing: the GPUs where sharing is predicted to gain most, within every job's accepted slowdown.

    While there is an empty GPU for everybody who waits, nobody is packed (unless ``packing_bias`` is 1, which asks for
    packing at any price): sharing saves nothing when GPUs stand idle.
    """

    name = "cotenant"

    def place(
        self,
        request: Request,
        gpus: Sequence[GpuView],
        predictor: InterferencePredictor,
        settings: PlacementSettings,
        waiting_gpus: int,
    ) -> Placement | NoFit:
        """See ``PlacementPolicy.place``."""
        request = with_hinted_profile(request)
        candidates, errors = examine(request, gpus, predictor, settings)
        chosen: list[Candidate] | None = None
        empty = [candidate for candidate in candidates if candidate.empty]
        enough = settings.packing_bias < 1.0 and max(waiting_gpus, request.gpus) <= len(empty)
        if enough:
            chosen = _pick(empty, request)
        alone = chosen is not None
        chosen = chosen or _pick(candidates, request)
        if chosen is None:
            return refuse(request, gpus, errors, [candidate.gpu for candidate in candidates])
        return _placement(request, chosen, "an empty GPU for everybody who waits" if alone else None)


class Exclusive:
    """One job per GPU, which it gets whole: the GPU whose memory fits tightest."""

    name = "exclusive"

    def place(
        self,
        request: Request,
        gpus: Sequence[GpuView],
        predictor: InterferencePredictor,
        settings: PlacementSettings,
        waiting_gpus: int,
    ) -> Placement | NoFit:
        """See ``PlacementPolicy.place``."""
        candidates: list[Candidate] = []
        errors: list[FitError] = []
        for order, gpu in enumerate(gpus):
            need = memory_need(request, gpu, settings.memory_margin)
            error = basic_error(request, gpu, need)
            if error is None and gpu.residents:
                error = FitError("share_limit", gpu.gpu_id, len(gpu.residents) + 1, 1)
            if error is not None:
                errors.append(error)
                continue
            predicted = {request.job_id: predictor.predict([request.profile], gpu.gpu_type)[0]}
            candidates.append(Candidate(gpu, order, need, predicted, saving=0.0, gain=0.0))
        chosen = _pick(candidates, request)
        if chosen is None:
            return refuse(request, gpus, errors, [candidate.gpu for candidate in candidates])
        whole = [replace(candidate, memory_bytes=candidate.gpu.memory_bytes) for candidate in chosen]
        return _placement(request, whole, "the policy gives every job whole GPUs")


class Static:
    """Equal fractions fixed beforehand: every GPU has ``static_slots`` slots, first fit, nothing predicted.

    The predictions in its placements are only for comparison; they play no part in the decision.
    """

    name = "static"

    def place(
        self,
        request: Request,
        gpus: Sequence[GpuView],
        predictor: InterferencePredictor,
        settings: PlacementSettings,
        waiting_gpus: int,
    ) -> Placement | NoFit:
        """See ``PlacementPolicy.place``."""
        free: list[GpuView] = []
        errors: list[FitError] = []
        for gpu in gpus:
            error = self._error(request, gpu, settings.static_slots)
            if error is None:
                free.append(gpu)
            else:
                errors.append(error)
        chosen = _first_fit(free, request)
        if chosen is None:
            return refuse(request, gpus, errors, free)
        return self._grant(request, chosen, predictor, settings)

    @staticmethod
    def _error(request: Request, gpu: GpuView, slots: int) -> FitError | None:
        slot_memory, slot_compute = (gpu.memory_bytes, 1.0) if request.exclusive else _slot(gpu, slots)
        memory = request.memory_bytes or 0
        if memory > slot_memory:
            return FitError("memory_never", gpu.gpu_id, memory, slot_memory, never=True)
        if (request.compute or 0.0) > slot_compute + TOLERANCE:
            return FitError("compute_short", gpu.gpu_id, request.compute, slot_compute, never=True)
        error = basic_error(request, gpu, min(slot_memory, free_memory(gpu)))
        if error is None and len(gpu.residents) >= slots:
            return FitError("share_limit", gpu.gpu_id, len(gpu.residents) + 1, slots)
        # Residents placed under another policy may hold more than a slot, or be promised more.
        if error is None and slot_memory > free_memory(gpu):
            return FitError("memory_short", gpu.gpu_id, slot_memory, free_memory(gpu))
        promised = max((resident.min_compute for resident in gpu.residents), default=0.0)
        if error is None and promised > slot_compute + TOLERANCE:
            return FitError("compute_short", gpu.gpu_id, slot_compute, 1.0 - promised)
        return error

    @staticmethod
    def _grant(
        request: Request, chosen: Sequence[GpuView], predictor: InterferencePredictor, settings: PlacementSettings
    ) -> Placement:
        shares: list[Share] = []
        squeezed: list[tuple[str, Share]] = []
        predicted: dict[str, ThroughputPrediction] = {}
        savings: list[float] = []
        for gpu in chosen:
            memory, compute = (gpu.memory_bytes, 1.0) if request.exclusive else _slot(gpu, settings.static_slots)
            shares.append(Share(gpu.gpu_id, memory, compute))
            squeezed.extend(  # residents placed under another policy may hold more than a slot
                (resident.job_id, replace(resident.share, compute=compute))
                for resident in gpu.residents
                if resident.share.compute > compute
            )
            after = predictor.predict([*(r.profile for r in gpu.residents), request.profile], gpu.gpu_type)
            names = [*(resident.job_id for resident in gpu.residents), request.job_id]
            _keep_worst(predicted, dict(zip(names, after, strict=True)))
            savings.append(packing_saving([p.mid for p in after]) if gpu.residents else 0.0)
        value = score([prediction.mid for prediction in predicted.values()], settings.packing_bias)
        reason = f"first free slot on {_names(chosen)}, one of {settings.static_slots} equal slots per GPU"
        return Placement(request.job_id, tuple(shares), predicted, min(savings), value, reason, tuple(squeezed))


_POLICIES: Mapping[str, PlacementPolicy] = {p.name: p for p in (Cotenant(), Exclusive(), Static())}


def policy_names() -> tuple[str, ...]:
    """Return the names ``policy`` accepts."""
    return tuple(_POLICIES)


def policy(name: str) -> PlacementPolicy:
    """Return the policy with that name.

    Raises:
        ValueError: No policy has that name; the message lists those that exist.
    """
    try:
        return _POLICIES[name]
    except KeyError:
        raise ValueError(f"policy: {name!r} is not accepted; give one of {', '.join(_POLICIES)}") from None


def _slot(gpu: GpuView, slots: int) -> tuple[int, float]:
    return gpu.memory_bytes // slots, round_down(1.0 / slots)


def _pick(candidates: Sequence[Candidate], request: Request) -> list[Candidate] | None:
    """Return the best ``request.gpus`` candidates, all on one host if asked; None when there are too few."""
    ranked = sorted(candidates, key=best_fit_key)
    if not request.one_host:
        return ranked[: request.gpus] if len(ranked) >= request.gpus else None
    groups: dict[str, list[Candidate]] = {}
    for candidate in ranked:
        groups.setdefault(candidate.gpu.host_id, []).append(candidate)
    sets = [group[: request.gpus] for group in groups.values() if len(group) >= request.gpus]
    return min(sets, key=_set_key, default=None)


def _set_key(candidates: Sequence[Candidate]) -> tuple[float, ...]:
    keys = [best_fit_key(candidate) for candidate in candidates]
    return (
        *(sum(part) for part in list(zip(*keys, strict=True))[:3]),
        min(candidate.order for candidate in candidates),
    )


def _first_fit(gpus: Iterable[GpuView], request: Request) -> list[GpuView] | None:
    groups: dict[str, list[GpuView]] = {}
    for gpu in gpus:
        group = groups.setdefault(gpu.host_id if request.one_host else "", [])
        group.append(gpu)
        if len(group) == request.gpus:
            return group
    return None


def _placement(request: Request, chosen: Sequence[Candidate], why: str | None) -> Placement:
    shares: list[Share] = []
    squeezed: list[tuple[str, Share]] = []
    predicted: dict[str, ThroughputPrediction] = {}
    for candidate in chosen:
        share, giving = first_shares(candidate.gpu, request, candidate.memory_bytes)
        shares.append(share)
        squeezed.extend(giving)
        _keep_worst(predicted, candidate.predicted)
    shared = [candidate for candidate in chosen if not candidate.empty]
    saving = min((candidate.saving for candidate in shared), default=0.0)
    gain = sum(candidate.gain for candidate in chosen)
    return Placement(
        job_id=request.job_id,
        shares=tuple(shares),
        predicted=predicted,
        saving=saving,
        score=gain,
        reason=_reason(request, chosen, shared, predicted, why),
        squeezed=tuple(squeezed),
    )


def _reason(
    request: Request,
    chosen: Sequence[Candidate],
    shared: Sequence[Candidate],
    predicted: Mapping[str, ThroughputPrediction],
    why: str | None,
) -> str:
    where = _names([candidate.gpu for candidate in chosen])
    if not shared:
        return f"alone on {where}: {why or 'no neighbour would gain more than it costs'}"
    others = ", ".join(sorted({resident.job_id for candidate in shared for resident in candidate.gpu.residents}))
    own = predicted[request.job_id]
    saving = min(candidate.saving for candidate in shared)
    return f"on {where} beside {others}: predicted saving {saving:.0%}, own slowdown {own.slowdown:.2f}" + (
        f" ({own.reason})" if own.reason else ""
    )


def _names(gpus: Sequence[GpuView]) -> str:
    return ", ".join(gpu.gpu_id for gpu in gpus)


def _keep_worst(predicted: dict[str, ThroughputPrediction], more: Mapping[str, ThroughputPrediction]) -> None:
    """A job on several GPUs runs at the speed of its slowest one."""
    for job_id, prediction in more.items():
        known = predicted.get(job_id)
        if known is None or prediction.mid < known.mid:
            predicted[job_id] = prediction
