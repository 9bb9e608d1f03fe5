"""Leases for Ray programs: shares of one or several GPUs for tasks, actors, Tune trials and Train workers."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cotenant.actors import shim
from cotenant.scheduler.client import Client, new_job_id
from cotenant.scheduler.core.model import JobState
from cotenant.scheduler.errors import CotenantError, NotPlaceable
from cotenant.scheduler.hints import parse_hints
from cotenant.scheduler.views import JobView, ShareView

RENEW_S = 1.0
POLL_S = 0.05


class LeaseLost(CotenantError):
    """The lease ended before its owner released it; the message says why."""


class GpuLease:
    """Shares of GPUs held by this process until it releases them (or dies: then they are freed by their TTL).

    Use it in a ``with`` block. All shares are granted at once or none is.
    """

    def __init__(self, client: Client, view: JobView, attached_here: bool) -> None:
        self._client = client
        self._view = view
        self._here = attached_here
        self._released = threading.Event()
        self._attachment: shim.Attachment | None = None
        threading.Thread(target=self._renew_loop, name=f"renew-{view.job_id}", daemon=True).start()

    @property
    def job_id(self) -> str:
        """The job under which the lease is listed."""
        return self._view.job_id

    @property
    def shares(self) -> tuple[ShareView, ...]:
        """The shares, one per GPU, as they are now (they may be resized while they are held)."""
        self._view = self._client.job(self.job_id)
        return tuple(self._view.shares)

    def __len__(self) -> int:
        return len(self._view.shares)

    def env(self, index: int = 0) -> dict[str, str]:
        """Return the environment variables that put a process under share ``index``."""
        host_id = self._view.shares[index].host_id
        values = self._client.lease_environment(host_id, self.job_id, self._view.epoch)
        same_host = [i for i, share in enumerate(self._view.shares) if share.host_id == host_id]
        values["COTENANT_SHARE_INDEX"] = str(same_host.index(index))
        return values

    def options(self, index: int = 0, **more: Any) -> dict[str, Any]:
        """Return options for ``@ray.remote`` tasks and actors that shall run under share ``index``.

        Args:
            index: Which share, 0 … len - 1.
            more: Further Ray options; ``runtime_env`` is merged.

        Raises:
            ValueError: ``more`` sets an option the lease decides (num_gpus, scheduling_strategy).
        """
        for name in ("num_gpus", "scheduling_strategy"):
            if name in more:
                raise ValueError(f"{name}: the lease decides it; leave it out")
        runtime_env = dict(more.pop("runtime_env", {}))
        # The process counts as the job's from its first moment, so COTENANT_ATTACH makes its shim report itself.
        runtime_env["env_vars"] = {
            **runtime_env.get("env_vars", {}),
            **self.env(index),
            "COTENANT_ATTACH": "1",
        }
        host_id = self._view.shares[index].host_id
        return {
            "num_gpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(host_id, soft=False),
            "runtime_env": runtime_env,
            **more,
        }

    def attach(self) -> None:
        """Put the current process under the lease (it must run on the lease's host)."""
        here = ray.get_runtime_context().get_node_id()
        index = next((i for i, share in enumerate(self._view.shares) if share.host_id == here), None)
        if index is None:
            raise LeaseLost(f"lease {self.job_id} has no share on this host; take it with here=True")
        self._attachment = shim.attach(self.env(index))

    def release(self) -> None:
        """Give the shares back. Processes started with ``options`` end; this process goes on. Idempotent."""
        if self._released.is_set():
            return
        self._released.set()
        if self._attachment is not None:
            self._attachment.detach()
        self._client.stop(self.job_id, "released")

    def __enter__(self) -> Self:
        if self._here:
            self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _renew_loop(self) -> None:
        while not self._released.wait(RENEW_S):
            try:
                self._client.renew(self.job_id)
            except (CotenantError, RayError):
                continue  # the scheduler is away for long; it gives every client a new term when it is back


def acquire(*, here: bool = False, name: str | None = None, timeout_s: float | None = None, **hints: Any) -> GpuLease:
    """Wait for shares of one or several GPUs and hold them.

    Args:
        here: Only on this process's host, and put this process under the share when the lease is entered.
        name: For people.
        timeout_s: Give up after this many seconds; None = wait.
        hints: The same hints as everywhere (``gpus``, ``gpu_memory``, ``compute``, ``max_slowdown`` …).

    Raises:
        HintError: A hint is not accepted.
        NotPlaceable: No device could ever take it.
        TimeoutError: Not granted in time; nothing is held.
    """
    parsed = parse_hints(hints, time.time())
    client = Client.connect()
    spec = client.spec(
        (),
        parsed,
        name=name or _script_name(),
        job_id=new_job_id(),
        attached=True,
        kind="lease",
        pinned_host=ray.get_runtime_context().get_node_id() if here else None,
    )
    view = client.submit_many([spec])[0]
    try:
        view = _granted(client, view, timeout_s)
    except BaseException:
        client.stop(spec.job_id, "not waited for any longer")
        raise
    return GpuLease(client, view, here)


def _granted(client: Client, view: JobView, timeout_s: float | None) -> JobView:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while view.state is not JobState.RUNNING:
        if view.not_placeable:
            raise NotPlaceable(view.reason)
        if view.state.terminal:
            raise LeaseLost(f"lease {view.job_id}: {view.reason}")
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"no share within {timeout_s:g} s: {client.explain(view.job_id).summary}")
        time.sleep(POLL_S)
        client.renew(view.job_id)
        view = client.job(view.job_id)
    return view


def _script_name() -> str:
    import __main__  # noqa: PLC0415 - only its file name is wanted

    return Path(getattr(__main__, "__file__", None) or "lease").stem
