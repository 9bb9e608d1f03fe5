"""What is made of NVML's answers: whose they are, how old, and which of them cannot be true."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.actors.devices.nvml.attribution import Told, Use, attribute
from cotenant.actors.devices.nvml.bounds import bounded, fraction, used_bytes
from cotenant.actors.devices.nvml.pids import PidMap
from cotenant.actors.devices.nvml.processes import HOLD_S, Held, UtilisationHold, union

GIB = 1 << 30


# -- what can be true -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "total", "expected"),
    [
        (0, 80 * GIB, 0),
        (8 * GIB, 80 * GIB, 8 * GIB),
        (80 * GIB, 80 * GIB, 80 * GIB),
        (81 * GIB, 80 * GIB, None),
        (18446744073707737660, 80 * GIB, None),
        (18446744073707737660, None, None),
        (None, 80 * GIB, None),
        (-1, 80 * GIB, None),
        (8 * GIB, None, 8 * GIB),
    ],
)
def test_bytes(used: int | None, total: int | None, expected: int | None) -> None:
    assert used_bytes(used, total) == expected


def test_fractions_and_levels() -> None:
    readings = [fraction(value) for value in (None, 0, 50, 100, 101, 102, 4294967295, -1, float("nan"))]
    assert readings == [None, 0.0, 0.5, 1.0, 1.0, None, None, None, None]
    assert [bounded(value, 10.0) for value in (None, 0, 10, 10.1, -0.1, float("inf"))] == [
        None,
        0,
        10,
        None,
        None,
        None,
    ]


# -- lists of processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([], {}),
        ([(1, 24576), (2, 600)], {1: 24576, 2: 600}),
        ([(1, 100), (1, 100)], {1: 100}),  # an MPS client in both lists
        ([(1, None), (1, 100)], {1: 100}),
        ([(1, 100), (1, None)], {1: 100}),
        ([(1, None)], {1: None}),
        ([(1, 0)], {1: 0}),
        ([(1, 30001), (2, 5)], {1: None, 2: 5}),  # more than there is
        ([(6498025472, 5), (1, 18446744073707737660)], {6498025472: 5, 1: None}),
    ],
)
def test_union_of_lists(listed: list[tuple[int, int | None]], expected: dict[int, int | None]) -> None:
    assert union(listed, 30_000) == expected


def test_utilisation_is_held_with_its_age_and_ends() -> None:
    hold = UtilisationHold(pynvml, lambda: 1000.0)
    at = int(1000e6)
    hold.take([(1, at - 2_000_000, 90), (1, at - 500_000, 40), (2, at - 100_000, 4294967295)], 50.0)
    assert hold.held() == {1: Held(0.4, 50.0)}
    hold.take([(1, at - 500_000, 99)], 50.2)  # the same sample again
    assert hold.held() == {1: Held(0.4, 50.0)}
    hold.take([(3, at + 300_000, 7), (3, at + 200_000, 60), (1, at + 300_000, 20)], 50.6)
    assert hold.held() == {1: Held(0.2, 50.6), 3: Held(0.07, 50.6)}
    hold.take([(3, at + 400_000, 8)], 51.0)
    hold.take([], 50.6 + HOLD_S + 0.01)
    assert hold.held() == {3: Held(0.08, 51.0)}


@given(
    stamps=st.lists(st.one_of(st.integers(0, 2**64 - 1), st.integers(1_000_000_000, 1_020_000_000)), max_size=5),
    step_s=st.floats(-900.0, 900.0),
)
def test_neither_an_absurd_time_stamp_nor_a_clock_that_is_set_silences_a_process(stamps: list[int], step_s: float):
    """The driver is asked for what is newer than the newest that was seen."""
    unix_s = [1000.0]
    hold = UtilisationHold(pynvml, lambda: unix_s[0])
    hold.take([(7, stamp, 90) for stamp in stamps], 50.0)
    unix_s[0] += step_s
    hold.update(Driver((2, 0, 0)), None, 52.0)
    unix_s[0] += 2.5 * HOLD_S  # for so long it may be silent
    stamp = int((unix_s[0] - 0.2) * 1e6)
    driver = Driver((1, stamp, 40))
    hold.update(driver, None, 55.0)
    assert driver.asked_us < stamp
    assert hold.held() == {1: Held(0.4, 55.0)}


class Driver:
    """Has one sample of a process."""

    def __init__(self, sample: tuple[int, int, int]) -> None:
        self.table = (pynvml.c_nvmlProcessUtilizationSample_t * 1)()
        self.table[0].pid, self.table[0].timeStamp, self.table[0].smUtil = sample
        self.asked_us = 0

    def ask(self, name: str, handle: object, seen_us: int, usual: object) -> list[Any]:
        self.asked_us = seen_us
        return [sample for sample in self.table if sample.timeStamp > seen_us]


# -- whose it is ----------------------------------------------------------------------------------------------------


def told(util: float | None, shares: dict[int, float] | None, memory: Any = "all", device: float | None = 9e9) -> Told:
    held = None if shares is None else {pid: Held(value, 9.8) for pid, value in shares.items()}
    listed = {1: 100, 2: 200} if memory == "all" else memory
    return Told(util, device, held, listed)


@pytest.mark.parametrize(
    ("says", "all_known", "a", "b"),
    [
        # The driver tells both; a job of several processes adds up and is as old as its oldest reading.
        (told(0.7, {1: 0.3, 2: 0.4}), True, Use(0.3, 9.8, "process", 100), Use(0.4, 9.8, "process", 200)),
        (
            told(0.9, {1: 0.3, 11: 0.2, 2: 0.4}, {1: 100, 11: 50, 2: 0}),
            True,
            Use(0.5, 9.8, "process", 150),
            Use(0.4, 9.8, "process", 0),
        ),
        # The driver names those only that did something.
        (told(0.3, {1: 0.3}), True, Use(0.3, 9.8, "process", 100), Use(0.0, None, "process", 200)),
        (told(0.0, {1: 0.3}), True, Use(0.0, None, "process", 100), Use(0.0, None, "process", 200)),
        (told(0.0, {}), True, Use(0.0, None, "process", 100), Use(0.0, None, "process", 200)),
        (told(None, {1: 0.3}), True, Use(0.3, 9.8, "process", 100), Use(0.0, None, "process", 200)),
        # What nobody is said to have done is divided among those it may have been.
        (told(0.8, {1: 0.3}), True, Use(0.3, 9.8, "process", 100), Use(0.5, None, "device", 200)),
        (told(0.8, {}), True, Use(0.4, None, "device", 100), Use(0.4, None, "device", 200)),
        (told(0.8, {}, {1: 100}), True, Use(0.8, None, "device", 100), Use(0.0, None, "process", 0)),
        (told(0.9, {}, {1: 1, 2: 2, 77: 3}), True, Use(0.3, None, "device", 1), Use(0.3, None, "device", 2)),
        # A stranger's share is the stranger's.
        (told(0.8, {77: 0.8}), True, Use(0.0, None, "process", 100), Use(0.0, None, "process", 200)),
        # No utilisation by process (MIG, no permission).
        (told(0.8, None), True, Use(0.4, None, "device", 100), Use(0.4, None, "device", 200)),
        (told(0.0, None), True, Use(0.0, None, "device", 100), Use(0.0, None, "device", 200)),
        (told(None, None), True, Use(memory_bytes=100), Use(memory_bytes=200)),
        (told(None, {}), True, Use(memory_bytes=100), Use(memory_bytes=200)),
        # Memory that is not told, or cannot be true, is unknown for the whole job.
        (told(0.0, {}, {1: None, 11: 5, 2: 6}), True, Use(0.0, None, "process"), Use(0.0, None, "process", 6)),
        (told(0.0, {}, None), True, Use(0.0, None, "process"), Use(0.0, None, "process")),
        # In a container whose numbers nobody can translate: strangers may be ours.
        (told(0.8, {777: 0.8}, {777: 5}), False, Use(0.4, None, "device"), Use(0.4, None, "device")),
        (told(0.8, {777: 0.5}, {1: 5, 777: 5}), False, Use(0.4, None, "device", 5), Use(0.4, None, "device")),
    ],
)
def test_two_jobs(says: Told, all_known: bool, a: Use, b: Use) -> None:
    owners = {1: "a", 11: "a", 2: "b"}
    found = attribute(["a", "b"], says, owners.get, all_known)
    assert [round_use(found[job]) for job in ("a", "b")] == [told_by_process(a), told_by_process(b)]


def round_use(use: Use) -> Use:
    return replace(use, util=None if use.util is None else round(use.util, 9))


def told_by_process(use: Use) -> Use:
    """The memory of one of several jobs is never the whole device's."""
    return replace(use, memory_source=None if use.memory_bytes is None else "process")


