"""What users see of the scheduler: the models the client returns, the API serves and the CLI prints."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from cotenant.configs.settings import PlacementSettings, RebalanceSettings, ResizeSettings, SchedulingSettings
from cotenant.scheduler.core.model import JobState


class View(BaseModel):
    """Base of all views: immutable, JSON in and out."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ShareView(View):
    """One share of a lease."""

    gpu_id: str
    host_id: str
    memory_bytes: int
    compute: float


class HistoryView(View):
    """One state change of a job."""

    at: float
    state: JobState
    reason: str


class UsageView(View):
    """The last measured window of a running job. None = the device does not say, or of memory: not on each of its GPUs.

    ``util_estimated``, ``memory_estimated``: the device said it of itself only, not of the job.
    """

    util_mean: float | None
    memory_bytes: float | None
    step_rate: float | None
    throttled_fraction: float | None
    measured_at: float
    controls: str = ""
    util_estimated: bool = False
    memory_estimated: bool = False


class ColocationView(View):
    """A stretch of time with the same neighbours; ``end`` None = it lasts."""

    start: float
    end: float | None
    gpu_id: str
    neighbours: list[str]
    slowdown_predicted: float


class FrozenView(View):
    """Where a job's processes are held still by the driver, off its GPUs.

    They can go on on GPUs of ``gpu_type`` of that host only. ``memory_bytes``: host memory that their device memory
    takes, 0 = not known; ``since``: Unix seconds.
    """

    host_id: str
    host: str
    gpu_type: str
    memory_bytes: int
    since: float


class JobView(View):
    """A job as its owner sees it.

    ``waits``: why it was not placed when it was last looked at; ``deadline``: whether it will make it; ``starts_over``:
    why what it has done is lost, while it is being suspended or moved. In words; empty when there is nothing to say.
    ``deadline_at_risk``: it may miss its deadline, but need not; false when it cannot make it any more.
    ``stop_by``: until when (Unix seconds) it may save; what is left of it then is killed. None = nobody has asked.
    ``frozen``: where its processes are frozen; ``unfreezable``: why that has failed, so that it is not tried again;
    ``no_freezing``: why the hint ``checkpoint: driver`` counts as none, where the job is or could be, in words.
    """

    job_id: str
    name: str
    kind: Literal["command", "lease"]
    state: JobState
    command: list[str]
    hints: dict[str, str | bool | int | float | None]
    fingerprint: str
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    exit_code: int | None
    reason: str
    restarts: int
    epoch: int
    shares: list[ShareView]
    usage: UsageView | None
    slowdown_predicted: float | None
    slowdown_measured: float | None
    solo_step_rate: float | None
    not_placeable: bool
    history: list[HistoryView]
    colocations: list[ColocationView] = []
    waits: str = ""
    deadline: str = ""
    deadline_at_risk: bool = False
    starts_over: str = ""
    stop_by: float | None = None
    frozen: FrozenView | None = None
    unfreezable: str = ""
    no_freezing: str = ""


class GpuView(View):
    """A GPU with what it carries.

    ``held_for``: the job it is reserved for, so that others may not start there. ``note``: why nothing may.
    ``island``: group of the host's GPUs that are linked by NVLink; "" = none, or not known. ``util``,
    ``memory_used_bytes``: None = the device does not say, nor does each of its jobs.
    """

    gpu_id: str
    host_id: str
    gpu_type: str
    island: str = ""
    index: int
    memory_bytes: int
    memory_reserved_bytes: int
    compute_granted: float
    util: float | None
    memory_used_bytes: float | None
    healthy: bool
    jobs: list[str]
    held_for: str = ""
    note: str = ""


class HostView(View):
    """A host with its agent. ``cpus``: processor cores, None = not known; ``cpus_reserved``: those jobs asked for.

    ``no_freezing``: why the CUDA driver can freeze no job there (``checkpoint: driver``), in words; empty = it can;
    None = not known yet.
    """

    host_id: str
    name: str
    reachable: bool
    gpus: list[str]
    joined_at: float
    last_report_at: float | None
    claim: str
    note: str
    cpus: float | None = None
    cpus_reserved: float = 0.0
    no_freezing: str | None = None


class SlowdownView(View):
    """How its neighbours are predicted to slow a job down, on the GPU where that is worst.

    ``low`` to ``high``: the 80 % interval. ``causes``: what of its throughput (1 = as fast as alone) is lost to each
    cause, negative = won; they overlap and need not add up; empty where the predictor in force cannot say.
    """

    gpu_id: str
    neighbours: list[str]
    slowdown: float
    low: float
    high: float
    reason: str
    causes: dict[str, float]


class Explanation(View):
    """Why a job is where it is, or why it waits, and what would help. ``slowdown``: None = it is on no GPU."""

    job_id: str
    state: JobState
    summary: str
    details: list[str]
    would_help: list[str]
    slowdown: SlowdownView | None = None


class PlannedJob(View):
    """What would happen to one hypothetical job."""

    name: str
    placeable: Literal["now", "later", "never"]
    shares: list[ShareView]
    slowdown_predicted: float | None
    neighbours: dict[str, float]
    explanation: str


class AffectedJob(View):
    """A job that is there already and for which something would be different.

    ``before`` and ``after``: it waits and is placed "now", "later" or "never"; or it "runs" and keeps its place, but
    if it had to be placed anew, it would get one "elsewhere", "later" or "never". ``why``: of ``after``.
    """

    job_id: str
    name: str
    before: Literal["now", "later", "never", "runs"]
    after: Literal["now", "later", "never", "elsewhere"]
    why: str


