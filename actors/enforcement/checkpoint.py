"""The CUDA driver's checkpoint calls on processes: ``python -m cotenant.actors.enforcement.checkpoint WHAT PID…``.

WHAT is ``probe`` (are the calls there), ``checkpoint`` (lock all, then move the device memory of each to the host) or
``resume`` (restore and unlock, each from wherever it is; further arguments OLD=NEW map GPU UUIDs). Exit code 0, or 1
with one line on stderr. Run as a program of its own; see ``pausing.CheckpointPause``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

LOCK_TIMEOUT_MS = 10_000


def _driver() -> Any:
    try:
        from cuda.core import checkpoint  # noqa: PLC0415 - only where it is used
    except ImportError as error:
        raise RuntimeError(f"cuda-core is not installed here ({error}): pip install 'cuda-core>=1.0'") from error
    return checkpoint


def checkpoint_all(pids: Sequence[int]) -> None:
    """Free the GPU of these processes: all are locked before the first is moved, or one would wait for another."""
    processes = [_driver().Process(pid) for pid in pids]
    for process in processes:
        process.lock(timeout_ms=LOCK_TIMEOUT_MS)
    for process in processes:
        process.checkpoint()


def resume_all(pids: Sequence[int], gpu_mapping: Mapping[str, str]) -> None:
    """Bring processes back from wherever they are.

    Raises:
        RuntimeError: The driver says that one of them is broken for good.
    """
    processes = [_driver().Process(pid) for pid in pids]
    for process in processes:
        if process.state == "failed":
            raise RuntimeError(f"process {process.pid} is broken: its checkpoint failed")
        if process.state == "checkpointed":
            process.restore(gpu_mapping=dict(gpu_mapping) or None)
    for process in processes:
        if process.state == "locked":
            process.unlock()


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say."""
    what, *rest = arguments
    mapping = dict(word.split("=", 1) for word in rest if "=" in word)
    pids = [int(word) for word in rest if "=" not in word]
    try:
        if what == "probe":
            _driver()
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
    sys.exit(main(sys.argv[1:]))
