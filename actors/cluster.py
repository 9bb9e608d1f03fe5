"""Brings cotenant up on a Ray cluster and down again."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cotenant.actors.claims import release_claim
from cotenant.actors.devices.cpu import cpu_gpus
from cotenant.actors.devices.registry import start_nvml
from cotenant.actors.leaving import WAITING
from cotenant.actors.nodes import head_node_id, hosting_nodes, live_nodes
from cotenant.actors.prm_actor import Prm
from cotenant.actors.rayhead import watched
from cotenant.actors.scheduler_actor import Scheduler
from cotenant.configs.settings import ApiSettings, Settings
from cotenant.scheduler.client import Client
from cotenant.scheduler.errors import CotenantError, NotConnected
from cotenant.scheduler.names import API, NAMESPACE, PRM, SCHEDULER, ClusterRecord, agent_name, home, secret
from cotenant.scheduler.transport import Link
from cotenant.scheduler.views import JobView

# Ray starts without a word without what has its port taken, by another Ray for example; without its dashboard or its
# agent there are no Ray jobs.
DASHBOARD_PORT, DASHBOARD_AGENT_PORT, RAY_CLIENT_PORT = 8265, 52365, 10001
RAY_LOG = "ray-head.log"  # in the state directory
RAY_START_TIMEOUT_S = 90.0
HOSTS_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0  # for Ray, and for jobs whose grace periods are shorter
STOP_MARGIN_S = 15.0  # until what outlived its grace period is killed, its memory is free and its end is known
LONGEST_GRACE_S = 3600.0  # as for hints; a setting may be longer
NAMED = 5  # of jobs in one line
PRM_TIMEOUT_S = 5.0
ACTOR_TIMEOUT_S = 300.0  # to start: a large journal is read first
GIVE_BACK_S = 45.0  # a start, driver or daemon that hangs is given up before

_KEEPS = (
    "cotenant ran already and keeps the settings it was started with: --devices, --config and COTENANT_… count after "
    "'cotenant down'"
)


@dataclass(frozen=True, slots=True)
class UpReport:
    """What runs after ``up``."""

    address: str
    hosts: int
    gpus: int
    api_url: str | None
    token_path: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DownReport:
    """What ``down`` did. ``found``: there was a cotenant to stop."""

    found: bool
    stopped_jobs: int
    notes: tuple[str, ...]


def up(address: str | None, local: bool, settings: Settings, api_class: type | None) -> UpReport:
    """Start cotenant's actors on a Ray cluster; idempotent.

    Ray reads its authentication mode when it is imported: call ``names.prepare_ray_environment`` before that.

    Args:
        address: Ray address of a running cluster; None = the one Ray finds.
        local: Start a Ray head on this machine first, when none was started by us before. Its ports listen on all
            interfaces, behind a token.
        settings: All settings; a cotenant that runs already keeps its own.
        api_class: The actor class that serves the admin API (it lives in a room above this one); None = no API.

    Raises:
        CotenantError: Ray cannot be started or reached, or no host reports in time.
    """
    record = ClusterRecord.load()
    if ray.is_initialized():
        address = ray.get_runtime_context().gcs_address
    elif not local:
        _join(address or "auto")
    elif record is not None and record.ray_pid is not None and _alive(record.ray_pid):
        with watched(record.ray_pid, str(home() / RAY_LOG)):
            _join(record.address)
            return _finish(settings, api_class, record.ray_pid)
    else:
        if settings.api.enabled and api_class is not None:
            _refuse_taken(settings.api)  # before all that takes long
        ray_pid, address = _start_ray(settings)
        try:
            with watched(ray_pid, str(home() / RAY_LOG), lambda: _end_ray(ray_pid)):
                _join_own(address)
                return _finish(settings, api_class, ray_pid)
        except BaseException:
            ray.shutdown()  # a process that is connected to a Ray that ends is ended by it, and could not say why
            _end_ray(ray_pid)  # nothing is left of an 'up' that failed
            raise
    return _finish(settings, api_class, None)


def _finish(settings: Settings, api_class: type | None, ray_pid: int | None) -> UpReport:
    """Start the actors on the Ray this process is connected to, wait for the hosts and write the record."""
    notes = start_actors(settings, api_class)
    with Client.connect() as client:
        _wait_for_hosts(client, settings.scaling.enabled, again=_KEEPS in notes)
        # The journal also knows hosts of an earlier Ray session; they are not there any more.
        hosts = [host for host in client.hosts() if host.reachable]
    serves = settings.api.enabled and api_class is not None
    api_url: Any = ray.get(ray.get_actor(API, NAMESPACE).url.remote(), timeout=ACTOR_TIMEOUT_S) if serves else None
    token = home() / "token" if serves and settings.api.require_token else None
    address = ray.get_runtime_context().gcs_address
    ClusterRecord(
        address=address,
        auth_mode=os.environ.get("RAY_AUTH_MODE", "disabled"),
        auth_token_path=os.environ.get("RAY_AUTH_TOKEN_PATH"),
        ray_pid=_head_of(address) if ray_pid is None else ray_pid,
        api_url=api_url,
    ).save()
    return UpReport(
        address=address,
        hosts=len(hosts),
        gpus=sum(len(host.gpus) for host in hosts),
        api_url=api_url,
        token_path=str(token) if token else None,
        notes=tuple(notes),
    )


def _head_of(address: str) -> int | None:
    """Return the process id of the Ray head at this address if an earlier ``up --local`` started it."""
    record = ClusterRecord.load()
    ours = record is not None and record.address == address and record.ray_pid is not None and _alive(record.ray_pid)
    return record.ray_pid if record is not None and ours else None


def start_actors(settings: Settings, api_class: type | None) -> list[str]:
    """Create the detached control actors on the head node (or find those that exist); host agents follow by themselves.

    The control actors are pinned to the head node: on any other they would die with a worker node.
    """
    head = head_node_id()
    state_dir = home()
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    journal_url = settings.journal.url or f"sqlite:///{state_dir / 'journal.sqlite'}"
    notes = [_KEEPS] if _runs(SCHEDULER) else []

    def start(cls: type, name: str, threads: int, *args: object) -> None:
        actor_class: Any = ray.remote(cls)
        actor = actor_class.options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=threads,
            scheduling_strategy=NodeAffinitySchedulingStrategy(head, soft=False),
        ).remote(*args)
        try:
            ray.get(actor.ping.remote(), timeout=ACTOR_TIMEOUT_S)
        except GetTimeoutError as error:
            raise CotenantError(
                f"{name} did not start within {ACTOR_TIMEOUT_S:g} s: look at Ray's logs of it, then 'cotenant up' again"
            ) from error
        except RayActorError as error:
            raise CotenantError(f"{name} did not start: {str(error).strip().splitlines()[-1]}") from error

    start(Prm, PRM, 1, str(state_dir), settings.model_dump_json())
    start(Scheduler, SCHEDULER, 64, settings.model_dump_json(), journal_url, str(state_dir))
    if settings.api.enabled and api_class is not None:
        token = ensure_token() if settings.api.require_token else None
        # Started anew, it has to be where it was: its address is told once.
        api = settings.api.model_copy(update={"port": settings.api.port or _port()})
        start(api_class, API, 4, api.model_dump_json(), token)
        if token is None:
            notes.append("the admin API asks for no token (api.require_token = false)")
    return notes


def _runs(actor: str) -> bool:
    try:
        ray.get_actor(actor, NAMESPACE)
    except ValueError:
        return False
    return True


def down(force: bool, tell: Callable[[str], None] = lambda _: None) -> DownReport:
    """Stop all jobs that run, then cotenant's actors, then the Ray head if ``up --local`` started it.

    Args:
        force: Do not wait for jobs to end; their supervisors kill them when their lease expires.
        tell: Is told, for people, what is waited for.
    """
    record = ClusterRecord.load()
    notes: list[str] = []
    stopped, found = 0, True
    try:
        with Client.connect() as client:
            stopped = _stop_jobs(client, force, notes, tell)
            _kill_actors(client, notes)
    except NotConnected as error:
        found = False
        notes.append(str(error))
    if record is not None and record.ray_pid is not None:
        _end_ray(record.ray_pid)
        notes.append("stopped the Ray head that 'cotenant up --local' had started")
    ClusterRecord.remove()
    return DownReport(found, stopped, tuple(notes))


def ensure_token() -> str:
    """Return the API's bearer token, made on first use and readable by the owner only."""
    path = secret(home() / "token")
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CotenantError(f"{path}: holds no token ({error}); remove it, then a new one is made") from error
    if not token.isprintable() or not token or " " in token:
        raise CotenantError(f"{path}: holds no token; remove it, then a new one is made")
    return token


