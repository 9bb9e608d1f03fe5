"""The output folder: what survives a crash, who may write, and which card it accepts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from benchmarks.colocation import records
from benchmarks.colocation.card import add_workload, make_card, settle_card
from benchmarks.colocation.records import DiskFull, Folder, FolderError, complete_visits, read

IDENTITY = {"gpu_type": "T", "gpu_uuid": "GPU-1", "driver": "580", "cuda": "13.0", "host_cores": 2}
METHOD = {"window_s": 3.0, "settle_s": 0.5}


def card(device="cuda", *, identity=(), method=(), dry_run=False):
    return make_card(device, IDENTITY | dict(identity), METHOD | dict(method), dry_run=dry_run)


def visit(name: str, *members: str) -> list[dict[str, object]]:
    """Its records: odd occasions begin with the members alone, even ones with all together."""
    slots = range(len(members))
    turns = 3 * [[0]] if len(members) == 1 else 2 * [*([slot] for slot in slots), [*slots]]
    if name.endswith("2"):
        turns.reverse()
    return [
        {"format": 1, "visit": name, "members": list(members), "position": position, "slot": slot}
        for position, turn in enumerate(turns)
        for slot in turn
    ]


def lines(path: Path) -> list[str]:
    return (path / records.WINDOWS).read_text().splitlines()


@pytest.mark.parametrize("occasion", [1, 2])
@pytest.mark.parametrize(("members", "count"), [("a", 3), ("ab", 8), ("aa", 8), ("abc", 12)])
def test_a_visit_is_complete_with_its_last_record_and_not_before(members, count, occasion):
    windows = visit(f"m/x#{occasion}", *members)
    assert len(windows) == count
    assert complete_visits(windows) == {f"m/x#{occasion}"}
    assert not any(complete_visits(windows[:kept] + windows[kept + 1 :]) for kept in range(count))


def test_complete_visits_come_back(tmp_path):
    with Folder(tmp_path) as folder:
        folder.add_visit(visit("m/a#1", "a"), {"format": 1, "member": "a"})
        folder.add_visit(visit("m/a+b#1", "a", "b"))
    with Folder(tmp_path) as folder:
        assert folder.finished == {"m/a#1", "m/a+b#1"}
        assert len(folder.windows) == 11


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(lambda text: text[:-10], id="in the middle of the last line"),
        pytest.param(lambda text: text[:-1], id="before the last newline"),
        pytest.param(lambda text: text + '{"format": 1, "vis', id="a line of the next visit"),
        pytest.param(lambda text: text + "\0\0\0\n", id="zeros"),
        pytest.param(lambda text: text[: text.rindex("\n", 0, -1) + 1], id="between two lines of a visit"),
    ],
)
def test_what_a_crash_cut_off_is_repeated_and_the_rest_kept(tmp_path, cut):
    with Folder(tmp_path) as folder:
        folder.add_visit(visit("m/a#1", "a"))
        folder.add_visit(visit("m/a+b#1", "a", "b"))
    file = tmp_path / records.WINDOWS
    whole = file.read_text()
    file.write_text(cut(whole))
    with Folder(tmp_path) as folder:
        assert "m/a#1" in folder.finished
        kept = whole if "m/a+b#1" in folder.finished else "".join(whole.splitlines(keepends=True)[:3])
        assert file.read_text() == kept
        if "m/a+b#1" not in folder.finished:
            folder.add_visit(visit("m/a+b#1", "a", "b"))
    assert file.read_text() == whole


def test_looking_repairs_nothing(tmp_path):
    with Folder(tmp_path) as folder:
        folder.add_visit(visit("m/a#1", "a"))
    file = tmp_path / records.WINDOWS
    file.write_text(file.read_text() + '{"for')
    before = file.read_bytes()
    windows, events = read(tmp_path)
    assert complete_visits(windows) == {"m/a#1"}
    assert events == []
    assert file.read_bytes() == before
    assert read(tmp_path / "nowhere") == ([], [])


def test_damage_in_the_middle_is_refused_with_its_line(tmp_path):
    with Folder(tmp_path) as folder:
        folder.add_visit(visit("m/a#1", "a"))
    file = tmp_path / records.WINDOWS
    content = lines(tmp_path)
    file.write_text("\n".join([content[0], "garbage", *content[1:]]) + "\n")
    with pytest.raises(FolderError, match=r"windows\.jsonl, line 2: not a JSON object"):
        Folder(tmp_path)
    with pytest.raises(FolderError, match="line 2"):  # the lock was let go
        Folder(tmp_path)


def test_another_format_is_refused(tmp_path):
    with Folder(tmp_path) as folder:
        folder.add_event({"format": 2, "event": "died"})
    with pytest.raises(FolderError, match=r"events\.jsonl, line 1: format is 2; this version reads and writes 1"):
        Folder(tmp_path)


def test_a_set_that_does_not_fit_is_finished_and_one_that_hung_is_not(tmp_path):
    with Folder(tmp_path) as folder:
        for event in ("does_not_fit", "hung", "died"):
            folder.add_event({"format": 1, "visit": f"m/{event}#1", "event": event})
        assert folder.finished == {"m/does_not_fit#1"}


def test_two_runs_cannot_share_a_folder(tmp_path):
    with Folder(tmp_path), pytest.raises(FolderError, match=f"another run \\(process {os.getpid()}\\) works in it"):
        Folder(tmp_path)
    Folder(tmp_path).close()


def test_a_lock_file_of_a_dead_process_does_not_matter(tmp_path):
    (tmp_path / "lock").write_text("999999999\n")
    with Folder(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_full_disk_keeps_what_was_there(tmp_path, monkeypatch):
    with Folder(tmp_path) as folder:
        folder.add_visit(visit("m/a#1", "a"))
        real, room = os.write, [100]

        def write(file: int, data: bytes) -> int:
            if room[0] == 0:
                raise OSError(28, "No space left on device")
            written = real(file, data[: room[0]])
            room[0] -= written
            return written

        monkeypatch.setattr(records.os, "write", write)
        with pytest.raises(DiskFull, match="No space left on device; earlier visits are kept"):
            folder.add_visit(visit("m/b#1", "b"))
        monkeypatch.undo()
        assert folder.finished == {"m/a#1"}
    assert len(lines(tmp_path)) == 3


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match=r"--out .*file: cannot be made"):
        Folder(tmp_path / "file")


def test_the_same_card_goes_on_with_its_run_id(tmp_path):
    first = settle_card(tmp_path, card())
    assert settle_card(tmp_path, card(identity={"gpu_uuid": "GPU-2"})) == first


@pytest.mark.parametrize(
    ("field", "new"),
    [
        ("device", card("cpu")),
        ("gpu_type", card(identity={"gpu_type": "U"})),
        ("driver", card(identity={"driver": "590"})),
        ("cuda", card(identity={"cuda": None})),
        ("torch", card() | {"torch": "1.0"}),
        ("dry_run", card(dry_run=True)),
        ("method", card(method={"window_s": 1.0})),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path, field, new):
    there = settle_card(tmp_path, card())
    with pytest.raises(FolderError) as refusal:
        settle_card(tmp_path, new)
    for part in (f"{field} = {there[field]!r}", f"this run has {new[field]!r}", "give another --out"):
        assert part in str(refusal.value)


def test_a_damaged_card_is_refused(tmp_path):
    (tmp_path / "card.json").write_text("{")
    with pytest.raises(FolderError, match=r"card\.json: cannot be read"):
        settle_card(tmp_path, card())


def test_a_workload_that_changed_is_refused(tmp_path):
    there = settle_card(tmp_path, card())
    add_workload(tmp_path, there, "a", {"batch": 8})
    add_workload(tmp_path, there, "a", {"batch": 8})
    assert json.loads((tmp_path / "card.json").read_text())["workloads"] == {"a": {"batch": 8}}
    with pytest.raises(FolderError, match=r"workload 'a' was \{'batch': 8\} there and is \{'batch': 16\} now"):
        add_workload(tmp_path, there, "a", {"batch": 16})


def test_a_machine_with_one_core_is_a_limit_of_the_figures():
    limits = card("cpu", identity={"host_cores": 1})["limits"]
    assert any("one core" in limit and "helper" in limit for limit in limits)
