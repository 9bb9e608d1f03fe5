"""How the client reaches cotenant's actors. Ray is imported only when a connection is made."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

from cotenant.scheduler.errors import CotenantError, NotConnected
from cotenant.scheduler.names import (
    NAMESPACE,
    PRM,
    SCHEDULER,
    SET_ENVIRONMENT,
    ClusterRecord,
    agent_name,
    prepare_ray_environment,
    ray_came_first,
)

CALL_TIMEOUT_S = 60.0
RETRY_S = 0.1
RESTART_PATIENCE_S = 30.0
Piece = tuple[bytes, int, bool]  # of output: bytes, next offset, whether the run has ended and nothing follows


class Link:
    """Calls to the scheduler, the PRM and the host agents through Ray."""

    def __init__(self, owns_ray: bool) -> None:
        self._owns_ray = owns_ray
        self._handles: dict[str, Any] = {}

    def scheduler(self, method: str, *args: object) -> Any:
        """Call the scheduler; waits while it restarts. Users' errors come back as themselves."""
        return self._call(SCHEDULER, method, *args)

    def prm(self, method: str, *args: object) -> Any:
        """Call the PRM; waits while it restarts."""
        return self._call(PRM, method, *args)

    def device_readings(self) -> dict[str, tuple[float, float | None, float | None]]:
        """Return the last (Unix time, utilisation, memory) of every GPU."""
        series = self.prm("latest_devices")
        return dict(series)

    def read_output(self, host_id: str, job_id: str, epoch: int, offset: int, limit: int) -> Piece | None:
        """Read a job's output from its host; None when that is gone, or has none of it (yet, or any more)."""
        from ray.exceptions import RayActorError  # noqa: PLC0415 - Ray only when connected

        try:
            return self._call(agent_name(host_id), "read_output", job_id, epoch, offset, limit)  # type: ignore[no-any-return]
        except (RayActorError, NotConnected, KeyError):
            return None

    def lease_environment(self, host_id: str, job_id: str, epoch: int) -> dict[str, str]:
        """Return the environment a process needs to run under a lease's shares on a host."""
        return self._call(agent_name(host_id), "lease_environment", job_id, epoch)  # type: ignore[no-any-return]

    def origin(self) -> tuple[str | None, str | None]:
        """Return (Ray node id of this process, its job's runtime environment as JSON or None when it has none)."""
        import ray  # noqa: PLC0415

        context = ray.get_runtime_context()
        runtime_env = {k: v for k, v in dict(context.runtime_env).items() if k != "_ray_commit"}
        return context.get_node_id(), json.dumps(runtime_env) if runtime_env else None

    def close(self) -> None:
        """Disconnect from Ray if this link connected to it."""
        if self._owns_ray:
            import ray  # noqa: PLC0415

            ray.shutdown()
            self._owns_ray = False

    def _call(self, actor: str, method: str, *args: object) -> Any:
        import ray  # noqa: PLC0415
        from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError  # noqa: PLC0415

        deadline = time.monotonic() + RESTART_PATIENCE_S
        while True:
            try:
                handle = self._handle(actor)
                return ray.get(getattr(handle, method).remote(*args), timeout=CALL_TIMEOUT_S)
            except RayTaskError as error:
                if isinstance(error.cause, Exception):
                    raise error.cause from None
                raise
            except GetTimeoutError as error:
                raise NotConnected(f"cotenant's {actor} does not answer within {CALL_TIMEOUT_S:g} s") from error
            except (ActorUnavailableError, RayActorError) as error:
                # The actor is restarting. Every call may be made twice: submissions carry their job id.
                self._handles.pop(actor, None)
                if time.monotonic() > deadline:
                    raise NotConnected(f"cotenant's {actor} does not come back: {type(error).__name__}") from error
                time.sleep(RETRY_S)

    def _handle(self, actor: str) -> Any:
        import ray  # noqa: PLC0415

        if actor not in self._handles:
            try:
                self._handles[actor] = ray.get_actor(actor, NAMESPACE)
            except ValueError:
                raise NotConnected(f"this Ray cluster runs no cotenant {actor}: start it with 'cotenant up'") from None
        return self._handles[actor]


def connect(address: str | None) -> Link:
    """Connect this process to a Ray cluster with a running cotenant.

    Raises:
        NotConnected: No cluster, or none with a cotenant.
    """
    owns_ray = "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
    if owns_ray:
        prepare_ray_environment(local=False)
        join(address)
    link = Link(owns_ray)
    try:
        link.scheduler("ping")
    except CotenantError:
        link.close()
        raise
    return link


def join(address: str | None) -> None:
    """Connect this process to a Ray cluster; ``prepare_ray_environment`` comes first.

    Args:
        address: Ray address; None = ``COTENANT_ADDRESS``, ``RAY_ADDRESS`` or the cluster ``cotenant up`` recorded.

    Raises:
        NotConnected: There is none.
    """
    import ray  # noqa: PLC0415
    from ray.exceptions import AuthenticationError  # noqa: PLC0415

    record = ClusterRecord.load()
    # COTENANT_ADDRESS comes first: the RAY_ADDRESS Ray gives the commands of its jobs is "auto" or the address of the
    # Ray started last on the machine, which is another one where several run.
    address = address or os.environ.get("COTENANT_ADDRESS") or None
    if address is None and record is not None and os.environ.get("RAY_ADDRESS", "auto") == "auto":
        address = record.address
    if address is None and "RAY_ADDRESS" not in os.environ:
        raise NotConnected(
            "no cotenant is running here: start one with 'cotenant up --local', or name a Ray cluster with "
            "--address or RAY_ADDRESS"
        )
    where = address or os.environ["RAY_ADDRESS"]
    if ray_came_first() and record is not None and record.address == where and record.auth_mode == "token":
        raise NotConnected(
            f"the Ray cluster at {where} asks for a token, which Ray reads when it is imported, and that was before "
            f"cotenant was used: run {SET_ENVIRONMENT} before the program, or use cotenant before 'import ray'"
        )
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
        mode = record.disagrees() if record is not None and record.address == where else ""
        raise NotConnected(f"no Ray cluster answers at {where}: {mode or error}") from error
