"""What the launcher reads and writes in the run directory, and what it finds there about processes."""

from __future__ import annotations

import mmap
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

from cotenant.actors import runner
from cotenant.actors.launchspec import JOB_ID, Launch
from cotenant.actors.shim.bootstrap import ATTACH_PREFIX, STARTED

OUTPUTS = "outputs"
FREEZE = "freeze.json"
_JOB_DIR = re.compile(rf"({JOB_ID.pattern})\.([0-9]+)")
_KEPT = re.compile(rf"({JOB_ID.pattern})\.([0-9]+)\.log")


class StopRequest(NamedTuple):
    """Content of ``stop.json``; ``kill_at`` on the monotonic clock, which does not jump and outlives the agent.

    ``lost``: the host lets the job down. ``asks``: its processes find out here, and nobody signals them (a lease).
    """

    grace_s: float
    reason: str
    kill_at: float
    lost: bool = False
    asks: bool = False

    def after(self, first: StopRequest) -> StopRequest:
        """Return what holds when this request comes after another: it can only be more urgent."""
        kill_at, asks = min(self.kill_at, first.kill_at), self.asks and first.asks
        return first if (kill_at, asks) == (first.kill_at, first.asks) else first._replace(kill_at=kill_at, asks=asks)

    def capped(self, now: float) -> StopRequest:
        """Return the request with at most its grace period left."""
        return self._replace(kill_at=min(self.kill_at, now + self.grace_s))


class Freeze(NamedTuple):
    """Content of ``freeze.json``: what is, or was, under way to hold the job's processes still off its GPUs.

    Attributes:
        phase: "freezing"; "frozen"; "thawing"; "failed" = its processes go on, and that is still to be told.
        revision: Of the command that asked for it.
        gpu_ids: The GPUs that its device memory was, or is, on; position = share index.
        pids: Its processes with memory there, each with its start time in clock ticks.
        memory_bytes: Host memory that this takes.
        reason: Why it failed.
        target: The revision and the shares (GPU, bytes, compute) with which it is to go on, once that is known.
        again: It was cut short, and may be tried again.
    """

    phase: Literal["freezing", "frozen", "thawing", "failed"]
    revision: int
    gpu_ids: Sequence[str]
    pids: Sequence[Sequence[int]] = ()
    memory_bytes: int = 0
    reason: str = ""
    target: tuple[int, Sequence[tuple[str, int, float]]] | None = None
    again: bool = False


def read_freeze(job_dir: Path) -> Freeze | None:
    """Return what there is of freezing the job; None when its processes run as any.

    Raises:
        OSError, ValueError, TypeError: It cannot be read, or is damaged.
    """
    content = runner.read_json(str(job_dir / FREEZE))
    if content is None:
        return None
    said = Freeze(**content)
    target = said.target and (int(said.target[0]), [(str(g), int(m), float(c)) for g, m, c in said.target[1]])
    if said.phase not in ("freezing", "frozen", "thawing", "failed") or (said.phase == "thawing" and not target):
        raise ValueError(f"{FREEZE}: phase {said.phase!r} with target {target} is not accepted")
    pids = [(int(pid), int(ticks)) for pid, ticks in said.pids]
    return said._replace(gpu_ids=list(map(str, said.gpu_ids)), revision=int(said.revision), pids=pids, target=target)


def write_freeze(job_dir: Path, freeze: Freeze | None) -> None:
    """Write down how far freezing the job is; None = nothing of it is left."""
    if freeze is None:
        (job_dir / FREEZE).unlink(missing_ok=True)
    else:
        runner.write_json(str(job_dir / FREEZE), freeze._asdict())


def move_launch(job_dir: Path, gpu_ids: Sequence[str]) -> None:
    """Write down that the job has its shares on other GPUs now; position = share index."""
    runner.write_json(str(job_dir / runner.LAUNCH), {**read_launch(job_dir), "gpu_ids": list(gpu_ids)})


def load_job_dirs(run_dir: Path) -> list[Path]:
    """Return the directories of jobs. What a launch cut short has left behind is removed: it never ran."""
    found = []
    for entry in sorted(run_dir.iterdir()):
        if not entry.is_dir() or not _JOB_DIR.fullmatch(entry.name):
            continue
        if (entry / runner.LAUNCH).exists():
            found.append(entry)
        else:
            shutil.rmtree(entry, ignore_errors=True)  # one that cannot be removed must not keep the host down
    return found


def key_of(job_dir: Path) -> tuple[str, int]:
    """Return the job id and the epoch that a job directory's name says."""
    job_id, _, epoch = job_dir.name.rpartition(".")
    return job_id, int(epoch)


def read_launch(job_dir: Path) -> Launch:
    """Return what was launched.

    Raises:
        FileNotFoundError: The job directory is gone.
    """
    content = runner.read_json(str(job_dir / runner.LAUNCH))
    if content is None:
        raise FileNotFoundError(job_dir / runner.LAUNCH)
    return cast(Launch, content)


