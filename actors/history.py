"""Hands measured windows to the signature store, from a thread of its own: no disk ever delays who measures.

Windows wait in memory until the next write. When the disk is full, or gone, they go on waiting, up to a limit; beyond
that the oldest are dropped. Nothing but the history is lost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from cotenant.configs.settings import SignatureSettings
from cotenant.forecasting.datasets.signature_store import SignatureStore
from cotenant.forecasting.signatures import to_row
from cotenant.forecasting.types import Signature

MOST_WAITING = 100_000  # windows
TIDY_EVERY_S = 3600.0
CLOSE_TIMEOUT_S = 4.0
FOLDER = "signatures"

_Window = tuple[str, Signature, str]  # host, window, fingerprint


class Store(Protocol):
    """What is needed of a store; see ``SignatureStore``."""

    def write(self, host_id: str, rows: Sequence[Mapping[str, object]]) -> object:
        """Write rows of one host; OSError when that fails."""
        ...

    def tidy(self, now_s: float) -> None:
        """Keep the store in bounds; OSError when that fails."""
        ...


class History:
    """Collects windows and writes them now and then. ``add`` and ``close`` may be called from any thread."""

    def __init__(
        self,
        store: Store,
        write_every_s: float,
        *,
        clock: Callable[[], float] = time.time,
        tell: Callable[[str], None] = lambda text: print(text, flush=True),  # noqa: T201 - the actor's log
    ) -> None:
        """Start the thread.

        Args:
            store: Where windows go.
            write_every_s: Seconds between writes.
            clock: Unix seconds, by which the age of windows is judged.
            tell: Takes warnings.
        """
        self._store = store
        self._write_every_s = write_every_s
        self._clock = clock
        self._tell = tell
        self._waiting: deque[_Window] = deque(maxlen=MOST_WAITING)
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._failing = False
        self._tidied_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="signature history", daemon=True)
        self._thread.start()

    def add(self, host_id: str, signatures: Sequence[Signature], fingerprints: Mapping[str, str]) -> None:
        """Take in one host's windows of a second. Never waits for the disk."""
        windows = [(host_id, each, fingerprints.get(each.job_id, "")) for each in signatures]
        with self._lock:
            self._waiting.extend(windows)

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
            windows, self._waiting = list(self._waiting), deque(maxlen=MOST_WAITING)
        hosts: dict[str, list[_Window]] = {}
        for window in windows:
            hosts.setdefault(window[0], []).append(window)
        try:
            for host_id in list(hosts):
                rows = [to_row(each) | {"fingerprint": fingerprint} for _, each, fingerprint in hosts[host_id]]
                self._store.write(host_id, rows)
                del hosts[host_id]
            self._tidy()
        except OSError as error:
            self._keep([window for those in hosts.values() for window in those])
            if not self._failing:
                self._tell(f"cotenant prm: the history of signatures cannot be written ({error}); trying again")
            self._failing = True
        else:
            if self._failing:
                self._tell("cotenant prm: the history of signatures is written again")
            self._failing = False

    def _tidy(self) -> None:
        now = self._clock()
        if self._tidied_s is None or not 0.0 <= now - self._tidied_s < TIDY_EVERY_S:
            self._store.tidy(now)
            self._tidied_s = now

    def _keep(self, windows: Sequence[_Window]) -> None:
        with self._lock:
            self._waiting = deque([*windows, *self._waiting], maxlen=MOST_WAITING)


def open_history(settings: SignatureSettings, state_dir: Path) -> History | None:
    """Return the history that the settings ask for, or None when it is switched off."""
    if not settings.enabled:
        return None
    root = state_dir / FOLDER if settings.path is None else Path(settings.path).expanduser()
    return History(SignatureStore(root, settings.keep_days, settings.keep_bytes), settings.write_every_s)