@pytest.mark.parametrize(
    ("says", "all_known", "expected"),
    [
        (told(0.8, {777: 0.8}, {777: 5}, 7e9), False, Use(0.8, None, "device", 7e9, "device")),
        (told(0.8, {777: 0.8}, {777: 5}, 7e9), True, Use(0.0, None, "process", 0, "process")),
        (told(0.8, {}, {1: None}, 7e9), True, Use(0.8, None, "device", 7e9, "device")),
        (told(0.8, {}, {1: None}, None), True, Use(0.8, None, "device", None)),
        (told(0.8, {}, {1: None, 777: 5}, 7e9), True, Use(0.4, None, "device", None)),
    ],
)
def test_a_job_that_has_the_device_to_itself(says: Told, all_known: bool, expected: Use) -> None:
    assert attribute(["a"], says, {1: "a"}.get, all_known) == {"a": expected}


@given(
    st.one_of(st.none(), st.floats(0, 1)),
    st.one_of(st.none(), st.dictionaries(st.integers(1, 6), st.floats(0, 1))),
    st.one_of(st.none(), st.dictionaries(st.integers(1, 6), st.one_of(st.none(), st.integers(0, GIB)))),
    st.booleans(),
)
def test_nothing_is_made_up(
    util: float | None, shares: dict[int, float] | None, memory: dict[int, int | None] | None, known: bool
) -> None:
    owners = {1: "a", 2: "a", 3: "b", 4: "c"}
    found = attribute(["a", "b", "c"], told(util, shares, memory), owners.get, known)
    assert list(found) == ["a", "b", "c"]
    for use in found.values():
        assert use.util is None or 0.0 <= use.util <= 1.0
        assert (use.util is None) == (use.source is None)
        assert (use.memory_bytes is None) == (use.memory_source is None)
    estimated = sum(use.util or 0.0 for use in found.values() if use.source == "device")
    assert estimated <= (util or 0.0) + 1e-9
    listed = sum(used or 0 for used in (memory or {}).values())
    assert sum(use.memory_bytes or 0 for use in found.values()) <= listed


