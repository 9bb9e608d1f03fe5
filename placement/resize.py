"""Usage-based resizing of the shares of one GPU, once a second. Pure: its memory goes in and comes out.

Compute: every resident's demand is estimated (forecast plus headroom; more when its share holds it back: what it would
use if it were not), a fall of the demand is believed only after ``patience_s``, and the GPU is divided by
``shares.divide``. Because patience works on the demand and not on the share, a division is always a consistent whole:
shares never add up to more than 1. When the demands add up to more than the GPU, a job that has used less for
``LEND_AFTER_S`` lends the rest, and has it back as soon as its share holds it back.

Memory: reservations grow towards the forecast while there is room, and shrink only when somebody else could use what
lies idle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cotenant.configs.settings import ResizeSettings
from cotenant.forecasting.types import Reading
from cotenant.placement.shares import Claim, demand_of, divide, free_memory, granted_compute, round_down, to_units
from cotenant.placement.types import GpuView, Resident, Share

GROWTH = 1.25  # a job held back by its share asks for at least this much more
LEND_AFTER_S = 2.0  # what a job has not used for so long is lent: it has it back a second after it asks
MEMORY_STEP = 16 << 20  # reservations are rounded up to whole steps, so that noise does not make them move
MEMORY_SLACK = 0.05  # a reservation this much too large is left as it is


@dataclass(frozen=True, slots=True)
class UsageSignal:
    """What is known about one resident's demand on this GPU now.

    Attributes:
        util_p95: Forecast 95th percentile of its demand in 5 s, fraction in [0, 1].
        util_mean: Measured mean of the last window.
        throttled_fraction: Fraction of the last window it was held back by its own share.
        memory_p99_bytes: Forecast 99th percentile of its memory; to honour a memory hint, pass at least the hint.
        memory_peak_bytes: Largest memory measured in the last window.
        memory_p50_bytes: Forecast median of its memory.
        measured: False while nothing was measured yet; the job is then planned with its profile, its memory left alone.
    """

    util_p95: float
    util_mean: Reading
    throttled_fraction: Reading
    memory_p99_bytes: Reading
    memory_peak_bytes: Reading
    memory_p50_bytes: Reading = None
    measured: bool = True


@dataclass(frozen=True, slots=True)
class HeldDemand:
    """The compute a job is planned with.

    Attributes:
        demand: The demand planned with, fraction of the GPU.
        low_since: Since when it asked for less (seconds); None while it does not.
        low_peak: The most it asked for since then: what it is planned with once patience is over.
    """

    demand: float
    low_since: float | None = None
    low_peak: float = 0.0


@dataclass(frozen=True, slots=True)
class ResizeMemory:
    """What resizing must remember between two ticks of one GPU, by job id.

    Attributes:
        held: The compute each job is planned with.
        memory_peak: Largest memory measured so far, bytes.
        memory_low_since: Since when the job has needed less memory than it has reserved, seconds.
        used: The compute each job makes do with for now: what it does not use is lent to those that are short of it.
    """

    held: Mapping[str, HeldDemand] = field(default_factory=dict)
    memory_peak: Mapping[str, float] = field(default_factory=dict)
    memory_low_since: Mapping[str, float] = field(default_factory=dict)
    used: Mapping[str, HeldDemand] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resized:
    """The result of one tick: only shares that change, by job id, each with its reason, and the new memory.

    The shares that shrink come first: applied in this order, they never add up to more than the GPU on the way.
    """

    shares: Mapping[str, Share]
    reasons: Mapping[str, str]
    memory: ResizeMemory


def resize_gpu(
    gpu: GpuView,
    usage: Mapping[str, UsageSignal],
    memory: ResizeMemory,
    now: float,
    *,
    settings: ResizeSettings,
    memory_margin: float,
    memory_wanted: bool,
) -> Resized:
    """Return the shares this GPU's residents should hold from now on.

    Args:
        gpu: The GPU with its residents and their present shares.
        usage: Signal by job id; a resident without one counts as not measured.
        memory: What the last call returned for this GPU (``ResizeMemory()`` at first).
        now: Seconds, any origin, never going backwards.
        settings: Headroom, patience, minimum change, thresholds.
        memory_margin: Fraction added to forecast memory.
        memory_wanted: A neighbour or a waiting job could use memory that is reserved but not needed.
    """
    held = {
        resident.job_id: _hold(
            memory.held.get(resident.job_id),
            resident.share.compute,
            _demand(resident, usage.get(resident.job_id), settings),
            now,
            settings.patience_s,
        )
        for resident in gpu.residents
    }
    used = {
        resident.job_id: _hold(
            memory.used.get(resident.job_id),
            held[resident.job_id].demand,
            _use(resident, usage.get(resident.job_id), held[resident.job_id].demand, settings),
            now,
            min(settings.patience_s, LEND_AFTER_S),
        )
        for resident in gpu.residents
    }
    compute = _compute_targets(gpu, held, used, settings)
    peaks = _peaks(gpu, usage, memory.memory_peak)
    needs = {r.job_id: memory_target(r, usage.get(r.job_id), peaks.get(r.job_id), memory_margin) for r in gpu.residents}
    patience_s = settings.patience_s if memory_wanted else math.inf
    reserved, low_since = _memory_targets(gpu, needs, memory.memory_low_since, now, patience_s)
    shares: dict[str, Share] = {}
    reasons: dict[str, str] = {}
    for resident in sorted(gpu.residents, key=lambda r: compute[r.job_id] - r.share.compute):
        job_id = resident.job_id
        share = replace(resident.share, compute=compute[job_id], memory_bytes=reserved[job_id])
        if share != resident.share:
            shares[job_id] = share
            lends = share.compute < resident.share.compute and used[job_id].demand < held[job_id].demand
            reasons[job_id] = _reason(resident, share, usage.get(job_id), settings, lends=lends)
    return Resized(shares, reasons, ResizeMemory(held, peaks, low_since, used))


def _demand(resident: Resident, signal: UsageSignal | None, settings: ResizeSettings) -> float:
    """Return the compute the job asks for now, in (0, 1]."""
    if signal is None or not signal.measured or not math.isfinite(signal.util_p95):
        return demand_of(resident.profile.util_p95, resident.min_compute, settings.headroom)
    demand = demand_of(signal.util_p95, resident.min_compute, settings.headroom)
    if held_back(signal, settings):
        current = resident.share.compute
        demand = min(1.0, max(demand, current * GROWTH, current + settings.min_change, _unthrottled(current, signal)))
    return demand


def _unthrottled(current: float, signal: UsageSignal) -> float:
    """Return what a job would use that its share holds back, in (0, 1].

    Of every second it is held still for ``throttled_fraction`` and has its share in the rest; without being held it
    would go on at that rate all the time.
    """
    return current / max(current, 1.0 - (signal.throttled_fraction or 0.0))


def _use(resident: Resident, signal: UsageSignal | None, planned: float, settings: ResizeSettings) -> float:
    """Return the compute the job makes do with now, in (0, 1]: what it is planned with, or less while it uses less."""
    used = None if signal is None or not signal.measured or held_back(signal, settings) else signal.util_mean
    if used is None or not math.isfinite(used):
        return planned
    return min(planned, demand_of(used, resident.min_compute, GROWTH - 1.0))


def held_back(signal: UsageSignal, settings: ResizeSettings) -> bool:
    """Whether the job's share held it back in the last window."""
    return signal.throttled_fraction is not None and signal.throttled_fraction > settings.throttled_threshold


