"""From a journal back to a running core."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from cotenant.configs.settings import Settings
from cotenant.placement.engine import PlacementPolicy, policy
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.models import ModelSource, first_models
from cotenant.scheduler.core.state import State
from cotenant.scheduler.journal.store import Entry, Journal, Loaded

MOST_CULPRITS = 8  # with more of them it is not the events: the whole batch is set aside


def recover(
    journal: Journal,
    settings: Settings,
    models: ModelSource = first_models,
    policies: Callable[[str], PlacementPolicy] = policy,
) -> Core:
    """Return a core in exactly the state in which the journal's last batch left it, under the given settings.

    Batches are replayed under the settings they were first handled under (they are part of the snapshot). Afterwards
    the given settings are put in force; only what an administrator changed at run time stays, as long as the given
    value of it is still the one it was changed from. Then a snapshot is written, so that the next recovery starts here.

    The commands of the replay are dropped: what the hosts still have to be told follows from their inventories.

    An event that the core cannot handle (a fault of the core's) is set aside in the journal and told on standard error;
    it counts as never having happened, since a scheduler that cannot start helps nobody.

    Args:
        journal: The journal, freshly opened.
        settings: The settings the scheduler is started with now.
        models: As for ``Core``.
        policies: As for ``Core``.

    Raises:
        JournalError: The journal cannot be read.
    """

    def replay(loaded: Loaded, before: int | None = None) -> tuple[Core, Entry | None]:
        """Return the core after all batches, or those before a number; and the batch it failed at, if it did."""
        core = Core.from_state(loaded.snapshot or State(settings=settings, configured=settings), models, policies)
        for entry in loaded.entries:
            if entry.seq == before:
                break
            if _failure(core, entry) is not None:
                return core, entry
        return core, None

    def attempt(entry: Entry, state: bytes) -> str | None:
        return _failure(Core.from_state(State.from_json(state), models, policies), entry)

    retried: set[int] = set()
    while True:
        loaded = journal.load()
        core, failed_at = replay(loaded)
        if failed_at is None:
            break
        good, _ = replay(journal.load(), failed_at.seq)  # read again: the failure has left the first state half changed
        errors = _culprits(failed_at, good.state.to_json(), attempt)
        if not errors and failed_at.seq not in retried:
            retried.add(failed_at.seq)  # memory was short, for example
            continue
        errors = errors or dict.fromkeys(range(len(failed_at.events)), "it fails now and then")
        journal.set_aside(failed_at, errors)
        for position, error in errors.items():
            kind = failed_at.events[position].kind
            sys.stderr.write(f"cotenant: set aside in the journal: {kind} of batch {failed_at.seq}: {error}\n")
    _configure(core.state, settings)
    seq = loaded.entries[-1].seq if loaded.entries else loaded.snapshot_seq
    journal.snapshot(core.state, seq)
    return core


def _failure(core: Core, entry: Entry) -> str | None:
    """Have the core handle a batch; say what went wrong. A batch of which nothing is left did not happen."""
    try:
        if entry.events:
            core.handle(entry.events, entry.now)
    except Exception as error:  # noqa: BLE001 - a fault of the core's can be of any kind
        return f"{type(error).__name__}: {error}"
    return None


def _culprits(entry: Entry, before: bytes, attempt: Callable[[Entry, bytes], str | None]) -> dict[int, str]:
    """Find the events without which the batch can be handled: why, by position.

    Args:
        entry: The batch.
        before: The state before it.
        attempt: Has a core of that state handle a batch, and says what went wrong.
    """
    left = dict(enumerate(entry.events))
    culprits: dict[int, str] = {}
    while left and (failure := attempt(replace(entry, events=tuple(left.values())), before)) is not None:
        if len(culprits) == MOST_CULPRITS:
            return culprits | dict.fromkeys(left, failure)
        events = list(left.items())
        good, bad = 0, len(events)  # that many of the first events can be handled, and cannot
        while bad - good > 1:
            middle = (good + bad) // 2
            said = attempt(replace(entry, events=tuple(event for _, event in events[:middle])), before)
            good, bad, failure = (middle, bad, failure) if said is None else (good, middle, said)
        position = events[bad - 1][0]
        culprits[position] = failure
        del left[position]
    return culprits


def _configure(state: State, settings: Settings) -> None:
    kept = {
        name: getattr(state.settings, name)
        for name in ("placement", "resize", "scheduling", "rebalance")
        if getattr(settings, name) == getattr(state.configured, name)
    }
    state.configured = settings
    state.set_settings(settings.model_copy(update=kept))