# -- numbers of processes -------------------------------------------------------------------------------------------


def proc(folder: Path, namespace: str, processes: dict[int, tuple[str, int]]) -> Path:
    """A ``/proc`` with these processes: number → NSpid, start."""
    (folder / "self/ns").mkdir(parents=True)
    (folder / "self/ns/pid").symlink_to(namespace)
    for pid, (numbers, start) in processes.items():
        (folder / str(pid)).mkdir()
        (folder / str(pid) / "status").write_text(f"Name:\tsleep\nNSpid:\t{numbers}\n")
        (folder / str(pid) / "stat").write_text(f"{pid} (a b) S 1 " + "0 " * 17 + f"{start} 0\n")
    if 99 in processes:  # the process that looks
        (folder / "self/status").write_text((folder / "99/status").read_text())
    return folder


def test_on_the_host_numbers_are_what_they_are(tmp_path: Path) -> None:
    pids = PidMap(proc(tmp_path / "proc", "pid:[4026531836]", {}), tmp_path / "none")
    assert pids.translates
    assert [pids.ours(pid, {5}) for pid in (5, 6, 6498025472)] == [5, None, None]


def test_in_a_container_with_the_hosts_proc(tmp_path: Path) -> None:
    own = proc(tmp_path / "proc", "pid:[4026539999]", {7: ("7", 500), 8: ("8", 600), 324: ("324", 700)})
    host = proc(
        tmp_path / "host",
        "pid:[4026539999]",
        {
            99: ("99 4", 100),
            1007: ("1007 7", 500),
            2007: ("2007 7", 555),  # of another container: the same number, another process
            1008: ("1008 8 3", 600),  # deeper
            55: ("55", 1),  # of the host
        },
    )
    pids = PidMap(own, host)
    assert pids.translates
    members = {7, 8, 324}
    # 324: a driver that translates some of its lists itself
    assert [pids.ours(pid, members) for pid in (1007, 2007, 1008, 55, 404, 324)] == [7, None, 8, None, None, 324]
    pids.forget({1007})
    (host / "1008/status").unlink()
    assert [pids.ours(pid, members) for pid in (1007, 1008)] == [7, None]


def test_in_a_container_without_it_only_numbers_that_fit_are_ours(tmp_path: Path) -> None:
    pids = PidMap(proc(tmp_path / "proc", "pid:[4026539999]", {}), tmp_path / "none")
    assert not pids.translates
    assert [pids.ours(pid, {7}) for pid in (7, 1007)] == [7, None]


def test_this_machine() -> None:
    assert PidMap().ours(os.getpid(), {os.getpid()}) == os.getpid()
