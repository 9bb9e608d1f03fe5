"""What crews are worth: jobs of a batch together on one GPU, beside those that it carries already."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.throughputs import Floats, fsums, predict_arrays
from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.constraints import basic_error, kept_apart, with_hinted_profile
from cotenant.placement.fleet import Fleet, does_not_share
from cotenant.placement.guarantees import bounded
from cotenant.placement.mix import Demand
from cotenant.placement.objective import cautious_array, slowness
from cotenant.placement.room import free_parts
from cotenant.placement.shares import TOLERANCE, floor_of, free_memory, memory_need
from cotenant.placement.statement import resident_of
from cotenant.placement.types import GpuView, Request, Resident, Share

Crew = frozenset[int]
Key = tuple[int, Crew]
"""Number of a GPU, and of the jobs that are to go there."""


class Worths:
    """What crews are worth on GPUs: the score, or minus infinity where they may not be. What was found is remembered.

    Args:
        jobs: The jobs, of one GPU each; none keeps its GPU to itself.
        gpus: The GPUs without these jobs.
        predictor: Predicts how jobs on one GPU slow each other down.
        settings: How jobs are packed.
        demand: What jobs typically ask for: then what is left to them counts instead of the saving; None = not known.
    """

    def __init__(
        self,
        jobs: Sequence[Request],
        gpus: Sequence[GpuView],
        predictor: InterferencePredictor,
        settings: PlacementSettings,
        demand: Demand | None = None,
    ) -> None:
        self._jobs, self._gpus, self._predictor, self._settings, self._demand = jobs, gpus, predictor, settings, demand
        self._free = [free_memory(gpu) for gpu in gpus]
        self._choosy = any(job.anti_affinity for job in jobs)
        self._newcomers: dict[tuple[int, int], Resident | None] = {}
        self._known: dict[Key, float] = {}

    def of(self, keys: Iterable[Key]) -> list[float]:
        """Return what these crews are worth, in order."""
        asked = list(keys)
        self._weigh([key for key in dict.fromkeys(asked) if key not in self._known])
        return [self._known[key] for key in asked]

    def _weigh(self, asked: Sequence[Key]) -> None:
        alike: dict[tuple[str, int, bool], list[tuple[Key, tuple[Resident, ...]]]] = {}
        for key in asked:
            members = self._members(*key)
            self._known[key] = -math.inf
            if members is not None:
                kind = self._gpus[key[0]].gpu_type, len(members), any(each.min_compute for each in members)
                alike.setdefault(kind, []).append((key, members))
        for (gpu_type, size, _), found in alike.items():
            keys, together = [key for key, _ in found], [members for _, members in found]
            saving, scores = self._scores(gpu_type, keys, together) if size else ([0.0] * len(keys), [0.0] * len(keys))
            for key, members, saved, value in zip(keys, together, saving, scores, strict=True):
                self._known[key] = self._in_all(key, members, saved, value)

    def _members(self, number: int, crew: Crew) -> tuple[Resident, ...] | None:
        """Return everybody on the GPU with this crew; None when anything but the interference forbids it."""
        gpu, settings = self._gpus[number], self._settings
        newcomers = [self._newcomer(number, job) for job in sorted(crew)]
        joining = [each for each in newcomers if each is not None]
        members = (*gpu.residents, *joining)
        if len(joining) < len(newcomers) or sum(each.share.memory_bytes for each in joining) > self._free[number]:
            return None
        if len(crew) > 1 and self._at_odds(gpu, crew, joining):
            return None
        if crew and len(members) > 1:
            promised = math.fsum([floor_of(each.min_compute) for each in members])
            if len(members) > settings.max_jobs_per_gpu or promised > 1.0 + TOLERANCE:
                return None
        return members

    def _newcomer(self, number: int, job: int) -> Resident | None:
        """Return the job as it would be on the GPU; None when it may not be there even without the others."""
        if (number, job) not in self._newcomers:
            gpu, request = self._gpus[number], self._jobs[job]
            need = memory_need(request, gpu, self._settings.memory_margin)
            fits = basic_error(request, gpu, need) is None
            share = Share(gpu.gpu_id, need, 0.0)
            newcomer = resident_of(with_hinted_profile(request), share, gpu.gpu_type) if fits else None
            self._newcomers[number, job] = newcomer
        return self._newcomers[number, job]

    def _at_odds(self, gpu: GpuView, crew: Crew, joining: Sequence[Resident]) -> bool:
        """Whether jobs of one crew may not be on one GPU."""
        if any(does_not_share(each, gpu) for each in joining):
            return True
        return self._choosy and any(
            kept_apart(self._jobs[job], joining[:place]) for place, job in enumerate(sorted(crew))
        )

    def _scores(
        self, gpu_type: str, keys: Sequence[Key], together: Sequence[tuple[Resident, ...]]
    ) -> tuple[list[float], list[float]]:
        """Return packing saving and score of crews that make equally many jobs on GPUs of one type."""
        profiles = [[each.profile for each in members] for members in together]
        kept = [[each.min_compute for each in members] for members in together]
        said = bounded(predict_arrays(self._predictor, profiles, gpu_type), profiles, kept)
        weights: Floats = np.array([[each.weight for each in members] for members in together])
        size, bias = weights.shape[1], self._settings.packing_bias
        saving = 1.0 - 1.0 / fsums(said.mid)
        scores = bias * saving - (1.0 - bias) * (fsums(weights * (1.0 / said.mid - 1.0)) / size)
        if size > 1:
            limits = np.array([[each.max_slowdown for each in members] for members in together])
            slowed = (1.0 / cautious_array(said, self._settings.confidence) > limits + TOLERANCE).any(axis=1)
            joins = np.array([bool(crew) for _, crew in keys])
            scores = np.where(joins & (slowed | (saving <= 0.0)), -np.inf, scores)
        return saving.tolist(), scores.tolist()

    def _in_all(self, key: Key, members: tuple[Resident, ...], saving: float, score: float) -> float:
        """Return the score less what slow GPU types cost the crew, and what the place costs typical jobs."""
        (number, crew), bias = key, self._settings.packing_bias
        gpu = self._gpus[number]
        slower = math.fsum([slowness(gpu.gpu_type, self._jobs[job], self._settings) - 1.0 for job in crew])
        found = score - (1.0 - bias) * slower
        if self._demand is None or found == -math.inf:
            return found
        left = free_parts(Fleet([gpu.carrying(members)]))[0]
        return found + bias * (float(self._demand.worth[left]) - saving)