def _join(address: str) -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise NotConnected(f"no Ray cluster answers at {address}: {error}; 'cotenant up --local' starts one") from error


def _join_own(address: str) -> None:
    """Join the Ray head that was started just now.

    Raises:
        CotenantError: It is not there any more, or does not answer.
    """
    try:
        _join(address)
    except NotConnected as error:
        raise CotenantError(f"the Ray head did not start; see {home() / RAY_LOG}") from error


def _refuse_taken(api: ApiSettings) -> None:
    """Refuse an address of the admin API on which this machine cannot listen.

    Raises:
        CotenantError: It is taken, or not one of this machine's.
    """
    family = socket.AF_INET6 if ":" in api.host else socket.AF_INET
    try:
        socket.create_server((api.host, api.port), family=family).close()
    except OSError as error:
        raise CotenantError(
            f"the admin API cannot listen on {api.host}:{api.port} ({error.strerror}): is the port taken, by another "
            "cotenant perhaps? Set another: COTENANT_API__PORT=8267 (0: any that is free)"
        ) from error


def _start_ray(settings: Settings) -> tuple[int, str]:
    """Start a Ray head in the foreground of a process of its own, so that exactly it can be stopped again."""
    log = home() / RAY_LOG
    home().mkdir(parents=True, exist_ok=True, mode=0o700)
    port = _port()
    command = [
        str(Path(sys.executable).parent / "ray"),
        *("start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}"),
        *(*_gpu_count(settings), "--disable-usage-stats", "--dashboard-host=127.0.0.1"),
        f"--dashboard-port={_port(DASHBOARD_PORT)}",
        f"--dashboard-agent-listen-port={_port(DASHBOARD_AGENT_PORT)}",
        f"--ray-client-server-port={_port(RAY_CLIENT_PORT)}",
    ]
    address = f"127.0.0.1:{port}"
    # Ray jobs inherit this environment: 'cotenant run' must be found even when no virtual environment is activated, and
    # must find this cluster: the RAY_ADDRESS a Ray job gets is that of the Ray started last on the machine.
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "COTENANT_ADDRESS": address,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def ready() -> bool:
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
            raise CotenantError(f"the Ray head did not start (exit code {process.returncode}): {said[-1]}; see {log}")
        return "Ray runtime started" in log.read_text(encoding="utf-8", errors="replace")

    _await(ready, RAY_START_TIMEOUT_S, f"the Ray head did not start; see {log}")
    return process.pid, address


