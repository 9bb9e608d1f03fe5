"""Usage-based resizing of the shares of one GPU, once a second. Pure: its memory goes in and comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cotenant.configs.settings import ResizeSettings
from cotenant.forecasting.types import Reading
from cotenant.placement.types import GpuView, Share


@dataclass(frozen=True, slots=True)
class UsageSignal:
    """What is known about one resident's demand on this GPU now.

    Attributes:
        util_p95: Forecast 95th percentile of its demand in 5 s, fraction in [0, 1].
        util_mean: Measured mean of the last window.
        throttled_fraction: Fraction of the last window it was held back by its own share.
        memory_p99_bytes: Forecast 99th percentile of its memory.
        memory_peak_bytes: Largest memory measured so far.
        measured: False while nothing was measured yet; its share is then left alone unless others need it.
    """

    util_p95: float
    util_mean: Reading
    throttled_fraction: Reading
    memory_p99_bytes: Reading
    memory_peak_bytes: Reading
    measured: bool = True


@dataclass(frozen=True, slots=True)
class ResizeMemory:
    """What resizing must remember between ticks of one GPU: since when a job needs less than it holds (seconds)."""

    compute_low_since: Mapping[str, float] = field(default_factory=dict)
    memory_low_since: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resized:
    """The result of one tick: only shares that change, by job id, each with its reason, and the new memory."""

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
    return Resized({}, {}, memory)
