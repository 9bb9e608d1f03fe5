"""The core together with its journal: what is taken in is on disk first, and what the core cannot take is set aside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from cotenant.configs.settings import Settings
from cotenant.placement.engine import PlacementPolicy, policy
from cotenant.scheduler.core.commands import Command
from cotenant.scheduler.core.events import Event
from cotenant.scheduler.core.models import ModelSource, first_models
from cotenant.scheduler.journal.recovery import recover
from cotenant.scheduler.journal.store import Journal


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of a batch.

    Attributes:
        commands: What is to be done.
        refused: By position in the batch, the events that were set aside, and why. They changed nothing.
    """

    commands: Sequence[Command] = ()
    refused: Mapping[int, str] = field(default_factory=dict)


class Ledger:
    """Not thread-safe. Arguments as for ``recover``; ``core`` is replaced when it has to be rebuilt.

    Raises:
        JournalError: The journal cannot be read or written.
    """

    def __init__(
        self,
        journal: Journal,
        settings: Settings,
        models: ModelSource = first_models,
        policies: Callable[[str], PlacementPolicy] = policy,
    ) -> None:
        self._journal = journal
        self._recover = partial(recover, journal, settings, models, policies)
        self._snapshot_every = settings.journal.snapshot_every
        self._since_snapshot = 0
        self._behind = False  # the core is not where the journal is
        self.core = self._recover()

    def take_in(self, events: Sequence[Event], now: float) -> Taken:
        """Write a batch down and have the core handle it.

        An event that makes the core fail has left it half changed. It is then rebuilt from the journal, where recovery
        sets the event aside; the others of the batch count. The commands are lost in that case: what the hosts have to
        be told follows from their inventories, as after a restart.

        Raises:
            NotRecordable: An event of the batch cannot be written; nothing was changed.
            JournalError: The batch could not be written, or the core not be rebuilt.
        """
        if self._behind:
            self._rebuild()
        seq = self._journal.append(events, now)
        self._since_snapshot += 1
        try:
            return Taken(self.core.handle(events, now))
        except Exception:  # noqa: BLE001 - whatever it is, recovery meets it again and says what it was
            self._behind = True
            self._rebuild()
            return Taken(refused=self._journal.set_aside_from(seq))

    def snapshot_if_due(self) -> None:
        """Write a snapshot now and then.

        Raises:
            JournalError: It could not be written; the next one is due as if it had been.
        """
        if self._since_snapshot >= self._snapshot_every:
            self._since_snapshot = 0
            self._journal.snapshot(self.core.state, self._journal.seq)

    def note(self) -> str:
        """Say what an administrator should know; empty when there is nothing.

        Raises:
            JournalError: The journal cannot be read.
        """
        count = self._journal.count_set_aside()
        return f"events that could not be handled and were set aside: {count} (see the log)" if count else ""

    def close(self) -> None:
        """Write a last snapshot and close the journal."""
        if not self._behind:
            self._journal.snapshot(self.core.state, self._journal.seq)
        self._journal.close()

    def _rebuild(self) -> None:
        self.core = self._recover()
        self._behind = False
        self._since_snapshot = 0