def _gpu_count(settings: Settings) -> list[str]:
    """What Ray is told of this machine's GPUs: where they are real it counts them itself."""
    device, cores = settings.device, sorted(os.sched_getaffinity(0))
    count = device.count
    try:
        if count is None and (library := start_nvml(device)) is not None:
            library.close()
            return []
        if device.backend == "cpu" or (count is None and device.backend == "auto"):  # what its host agent would refuse
            count = len(cpu_gpus(device, "local", count, cores))
    except ValueError as error:
        raise CotenantError(str(error)) from error
    return [f"--num-gpus={count or max(1, len(cores) // device.cores_per_gpu)}"]


def _end_ray(pid: int) -> None:
    """End the Ray head started by us: SIGTERM lets it end its children; what is left of its session is killed."""
    if _alive(pid):
        os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(CotenantError):
            _await(lambda: not _alive(pid), STOP_TIMEOUT_S, "the Ray head does not end")
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _stop_jobs(client: Client, force: bool, notes: list[str], tell: Callable[[str], None]) -> int:
    try:
        stopped = Link(owns_ray=False).scheduler("shut_down")
    except NotConnected as error:
        notes.append(f"{error}: jobs have not been asked to end; their supervisors kill them when their leases expire")
        return 0
    active = _ending(client)
    if active and not force:
        wait_s = max(STOP_TIMEOUT_S, max(map(_grace_s, active)) + STOP_MARGIN_S)
        tell(f"waiting for jobs to end, {wait_s:.0f} s at most (not with --force), by grace period: {_named(active)}")
        with contextlib.suppress(CotenantError):
            _await(lambda: not _ending(client), wait_s, "jobs do not end")
        active = _ending(client)
    if active:
        notes.append(f"not ended yet; their supervisors kill them when their leases expire: {_named(active)}")
    waiting = [job.job_id for job in client.jobs(active_only=True) if job.state in WAITING]
    if waiting:
        more = f", and {len(waiting) - NAMED} more" if len(waiting) > NAMED else ""
        notes.append(f"jobs that wait are kept for the next 'cotenant up': {', '.join(waiting[:NAMED])}{more}")
    return int(stopped)


def _ending(client: Client) -> list[JobView]:
    """Return the jobs that are still being ended; those that wait are kept."""
    return [job for job in client.jobs(active_only=True) if job.state not in WAITING]


