"""Who reads the GPUs: one thread for all that answer, and one for each that once did not."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support import wait_until

from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.devices.nvml import crew
from cotenant.actors.devices.nvml.board import Board, Pass, Readings
from cotenant.actors.devices.nvml.crew import IDLE_S, PASS_S, REOPEN_S, Crew, Station

WAIT_S = 10.0


class Driver:
    """A board that answers at once, unless its gate is closed."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.gate = threading.Event()
        self.gate.set()
        self.reads: list[str] = []  # the names of the threads
        self.error: Exception | None = None
        self.devices: dict[str, Readings] = {uuid: Readings(answered=True)}
        self.closed = False

    def read(self) -> Pass:
        self.reads.append(threading.current_thread().name + str(threading.get_ident()))
        self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return Pass(time.monotonic(), self.devices)

    def close(self) -> None:
        self.closed = True


class Host:
    """Three GPUs and a clock on which a pass is due at every look."""

    def __init__(self) -> None:
        self.boards = [Driver(f"GPU-{index}") for index in range(3)]
        gpu = SimpleNamespace
        self.stations = [
            Station(cast(Board, board), [cast(GpuInfo, gpu(gpu_id=board.uuid))], 0.0) for board in self.boards
        ]
        self.crew = Crew(self.stations)
        self.now = 0.0

    def look(self) -> list[bool]:
        self.now += REOPEN_S
        self.crew.look(self.now)
        return [station.fresh for station in self.stations]

    def until(self, fresh: list[bool]) -> None:
        wait_until(lambda: self.look() == fresh, WAIT_S, f"passes of {fresh}")

    def readers(self) -> int:
        return len({name for board in self.boards for name in board.reads[-1:]})


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(crew, "LATE_S", 0.02)
    monkeypatch.setattr(crew, "WAIT_S", 0.2)
    host = Host()
    yield host
    for board in host.boards:
        board.gate.set()


def test_one_thread_reads_all_that_answer(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "LATE_S", WAIT_S)  # however busy the machine is
    for _ in range(5):
        host.until([True] * 3)
    assert host.readers() == 1
    assert host.crew.cost_s > 0.0
    assert host.crew.close()
    assert all(board.closed for board in host.boards)


def test_one_that_does_not_come_back_keeps_the_thread_and_holds_up_nobody(host: Host) -> None:
    host.until([True] * 3)
    host.boards[1].gate.clear()
    host.until([True, False, True])
    host.boards[2].gate.clear()
    host.until([True, False, False])
    stuck = [len(board.reads) for board in host.boards[1:]]
    for _ in range(3):
        host.until([True, False, False])
    assert [len(board.reads) for board in host.boards[1:]] == stuck  # nobody else is lost to them
    for board in host.boards:
        board.gate.set()
    host.until([True] * 3)
    assert host.readers() == 3
    assert host.crew.close()


def test_what_is_stuck_at_the_end_is_left_behind(host: Host) -> None:
    host.until([True] * 3)
    host.boards[0].gate.clear()
    host.until([False, True, True])
    assert not host.crew.close()
    wait_until(lambda: host.boards[1].closed and host.boards[2].closed, WAIT_S, "the others are let go of")
    assert not host.boards[0].closed


def test_a_fault_of_ours_is_no_trouble_of_the_gpu(host: Host) -> None:
    host.boards[1].error = KeyError("x")
    with pytest.raises(RuntimeError, match="GPU GPU-1 cannot be read"):
        host.look()


@pytest.mark.parametrize(
    ("busy", "devices", "expected"),
    [
        (True, {"g": Readings(answered=True)}, PASS_S),
        (False, {"g": Readings(answered=True)}, IDLE_S),
        (True, {}, REOPEN_S),
    ],
)
def test_how_often_a_gpu_is_asked(busy: bool, devices: dict[str, Any], expected: float) -> None:
    station = Station(cast(Board, SimpleNamespace(uuid="g")), [cast(GpuInfo, SimpleNamespace(gpu_id="g"))], 0.0)
    assert station.due(0.0)
    station.busy = busy
    station.take(Pass(0.0, devices), None)
    asked = [0.0, *(tick / 10 for tick in range(1, 41) if station.due(tick / 10))]
    gaps = [round(after - before, 1) for before, after in itertools.pairwise(asked)]
    assert 0.9 * expected <= min(gaps) <= max(gaps) <= expected
