"""The things the core reasons about: hints, jobs, leases, GPUs, hosts. All frozen; a change makes a new object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import PlainSerializer

from cotenant.forecasting.types import DemandProfile
from cotenant.forecasting.versions import restorable
from cotenant.placement.types import FitError, Share
from cotenant.scheduler.core.frozen import Frozen


class JobState(StrEnum):
    """Where a job is in its life. The last three are terminal."""

    PENDING = "PENDING"
    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def terminal(self) -> bool:
        """True when the state never changes again."""
        return self in _TERMINAL


_TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})

PriorityClass = Literal["low", "normal", "high"]
Isolation = Literal["none", "soft", "hard"]
Gang = Literal["host", "cluster"]
Checkpoint = Literal["none", "own", "driver"]
RestartPolicy = Literal["never", "on_node_loss", "on_failure"]


@dataclass(frozen=True, slots=True)
class Hints:
    """What the submitter says about a job. Everything is optional; what is not said is forecast.

    Parsed and validated in one place, ``cotenant.scheduler.hints``.

    Attributes:
        gpus: Number of GPUs, all or nothing.
        gpu_memory: Device memory per GPU in bytes.
        compute: Compute to guarantee per GPU, fraction in (0, 1].
        priority: Priority class.
        deadline_s: Absolute deadline, Unix seconds.
        criticality: How bad it is when the job is late, in [0, 1].
        max_slowdown: Largest individual slowdown the job accepts (>= 1; 1.2 = 20 % slower than alone).
        isolation: "none" and "soft" may share; "hard" never shares a GPU.
        gang: Where the GPUs of one job may lie: all on one "host" or anywhere in the "cluster".
        expected_duration_s: Expected run time alone, seconds.
        framework: For example "torch".
        batch_size: Samples per step.
        queue: Queue name.
        tenant: Tenant name.
        restart: When the job is queued again by itself.
        model: Architecture, for example "resnet50".
        model_family: What it belongs to, for example "image_classification".
        parameters: Weights of the model.
        group: What the job is one of, for example the replicas of a service.
        anti_affinity: Labels of jobs it shares no GPU with, sorted, with commas between: "group:web,tenant:ml".
        operator_mix: Whether to profile the operators of a few steps; None = as the setting says.
        checkpoint: "own" = the job saves its state on SIGTERM and continues from it when it is started again: then it
            loses nothing when it is suspended or moved. "driver" = the CUDA driver may freeze its processes with their
            device memory in the host's, and let them go on there later.
        grace_s: Time it gets for that before SIGKILL; None = as the settings say.
        cpus: Processor cores of its host that the job takes for each of its GPUs; None = they are not counted.
    """

    gpus: int = 1
    gpu_memory: int | None = None
    compute: float | None = None
    priority: PriorityClass = "normal"
    deadline_s: float | None = None
    criticality: float | None = None
    max_slowdown: float | None = None
    isolation: Isolation = "soft"
    gang: Gang = "host"
    expected_duration_s: float | None = None
    framework: str | None = None
    batch_size: int | None = None
    queue: str = "default"
    tenant: str = "default"
    restart: RestartPolicy = "on_node_loss"
    model: str | None = None
    model_family: str | None = None
    parameters: int | None = None
    operator_mix: bool | None = None
    group: str | None = None
    anti_affinity: str | None = None
    checkpoint: Checkpoint = "none"
    grace_s: float | None = None
    cpus: float | None = None


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What was submitted; never changes.

    Attributes:
        job_id: Unique id, chosen by the client (its idempotency key) or made by it.
        name: For people.
        kind: "command" (a host agent launches ``command``) or "lease" (a Ray program brings its own processes).
        command: Argument vector; empty for leases.
        cwd: Working directory on the submitting host.
        env: Environment of the command.
        hints: The hints.
        fingerprint: Key under which runs of the same program share their history.
        submitted_at: Unix seconds.
        attached: A client must keep renewing the job; it is cancelled when the client is gone.
        submit_host: Ray node id of the submitting process; None when outside the cluster.
        runtime_env: Ray runtime environment as JSON, used when the job runs on another host; None = none.
        pinned_host: The only host the job may run on (a lease taken inside a running process); None = any.
    """

    job_id: str
    name: str
    kind: Literal["command", "lease"]
    command: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    hints: Hints
    fingerprint: str
    submitted_at: float
    attached: bool = False
    submit_host: str | None = None
    runtime_env: str | None = None
    pinned_host: str | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """A job's set of shares, the only thing that entitles a process to a GPU.

    ``epoch`` grows with every grant to the job and is the fencing token; ``revision`` grows with every resize.
    ``gpu_type``: of the first of its GPUs, which may be gone before the job is.
    """

    job_id: str
    epoch: int
    revision: int
    shares: tuple[Share, ...]
    granted_at: float
    gpu_type: str = ""