def _grace_s(job: JobView) -> float:
    """Return how long a job that is being stopped may save; by one clock, which need not be this machine's."""
    asked_at = job.history[-1].at if job.history else 0.0
    return 0.0 if job.stop_by is None else min(LONGEST_GRACE_S, job.stop_by - asked_at)


def _named(jobs: Sequence[JobView]) -> str:
    """Name jobs with their grace periods, the longest first."""
    ordered = sorted(jobs, key=_grace_s, reverse=True)
    more = f", and {len(jobs) - NAMED} more" if len(jobs) > NAMED else ""
    return ", ".join(f"{job.job_id} ({_grace_s(job):.0f} s)" for job in ordered[:NAMED]) + more


def _kill_actors(client: Client, notes: list[str]) -> None:
    try:
        hosts = [host.host_id for host in client.hosts()]
        Link(owns_ray=False).scheduler("close")
    except NotConnected as error:
        hosts = sorted(live_nodes())
        notes.append(f"{error}: it is ended all the same, and the next 'cotenant up' goes on from its journal")
    with contextlib.suppress(ValueError, RayError):  # what it has measured last is not worth a failure
        ray.get(ray.get_actor(PRM, NAMESPACE).close.remote(), timeout=PRM_TIMEOUT_S)
    notes += _give_back(hosts)
    for name in (API, SCHEDULER, PRM, *(agent_name(host_id) for host_id in hosts)):
        try:
            ray.kill(ray.get_actor(name, NAMESPACE), no_restart=True)
        except ValueError:
            continue  # it is gone already
    for host_id in hosts:
        release_claim(host_id)


def _give_back(hosts: Sequence[str]) -> list[str]:
    """Have host agents end the daemons they started and put back what they changed; returns what was not done."""
    asked: dict[Any, str] = {}
    for host_id in hosts:
        with contextlib.suppress(ValueError):  # it is gone already
            asked[ray.get_actor(agent_name(host_id), NAMESPACE).shut_down.remote()] = host_id
    notes: list[str] = []
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=GIVE_BACK_S) if asked else ([], [])
    for answer in done:
        try:
            left: Any = ray.get(answer)
            notes += [f"host {asked[answer]}: {what}" for what in left]
        except RayError as error:
            notes.append(f"host {asked[answer]} has not given everything back: {str(error).strip().splitlines()[-1]}")
    hangs = (
        f"has not given everything back within {GIVE_BACK_S:g} s: an MPS daemon may still run there, a power limit hold"
    )
    return notes + [f"host {asked[answer]} {hangs}" for answer in late]


def _wait_for_hosts(client: Client, scaling: bool, *, again: bool) -> None:
    """Wait until all hosts have reported; where cotenant runs already (``again``) some are given back to Ray.

    Where Ray's autoscaler is asked for GPUs (``scaling``) there may be no host yet.
    """
    asked: dict[str, Any] = {}

    def all_in() -> bool:
        reachable = {host.host_id for host in client.hosts() if host.reachable}
        nodes = hosting_nodes(scaling)
        nodes = {node for node in nodes if not again or node in reachable or _runs(agent_name(node))}
        _refuse_failed_agents(nodes - reachable, asked)
        return (bool(reachable) or again or scaling) and nodes <= reachable

    _await(all_in, HOSTS_TIMEOUT_S, "no host agent has reported: look at 'cotenant doctor --cluster'")


def _refuse_failed_agents(host_ids: AbstractSet[str], asked: dict[str, Any]) -> None:
    """Say why a host agent did not start, of those that have not reported yet. An actor that is gone has no name any
    more: so each is asked once, while it starts, and ``asked`` keeps where its answer will be.

    Raises:
        CotenantError: One did not.
    """
    for host_id in host_ids - asked.keys():
        with contextlib.suppress(ValueError):  # it is not there yet
            asked[host_id] = ray.get_actor(agent_name(host_id), NAMESPACE).ping.remote()
    for host_id in asked.keys() & host_ids:
        try:
            ray.get(asked[host_id], timeout=0)
        except GetTimeoutError:
            continue
        except RayActorError as error:
            del asked[host_id]
            if "creation task" in str(error):  # else it has died since, and is started anew
                why = str(error).strip().splitlines()[-1]
                raise CotenantError(f"the agent of host {host_id[:12]} did not start: {why}") from error


def _await(condition: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise CotenantError(f"{otherwise} (waited {timeout_s:g} s)")
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _port(preferred: int = 0) -> int:
    """Return a port of this machine that nobody listens on, the preferred one if it is free."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
