"""The thread that writes the history of signatures: no disk delays, stops or outgrows the PRM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import support
from packing import window

import cotenant.actors.history as history_module
from cotenant.actors.history import History, open_history
from cotenant.actors.messages import WindowBatch
from cotenant.actors.prm_actor import Prm
from cotenant.configs.settings import Settings, SignatureSettings
from cotenant.forecasting.datasets.signature_store import SignatureStore, load_signatures
from cotenant.forecasting.types import Signature

NOW = float(int(time.time())) - 1_000_000.0  # on top of what a made window begins at: nothing is too old to be kept
FULL = OSError(28, "No space left on device")


def wait_until(condition: Callable[[], object]) -> None:
    support.wait_until(condition, 10.0, "the thread has written", poll_s=0.005)


class Disk:
    """A store that remembers, and that a test can fill up or stop."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, Mapping[str, object]]] = []
        self.tidied: list[float] = []
        self.error: OSError | None = None
        self.tries = 0
        self.free = threading.Event()
        self.free.set()

    def write(self, host_id: str, rows: Sequence[Mapping[str, object]]) -> None:
        self.free.wait(30.0)
        self.tries += 1
        if self.error is not None:
            raise self.error
        self.rows += [(host_id, row) for row in rows]

    def tidy(self, now_s: float) -> None:
        self.tidied.append(now_s)

    def seconds(self) -> list[object]:
        return [row["start_s"] for _, row in self.rows]


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def disk():
    made = Disk()
    yield made
    made.free.set()


def start(disk: Disk, every_s: float = 0.01) -> tuple[History, list[str], Clock]:
    told: list[str] = []
    clock = Clock()
    return History(disk, every_s, clock=clock, tell=told.append), told, clock


def windows(*seconds: float) -> list[Signature]:
    return [window(second) for second in seconds]


def test_windows_are_written_by_host_with_their_fingerprints(disk: Disk) -> None:
    history, told, _ = start(disk)
    history.add_windows("a", windows(1, 2), {"job": "f"})
    history.add_windows("b", windows(3), {})
    history.close()
    assert [(host, row["job_id"], row["fingerprint"]) for host, row in disk.rows] == [
        ("a", "job", "f"),
        ("a", "job", "f"),
        ("b", "job", ""),
    ]
    assert told == []


def test_what_is_measured_last_is_written_at_the_end(disk: Disk) -> None:
    history, _, _ = start(disk, every_s=3600.0)
    history.add_windows("a", windows(1), {})
    history.close()
    history.close()
    assert len(disk.rows) == 1


def test_a_disk_that_hangs_delays_nobody(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "CLOSE_TIMEOUT_S", 0.01)
    disk.free.clear()
    history, _, _ = start(disk)
    history.add_windows("a", windows(0), {})
    began = time.thread_time()
    for second in range(1, 200):
        history.add_windows("a", windows(second), {})
    assert time.thread_time() - began < 1.0
    history.close()  # gives up
    disk.free.set()
    wait_until(lambda: len(disk.rows) == 200)


def test_a_full_disk_is_told_once_and_loses_nothing_when_there_is_room_again(disk: Disk) -> None:
    disk.error = FULL
    history, told, _ = start(disk)
    history.add_windows("a", windows(1), {})
    wait_until(lambda: disk.tries >= 3)
    history.add_windows("a", windows(2), {})
    disk.error = None
    wait_until(lambda: len(disk.rows) == 2)
    wait_until(lambda: len(told) == 2)
    history.close()
    assert told == [
        f"cotenant prm: the history of signatures cannot be written ({FULL}); trying again",
        "cotenant prm: the history of signatures is written again",
    ]
    assert disk.seconds() == [each.start_s for each in windows(1, 2)]


def test_rows_that_cannot_be_written_are_left_out_and_the_thread_goes_on(disk: Disk) -> None:
    said: list[str] = []

    def write(host_id: str, rows: Sequence[Mapping[str, object]]) -> None:
        if host_id == "bad":
            raise ValueError("no such column")
        disk.rows += [(host_id, row) for row in rows]

    disk.write = write  # type: ignore[method-assign]
    history = History(disk, 0.01, clock=lambda: NOW, tell=said.append)
    history.add_windows("bad", [window()], {"job": "f"})
    wait_until(lambda: said)
    assert said == [
        "cotenant prm: 1 rows of host bad for the history of signatures were left out: ValueError: no such column"
    ]
    history.add_windows("good", [window()], {"job": "f"})
    wait_until(lambda: disk.rows)
    history.close()


def test_one_row_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    said: list[str] = []
    history = History(SignatureStore(tmp_path, 1e5, 1 << 30), 3600.0, clock=lambda: NOW, tell=said.append)
    broken = {3: {"framework": "\ud800"}, 7: {"batch_size": 10**30}, 8: {"job_id": "\ud800"}}
    windows = [replace(window(second), **broken.get(second, {})) for second in range(20)]
    history.add_windows("a", windows, {"job": "f"})
    history.close()
    left = {each.start_s for second, each in enumerate(windows) if second not in (3, 8)}  # a batch is only not told
    assert set(load_signatures(tmp_path)["start_s"]) == left
    (text,) = said
    assert "2 rows of host a for the history of signatures were left out: UnicodeEncodeError" in text


