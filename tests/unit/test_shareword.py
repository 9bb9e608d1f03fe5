"""The share word and the report file: what is written is what is read, whole or not at all."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cotenant.actors.shim import shareword
from cotenant.actors.shim.reportfile import ReportWriter, is_alive, read_report, read_reports
from cotenant.actors.shim.shareword import ShareReader, ShareRecord, ShareWordError, ShareWriter, create, read_all

ONE = ShareRecord(epoch=3, revision=0, compute=0.25, memory_bytes=1 << 33)
TWO = ShareRecord(epoch=3, revision=1, compute=1.0, memory_bytes=0)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "share")


def test_every_share_is_read_back_as_written(path):
    writer = create(path, [ONE, TWO])
    assert read_all(path) == [ONE, TWO]
    writer.write(1, ONE)
    assert read_all(path) == [ONE, ONE]


def test_a_reader_notices_what_is_new_and_only_that(path):
    writer = create(path, [ONE, ONE])
    reader = ShareReader(path, 0)
    assert reader.changed()
    assert reader.read() == ONE
    assert not reader.changed()
    writer.write(1, TWO)
    assert not reader.changed(), "that was the other share"
    writer.write(0, TWO)
    assert reader.changed()
    assert reader.read() == TWO


def test_a_new_writer_goes_on_where_the_last_one_stopped(path):
    create(path, [ONE]).close()
    reader = ShareReader(path, 0)
    reader.read()
    for revision in range(1, 4):
        writer = ShareWriter(path)
        writer.write(0, ONE._replace(revision=revision))
        writer.close()
        assert reader.changed()
        assert reader.read() == ONE._replace(revision=revision)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"compute": 0.0}, "compute"),
        ({"compute": -0.5}, "compute"),
        ({"compute": 1.01}, "compute"),
        ({"compute": float("nan")}, "compute"),
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"epoch": 1 << 64}, "epoch"),
        ({"revision": -1}, "revision"),
    ],
)
def test_what_is_no_share_is_refused(path, change, field):
    with pytest.raises(ShareWordError, match=f"{field}: .* is not accepted"):
        create(path, [ONE._replace(**change)])
    assert not Path(path).exists()


def test_there_must_be_a_share(path):
    with pytest.raises(ShareWordError, match="give 1 to"):
        create(path, [])


@pytest.mark.parametrize("index", [-1, 1])
def test_an_index_without_a_share_is_refused(path, index):
    create(path, [ONE])
    with pytest.raises(ShareWordError, match="has 0 to 0"):
        ShareReader(path, index)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"x" * 192,
        shareword.MAGIC + struct.pack("<III", shareword.VERSION + 1, 1, 128) + bytes(172),
        shareword.MAGIC + struct.pack("<III", shareword.VERSION, 2, 128) + bytes(172),
    ],
    ids=["empty", "short", "foreign", "newer version", "cut off"],
)
def test_a_file_that_is_no_share_word_is_refused(tmp_path, content):
    (tmp_path / "share").write_bytes(content)
    with pytest.raises(ShareWordError):
        ShareReader(str(tmp_path / "share"), 0)


def test_a_writer_killed_in_the_middle_leaves_the_last_value(path):
    """It had begun to fill the slot that is not in force."""
    create(path, [ONE])
    generation = 1
    slot = 64 + 8 + ((generation + 1) & 1) * 48
    with Path(path).open("r+b") as file:
        file.seek(slot)
        file.write(b"\xff" * 20)
    assert read_all(path) == [ONE]
    writer = ShareWriter(path)
    writer.write(0, TWO)
    assert read_all(path) == [TWO]


def test_a_damaged_record_is_not_taken_for_a_share(path):
    create(path, [ONE])
    with Path(path).open("r+b") as file:
        file.seek(64 + 8 + 48 + 30)
        file.write(b"\xff")
    reader = ShareReader(path, 0)
    assert reader.read() is None
    assert reader.changed(), "and the next look tries again"


WRITER = """
import sys, time
sys.path.insert(0, {src!r})
from cotenant.actors.shim.shareword import ShareRecord, ShareWriter
writer = ShareWriter({path!r})
end = time.monotonic() + 0.5
revision = 0
while time.monotonic() < end:
    for _ in range(100):
        revision += 1
        writer.write(0, ShareRecord(revision, revision, 1 / (1 + revision % 7), revision))
"""


def test_no_reader_sees_a_torn_record_while_another_process_writes(path):
    create(path, [ShareRecord(0, 0, 1.0, 0)])
    src = str(Path(shareword.__file__).parents[3])
    writing = subprocess.Popen([sys.executable, "-c", WRITER.format(src=src, path=path)])
    reader = ShareReader(path, 0)
    seen = set()
    end = time.monotonic() + 10
    while writing.poll() is None and time.monotonic() < end:
        share = reader.read()
        if share is None:  # outrun a hundred times in a row: no answer is right, a wrong one would not be
            continue
        assert share == (share.epoch, share.epoch, 1 / (1 + share.epoch % 7), share.epoch)
        seen.add(share.epoch)
    assert writing.wait() == 0
    assert len(seen) > 10


def test_a_report_is_read_back(tmp_path):
    writer = ReportWriter(str(tmp_path), 2)
    first = read_report(writer.path)
    assert first is None, "nothing was published yet"
    writer.write(5, 12.5, 0.25, 3)
    report = read_report(writer.path)
    assert report is not None
    assert (report.pid, report.share_index, report.steps) == (os.getpid(), 2, 5)
    assert (report.last_step_s, report.throttled_s, report.controls) == (12.5, 0.25, 3)
    assert is_alive(report)
    assert not is_alive(report._replace(start_ticks=report.start_ticks - 1)), "a reused pid is another process"
    assert read_reports(str(tmp_path)) == [report]


@pytest.mark.parametrize("content", [b"", b"CTREPRT\0", b"\0" * 200])
def test_a_file_that_is_no_report_is_left_out(tmp_path, content):
    (tmp_path / "report-17").write_bytes(content)
    assert read_reports(str(tmp_path)) == []


def test_a_report_that_is_gone_is_none(tmp_path):
    assert read_report(str(tmp_path / "report-1")) is None
