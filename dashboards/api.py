"""The admin API: the scheduler's client over HTTP, under ``/api/v1``.

Handlers are plain functions, so FastAPI runs them in its thread pool and a slow cluster never blocks the event loop.
Errors are ``application/problem+json`` (RFC 9457); see ``problems.py``. Everything but ``health`` needs the bearer
token; see ``guard.py``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request, Response, Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, WithJsonSchema

from cotenant import __version__
from cotenant.dashboards import problems
from cotenant.dashboards.guard import Guard
from cotenant.scheduler.client import Client
from cotenant.scheduler.errors import CotenantError, HintError, NotAccepted, NotPlaceable
from cotenant.scheduler.hints import check_job_id, describe, parse_hints
from cotenant.scheduler.specs import (
    MAX_NAME,
    MAX_PATH_BYTES,
    MAX_WORD_BYTES,
    check_command,
    check_cwd,
    check_environment,
    check_name,
)
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
    PlanView,
    PredictionsView,
    ResourcesView,
    TuningView,
)

PREFIX = "/api/v1"
MAX_PAGE = 500
MAX_OFFSET = 100_000
MAX_LOG_CHUNK = 4 << 20
MAX_PLANNED = 1000


def _hints_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            doc.name: {"description": f"{doc.meaning} Give {doc.accepted}. When not said: {doc.default}."}
            for doc in describe()
        },
    }


# Texts that reach execve() or become names: no NUL, nothing that could steer a terminal in names. What a schema cannot
# say (lengths count in bytes, printable is a property of each character) is checked by ``scheduler.specs``.
Word = Annotated[str, StringConstraints(max_length=MAX_WORD_BYTES, pattern=r"^[^\x00]*$")]
Label = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
Directory = Annotated[str, StringConstraints(max_length=MAX_PATH_BYTES, pattern=r"^/[^\x00]*$")]
Variable = Annotated[str, StringConstraints(min_length=1, max_length=1000, pattern=r"^[^\x00=]+$")]
RawHints = Annotated[dict[str, JsonValue], WithJsonSchema(_hints_schema())]


SettingChanges = Annotated[
    dict[str, dict[str, JsonValue]],
    Field(description='By section the keys to change: {"placement": {"confidence": 0.9}}; others stay as they are.'),
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class JobRequest(_Body):
    """A job to submit."""

    command: Annotated[list[Word], Field(min_length=1, max_length=4096, description="Program and arguments.")]
    hints: RawHints = {}
    name: Annotated[Label | None, Field(description="Name for people; default: the script's.")] = None
    cwd: Annotated[
        Directory | None, Field(description="Absolute directory to run in; default: the one of the API's process.")
    ] = None
    env: Annotated[
        dict[Variable, Word], Field(max_length=1000, description="Variables on top of those of the API's process.")
    ] = {}


class PlannedJobRequest(_Body):
    """A hypothetical job, or several equal ones."""

    name: Label = "job"
    hints: RawHints = {}
    command: Annotated[list[Word], Field(max_length=4096)] = []
    count: Annotated[int, Field(strict=True, ge=1, le=MAX_PLANNED)] = 1


class PlanRequest(_Body):
    """Hypothetical jobs, in the order they would be submitted, and settings to try."""

    jobs: Annotated[list[PlannedJobRequest], Field(max_length=MAX_PLANNED)] = []
    settings: SettingChanges = {}


Resource = Literal["memory", "compute", "power"]
Amount = Annotated[
    Annotated[float, Field(strict=True)] | Annotated[str, StringConstraints(max_length=64)],
    Field(description='Per GPU: bytes or a size such as "2GiB"; a fraction such as 0.2 or "20%"; watts.'),
]


class AmountRequest(_Body):
    """How much of a resource."""

    resource_type: Resource
    amount: Amount


class LimitRequest(_Body):
    """How much of a resource at most; null = no limit."""

    resource_type: Resource
    limit: Amount | None


class MoveRequest(_Body):
    """Where a job is to be moved."""

    to: Annotated[
        Label | None, Field(description="Id of a GPU, or id or name of a host; default: wherever else there is room.")
    ] = None


class JobPage(BaseModel):
    """Jobs, newest first. ``next_offset`` is where the next page starts; null = there is none."""

    items: list[JobView]
    next_offset: int | None


class HealthReply(BaseModel):
    """Whether cotenant works; the parts are named to those who show the token."""

    ok: bool
    details: Health | None = None


JobId = Annotated[Label, Path(description="Job id.")]
IdempotencyKey = Annotated[str | None, Header(description="The same key twice is one request.")]


class _App(FastAPI):
    """Describes its errors once."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        schema = super().openapi()
        schema["components"]["schemas"]["Problem"] = problems.Problem.model_json_schema()
        return schema


