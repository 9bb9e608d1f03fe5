"""The Parquet store of signatures: what is written is read back, and what is broken, old or too much is dealt with."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import window

from cotenant.forecasting.datasets.signature_store import SignatureFileError, SignatureStore, load_signatures
from cotenant.forecasting.signatures import COLUMNS, FIELDS, from_row, to_row
from cotenant.forecasting.types import SIGNATURE_VERSION, DeviceActivity, Signature

DAY = 86400.0
NOON = 20_000 * DAY + DAY / 2  # of 2024-10-04
NUMBERS = [each.name for each in FIELDS if each.kind != "text" and each.since == 0 and each.name != "schema_version"]


def at(second: float, **more: Any) -> Signature:
    return replace(window(), start_s=NOON + second, **more)


def rows(*signatures: Signature) -> list[dict[str, Any]]:
    return [to_row(each) | {"fingerprint": "f"} for each in signatures]


@pytest.fixture
def store(tmp_path: Path) -> SignatureStore:
    return SignatureStore(tmp_path / "store", keep_days=7.0, keep_bytes=1 << 30)


def files(store: SignatureStore) -> list[str]:
    return sorted(path.relative_to(store.root).as_posix() for path in store.root.rglob("*") if path.is_file())


def test_what_is_written_is_read_back(store: SignatureStore) -> None:
    written = [at(second, batch_size=8, device=DeviceActivity(power_w=100.0 + second)) for second in range(5)]
    written[3] = at(3, util_mean=None, framework="torch")
    store.write("host-a", rows(*written))
    frame = load_signatures(store.root)
    assert [from_row(row) for row in frame.to_dict("records")] == written
    assert list(frame.columns) == [*COLUMNS, "fingerprint", "host"]
    assert set(frame["host"]) == {"host-a"}
    assert frame["mix_gemm"].isna().all()


def test_files_are_by_day_and_host(store: SignatureStore) -> None:
    store.write("a", rows(at(0), at(DAY)))
    store.write("b/c d", rows(at(1)))
    assert [name.rpartition("/")[0] for name in files(store)] == [
        "date=2024-10-04/host=a",
        "date=2024-10-04/host=b%2Fc%20d",
        "date=2024-10-05/host=a",
    ]
    assert set(load_signatures(store.root)["host"]) == {"a", "b/c d"}


def test_pandas_reads_the_folder_as_it_is(store: SignatureStore) -> None:
    store.write("0123", rows(at(0, util_mean=None), at(1)))
    store.write("b", rows(at(2, framework="torch")))
    (store.root / "date=2024-10-04/host=b/.part-1-0.parquet").write_bytes(b"PAR1 half")
    frame = pd.read_parquet(store.root)
    assert len(frame) == 3
    assert {*COLUMNS, "fingerprint", "date", "host"} == set(frame.columns)
    assert frame["util_mean"].isna().sum() == 1


@pytest.mark.parametrize(
    ("selection", "seconds"),
    [
        ({}, [0, 1, 2, DAY]),
        ({"since": NOON + 1}, [1, 2, DAY]),
        ({"until": NOON + 2}, [0, 1]),
        ({"since": NOON + DAY}, [DAY]),
        ({"hosts": ["a"]}, [0, 1, DAY]),
        ({"jobs": ["job-b"]}, [2]),
        ({"hosts": ["a"], "jobs": ["job-b"]}, []),
        ({"hosts": []}, []),
    ],
)
def test_a_selection(store: SignatureStore, selection: dict[str, Any], seconds: list[float]) -> None:
    store.write("a", rows(at(DAY), at(1), at(0)))
    store.write("b", rows(at(2, job_id="job-b")))
    frame = load_signatures(store.root, **selection)
    assert list(frame["start_s"] - NOON) == seconds
    assert list(frame.columns) == [*COLUMNS, "fingerprint", "host"]


def test_no_folder_and_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give the root of a signature store"):
        load_signatures(tmp_path / "none")
    assert load_signatures(tmp_path).empty


def test_absurd_readings_are_missing_and_windows_without_a_place_left_out(store: SignatureStore) -> None:
    store.write("a", rows(at(0, memory_bytes=10**400), at(1, window_s=float("nan")), at(2, util_mean=2.5)))
    frame = load_signatures(store.root)
    assert list(frame["start_s"] - NOON) == [0, 2]
    assert frame["memory_bytes"].isna().tolist() == [True, False]
    assert frame["util_mean"].isna().tolist() == [False, True]


# -- broken and foreign files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 4, 0.5, -1], ids=["empty", "four bytes", "half", "all but one"])
def test_a_half_file_is_named_and_left_out(store: SignatureStore, keep: float) -> None:
    store.write("a", rows(at(0)))
    (broken,) = store.write("a", rows(at(1)))
    data = broken.read_bytes()
    broken.write_bytes(data[: int(len(data) * keep) if keep == 0.5 else int(keep)])
    with pytest.warns(UserWarning, match=f"{broken.name}: cannot be read and is left out"):
        assert list(load_signatures(store.root)["start_s"] - NOON) == [0]
    store.tidy(NOON + 2 * DAY)  # nothing to merge, and nothing breaks
    assert broken.exists()


def write_version_0(store: SignatureStore, **more: Any) -> Path:
    """A file as version 0 would have written it."""
    columns = {each.name: [to_row(at(5))[each.name]] for each in FIELDS if each.since == 0}
    columns |= {"schema_version": [0], "fingerprint": ["f"]} | more
    folder = store.root / "date=2024-10-04/host=old"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({name: values for name, values in columns.items() if values}), folder / "part-5-0.parquet")
    return folder / "part-5-0.parquet"


def test_a_file_of_version_0_is_upgraded(store: SignatureStore) -> None:
    write_version_0(store)
    store.write("new", rows(at(6, batch_size=4)))
    frame = load_signatures(store.root)
    assert [from_row(row) for row in frame.to_dict("records")] == [at(5), at(6, batch_size=4)]


def test_a_file_of_a_newer_version_is_refused_by_name(store: SignatureStore) -> None:
    newer = SIGNATURE_VERSION + 1
    path = write_version_0(store, schema_version=[newer])
    says = f"{path.name}: schema_version: {newer} is not accepted; give 0 to {SIGNATURE_VERSION}"
    with pytest.raises(SignatureFileError, match=says):
        load_signatures(store.root)


def test_a_file_that_lacks_columns_is_refused_by_name(store: SignatureStore) -> None:
    path = write_version_0(store, util_mean=None, samples=None)
    with pytest.raises(SignatureFileError, match=f"{path.name}: lacks columns of version 0: samples, util_mean"):
        load_signatures(store.root)


@pytest.mark.parametrize("column", NUMBERS)
def test_a_file_with_words_for_numbers_is_refused_by_name(store: SignatureStore, column: str) -> None:
    path = write_version_0(store, **{column: ["many"]})
    with pytest.raises(SignatureFileError, match=f"{path.name}: column '{column}': .*many"):
        load_signatures(store.root)


@pytest.mark.parametrize("column", ["samples", "neighbours"])
def test_a_file_with_holes_where_there_is_always_a_number_is_refused_by_name(
    store: SignatureStore, column: str
) -> None:
    path = write_version_0(store, **{column: pa.array([None], pa.int64())})
    with pytest.raises(SignatureFileError, match=f"{path.name}: column '{column}'"):
        load_signatures(store.root)


def test_a_write_that_fails_leaves_nothing(store: SignatureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_table: object, where: Path, **_options: object) -> None:
        where.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        store.write("a", rows(at(0)))
    assert files(store) == []


# -- keeping it in bounds -------------------------------------------------------------------------------------------


def test_old_days_are_deleted(store: SignatureStore) -> None:
    store.write("a", rows(*(at(day * DAY) for day in range(10))))
    store.tidy(NOON + 9 * DAY)
    assert list((load_signatures(store.root)["start_s"] - NOON) / DAY) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert not (store.root / "date=2024-10-04").exists()


def test_what_is_too_much_is_deleted_oldest_first(store: SignatureStore) -> None:
    paths = [path for second in range(6) for path in store.write("ab"[second % 2], rows(at(second * 10)))]
    small = SignatureStore(store.root, 7.0, sum(path.stat().st_size for path in paths[3:]))
    small.tidy(NOON)
    assert list(load_signatures(store.root)["start_s"] - NOON) == [30, 40, 50]


def test_a_day_that_is_over_becomes_one_file_per_host(store: SignatureStore) -> None:
    for second in range(4):
        store.write("a", rows(at(second), at(DAY + second)))
        store.write("b", rows(at(second + 0.5)))
    before = load_signatures(store.root)
    store.tidy(NOON + DAY)
    assert len(files(store)) == 2 + 4  # today's are left alone
    pd.testing.assert_frame_equal(load_signatures(store.root), before)
    store.write("a", rows(at(9)))  # late
    store.tidy(NOON + DAY)
    assert len(files(store)) == 2 + 4
    assert len(load_signatures(store.root)) == len(before) + 1


def test_a_merge_that_was_killed_is_finished_the_next_time(store: SignatureStore) -> None:
    (first,) = store.write("a", rows(at(0)))
    store.write("a", rows(at(1)))
    data = first.read_bytes()
    store.tidy(NOON + DAY)
    first.write_bytes(data)  # as if the writer had not come to delete it
    assert len(load_signatures(store.root)) == 2
    store.tidy(NOON + DAY)
    assert len(files(store)) == 1
    assert len(load_signatures(store.root)) == 2


def harmed(data: bytes, kind: str, place: int) -> bytes:
    content = bytearray(data)
    at_least_magic = 4 + place % (len(content) - 8)
    if kind == "cut off":
        return bytes(content[:at_least_magic])
    content[at_least_magic : at_least_magic + 40] = b"\x5a" * len(content[at_least_magic : at_least_magic + 40])
    return bytes(content)


@settings(deadline=None)
@given(st.sampled_from(("cut off", "overwritten")), st.integers(0, 1 << 16), st.integers(0, 2))
def test_wherever_a_file_is_damaged_the_others_are_kept_in_bounds(kind: str, place: int, which: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = SignatureStore(Path(folder) / "store", keep_days=7.0, keep_bytes=1 << 30)
        paths = [store.write("a", rows(*(at(100 * part + second) for second in range(40))))[0] for part in range(3)]
        paths[which].write_bytes(harmed(paths[which].read_bytes(), kind, place))
        store.tidy(NOON + DAY)
        store.tidy(NOON + DAY)
        assert len(files(store)) <= 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = load_signatures(store.root)
            except SignatureFileError:  # what is read is no number, or of no version that is known
                return
        assert {float(100 * part) for part in range(3) if part != which} <= set(found["start_s"] - NOON)
        SignatureStore(store.root, keep_days=7.0, keep_bytes=1).tidy(NOON + DAY)
        assert files(store) == []


@pytest.mark.parametrize("said", [b"", b"[1]", b"{}", b"3", b'["../../mine", "mine"]', b"\xff", b"[" * 100_000])
def test_a_file_that_names_what_it_cannot_replace_replaces_nothing(store: SignatureStore, said: bytes) -> None:
    (path,) = store.write("a", rows(at(0)))
    table = pq.read_table(path, partitioning=None)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"cotenant.parts": said}), path)
    mine = [path.with_name("mine"), store.root / "mine"]
    for each in mine:
        each.write_text("mine")
    store.tidy(NOON + DAY)
    assert all(each.exists() for each in (path, *mine))


def test_what_comes_late_is_not_taken_for_what_was_replaced(store: SignatureStore) -> None:
    for late in range(4):
        store.write("a", rows(at(0, job_id=f"late by {late}")))
        store.tidy(NOON + DAY)
    assert len(load_signatures(store.root)) == 4


def write_often(root: Path, number: int) -> None:
    store = SignatureStore(root, keep_days=7.0, keep_bytes=1 << 30)
    for _ in range(20):
        store.write("a", rows(at(0, job_id=f"of {number}")))
        store.tidy(NOON + DAY)


def test_several_processes_write_to_one_store_and_tidy_it(store: SignatureStore) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_often, args=(store.root, number)) for number in range(3)]
    for each in writers:
        each.start()
    for each in writers:
        each.join(60.0)
    assert [each.exitcode for each in writers] == [0, 0, 0]
    store.tidy(NOON + DAY)
    (name,) = files(store)
    assert len(pq.read_table(store.root / name, partitioning=None)) == 60


def test_strangers_are_left_alone(store: SignatureStore) -> None:
    store.write("a", rows(at(0)))
    strangers = [
        store.root / "notes.parquet",
        store.root / "date=x/host=a/part-1-0.parquet",
        store.root / "date=2000-01-01/a.parquet",
    ]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps("mine"))
    SignatureStore(store.root, 1.0, 1).tidy(NOON + 100 * DAY)
    assert files(store) == sorted(path.relative_to(store.root).as_posix() for path in strangers)


def test_an_unfinished_file_of_a_killed_writer_is_cleared_away_later(store: SignatureStore) -> None:
    (path,) = store.write("a", rows(at(0)))
    left = path.with_name(".part-0-0.parquet")
    left.write_bytes(b"PAR1")
    written = left.stat().st_mtime
    keeper = SignatureStore(store.root, keep_days=1e6, keep_bytes=1 << 30)
    keeper.tidy(written)
    assert left.exists()
    keeper.tidy(written + 2 * 3600.0)
    assert not left.exists()
    assert path.exists()


@pytest.mark.parametrize("clock", [0.0, 1e12])
def test_a_clock_that_is_wrong_by_far(store: SignatureStore, clock: float) -> None:
    store.write("a", rows(replace(window(), start_s=clock)))
    assert len(load_signatures(store.root)) == 1