def _hold(before: HeldDemand | None, current: float, demand: float, now: float, patience_s: float) -> HeldDemand:
    """Believe a rise at once, a fall only once it has lasted. A job seen for the first time holds what it has."""
    if before is None:
        before = HeldDemand(current)
    if demand >= before.demand:
        return HeldDemand(demand)
    if before.low_since is None:
        return HeldDemand(before.demand, now, demand)
    peak = max(before.low_peak, demand)
    if now - before.low_since < patience_s:
        return HeldDemand(before.demand, before.low_since, peak)
    return HeldDemand(peak) if demand >= peak else HeldDemand(peak, now, demand)


def _compute_targets(
    gpu: GpuView, held: Mapping[str, HeldDemand], used: Mapping[str, HeldDemand], settings: ResizeSettings
) -> dict[str, float]:
    """Return the compute by job id: all new, or all as it is when nothing would change enough to be worth it.

    When the GPU cannot give everybody what it is planned with, those that use less lend what they do not use.
    """
    most = {r.job_id: 1.0 if r.most_compute is None else round_down(r.most_compute) for r in gpu.residents}
    wanted = {job_id: min(each.demand, most[job_id]) for job_id, each in held.items()}
    if math.fsum(wanted.values()) > 1.0:
        wanted = {job_id: min(demand, used[job_id].demand) for job_id, demand in wanted.items()}
    claims = [Claim(r.min_compute, wanted[r.job_id], r.weight) for r in gpu.residents]
    current = {resident.job_id: resident.share.compute for resident in gpu.residents}
    parts = dict(zip(current, divide(claims, settings.min_compute), strict=True))
    targets = {job_id: min(part, most[job_id]) for job_id, part in parts.items()}
    worth_it = any(abs(targets[job_id] - current[job_id]) >= settings.min_change - 1e-9 for job_id in current)
    wrong = (
        granted_compute(gpu) > 1.0
        or (len(current) == 1 and targets != current)
        or any(to_units(r.share.compute) < to_units(r.min_compute) for r in gpu.residents)
        or any(r.share.compute > most[r.job_id] for r in gpu.residents)
    )
    return targets if worth_it or wrong else current


