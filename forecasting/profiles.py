"""What jobs do alone on a GPU, learnt per job and per fingerprint."""

from __future__ import annotations

from cotenant.forecasting.types import DemandProfile, Signature


class ProfileBook:
    """Learns a ``DemandProfile`` per job and per fingerprint from measured windows. Bounded, serialisable."""

    def __init__(self, max_jobs: int = 20_000, max_fingerprints: int = 20_000) -> None:
        self.max_jobs = max_jobs
        self.max_fingerprints = max_fingerprints

    def observe(self, signature: Signature, fingerprint: str) -> None:
        """Take in one window. Absurd or empty windows are ignored."""
        raise NotImplementedError

    def profile(self, job_id: str, fingerprint: str) -> DemandProfile:
        """Return what the job would do alone: its own measurements, else its fingerprint's, else unknown."""
        raise NotImplementedError

    def forget(self, job_id: str) -> None:
        """Drop what was kept for a job that ended; its fingerprint keeps what was learnt."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return everything learnt as JSON."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str) -> ProfileBook:
        """Return the book that ``to_json`` wrote.

        Raises:
            ValueError: The text is not such a book.
        """
        raise NotImplementedError


def from_hints(compute: float | None, memory: int | None) -> DemandProfile:
    """Return the profile that hints alone give; unknown (worst case) where the submitter said nothing.

    Args:
        compute: Compute hint in (0, 1] or None.
        memory: Memory hint in bytes or None.
    """
    known = compute is not None and memory is not None
    util = 1.0 if compute is None else compute
    return DemandProfile(util_mean=util, util_p95=util, memory_bytes=memory, source="hints" if known else "unknown")
