"""The threads that read GPUs: one for all that answer, and one of its own for each that once did not.

Threads that make short calls at the same time would spend more on handing the interpreter's lock to each other than on
the calls. So one thread reads GPU after GPU, until one does not come back in time: that one keeps the thread, which may
be stuck in the driver, and the others go on with a new one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from cotenant.actors.devices.base import SILENT_LOST_S, GpuInfo
from cotenant.actors.devices.nvml.board import Board, Pass, Readings
from cotenant.actors.devices.nvml.watchdog import Watchdog

WAIT_S = 0.003  # for the passes asked for; what comes later is taken in by the next sample
LATE_S = 0.1  # a GPU whose pass takes longer gets a thread of its own
SILENT_S = 1.0  # from here on there is no reading any more
PASS_S = 0.3  # a GPU is asked this often; drivers refresh utilisation every 1/6 to 1 s
IDLE_S = 0.5  # one that carries no job
REOPEN_S = 1.0  # one that is lost is looked for this often
_NOTHING = Readings(answered=False)


class Station:
    """A GPU and what it said last.

    Args:
        board: Reads it.
        gpus: Its devices.
        now_s: The monotonic clock.

    Attributes:
        busy: It carries jobs.
        fresh: A pass came in since the sample before.
    """

    def __init__(self, board: Board, gpus: Sequence[GpuInfo], now_s: float) -> None:
        self.board = board
        self.gpus = tuple(gpus)
        self.busy = self.fresh = False
        self._asked_s = now_s - REOPEN_S
        self._newest: Pass | None = None
        # When each device last told its memory, or was first asked.
        self._answered_s = {gpu.gpu_id: now_s for gpu in gpus}

    def due(self, now_s: float) -> bool:
        """Whether a pass is to be made now; if so, it counts as asked for."""
        gone = self._newest is not None and not self._newest.devices
        period_s = REOPEN_S if gone else PASS_S if self.busy or self._newest is None else IDLE_S
        if now_s - self._asked_s < 0.9 * period_s:  # samples come a little early or late
            return False
        self._asked_s = now_s
        return True

    def take(self, answer: Pass | None, error: BaseException | None) -> None:
        """Take a pass in.

        Raises:
            RuntimeError: It was not made: a fault of ours.
        """
        if answer is None:
            raise RuntimeError(f"GPU {self.board.uuid} cannot be read") from error
        self.fresh = True
        self._newest = answer
        self._answered_s |= {uuid: answer.at_s for uuid, each in answer.devices.items() if each.answered}

    def readings(self, gpu_id: str, now_s: float) -> Readings:
        """Return what the device said last, as far as it is of use."""
        if self._newest is None or now_s - self._newest.at_s > SILENT_S:
            return _NOTHING
        return self._newest.devices.get(gpu_id, _NOTHING)

    def trouble(self, gpu_id: str, now_s: float) -> tuple[bool, str]:
        """Return whether a device must be drained, and what is wrong with it."""
        if self._newest is not None and self._newest.fault:
            return True, self._newest.fault
        silent_s = now_s - self._answered_s[gpu_id]
        if silent_s <= SILENT_S:
            return False, ""
        return silent_s > SILENT_LOST_S, f"the driver has not answered for {silent_s:.1f} s"


class _Round:
    """Passes over some GPUs, one after the other.

    Attributes:
        left: Those whose turn is still to come; whoever takes one out reads it, or sees to it.
        done: Those that are read, with their answer or their error.
        present: The one whose turn it is, and since when.
    """

    def __init__(self, stations: Sequence[Station]) -> None:
        self.left = deque(stations)
        self.done: deque[tuple[Station, Pass | None, BaseException | None]] = deque()
        self.present: tuple[Station, float] | None = None

    def make(self) -> None:
        """Read them; in the thread that may get stuck."""
        while (station := _first(self.left)) is not None:
            self.present = station, time.monotonic()
            try:
                answer = station.board.read()
            except BaseException as error:  # noqa: BLE001 (handed over, whatever it is)
                self.done.append((station, None, error))
            else:
                self.done.append((station, answer, None))

    def take_in(self) -> None:
        """Have the stations take in what came."""
        while self.done:
            station, answer, error = self.done.popleft()
            station.take(answer, error)


def _first(stations: deque[Station]) -> Station | None:
    try:
        return stations.popleft()  # another thread may be emptying it
    except IndexError:
        return None


class _Reader:
    """A thread, the GPUs it reads, and the round it is at (None = idle)."""

    def __init__(self, stations: Sequence[Station], ended: SimpleQueue[_Reader]) -> None:
        self.stations = list(stations)
        self.watchdog = Watchdog("NVML")
        self.round: _Round | None = None
        self._ended = ended

    def post(self, stations: Sequence[Station]) -> None:
        self.round = _Round(stations)
        self.watchdog.post(self.round.make, lambda *_: self._ended.put(self))

    def post_closing(self) -> None:
        """Let go of its GPUs once it is idle, and end."""
        self.round = _Round(())
        self.watchdog.post(self._close, lambda *_: self._ended.put(self))
        self.watchdog.close()

    def _close(self) -> None:
        for station in self.stations:
            station.board.close()


class Crew:
    """All GPUs of a host, and who reads them.

    Args:
        stations: The GPUs.
    """

    def __init__(self, stations: Sequence[Station]) -> None:
        self.stations = tuple(stations)
        self._ended: SimpleQueue[_Reader] = SimpleQueue()
        self._common = _Reader(stations, self._ended)
        self._own: list[_Reader] = []

    def add(self, station: Station) -> None:
        """Have one more GPU read."""
        self.stations = (*self.stations, station)
        self._common.stations.append(station)

    @property
    def cost_s(self) -> float:
        """CPU time of all calls so far."""
        return sum(reader.watchdog.cost_s for reader in (self._common, *self._own))

    def look(self, now_s: float) -> None:
        """Have the passes made that are due, and take in what is done; waits for ``WAIT_S`` at most."""
        for station in self.stations:
            station.fresh = False
        self._take_in(None)
        self._part_with_late()
        awaited = 0
        for reader in (self._common, *self._own):
            if reader.round is None:
                due = [station for station in reader.stations if station.due(now_s)]
                if due:
                    reader.post(due)
                    awaited += 1
        until_s = time.monotonic() + WAIT_S
        while awaited and self._take_in(until_s):
            awaited -= 1

    def close(self) -> bool:
        """Let go of the GPUs. Returns whether all came back; a thread that is stuck is left behind."""
        self._take_in(None)
        readers = (self._common, *self._own)
        stuck = any(reader.round is not None for reader in readers)
        for reader in readers:
            reader.post_closing()
        until_s = time.monotonic() + WAIT_S
        for _ in readers:
            self._take_in(until_s)
        return not stuck

    def _take_in(self, until_s: float | None) -> bool:
        """Take in what is done; with a time, wait until then for a round to end. Returns whether one did."""
        ended = False
        try:
            while True:
                wait_s = None if until_s is None or ended else max(0.0, until_s - time.monotonic())
                reader = self._ended.get(wait_s is not None, wait_s)
                if reader.round is not None:
                    reader.round.take_in()
                reader.round, ended = None, True
                if until_s is not None:
                    return True
        except Empty:
            for reader in (self._common, *self._own):
                if reader.round is not None:
                    reader.round.take_in()
            return ended

    def _part_with_late(self) -> None:
        """Leave the common thread to a GPU that does not come back; the others go on with a new one."""
        round_, common = self._common.round, self._common
        if round_ is None or round_.present is None or len(common.stations) == 1:
            return
        late, since_s = round_.present
        if time.monotonic() - since_s < LATE_S:
            return
        rest: list[Station] = []
        while (station := _first(round_.left)) is not None:
            rest.append(station)
        others = [station for station in common.stations if station is not late]
        common.stations = [late]
        self._own.append(common)
        self._common = _Reader(others, self._ended)
        if rest:
            self._common.post(rest)