def create_app(client_factory: Callable[[], Client], token: str | None) -> FastAPI:
    """Build the API.

    Args:
        client_factory: Returns the client to use for a request; it decides whether to keep it.
        token: The bearer token every request must carry; None = nobody is asked.
    """
    app = _App(
        title="cotenant",
        version=__version__,
        description="Jobs that share the GPUs of a Ray cluster.",
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect would lead wherever the request's Host header says
        responses=problems.RESPONSES,
    )
    app.state.token = token
    app.state.client_factory = client_factory
    problems.install(app)
    app.include_router(_open_router, prefix=PREFIX)
    app.include_router(_router, prefix=PREFIX)
    app.add_middleware(Guard, token=token, open_paths=(f"{PREFIX}/health", f"{PREFIX}/openapi.json"))
    return app


def _connected(request: Request) -> Client:
    factory: Callable[[], Client] = request.app.state.client_factory
    return factory()


Connection = Annotated[Client, Depends(_connected)]


def _checked(idempotency_key: str | None) -> str | None:
    """Return the header; what is not accepted is told of by the name under which it was given."""
    try:
        return None if idempotency_key is None else check_job_id(idempotency_key)
    except HintError as error:
        raise HintError("Idempotency-Key", idempotency_key, error.accepted) from None


# The guard does the checking, before anything is parsed; the scheme is named here for the OpenAPI document.
_bearer = HTTPBearer(auto_error=False, description="The token that 'cotenant up' writes.")
_router = APIRouter(dependencies=[Security(_bearer), Depends(problems.known_parameters)])
_open_router = APIRouter()


@_open_router.get("/health", responses={503: {"model": HealthReply, "description": "cotenant does not work"}})
def get_health(request: Request, response: Response) -> HealthReply:
    """Say whether cotenant works. Needs no token; with it, the reply names the parts."""
    try:
        health = _connected(request).health()
    except CotenantError:
        response.status_code = 503
        return HealthReply(ok=False)
    response.status_code = 200 if health.ok else 503
    return HealthReply(ok=health.ok, details=health if request.state.trusted else None)


@_router.get("/jobs")
def list_jobs(
    client: Connection,
    active_only: Annotated[bool, Query(description="Only jobs that have not ended.")] = False,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    offset: Annotated[int, Query(ge=0, le=MAX_OFFSET)] = 0,
) -> JobPage:
    """List jobs, newest first, in pages."""
    views = client.jobs(active_only=active_only, limit=offset + limit + 1)[offset:]
    return JobPage(items=views[:limit], next_offset=offset + limit if len(views) > limit else None)


@_router.post("/jobs", status_code=201)
def submit_job(
    client: Connection,
    body: JobRequest,
    response: Response,
    idempotency_key: Annotated[
        str | None, Header(description="Becomes the job id: the same key twice is one job.")
    ] = None,
) -> JobView:
    """Submit a job; it is durable when this returns."""
    check_command(body.command)
    if body.name is not None:
        check_name(body.name)
    if body.cwd is not None:
        check_cwd(body.cwd)
    check_environment(body.env)
    view = client.submit(
        body.command,
        parse_hints(body.hints, time.time()),
        name=body.name,
        job_id=_checked(idempotency_key),
        cwd=body.cwd,
        env={**os.environ, **body.env},
    )
    if view.not_placeable:
        raise NotPlaceable(f"{view.job_id}: {view.reason}")
    response.headers["Location"] = f"{PREFIX}/jobs/{view.job_id}"
    return view


@_router.get("/jobs/{job_id}")
def get_job(client: Connection, job_id: JobId) -> JobView:
    """Return one job."""
    return client.job(job_id)


@_router.delete("/jobs/{job_id}", status_code=202)
def stop_job(client: Connection, job_id: JobId) -> JobView:
    """Ask for the end of a job. A job that has ended stays as it is."""
    return client.stop(job_id, reason="stopped through the API")


@_router.post("/jobs/{job_id}/suspend", status_code=202)
def suspend_job(client: Connection, job_id: JobId) -> JobView:
    """Take a job off its GPUs, once it has saved its state, until it is resumed."""
    return client.suspend(job_id, "suspended through the API")


@_router.post("/jobs/{job_id}/resume", status_code=202)
def resume_job(client: Connection, job_id: JobId) -> JobView:
    """Let a suspended job wait for GPUs again."""
    return client.resume(job_id, "resumed through the API")


@_router.post("/jobs/{job_id}/move", status_code=202)
def move_job(client: Connection, job_id: JobId, body: MoveRequest | None = None) -> JobView:
    """Move a running job to other GPUs with room for it, once it has saved its state."""
    return client.move(job_id, body.to if body else None, "moved through the API")


@_router.get("/jobs/{job_id}/explanation")
def explain_job(client: Connection, job_id: JobId) -> Explanation:
    """Say why a job is where it is, or why it waits and what would help."""
    return client.explain(job_id)