@dataclass(frozen=True, slots=True)
class StateChange:
    """One line of a job's history."""

    at: float
    state: JobState
    reason: str


InterruptionKind = Literal["asked", "unshare", "trade", "apart", "priority", "shorter", "memory", "yield"]


@dataclass(frozen=True, slots=True)
class Interruption:
    """Why a job that did nothing wrong was taken from its GPUs.

    Attributes:
        kind: "asked" (somebody asked for it), "unshare" (GPUs were free, and it runs faster alone), "trade" (it and
            others changed places on GPUs of several types), "apart" (a job on its GPU was slowed down more than it
            accepts), "priority" (a more important job has its place), "shorter" (one that is expected to have much less
            to do has it), "memory" (a job on its GPU needs more memory), "yield" (others get its GPUs, so that all get
            on best).
        at: When, Unix seconds.
        for_job: The job it makes room for.
        gain_s: Time that all jobs concerned are expected to save together, seconds, without the cost.
        cost_s: What it costs, seconds.
        value: What counted for it: its priority value, or the throughput n in the pair that was dissolved.
        against: What that was held against: the other job's value, or the least n accepted; for "memory", the bytes
            that the other job is forecast to need, None = it needed them already.
        starts_over: It goes where its checkpoint cannot be read, or its processes cannot be brought.
        lost: Why its processes are gone although they were to be frozen, or were; empty when they are not.
    """

    kind: InterruptionKind
    at: float
    for_job: str | None = None
    gain_s: float | None = None
    cost_s: float | None = None
    value: float | None = None
    against: float | None = None
    starts_over: bool = False
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """What becomes of a job once all its hosts have let go of it.

    Attributes:
        state: QUEUED (try again), SUSPENDED, SUCCEEDED, FAILED or CANCELLED.
        reason: Why, for people.
        exit_code: The exit code to report; None = what the job's processes returned.
        backoff: Wait before the next try, longer after every failure (only with QUEUED).
        interruption: The job did nothing wrong: it does not count as a restart.
        wait_s: The host let its start down: it waits so long for the next, which does not count as a restart either.
        host_fault: A fault of its host ended its run: the next one does not count as a restart, but as such a fault.
    """

    state: JobState
    reason: str
    exit_code: int | None = None
    backoff: bool = False
    interruption: Interruption | None = None
    wait_s: float | None = None
    host_fault: bool = False


@dataclass(frozen=True, slots=True)
class Colocation:
    """A stretch of time a job spent on one GPU with the same neighbours and the same prediction.

    Attributes:
        start: Unix seconds.
        gpu_id: The GPU.
        neighbours: Ids of the other jobs on it, in order of submission.
        predicted: Predicted normalised throughput n of this job, in (0, 1].
        end: Unix seconds; None = still so.
    """

    start: float
    gpu_id: str
    neighbours: tuple[str, ...]
    predicted: float
    end: float | None = None


