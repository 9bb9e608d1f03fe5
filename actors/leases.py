"""Leases for Ray programs: shares of one or several GPUs for tasks, actors, Tune trials and Train workers.

``docs/ray-programs.md`` shows how they are used. Ray is imported only once there is a connection: it reads how to
authenticate when it is imported, and only who connects knows that.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

from cotenant.actors import shim
from cotenant.scheduler.client import Client, new_job_id
from cotenant.scheduler.core.model import JobState
from cotenant.scheduler.errors import CotenantError, HintError, JobNotFound, LeaseLost, NotPlaceable
from cotenant.scheduler.hints import parse_hints
from cotenant.scheduler.specs import LEASE_CHECKPOINTS
from cotenant.scheduler.views import JobView, ShareView

RENEW_S = 1.0
POLL_S = 0.05
TELL_AFTER_S, TELL_AGAIN_S = 5.0, 10.0  # of waiting without a word
_NODE_ID = "ray.io/node-id"  # the label Ray gives every node
_DECIDED = ("num_gpus", "scheduling_strategy", "label_selector")
_NOT_HERE = "a process cannot leave its GPU; take the lease and start others with lease.options() or train_options()"
_USERS_OWN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # the lease only has defaults for these


class TrainOptions(NamedTuple):
    """Arguments for Ray Train.

    Attributes:
        scaling: For ``ray.train.ScalingConfig``.
        run: For ``ray.train.RunConfig``.
    """

    scaling: dict[str, Any]
    run: dict[str, Any]


class _Hold:
    """Keeps a lease alive from a thread of its own until it is let go of or lost.

    It does not know its ``GpuLease``: one that nobody refers to any more is collected, and the hold let go of.
    """

    def __init__(self, client: Client, view: JobView) -> None:
        self._client = client
        self._job_id = view.job_id
        self._saves = _saves(view)
        self._lock = threading.Lock()
        self._let_go = threading.Event()
        self.epoch = view.epoch
        self.asked = ""  # why it is to be given back
        self.stop_by: float | None = None  # and by when
        self.ended = ""  # why the lease is not held any more
        threading.Thread(target=self._renew_loop, name=f"renew-{view.job_id}", daemon=True).start()

    def look(self) -> None:
        """Renew the lease now, and see whether it is still there."""
        self._take_in(self._client.renew(self._job_id))

    def next_term(self) -> JobView:
        """Give back what is held, and wait until there are GPUs for it again."""
        view = _granted(self._client, self._client.return_lease(self._job_id, self.epoch), None, self.epoch)
        with self._lock:
            self.epoch, self.asked, self.stop_by = view.epoch, "", None
        return view

    def _take_in(self, view: JobView) -> None:
        with self._lock:
            held = view.state is JobState.RUNNING and view.epoch == self.epoch
            if view.state.terminal or not (self._saves or held):
                self.ended = self.ended or view.reason or str(view.state)
            elif view.state is not JobState.STARTING and view.epoch == self.epoch and not held:
                # Of another epoch it is old, or what ``next_term`` waits for.
                self.stop_by = self.stop_by or view.stop_by  # first: whoever sees that it is asked for reads this next
                self.asked = self.asked or view.reason

    def let_go(self) -> None:
        """Leave the rest to the thread. Safe in a finalizer."""
        self._let_go.set()

    def release(self) -> None:
        """Give the lease back and stop renewing it. Once is enough."""
        if self._let_go.is_set():
            return
        self.ended = self.ended or "released"
        self._let_go.set()
        _give_up(self._client, self._job_id, "released")

    def _renew_loop(self) -> None:
        import ray  # noqa: PLC0415
        from ray.exceptions import RayError  # noqa: PLC0415

        while not self.ended and not self._let_go.wait(RENEW_S):
            if not ray.is_initialized():  # a call would start a Ray of its own
                self.ended = "this process has left Ray"
                return
            try:
                self.look()
            except JobNotFound as error:
                self.ended = str(error)
            except (CotenantError, RayError):
                continue  # the scheduler is away for long; it gives every client a new term when it is back
        if not self.ended and ray.is_initialized():
            self.ended = "nobody refers to it any more"
            try:
                _give_up(self._client, self._job_id, self.ended)
            except (CotenantError, RayError):
                return  # it ends by its TTL


class GpuLease:
    """Shares of GPUs held by this process until it releases them (or dies: then they are freed by their TTL).

    Use it in a ``with`` block. All shares are granted at once or none is. Everything that needs the shares raises
    ``LeaseLost`` once they are not held any more.
    """

    def __init__(self, client: Client, view: JobView, attached_here: bool) -> None:
        self._client = client
        self._job_id = view.job_id
        self._saves = _saves(view)
        self._hosts = _hosts(view)
        self._here = attached_here
        self._attachment: shim.Attachment | None = None
        self._hold = _Hold(client, view)
        self._forget = weakref.finalize(self, _forgotten, self._hold, view.job_id)
        self._forget.atexit = False  # Ray is gone by then, and the TTL frees the shares

    @property
    def job_id(self) -> str:
        """The job under which the lease is listed."""
        return self._job_id

    @property
    def shares(self) -> tuple[ShareView, ...]:
        """The shares, one per GPU, as they are now (they may be resized while they are held)."""
        self.check()
        return tuple(self._client.job(self._job_id).shares)

    @property
    def lost(self) -> str | None:
        """Why the lease is not held any more; None while it is. As of the last renewal, every second; asks nobody."""
        return self._hold.ended or None

    @property
    def stop_requested(self) -> str | None:
        """Why the program is to save and end its processes (``terms``); None while it is not. As ``lost``, asks nobody.

        Processes that were started under a share learn it at once (``cotenant.checkpointing``).
        """
        return self._hold.asked or None

    @property
    def stop_by(self) -> float | None:
        """Until when (Unix seconds) it has to be given back once ``stop_requested``: later it is lost."""
        return self._hold.stop_by

    def terms(self) -> Iterator[int]:
        """Have the lease suspended and moved: yields once for each time that it has GPUs, 1, 2, …

        In each term the program starts its processes with the options of the lease, continues from its checkpoint, and
        ends them when it is done or asked to stop, within the grace period of its hints. When it is done it leaves the
        loop, which else ends after a term in which nobody has asked.

        Example:
            >>> with cotenant.lease(gpus=2, checkpoint="own") as lease:
            ...     for _ in lease.terms():
            ...         scaling, run = lease.train_options()
            ...         if TorchTrainer(loop, ..., run_config=RunConfig(name="mine", ..., **run)).fit().return_value:
            ...             break

        Raises:
            LeaseLost: It was stopped, lost with its host, or not given back within the grace period.
        """
        for term in itertools.count(1):
            yield term
            if not self._forget.alive:
                return  # released
            self._hold.look()
            self.check()
            if not self._hold.asked:
                return
            self._hosts = _hosts(self._hold.next_term())

    def check(self) -> None:
        """Make sure that the lease is still held, as of the last renewal (every second; costs nothing).

        Raises:
            LeaseLost: It was stopped, lost with its host, or released.
        """
        if self._hold.ended:
            raise LeaseLost(f"lease {self._job_id} is not held any more ({self._hold.ended}); take a new one")

    def __len__(self) -> int:
        return len(self._hosts)

    def __repr__(self) -> str:
        return f"<GpuLease {self._job_id}: {len(self)} share(s), {self._hold.ended or 'held'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a lease belongs to the process that took it and cannot be sent to another one: start tasks and actors "
            "with lease.options(), Train workers with lease.train_options(), or take the lease in the other process"
        )

    def env(self, index: int = 0) -> dict[str, str]:
        """Return the environment variables that put a process under share ``index``.

        Raises:
            LeaseLost: The lease is not held any more.
            ValueError: No such share.
        """
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self):
            raise ValueError(f"index: {index!r} is not accepted; give the number of a share, 0 to {len(self) - 1}")
        self.check()
        host_id = self._hosts[index]
        try:
            values = self._client.lease_environment(host_id, self._job_id, self._hold.epoch)
        except KeyError:  # its host has ended it, and this process has not been told yet
            self._hold.look()
            self.check()
            raise
        values["COTENANT_SHARE_INDEX"] = str(self._hosts[:index].count(host_id))
        return values

    def options(self, index: int = 0, **more: Any) -> dict[str, Any]:
        """Return options for ``@ray.remote`` tasks and actors that shall run under share ``index``.

        Args:
            index: Which share, 0 … len - 1.
            more: Further Ray options; ``runtime_env`` is merged.

        Raises:
            LeaseLost: The lease is not held any more.
            ValueError: No such share, or ``more`` sets an option the lease decides (``num_gpus``,
                ``scheduling_strategy``, ``label_selector``).
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

        for name in _DECIDED:
            if name in more:
                raise ValueError(f"{name}: {more[name]!r} is not accepted; the lease decides it, leave it out")
        runtime_env = self._under_share(more.pop("runtime_env", None) or {}, index)
        strategy = NodeAffinitySchedulingStrategy(self._hosts[index], soft=False)
        return {"num_gpus": 0, "scheduling_strategy": strategy, "runtime_env": runtime_env, **more}

    def train_options(self, runtime_env: Mapping[str, Any] | None = None) -> TrainOptions:
        """Return arguments for Ray Train: one worker per share, each under the share of its local rank.

        Example:
            >>> scaling, run = lease.train_options()
            >>> TorchTrainer(loop, scaling_config=ScalingConfig(**scaling), run_config=RunConfig(**run)).fit()

        Args:
            runtime_env: More for the workers' runtime environment.

        Raises:
            LeaseLost: The lease is not held any more.
            ValueError: The shares lie on several hosts: Train gives all its workers one environment.
        """
        if len(set(self._hosts)) > 1:
            raise ValueError(
                f"gang: the shares of this lease lie on {len(set(self._hosts))} hosts, which Ray Train cannot use; "
                'take the lease with gang="host"'
            )
        scaling = {"num_workers": len(self), "use_gpu": False, "label_selector": {_NODE_ID: self._hosts[0]}}
        return TrainOptions(scaling, {"worker_runtime_env": self._under_share(runtime_env or {}, 0)})

    def attach(self) -> None:
        """Put the current process under the lease (it must run on the lease's host).

        Raises:
            LeaseLost: The lease is not held any more.
            ValueError: No share on this host, or the program has promised to save.
            RuntimeError: The process is under a share already.
        """
        self.check()
        if self._saves:
            raise ValueError(f"checkpoint: 'own' is not accepted for a process that attaches itself; {_NOT_HERE}")
        here = _this_host()
        if here not in self._hosts:
            raise ValueError(f"lease {self._job_id} has no share on this host; take it with here=True")
        self._attachment = shim.attach(self.env(self._hosts.index(here)))

    def release(self) -> None:
        """Give the shares back. Processes started with ``options`` end; this process goes on. Idempotent."""
        self._forget.detach()
        attachment, self._attachment = self._attachment, None
        try:
            if attachment is not None:
                attachment.detach()
        finally:
            self._hold.release()

    def __enter__(self) -> Self:
        self.check()
        if self._here:
            try:
                self.attach()
            except BaseException:
                self.release()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except CotenantError as failure:
            if error is None:
                raise
            error.add_note(f"lease {self._job_id} could not be released and ends by its TTL: {failure}")

    def _under_share(self, runtime_env: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Merge the share's variables into a runtime environment."""
        import ray  # noqa: PLC0415

        lease_env = self.env(index)
        inherited: dict[str, str] = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        own: dict[str, str] = runtime_env.get("env_vars") or {}
        python_path = own.get("PYTHONPATH", inherited.get("PYTHONPATH"))
        if python_path is not None:
            shim_dir = lease_env["PYTHONPATH"].split(os.pathsep)[0]
            lease_env["PYTHONPATH"] = os.pathsep.join([shim_dir, python_path])
        for name in _USERS_OWN:
            if name in own or name in inherited:
                del lease_env[name]
        # The process counts as the job's from its first moment, so COTENANT_ATTACH makes its shim report itself.
        return {**runtime_env, "env_vars": {**own, **lease_env, "COTENANT_ATTACH": "1"}}


def _forgotten(hold: _Hold, job_id: str) -> None:
    warnings.warn(f"lease {job_id} was never released; use it in a with block", ResourceWarning, stacklevel=2)
    hold.let_go()


def acquire(*, here: bool = False, name: str | None = None, timeout_s: float | None = None, **hints: Any) -> GpuLease:
    """Wait for shares of one or several GPUs and hold them.

    Args:
        here: Only on this process's host, and put this process under the share when the lease is entered.
        name: For people.
        timeout_s: Give up after this many seconds; None = wait.
        hints: Those known everywhere (``gpus``, ``gpu_memory``, ``compute``, ``max_slowdown`` …) except ``restart``.
            ``checkpoint="own"``: the program promises to save when asked to (``GpuLease.terms``); not with ``here``.

    Raises:
        HintError: A hint is not accepted.
        ValueError: ``timeout_s`` is not accepted.
        NotPlaceable: No device could ever take it.
        TimeoutError: Not granted in time; nothing is held.
        LeaseLost: It was stopped before it was granted.
        RuntimeError: With ``here``: this process is under a share already.
    """
    if hints.get("restart") is not None:
        raise HintError("restart", hints["restart"], "nothing: a lease that was lost is not granted again")
    if timeout_s is not None and not (isinstance(timeout_s, Real) and 0.0 < timeout_s < math.inf):
        raise ValueError(f"timeout_s: {timeout_s!r} is not accepted; give seconds > 0, or None to wait")
    parsed = parse_hints(hints, time.time())
    if parsed.checkpoint == "driver":
        raise HintError("checkpoint", "driver", LEASE_CHECKPOINTS)
    if here and parsed.checkpoint == "own":
        raise HintError("checkpoint", "own", f"nothing with here=True: {_NOT_HERE}")
    if here:
        shim.refuse_second_share()
    client = Client.connect()
    spec = client.spec(
        (),
        parsed,
        name=name or _script_name(),
        job_id=new_job_id(),
        attached=True,
        kind="lease",
        pinned_host=_this_host() if here else None,
    )
    view = client.submit_many([spec])[0]
    try:
        view = _granted(client, view, timeout_s)
    except BaseException:
        _give_up(client, spec.job_id, "not waited for any longer")
        raise
    return GpuLease(client, view, here)


def _this_host() -> str:
    import ray  # noqa: PLC0415

    return str(ray.get_runtime_context().get_node_id())


def _granted(client: Client, view: JobView, timeout_s: float | None, had_epoch: int = 0) -> JobView:
    """Wait until the lease has GPUs: those of a later epoch than ``had_epoch``."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    returned, pause_s = had_epoch, POLL_S
    told, tell_at = "", time.monotonic() + TELL_AFTER_S
    while view.state is not JobState.RUNNING or view.epoch == had_epoch:
        if view.not_placeable:
            raise NotPlaceable(view.reason)
        stopping = view.state is JobState.STOPPING
        if view.state.terminal or (stopping and not _saves(view)):
            raise LeaseLost(f"lease {view.job_id}: {view.reason}")
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"no share within {timeout_s:g} s: {client.explain(view.job_id).summary}")
        if time.monotonic() > tell_at:
            told, tell_at = _tell_waiting(client, view, told), time.monotonic() + TELL_AGAIN_S
        time.sleep(pause_s)
        pause_s = min(RENEW_S, pause_s * 1.1)  # it may be suspended for days
        if stopping and view.epoch != returned:  # it had GPUs, and was asked for them before anybody knew
            returned = view.epoch
            view = client.return_lease(view.job_id, returned)
        else:
            view = client.renew(view.job_id)
    return view


def _tell_waiting(client: Client, view: JobView, told: str) -> str:
    """Warn what a lease waits for, unless that was told; the program may be silent until it has its share."""
    line = f"lease {view.job_id} has no share yet: {client.explain(view.job_id).summary}"
    if line != told:
        logging.getLogger("cotenant").warning(line)
    return line


def _give_up(client: Client, job_id: str, reason: str) -> None:
    """End a lease for good: there is nothing to save."""
    view = client.stop(job_id, reason)
    if view.state is JobState.STOPPING and _saves(view):
        client.return_lease(job_id, view.epoch)


def _saves(view: JobView) -> bool:
    return view.hints["checkpoint"] == "own"


def _hosts(view: JobView) -> tuple[str, ...]:
    """The host of each share."""
    return tuple(share.host_id for share in view.shares)


def _script_name() -> str:
    import __main__  # noqa: PLC0415 - only its file name is wanted

    return Path(getattr(__main__, "__file__", None) or "lease").stem
