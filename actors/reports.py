"""What a job's own shim says about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobReport:
    """One job's reports on this host, folded over its reporting processes. None = no process says.

    Attributes:
        steps: Optimizer steps since the job started, a counter.
        throttled_s: Seconds the job was held back by its own share since it started, a counter.
        last_step_age_s: Seconds between the job's last step and the moment this report was read.
        controls: What holds the job's share and what cannot be held, in words.
        processes: Number of processes that report.
    """

    steps: int | None
    throttled_s: float | None
    last_step_age_s: float | None
    controls: str
    processes: int
