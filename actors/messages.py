"""What the actors say to each other. One message per host per second, whatever the number of jobs."""

from __future__ import annotations

from dataclasses import dataclass, field

from cotenant.actors.devices.base import DeviceSample
from cotenant.forecasting.types import DemandProfile, Signature
from cotenant.forecasting.versions import restorable
from cotenant.scheduler.core.events import Event
from cotenant.scheduler.core.model import Host
from cotenant.scheduler.core.reconcile import InventoryItem


@dataclass(frozen=True, slots=True)
class HostReport:
    """A host agent's message to the scheduler.

    Attributes:
        host: The host and its GPUs.
        inventory: Every job the agent holds, running or ended and not yet released.
        events: What happened since the last acknowledged report (starts, exits, overruns), in order.
        claim: How the GPUs are held in Ray's own accounting, in words.
        note: Anything an administrator should know about the host.
        controls: Per job, what holds its share and what cannot be held, in words.
        number: Grows with every report of the host, over restarts of its agent: tells an old report that comes late.
        no_freezing: Why the driver can freeze no job on the host, in words; empty = it can; None = not known yet.
    """

    host: Host
    inventory: tuple[InventoryItem, ...]
    events: tuple[Event, ...]
    claim: str
    note: str
    controls: dict[str, str]
    number: int = 0
    no_freezing: str | None = None


@restorable
@dataclass(frozen=True, slots=True)
class WindowBatch:
    """A host agent's message to the PRM: all windows of one second.

    Attributes:
        host_id: The host.
        at: Unix seconds at the end of the window.
        signatures: One per running job and GPU.
        fingerprints: Fingerprint of every job in ``signatures``.
        devices: The last reading of every GPU of the host.
        gpu_types: Type of every GPU of the host.
        families: Model family of those jobs that name one.
        foreseen: What the host's samples let foresee, by job and GPU; absent where too little is known (``Likeness``).
        planned: What those jobs were placed with: their hints, cold-start class or earlier runs.
    """

    host_id: str
    at: float
    signatures: tuple[Signature, ...]
    fingerprints: dict[str, str]
    devices: tuple[DeviceSample, ...]
    gpu_types: dict[str, str] = field(default_factory=dict)
    families: dict[str, str] = field(default_factory=dict)
    foreseen: dict[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    planned: dict[str, DemandProfile] = field(default_factory=dict)
