"""What is predicted for a job on shared GPUs, remembered for as long as nobody joins or leaves them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.throughputs import Flags, Floats, Throughputs, fsums, predict_arrays
from cotenant.forecasting.types import DemandProfile, InterferencePredictor, ThroughputPrediction
from cotenant.placement.guarantees import bounded
from cotenant.placement.objective import cautious_array
from cotenant.placement.shares import TOLERANCE
from cotenant.placement.types import FitError, GpuView, Request, Resident

REMEMBERED = 200_000  # prospects in all
_FIRST_SIZE = 16

_Ask = tuple[DemandProfile, tuple[tuple[str, DemandProfile], ...], float, float]
"""What a prospect depends on besides the GPU: the profile, in general and by GPU type, the accepted slowdown and the
guaranteed compute."""


@dataclass(slots=True, eq=False)
class _Said:
    """Predictions, the slowdowns held against limits, which of their sets it is, and why the job may not be there.

    The last once somebody has asked.
    """

    answer: Throughputs
    slowdowns: Floats
    row: int
    error: FitError | None = None


@dataclass(frozen=True, slots=True)
class Outlooks:
    """What some shared GPUs would come to with one more job, whatever that job's weight is; arrays of shape (GPUs,).

    Attributes:
        places: Positions of the GPUs.
        views: All GPUs.
        request: What the job asks.
        size: Number of jobs with the new one.
        saving: Packing saving of the GPU afterwards.
        own: Slowdown of the job, 1/n - 1.
        lost: Sum over the residents of weight times 1/n - 1 afterwards.
        good: Nobody's limit is exceeded, and something is saved.
        saved: Packing saving of the GPU without the job.
        now: Score of the GPU without the job.
        grown: By how much ``lost`` grows.
        said: What is predicted: normalised throughput of every resident, in order, and last of the job.
    """

    places: Sequence[int]
    views: Sequence[GpuView]
    request: Request
    size: Floats
    saving: Floats
    own: Floats
    lost: Floats
    good: Flags
    saved: Floats
    now: Floats
    grown: Floats
    said: Sequence[_Said]

    def gain(self, weight: float, bias: float) -> Floats:
        """Return the score of each GPU with a job of this weight minus its score now."""
        slowdown = (self.lost + weight * self.own) / self.size
        return bias * self.saving - (1.0 - bias) * slowdown - self.now

    def after(self, index: int) -> Sequence[ThroughputPrediction]:
        """Return what is predicted on one of the GPUs, by its index here."""
        return self.said[index].answer.of(self.said[index].row)

    def errors(self) -> Iterator[FitError]:
        """Yield why those GPUs are not good that are not."""
        for index in np.flatnonzero(~self.good).tolist():
            said, view = self.said[index], self.views[self.places[index]]
            if said.error is None:
                said.error = _slowdown_error(self.request, view, said.slowdowns[said.row].tolist())
            if said.error is None:  # one after the other would be faster, whatever slowdown the users accept
                said.error = FitError("no_saving", view.gpu_id, 0.0, float(self.saving[index]))
            yield said.error


class _Places:
    """Numbers of GPUs with the views that they rest on, one column each."""

    def __init__(self, rows: int) -> None:
        self._column: dict[int, int] = {}
        self._views: list[GpuView] = []
        self._numbers = np.zeros((rows, _FIRST_SIZE))

    def stale(self, places: Iterable[int], views: Sequence[GpuView]) -> list[int]:
        """Return those of these GPUs that are not known as they are."""
        column, known = self._column, self._views
        return [place for place in places if place not in column or known[column[place]] is not views[place]]

    def put(self, places: Sequence[int], views: Sequence[GpuView], numbers: Sequence[Floats | float]) -> None:
        """Note the numbers of these GPUs, each row of them of shape (places,)."""
        for place in places:
            column = self._column.setdefault(place, len(self._views))
            if column == len(self._views):
                self._views.append(views[place])
            self._views[column] = views[place]
        while len(self._views) > self._numbers.shape[1]:
            self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)], axis=1)
        columns = self._columns(places)
        for row, values in enumerate(numbers):
            self._numbers[row, columns] = values

    def of(self, places: Sequence[int]) -> Floats:
        """Return the numbers of known GPUs, shape (rows, places)."""
        return np.asarray(self._numbers[:, self._columns(places)])

    def _columns(self, places: Sequence[int]) -> NDArray[np.int64]:
        return np.array([self._column[place] for place in places], dtype=np.int64)


class Prospects:
    """The prospects of many jobs on the GPUs of one fleet. Transparent: what is remembered would be found again."""

    def __init__(self) -> None:
        self._rest_on: tuple[InterferencePredictor, PlacementSettings] | None = None
        self._known: dict[_Ask, tuple[_Places, dict[int, _Said]]] = {}
        self._now = _Places(3)
        self._count = 0

    def of(
        self,
        request: Request,
        places: Sequence[int],
        views: Sequence[GpuView],
        predictor: InterferencePredictor,
        settings: PlacementSettings,
    ) -> Outlooks:
        """Return the prospect of the job on each of these GPUs.

        Args:
            request: What the job asks.
            places: Positions of the GPUs; each carries somebody.
            views: All GPUs.
            predictor: Predicts how jobs on one GPU slow each other down.
            settings: How jobs are packed.
        """
        rest_on = self._rest_on
        if rest_on is None or rest_on[0] is not predictor or rest_on[1] is not settings or self._count > REMEMBERED:
            self._rest_on = predictor, settings
            self._known.clear()
            self._now = _Places(3)
            self._count = 0
        ask = request.profile, tuple(request.profiles.items()), request.max_slowdown, request.compute or 0.0
        known = self._known.get(ask)
        if known is None:
            known = self._known[ask] = _Places(5), {}
        numbers, said = known
        for gpu_type, some in _alike(self._now.stale(places, views), views):
            self._now.put(some, views, _now(gpu_type, some, views, predictor, settings))
        for gpu_type, some in _alike(numbers.stale(places, views), views):
            found, answer, slowdowns = _prospects(request, gpu_type, some, views, predictor, settings)
            numbers.put(some, views, found)
            said.update((place, _Said(answer, slowdowns, row)) for row, place in enumerate(some))
            self._count += len(some)
        size, saving, own, lost, good = numbers.of(places)
        saved, score, before = self._now.of(places)
        return Outlooks(
            places, views, request, size, saving, own, lost, good > 0.0, saved, score,
            lost - before, [said[place] for place in places],
        )  # fmt: skip


def too_slow(
    requests: Sequence[Request],
    gpus: Sequence[GpuView],
    predictor: InterferencePredictor,
    settings: PlacementSettings,
) -> Flags:
    """Return which jobs would slow somebody down, or be slowed down, too much on a GPU that carries somebody.

    Args:
        requests: What each job asks, shape (jobs,).
        gpus: The GPU that each is held against, same shape.
        predictor: Predicts how jobs on one GPU slow each other down.
        settings: How jobs are packed.
    """
    flags = np.zeros(len(requests), dtype=np.bool_)
    for gpu_type, some in _alike(range(len(gpus)), gpus):
        together = [gpus[place] for place in some]
        flags[some] = _together([requests[place] for place in some], gpu_type, together, predictor, settings)[2]
    return flags


def _alike(places: Iterable[int], views: Sequence[GpuView]) -> list[tuple[str, list[int]]]:
    """Return these GPUs by their type and by how many jobs they carry."""
    groups: dict[tuple[str, int], list[int]] = {}
    for place in places:
        groups.setdefault((views[place].gpu_type, len(views[place].residents)), []).append(place)
    return [(gpu_type, some) for (gpu_type, _), some in groups.items()]


def _now(
    gpu_type: str,
    places: Sequence[int],
    views: Sequence[GpuView],
    predictor: InterferencePredictor,
    settings: PlacementSettings,
) -> list[Floats]:
    """Return packing saving, score, and the sum of weight times 1/n - 1 of GPUs as they are: the same for all asks."""
    residents = [views[place].residents for place in places]
    profiles = [[each.profile for each in some] for some in residents]
    kept = [[each.min_compute for each in some] for some in residents]
    n = bounded(predict_arrays(predictor, profiles, gpu_type), profiles, kept).mid
    lost, saved = fsums(_weights(residents) * (1.0 / n - 1.0)), 1.0 - 1.0 / fsums(n)
    bias = settings.packing_bias
    return [saved, bias * saved - (1.0 - bias) * (lost / n.shape[1]), lost]


def _prospects(  # noqa: PLR0917 - the arguments of ``of``, and the type
    request: Request,
    gpu_type: str,
    places: Sequence[int],
    views: Sequence[GpuView],
    predictor: InterferencePredictor,
    settings: PlacementSettings,
) -> tuple[list[Floats | float], Throughputs, Floats]:
    """Return size, saving, own, lost and good of ``Outlooks``, what is predicted, and slowdowns held against limits."""
    gpus = [views[place] for place in places]
    said, slowdowns, slowed = _together([request] * len(gpus), gpu_type, gpus, predictor, settings)
    saving = 1.0 - 1.0 / fsums(said.mid)
    lost = fsums(_weights([gpu.residents for gpu in gpus]) * (1.0 / said.mid[:, :-1] - 1.0))
    own = 1.0 / said.mid[:, -1] - 1.0
    good = np.where(slowed | (saving <= 0.0), 0.0, 1.0)
    return [float(said.mid.shape[1]), saving, own, lost, good], said, slowdowns


def _together(
    requests: Sequence[Request],
    gpu_type: str,
    gpus: Sequence[GpuView],
    predictor: InterferencePredictor,
    settings: PlacementSettings,
) -> tuple[Throughputs, Floats, Flags]:
    """Return what is predicted for each job on its GPU, slowdowns held against limits, and where one is exceeded."""
    both = list(zip(requests, [gpu.residents for gpu in gpus], strict=True))
    profiles = [[*[each.profile for each in some], request.on(gpu_type)] for request, some in both]
    kept = [[*[each.min_compute for each in some], request.compute or 0.0] for request, some in both]
    said = bounded(predict_arrays(predictor, profiles, gpu_type), profiles, kept)
    limits = np.array([[*[each.max_slowdown for each in some], request.max_slowdown] for request, some in both])
    slowdowns = 1.0 / cautious_array(said, settings.confidence)
    slowed = np.asarray((slowdowns > limits + TOLERANCE).any(axis=1), dtype=np.bool_)
    return said, slowdowns, slowed


def _weights(residents: Sequence[Sequence[Resident]]) -> Floats:
    return np.array([[each.weight for each in some] for some in residents], dtype=np.float64)


def _slowdown_error(request: Request, gpu: GpuView, slowdowns: Sequence[float]) -> FitError | None:
    """Hold the slowdown of every resident, in order, and last of the job against its limit."""
    own = slowdowns[-1]
    if own > request.max_slowdown + TOLERANCE:
        return FitError("slowdown_self", gpu.gpu_id, own, request.max_slowdown)
    for resident, slowdown in zip(gpu.residents, slowdowns, strict=False):
        if slowdown > resident.max_slowdown + TOLERANCE:
            return FitError("slowdown_neighbour", gpu.gpu_id, slowdown, resident.max_slowdown)
    return None
