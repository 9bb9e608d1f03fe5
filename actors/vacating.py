"""Makes sure that the device memory of a job that has ended is free before anybody is told of its end.

What is told to have ended is replaced at once. A driver gives memory back a moment after the process is gone, and a
process that nobody has found may still hold some: the next job would meet it as an out-of-memory error of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cotenant.actors.devices.base import Sample

PATIENCE_S = 10.0
TOLERANCE = 0.05  # of what the job had
TOLERANCE_BYTES = 64 << 20

_Key = tuple[str, int]


class Vacating:
    """Knows, per GPU, how much memory is nobody's while jobs run, and waits until it is no more than that again."""

    def __init__(self) -> None:
        self._nobodys: dict[str, float] = {}  # by GPU, as last seen while every job on it was measured
        self._used: dict[tuple[str, str], float] = {}  # by job and GPU, as last measured
        self._left: dict[str, float] = {}  # by GPU: in use now by no job that is measured
        self._waiting: dict[_Key, tuple[float, frozenset[str]]] = {}  # since when, for which GPUs

    def see(self, sample: Sample, moving: Collection[str] = ()) -> None:
        """Take in a sample; what the jobs that are moving off their GPUs still have there counts as nobody's."""
        owned: dict[str, float] = {}
        jobs = [job for job in sample.jobs if job.job_id not in moving]
        stays = {job.job_id for job in jobs if job.memory_bytes}  # its freeze was given up: when it ends, it waits anew
        self._waiting = {key: wait for key, wait in self._waiting.items() if key[0] not in stays}
        present = {(job.job_id, job.gpu_id) for job in jobs}
        unknown = {gpu_id for job_id, gpu_id in self._used if (job_id, gpu_id) not in present}
        for job in jobs:
            if job.memory_bytes is None:
                unknown.add(job.gpu_id)
            else:
                owned[job.gpu_id] = owned.get(job.gpu_id, 0.0) + job.memory_bytes
                self._used[job.job_id, job.gpu_id] = job.memory_bytes
        vacating = {gpu_id for _, gpu_ids in self._waiting.values() for gpu_id in gpu_ids}
        self._left = {}
        for device in sample.devices:
            if device.memory_bytes is None:
                continue
            left = max(0.0, device.memory_bytes - owned.get(device.gpu_id, 0.0))
            self._left[device.gpu_id] = left
            if device.gpu_id not in unknown | vacating:
                self._nobodys[device.gpu_id] = left

    def wait(self, job_id: str, epoch: int, gpu_ids: Iterable[str], now: float) -> str | None:
        """Say whether the end of a job may be told; to be asked again until it may.

        Args:
            job_id: A job none of whose processes is left, or has memory there.
            epoch: Epoch of its lease.
            gpu_ids: Its GPUs on this host.
            now: Monotonic seconds.

        Returns:
            None: not yet. Otherwise what is worth knowing; empty when all its memory is free, or nobody can tell.
        """
        since, waited = self._waiting.setdefault((job_id, epoch), (now, frozenset(gpu_ids)))
        held = [text for gpu_id in sorted(waited) if (text := self._held(job_id, gpu_id))]
        if held and now - since < PATIENCE_S:
            return None
        del self._waiting[job_id, epoch]
        for gpu_id in waited:
            self._used.pop((job_id, gpu_id), None)
        return "; ".join(held)

    def _held(self, job_id: str, gpu_id: str) -> str:
        used, left, usual = self._used.get((job_id, gpu_id)), self._left.get(gpu_id), self._nobodys.get(gpu_id)
        if used is None or left is None or usual is None:
            return ""  # it was never measured, or the device does not say
        excess = left - usual
        if excess <= max(TOLERANCE_BYTES, TOLERANCE * used):
            return ""
        return f"{excess / (1 << 20):.0f} MiB of {gpu_id} are still in use {PATIENCE_S:g} s after job {job_id} left it"