@dataclass(frozen=True, slots=True)
class Outgrown:
    """What a program was found to need, per GPU, once a run of it had too little memory (see ``outgrown``).

    Attributes:
        job_id: That run.
        had_bytes: Its share.
        memory_bytes: What it was tried with then.
        hint_bytes: Its memory hint.
    """

    job_id: str
    had_bytes: int
    memory_bytes: int
    hint_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is, in seconds' worth of running alone on its fastest GPU type.

    Attributes:
        done_s: Done until ``at``.
        at: Unix seconds.
        speed: Since then, relative to running alone on the GPUs it has.
        alone: How fast it is alone on these against its fastest type, in (0, 1].
    """

    done_s: float
    at: float
    speed: float
    alone: float = 1.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """GPUs that take nobody new until a job that waited long has them.

    Attributes:
        job_id: The job.
        gpu_ids: The GPUs.
        starts_by: When they are expected to be free, as promised to the job, Unix seconds; None = nobody knows. Others
            may use them before only if they are expected to be gone by then.
    """

    job_id: str
    gpu_ids: tuple[str, ...]
    starts_by: float | None = None


Resource = Literal["memory", "compute", "power"]
AllocationAction = Literal["request", "release", "limit"]
AnswerStatus = Literal["granted", "partly", "refused"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Amounts of one GPU; None = not said.

    Attributes:
        memory_bytes: Device memory.
        compute: Fraction of the GPU.
    """

    memory_bytes: int | None = None
    compute: float | None = None


UNBOUND = Bounds()