def _memory_targets(
    gpu: GpuView, needs: Mapping[str, int | None], low_since: Mapping[str, float], now: float, patience_s: float
) -> tuple[dict[str, int], dict[str, float]]:
    """Return the reservation by job id, and since when a reservation has been too large."""
    reserved = {resident.job_id: resident.share.memory_bytes for resident in gpu.residents}
    room = free_memory(gpu)
    low: dict[str, float] = {}
    growing: list[tuple[str, int]] = []
    for job_id, current in reserved.items():
        need = needs[job_id]
        if need is None:
            continue
        if need > current:
            growing.append((job_id, need))
        elif need <= current * (1.0 - MEMORY_SLACK):
            low[job_id] = low_since.get(job_id, now)
            if now - low[job_id] >= patience_s:
                reserved[job_id] = need
                room += current - need
    for job_id, need in growing:
        more = min(need - reserved[job_id], room)
        reserved[job_id] += more
        room -= more
    return reserved, low


def _peaks(gpu: GpuView, usage: Mapping[str, UsageSignal], before: Mapping[str, float]) -> dict[str, float]:
    """Return the largest memory measured so far of every resident that was ever measured here."""
    peaks: dict[str, float] = {}
    for resident in gpu.residents:
        signal = usage.get(resident.job_id)
        measured = signal.memory_peak_bytes if signal is not None and signal.measured else None
        seen = [peak for peak in (before.get(resident.job_id), measured) if peak is not None and math.isfinite(peak)]
        if seen:
            peaks[resident.job_id] = max(seen)
    return peaks


def memory_target(resident: Resident, signal: UsageSignal | None, peak: float | None, margin: float) -> int | None:
    """Return the bytes that a job's reservation is to be, if there is room; None while nothing was measured.

    Args:
        resident: The job on its GPU.
        signal: What is known of its demand.
        peak: Largest memory measured so far, bytes.
        margin: Fraction added.
    """
    if signal is None or not signal.measured or peak is None:
        return None
    need = max(peak, signal.memory_p99_bytes or 0.0) * (1.0 + margin)
    if not math.isfinite(need):
        return None
    wanted = max(math.ceil(need / MEMORY_STEP) * MEMORY_STEP, resident.least_memory)
    return wanted if resident.most_memory is None else min(wanted, resident.most_memory)


def _reason(
    resident: Resident, share: Share, signal: UsageSignal | None, settings: ResizeSettings, *, lends: bool
) -> str:
    parts: list[str] = []
    before, after = resident.share, share
    if after.compute != before.compute:
        if after.compute > before.compute and signal is not None and held_back(signal, settings):
            why = f"held back {signal.throttled_fraction:.0%} of the time"
        elif lends:
            why = "lends what it does not use"
        elif signal is not None and signal.measured:
            why = f"forecast p95 of its demand {signal.util_p95:.2f}"
        else:
            why = "not measured yet"
        parts.append(f"compute {before.compute:.2f} -> {after.compute:.2f}: {why}")
    if after.memory_bytes != before.memory_bytes:
        verb = "forecast to need more" if after.memory_bytes > before.memory_bytes else "idle memory that others want"
        parts.append(f"memory {before.memory_bytes >> 20} -> {after.memory_bytes >> 20} MiB: {verb}")
    return "; ".join(parts)
