"""Baseline policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cotenant.scheduler.simulation.desk import BaselinePolicy
from cotenant.scheduler.simulation.policies.gavel import Gavel
from cotenant.scheduler.simulation.policies.packing import BestFit, FirstFit, Lucid, Static, Threshold
from cotenant.scheduler.simulation.policies.queueing import Fifo, Qssf, Sjf, Srtf, Tiresias

POLICIES: Mapping[str, Callable[[], BaselinePolicy]] = {
    "fifo": Fifo,
    "sjf": Sjf,
    "qssf": Qssf,
    "srtf": Srtf,
    "tiresias": Tiresias,
    "static": Static,
    "first-fit": FirstFit,
    "best-fit": BestFit,
    "threshold": Threshold,
    "lucid": Lucid,
    "gavel": Gavel,
}
