"""What guaranteed compute leaves to the others on a GPU, and how fast they can go with that at most.

Guarantees (the hint ``compute``) are kept, used or not. A job that would use the fraction ``u`` of the GPU alone gets
``left = max(g, 1 - sum of the g of the others)`` at most, so its normalised throughput is at most ``left / u``, however
well these jobs get along otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from cotenant.forecasting.throughputs import Floats, Throughputs, as_arrays, fsums, mids
from cotenant.forecasting.types import DemandProfile, InterferencePredictor, ThroughputPrediction
from cotenant.placement.shares import FLOOR
from cotenant.placement.types import GpuView, Resident


def bounded(
    said: Throughputs, profiles: Sequence[Sequence[DemandProfile]], guaranteed: Sequence[Sequence[float]]
) -> Throughputs:
    """Return predictions that promise no more than the guarantees leave; the same object where there are none.

    Args:
        said: What is predicted for sets of equally many jobs.
        profiles: Demand of each member of each set.
        guaranteed: Compute that each is guaranteed, fractions in [0, 1]; 0 = none.
    """
    kept = np.array(guaranteed, dtype=np.float64)
    if not kept.any():
        return said
    left = _left(kept)
    mean = np.array([[each.util_mean for each in members] for members in profiles], dtype=np.float64)
    p95 = np.array([[each.util_p95 for each in members] for members in profiles], dtype=np.float64)
    most = _most(left, mean)
    mid = np.minimum(said.mid, most)
    low = np.minimum(np.minimum(said.low, _most(left, p95)), mid)

    def reason(row: int, member: int) -> str:
        why = said.reason(row, member)
        if mid[row, member] >= said.mid[row, member]:
            return why
        return f"guarantees leave it {left[row, member]:.2f} of the GPU, of which it would use {mean[row, member]:.2f}"

    return replace(said, low=low, mid=mid, high=np.minimum(said.high, most), reason=reason)


def bounded_on(said: Sequence[ThroughputPrediction], residents: Sequence[Resident]) -> Sequence[ThroughputPrediction]:
    """Return the same for the residents of one GPU, in order."""
    if not any(each.min_compute for each in residents):
        return said
    profiles, kept = [each.profile for each in residents], [each.min_compute for each in residents]
    return bounded(as_arrays([said]), [profiles], [kept]).of(0)


def mids_on(predictor: InterferencePredictor, views: Iterable[GpuView]) -> list[list[float]]:
    """Return the normalised throughputs of the residents of each of these GPUs, in order."""
    gpus = list(views)
    found = mids(predictor, [(view.gpu_type, [each.profile for each in view.residents]) for view in gpus])
    for place, view in enumerate(gpus):
        if any(each.min_compute for each in view.residents):
            left = _left(np.array([[each.min_compute for each in view.residents]]))[0]
            mean = np.array([each.profile.util_mean for each in view.residents])
            found[place] = np.minimum(found[place], _most(left, mean)).tolist()
    return found


def _left(kept: Floats) -> Floats:
    """Return the compute each member can have at most, shape (sets, members)."""
    return np.maximum(np.maximum(kept, 1.0 - (fsums(kept)[:, None] - kept)), FLOOR)


def _most(left: Floats, used: Floats) -> Floats:
    """Return the largest normalised throughput with so much of the GPU for a job that would use so much alone."""
    return np.asarray(left / np.maximum(left, used))
