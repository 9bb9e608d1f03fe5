"""How long a job's processes have been held still: written by the host agent, read by the shim. Standard library only.

What a process does by the clock (the length of a step, how long it was held back) does not know that it stood still
meanwhile. The file ``still`` in the job directory says for how long it did, and since when it does.
"""

from __future__ import annotations

import os

STILL = "still"


def begin(job_dir: str, now: float) -> None:
    """From now on (``time.monotonic()``) the job's processes are held still.

    Raises:
        OSError: It cannot be written down.
    """
    total_s, since = _read(job_dir)
    if since is None:
        _write(job_dir, f"{total_s!r} {now!r}")


def end(job_dir: str, now: float) -> None:
    """They go on.

    Raises:
        OSError: It cannot be written down.
    """
    total_s, since = _read(job_dir)
    if since is not None:
        _write(job_dir, repr(total_s + max(0.0, now - since)))


def held_still_s(job_dir: str, now: float) -> float:
    """Return for how many seconds they have been held still, as of now."""
    total_s, since = _read(job_dir)
    return total_s if since is None else total_s + max(0.0, now - since)


def _read(job_dir: str) -> tuple[float, float | None]:
    try:
        with open(f"{job_dir}/{STILL}", encoding="ascii") as file:
            total_s, *since = map(float, file.read().split())
    except (OSError, ValueError):
        return 0.0, None  # never, as far as is known
    return total_s, since[0] if since else None


def _write(job_dir: str, text: str) -> None:
    fresh = f"{job_dir}/{STILL}.{os.getpid()}"
    with open(fresh, "w", encoding="ascii") as file:
        file.write(text)
    os.replace(fresh, f"{job_dir}/{STILL}")  # readers see it complete or not at all
