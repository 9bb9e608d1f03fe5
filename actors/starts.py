"""Which starts of jobs are under way on a host: a job starts once, and never one that was stopped or superseded."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cotenant.actors import jobfiles, runner
from cotenant.actors.enforcement.base import StaleCommand
from cotenant.actors.jobrecords import START_TIMEOUT_S

Key = tuple[str, int]  # job id, epoch of its lease
LAST_S = START_TIMEOUT_S + 1.0  # until the last start has succeeded or failed


class Starts:
    """To be used with the launcher's lock held, where nothing else is said.

    Args:
        lock: The launcher's.
        over: By job, its newest epoch that is over here: no older one may start.
    """

    def __init__(self, lock: threading.RLock, over: dict[str, int]) -> None:
        self._news = threading.Condition(lock)
        self._over = over
        self._under_way: set[Key] = set()
        self._closed = False

    def __contains__(self, key: Key) -> bool:
        return key in self._under_way

    def wait(self, key: Key) -> None:
        """Wait, without the lock, while this very start is under way: its command was repeated."""
        self._news.wait_for(lambda: key not in self._under_way)

    def check(self, key: Key, present: Iterable[Key]) -> None:
        """Make sure that this start is the newest of its job, and not over.

        Args:
            key: The start.
            present: The jobs that are here.

        Raises:
            StaleCommand: It is not, or nothing starts any more.
        """
        job_id, epoch = key
        if self._closed:
            raise StaleCommand(f"{job_id}: start of epoch {epoch}, but this host is being given back")
        others = [other for name, other in (*present, *self._under_way) if name == job_id and other != epoch]
        newest = max([*others, self._over.get(job_id, -1)])
        if epoch <= newest:
            raise StaleCommand(f"{job_id}: start of epoch {epoch}, but epoch {newest} is or was here")

    def add(self, key: Key) -> None:
        """Have it under way. It must be carried out ``within``."""
        self._under_way.add(key)

    @contextmanager
    def within(self, key: Key) -> Iterator[None]:
        """Carry a start out, without the lock. One that fails is over: whoever is told of that must not see it start
        when the command is repeated.
        """
        try:
            yield
        except BaseException:
            self.end(key)
            raise
        finally:
            with self._news:
                self._under_way.discard(key)
                self._news.notify_all()

    def close(self, starting: threading.Lock) -> frozenset[Key]:
        """Let nothing start any more. To be called without the launcher's lock.

        Args:
            starting: Is held from the last look at whether a start may go on until its job is known or it has failed.

        Returns:
            The starts of which one may still become a job, since it hangs; empty otherwise.
        """
        with self._news:
            self._closed = True
        if starting.acquire(timeout=LAST_S):
            starting.release()
            return frozenset()
        with self._news:
            return frozenset(self._under_way)

    def end(self, key: Key) -> None:
        """Have neither this epoch of the job start here (again), nor an older one."""
        job_id, epoch = key
        with self._news:
            self._over[job_id] = max(epoch, self._over.get(job_id, epoch))

    def ended(self, key: Key) -> bool:
        """Whether this epoch may not start any more."""
        return self._over.get(key[0], -1) >= key[1]


def start_supervisor(job_dir: Path) -> None:
    """Start the supervisor and wait until it is up and nobody's child (Ray kills what is a child of its workers).

    Raises:
        OSError: It does not start.
    """
    starter = subprocess.Popen(
        [sys.executable, "-I", "-S", runner.__file__, str(job_dir)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd="/",
        env={},
    )
    try:
        _, said = starter.communicate(timeout=START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        starter.kill()
        starter.communicate()
        if jobfiles.read_supervisor(job_dir) is not None:
            return  # up after all
        raise OSError(f"the supervisor was not up within {START_TIMEOUT_S:g} s") from None
    if starter.returncode != 0:
        last: Any = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise OSError(f"the supervisor did not start: {last or starter.returncode}")
