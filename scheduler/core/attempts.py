"""Attempts to find or make room that failed, remembered for as long as all that they rest on stays as it is."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.types import DemandProfile, InterferencePredictor
from cotenant.placement.types import GpuView, Request

REMEMBERED = 5_000  # attempts
MOST_GPUS = 512  # of one attempt

_Key = tuple[DemandProfile, int, bytes]


@dataclass(frozen=True, slots=True)
class Attempt:
    """All that decides whether a job finds a place on some GPUs once others have left them: no time, and no chance.

    Attributes:
        request: What it asks, whoever it is.
        places: Positions of the GPUs, the bytes of an array of 64-bit integers.
        views: The GPUs with everybody on them.
        open_places: The same of those that the job may use.
        leaving: Ids of the jobs that could leave, in the order in which they do.
        predictor: Predicts how jobs on one GPU slow each other down.
        packing: How jobs are packed.
    """

    request: Request
    places: bytes
    views: tuple[GpuView, ...]
    open_places: bytes
    leaving: tuple[str, ...]
    predictor: InterferencePredictor
    packing: PlacementSettings


class Attempts:
    """The last attempt of each profile on each set of GPUs that failed. Transparent: it would fail again."""

    def __init__(self) -> None:
        self._failed: dict[_Key, Attempt] = {}

    def failed(self, attempt: Attempt) -> bool:
        """Whether the very same was tried before, to no avail."""
        return self._failed.get(_key(attempt)) == attempt

    def note_failed(self, attempt: Attempt) -> None:
        """Note that there was no place."""
        if len(self._failed) >= REMEMBERED:
            self._failed.clear()
        self._failed[_key(attempt)] = attempt


def _key(attempt: Attempt) -> _Key:
    return attempt.request.profile, attempt.request.gpus, attempt.places
