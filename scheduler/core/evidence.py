"""What was measured of jobs that share GPUs, as it is told to the core and as it is taken back."""

from __future__ import annotations

from cotenant.scheduler.core.events import EvidenceGathered
from cotenant.scheduler.core.turn import Turn


def evidence_gathered(turn: Turn, event: EvidenceGathered) -> None:
    """Keep what was measured of jobs that share GPUs, for models that learn from it; drop what counts no more.

    New measurements wait for others, since each lot has everything predicted anew. What turned out to be wrong does
    not: it would go on deciding who runs beside whom.
    """
    state = turn.state
    if event.withdrawn:
        state.gathered[:] = [each for each in state.gathered if each[0].program not in event.withdrawn]
        turn.evidence_withdrawn |= state.evidence.withdraw(event.withdrawn)
    state.gathered.extend((observation, event.complete) for observation in event.observations)
