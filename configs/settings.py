"""Typed settings. Values come from ``default.yaml``, a user's YAML file and ``COTENANT_*`` environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

Fraction = Annotated[float, Field(gt=0.0, le=1.0, strict=True)]
Seconds = Annotated[float, Field(gt=0.0, strict=True)]
Weight = Annotated[float, Field(ge=0.0, le=100.0, strict=True)]
Speed = Annotated[float, Field(ge=1e-6, le=1e6, strict=True)]  # relative: they are divided by each other
GpuType = Annotated[str, Field(pattern=r"^.{1,128}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PlacementSettings(_Section):
    """How jobs are packed."""

    policy: Literal["cotenant", "exclusive", "static"] = "cotenant"
    packing_bias: Annotated[float, Field(ge=0.0, le=1.0, strict=True)] = 0.5
    default_max_slowdown: Annotated[float, Field(ge=1.0, strict=True)] = 1.5
    max_jobs_per_gpu: Annotated[int, Field(ge=1, le=48, strict=True)] = 4
    static_slots: Annotated[int, Field(ge=1, le=16, strict=True)] = 2
    profile_s: Seconds = 5.0
    memory_margin: Annotated[float, Field(ge=0.0, le=1.0, strict=True)] = 0.10
    confidence: Annotated[float, Field(ge=0.5, le=0.95, strict=True)] = 0.7
    speeds: Mapping[GpuType, Speed] = {}


class ResizeSettings(_Section):
    """Usage-based resizing of shares."""

    enabled: StrictBool = True
    headroom: Annotated[float, Field(ge=0.0, le=1.0, strict=True)] = 0.05
    min_change: Fraction = 0.02
    patience_s: Seconds = 5.0
    min_compute: Fraction = 0.05
    throttled_threshold: Fraction = 0.02


class AccountSettings(_Section):
    """What one queue or one tenant may have. ``None`` = no limit; ``most_jobs`` 0 = nothing new starts."""

    weight: Annotated[float, Field(gt=0.0, le=1e6, strict=True)] = 1.0
    most_gpus: Annotated[float, Field(gt=0.0, strict=True)] | None = None
    most_jobs: Annotated[int, Field(ge=0, strict=True)] | None = None


class SchedulingSettings(_Section):
    """What is aimed at, who comes first, and who may have how much."""

    aim: Literal["completion", "makespan"] = "completion"
    queues: Mapping[Name, AccountSettings] = {}
    tenants: Mapping[Name, AccountSettings] = {}
    other_queues: AccountSettings = AccountSettings()
    other_tenants: AccountSettings = AccountSettings()
    usage_half_life_s: Seconds = 86400.0
    fair_share_weight: Weight = 1.0
    urgency_weight: Weight = 0.5
    criticality_weight: Weight = 0.25
    size_weight: Weight = 0.2


class RebalanceSettings(_Section):
    """Suspending and moving jobs that can continue from their own checkpoint."""

    enabled: StrictBool = True
    move_cost_s: Annotated[float, Field(ge=0.0, strict=True)] = 60.0
    priority_factor: Annotated[float, Field(ge=1.0, strict=True)] = 1.5


class CheckpointSettings(_Section):
    """Where jobs save their state. ``directory`` None = below the host's run directory."""

    directory: str | None = None
    grace_s: Annotated[float, Field(ge=0.0, strict=True)] = 30.0


class ScalingSettings(_Section):
    """Size of the cluster, where Ray's autoscaler may change it. ``most_gpus`` None = as large as Ray allows."""

    enabled: StrictBool = False
    least_gpus: Annotated[int, Field(ge=0, strict=True)] = 0
    most_gpus: Annotated[int, Field(ge=1, strict=True)] | None = None
    wait_s: Annotated[float, Field(ge=0.0, strict=True)] = 30.0
    idle_s: Annotated[float, Field(ge=0.0, strict=True)] = 600.0


class LeaseSettings(_Section):
    """Time-outs that decide when somebody counts as gone."""

    ttl_s: Seconds = 10.0
    client_ttl_s: Seconds = 10.0
    start_timeout_s: Seconds = 60.0
    stop_grace_s: Annotated[float, Field(ge=0.0, strict=True)] = 5.0
    max_restarts: Annotated[int, Field(ge=0, strict=True)] = 3


class ProfilerSettings(_Section):
    """The device loop."""

    sample_hz: Annotated[float, Field(gt=0.0, le=100.0, strict=True)] = 10.0
    window_s: Seconds = 1.0
    operator_mix: StrictBool = False


class SignatureSettings(_Section):
    """The history of measured windows. ``path`` None = ``signatures`` in the state directory."""

    enabled: StrictBool = True
    path: str | None = None
    keep_days: Annotated[float, Field(gt=0.0, strict=True)] = 7.0
    keep_bytes: Annotated[int, Field(ge=1, strict=True)] = 512 * 1024**2
    write_every_s: Seconds = 60.0


class PredictionSettings(_Section):
    """What predicts. ``models`` None = the registry is ``models`` in the state directory."""

    demand: Literal["mixture", "ewquantile"] = "mixture"
    interference: Literal["learned", "rule"] = "learned"
    cold_start: StrictBool = True
    models: str | None = None
    retrain: StrictBool = True
    retrain_every_s: Annotated[float, Field(ge=1.0, strict=True)] = 3600.0


class DeviceSettings(_Section):
    """Which device backend, and what its GPUs are. ``None`` = found out on the host."""

    backend: Literal["auto", "nvml", "cpu", "replay"] = "auto"
    count: Annotated[int, Field(ge=1, strict=True)] | None = None
    cores_per_gpu: Annotated[int, Field(ge=1, strict=True)] = 1
    memory_bytes: Annotated[int, Field(ge=1, strict=True)] | None = None
    replay_file: str | None = None


class EnforcementSettings(_Section):
    """How shares are held on NVIDIA GPUs. ``power_limit_w`` None = the GPUs' power limits are left alone."""

    mps: Literal["auto", "off"] = "auto"
    power_limit_w: Annotated[float, Field(gt=0.0, strict=True)] | None = None


class ApiSettings(_Section):
    """The admin API."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, strict=True)] = 8266
    require_token: bool = True


class JournalSettings(_Section):
    """Where the scheduler keeps its state. ``url`` is any SQLAlchemy URL; None = SQLite in the state directory."""

    url: str | None = None
    snapshot_every: Annotated[int, Field(ge=10, strict=True)] = 1000


class Settings(_Section):
    """All settings of one cotenant cluster."""

    placement: PlacementSettings = PlacementSettings()
    resize: ResizeSettings = ResizeSettings()
    scheduling: SchedulingSettings = SchedulingSettings()
    scaling: ScalingSettings = ScalingSettings()
    rebalance: RebalanceSettings = RebalanceSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    lease: LeaseSettings = LeaseSettings()
    profiler: ProfilerSettings = ProfilerSettings()
    signatures: SignatureSettings = SignatureSettings()
    prediction: PredictionSettings = PredictionSettings()
    device: DeviceSettings = DeviceSettings()
    enforcement: EnforcementSettings = EnforcementSettings()
    api: ApiSettings = ApiSettings()
    journal: JournalSettings = JournalSettings()
