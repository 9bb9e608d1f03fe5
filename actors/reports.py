"""What a job's own shim says about it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cotenant.forecasting.types import DemandProfile, OperatorMix


@dataclass(frozen=True, slots=True)
class RecentSteps:
    """The last steps of one process of a job.

    Attributes:
        pid: The process.
        steps: Its steps so far.
        seconds: How long the last of them took, the newest last; not all steps are there.
    """

    pid: int
    steps: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Descriptors:
    """What a job says of itself in its hints, None = it does not; and what it was placed with."""

    batch_size: int | None = None
    framework: str | None = None
    family: str | None = None  # the model's; its architecture where that is all it says
    planned: DemandProfile | None = None


NO_HINTS = Descriptors()


@dataclass(frozen=True, slots=True)
class JobReport:
    """One job's reports on this host, folded over its reporting processes. None = no process says.

    Attributes:
        steps: Optimizer steps since the job started, a counter.
        throttled_s: Seconds the job was held back by its own share since it started, a counter.
        last_step_age_s: Seconds between the job's last step and the moment this report was read.
        controls: What holds the job's share and what cannot be held, in words.
        processes: Number of processes that report.
        recent: The last steps of the processes whose steps are counted.
        mix: Classes of operators, as last measured.
        batch_size: Samples per step, as observed with the mix.
        framework: "torch" once a process reports.
    """

    steps: int | None
    throttled_s: float | None
    last_step_age_s: float | None
    controls: str
    processes: int
    recent: tuple[RecentSteps, ...] = ()
    mix: OperatorMix | None = None
    batch_size: int | None = None
    framework: str | None = None

    def since(self, began_s: float, now_s: float) -> JobReport:
        """Return it without the age of a last step that was before the job went on, having been held still."""
        age_s = self.last_step_age_s
        return self if age_s is None or now_s - age_s >= began_s else replace(self, last_step_age_s=None)
