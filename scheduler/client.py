"""The one typed client: the CLI, the admin API, the pages and users' Ray programs all go through it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from cotenant.scheduler import output, transport
from cotenant.scheduler.core.model import Hints, JobSpec, Wish
from cotenant.scheduler.errors import JobNotFound, NotAccepted
from cotenant.scheduler.fingerprint import NAMELESS, fingerprint
from cotenant.scheduler.hints import check_job_id
from cotenant.scheduler.specs import check_command, check_reason, check_same, check_spec, tidy_name
from cotenant.scheduler.tuning import Changes
from cotenant.scheduler.views import (
    AccountView,
    AllocationView,
    DemandScoreView,
    Explanation,
    ForecastView,
    GpuView,
    Health,
    HostView,
    JobView,
    LogChunk,
    PlanView,
    PredictionsView,
    ResourcesView,
    ServingView,
    TuningView,
)

MAX_OFFSET = 2**53  # what every JSON reader can hold


class Client:
    """A connection to a running cotenant. Safe to use from several threads; close it or use it in a ``with`` block."""

    def __init__(self, link: transport.Link) -> None:
        self._link = link

    @classmethod
    def connect(cls, address: str | None = None) -> Client:
        """Connect to the cotenant of a Ray cluster.

        Args:
            address: Ray address; None = the cluster this process is in, else the one ``cotenant up`` recorded, else the
                one Ray finds on this machine.

        Raises:
            NotConnected: There is none; the message says what to do.
        """
        return cls(transport.connect(address))

    # -- jobs -------------------------------------------------------------------------------------------------------

    def submit(
        self,
        command: Sequence[str],
        hints: Hints,
        *,
        name: str | None = None,
        job_id: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        attached: bool = False,
        kind: Literal["command", "lease"] = "command",
    ) -> JobView:
        """Submit one job; durable when this returns. A job id that is known already is the same job.

        One that no GPU of this cluster could ever take is returned with ``not_placeable=True``, not raised.

        Raises:
            HintError: It is known for another command, or with other hints.
        """
        spec = self.spec(command, hints, name=name, job_id=job_id, cwd=cwd, env=env, attached=attached, kind=kind)
        return self.submit_many([spec])[0]

    def submit_many(self, specs: Sequence[JobSpec]) -> list[JobView]:
        """Submit jobs in one transaction, in order.

        Raises:
            HintError: A job id is known already, for another command or with other hints; that job is left as it is.
        """
        answer: list[JobView] = self._call("submit", list(specs))
        for spec, view in zip(specs, answer, strict=True):
            check_same(spec, view.kind, view.command, view.hints)
        return answer

    def spec(
        self,
        command: Sequence[str],
        hints: Hints,
        *,
        name: str | None = None,
        job_id: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        attached: bool = False,
        kind: Literal["command", "lease"] = "command",
        pinned_host: str | None = None,
    ) -> JobSpec:
        """Describe a job as it would be submitted from this process.

        Raises:
            NotAccepted: Something about it is not accepted; names the field, the value and what is accepted.
        """
        if kind == "command":
            check_command(command)
        job_id = check_job_id(job_id) if job_id is not None else new_job_id()
        here, runtime_env = self._link.origin()
        where = cwd if cwd is not None else str(Path.cwd())
        spec = JobSpec(
            job_id=job_id,
            name=(tidy_name(_default_name(command)) or job_id) if name is None else name,
            kind=kind,
            command=tuple(command),
            cwd=where,
            env=dict(os.environ if env is None else env) if kind == "command" else {},
            hints=hints,
            fingerprint=fingerprint(command or (name or "",), where) if command or name else NAMELESS,
            submitted_at=time.time(),
            attached=attached,
            submit_host=here,
            runtime_env=runtime_env,
            pinned_host=pinned_host,
        )
        check_spec(spec)
        return spec

    def stop(self, job_id: str, reason: str = "stopped by user") -> JobView:
        """Ask for the end of a job: SIGTERM, then SIGKILL after the grace period. Ended jobs stay as they are."""
        return self.stop_many([job_id], reason)[0]

    def stop_many(self, job_ids: Sequence[str], reason: str = "stopped by user") -> list[JobView]:
        """Ask for the end of jobs, all in one transaction.

        Raises:
            JobNotFound: One of them is not known; then none is stopped.
        """
        check_reason(reason)
        answer: list[JobView] = self._call("stop", list(job_ids), reason)
        return answer

    def suspend(self, job_id: str, reason: str = "suspended by user") -> JobView:
        """Take a job off its GPUs until it is resumed: SIGTERM, its grace period, then its GPUs are free.

        Raises:
            JobNotFound: No job with that id.
            NotAccepted: It has ended, or it is a lease whose program does not save.
        """
        answer: JobView = self._call("steer", job_id, "suspend", None, reason)
        return answer

    def resume(self, job_id: str, reason: str = "resumed by user") -> JobView:
        """Let a suspended job go on: it waits for GPUs again.

        Raises:
            JobNotFound: No job with that id.
            NotAccepted: It is not suspended.
        """
        answer: JobView = self._call("steer", job_id, "resume", None, reason)
        return answer

    def move(self, job_id: str, to: str | None = None, reason: str = "moved by user") -> JobView:
        """Move a running job to other GPUs: SIGTERM, its grace period, start there.

        Args:
            job_id: The job.
            to: The id of a GPU, or the id or name of a host; None = wherever else there is room.
            reason: Kept in the job's history.

        Raises:
            JobNotFound: No job with that id.
            NotAccepted: It does not run, is a lease whose program does not save, or there is no room for it; then it
                stays where it is.
        """
        answer: JobView = self._call("steer", job_id, "move", to, reason)
        return answer

    def job(self, job_id: str) -> JobView:
        """Return one job.

        Raises:
            JobNotFound: No job with that id.
        """
        answer: JobView = self._call("job", job_id)
        return answer

    def jobs(self, *, active_only: bool = False, limit: int | None = None) -> list[JobView]:
        """Return jobs, newest first."""
        answer: list[JobView] = self._call("jobs", active_only, limit)
        return answer

    def explain(self, job_id: str) -> Explanation:
        """Say why a job is where it is, or why it waits and what would help."""
        answer: Explanation = self._call("explain", job_id)
        return answer

    def plan(self, jobs: Sequence[tuple[str, Hints, Sequence[str]]] = (), changes: Changes | None = None) -> PlanView:
        """Say what would happen; nothing is changed.

        Args:
            jobs: Hypothetical jobs as (name, hints, command).
            changes: Settings to try, by section and key: ``{"placement": {"confidence": 0.9}}``.

        Raises:
            NotAccepted: A setting that may not change while everything runs, or a value that is not accepted.
        """
        specs = [
            self.spec(command, hints, name=name, kind="command" if command else "lease")
            for name, hints, command in jobs
        ]
        answer: PlanView = self._call("plan", specs, changes or {})
        return answer

    def renew(self, job_id: str) -> JobView:
        """Tell the scheduler that the client of an attached job is alive; returns the job as it is now.

        Raises:
            JobNotFound: No job with that id.
        """
        answer: list[JobView] = self._call("renew", [job_id])
        return answer[0]

    def return_lease(self, job_id: str, epoch: int) -> JobView:
        """Give back the GPUs of a lease that was asked for them (``GpuLease.terms`` does it); returns the job then.

        What is left of the processes under it is ended. Nothing happens when that epoch is over, or was not asked for.

        Raises:
            JobNotFound: No job with that id.
        """
        answer: JobView = self._call("return_lease", job_id, epoch)
        return answer

    def wait(self, job_id: str, timeout_s: float | None = None) -> JobView:
        """Wait until a job has ended and return it.

        Raises:
            TimeoutError: It has not ended within ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not (view := self.job(job_id)).state.terminal:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is still {view.state} after {timeout_s:g} s")
            time.sleep(output.POLL_S)
        return view

    # -- the virtual GPU interface ----------------------------------------------------------------------------------

    def request_resource_allocation(
        self, job_id: str, resource_type: str, amount: float | str, request_id: str | None = None
    ) -> AllocationView:
        """Ask for more of each of a job's GPUs: memory to reserve, or compute to guarantee.

        Args:
            job_id: The job.
            resource_type: "memory" or "compute" ("power" is always refused: it belongs to whole GPUs).
            amount: How much more: bytes or a size such as "2GiB"; a fraction such as 0.2 or "20%".
            request_id: Idempotency key: the same one twice is one request.

        Raises:
            JobNotFound: No job with that id.
            NotAccepted: A value is not accepted.
            NotPermitted: The job has ended.
            TooManyRequests: Asked too often for this job; says when the next request is answered.
        """
        return self._allocate(job_id, "request", resource_type, amount, request_id)

    def release_resources(
        self, job_id: str, resource_type: str, amount: float | str, request_id: str | None = None
    ) -> AllocationView:
        """Give back some of each of a job's GPUs: only free memory, or some of its guaranteed compute.

        Args and errors are those of ``request_resource_allocation``.
        """
        return self._allocate(job_id, "release", resource_type, amount, request_id)

    def set_resource_limits(
        self, job_id: str, resource_type: str, limit: float | str | None, request_id: str | None = None
    ) -> AllocationView:
        """Never let a job have more of each of its GPUs than this; None takes the limit away.

        Args and errors are those of ``request_resource_allocation``.
        """
        return self._allocate(job_id, "limit", resource_type, limit, request_id)

    def get_available_resources(self, job_id: str) -> ResourcesView:
        """Return what a job has and could have of each of its GPUs.

        Raises:
            JobNotFound: No job with that id.
            TooManyRequests: Asked too often for this job.
        """
        answer: ResourcesView = self._call("resources", job_id)
        return answer

    def _allocate(
        self, job_id: str, action: str, resource_type: str, amount: object, request_id: str | None
    ) -> AllocationView:
        key = f"{action}-{secrets.token_hex(8)}" if request_id is None else check_job_id(request_id)
        answer: AllocationView = self._call("allocate", job_id, Wish(action, resource_type, amount, key))
        return answer

    # -- output -----------------------------------------------------------------------------------------------------

    def logs(self, job_id: str, offset: int = 0, limit: int = 262_144, epoch: int | None = None) -> LogChunk:
        """Return a piece of the output of one run of a job, stdout and stderr as they came.

        Args:
            job_id: The job.
            offset: Where to start in the output of that run, in bytes.
            limit: Most bytes to return.
            epoch: The run, counted from 1; ``eof`` then tells of that run. None = the newest, and ``eof`` tells of the
                job. Every start of a job is a new run, whose output begins at offset 0.

        Raises:
            NotAccepted: A negative offset, a limit below 1, or a run that has not begun.
            OutputNotKept: The run is over, and its output cannot be read any more.
        """
        for field, value, least in (("offset", offset, 0), ("limit", limit, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_OFFSET:
                raise NotAccepted(field, value, f"a whole number from {least} to {MAX_OFFSET}")
        return output.read(self._link, self.job(job_id), epoch, offset, limit)

    def stream_logs(self, job_id: str, *, renew: bool = False) -> Iterator[bytes]:
        """Yield a job's output as it comes, from its newest run on, until the job has ended.

        Args:
            job_id: The job.
            renew: This process is the client of an attached job; reading its output shows that it is alive.

        Raises:
            OutputNotKept: The job had ended before, and its output cannot be read any more.
        """
        alive = (lambda: self.renew(job_id)) if renew else None
        return output.follow(self._link, lambda: self.job(job_id), alive)

    # -- cluster ----------------------------------------------------------------------------------------------------

    def gpus(self) -> list[GpuView]:
        """Return all GPUs with what they carry."""
        views: list[GpuView] = self._call("gpus")
        readings = self._link.device_readings()
        return [
            view.model_copy(update={"util": readings[view.gpu_id][1], "memory_used_bytes": readings[view.gpu_id][2]})
            if view.gpu_id in readings
            else view
            for view in views
        ]

    def accounts(self) -> list[AccountView]:
        """Return what each tenant and each queue may have, holds and has used lately."""
        answer: list[AccountView] = self._call("accounts")
        return answer

    def hosts(self) -> list[HostView]:
        """Return all hosts."""
        answer: list[HostView] = self._call("hosts")
        return answer

    def health(self) -> Health:
        """Say whether all parts of cotenant answer."""
        answer: Health = self._call("health")
        return answer

    def tuning(self) -> TuningView:
        """Return the settings that can change while everything runs."""
        answer: TuningView = self._call("tuning")
        return answer

    def change_tuning(self, changes: Changes) -> TuningView:
        """Change some of them, by section and key, from the next cycle on; returns all of them.

        Raises:
            NotAccepted: As for ``plan``.
        """
        answer: TuningView = self._call("change_tuning", changes)
        return answer

    def set_tuning(self, tuning: TuningView) -> TuningView:
        """Change them, from the next scheduling cycle on."""
        answer: TuningView = self._call("set_tuning", tuning)
        return answer

    def predictions(self) -> PredictionsView:
        """Return what predicts, how good it was lately, and what is being learnt."""
        models: ServingView = self._call("models")
        answer: PredictionsView = self._link.prm("predictions")
        return answer.model_copy(
            update={
                "serving": {**answer.serving, **models.serving},
                "warnings": [*models.warnings, *answer.warnings],
                "evidence": models.evidence,
            }
        )

    def forecast(self, job_id: str) -> ForecastView | None:
        """Return what a job is expected to demand, as quantiles per horizon; None when it has no GPU, or nothing was
        measured of it there yet.

        Raises:
            JobNotFound: There is no such job.
        """
        answer: ForecastView | None = self._link.prm("forecast", job_id) if self.job(job_id).shares else None
        return answer

    def forecast_scores(self, job_id: str) -> list[DemandScoreView]:
        """Return how good the demand forecasts of a job that runs were lately, by horizon; empty when none was scored.

        Raises:
            JobNotFound: There is no such job.
        """
        self.job(job_id)
        answer: list[DemandScoreView] | None = self._link.prm("forecast_scores", job_id)
        return answer or []

    def windows(self, job_ids: Sequence[str]) -> dict[str, list[Any]]:
        """Return the measured windows (``Signature``) of jobs, the last hour at most, oldest first."""
        answer: dict[str, list[Any]] = self._link.prm("windows", list(job_ids))
        return answer

    def device_series(self) -> dict[str, list[tuple[float, float | None, float | None]]]:
        """Return per GPU the measured (Unix time, utilisation, memory bytes) of the last hour, oldest first."""
        answer: dict[str, list[tuple[float, float | None, float | None]]] = self._link.prm("devices")
        return answer

    def lease_environment(self, host_id: str, job_id: str, epoch: int) -> dict[str, str]:
        """Return the environment a process needs to run under a lease's shares on a host."""
        return self._link.lease_environment(host_id, job_id, epoch)

    def close(self) -> None:
        """End the connection. A Ray connection that existed before stays."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, *args: object) -> Any:
        return self._link.scheduler(method, *args)


def new_job_id() -> str:
    """Return a fresh job id, sortable by second."""
    return f"job-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def _default_name(command: Sequence[str]) -> str:
    """Return the script's or module's name, which is what people call their job."""
    for word in command[1:]:
        if word.endswith(".py"):
            return word.rsplit("/", 1)[-1].removesuffix(".py")
    return command[0].rsplit("/", 1)[-1] if command else ""


__all__ = ["Client", "JobNotFound", "new_job_id"]
