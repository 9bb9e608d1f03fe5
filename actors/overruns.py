"""Notices jobs that use more memory than their share for longer than a moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cotenant.forecasting.types import Signature
from cotenant.placement.types import Share

TOLERANCE = 0.05
TOLERANCE_BYTES = 16 << 20
PATIENCE_WINDOWS = 3


@dataclass(frozen=True, slots=True)
class Overrun:
    """What a job was seen to use. ``estimated``: all that is in use on its GPU, which others may have a part of."""

    used_bytes: int
    estimated: bool


class OverrunWatch:
    """Counts, per run of a job and GPU, the windows in a row that ended above the share."""

    def __init__(self) -> None:
        # By job, run and GPU, of each window above the share: is it an estimate?
        self._above: dict[tuple[str, int | None, str], list[bool]] = {}

    def observe(
        self, signatures: Sequence[Signature], shares: Mapping[str, Sequence[Share]], epochs: Mapping[str, int]
    ) -> dict[str, Overrun]:
        """Take in one window of every job; return what each job uses that has overrun its share.

        A job is named again only after ``PATIENCE_WINDOWS`` further windows above its share, so whoever is told has
        the time to do something about it. A window without a memory reading neither counts nor clears. An overrun is
        a fact only when all these windows are: one estimate among them makes it an estimate.

        Args:
            signatures: The windows.
            shares: By job, what it may use.
            epochs: By job, which run of it that is: one does not answer for what the one before it has used.
        """
        overrun: dict[str, Overrun] = {}
        seen = set()
        for signature in signatures:
            key = (signature.job_id, epochs.get(signature.job_id), signature.gpu_id)
            seen.add(key)
            granted = next((s for s in shares.get(signature.job_id, ()) if s.gpu_id == signature.gpu_id), None)
            if granted is None or signature.memory_bytes is None:
                continue
            limit = granted.memory_bytes + max(TOLERANCE_BYTES, TOLERANCE * granted.memory_bytes)
            if signature.memory_bytes <= limit:
                self._above.pop(key, None)
                continue
            windows = self._above.setdefault(key, [])
            windows.append(signature.memory_estimated)
            if len(windows) < PATIENCE_WINDOWS:
                continue
            found = Overrun(int(signature.memory_bytes), any(windows))
            windows.clear()
            told = overrun.get(signature.job_id)
            if told is None or told.estimated or not found.estimated:  # on another GPU: a fact comes first
                overrun[signature.job_id] = found
        for key in self._above.keys() - seen:
            del self._above[key]
        return overrun
