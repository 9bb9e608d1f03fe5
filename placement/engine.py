"""Where a job goes: one small class per policy, all behind ``PlacementPolicy``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.types import InterferencePredictor, ThroughputPrediction
from cotenant.placement.choosing import choose
from cotenant.placement.constraints import (
    Candidates,
    Examination,
    basic_error,
    first_errors,
    folded,
    processor_tests,
    refuse,
    with_hinted_profile,
)
from cotenant.placement.fleet import part_of
from cotenant.placement.objective import packing_saving, score
from cotenant.placement.processors import first_of, rooms
from cotenant.placement.shares import TOLERANCE, first_shares, free_memory, memory_need, round_down
from cotenant.placement.types import FitError, GpuView, NoFit, Placement, Request, Share


class PlacementPolicy(Protocol):
    """Decides which GPUs a job gets. Pure: same input, same answer; nothing is remembered between calls.

    ``exchanges``: jobs placed in the same cycle may change places (``batch.rearrange``).
    """

    name: str
    exchanges: bool

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
            gpus: Every GPU of the cluster with what it carries now, also those that take nothing new; or a part of them
                that alone is to be looked at.
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
    exchanges = True

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
        looked = Examination(request, gpus, predictor, settings)
        bias, empty = settings.packing_bias, looked.empty()
        every: Candidates | None = None
        if bias < 1.0 and max(waiting_gpus, request.gpus) <= len(empty.places):
            gentle = empty
            if empty.harm.min() > TOLERANCE:
                every = empty.joined(looked.shared())
                gentle = _gentle(every, float(empty.harm.min()))
            chosen = choose(gentle, request, -gentle.harm, protect=True, bias=0.0)  # slowdown counts in full here
            if chosen is not None:
                return _placement(looked, chosen, settings, "empty, so that nobody is slowed")
        if every is None:
            every = empty.joined(looked.shared())
        chosen = choose(every, request, every.gain, protect=False, bias=bias)
        if chosen is None:
            return looked.refusal(every)
        return _placement(looked, chosen, settings, _why_alone(request, every))


def _why_alone(request: Request, every: Candidates) -> str:
    if request.exclusive:
        return "it wants GPUs of its own"
    if request.profile.source == "unknown":
        return "to be measured first, since nothing is known of what it uses"
    if not np.any(every.fleet.crowd[every.places]):
        return "no GPU that others use can take it as well"
    return "no neighbour would gain more than it costs"


def _gentle(every: Candidates, least: float) -> Candidates:
    """Return the candidates that count while there are enough empty GPUs, since nobody is to be slowed down.

    A shared GPU is one of them only when, being of a faster type, it serves the job better than any empty one even
    with what the neighbours lose: an empty one costs the job ``least``, against the fastest type.
    """
    return every.only((every.fleet.crowd[every.places] == 0) | (every.harm < least - TOLERANCE))


class Exclusive:
    """One job per GPU, which it gets whole: the GPU whose memory fits tightest."""

    name = "exclusive"
    exchanges = False

    def place(
        self,
        request: Request,
        gpus: Sequence[GpuView],
        predictor: InterferencePredictor,
        settings: PlacementSettings,
        waiting_gpus: int,
    ) -> Placement | NoFit:
        """See ``PlacementPolicy.place``."""
        looked = Examination(request, gpus, predictor, settings, most_jobs=1)
        empty = looked.empty()
        chosen = choose(empty, request, empty.gain, protect=True, bias=settings.packing_bias)
        if chosen is None:
            return looked.refusal(empty)
        return _placement(looked, chosen, settings, "the policy gives every job whole GPUs", whole=True)


class Static:
    """Equal fractions fixed beforehand: every GPU has ``static_slots`` slots, first fit, nothing predicted.

    The predictions in its placements are only for comparison; they play no part in the decision.
    """

    name = "static"
    exchanges = False

    def place(
        self,
        request: Request,
        gpus: Sequence[GpuView],
        predictor: InterferencePredictor,
        settings: PlacementSettings,
        waiting_gpus: int,
    ) -> Placement | NoFit:
        """See ``PlacementPolicy.place``."""
        part = part_of(gpus)
        never, short = processor_tests(request, part)
        hopeless = np.zeros(len(part), dtype=np.bool_)  # what can never be met is told before what is in the way now
        for _, fails, _, _ in never:
            hopeless |= fails
        errors = [
            None if lost else self._error(request, gpu, settings.static_slots)
            for gpu, lost in zip(gpus, hopeless.tolist(), strict=True)
        ]
        fits = np.array([error is None for error in errors], dtype=np.bool_)
        tests = [(kind, fails & fits, needed, there) for kind, fails, needed, there in (*never, *short)]
        lacking = first_errors(part, tests)
        for _, fails, _, _ in tests:
            fits &= ~fails
        usable, room = part.places[fits], rooms(part.fleet, request)
        if room is not None:
            usable = usable[first_of(part.fleet.host[usable], room, np.arange(len(usable)))]
        chosen = _first_fit((part.fleet.views[place] for place in usable.tolist()), request)
        if chosen is None:
            possible = np.array([error is None or not error.never for error in errors], dtype=np.bool_)
            why_not = [*folded(error for error in errors if error is not None), *lacking]
            return refuse(request, part, why_not, part.places[fits], part.places[possible])
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


def _first_fit(gpus: Iterable[GpuView], request: Request) -> list[GpuView] | None:
    groups: dict[str, list[GpuView]] = {}
    for gpu in gpus:
        group = groups.setdefault(gpu.host_id if request.one_host else "", [])
        group.append(gpu)
        if len(group) == request.gpus:
            return group
    return None


def _placement(
    looked: Examination, chosen: Sequence[int], settings: PlacementSettings, why_alone: str, *, whole: bool = False
) -> Placement:
    """Return the placement on the GPUs at these positions; with ``whole`` it gets all of their memory."""
    shares: list[Share] = []
    squeezed: list[tuple[str, Share]] = []
    predicted: dict[str, ThroughputPrediction] = {}
    request = looked.request
    outlooks = [looked.outlook(place) for place in chosen]
    gpus = [looked.fleet.views[place] for place in chosen]
    for gpu, outlook in zip(gpus, outlooks, strict=True):
        memory = gpu.memory_bytes if whole else memory_need(request, gpu, settings.memory_margin)
        share, giving = first_shares(gpu, request, memory)
        shares.append(share)
        squeezed.extend(giving)
        names = [*(resident.job_id for resident in gpu.residents), request.job_id]
        _keep_worst(predicted, dict(zip(names, outlook.after, strict=True)))
    savings = [outlook.saving for outlook, gpu in zip(outlooks, gpus, strict=True) if gpu.residents]
    saving = min(savings, default=0.0)
    return Placement(
        job_id=request.job_id,
        shares=tuple(shares),
        predicted=predicted,
        saving=saving,
        score=sum(outlook.gain for outlook in outlooks),
        reason=_reason(gpus, predicted[request.job_id], saving, why_alone),
        squeezed=tuple(squeezed),
    )


def _reason(gpus: Sequence[GpuView], own: ThroughputPrediction, saving: float, why_alone: str) -> str:
    where = _names(gpus)
    others = sorted({resident.job_id for gpu in gpus for resident in gpu.residents})
    if not others:
        return f"alone on {where}: {why_alone}"
    return f"on {where} beside {', '.join(others)}: predicted saving {saving:.0%}, own slowdown {own.slowdown:.2f}" + (
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
