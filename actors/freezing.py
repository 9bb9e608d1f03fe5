"""Freezes jobs and thaws them: their processes stay, held still by the driver, with their device memory in the host's.

Every freeze and every thaw runs in a thread of its own: tens of gigabytes are moved, and the driver may hang. How far
each is stands in the job's directory (``jobfiles.Freeze``) before it is done, so that whoever follows this agent can
finish or undo it. What must never be left is a process that neither runs nor is frozen: a job that cannot be brought to
one of the two is ended, as one that its host has let down.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from cotenant.actors import hostmemory, jobfiles, runner
from cotenant.actors.devices.base import Contexts, DeviceBackend
from cotenant.actors.enforcement.base import EnforcementBackend, StaleCommand, bounds_of
from cotenant.actors.enforcement.pausing import BrokenError, CheckpointPause, PauseError, TooEarlyError
from cotenant.actors.jobfiles import Freeze
from cotenant.actors.jobrecords import JobRecord
from cotenant.actors.shim import still
from cotenant.actors.starts import Key
from cotenant.actors.vacating import PATIENCE_S, Vacating
from cotenant.placement.types import Share
from cotenant.scheduler.core.events import Event, FreezeFailed, JobExited, JobFrozen, JobStarted

LISTED_S = 10.0  # for the device to say which processes have memory on it
VACATED_S = PATIENCE_S + 5.0  # for it to be free of them
MARGIN_BYTES = 1 << 30  # of the host's memory that is left to others
MIB = 1 << 20


class Stop(Protocol):
    """Begins to end a job (``Launcher.stop``)."""

    def __call__(self, job_id: str, epoch: int, grace_s: float, reason: str, *, lost: bool = False) -> None: ...


@dataclass(slots=True)
class _Watched:
    """A job that is being frozen, and what the device loop has seen of it.

    Attributes:
        key: Its id and epoch.
        root_pid: Its supervisor.
        gpu_ids: Its GPUs.
        need_bytes: Host memory that it will take.
        still: Its processes are held still: from now on their memory must come free.
        contexts: Which of them have memory on its GPUs.
        left: What is in use on its GPUs that was nobody's; None = not seen yet.
    """

    key: Key
    root_pid: int
    gpu_ids: tuple[str, ...]
    need_bytes: int = 0
    still: bool = False
    contexts: Contexts | None = None
    left: str | None = None

    def held(self) -> dict[int, int | None]:
        """Those that have any."""
        memory = {} if self.contexts is None else self.contexts.memory
        return {pid: used for pid, used in memory.items() if used != 0}


class Freezing:
    """What is frozen, and on the way to or from it, on one host. Any thread may call; ``look`` is the device loop's.

    Args:
        lock: The launcher's.
        jobs: Its jobs.
        backend: How they are held.
        gpu_ids: Returns the ids of the whole GPUs that the host has.
        stop: Ends a job.
    """

    def __init__(
        self,
        lock: threading.RLock,
        jobs: MutableMapping[Key, JobRecord],
        backend: EnforcementBackend,
        gpu_ids: Callable[[], Sequence[str]],
        stop: Stop,
    ) -> None:
        self._news = threading.Condition(lock)
        self._lock, self._jobs, self._backend, self._gpu_ids, self._stop = lock, jobs, backend, gpu_ids, stop
        self._watched: dict[Key, _Watched] = {}
        self._host_id = ""
        self._tell: Callable[[Event], None] = lambda _: None

    def take_up(self, host_id: str, tell: Callable[[Event], None]) -> None:
        """Go on where an earlier agent of this host stopped: undo freezes, finish thaws, tell again what it may not
        have told.

        Args:
            host_id: The host.
            tell: Has an event sent; is called with the lock held, and must not wait.
        """
        self._host_id, self._tell = host_id, tell
        with self._lock:
            for job in self._jobs.values():
                if job.freeze is None or job.damage:
                    continue
                match job.freeze.phase:
                    case "freezing":
                        self._begin(self._undo, job, "the host agent ended meanwhile")
                    case "thawing":
                        with suppress(OSError):  # frozen until the command is repeated
                            self._go_on(job)
                    case "frozen" | "failed" if job.stop is None:
                        self._tell_state(job)

    def moving(self) -> frozenset[str]:
        """Return the jobs whose device memory is on its way to the host's."""
        with self._lock:
            return frozenset(job_id for job_id, _ in self._watched)

    def still(self) -> frozenset[str]:
        """Return the jobs whose processes are held still, or about to be or to go on."""
        with self._lock:
            return frozenset(job.launched.job_id for job in self._jobs.values() if job.still and job.exited is None)

    # -- commands ---------------------------------------------------------------------------------------------------

    def freeze(self, job_id: str, epoch: int, revision: int) -> None:
        """Begin to free a job's GPUs of it. ``JobFrozen`` or ``FreezeFailed`` is told when that has come to an end.

        Nothing happens when it is not here, has newer shares, or is to end; nor when it is on the way already.

        Raises:
            OSError: It cannot be written down.
        """
        with self._lock:
            job = self._jobs.get((job_id, epoch))
            if job is None or job.exited or job.stop or job.damage or job.revision > revision:
                return
            if job.supervisor is None:
                job.freeze = Freeze("failed", revision, job.gpu_ids, reason="its processes are its program's own")
            if job.freeze is not None and (job.freeze.phase != "failed" or job.freeze.revision >= revision):
                if job.frozen:
                    self._note(job, job.freeze._replace(revision=revision))
                self._tell_state(job)
                return
            self._note(job, Freeze("freezing", revision, job.gpu_ids))
            job.thaw = None
            self._begin(self._freeze, job)

    def thaw(self, job_id: str, epoch: int, revision: int, shares: Sequence[Share]) -> None:
        """Begin to let a frozen job go on with these shares, which may be of other GPUs; position = share index.

        ``JobStarted`` is told when it runs. Where there is nothing frozen of that epoch, or it cannot go on there, it
        is ended, and that is told as any end of it.

        Raises:
            StaleCommand: ``revision`` is not newer than what is frozen.
            OSError: It cannot be written down: the job stays frozen, and can go on once the command is repeated.
        """
        with self._lock:
            job = self._jobs.get((job_id, epoch))
            if job is None:
                why = "its frozen processes are not on this host any more"
                self._tell(JobExited(job_id, epoch, self._host_id, -signal.SIGKILL, why, lost=True))
            elif job.exited or job.stop or job.damage:
                return  # its end is on the way
            elif job.freeze is None or job.freeze.phase == "failed":
                self._thaw_running(job, revision, shares)
            elif job.freeze.phase == "freezing" and revision > job.freeze.revision:
                job.thaw = revision, tuple(shares)
            elif job.freeze.phase == "frozen" and revision > job.freeze.revision:
                self._thaw(job, revision, shares)
            elif revision != job.revision:
                raise StaleCommand(f"{job_id}: thaw of revision {revision}, but it is {job.freeze.phase}")

    def recorded(self, event: FreezeFailed) -> None:
        """The scheduler has recorded this."""
        with self._lock:
            job = self._jobs.get((event.job_id, event.epoch))
            failed = job is not None and job.freeze is not None and job.freeze.phase == "failed"
            if job is not None and failed:
                self._note(job, None)

    # -- what the device loop sees ----------------------------------------------------------------------------------

    def look(self, devices: DeviceBackend, vacating: Vacating, now: float) -> None:
        """See which processes of the jobs that are being frozen have device memory, and whether it is free.

        Args:
            devices: The host's devices.
            vacating: Knows what is nobody's on them.
            now: Monotonic seconds.
        """
        with self._lock:
            watched = list(self._watched.values())
        for each in watched:
            pids = {process.pid for process in runner.descendants(each.root_pid)}
            contexts, left = devices.contexts(each.gpu_ids, pids), each.left
            if each.still and left is None:
                left = vacating.wait(*each.key, each.gpu_ids, now)
            with self._news:
                each.contexts, each.left = contexts, left
                self._news.notify_all()

    # -- freezing, in threads of their own ----------------------------------------------------------------------------

    def _freeze(self, job: JobRecord) -> None:
        assert job.supervisor is not None
        watched = _Watched(job.key, job.supervisor.pid, tuple(job.gpu_ids))
        with self._lock:
            self._watched[job.key] = watched
        try:
            freeze = self._hold_still(job, watched)
        except BrokenError as error:
            self._break(job, f"freezing it failed: {error}")
        except (PauseError, OSError, ValueError, KeyError) as error:  # not written down: as if it had not been tried
            self._fail(job, str(error), again=isinstance(error, TooEarlyError))
        else:
            self._frozen(job, freeze)
        finally:
            with self._lock:
                self._watched.pop(job.key, None)

    def _hold_still(self, job: JobRecord, watched: _Watched) -> Freeze:
        """Have the job's memory moved, and see that it is.

        Raises:
            PauseError: It cannot be; its processes go on.
            BrokenError: Nor do they.
        """
        job_dir, root_pid = job.launched.job_dir, watched.root_pid
        why_not = self._backend.unfreezable(job_dir)
        if why_not:
            raise PauseError(why_not)
        pids = self._have_room(job, watched)
        pause, began = CheckpointPause(), time.monotonic()
        still.begin(str(job_dir), began)
        with self._lock:
            assert job.freeze is not None
            self._note(job, job.freeze._replace(pids=pids, memory_bytes=watched.need_bytes))
        pause.pause(root_pid, [pid for pid, _ in pids])
        try:
            self._await_vacated(job, watched, began)
        except PauseError as error:
            try:
                pause.resume(root_pid, [pid for pid, _ in pids])
            except PauseError as second:
                raise BrokenError(f"{error}; the processes could not be brought back: {second}") from error
            raise
        return job.freeze

    def _have_room(self, job: JobRecord, watched: _Watched) -> list[tuple[int, int]]:
        """Find the processes whose memory is to be moved, with their start times, and make sure that there is room.

        Raises:
            PauseError: They cannot be told, or there is none.
        """
        below = {process.pid for process in runner.descendants(watched.root_pid)}
        strangers = [process.pid for process in jobfiles.attached(job.launched.job_dir) if process.pid not in below]
        if strangers:
            raise PauseError(f"processes {strangers} are under its lease and were not started by it")
        asked = time.monotonic()
        with self._news:
            self._news.wait_for(lambda: watched.contexts is not None and watched.contexts.read_s >= asked, LISTED_S)
            contexts = watched.contexts
        if contexts is None or not (contexts.certain or contexts.memory):
            raise PauseError("the driver does not say which of its processes have memory on its GPUs")
        found = {pid: process for pid in contexts.memory if (process := runner.process(pid)) is not None}
        if not found:
            raise TooEarlyError("none of its processes is on its GPUs yet: they would use those of its start")
        granted = sum(share.memory_bytes for share in job.shares)
        need = sum(granted if used is None else used for used in contexts.memory.values())
        room = min(hostmemory.room_bytes(pid) for pid in found)
        with self._lock:
            taken = sum(each.need_bytes for each in self._watched.values() if each is not watched)
            if need + taken + MARGIN_BYTES > room:
                raise PauseError(
                    f"its device memory takes {need / MIB:.0f} MiB of the host's, of which it may have "
                    f"{max(0, room - taken - MARGIN_BYTES) / MIB:.0f} MiB"
                )
            watched.need_bytes = need
        return [(pid, process.start_ticks) for pid, process in found.items()]

    def _await_vacated(self, job: JobRecord, watched: _Watched, began: float) -> None:
        """Wait until the device says that nothing of the job is left on it.

        Raises:
            PauseError: It does not say so in time.
        """
        still_s = time.monotonic()

        def known() -> bool:
            seen = watched.contexts
            fresh = seen is not None and seen.read_s >= still_s and seen.listed_s >= began
            return job.stop is not None or bool(watched.left) or (fresh and watched.left == "" and not watched.held())

        with self._news:
            watched.still = True
            if not self._news.wait_for(known, VACATED_S):
                held = ", ".join(map(str, watched.held())) or "nobody knows which of them"
                raise PauseError(
                    f"its processes ({held}) still have device memory {VACATED_S:g} s after they were moved"
                )
            if watched.left:
                raise PauseError(watched.left)
            if job.stop is not None:
                raise PauseError("it is to end")

    def _frozen(self, job: JobRecord, freeze: Freeze) -> None:
        with self._lock:
            thaw, job.thaw = job.thaw, None
            if job.exited is not None:
                return
            if job.stop is None:
                job.freeze = freeze._replace(phase="frozen")
                with suppress(OSError):  # an agent that follows takes it for one whose freezing was cut short
                    jobfiles.write_freeze(job.launched.job_dir, job.freeze)
                if thaw is None:
                    self._tell_state(job)
                else:
                    with suppress(OSError):  # the command is repeated
                        self._thaw(job, *thaw)
                return
        self._undo(job, "it is to end")

    def _undo(self, job: JobRecord, why: str) -> None:
        """Bring back a job whose freezing was cut short."""
        assert job.freeze is not None
        assert job.supervisor is not None
        try:
            pids = _living(job.freeze.pids)
            CheckpointPause().resume(job.supervisor.pid, pids)
        except (PauseError, OSError, ValueError, KeyError) as error:
            self._break(job, f"freezing it was cut short ({why}), and it could not be brought back: {error}")
        else:
            self._fail(job, why, again=True)

    def _fail(self, job: JobRecord, why: str, *, again: bool = False) -> None:
        """Its processes go on as they were."""
        self._went_on(job)
        with self._lock:
            thaw, job.thaw = job.thaw, None
            if job.exited is not None or job.freeze is None:
                return
            job.freeze = job.freeze._replace(phase="failed", reason=why, again=again)
            with suppress(OSError):  # it is told all the same
                jobfiles.write_freeze(job.launched.job_dir, job.freeze)
            if job.stop is not None:
                return  # it ends, which is what is told
            if thaw is None:
                self._tell_state(job)
            else:
                self._thaw_running(job, *thaw)

    def _break(self, job: JobRecord, why: str) -> None:
        """End a job that can neither run nor be frozen."""
        with suppress(OSError):  # when the disk is full it has been signalled all the same
            self._stop(*job.key, 0.0, why, lost=True)

    # -- thawing ----------------------------------------------------------------------------------------------------

    def _thaw(self, job: JobRecord, revision: int, shares: Sequence[Share]) -> None:
        """Begin to let a frozen job go on, which stays as it is when that raises OSError; with the lock held."""
        assert job.freeze is not None
        try:
            ordered = _in_order(shares, job.freeze.gpu_ids)
        except ValueError as error:
            self._break(job, f"it cannot go on with its new shares: {error}")
            return
        target = revision, [(share.gpu_id, share.memory_bytes, share.compute) for share in ordered]
        self._note(job, job.freeze._replace(phase="thawing", target=target))
        self._go_on(job)

    def _go_on(self, job: JobRecord) -> None:
        """Put the shares in force and let the processes go on; with the lock held."""
        assert job.freeze is not None
        assert job.freeze.target is not None
        revision, target = job.freeze.target
        try:
            shares = tuple(Share(*each) for each in target)
            mapping = _mapping(job.freeze.gpu_ids, [share.gpu_id for share in shares], self._gpu_ids())
            self._put_in_force(job, revision, shares)
        except OSError:
            job.freeze = job.freeze._replace(phase="frozen", target=None)
            raise
        except (ValueError, KeyError, StaleCommand) as error:
            self._break(job, f"it cannot go on with its new shares: {error}")
        else:
            self._begin(self._let_go, job, mapping)

    def _put_in_force(self, job: JobRecord, revision: int, shares: tuple[Share, ...]) -> None:
        job_dir, gpu_ids = job.launched.job_dir, [share.gpu_id for share in shares]
        jobfiles.move_launch(job_dir, gpu_ids)
        self._backend.move(job_dir, gpu_ids)
        if self._backend.in_force(job_dir) < (job.launched.epoch, revision):  # an earlier agent may have done so
            self._backend.apply(job_dir, shares, job.launched.epoch, revision)
            job.revision = revision
        job.shares = tuple(self._backend.shares(job_dir, gpu_ids))
        job.launched = replace(job.launched, shares=job.shares)

    def _let_go(self, job: JobRecord, mapping: Mapping[str, str]) -> None:
        """In a thread of its own: let the processes go on."""
        assert job.freeze is not None
        assert job.supervisor is not None
        try:
            pids = _living(job.freeze.pids)
            CheckpointPause().resume(job.supervisor.pid, pids, mapping if pids else None)
        except (PauseError, OSError, ValueError, KeyError) as error:
            self._break(job, f"its frozen processes could not go on: {error}")
            return
        self._went_on(job)
        with self._lock:
            with suppress(OSError):
                self._note(job, None)
            job.freeze = None
            if job.exited is None and job.stop is None:
                self._tell_started(job)

    def _thaw_running(self, job: JobRecord, revision: int, shares: Sequence[Share]) -> None:
        """It was never frozen: fine where it is to go on just where it runs."""
        if revision > job.revision:
            try:
                self._put_in_force(job, revision, _in_order(shares, job.gpu_ids, others=False))
            except (OSError, ValueError, KeyError, StaleCommand) as error:
                self._break(job, f"it was not frozen, and cannot go on elsewhere: {error}")
                return
        with suppress(OSError):
            self._note(job, None)
        self._tell_started(job)

    # -- what all of them need ----------------------------------------------------------------------------------------

    def _begin(self, what: Callable[..., None], job: JobRecord, *more: object) -> None:
        name = f"{what.__name__.strip('_')}-{job.launched.job_id}"
        threading.Thread(target=what, args=(job, *more), name=name, daemon=True).start()

    def _note(self, job: JobRecord, freeze: Freeze | None) -> None:
        jobfiles.write_freeze(job.launched.job_dir, freeze)
        job.freeze = freeze

    def _went_on(self, job: JobRecord) -> None:
        job.thawed_s = time.monotonic()
        with suppress(OSError):
            still.end(str(job.launched.job_dir), job.thawed_s)

    def _tell_state(self, job: JobRecord) -> None:
        freeze, key = job.freeze, (self._host_id, *job.key)
        if freeze is not None and freeze.phase == "frozen":
            self._tell(JobFrozen(*key, freeze.revision, freeze.memory_bytes))
        elif freeze is not None and freeze.phase == "failed":
            self._tell(FreezeFailed(*key, freeze.revision, freeze.reason, freeze.again))

    def _tell_started(self, job: JobRecord) -> None:
        ceiling = bounds_of(self._backend.ceilings(job.launched.job_dir))
        self._tell(JobStarted(*job.key, self._host_id, job.launched.root_pid, ceiling))


