"""The MPS daemon of one GPU, kept alive for as long as jobs need it."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cotenant.actors.cleaners import keep_cleaners_off
from cotenant.actors.enforcement import mpscontrol
from cotenant.actors.enforcement.mpscontrol import CONTROL, QUIT_S, START_S, MpsError, MpsSilent

LOOK_S = 5.0  # an answer takes milliseconds; one that takes longer than this is none
TURN_S = 30.0  # a start waits this long for another of the same GPU
BACKOFF_S = 1.0  # before the second start; doubles with every failure
MAX_BACKOFF_S = 60.0
MOST_FAILURES = 5  # in a row: the GPU does without MPS from then on
LONGEST_TEMP = 60  # a socket's path may have 107 characters
HEALTHY_S = 300.0  # a daemon that lived this long has not failed in a row


class MpsService:
    """One private daemon for one GPU, in a folder of its own that outlives the host agent.

    Clients of a daemon that died or hangs, or of a server with a fault, cannot go on; the daemon is started anew when
    the next job needs it, after a pause that grows with every failure in a row. Methods may be called from any thread.
    ``ensure`` and ``stop`` take as long as the daemon does, within limits; no other method waits for either of them.

    Args:
        gpu_id: UUID of the GPU.
        folder: The daemon's folder.
        clock: Seconds, monotonic.
    """

    def __init__(self, gpu_id: str, folder: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._gpu_id = gpu_id
        self._clock = clock
        self._talking = threading.Lock()  # one conversation with the daemon at a time
        self._notes = threading.Lock()  # for what follows; never held while the daemon is asked
        self._lost: dict[int, str] = {}  # daemon -> why its clients cannot go on
        self._silent: set[int] = set()  # those of them that did not answer in time
        self._failures = 0
        self._failed = ""  # why, the last time
        self._not_before = 0.0
        self._started_at: float | None = None
        self._stopped = False
        self._locked: int | None = None
        if Path(folder).is_dir():  # another host agent's daemon goes on
            self._keep()

    def missing(self) -> str:
        """Say why jobs cannot run under MPS on this GPU; empty when they can."""
        if not any(os.access(f"{part}/{CONTROL}", os.X_OK) for part in os.get_exec_path()):
            return f"{CONTROL} is not on PATH"
        if self._failures >= MOST_FAILURES:
            return f"its daemon failed {self._failures} times in a row"
        return ""

    def pause_s(self) -> float:
        """Seconds until a job may start on this GPU, if its daemon then does; without MPS at once."""
        with self._notes:
            return 0.0 if self.missing() else max(0.0, self._not_before - self._clock())

    def ensure(self) -> int:
        """Have a daemon that takes clients, and return its process id.

        Raises:
            MpsError: There is none now; says why, and when the next try makes sense.
        """
        if not self._talking.acquire(timeout=TURN_S):
            raise MpsError(f"the MPS daemon of {self._gpu_id} keeps another job waiting for more than {TURN_S:g} s")
        try:
            daemon = self._daemon()
            if daemon is not None and not self._examine(daemon):
                return daemon
            with self._notes:
                wait_s, why = self._not_before - self._clock(), self._failed
            if wait_s > 0:
                raise MpsError(f"{why}; the next try is in {wait_s:.0f} s")
            return self._start()
        finally:
            self._talking.release()

    def look(self) -> None:
        """See how the daemon does; afterwards ``lost`` knows. Whoever talks with it already finds out as well."""
        if not self._talking.acquire(blocking=False):
            return
        try:
            daemon = self._daemon()
            if daemon is not None:
                self._examine(daemon)
        finally:
            self._talking.release()

    def lost(self, daemon: int) -> str:
        """Say why clients of this daemon cannot go on; empty when they can. Asks nobody and waits for nobody."""
        running = self._daemon()
        if running is None:
            self._fail(daemon, f"the MPS daemon of {self._gpu_id} died")
        with self._notes:
            if daemon not in self._lost and running != daemon:
                self._lost[daemon] = f"the MPS daemon of {self._gpu_id} is not the one it ran under"
            return self._lost.get(daemon, "")

    def stop(self) -> None:
        """End the daemon, for good. Its clients must have ended before."""
        self._stopped = True
        if self._talking.acquire(timeout=QUIT_S):
            try:
                self._end()
            finally:
                self._talking.release()
        else:
            mpscontrol.end_daemon(self.folder, 0.0)  # it hangs; whoever waits for it starts no other

    def _start(self) -> int:
        self._end()  # what is left of the one before
        try:
            make_private(self.folder)
            self._keep()
            mpscontrol.start_daemon(self.folder, self._gpu_id, START_S)
            daemon = self._daemon()
            if daemon is None:
                raise MpsError(f"{CONTROL} ended at once; {mpscontrol.log_end(self.folder)}")
            if self._stopped:
                raise MpsError(f"the MPS daemon of {self._gpu_id} has been ended for good")
        except (MpsError, OSError) as error:
            mpscontrol.end_daemon(self.folder, 0.0 if isinstance(error, MpsSilent) else QUIT_S)
            self._fail(None, str(error))
            raise MpsError(str(error)) from error
        with self._notes:
            self._lost.pop(daemon, None)  # a number that has come again
            self._silent.discard(daemon)
            self._started_at = self._clock()
        return daemon

    def _keep(self) -> None:
        """Without the file that tells its number, a daemon would be taken for one that has died."""
        if self._locked is not None:
            os.close(self._locked)
        self._locked = keep_cleaners_off(Path(self.folder))

    def _end(self) -> None:
        mpscontrol.end_daemon(self.folder, 0.0 if self._daemon() in self._silent else QUIT_S)

    def _daemon(self) -> int | None:
        """Return the process id of the daemon while it lives."""
        return mpscontrol.daemon_process(self.folder)

    def _examine(self, daemon: int) -> str:
        with self._notes:
            if daemon in self._lost:
                return self._lost[daemon]
        try:
            fault = mpscontrol.fault(self.folder, LOOK_S)
        except MpsError as error:
            if self._daemon() != daemon:
                return self.lost(daemon)  # it has died meanwhile
            fault = f"the MPS daemon of {self._gpu_id} does not answer: {error}"
            if isinstance(error, MpsSilent):
                self._silent.add(daemon)
        if fault:
            self._fail(daemon, f"{fault}; {mpscontrol.log_end(self.folder)}")
        return fault

    def _fail(self, daemon: int | None, why: str) -> None:
        """Take note of a failure; ``daemon`` is None when it did not start. Each daemon fails once."""
        with self._notes:
            if daemon is not None:
                if daemon in self._lost:
                    return
                self._lost[daemon] = why
            now = self._clock()
            lived = self._started_at is not None and now - self._started_at >= HEALTHY_S
            self._failures = 1 if lived else self._failures + 1
            self._not_before = now + min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** (self._failures - 1))
            self._started_at = None
            self._failed = why


def service_folder(run_dir: Path, gpu_id: str) -> str:
    """Return the folder of a GPU's daemon: the same after a restart, and short, since sockets lie in it."""
    key = hashlib.sha256(f"{run_dir}\0{gpu_id}".encode()).hexdigest()[:12]
    temp = tempfile.gettempdir()
    return f"{temp if len(temp) <= LONGEST_TEMP else '/tmp'}/ct-mps-{os.getuid()}-{key}"


def make_private(folder: str) -> None:
    """Make the folder, for this user alone.

    Raises:
        OSError: It cannot be made, or somebody else has made it.
    """
    Path(folder).mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a private folder of this user")
