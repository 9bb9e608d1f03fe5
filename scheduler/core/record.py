"""What is written down of a state, as JSON; everything else in it follows from this."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pydantic import ConfigDict, TypeAdapter

from cotenant.configs.settings import Settings
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.types import DemandProfile
from cotenant.placement.mix import Counts
from cotenant.placement.resize import ResizeMemory
from cotenant.scheduler.core.accounts import Kind
from cotenant.scheduler.core.model import Gpu, Host, Job, Outgrown, Progress, Reservation
from cotenant.scheduler.core.moves import Moves
from cotenant.scheduler.core.snapshot import Told, Usage

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Record:
    """The part of a state that is written down; the indices follow from it."""

    schema_version: int
    configured: Settings
    settings: Settings
    now: float
    cycle: int
    next_seq: int
    jobs: tuple[Job, ...]
    hosts: tuple[Host, ...]
    gpus: tuple[Gpu, ...]
    profiles: dict[str, DemandProfile]
    usage: dict[str, dict[str, Usage]]
    resize_memory: dict[str, ResizeMemory]
    reported_at: dict[str, float]
    ignored: dict[str, int]
    overlooked: dict[str, int]
    told: tuple[Told, ...] = ()
    changed_gpus: tuple[str, ...] = ()
    model_versions: dict[str, str] = field(default_factory=dict)
    evidence: tuple[Observation, ...] = ()
    gathered: tuple[tuple[Observation, bool], ...] = ()
    evidence_at: float = -math.inf
    accounts: dict[Kind, dict[str, tuple[float, float]]] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    reservation: Reservation | None = None
    deadlines_seen_at: float = 0.0
    typed_profiles: dict[str, dict[str, DemandProfile]] = field(default_factory=dict)
    moves: Moves = field(default_factory=Moves)
    mix: Counts = field(default_factory=Counts)
    outgrown: dict[str, Outgrown] = field(default_factory=dict)
    gone: dict[str, Host] = field(default_factory=dict)


# The one-element tuple carries the configuration, which a bare dataclass cannot: infinities survive the round trip.
_ADAPTER = TypeAdapter(tuple[Record], config=ConfigDict(ser_json_inf_nan="constants"))


def write(record: Record) -> bytes:
    """Return the record as JSON; equal records give equal bytes."""
    return _ADAPTER.dump_json((record,))


def read(text: bytes) -> Record:
    """Return the record that was written.

    Raises:
        ValueError: The text is no such record (pydantic's message says where).
    """
    (record,) = _ADAPTER.validate_json(text)
    return record
