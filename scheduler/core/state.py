"""Everything the core knows, with the indices that keep it fast, as one object that round-trips through JSON.

Only :class:`~cotenant.scheduler.core.engine.Core` changes a state, and only through the methods here, so that the
indices cannot drift from the records. Everything that decides anything is read in an order that the records
determine (submission order, order of announcement), never in the order in which an index happened to grow: a state
read back from JSON decides as the original would have.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import is_not, itemgetter

from cotenant.configs.settings import Settings
from cotenant.forecasting.interference.evidence import EvidenceBook
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.types import DemandProfile
from cotenant.placement.fleet import Fleet, Floats
from cotenant.placement.mix import Mix
from cotenant.placement.resize import ResizeMemory, UsageSignal
from cotenant.placement.room import kind_of
from cotenant.placement.statement import resident_of
from cotenant.placement.types import FitError, GpuView, Request, Share
from cotenant.scheduler.core.accounts import Accounts
from cotenant.scheduler.core.dated import Dated
from cotenant.scheduler.core.deadlines import ends, expected_end
from cotenant.scheduler.core.floor import Floor, mixed_places, view_of
from cotenant.scheduler.core.gone import remember
from cotenant.scheduler.core.line import Line
from cotenant.scheduler.core.model import Gpu, Hints, Host, Job, JobSpec, JobState, Outgrown, Progress, Reservation
from cotenant.scheduler.core.models import Models
from cotenant.scheduler.core.moves import Moves
from cotenant.scheduler.core.priority import Standing
from cotenant.scheduler.core.quotas import is_limited
from cotenant.scheduler.core.record import SCHEMA_VERSION, Record, read, write
from cotenant.scheduler.core.records import replace
from cotenant.scheduler.core.requests import Expectations, Key, ask_of, keep_longest, max_slowdown, request_of
from cotenant.scheduler.core.sanity import sound, sound_host
from cotenant.scheduler.core.savers import Savers
from cotenant.scheduler.core.snapshot import Usage
from cotenant.scheduler.core.transitions import goes_back, standing_of

KEPT_ENDED_JOBS = 10_000
KEPT_FINGERPRINTS = 10_000
_WRITTEN_AS_IT_IS = (
    "configured", "settings", "now", "cycle", "next_seq", "profiles", "typed_profiles", "usage", "resize_memory",
    "reported_at", "ignored", "overlooked", "model_versions", "evidence_at", "progress", "reservation",
    "deadlines_seen_at", "moves", "outgrown", "gone",
)  # fmt: skip


class InvariantViolation(Exception):
    """The state breaks a promise of the architecture: a bug. The message tells what led to it."""


@dataclass(slots=True, eq=False)
class State:
    """The records of the core.

    Attributes:
        settings: In force now.
        configured: As the scheduler was started with, before any change by an administrator.
        now: Time of the last batch of events; never goes backwards.
        cycle: Number of scheduling cycles so far.
        next_seq: Number of the next submission.
        jobs: All jobs by id, in order of submission; at most ``KEPT_ENDED_JOBS`` of them have ended.
        hosts: Known hosts by id.
        gone: Hosts that have left, by id.
        gpus: Their GPUs by id.
        profiles: What is known of each fingerprint.
        typed_profiles: The same by GPU type, of programs that ran while the cluster had several.
        outgrown: By program (``outgrown.program_of``), the memory that is needed where a run had too little.
        usage: Last measurement by job id and GPU id.
        resize_memory: What resizing remembers, by GPU id.
        reported_at: When each host last reported measurements.
        ignored: How many events were ignored, by reason.
        overlooked: For how many cycles in a row a waiting job was not given an idle GPU it fits (see invariants).
        model_versions: Version of each kind of model that is to predict.
        evidence: How fast jobs were that shared a GPU here, as predictions take it into account.
        gathered: What was measured of that since, and whether it is complete.
        evidence_at: When it was last taken into account, Unix seconds.
        accounts: What tenants and queues hold and have used.
        progress: How far the running jobs are that say how long they run.
        reservation: GPUs held for a job that waited long.
        deadlines_seen_at: When the deadlines of running jobs were last looked at.
        moves: What is under way, and what must be remembered, of moving and suspending jobs.
        mix: What jobs typically ask for, learnt once jobs say what processors they need.
        line: The waiting jobs, with what they were told.
        floor: The GPUs as placement sees them.
        models: The models themselves; not written down, they follow from the versions.
    """

    settings: Settings
    configured: Settings
    now: float = 0.0
    cycle: int = 0
    next_seq: int = 0
    jobs: dict[str, Job] = field(default_factory=dict)
    hosts: dict[str, Host] = field(default_factory=dict)
    gone: dict[str, Host] = field(default_factory=dict)
    gpus: dict[str, Gpu] = field(default_factory=dict)
    profiles: dict[str, DemandProfile] = field(default_factory=dict)
    typed_profiles: dict[str, dict[str, DemandProfile]] = field(default_factory=dict)
    outgrown: dict[str, Outgrown] = field(default_factory=dict)
    usage: dict[str, dict[str, Usage]] = field(default_factory=dict)
    resize_memory: dict[str, ResizeMemory] = field(default_factory=dict)
    reported_at: dict[str, float] = field(default_factory=dict)
    ignored: dict[str, int] = field(default_factory=dict)
    overlooked: dict[str, int] = field(default_factory=dict)
    model_versions: dict[str, str] = field(default_factory=dict)
    evidence: EvidenceBook = field(default_factory=EvidenceBook)
    gathered: list[tuple[Observation, bool]] = field(default_factory=list)
    evidence_at: float = -math.inf
    accounts: Accounts = field(default_factory=Accounts)
    progress: dict[str, Progress] = field(default_factory=dict)
    reservation: Reservation | None = None
    deadlines_seen_at: float = 0.0
    moves: Moves = field(default_factory=Moves)
    mix: Mix = field(default_factory=Mix)
    models: Models = field(default_factory=Models)
    queued: set[str] = field(default_factory=set)
    pending: set[str] = field(default_factory=set)
    suspended: set[str] = field(default_factory=set)
    savers: Savers = field(default_factory=Savers)
    leased: set[str] = field(default_factory=set)
    delayed: set[str] = field(default_factory=set)
    dated: Dated = field(default_factory=Dated)
    starting: set[str] = field(default_factory=set)
    freezing: set[str] = field(default_factory=set)
    frozen: set[str] = field(default_factory=set)
    on_gpu: dict[str, set[str]] = field(default_factory=dict)
    with_host: dict[str, set[str]] = field(default_factory=dict)
    line: Line = field(default_factory=Line)
    floor: Floor = field(default_factory=Floor)
    _ended: list[tuple[float, int, str]] = field(default_factory=list)
    _requests: dict[str, tuple[tuple[object, ...], Request]] = field(default_factory=dict)  # with what they rest on
    _gpu_type: str | None = None  # of all GPUs; None = there are several, or none
    _gpu_types: tuple[str, ...] = ()
    _expectations: Expectations = field(default_factory=Expectations)

    # -- reading ----------------------------------------------------------------------------------------------------

    def in_order(self, job_ids: Iterable[str]) -> list[Job]:
        """Return these jobs in order of submission."""
        return sorted((self.jobs[job_id] for job_id in job_ids), key=lambda job: job.seq)

    def residents(self, gpu_id: str) -> list[Job]:
        """Return the jobs that hold a share of the GPU, in order of submission."""
        return self.in_order(self.on_gpu.get(gpu_id, ()))

    def on_host(self, host_id: str) -> list[Job]:
        """Return the leased jobs that have a part on the host which it has not let go of, in order of submission."""
        return [job for job in self.in_order(self.with_host.get(host_id, ())) if host_id not in job.exited_hosts]

    def profile_of(self, job: Job) -> DemandProfile:
        """Return the best that is known of the job.

        While it has a GPU: what it was placed with or, since then, measured at. Before: its own measurements, those of
        its fingerprint, its hints, completed by its cold-start class.
        """
        own = job.profile
        if own is not None and job.lease is not None:
            return own
        expected = self.measured_profile(job) or self._expected(job.spec.hints)
        if expected.source == "unknown" and own is not None and own.source == "unknown":
            expected = own  # at least its memory may have been measured
        return self.identified(job.spec, expected)

    def measured_profile(self, job: Job) -> DemandProfile | None:
        """Return what was measured of the job or, before it ran, of its fingerprint; None when nothing was."""
        own = job.profile
        return own if own is not None and own.source == "history" else self.profiles.get(job.spec.fingerprint)

    def identified(self, spec: JobSpec, profile: DemandProfile) -> DemandProfile:
        """Return the profile with what measured pairs of the job are found by: its fingerprint and its family."""
        hinted = spec.hints.model_family or (self._expected(spec.hints).family if spec.hints.model else "")
        family = hinted or profile.family
        if profile.fingerprint == spec.fingerprint and profile.family == family:
            return profile
        return replace(profile, fingerprint=spec.fingerprint, family=family)

    def _expected(self, hints: Hints) -> DemandProfile:
        return self._expectations.of(hints, self.models, self._gpu_type)

    def request_of(self, job: Job) -> Request:
        """Return what the job asks of placement."""
        job_id, typed = job.spec.job_id, self.typed_profiles.get(job.spec.fingerprint, {})
        measured = None if job.lease else self.profiles.get(job.spec.fingerprint)
        rests_on = job, measured, self.settings, self.models, self._gpu_types
        if not typed and job_id in self._requests and not any(map(is_not, self._requests[job_id][0], rests_on)):
            return self._requests[job_id][1]
        profile = self.profile_of(job)
        if typed and job.lease and (gpu := self.gpus.get(job.lease.shares[0].gpu_id)):
            typed = {**typed, gpu.gpu_type: profile}  # there it is as it was itself measured
        request = request_of(job, profile, self.settings, typed, self._gpu_types)
        self._requests[job_id] = (None,) if typed else rests_on, request  # what is known by type changes in place
        return request

    def key_of(self, job: Job) -> Key:
        """Return what decides whether a waiting job finds a place."""
        by_queue = is_limited(self.settings.scheduling, job.spec.hints)
        return ask_of(job, known=job.spec.fingerprint in self.profiles, by_queue=by_queue)

    def waiting_gpus(self) -> int:
        """Return the GPUs that the jobs which may be placed now ask for together."""
        later = (job for job in map(self.jobs.__getitem__, self.delayed) if job.not_before > self.now)
        return self.line.gpus_wanted() - sum(job.spec.hints.gpus for job in later)

    def standing(self) -> Standing:
        """Return what the order of the queue rests on besides the jobs."""
        factors = self.accounts.factors(self.settings.scheduling, self.now)
        return Standing(self.settings.scheduling, factors["tenant"], factors["queue"])

    def end_of(self, job_id: str) -> tuple[float, float] | None:
        """Return when a job is expected to end and when at the latest, Unix seconds; None when nobody knows."""
        job = self.jobs.get(job_id)  # None: only imagined, by a what-if
        limit = max_slowdown(job.spec.hints, self.settings) if job else 1.0
        return None if job is None else expected_end(job, self.progress.get(job_id), limit, self.now)

    def free_at(self) -> Floats:
        """Return when each GPU of the fleet is expected to be empty, Unix seconds; infinity when nobody knows."""
        return self.floor.free_at(self.fleet(), self._ends_on, self.now)

    def _ends_on(self, gpu_id: str) -> tuple[float, float, float]:
        jobs = map(self.jobs.__getitem__, self.on_gpu.get(gpu_id, ()))
        return ends((job, self.progress.get(job.spec.job_id)) for job in jobs)

    def note_progress(self, job: Job, progress: Progress) -> None:
        """Note how far a running job is."""
        self.progress[job.spec.job_id] = progress
        self.savers.follow(job, progress)
        self.dated.follow(job, progress)
        self.floor.retime(share.gpu_id for share in (job.lease.shares if job.lease else ()))

    def shares_on(self, job: Job, host_id: str) -> tuple[Share, ...]:
        """Return the job's shares that lie on the host."""
        shares = job.lease.shares if job.lease else ()
        return tuple(share for share in shares if self._host_of(share.gpu_id) == host_id)

    def view(self, gpu_id: str) -> GpuView:
        """Return the GPU with its residents, as placement sees it."""
        return self.floor.view(gpu_id, self.view_anew)

    def view_anew(self, gpu_id: str) -> GpuView:
        """Return the same, made from the records."""
        gpu = self.gpus[gpu_id]
        return view_of(
            gpu,
            self.hosts[gpu.host_id],
            tuple(
                resident_of(self.request_of(job), share, gpu.gpu_type)
                for job in self.residents(gpu.gpu_id)
                if job.lease is not None
                for share in job.lease.shares
                if share.gpu_id == gpu.gpu_id
            ),
        )

    def fleet(self) -> Fleet:
        """Return all GPUs with their residents. Who changes it takes that back."""
        fleet = self.floor.fleet(self.gpus, self.view_anew)
        fleet.demand = self.mix.demand()
        return fleet

    @property
    def refused(self) -> dict[str, tuple[FitError, ...]]:
        """Why each waiting job was refused, as of when all GPUs were last looked at for it."""
        return {job_id: ask.refusal.errors for ask in self.line.refusals() for job_id in ask.jobs if ask.refusal}

    def signals(self, gpu_id: str) -> dict[str, UsageSignal]:
        """Return what is known of the demand of each resident of the GPU that was measured there."""
        measured = ((job_id, self.usage.get(job_id, {}).get(gpu_id)) for job_id in self.on_gpu.get(gpu_id, ()))
        return {job_id: usage.signal for job_id, usage in sorted(measured, key=itemgetter(0)) if usage}

    # -- changing ---------------------------------------------------------------------------------------------------

    def put(self, job: Job) -> None:
        """Record a new or changed job and bring the indices in line.

        Raises:
            InvariantViolation: The job had ended, or its epoch goes backwards.
        """
        job_id = job.spec.job_id
        old = self.jobs.get(job_id)
        if old is not None and (old.state.terminal or job.epoch < old.epoch):
            was, becomes = f"{old.state} at epoch {old.epoch}", f"{job.state} at epoch {job.epoch}"
            raise InvariantViolation(f"job {job_id!r} is {was} and was to become {becomes}")
        if old is not None and goes_back(job, old):
            raise InvariantViolation(f"job {job_id!r} holds {job.lease}, which is not newer than it had")
        self.jobs[job_id] = job
        self._index(job, old)
        if job.state.terminal:
            self._requests.pop(job_id, None)
            heapq.heappush(self._ended, (job.ended_at or 0.0, job.seq, job_id))
            self._drop_oldest_ended()

    def note_kind(self, job: Job) -> None:
        """Take into account what a new job asks for, if jobs say what processors they need."""
        if job.spec.hints.cpus or self.mix.jobs:
            largest = max((gpu.memory_bytes for gpu in self.gpus.values()), default=0)
            self.mix.note(kind_of(self.request_of(job), largest))

    def put_host(self, host: Host) -> None:
        """Record a host and its GPUs; GPUs it no longer has are dropped. A GPU belongs to its last announcer."""
        before = self.hosts.get(host.host_id)
        self.hosts[host.host_id] = host = sound_host(host)
        new = {gpu.gpu_id: replace(sound(gpu), host_id=host.host_id) for gpu in host.gpus}
        gone = [gpu.gpu_id for gpu in self._gpus_of(before) if gpu.gpu_id not in new]
        for gpu_id in gone:
            self._drop_gpu(gpu_id)
        if gone or before is None or before.cpus != host.cpus or any(self.gpus.get(g) != gpu for g, gpu in new.items()):
            self.gpus.update(new)
            for gpu_id in new:
                self._account_residents(gpu_id)
            self._look_at_gpus()
        else:
            self.floor.touch(new)

    def set_unreachable(self, host_id: str) -> None:
        """Note that a known host does not answer."""
        host = self.hosts[host_id] = replace(self.hosts[host_id], reachable=False)
        self.floor.touch(gpu.gpu_id for gpu in self._gpus_of(host))

    def drop_host(self, host_id: str) -> None:
        """Forget a host and its GPUs."""
        host = self.hosts.pop(host_id, None)
        self.gone = self.gone if host is None else remember(self.gone, host)
        self.reported_at.pop(host_id, None)
        for gpu in self._gpus_of(host):
            self._drop_gpu(gpu.gpu_id)
        self._look_at_gpus()

    def _gpus_of(self, host: Host | None) -> list[Gpu]:
        """Return the GPUs that the host announced and that nobody else has announced since."""
        known = (self.gpus.get(gpu_id) for gpu_id in dict.fromkeys(gpu.gpu_id for gpu in (host.gpus if host else ())))
        return [gpu for gpu in known if gpu is not None and host is not None and gpu.host_id == host.host_id]

    def learn(self, fingerprint: str, profile: DemandProfile, gpu_type: str) -> None:
        """Keep what a run of this fingerprint showed on such a GPU, unless a longer observation is known."""
        news = fingerprint not in self.profiles
        changed = keep_longest(self.profiles, fingerprint, profile)
        several = len(self._gpu_types) > 1
        if several and keep_longest(self.typed_profiles.setdefault(fingerprint, {}), gpu_type, profile):
            changed = True
            self.floor.touch(mixed_places(self.in_order(self.leased), fingerprint, self.gpus))
        if news:
            self._queue_anew(self.line.of_program(fingerprint))
        elif changed:
            self.line.unsettle(self.line.asks_of(fingerprint))
        if len(self.profiles) > KEPT_FINGERPRINTS:
            oldest = next(iter(self.profiles))
            del self.profiles[oldest]
            self.typed_profiles.pop(oldest, None)
            self.floor.touch(mixed_places(self.in_order(self.leased), oldest, self.gpus))
            self._queue_anew(self.line.of_program(oldest))

    def set_settings(self, settings: Settings) -> None:
        """Put settings in force."""
        before, self.settings = self.settings, settings
        if all(getattr(before, name) == getattr(settings, name) for name in ("placement", "resize", "scheduling")):
            return
        self.floor.renew()
        self.line.unsettle()
        self._queue_anew(self.queued)

    def ignore(self, reason: str) -> None:
        """Count an event that was ignored."""
        self.ignored[reason] = self.ignored.get(reason, 0) + 1

    # -- JSON -------------------------------------------------------------------------------------------------------

    def to_json(self) -> bytes:
        """Return the state as JSON; equal states give equal bytes."""
        record = Record(
            schema_version=SCHEMA_VERSION,
            jobs=tuple(self.jobs.values()),
            hosts=tuple(self.hosts.values()),
            gpus=tuple(self.gpus.values()),
            told=tuple(self.line.told(lambda job_id: self.jobs[job_id].seq)),
            changed_gpus=tuple(sorted(self.floor.changed)),
            evidence=self.evidence.observations(),
            gathered=tuple(self.gathered),
            accounts=self.accounts.used(),
            mix=self.mix.counts(),
            **{name: getattr(self, name) for name in _WRITTEN_AS_IT_IS},
        )
        return write(record)

    @classmethod
    def from_json(cls, text: bytes) -> State:
        """Return the state that ``to_json`` wrote.

        Raises:
            ValueError: The text is not such a state (pydantic's message says where).
        """
        record = read(text)
        state = cls(
            hosts={host.host_id: host for host in record.hosts},
            gpus={gpu.gpu_id: gpu for gpu in record.gpus},
            evidence=EvidenceBook(record.evidence),
            gathered=list(record.gathered),
            mix=Mix(record.mix),
            **{name: getattr(record, name) for name in _WRITTEN_AS_IT_IS},
        )
        for job in record.jobs:
            state.put(job)
        state.accounts.restore(record.accounts)
        state._look_at_gpus()
        state.floor.changed = set(record.changed_gpus)
        for told in record.told:
            state.line.tell(told)
        return state

    # -- inside -----------------------------------------------------------------------------------------------------

    def _index(self, job: Job, old: Job | None) -> None:
        job_id = job.spec.job_id
        if old is None or standing_of(old) != standing_of(job):  # most changes of a job are of other things
            for index, belongs in (
                (self.queued, job.state is JobState.QUEUED),
                (self.pending, job.state is JobState.PENDING),
                (self.suspended, job.state is JobState.SUSPENDED),
                (self.leased, job.lease is not None),
                (self.delayed, job.state is JobState.QUEUED and job.not_before > 0.0),
                (self.starting, job.state is JobState.STARTING),
                (self.freezing, job.freezing),
                (self.frozen, job.frozen is not None),
            ):
                (index.add if belongs else index.discard)(job_id)
        if job.state is JobState.QUEUED:
            self._queue_anew((job_id,))
        elif old is None or old.state is JobState.QUEUED:
            self.overlooked.pop(job_id, None)
            self.line.remove(job_id)
        if job.lease is None:
            self.progress.pop(job_id, None)
        self.savers.follow(job, self.progress.get(job_id))
        self.dated.follow(job, self.progress.get(job_id))
        self.moves.follow(job)
        places = self._index_places(job, old)
        seen = old is not None and old.lease is job.lease and old.profile is job.profile and old.asks_like(job)
        if not seen or (old is not None and old.state is not job.state):
            self._account(job)
            self.floor.retime(places)
        if not seen or (old is not None and old.urgency != job.urgency):
            self.floor.touch(gpu_id for gpu_id in places if gpu_id in self.gpus)

    def _index_places(self, job: Job, old: Job | None) -> set[str]:
        """Bring in line who is on which GPU and host; return the GPUs the job has or had."""
        if old is not None and old.lease is job.lease and old.hosts is job.hosts:
            return {share.gpu_id for share in job.lease.shares} if job.lease else set()
        job_id, old_hosts = job.spec.job_id, old.hosts if old and old.lease else ()
        before = {share.gpu_id for share in old.lease.shares} if old and old.lease else set()
        after = {share.gpu_id for share in job.lease.shares} if job.lease else set()
        for gpu_id in before - after:
            self.on_gpu[gpu_id].discard(job_id)
        for gpu_id in after - before:
            self.on_gpu.setdefault(gpu_id, set()).add(job_id)
        for host_id in old_hosts:
            self.with_host[host_id].discard(job_id)
        for host_id in job.hosts if job.lease else ():
            self.with_host.setdefault(host_id, set()).add(job_id)
        if job.spec.hints.cpus and before - after:  # the processors it had serve jobs on the other GPUs too
            self.floor.changed.update(gpu.gpu_id for each in old_hosts for gpu in self._gpus_of(self.hosts.get(each)))
        return before | after

    def _queue_anew(self, job_ids: Iterable[str]) -> None:
        """Bring in line what these waiting jobs ask."""
        for job in [self.jobs[job_id] for job_id in job_ids]:
            self.line.put(job, self.key_of(job), max_slowdown(job.spec.hints, self.settings))

    def _account(self, job: Job) -> None:
        self.accounts.note(job, self.gpus, self.now, self.settings.scheduling.usage_half_life_s)

    def _account_residents(self, gpu_id: str) -> None:
        for job in self.residents(gpu_id):
            self._account(job)

    def _look_at_gpus(self) -> None:
        """Bring in line what follows from the GPUs there are."""
        self.floor.renew()
        self.line.unsettle()
        self._gpu_types = tuple(dict.fromkeys(gpu.gpu_type for gpu in self.gpus.values()))
        self._gpu_type = self._gpu_types[0] if len(self._gpu_types) == 1 else None

    def _host_of(self, gpu_id: str) -> str | None:
        return self.gpus[gpu_id].host_id if gpu_id in self.gpus else None

    def _drop_gpu(self, gpu_id: str) -> None:
        del self.gpus[gpu_id]
        self.floor.forget(gpu_id)
        self.resize_memory.pop(gpu_id, None)
        self._account_residents(gpu_id)

    def _drop_oldest_ended(self) -> None:
        while len(self._ended) > KEPT_ENDED_JOBS:
            del self.jobs[heapq.heappop(self._ended)[2]]
