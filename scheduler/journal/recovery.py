"""From a journal back to a running core."""

from __future__ import annotations

from collections.abc import Callable

from cotenant.configs.settings import Settings
from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.engine import PlacementPolicy, policy
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.state import State
from cotenant.scheduler.journal.store import Journal


def recover(
    journal: Journal,
    settings: Settings,
    predictor: InterferencePredictor | None = None,
    policies: Callable[[str], PlacementPolicy] = policy,
) -> Core:
    """Return a core in exactly the state in which the journal's last batch left it, under the given settings.

    Batches are replayed under the settings they were first handled under (they are part of the snapshot). Afterwards
    the given settings are put in force; only what an administrator changed at run time stays, as long as the given
    value of it is still the one it was changed from. Then a snapshot is written, so that the next recovery starts here.

    The commands of the replay are dropped: what the hosts still have to be told follows from their inventories.

    Args:
        journal: The journal, freshly opened.
        settings: The settings the scheduler is started with now.
        predictor: As for ``Core``.
        policies: As for ``Core``.

    Raises:
        JournalError: The journal cannot be read.
    """
    loaded = journal.load()
    state = loaded.snapshot or State(settings=settings, configured=settings)
    core = Core.from_state(state, predictor, policies)
    for entry in loaded.entries:
        try:
            core.handle(entry.events, entry.now)
        except Exception as error:  # noqa: BLE001 - a bug of the core on this batch, whatever it is
            # It failed in the same way, at the same place, when it was first handled, and the scheduler went on. So it
            # does here: the alternative is that one batch keeps every job of the cluster from ever coming back.
            print(f"cotenant journal: entry {entry.seq} failed again: {error!r}", flush=True)  # noqa: T201
    _configure(state, settings)
    seq = loaded.entries[-1].seq if loaded.entries else loaded.snapshot_seq
    journal.snapshot(state, seq)
    return core


def _configure(state: State, settings: Settings) -> None:
    kept = {
        name: getattr(state.settings, name)
        for name in ("placement", "resize")
        if getattr(settings, name) == getattr(state.configured, name)
    }
    state.configured = settings
    state.set_settings(settings.model_copy(update=kept))
