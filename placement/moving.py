"""What a move is worth: how much sooner the jobs concerned are expected to end.

A job with work ``left`` (seconds alone on its fastest GPU type) whose GPU does it at speed ``v`` alone and at ``v n``
beside its company ends after ``left / v + h (1 - n)``: while the company lasts, ``h``, it falls behind by ``1 - n`` per
second, and afterwards it is alone. The company lasts until the job itself ends, or the last of its neighbours does:
``h = min(left / (v n), max over neighbours of left / (v n))``. A job on several GPUs goes at the speed of the slowest.

That somebody may take the place of a neighbour that has ended is not foreseen: a move is worth at least this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.guarantees import mids_on
from cotenant.placement.types import GpuView


@dataclass(frozen=True, slots=True)
class Pace:
    """How a job goes.

    Attributes:
        n: Its normalised throughput, in (0, 1].
        speed: How fast it is alone on these GPUs against its fastest type, in (0, 1].
        company: The jobs it shares GPUs with.
    """

    n: float
    speed: float
    company: tuple[str, ...]


class Together:
    """The normalised throughputs of jobs on GPUs, remembered by the view: who looks at one again predicts nothing."""

    def __init__(self, predictor: InterferencePredictor) -> None:
        self._predictor = predictor
        self._known: dict[int, tuple[GpuView, Mapping[str, float]]] = {}  # by identity, of views that are kept for it

    def on(self, views: Iterable[GpuView]) -> None:
        """Predict for these GPUs, those that are not known at once."""
        new = list({id(view): view for view in views if id(view) not in self._known}.values())
        for view, together in zip(new, mids_on(self._predictor, new), strict=True):
            members = (resident.job_id for resident in view.residents)
            self._known[id(view)] = view, dict(zip(members, together, strict=True))

    def of(self, view: GpuView) -> Mapping[str, float]:
        """Return the throughput of every resident of a GPU that is known."""
        return self._known[id(view)][1]


def paces(
    job_ids: Iterable[str],
    gpus_of: Callable[[str], Sequence[GpuView]],
    together: Together,
    slowness_of: Callable[[str, str], float],
) -> dict[str, Pace]:
    """Return how these jobs are predicted to go.

    Args:
        job_ids: The jobs.
        gpus_of: The GPUs of a job with all that they carry, itself included.
        together: What is predicted for GPUs.
        slowness_of: How many times longer a job takes alone on a GPU type than on its fastest (>= 1).
    """
    gpus = {job_id: gpus_of(job_id) for job_id in job_ids}
    together.on(view for some in gpus.values() for view in some)
    return {
        job_id: Pace(
            n=min(together.of(view)[job_id] for view in some),
            speed=min(1.0 / slowness_of(job_id, view.gpu_type) for view in some),
            company=tuple(dict.fromkeys(r.job_id for view in some for r in view.residents if r.job_id != job_id)),
        )
        for job_id, some in gpus.items()
        if some
    }


def ends_in_s(job_id: str, all_paces: Mapping[str, Pace], left_s: Callable[[str], float]) -> float:
    """Return in how many seconds a job is expected to end.

    Args:
        job_id: The job.
        all_paces: How it and its company go; whoever is not in it counts as going at full speed.
        left_s: What a job has left, in seconds alone on its fastest type.
    """
    pace = all_paces[job_id]
    alone_s = left_s(job_id) / pace.speed
    if not pace.company:
        return alone_s
    stays_s = max(_together_s(other, all_paces, left_s) for other in pace.company)
    return alone_s + min(_together_s(job_id, all_paces, left_s), stays_s) * (1.0 - pace.n)


def _together_s(job_id: str, all_paces: Mapping[str, Pace], left_s: Callable[[str], float]) -> float:
    pace = all_paces.get(job_id)
    return left_s(job_id) if pace is None else left_s(job_id) / (pace.speed * pace.n)
