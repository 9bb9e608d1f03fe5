"""A client without a cluster: a few jobs in a dictionary, so that the CLI and the API can be tested alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self

from cotenant.configs.settings import Settings
from cotenant.scheduler.core.model import Hints, Job, JobSpec, JobState, Wish
from cotenant.scheduler.errors import CotenantError, JobNotFound, NotAccepted
from cotenant.scheduler.resources import asked
from cotenant.scheduler.tuning import Changes, changed, tuning_of
from cotenant.scheduler.views import (
    AccountView,
    AffectedJob,
    AllocationView,
    ComponentHealth,
    DemandScoreView,
    Explanation,
    ForecastView,
    GpuView,
    Health,
    HistoryView,
    HostView,
    JobView,
    LogChunk,
    PlannedJob,
    PlanView,
    PredictionsView,
    QuantilesView,
    ResourcesView,
    ResourceView,
    ShareView,
    SlowdownScoreView,
    TrainingView,
    TuningView,
    UsageView,
)

GIB = 2**30
SHARE = ShareView(gpu_id="gpu-0", host_id="host-0", memory_bytes=2 * GIB, compute=0.4)

JOB = Job(JobSpec("job-1", "train", "command", ("true",), "/", {}, Hints(), "fp", 0.0), JobState.RUNNING, 0.0)

PREDICTIONS = PredictionsView(
    serving={"demand": "mixture", "interference": "shipped"},
    warnings=["coldstart model 20200101T000000Z-00000000 cannot be used: no such file"],
    evidence=7,
    demand=[
        DemandScoreView(
            horizon_s=5,
            scored=120,
            util_error=0.021,
            util_persistence_error=0.034,
            util_coverage_p95=0.95,
            memory_violations=None,
            memory_waste=None,
        )
    ],
    slowdowns=[
        SlowdownScoreView(gpu_type="cpu-core", scored=14, error=0.041, rule_error=0.066, bias=-0.012, coverage=0.79)
    ],
    drift=[],
    training="",
    trainings=[
        TrainingView(
            kind="interference",
            at=1.0,
            version="20300101T000000Z-0a1b2c3d",
            adopted=False,
            reason="the active model is better",
            candidate={"mae": 0.05},
            active={"mae": 0.04},
        )
    ],
)


FORECAST = ForecastView(
    job_id="job-1",
    util=[
        QuantilesView(horizon_s=horizon, p10=0.31, p50=0.42, p90=0.53, p95=0.64, p99=0.75)
        for horizon in (1, 2, 5, 60, 300, 900)
    ],
    memory=[
        QuantilesView(horizon_s=horizon, p10=1.1 * GIB, p50=1.2 * GIB, p90=1.3 * GIB, p95=1.4 * GIB, p99=1.5 * GIB)
        for horizon in (1, 2, 5, 60, 300, 900)
    ],
    peak_memory_bytes=1.6 * GIB,
    windows=90,
    measured_at=1001.5,
    served_by="mixture with trained experts, version 20300101T000000Z-0a1b2c3d",
)


def job_view(job_id: str = "job-1", state: JobState = JobState.RUNNING, **changes: Any) -> JobView:
    """Return a job; ``changes`` are fields of the view."""
    fields: dict[str, Any] = {
        "job_id": job_id,
        "name": "train",
        "kind": "command",
        "state": state,
        "command": ["python", "train.py"],
        "hints": {"gpus": 1},
        "fingerprint": "f",
        "submitted_at": 1000.0,
        "started_at": 1001.0,
        "ended_at": 1002.0 if state.terminal else None,
        "exit_code": 0 if state is JobState.SUCCEEDED else None,
        "reason": "",
        "restarts": 0,
        "epoch": 1,
        "shares": [] if state.terminal else [SHARE],
        "usage": UsageView(util_mean=0.5, memory_bytes=GIB, step_rate=12.5, throttled_fraction=0.0, measured_at=1001.5),
        "slowdown_predicted": 1.1,
        "slowdown_measured": None,
        "solo_step_rate": 13.0,
        "not_placeable": False,
        "history": [HistoryView(at=1000.0, state=JobState.PENDING, reason="submitted")],
    }
    return JobView(**(fields | changes))


class FakeClient:
    """Same methods as ``cotenant.scheduler.client.Client``.

    Set ``final`` to what a streamed job ends as, ``output`` to what it prints, and ``error`` to what every call raises.
    With ``gate`` set, streaming waits for it (or for ``stop``) before the last piece.
    """

    def __init__(self, *views: JobView) -> None:
        self.known = {view.job_id: view for view in views}
        self.output: Sequence[bytes] = (b"step 1\n", b"\xff\x00step 2\n")
        self.final = job_view("job-new", JobState.SUCCEEDED)
        self.gate: threading.Event | None = None
        self.error: CotenantError | None = None
        self.submitted: list[dict[str, Any]] = []
        self.stopped: list[tuple[str, str]] = []
        self.steered: list[tuple[str, ...]] = []
        self.planned: tuple[Any, ...] = ()
        self.current = tuning_of(Settings())
        self.well = True
        self.closed = 0

    def submit(
        self, command: Sequence[str], hints: Hints, *, job_id: str | None = None, name: str | None = None, **how: Any
    ) -> JobView:
        self._check()
        self.submitted.append({"command": list(command), "hints": hints, "job_id": job_id, "name": name, **how})
        first = self.known.get(job_id or "")
        view = first or self.final.model_copy(update={"job_id": job_id or "job-new", "name": name or "train"})
        if view.not_placeable or first:
            self.known[view.job_id] = view
        else:
            told = {"no_freezing": view.no_freezing, "deadline": view.deadline, "command": list(command)}
            self.known[view.job_id] = job_view(view.job_id, name=view.name, **told)
        return self.known[view.job_id]

    def stop(self, job_id: str, reason: str = "stopped by user") -> JobView:
        self.job(job_id)
        self.stopped.append((job_id, reason))
        if self.gate is not None:
            self.gate.set()
        self.known[job_id] = self.known[job_id].model_copy(update={"state": JobState.STOPPING, "reason": reason})
        return self.known[job_id]

    def suspend(self, job_id: str, reason: str = "") -> JobView:
        return self._steer(job_id, JobState.STOPPING, "suspend", reason)

    def resume(self, job_id: str, reason: str = "") -> JobView:
        return self._steer(job_id, JobState.QUEUED, "resume", reason)

    def move(self, job_id: str, to: str | None = None, reason: str = "") -> JobView:
        if to == "nowhere":
            raise NotAccepted("to", to, "GPUs with room for the job")
        return self._steer(job_id, JobState.STOPPING, "move", to or "", reason)

    def _steer(self, job_id: str, state: JobState, *asked: str) -> JobView:
        self.known[job_id] = self.job(job_id).model_copy(update={"state": state})
        self.steered.append((job_id, *asked))
        return self.known[job_id]

    def job(self, job_id: str) -> JobView:
        self._check()
        if job_id not in self.known:
            raise JobNotFound(job_id)
        return self.known[job_id]

    def jobs(self, *, active_only: bool = False, limit: int | None = None) -> list[JobView]:
        self._check()
        views = [view for view in self.known.values() if not (active_only and view.state.terminal)]
        return views[:limit]

    def request_resource_allocation(self, job_id: str, *asked: Any) -> AllocationView:
        return self._allocate("request", job_id, *asked)

    def release_resources(self, job_id: str, *asked: Any) -> AllocationView:
        return self._allocate("release", job_id, *asked)

    def set_resource_limits(self, job_id: str, *asked: Any) -> AllocationView:
        return self._allocate("limit", job_id, *asked)

    def get_available_resources(self, job_id: str) -> ResourcesView:
        self.job(job_id)
        view = ResourceView(share=1.0, available=2.0, guaranteed=0.5, used=None, limit=None, note="")
        return ResourcesView(job_id=job_id, epoch=1, memory=view, compute=view, power=view)

    def _allocate(self, action: Any, job_id: str, resource: Any, amount: Any, key: Any) -> AllocationView:
        self.job(job_id)
        event = asked(JOB, Wish(action, resource, amount, key or "none"))
        return AllocationView(
            job_id=job_id,
            action=action,
            resource_type=resource,
            status="granted",
            requested=event.amount,
            granted=event.amount or 0.0,
            share=None,
            reason=event.request_id,
        )

    def gpus(self) -> list[GpuView]:
        self._check()
        gpu = GpuView(
            gpu_id="gpu-0",
            host_id="host-0",
            gpu_type="cpu-slice",
            index=0,
            memory_bytes=8 * GIB,
            memory_reserved_bytes=2 * GIB,
            compute_granted=0.4,
            util=0.5,
            memory_used_bytes=GIB,
            healthy=True,
            jobs=["job-1"],
        )
        return [gpu, gpu.model_copy(update={"gpu_id": "gpu-1", "healthy": False, "util": None, "jobs": []})]

    def hosts(self) -> list[HostView]:
        self._check()
        return [
            HostView(
                host_id="host-0",
                name="node",
                reachable=True,
                gpus=["gpu-0", "gpu-1"],
                joined_at=1000.0,
                last_report_at=None,
                claim="held",
                note="",
            )
        ]

    def explain(self, job_id: str) -> Explanation:
        state = self.job(job_id).state
        return Explanation(
            job_id=job_id, state=state, summary="waits for memory", details=["gpu-0: 6 GiB short"], would_help=["wait"]
        )

    def accounts(self) -> list[AccountView]:
        self._check()
        tenant = AccountView(
            kind="tenant",
            name="ml",
            weight=3.0,
            most_gpus=2.0,
            most_jobs=None,
            held_gpus=1.25,
            running_jobs=2,
            waiting_jobs=1,
            used_gpu_s=7200.0,
            used_fraction=0.5,
            entitled_fraction=0.75,
            fair_share=0.63,
        )
        return [tenant, tenant.model_copy(update={"kind": "queue", "name": "default", "most_gpus": None})]

    def plan(self, jobs: Sequence[tuple[str, Hints, Sequence[str]]] = (), changes: Changes | None = None) -> PlanView:
        self._check()
        changed(self.current, changes or {})
        self.planned = (list(jobs), changes)
        affected = AffectedJob(job_id="job-1", name="train", before="later", after="now", why="fits")
        return PlanView(
            jobs=[
                PlannedJob(
                    name=name,
                    placeable="never" if (hints.gpu_memory or 0) > 8 * GIB else "now",
                    shares=[SHARE],
                    slowdown_predicted=1.2,
                    neighbours={"job-1": 1.1},
                    explanation="fits",
                )
                for name, hints, _ in jobs
            ],
            packing_saving_predicted=0.3,
            affected=[affected] if changes else [],
            reconsidered=1 if changes else 0,
            running=1,
        )

    def logs(self, job_id: str, offset: int = 0, limit: int = 262_144, epoch: int | None = None) -> LogChunk:
        view = self.job(job_id)
        run = epoch or view.epoch
        ended = view.state.terminal or run < view.epoch
        everything = b"".join(self.output) if run == view.epoch else b"run %d\n" % run
        data = everything[offset : offset + limit]
        end = offset + len(data)
        return LogChunk(data=data, next_offset=end, eof=ended and end >= len(everything), epoch=run)

    def stream_logs(self, job_id: str, *, renew: bool = False) -> Iterator[bytes]:
        self.job(job_id)
        *first, last = self.output or (b"",)
        yield from first
        if self.gate is not None:
            assert self.gate.wait(20.0), "nobody stopped the job"
        yield last
        self.known[job_id] = self.final.model_copy(update={"job_id": job_id})

    def predictions(self) -> PredictionsView:
        self._check()
        return PREDICTIONS

    def forecast(self, job_id: str) -> ForecastView | None:
        return None if self.job(job_id).state.terminal else FORECAST.model_copy(update={"job_id": job_id})

    def forecast_scores(self, job_id: str) -> list[DemandScoreView]:
        self.job(job_id)
        return PREDICTIONS.demand[:1]

    def tuning(self) -> TuningView:
        self._check()
        return self.current

    def set_tuning(self, tuning: TuningView) -> TuningView:
        self._check()
        self.current = tuning
        return tuning

    def change_tuning(self, changes: Changes) -> TuningView:
        self._check()
        return self.set_tuning(changed(self.current, changes))

    def health(self) -> Health:
        self._check()
        return Health(ok=self.well, components=[ComponentHealth(name="prm", ok=self.well, note="restarting")])

    def close(self) -> None:
        self.closed += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
