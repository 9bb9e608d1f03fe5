"""Baseline policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cotenant.scheduler.simulation.desk import BaselinePolicy
from cotenant.scheduler.simulation.policies.queueing import Fifo, Qssf, Sjf, Srtf, Tiresias

POLICIES: Mapping[str, Callable[[], BaselinePolicy]] = {p.name: p for p in (Fifo, Sjf, Qssf, Srtf, Tiresias)}
