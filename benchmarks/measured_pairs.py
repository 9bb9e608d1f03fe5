"""Measured pairs as something to place: job profiles, and a predictor that says what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cotenant.forecasting.datasets.colocation import load_colocation
from cotenant.forecasting.types import DemandProfile, ThroughputPrediction
from cotenant.scheduler.simulation.tables import load_pairs, utilisations
from cotenant.scheduler.simulation.traces import load as load_trace

GPU_TYPE = "cpu-core"
MODE = "timeslice"


@dataclass(frozen=True, slots=True)
class MeasuredPairs:
    """What was measured of every pair; larger sets by the product over the pairs.

    Attributes:
        profiles: The jobs, by name.
        measured: Normalised throughput (at most 1) of a job beside another.
    """

    profiles: dict[str, DemandProfile]
    measured: dict[tuple[str, str], float]
    name: str = "measured pairs"

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> list[ThroughputPrediction]:
        """See ``InterferencePredictor.predict``."""
        found = []
        for row, member in enumerate(members):
            others = (other for column, other in enumerate(members) if column != row)
            n = math.prod(self.measured[member.fingerprint, other.fingerprint] for other in others)
            found.append(ThroughputPrediction(n, n, n, "measured"))
        return found


def load(source: str = "cpu") -> MeasuredPairs:
    """Read a shipped data set: the members of its complete matrix of pairs under plain sharing."""
    tables = load_colocation(source)
    rows = tables.pairs[(tables.pairs["mode"] == MODE) & (tables.pairs["size"] == 2)]
    measured = {
        (str(row.member), str(row.others)): min(1.0, float(row.throughput))
        for row in rows.itertuples()
        if row.gpu_type == GPU_TYPE and not math.isnan(float(row.throughput))
    }
    solo = tables.solo[(tables.solo["mode"] == MODE) & (tables.solo["gpu_type"] == GPU_TYPE)]
    profiles = {
        str(row.member): DemandProfile(
            util_mean=min(1.0, float(row.util_mean)),
            util_p95=min(1.0, float(row.util_mean)),
            memory_bytes=int(row.memory_bytes),
            observed_s=60.0,
            source="history",
            fingerprint=str(row.member),
        )
        for row in solo.itertuples()
    }
    names = [name for name in sorted(profiles) if (name, name) in measured]
    complete = [name for name in names if all((name, other) in measured for other in names)]
    return MeasuredPairs({name: profiles[name] for name in complete}, measured)


def lucid(data: Path) -> MeasuredPairs:
    """Read the pairs of the Philly week's workloads on an RTX 3090: measured by Lucid's authors, or fitted to that.

    Args:
        data: Folder with traces/.
    """
    folder = data / "traces" / "peer_runs"
    week = load_trace(folder / "philly_week.csv.gz")
    used = utilisations(week)
    memory = {job.workload: job.memory_bytes for job in week.jobs}
    profiles = {
        name: DemandProfile(util, util, memory[name], observed_s=60.0, source="history", fingerprint=name)
        for name, util in used.items()
    }
    return MeasuredPairs(profiles, load_pairs(folder / "pair_truth.csv.gz"))