def read_supervisor(job_dir: Path) -> runner.Process | None:
    """Return the supervisor, alive or not; None while there is none yet."""
    content = runner.read_json(str(job_dir / runner.RUNNER))
    if content is None:
        return None
    return runner.Process(content["pid"], 0, content["pid"], "?", content["start_ticks"])


def is_alive(process: runner.Process) -> bool:
    """True while the process has not ended."""
    now = runner.process(process.pid)
    return now is not None and now.start_ticks == process.start_ticks and now.state not in "ZX"


def read_stop(job_dir: Path) -> StopRequest | None:
    """Return the request to stop the job, None when there is none."""
    content = runner.read_json(str(job_dir / runner.STOP))
    return None if content is None else StopRequest(**content)


def write_stop(job_dir: Path, request: StopRequest) -> None:
    """Write down that the job shall stop; the supervisor reads it when it is signalled."""
    runner.write_json(str(job_dir / runner.STOP), request._asdict())


def open_renewal(path: Path) -> mmap.mmap:
    """Map the file that says until when the leases of this host hold; make it when it is not there."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, runner.RENEWAL_LAYOUT.size)
        return mmap.mmap(descriptor, runner.RENEWAL_LAYOUT.size)
    finally:
        os.close(descriptor)


def attached(job_dir: Path, *, started_only: bool = False) -> list[runner.Process]:
    """Return the living processes that attached themselves to the job.

    Args:
        job_dir: The job's directory.
        started_only: Without those that are only guests of the job and go on when it has ended.
    """
    found = []
    for marker in job_dir.glob(f"{ATTACH_PREFIX}*"):
        pid = marker.name.removeprefix(ATTACH_PREFIX)
        if not pid.isdecimal():
            continue  # being written
        try:
            ticks, kind = marker.read_text(encoding="ascii").split()
            started = int(ticks)
        except (FileNotFoundError, ValueError):
            continue  # detached meanwhile, or damaged
        process = runner.process(pid)
        if process is None or process.start_ticks != started or process.state in "ZX":
            continue
        if kind == STARTED or not started_only:
            found.append(process)
    return found


def left_behind(job_dir: Path, supervisor: runner.Process | None) -> list[runner.Process]:
    """Return the processes of a command job whose supervisor was killed: by session, and by their environment."""
    mark = f"COTENANT_JOB_DIR={job_dir}".encode()
    found = []
    for process in runner.process_table():
        if process.pid == os.getpid() or process.state in "ZX":
            continue
        same_session = supervisor is not None and process.session == supervisor.pid
        if same_session or mark in _environment(process.pid):
            found.append(process)
    return found


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []  # it has ended, or it is another user's


# -- output ---------------------------------------------------------------------------------------------------------


def kept_output(run_dir: Path, job_id: str, epoch: int) -> Path:
    """Where the output of a released job is kept."""
    return run_dir / OUTPUTS / f"{job_id}.{epoch}.log"


def kept_epochs(run_dir: Path) -> dict[str, int]:
    """Return the newest released epoch of each job whose output is still kept."""
    newest: dict[str, int] = {}
    for entry in (run_dir / OUTPUTS).iterdir():
        match = _KEPT.fullmatch(entry.name)
        if match:
            newest[match[1]] = max(int(match[2]), newest.get(match[1], 0))
    return newest


def open_output(path: Path) -> BinaryIO | None:
    """Open a job's output; None when there is none."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def read_piece(file: BinaryIO, offset: int, limit: int) -> tuple[bytes, bool]:
    """Return up to ``limit`` bytes from ``offset`` on, and whether there were no more; closes the file."""
    with file:
        size = os.fstat(file.fileno()).st_size
        file.seek(min(offset, size))  # file systems refuse offsets far beyond any file
        data = file.read(max(0, min(limit, size - offset)))  # Python makes room for all that is asked for
    return data, offset + len(data) >= size


def retire(job_dir: Path, keep: Path) -> None:
    """Remove a job's directory, but keep its output (an empty file when it has none)."""
    output = job_dir / runner.OUTPUT
    if output.exists():
        output.rename(keep)
    keep.touch(mode=0o600)  # its time of change is now the time of release
    (job_dir / runner.LAUNCH).unlink(missing_ok=True)  # from here on a restart takes it for a leftover
    shutil.rmtree(job_dir, ignore_errors=True)  # a guest process may be writing its report; the next restart removes it


def delete_older(run_dir: Path, before: float) -> None:
    """Delete kept output of jobs that were released before a time (Unix seconds); what cannot be deleted stays."""
    for entry in list((run_dir / OUTPUTS).iterdir()):
        with suppress(OSError):
            if entry.lstat().st_mtime < before:
                entry.unlink()