@_router.get(
    "/jobs/{job_id}/logs",
    response_class=Response,
    responses={
        200: {
            "description": "A piece of the output, stdout and stderr as they came.",
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
            "headers": {
                "X-Next-Offset": {"description": "Where the next piece starts.", "schema": {"type": "integer"}},
                "X-Eof": {
                    "description": "true: nothing follows, of the run that was named or, without, of the job.",
                    "schema": {"type": "string", "enum": ["true", "false"]},
                },
                "X-Epoch": {
                    "description": "The run that this is of, counted from 1; 0: the job has not been started yet.",
                    "schema": {"type": "integer"},
                },
            },
        }
    },
)
def get_logs(
    client: Connection,
    job_id: JobId,
    offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LOG_CHUNK, description="Bytes, at most.")] = 262_144,
    epoch: Annotated[int | None, Query(ge=1, le=2**53, description="The run; default: the newest.")] = None,
) -> Response:
    """Return a piece of the output of one run of a job as bytes."""
    chunk = client.logs(job_id, offset, limit, epoch)
    return Response(
        chunk.data,
        media_type="application/octet-stream",
        headers={
            "X-Next-Offset": str(chunk.next_offset),
            "X-Eof": "true" if chunk.eof else "false",
            "X-Epoch": str(chunk.epoch),
        },
    )


@_router.post("/jobs/{job_id}/request_resource_allocation")
def request_resource_allocation(
    client: Connection, job_id: JobId, body: AmountRequest, idempotency_key: IdempotencyKey = None
) -> AllocationView:
    """Ask for more of each of a job's GPUs: memory to reserve, or compute to guarantee. Refusals are answers too."""
    return client.request_resource_allocation(job_id, body.resource_type, body.amount, _checked(idempotency_key))


@_router.post("/jobs/{job_id}/release_resources")
def release_resources(
    client: Connection, job_id: JobId, body: AmountRequest, idempotency_key: IdempotencyKey = None
) -> AllocationView:
    """Give back some of each of a job's GPUs: only free memory, or some of its guaranteed compute."""
    return client.release_resources(job_id, body.resource_type, body.amount, _checked(idempotency_key))


@_router.post("/jobs/{job_id}/set_resource_limits")
def set_resource_limits(
    client: Connection, job_id: JobId, body: LimitRequest, idempotency_key: IdempotencyKey = None
) -> AllocationView:
    """Never let a job have more of each of its GPUs than this, however idle they are; null takes the limit away."""
    return client.set_resource_limits(job_id, body.resource_type, body.limit, _checked(idempotency_key))


@_router.get("/jobs/{job_id}/get_available_resources")
def get_available_resources(client: Connection, job_id: JobId) -> ResourcesView:
    """Return what a job has and could have of each of its GPUs."""
    return client.get_available_resources(job_id)


@_router.get("/gpus")
def list_gpus(client: Connection) -> list[GpuView]:
    """List GPUs with what they carry."""
    return client.gpus()


@_router.get("/hosts")
def list_hosts(client: Connection) -> list[HostView]:
    """List hosts with their agents."""
    return client.hosts()


@_router.get("/accounts")
def list_accounts(client: Connection) -> list[AccountView]:
    """List tenants and queues: limits, what they hold, what they used, where that leaves them in the fair share."""
    return client.accounts()


@_router.get("/predictions")
def get_predictions(client: Connection) -> PredictionsView:
    """Say what predicts, how good it was lately, and what is being learnt."""
    return client.predictions()


@_router.get("/jobs/{job_id}/forecast")
def get_forecast(client: Connection, job_id: JobId) -> ForecastView | None:
    """Say what a job is expected to demand of each of its GPUs; null without one, or when nothing was measured yet."""
    return client.forecast(job_id)


@_router.get("/jobs/{job_id}/forecast-scores")
def get_forecast_scores(client: Connection, job_id: JobId) -> list[DemandScoreView]:
    """Say how good the demand forecasts of a running job were lately, by horizon."""
    return client.forecast_scores(job_id)


@_router.post("/plan")
def make_plan(client: Connection, body: PlanRequest) -> PlanView:
    """Say what would happen to jobs submitted now, and to all jobs under other settings. Nothing is done."""
    total = sum(job.count for job in body.jobs)
    if total > MAX_PLANNED:
        raise NotAccepted("jobs", total, f"at most {MAX_PLANNED} jobs, counted with their 'count'")
    for job in body.jobs:
        check_name(job.name)
        if job.command:
            check_command(job.command)
    now = time.time()
    jobs = [
        (job.name if job.count == 1 else f"{job.name}-{index}", parse_hints(job.hints, now), job.command)
        for job in body.jobs
        for index in range(1, job.count + 1)
    ]
    return client.plan(jobs, body.settings)


@_router.get("/tuning")
def get_tuning(client: Connection) -> TuningView:
    """Return the settings that can change while everything runs."""
    return client.tuning()


@_router.put("/tuning")
def put_tuning(client: Connection, body: TuningView) -> TuningView:
    """Change them, from the next scheduling cycle on."""
    return client.set_tuning(body)


@_router.patch("/tuning")
def patch_tuning(client: Connection, body: SettingChanges) -> TuningView:
    """Change some of them; returns all of them."""
    return client.change_tuning(body)
