"""The CUDA driver's checkpoint calls on processes: ``python -m cotenant.actors.enforcement.checkpoint WHAT PID…``.

WHAT is ``probe`` (are the calls there, is the driver new enough), ``checkpoint`` (lock all, then move the device memory
of each to the host) or ``resume`` (restore and unlock, each from wherever it is; further arguments OLD=NEW map GPU
UUIDs). Exit code 0, or 1
with one line on stderr. Run as a program of its own; see ``pausing.CheckpointPause``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from cotenant.actors import runner

LOCK_TIMEOUT_MS = 10_000
GPU_S = 5.0  # for one GPU to say which it is
ASKED_BY = "COTENANT_ASKED_BY"  # in the environment: the process that wants to know how it ends
LEAST_CUDA = 12080  # of the driver, as NVML tells it
_PR_SET_PDEATHSIG = 1


def _driver() -> Any:
    try:
        from cuda.core import checkpoint  # noqa: PLC0415 - only where it is used
    except ImportError as error:
        raise RuntimeError(f"cuda-core is not installed here ({error}): pip install 'cuda-core>=1.0'") from error
    return checkpoint


def probe() -> None:
    """Find out whether processes can be checkpointed here.

    Raises:
        RuntimeError: They cannot.
    """
    _driver()
    with _nvml() as library:
        version = library and library.call("nvmlSystemGetCudaDriverVersion")
    if version and version < LEAST_CUDA:
        raise RuntimeError(f"the driver is of CUDA {version // 1000}.{version % 1000 // 10}; 12.8 and later can do it")


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML; None where there is none."""
    from cotenant.actors.devices.nvml.library import Library, NvmlUnavailable  # noqa: PLC0415 - only where it is used

    try:
        library = Library()
    except NvmlUnavailable:
        yield None
        return
    yield library
    library.close()


def of_all_gpus(gpu_mapping: Mapping[str, str]) -> dict[str, str]:
    """Return a mapping as the driver wants it: of every GPU that its kernel part has, whoever may use it, and UUIDs
    without the prefix that NVML gives them.
    """
    with _nvml() as library:
        known = [] if library is None else _uuids(library)
    complete = {uuid: uuid for uuid in known} | dict(gpu_mapping)
    return {old.removeprefix("GPU-"): new.removeprefix("GPU-") for old, new in complete.items()}


def _uuids(library: Any) -> list[str]:
    """The GPUs that answer: one that is lost or hangs must not keep processes from going on on others."""
    from cotenant.actors.devices.nvml.library import NvmlFailure  # noqa: PLC0415 - only where it is used
    from cotenant.actors.devices.nvml.watchdog import Hung, call_within  # noqa: PLC0415

    def uuid(index: int) -> str:
        return str(library.call("nvmlDeviceGetUUID", library.call("nvmlDeviceGetHandleByIndex", index)))

    found = []
    for index in range(library.call("nvmlDeviceGetCount")):
        with suppress(NvmlFailure, Hung):
            found.append(call_within(GPU_S, f"GPU {index}", uuid, index))
    return found


def checkpoint_all(pids: Sequence[int]) -> None:
    """Free the GPU of these processes: all are locked before the first is moved, or one would wait for another."""
    processes = [_driver().Process(pid) for pid in pids]
    for process in processes:
        process.lock(timeout_ms=LOCK_TIMEOUT_MS)
    for process in processes:
        process.checkpoint()


def resume_all(pids: Sequence[int], gpu_mapping: Mapping[str, str]) -> None:
    """Bring processes back from wherever they are. Those that have ended need nothing.

    Raises:
        RuntimeError: The driver says that one of them is broken for good.
    """
    mapping = of_all_gpus(gpu_mapping) if gpu_mapping else None
    processes = [_driver().Process(pid) for pid in pids if _is_alive(pid)]
    for process in processes:
        if process.state == "failed":
            raise RuntimeError(f"process {process.pid} is broken: its checkpoint failed")
        if process.state == "checkpointed":
            process.restore(gpu_mapping=mapping)
    for process in processes:
        if process.state == "locked":
            process.unlock()


def _is_alive(pid: int) -> bool:
    now = runner.process(pid)
    return now is not None and now.state not in "ZX"


def _end_with(parent: int) -> None:
    """Have this process killed when the one that started it ends: whoever follows undoes what it finds, once."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the kernel knew


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say."""
    what, *rest = arguments
    mapping = dict(word.split("=", 1) for word in rest if "=" in word)
    pids = [int(word) for word in rest if "=" not in word]
    try:
        if what == "probe":
            probe()
        elif what == "checkpoint":
            checkpoint_all(pids)
        elif what == "resume":
            resume_all(pids, mapping)
        else:
            raise ValueError(f"{what!r} is not accepted; give probe, checkpoint or resume")
    except Exception as error:  # noqa: BLE001 - whatever the driver raises is told in one line
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 1
    return 0


if __name__ == "__main__":
    if ASKED_BY in os.environ:
        _end_with(int(os.environ[ASKED_BY]))
    sys.exit(main(sys.argv[1:]))
