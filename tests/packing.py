"""Builders for tests of forecasting and placement: short words for the things that vary, defaults for the rest."""

from __future__ import annotations

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.types import DemandProfile, ProfileSource, Signature
from cotenant.placement.types import GpuView, Request, Resident, Share

MIB = 1 << 20
GIB = 1 << 30
SETTINGS = PlacementSettings()


def profile(
    util: float = 0.3,
    memory: int | None = GIB,
    *,
    p95: float | None = None,
    source: ProfileSource = "history",
    observed_s: float = 60.0,
) -> DemandProfile:
    """A profile whose 95th percentile is its mean unless said otherwise."""
    return DemandProfile(util, util if p95 is None else p95, memory, observed_s=observed_s, source=source)


def resident(
    job_id: str,
    util: float = 0.3,
    *,
    gpu_id: str = "g0",
    memory: int = GIB,
    compute: float = 0.25,
    max_slowdown: float = 1.5,
    exclusive: bool = False,
    min_compute: float = 0.0,
    weight: float = 1.0,
    known: DemandProfile | None = None,
    cpus: float = 0.0,
) -> Resident:
    """A resident with a share of ``gpu_id``."""
    share = Share(gpu_id, memory, compute)
    known = profile(util, memory) if known is None else known
    return Resident(job_id, share, known, max_slowdown, exclusive, min_compute, weight, cpus=cpus)


def gpu(
    gpu_id: str = "g0",
    *residents: Resident,
    host: str = "h0",
    memory: int = 16 * GIB,
    schedulable: bool = True,
    cpus: float | None = None,
) -> GpuView:
    """A GPU with residents (their shares are moved to it)."""
    own = tuple(
        Resident(
            r.job_id,
            Share(gpu_id, r.share.memory_bytes, r.share.compute),
            r.profile,
            r.max_slowdown,
            r.exclusive,
            r.min_compute,
            r.weight,
            cpus=r.cpus,
        )
        for r in residents
    )
    return GpuView(gpu_id, host, "test-gpu", memory, own, schedulable, host_cpus=cpus)


def request(
    job_id: str = "new",
    util: float = 0.3,
    *,
    gpus: int = 1,
    memory: int | None = None,
    compute: float | None = None,
    max_slowdown: float = 1.5,
    exclusive: bool = False,
    one_host: bool = True,
    weight: float = 1.0,
    known: DemandProfile | None = None,
    cpus: float = 0.0,
) -> Request:
    """A request of a job whose profile is known from history unless said otherwise."""
    known = profile(util) if known is None else known
    return Request(job_id, gpus, memory, compute, known, max_slowdown, exclusive, one_host, weight, cpus=cpus)


def window(
    second: float = 0.0,
    util: float | None = 0.5,
    *,
    job_id: str = "job",
    gpu_id: str = "g0",
    memory: float | None = float(GIB),
    peak: float | None = None,
    rate: float | None = None,
    throttled: float | None = 0.0,
    neighbours: int = 0,
    window_s: float = 1.0,
    samples: int = 10,
) -> Signature:
    """One window of one second of a job that is alone."""
    return Signature(
        job_id=job_id,
        gpu_id=gpu_id,
        start_s=1_000_000.0 + second,
        window_s=window_s,
        samples=samples,
        util_mean=util,
        util_peak=util,
        memory_bytes=memory,
        memory_peak_bytes=memory if peak is None else peak,
        step_rate=rate,
        throttled_fraction=throttled,
        host_cores=0.0,
        neighbours=neighbours,
        compute_share=1.0,
    )