@dataclass(frozen=True, slots=True)
class ResourceAnswer:
    """What a job asked of its own lease, and what came of it.

    Attributes:
        request_id: Given by whoever asked: the same one is answered once.
        action: What it asked.
        resource: Of what.
        amount: How much, per GPU: bytes or a fraction; a limit of None takes the limit away.
        status: Whether it got that.
        granted: How much it got or gave back, or the limit.
        reason: Why, for people.
        at: Unix seconds.
    """

    request_id: str
    action: AllocationAction
    resource: Resource
    amount: float | None
    status: AnswerStatus
    granted: float
    reason: str
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What a job, or somebody for it, asks of its lease.

    Attributes:
        action: "request", "release" or "limit".
        resource_type: "memory", "compute" or "power".
        amount: As users write it; None only for a limit: none.
        request_id: The same one twice is one request.
        epoch: Epoch of its lease; None = the present one.
    """

    action: object
    resource_type: object
    amount: object
    request_id: str
    epoch: int | None = None


# Sets have no order of their own: written sorted, so that equal states are equal byte by byte.
HostIds = Annotated[frozenset[str], PlainSerializer(sorted, return_type=list[str])]


@dataclass(frozen=True, slots=True)
class Job:
    """A job and what the core knows about it now."""

    spec: JobSpec
    state: JobState
    queued_at: float
    lease: Lease | None = None
    epoch: int = 0
    restarts: int = 0
    let_down: int = 0  # how many of its starts have failed in a row because of what serves a host's GPUs
    host_faults: int = 0  # how many of its runs a fault of their host has ended
    started_hosts: HostIds = frozenset()
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    reason: str = ""
    history: tuple[StateChange, ...] = ()
    fit_errors: tuple[FitError, ...] = ()  # why no device could ever take it, one of each kind
    profile: DemandProfile | None = None
    predicted: float | None = None  # predicted normalised throughput n with the present neighbours
    memory_hint_corrected: int | None = None  # learnt from an overrun, its own or its program's: replaces the hint
    awaits_memory: bool = False  # until it has that: some leave its GPU, and what becomes free there is for it first
    memory_used_bytes: int | None = None  # the most it was measured at, while others of its program had too little
    not_placeable: bool = False  # ended because no device could ever take it
    seq: int = 0  # order of submission
    hosts: tuple[str, ...] = ()  # hosts of the present lease
    past_hosts: tuple[str, ...] = ()  # the first host of each epoch before the present one, oldest first, bounded
    exited_hosts: HostIds = frozenset()  # hosts of the present lease that have let go of the job
    ending: Ending | None = None  # while STOPPING: what happens afterwards
    given_back: bool = False  # a lease that is STOPPING: its program has saved, and uses it no more
    not_before: float = 0.0  # Unix seconds: the queue leaves the job alone until then
    overruns: int = 0  # how often it was stopped for using more memory than its share
    colocation_log: tuple[Colocation, ...] = ()  # who it ran with and what was predicted, oldest first, bounded
    urgency: float = 0.0  # of its deadline, as its share weighs now; 0 while it holds no GPU
    at_risk: bool = False  # it may miss its deadline, and its neighbours yield
    done_s: float = 0.0  # done and saved by its earlier runs, in seconds' worth of running alone
    interruptions: int = 0  # how often it was suspended or moved
    interruption: Interruption | None = None  # the last one
    anchor: str | None = None  # the host on which its checkpoint is, when other hosts cannot read it
    wanted: Bounds = UNBOUND  # what it asked for itself: memory to reserve, compute to guarantee, per GPU
    limits: Bounds = UNBOUND  # what it has limited itself to, per GPU
    ceiling: Bounds = UNBOUND  # what its running processes cannot exceed, whatever its share
    freezes: bool = False  # the driver can freeze it on the GPUs it has
    freezing: bool = False  # while STOPPING: its processes are to be frozen, not ended
    frozen: Frozen | None = None  # they are, and wait, or are about to go on
    unfreezable: str = ""  # why freezing it, or letting it go on, has failed: it is not tried again
    freezes_cut: int = 0  # how often freezing it was cut short by what has nothing to do with it
    granted_revision: int = 0  # of its lease when it was last granted: what a host says of an older one is over
    answers: tuple[ResourceAnswer, ...] = ()  # to what it asked lately, oldest first

    @property
    def guarantee(self) -> float | None:
        """The compute per GPU that it keeps whatever others want; None = nothing is promised."""
        asked = self.spec.hints.compute if self.wanted.compute is None else self.wanted.compute
        return asked if asked is None or self.limits.compute is None else min(asked, self.limits.compute)

    def asks_like(self, other: Job) -> bool:
        """Whether this job's own requests, limits and ceiling are those of the other."""
        return (self.wanted, self.limits, self.ceiling) == (other.wanted, other.limits, other.ceiling)

    @property
    def was_held(self) -> bool:
        """True for a lease that its Ray program has been granted: nobody would use it if it were granted once more."""
        return self.spec.kind == "lease" and bool(self.hosts) and self.started_hosts.issuperset(self.hosts)

    @property
    def stays(self) -> bool:
        """True for a lease whose program has not promised to save: nobody takes it from its GPUs to go on elsewhere."""
        return self.spec.kind == "lease" and not self.saves

    @property
    def owed(self) -> bool:
        """True while its program has GPUs that it gives back itself once it has saved."""
        return self.was_held and self.saves and not self.given_back

    @property
    def only_host(self) -> str | None:
        """The only host it may run on; None = any."""
        return self.spec.pinned_host or (self.frozen.host_id if self.frozen else self.anchor)

    @property
    def saves(self) -> bool:
        """True when it loses nothing by being interrupted: it continues from its own checkpoint, or is frozen."""
        return self.spec.hints.checkpoint == "own" or self.freezes or self.frozen is not None


@restorable
@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its host's agent announced it.

    Attributes:
        gpu_id: Unique in the cluster.
        host_id: Its host.
        gpu_type: Model name.
        index: Position on the host.
        memory_bytes: What jobs may use.
        healthy: Jobs may be placed on it.
        fault: Why nothing can run on it: its jobs are taken off it. Empty when it works.
        island: Group of its host's GPUs that are linked to each other faster than to others; "" = none, or not known.
        checkpoints: The driver can freeze processes on it (``JobFrozen``): never on MIG instances, nor under MPS.
    """

    gpu_id: str
    host_id: str
    gpu_type: str
    index: int
    memory_bytes: int
    healthy: bool = True
    fault: str = ""
    island: str = ""
    checkpoints: bool = False


@restorable
@dataclass(frozen=True, slots=True)
class Host:
    """A Ray node with a host agent.

    Attributes:
        host_id: Ray node id.
        name: For people.
        gpus: Its GPUs.
        joined_at: Unix seconds.
        reachable: Its agent answers.
        cpus: Processor cores that jobs may have; None = not known, so they are not limited.
    """

    host_id: str
    name: str
    gpus: tuple[Gpu, ...]
    joined_at: float
    reachable: bool = True
    cpus: float | None = None
