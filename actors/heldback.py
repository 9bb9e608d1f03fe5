"""Notices at once, and not when their window ends, that jobs begin to be held back by their shares."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from cotenant.actors.shim.reportfile import PREFIX, ThrottleReader

LOOK_S = 0.25  # what is looked back at: samples come ten times a second
LEAST_FRACTION = 0.2  # of that; less can wait for the end of the window
AGAIN_S = 1.0  # a job is told of at most so often
LIST_S = 1.0  # its processes are looked for so often


class HeldBackWatch:
    """Follows the jobs that share a GPU. A job is named when it begins to be held back, and not while that lasts."""

    def __init__(self) -> None:
        self._gauges: dict[str, _Gauge] = {}

    def look(self, now_s: float, jobs: Mapping[str, Path]) -> dict[str, float]:
        """Look at the reports of these jobs, and forget all others.

        Args:
            now_s: The monotonic clock.
            jobs: Directory by job id, of the jobs that have less than a whole GPU.

        Returns:
            For each job that has begun to be held back: for what fraction of the last moments, in (0, 1].
        """
        for job_id in [job_id for job_id, gauge in self._gauges.items() if jobs.get(job_id) != gauge.job_dir]:
            self._gauges.pop(job_id).close()
        begun: dict[str, float] = {}
        for job_id, job_dir in jobs.items():
            gauge = self._gauges.setdefault(job_id, _Gauge(job_dir))
            fraction = gauge.look(now_s)
            if fraction is not None:
                begun[job_id] = fraction
        return begun

    def close(self) -> None:
        """Close all files."""
        self.look(0.0, {})


class _Gauge:
    """What the processes of one job have told lately."""

    def __init__(self, job_dir: Path) -> None:
        self.job_dir = job_dir
        self._readers: dict[str, ThrottleReader] = {}
        self._listed_s = -math.inf
        self._seen: deque[tuple[float, float]] = deque()  # when, and the seconds held back up to then
        self._told_s = -math.inf
        self._lasts = False  # it is known that it is held back

    def look(self, now_s: float) -> float | None:
        """Return the fraction when being held back begins; None when it does not, or goes on."""
        if now_s >= self._listed_s + LIST_S:
            self._listed_s = now_s
            self._open_new()
        held_s = self._held_s()
        if self._seen and held_s < self._seen[-1][1]:
            self._seen.clear()  # a process has begun anew
        self._seen.append((now_s, held_s))
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - LOOK_S:
            self._seen.popleft()
        then_s, before_s = self._seen[0]
        if now_s - then_s < LOOK_S:
            return None
        fraction = min(1.0, (held_s - before_s) / (now_s - then_s))
        begins = fraction >= LEAST_FRACTION and not self._lasts
        self._lasts = fraction >= LEAST_FRACTION
        if not begins or now_s < self._told_s + AGAIN_S:
            return None
        self._told_s = now_s
        return fraction

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _held_s(self) -> float:
        """Seconds held back so far; processes on one share add up, as in ``JobReport``."""
        held: dict[int, float] = {}
        for reader in self._readers.values():
            told = reader.read()
            if told is not None:
                held[told[0]] = held.get(told[0], 0.0) + told[1]
        return max(held.values(), default=0.0)

    def _open_new(self) -> None:
        for path in self.job_dir.glob(f"{PREFIX}*"):
            if path.name not in self._readers:
                try:
                    self._readers[path.name] = ThrottleReader(str(path))
                except (OSError, ValueError):
                    continue  # not complete yet, or gone
