"""Notices jobs that use more memory than their share for longer than a moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cotenant.forecasting.types import Signature
from cotenant.placement.types import Share

TOLERANCE = 0.05
TOLERANCE_BYTES = 16 << 20
PATIENCE_WINDOWS = 3


class OverrunWatch:
    """Counts, per job and GPU, the windows in a row that ended above the share."""

    def __init__(self) -> None:
        self._windows: dict[tuple[str, str], int] = {}

    def observe(self, signatures: Sequence[Signature], shares: Mapping[str, Sequence[Share]]) -> dict[str, int]:
        """Take in one window of every job; return the bytes used by each job that has overrun its share.

        A job is named again only after ``PATIENCE_WINDOWS`` further windows above its share, so whoever is told has
        the time to do something about it. A window without a memory reading neither counts nor clears.
        """
        overrun: dict[str, int] = {}
        seen = set()
        for signature in signatures:
            key = (signature.job_id, signature.gpu_id)
            seen.add(key)
            granted = next((s for s in shares.get(signature.job_id, ()) if s.gpu_id == signature.gpu_id), None)
            if granted is None or signature.memory_bytes is None:
                continue
            limit = granted.memory_bytes + max(TOLERANCE_BYTES, TOLERANCE * granted.memory_bytes)
            self._windows[key] = self._windows.get(key, 0) + 1 if signature.memory_bytes > limit else 0
            if self._windows[key] >= PATIENCE_WINDOWS:
                self._windows[key] = 0
                overrun[signature.job_id] = int(signature.memory_bytes)
        for key in self._windows.keys() - seen:
            del self._windows[key]
        return overrun