class PlanView(View):
    """What would happen; nothing was done.

    ``affected``: at most 500 waiting jobs, in order of submission, then running ones, the newest first.
    ``reconsidered``: how many of the ``running`` jobs were looked at for that; none when no setting was to be tried.
    ``displaced``: how many of these would not get their GPUs again under the present settings either.
    """

    jobs: list[PlannedJob]
    packing_saving_predicted: float | None
    affected: list[AffectedJob] = []
    reconsidered: int = 0
    displaced: int = 0
    running: int = 0


class AccountView(View):
    """What a tenant or a queue may have, holds and has used lately.

    ``most_gpus``, ``most_jobs``: limits; None = none. ``used_gpu_s``: GPU-seconds, those of a half-life ago count half.
    ``used_fraction``: its part of all that its kind used; ``entitled_fraction``: the part its weight entitles it to.
    ``fair_share``: the factor in the priority value of its jobs, in (0, 1]; 0.5 = used exactly its part.
    """

    kind: Literal["tenant", "queue"]
    name: str
    weight: float
    most_gpus: float | None
    most_jobs: int | None
    held_gpus: float
    running_jobs: int
    waiting_jobs: int
    used_gpu_s: float
    used_fraction: float
    entitled_fraction: float
    fair_share: float


class ResourceView(View):
    """What a job has of one resource on each of its GPUs: bytes of memory, fractions of compute. None = nobody says.

    ``available``: how much more a request would get now; ``guaranteed``: what it keeps when others want it.
    ``used_estimated``: the device said ``used`` of itself only, not of the job.
    """

    share: float | None
    available: float | None
    guaranteed: float | None
    used: float | None
    limit: float | None
    note: str
    used_estimated: bool = False


class ResourcesView(View):
    """What a job has and could have of each of its GPUs."""

    job_id: str
    epoch: int
    memory: ResourceView
    compute: ResourceView
    power: ResourceView


class AllocationView(View):
    """The answer to what a job, or somebody for it, asked of its lease. Amounts are per GPU.

    ``granted``: how much was granted or given back, or the limit; ``share``: what the job has now.
    """

    job_id: str
    action: Literal["request", "release", "limit"]
    resource_type: Literal["memory", "compute", "power"]
    status: Literal["granted", "partly", "refused"]
    requested: float | None
    granted: float
    share: float | None
    reason: str


class LogChunk(View):
    """A piece of the output of one run of a job.

    ``eof``: there is nothing after ``next_offset``, and nothing comes: the job has ended or, where the request named
    the run, that run is over. ``epoch``: the run, counted from 1; 0 = the job has not been started yet.
    """

    data: bytes
    next_offset: int
    eof: bool
    epoch: int

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class ComponentHealth(View):
    """One part of cotenant."""

    name: str
    ok: bool
    note: str


class Health(View):
    """Whether cotenant as a whole works."""

    ok: bool
    components: list[ComponentHealth]


class QuantilesView(View):
    """Predicted quantiles so many seconds ahead, non-decreasing from p10 to p99."""

    horizon_s: int
    p10: float
    p50: float
    p90: float
    p95: float
    p99: float


class ForecastView(View):
    """What a job is expected to demand of each of its GPUs.

    ``util``: utilisation in [0, 1] it would have if its share never held it back; ``memory``: bytes. On several GPUs
    they span all of them. Empty: it cannot be read there. ``peak_memory_bytes``: the largest memory until the job ends,
    no less than any p99; 0 where memory cannot be read.
    ``windows``: measured windows it rests on, the last of which ended at ``measured_at`` (Unix seconds).
    ``served_by``: what forecast, in words.
    ``util_estimated``, ``memory_estimated``: the device said what it rests on of itself only, not of the job.
    """

    job_id: str
    util: list[QuantilesView]
    memory: list[QuantilesView]
    peak_memory_bytes: float
    windows: int
    measured_at: float
    served_by: str
    util_estimated: bool = False
    memory_estimated: bool = False


class DemandScoreView(View):
    """How good demand forecasts of one horizon were lately. None = nothing was scored.

    Errors are of utilisations in [0, 1]. Coverage: part of the utilisations at or below the 95th percentile.
    Violations: part of the memory readings above the 99th percentile; waste: how far it was above, as a fraction.
    Peaks under: part of the forecasts of the largest memory until the end that were exceeded within the horizon; it is
    looked at after 300 s only.
    """

    horizon_s: int
    scored: int
    util_error: float | None
    util_persistence_error: float | None
    util_coverage_p95: float | None
    memory_violations: float | None
    memory_waste: float | None
    memory_peaks_under: float | None = None


class SlowdownScoreView(View):
    """How good predictions of normalised throughput were lately on one GPU type.

    ``rule_error`` is the utilisation rule's on the same measurements. Bias above 0: slower than predicted. Coverage:
    part of the measurements inside the predicted 80 % interval.
    """

    gpu_type: str
    scored: int
    error: float
    rule_error: float
    bias: float
    coverage: float


class TrainingView(View):
    """How a training in the background ended."""

    kind: str
    at: float
    version: str | None
    adopted: bool
    reason: str
    candidate: dict[str, float]
    active: dict[str, float]


class ServingView(View):
    """Which models serve in the scheduler, by kind, and what is wrong with them."""

    serving: dict[str, str]
    warnings: list[str]
    evidence: int


class PredictionsView(View):
    """What predicts, how good it was lately, and what is being learnt.

    ``evidence``: measured (job, set) combinations of this cluster that predictions rest on.
    """

    serving: dict[str, str]
    warnings: list[str]
    evidence: int
    demand: list[DemandScoreView]
    slowdowns: list[SlowdownScoreView]
    drift: list[str]
    training: str
    trainings: list[TrainingView]


class TuningView(View):
    """The settings an administrator may change while everything runs."""

    placement: PlacementSettings
    resize: ResizeSettings
    scheduling: SchedulingSettings
    rebalance: RebalanceSettings
