"""What is predicted for a job on shared GPUs, remembered for as long as nobody joins or leaves them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.types import DemandProfile, InterferencePredictor, ThroughputPrediction, predict_sets
from cotenant.placement.objective import cautious, packing_saving, score
from cotenant.placement.shares import TOLERANCE
from cotenant.placement.types import FitError, GpuView, Request

REMEMBERED = 200_000  # prospects in all

_Ask = tuple[DemandProfile, tuple[tuple[str, DemandProfile], ...], float]
"""What a prospect depends on besides the GPU: the profile, in general and by GPU type, and the accepted slowdown."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """What one shared GPU would come to with one more job, whatever that job's weight is.

    Attributes:
        after: Normalised throughput of every resident, in order, and last of the job.
        saving: Packing saving of the GPU afterwards.
        saved: Packing saving of the GPU without the job.
        now: Score of the GPU without the job.
        own: Slowdown of the job, 1/n - 1.
        lost: Sum over the residents of weight times 1/n - 1 afterwards.
        grown: By how much that sum grows.
        error: Whose limit is exceeded; None = nobody's.
    """

    after: Sequence[ThroughputPrediction]
    saving: float
    saved: float
    now: float
    own: float
    lost: float
    grown: float
    error: FitError | None

    def gain(self, weight: float, bias: float) -> float:
        """Return the score of the GPU with a job of this weight minus its score now."""
        slowdown = (self.lost + weight * self.own) / len(self.after)
        return bias * self.saving - (1.0 - bias) * slowdown - self.now


@dataclass(frozen=True, slots=True)
class _Now:
    """What one shared GPU comes to without the job: the same for all that ask.

    Attributes:
        view: The GPU.
        weights: Weight of every resident, in order.
        saved: Packing saving.
        score: Score.
        lost: Sum over the residents of weight times 1/n - 1.
    """

    view: GpuView
    weights: Sequence[float]
    saved: float
    score: float
    lost: float


class Prospects:
    """The prospects of many jobs on the GPUs of one fleet. Transparent: what is remembered would be found again."""

    def __init__(self) -> None:
        self._rest_on: tuple[InterferencePredictor, PlacementSettings] | None = None
        self._known: dict[_Ask, dict[int, tuple[GpuView, Prospect]]] = {}
        self._now: dict[int, _Now] = {}
        self._count = 0

    def of(
        self,
        request: Request,
        places: Sequence[int],
        views: Sequence[GpuView],
        predictor: InterferencePredictor,
        settings: PlacementSettings,
    ) -> list[Prospect]:
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
            self._now.clear()
            self._count = 0
        known = self._known.setdefault((request.profile, tuple(request.profiles.items()), request.max_slowdown), {})
        asked = [place for place in places if place not in known or known[place][0] is not views[place]]
        if asked:
            known.update(self._found(request, asked, views, predictor, settings))
        return [known[place][1] for place in places]

    def _found(
        self,
        request: Request,
        places: Sequence[int],
        views: Sequence[GpuView],
        predictor: InterferencePredictor,
        settings: PlacementSettings,
    ) -> Iterator[tuple[int, tuple[GpuView, Prospect]]]:
        new = [place for place in places if place not in self._now or self._now[place].view is not views[place]]
        gpus = [views[place] for place in (*new, *places)]
        sets = [(gpu.gpu_type, [resident.profile for resident in gpu.residents]) for gpu in gpus]
        for gpu_type, members in sets[len(new) :]:
            members.append(request.on(gpu_type))
        predicted = predict_sets(predictor, sets)
        self._now.update((p, _now(views[p], each, settings)) for p, each in zip(new, predicted, strict=False))
        self._count += len(places)
        for place, after in zip(places, predicted[len(new) :], strict=True):
            yield place, (views[place], _prospect(request, self._now[place], after, settings))


def _now(gpu: GpuView, before: Sequence[ThroughputPrediction], settings: PlacementSettings) -> _Now:
    weights = [resident.weight for resident in gpu.residents]
    alone = [prediction.mid for prediction in before]
    lost = math.fsum([weight * (1.0 / n - 1.0) for weight, n in zip(weights, alone, strict=True)])
    return _Now(gpu, weights, packing_saving(alone), score(alone, settings.packing_bias, weights), lost)


def _prospect(
    request: Request, now: _Now, after: Sequence[ThroughputPrediction], settings: PlacementSettings
) -> Prospect:
    throughputs = [prediction.mid for prediction in after]
    saving = packing_saving(throughputs)
    error = _slowdown_error(request, now.view, after, settings.confidence)
    if error is None and saving <= 0.0:  # one after the other would be faster, whatever slowdown the users accept
        error = FitError("no_saving", now.view.gpu_id, 0.0, saving)
    own = 1.0 / throughputs.pop() - 1.0
    lost = math.fsum([weight * (1.0 / n - 1.0) for weight, n in zip(now.weights, throughputs, strict=True)])
    return Prospect(after, saving, now.saved, now.score, own, lost, lost - now.lost, error)


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
    return None
