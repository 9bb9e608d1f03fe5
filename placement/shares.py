"""Share arithmetic: what a GPU has left, and how its compute is divided.

Compute is divided in whole units of 1/4096. Because 4096 is a power of two, every share and every sum of shares is
exact in binary floating point: shares that add up to at most 1 on paper do so in the program too, whatever hints such
as 0.1 + 0.2 were rounded to. Rounding is always down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotenant.placement.types import GpuView, Request, Resident, Share

UNITS = 4096
TOLERANCE = 1e-9  # on sums of user-given fractions; far below one unit
FLOOR = 0.02  # nobody is squeezed below this: 48 jobs, the most a GPU may carry, still fit
INITIAL_HEADROOM = 0.15  # first shares only; the resize that follows a second later uses its own setting


@dataclass(frozen=True, slots=True)
class Claim:
    """One job's claim on the compute of a GPU, all fractions of it.

    Attributes:
        minimum: What it gets whatever the others want.
        demand: What it could use; nobody is starved for anything beyond it.
        weight: Its weight against the others between minimum and demand (> 0).
    """

    minimum: float
    demand: float
    weight: float = 1.0


def to_units(compute: float) -> int:
    """Return the fraction in whole units, rounded down (values a rounding error below a unit count as that unit)."""
    return math.floor(compute * UNITS + 1e-6)


def round_down(compute: float) -> float:
    """Return the largest share on the grid of 1/4096 that does not exceed ``compute``."""
    return to_units(compute) / UNITS


def thousandths(cpus: float) -> int:
    """Return processor cores in thousandths, as they are counted."""
    return round(cpus * 1000.0)


def free_memory(gpu: GpuView) -> int:
    """Return the bytes no resident has reserved (never negative)."""
    return max(0, gpu.memory_bytes - sum(resident.share.memory_bytes for resident in gpu.residents))


def granted_compute(gpu: GpuView) -> float:
    """Return the sum of the residents' compute shares."""
    return math.fsum(resident.share.compute for resident in gpu.residents)


def floor_of(minimum: float) -> float:
    """Return what must stay reserved for a job with this guarantee: the guarantee, or ``FLOOR`` when it has none."""
    return minimum if minimum > 0.0 else FLOOR


def reservable_compute(gpu: GpuView) -> float:
    """Return the compute that can still be promised to a newcomer once all residents are squeezed to their floors."""
    return max(0.0, 1.0 - math.fsum(floor_of(resident.min_compute) for resident in gpu.residents))


def memory_need(request: Request, gpu: GpuView, margin: float) -> int:
    """Return the bytes to reserve for the request on this GPU.

    The hint counts as it is. A measured peak gets the margin on top, but never more than the GPU has, since a job that
    was seen to fit must not become unplaceable by its own margin. What a cold-start class expects counts the same, but
    never makes a job unplaceable: it is a guess. With neither, the job gets the whole GPU.
    """
    if request.memory_bytes is not None:
        return request.memory_bytes
    peak = request.profile.memory_bytes
    if peak is None:
        return gpu.memory_bytes
    if peak > gpu.memory_bytes and request.profile.source != "class":
        return peak
    return min(gpu.memory_bytes, math.ceil(peak * (1.0 + margin)))


def memory_needs(request: Request, capacity: NDArray[np.int64], margin: float) -> NDArray[np.int64]:
    """Return ``memory_need`` for many GPUs at once.

    Args:
        request: What is asked.
        capacity: Usable memory of each GPU in bytes.
        margin: Fraction added to a measured peak.

    Returns:
        Bytes, of the same shape.
    """
    if request.memory_bytes is not None:
        return np.full_like(capacity, request.memory_bytes)
    peak = request.profile.memory_bytes
    if peak is None:
        return capacity
    padded = np.minimum(capacity, math.ceil(peak * (1.0 + margin)))
    return padded if request.profile.source == "class" else np.where(peak > capacity, peak, padded)


def demand_of(util_p95: float, minimum: float, headroom: float) -> float:
    """Return the compute a job with this 95th percentile of utilisation is planned with, in (0, 1]."""
    return min(1.0, max(minimum, util_p95 * (1.0 + headroom), FLOOR))