def _living(pids: Sequence[Sequence[int]]) -> list[int]:
    """Those processes that have not ended meanwhile."""
    now = ((pid, ticks, runner.process(pid)) for pid, ticks in pids)
    return [
        pid for pid, ticks, process in now if process and process.start_ticks == ticks and process.state not in "ZX"
    ]


def _in_order(shares: Sequence[Share], gpu_ids: Sequence[str], *, others: bool = True) -> tuple[Share, ...]:
    """Return shares in the order of the job's, by GPU where it has these GPUs already.

    Raises:
        ValueError: Another number of shares, or other GPUs where there may be none.
    """
    by_gpu = {share.gpu_id: share for share in shares}
    if by_gpu.keys() == set(gpu_ids):
        return tuple(by_gpu[gpu_id] for gpu_id in gpu_ids)
    if not others or len(shares) != len(gpu_ids):
        raise ValueError(f"shares: GPUs {sorted(by_gpu)} are not accepted; it has {sorted(gpu_ids)}")
    return tuple(shares)


def _mapping(old: Sequence[str], new: Sequence[str], host: Collection[str]) -> dict[str, str]:
    """Return where each of the host's GPUs goes when those of a job change, empty when they do not: a permutation, as
    the driver wants it.

    Raises:
        ValueError: A new GPU that the host does not have. An old one may be managed no more, and is still there.
    """
    if list(old) == list(new):
        return {}
    unknown = set(new) - set(host)
    if unknown:
        raise ValueError(f"shares: GPUs {sorted(unknown)} are not on this host")
    mapping = dict(zip(old, new, strict=True))
    free = [gpu_id for gpu_id in old if gpu_id not in new]
    rest = {gpu_id: gpu_id for gpu_id in host if gpu_id not in old and gpu_id not in new}
    return mapping | rest | dict(zip((gpu_id for gpu_id in new if gpu_id not in old), free, strict=True))
