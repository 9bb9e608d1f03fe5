"""Who may run where, and how fast: jobs alone, or two side by side, on the GPU types of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.throughputs import predict_arrays
from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.constraints import with_hinted_profile
from cotenant.placement.fleet import Flags, Fleet, Floats, Integers
from cotenant.placement.objective import cautious_array, slowness
from cotenant.placement.shares import TOLERANCE, memory_needs
from cotenant.placement.types import Request

LEAST_WORK = 1.05  # sum of normalised throughputs, below which two that share are not worth it
_NOBODY = -1


@dataclass(frozen=True, slots=True)
class Choices:
    """What may be chosen; arrays with an entry for each choice.

    Attributes:
        first: The job, as an index.
        second: The one beside it; -1 = it is alone.
        part: The part of the cluster, as an index: a GPU type, or the GPUs of one type on a host.
        first_speed: How fast the first is there, against alone on its fastest type.
        second_speed: The same of the second; 0 = there is none.
    """

    first: Integers
    second: Integers
    part: Integers
    first_speed: Floats
    second_speed: Floats

    def __len__(self) -> int:
        return len(self.first)

    @property
    def paired(self) -> Flags:
        """Whether two share."""
        flags: Flags = self.second != _NOBODY
        return flags

    def members(self, choice: int) -> list[int]:
        """Return the jobs of one choice."""
        return [job for job in (int(self.first[choice]), int(self.second[choice])) if job != _NOBODY]

    def total(self, each: Floats, *, by_speed: bool) -> Floats:
        """Return the sum of a number of each job over the jobs of each choice, times their speeds if so wanted."""
        second = np.where(self.paired, each[self.second], 0.0)
        found: Floats = each[self.first] + second
        return each[self.first] * self.first_speed + second * self.second_speed if by_speed else found

    def among(self, jobs: Flags) -> Choices:
        """Return those of which all jobs are among these."""
        return self.only(np.flatnonzero(jobs[self.first] & (jobs[self.second] | ~self.paired)))

    def only(self, which: Integers) -> Choices:
        """Return these, in this order."""
        return Choices(
            self.first[which], self.second[which], self.part[which], self.first_speed[which], self.second_speed[which]
        )

    def spread(self, kind_of: Integers) -> Choices:
        """Return these choices of GPU types for each part of the cluster, given the GPU type of each."""
        found = [np.flatnonzero(self.part == kind) for kind in kind_of.tolist()]
        numbers = np.repeat(np.arange(len(kind_of)), [len(each) for each in found])
        chosen = self.only(np.concatenate(found))
        return Choices(chosen.first, chosen.second, numbers, chosen.first_speed, chosen.second_speed)


def possible(
    requests: Sequence[Request], fleet: Fleet, predictor: InterferencePredictor, packing: PlacementSettings
) -> Choices:
    """Return which jobs, and which pairs of equally large ones, may run on which GPU types.

    A pair may where both have memory enough and nobody is slowed down more than accepted; whether a GPU takes it in the
    end is the policy's to say.

    Args:
        requests: What the jobs ask.
        fleet: The GPUs.
        predictor: Predicts how jobs on one GPU slow each other down.
        packing: How jobs are packed.
    """
    asked = [with_hinted_profile(request) for request in requests]
    found = [_on(kind, asked, fleet, predictor, packing) for kind in range(len(fleet.kinds))]
    return Choices(
        *(
            np.concatenate([getattr(each, name) for each in found])
            for name in ("first", "second", "part", "first_speed", "second_speed")
        )
    )


def _on(
    kind: int, asked: Sequence[Request], fleet: Fleet, predictor: InterferencePredictor, packing: PlacementSettings
) -> Choices:
    """Return the choices on one GPU type."""
    name, there = fleet.kinds[kind], np.flatnonzero((fleet.kind == kind) & fleet.schedulable)
    room = fleet.capacity[there].max(initial=0)
    needs = np.array([memory_needs(each, np.array([room]), packing.memory_margin)[0] for each in asked])
    speed = np.array([1.0 / slowness(name, each, packing) for each in asked])
    gpus = np.array([each.gpus for each in asked])
    fits = (needs <= room) & (gpus <= len(there))
    alone = np.flatnonzero(fits)
    shares = np.array([not each.exclusive and each.profile.source != "unknown" for each in asked], dtype=np.bool_)
    first, second = np.nonzero(np.triu(gpus[:, None] == gpus, 1))
    may = (fits & shares)[first] & (fits & shares)[second] & (needs[first] + needs[second] <= room)
    first, second = first[may], second[may]
    n = np.zeros((0, 2))
    if len(first) and packing.max_jobs_per_gpu > 1:
        profiles, accepted = [each.on(name) for each in asked], np.array([each.max_slowdown for each in asked])
        pairs = [(profiles[one], profiles[other]) for one, other in zip(first, second, strict=True)]
        said = predict_arrays(predictor, pairs, name)
        careful = cautious_array(said, packing.confidence) * np.stack([accepted[first], accepted[second]], axis=1)
        good = (careful >= 1.0 - TOLERANCE).all(axis=1) & (said.mid.sum(axis=1) > LEAST_WORK)
        first, second, n = first[good], second[good], said.mid[good]
    else:
        first, second = first[:0], second[:0]
    return Choices(
        np.concatenate([alone, first]),
        np.concatenate([np.full(len(alone), _NOBODY), second]),
        np.full(len(alone) + len(first), kind),
        np.concatenate([speed[alone], speed[first] * n[:, 0]]),
        np.concatenate([np.zeros(len(alone)), speed[second] * n[:, 1]]),
    )