def first_shares(gpu: GpuView, request: Request, memory_bytes: int) -> tuple[Share, tuple[tuple[str, Share], ...]]:
    """Return the newcomer's share and the new shares of the residents that must give way for it.

    A job alone gets the whole compute. Otherwise everybody is planned with what it is predicted to need and the GPU is
    divided as ``divide`` does; residents only ever shrink here, growing is left to the resizing that follows.
    """
    newcomer = Claim(
        minimum=request.compute or 0.0,
        demand=request.compute or demand_of(request.profile.util_p95, 0.0, INITIAL_HEADROOM),
        weight=request.weight,
    )
    parts = divide([*(_claim(resident) for resident in gpu.residents), newcomer])
    squeezed = tuple(
        (resident.job_id, Share(gpu.gpu_id, resident.share.memory_bytes, part))
        for resident, part in zip(gpu.residents, parts, strict=False)
        if part < resident.share.compute
    )
    return Share(gpu.gpu_id, memory_bytes, parts[-1]), squeezed


def divide(claims: Sequence[Claim], floor: float = FLOOR) -> list[float]:
    """Divide one GPU's compute among the claims: the whole of it, never more.

    1. Everybody gets its minimum, or ``floor`` where it has none (lower when so many do not fit).
    2. The rest goes by weighted max-min fairness up to each demand: all levels rise together in proportion to the
       weights, and a job stops rising where its demand is met.
    3. What nobody demands is handed out in proportion to what everybody has, so that no compute lies idle while
       somebody could use it.

    Returns:
        One fraction per claim, in order, on the grid of 1/4096; they add up to exactly 1 (an empty list for no claims).
    """
    if not claims:
        return []
    lows = _minima(claims, floor)
    highs = [max(low, min(1.0, claim.demand)) for low, claim in zip(lows, claims, strict=True)]
    parts = _fill(lows, highs, [claim.weight for claim in claims])
    total = math.fsum(parts)
    return _on_grid([part / total for part in parts] if total < 1.0 else parts, lows)


def _claim(resident: Resident) -> Claim:
    demand = demand_of(resident.profile.util_p95, resident.min_compute, INITIAL_HEADROOM)
    return Claim(resident.min_compute, demand, resident.weight)


def _minima(claims: Sequence[Claim], floor: float) -> list[float]:
    promised = math.fsum(claim.minimum for claim in claims)
    if promised > 1.0:  # more was promised than there is (a resident outlived a change of rules): all give alike
        return [claim.minimum / promised for claim in claims]
    without = sum(claim.minimum < floor for claim in claims)
    lift = min(floor, (1.0 - promised) / without) if without else 0.0
    return [max(claim.minimum, lift) if claim.minimum < floor else claim.minimum for claim in claims]


def _fill(lows: Sequence[float], highs: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return ``clamp(level * weight, low, high)`` with the level at which the parts add up to min(1, sum of highs)."""

    def at(level: float) -> list[float]:
        return [min(high, max(low, level * weight)) for low, high, weight in zip(lows, highs, weights, strict=True)]

    if math.fsum(highs) <= 1.0:
        return list(highs)
    # The sum is piecewise linear in the level, with kinks where a part leaves its low or reaches its high.
    below = 0.0
    for kink in sorted({bound / w for bounds in (lows, highs) for bound, w in zip(bounds, weights, strict=True)}):
        if math.fsum(at(kink)) >= 1.0:
            lower, upper = math.fsum(at(below)), math.fsum(at(kink))
            return at(kink if upper <= lower else below + (kink - below) * (1.0 - lower) / (upper - lower))
        below = kink
    return at(below)


def _on_grid(parts: Sequence[float], lows: Sequence[float]) -> list[float]:
    """Round to whole units that add up to exactly 1: down first, then the lost units to the largest remainders."""
    units = [max(1, to_units(part), to_units(low)) for part, low in zip(parts, lows, strict=True)]
    order = sorted(range(len(parts)), key=lambda i: (units[i] - parts[i] * UNITS, i))
    spare = UNITS - sum(units)
    for i in order[:spare] if spare > 0 else ():
        units[i] += 1
    while sum(units) > UNITS:  # the single unit everybody gets at least made it too many
        units[max(range(len(units)), key=lambda i: (units[i], -i))] -= 1
    return [unit / UNITS for unit in units]