def test_rows_none_of_which_can_be_written_are_soon_given_up() -> None:
    tries, said = [], []

    class Never(Disk):
        def write(self, host_id: str, rows: Sequence[Mapping[str, object]]) -> None:
            tries.append(len(rows))
            raise ValueError("no such column")

    history = History(Never(), 3600.0, clock=lambda: NOW, tell=said.append)
    history.add_windows("a", windows(*range(5000)), {})
    history.close()
    assert len(tries) < 1000
    assert said == [
        "cotenant prm: 5000 rows of host a for the history of signatures were left out: ValueError: no such column"
    ]


def test_a_host_whose_folder_cannot_be_written_and_a_store_that_is_too_full_stop_no_other_host(disk: Disk) -> None:
    said: list[str] = []

    def write(host_id: str, rows: Sequence[Mapping[str, object]]) -> None:
        if host_id == "bad":
            raise PermissionError(13, "Permission denied")
        disk.rows += [(host_id, row) for row in rows]

    disk.write = write  # type: ignore[method-assign]
    history = History(disk, 0.01, clock=lambda: NOW, tell=said.append)
    history.add_windows("bad", [window(1)], {})
    wait_until(lambda: said)
    history.add_windows("good", [window(2)], {})
    wait_until(lambda: disk.rows)
    assert disk.tidied
    history.close()
    assert said == [
        "cotenant prm: the history of signatures cannot be written ([Errno 13] Permission denied); trying again"
    ]


def test_while_the_disk_is_full_memory_stays_bounded(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MOST_WAITING", 5)
    disk.error = FULL
    history, _, _ = start(disk)
    for second in range(20):
        history.add_windows("a", windows(second), {})
        tries = disk.tries
        wait_until(lambda tries=tries: disk.tries > tries)
    disk.error = None
    history.close()
    assert disk.seconds() == [each.start_s for each in windows(15, 16, 17, 18, 19)]


def test_the_store_is_tidied_once_an_hour_and_when_the_clock_was_set_back(disk: Disk) -> None:
    history, _, clock = start(disk)
    for now, times in ((1e9, 1), (1e9 + 3599, 1), (1e9 + 3601, 2), (1e9 - 10, 3)):
        clock.now = now
        history.add_windows("a", windows(now), {})
        wait_until(lambda now=now: any(row["start_s"] == window(now).start_s for _, row in disk.rows))
        wait_until(lambda times=times: len(disk.tidied) == times)
    history.close()


@pytest.mark.parametrize(
    ("path", "where"), [(None, "state/signatures"), ("{tmp}/elsewhere", "elsewhere")], ids=["default", "setting"]
)
def test_where_it_is_kept(tmp_path: Path, path: str | None, where: str) -> None:
    settings = SignatureSettings(path=path and path.format(tmp=tmp_path))
    history = open_history(settings, tmp_path / "state")
    assert history is not None
    history.add_windows("a", windows(NOW), {"job": "f"})
    history.close()
    assert list(load_signatures(tmp_path / where)["fingerprint"]) == ["f"]


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    assert open_history(SignatureSettings(enabled=False), tmp_path) is None


# -- the PRM's part -------------------------------------------------------------------------------------------------


def batch(*seconds: float) -> WindowBatch:
    return WindowBatch("h", 1e6, tuple(windows(*seconds)), {"job": "f"}, ())


def prm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Prm:
    class Scheduler:
        class measurements:  # noqa: N801 - as Ray calls it
            remote = staticmethod(lambda _event: None)

    monkeypatch.setattr(ray, "get_actor", lambda *_names: Scheduler)
    return Prm(str(tmp_path), Settings(signatures=SignatureSettings(**settings)).model_dump_json())


def test_the_prm_hands_its_windows_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = prm(tmp_path, monkeypatch)
    manager.observe(batch(NOW))
    manager.observe(batch(NOW + 1))
    manager.close()
    frame = load_signatures(tmp_path / "signatures")
    assert list(frame["start_s"]) == [each.start_s for each in windows(NOW, NOW + 1)]
    assert (set(frame["host"]), set(frame["fingerprint"])) == ({"h"}, {"f"})
    assert len(manager.windows(["job"])["job"]) == 2


def test_a_folder_that_cannot_be_written_costs_the_history_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    manager = prm(tmp_path, monkeypatch, path=str(tmp_path / "file" / "store"), write_every_s=0.01)
    manager.observe(batch(NOW))
    manager.observe(batch(NOW + 1))
    manager.close()
    assert len(manager.windows(["job"])["job"]) == 2
    assert capsys.readouterr().out.count("the history of signatures cannot be written") == 1
