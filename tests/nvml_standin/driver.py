"""A stand-in for ``cuda.core.checkpoint`` whose checkpoints really move memory on and off the stand-in for NVML.

``fake_driver`` puts it where programs import it; it needs nothing but the standard library. What is on the GPUs is in
the state file of the stand-in for NVML; what state a process is in, and which calls fail or hang, in the folder that
``DRIVER_NOTES`` names.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_PROCESS = re.compile(r"process (\d+) pid=(\d+) memory=(\d+)")


def _notes() -> Path:
    return Path(os.environ["DRIVER_NOTES"])


@contextmanager
def _hardware() -> Iterator[list[str]]:
    """The lines of the state file, to be changed in place by one process at a time."""
    state = Path(os.environ["NVML_STANDIN_STATE"])
    with (_notes() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = state.read_text().splitlines()
        yield lines
        fresh = state.with_suffix(f".{os.getpid()}")
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(state)


def uuids() -> list[str]:
    """The GPUs."""
    with _hardware() as lines:
        return [line.split("uuid=")[1].split()[0] for line in lines if line.startswith("gpu ")]


def _use(lines: list[str], gpu: int, grows: int) -> None:
    at = next(i for i, line in enumerate(lines) if line.startswith(f"gpu {gpu} "))
    used = int(re.search(r" used=(\d+)", lines[at])[1]) if " used=" in lines[at] else 0
    lines[at] = re.sub(r" used=\d+", "", lines[at]) + f" used={used + grows}"


def allocate(uuid: str, memory: int, pid: int | None = None) -> None:
    """Have a process (this one) hold so many bytes of a GPU."""
    with _hardware() as lines:
        gpu = next(i for i in range(8) if any(re.match(rf"gpu {i} .*uuid={uuid}\b", line) for line in lines))
        lines.append(f"process {gpu} pid={os.getpid() if pid is None else pid} memory={memory}")
        _use(lines, gpu, memory)


def release(pid: int) -> list[tuple[int, int]]:
    """Take a process off all GPUs; returns which and the bytes."""
    found = []
    with _hardware() as lines:
        for line in list(lines):
            match = _PROCESS.match(line)
            if match and int(match[2]) == pid:
                lines.remove(line)
                found.append((int(match[1]), int(match[3])))
                _use(lines, int(match[1]), -int(match[3]))
    return found


def sweep() -> None:
    """Take processes that have ended off the GPUs, as a driver does."""
    with _hardware() as lines:
        pids = {int(match[2]) for line in lines if (match := _PROCESS.match(line))}
    for pid in pids:
        if not _is_alive(pid):
            release(pid)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Process:
    """As ``cuda.core.checkpoint.Process``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._file = _notes() / str(pid)

    @property
    def state(self) -> str:
        if not _is_alive(self.pid):
            raise RuntimeError(f"CUDA_ERROR_INVALID_VALUE: no process {self.pid}")
        return json.loads(self._file.read_text())[0] if self._file.exists() else "running"

    def lock(self, timeout_ms: int = 0) -> None:
        assert timeout_ms > 0
        self._do("lock", "running")
        self._become("locked", [])

    def checkpoint(self) -> None:
        self._do("checkpoint", "locked")
        kept = (_notes() / "keeps").exists()
        self._become("checkpointed", [] if kept else release(self.pid))

    def restore(self, gpu_mapping: Mapping[str, str] | None = None) -> None:
        self._do("restore", "checkpointed")
        gpus = [uuid.removeprefix("GPU-") for uuid in uuids()]
        if gpu_mapping is not None:  # of all GPUs, and without the prefix of NVML
            assert sorted(gpu_mapping) == sorted(gpu_mapping.values()) == sorted(gpus), gpu_mapping
        for gpu, memory in json.loads(self._file.read_text())[1]:
            allocate(f"GPU-{(gpu_mapping or {}).get(gpus[gpu], gpus[gpu])}", memory, self.pid)
        self._become("locked", [])

    def unlock(self) -> None:
        self._do("unlock", "locked")
        self._become("running", [])

    def _do(self, what: str, before: str) -> None:
        with (_notes() / "calls").open("a") as file:
            file.write(f"{what}\n")
        if (_notes() / f"fails-{what}").exists():
            raise RuntimeError(f"CUDA_ERROR_NOT_SUPPORTED: {what}")
        while (_notes() / f"hangs-{what}").exists():
            time.sleep(0.01)
        assert self.state == before, (what, self.state)

    def _become(self, state: str, memory: list[tuple[int, int]]) -> None:
        self._file.write_text(json.dumps([state, memory]))
