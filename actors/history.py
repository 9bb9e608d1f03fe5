"""Hands what was measured and predicted to files, from a thread of its own: no disk ever delays who measures.

Rows wait in memory until the next write. When the disk is full, or gone, they go on waiting, up to a limit; beyond
that the oldest are dropped. Nothing but the history is lost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from cotenant.configs.settings import SignatureSettings
from cotenant.forecasting.datasets.signature_store import SignatureStore
from cotenant.forecasting.signatures import to_row
from cotenant.forecasting.types import Signature

MOST_WAITING = 100_000  # rows
TIDY_EVERY_S = 3600.0
CLOSE_TIMEOUT_S = 4.0
MOST_TRIES = 200  # to tell rows that cannot be written from those that can
FOLDER = "signatures"

Item = TypeVar("Item")


class Store(Protocol):
    """What is needed of a store; see ``SignatureStore``."""

    def write(self, host_id: str, rows: Sequence[Mapping[str, object]]) -> object:
        """Write rows of one host; OSError when that fails."""
        ...

    def tidy(self, now_s: float) -> None:
        """Keep the store in bounds; OSError when that fails."""
        ...


class Backlog(Generic[Item]):
    """Collects items and writes them as rows now and then. ``add`` and ``close`` may be called from any thread."""

    def __init__(
        self,
        store: Store,
        write_every_s: float,
        to_row: Callable[[Item], Mapping[str, object]],
        *,
        what: str,
        clock: Callable[[], float] = time.time,
        tell: Callable[[str], None] = lambda text: print(text, flush=True),  # noqa: T201 - the actor's log
    ) -> None:
        """Start the thread.

        Args:
            store: Where rows go.
            write_every_s: Seconds between writes.
            to_row: Makes a row of an item.
            what: What is written, in words.
            clock: Unix seconds, by which the age of rows is judged.
            tell: Takes warnings.
        """
        self._store = store
        self._write_every_s = write_every_s
        self._to_row = to_row
        self._what = what
        self._clock = clock
        self._tell = tell
        self._waiting: deque[tuple[str, Item]] = deque(maxlen=MOST_WAITING)
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._failing = False
        self._tidied_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
        self._thread.start()

    def add(self, host_id: str, items: Sequence[Item]) -> None:
        """Take in items of one host. Never waits for the disk."""
        with self._lock:
            self._waiting.extend((host_id, item) for item in items)

    def close(self) -> None:
        """Write what waits and end the thread; gives up after some seconds. Idempotent."""
        self._ending.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        ending = False
        while not ending:
            ending = self._ending.wait(self._write_every_s)
            self._write()

    def _write(self) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque(maxlen=MOST_WAITING)
        hosts: dict[str, list[Item]] = {}
        for host_id, item in waiting:
            hosts.setdefault(host_id, []).append(item)
        failure = self._failure_of(self._tidy)  # first: what it deletes may be the room that is needed
        kept: list[tuple[str, Item]] = []
        for host_id, items in hosts.items():
            failed = self._failure_of(partial(self._write_host, host_id, items))
            if failed is not None:
                failure = failed
                kept += [(host_id, item) for item in items]
        self._keep(kept)
        if failure is not None and not self._failing:
            self._tell(f"cotenant prm: the {self._what} cannot be written ({failure}); trying again")
        if failure is None and self._failing:
            self._tell(f"cotenant prm: the {self._what} is written again")
        self._failing = failure is not None

    @staticmethod
    def _failure_of(step: Callable[[], None]) -> OSError | None:
        """Take one step; what the disk had against it must not keep the others from being taken."""
        try:
            step()
        except OSError as error:
            return error
        return None

    def _write_host(self, host_id: str, items: Sequence[Item]) -> None:
        """Write one host's rows; OSError when the disk is to blame. Rows that are themselves to blame are left out."""
        lots, left_out, why = [items], 0, ""
        for tries in count(1):
            lot = lots.pop()
            try:
                self._store.write(host_id, [self._to_row(item) for item in lot])
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - no row may end the thread that writes all others
                why = f"{type(error).__name__}: {error}"
                if len(lot) == 1 or tries >= MOST_TRIES:
                    left_out += len(lot)
                else:
                    middle = len(lot) // 2
                    lots += [lot[middle:], lot[:middle]]
            if not lots:
                break
        if left_out:
            what = f"{left_out} rows of host {host_id} for the {self._what} were left out"
            self._tell(f"cotenant prm: {what}: {why}")

    def _tidy(self) -> None:
        now = self._clock()
        if self._tidied_s is None or not 0.0 <= now - self._tidied_s < TIDY_EVERY_S:
            self._store.tidy(now)
            self._tidied_s = now

    def _keep(self, items: Sequence[tuple[str, Item]]) -> None:
        with self._lock:
            self._waiting = deque([*items, *self._waiting], maxlen=MOST_WAITING)


class History(Backlog[tuple[Signature, str]]):
    """The history of signatures; an item is a window and the fingerprint of its job."""

    def __init__(
        self,
        store: Store,
        write_every_s: float,
        *,
        clock: Callable[[], float] = time.time,
        tell: Callable[[str], None] = lambda text: print(text, flush=True),  # noqa: T201 - the actor's log
    ) -> None:
        """Start the thread; see ``Backlog``."""
        super().__init__(store, write_every_s, _row, what="history of signatures", clock=clock, tell=tell)

    def add_windows(self, host_id: str, signatures: Sequence[Signature], fingerprints: Mapping[str, str]) -> None:
        """Take in one host's windows of a second. Never waits for the disk."""
        self.add(host_id, [(each, fingerprints.get(each.job_id, "")) for each in signatures])


def _row(window: tuple[Signature, str]) -> Mapping[str, object]:
    signature, fingerprint = window
    return to_row(signature) | {"fingerprint": fingerprint}


def store_folder(settings: SignatureSettings, state_dir: Path) -> Path:
    """Return where the history lies."""
    return state_dir / FOLDER if settings.path is None else Path(settings.path).expanduser()


def open_history(settings: SignatureSettings, state_dir: Path) -> History | None:
    """Return the history that the settings ask for, or None when it is switched off."""
    if not settings.enabled:
        return None
    root = store_folder(settings, state_dir)
    return History(SignatureStore(root, settings.keep_days, settings.keep_bytes), settings.write_every_s)
