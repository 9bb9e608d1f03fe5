"""The schema of signatures: complete, documented, and older records can be read."""

from __future__ import annotations

import math
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from packing import window
from pydantic import TypeAdapter

from cotenant.forecasting.profiles import ProfileBook
from cotenant.forecasting.signatures import COLUMNS, FIELDS, accepted, brief, from_row, markdown_table, to_row, upgrade
from cotenant.forecasting.types import SIGNATURE_VERSION, DeviceActivity, OperatorMix, Signature
from cotenant.forecasting.versions import UnknownVersion

DOCS = Path(__file__).parents[2] / "docs"
NEWER = SIGNATURE_VERSION + 1
MIX = OperatorMix(0.5, 0.1, 0.0, 0.2, 0.1, 0.05, 0.05, 0.0, 0.0, launches_per_step=120.0, step=20)
FULL = replace(
    window(util=0.4, rate=10.0),
    memory_growth_bytes_s=-1e6,
    step_time_p50_s=0.1,
    step_time_p95_s=0.12,
    read_bytes_s=1e6,
    write_bytes_s=0.0,
    batch_size=32,
    framework="torch",
    device=DeviceActivity(util=0.7, membw_util=0.3, power_w=250.0, sm_clock_mhz=1980.0, temperature_c=61.0),
    mix=MIX,
    util_age_s=0.4,
    util_source="process",
    memory_source="device",
)
VERSION_0 = [
    "job",
    "g0",
    1e6,
    1.0,
    10,
    0.5,
    0.6,
    1e9,
    1e9,
    3.0,
    0.0,
    0.1,
    0,
    1.0,
    0,
]  # values as version 0 pickled them
NAMES_0 = [each.name for each in fields(Signature)][: len(VERSION_0)]
ROW_0: dict[str, Any] = dict(zip(NAMES_0, VERSION_0, strict=True))


def test_every_field_of_a_signature_is_a_column_and_every_column_a_field() -> None:
    plain = {each.name for each in fields(Signature)} - {"device", "mix"}
    nested = {"device_" + each.name for each in fields(DeviceActivity)} | {
        "mix_" + each.name for each in fields(OperatorMix)
    }
    assert set(COLUMNS) == plain | nested
    assert len(COLUMNS) == len(set(COLUMNS))


def test_the_manual_shows_the_schema() -> None:
    assert markdown_table() in (DOCS / "signatures.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("signature", [FULL, window(), replace(FULL, device=None), replace(FULL, mix=None)])
def test_a_row_tells_the_whole_signature(signature: Signature) -> None:
    row = to_row(signature)
    assert tuple(row) == COLUMNS
    assert from_row(row) == signature


def test_what_is_missing_is_none_in_the_row_and_never_0() -> None:
    row = to_row(window(util=None, memory=None, throttled=None))
    assert [row[name] for name in ("util_mean", "memory_bytes", "mix_gemm", "device_power_w", "batch_size")] == [
        None
    ] * 5


def test_a_row_read_by_pandas_has_nan_for_none() -> None:
    row = {name: math.nan if value is None else value for name, value in to_row(window(util=None)).items()}
    assert from_row(row) == window(util=None)


# -- versions -------------------------------------------------------------------------------------------------------


def test_a_row_of_version_0_is_read_without_the_new_columns() -> None:
    signature = from_row(ROW_0)
    assert (signature.util_mean, signature.step_rate, signature.schema_version) == (0.5, 3.0, SIGNATURE_VERSION)
    assert (signature.step_time_p50_s, signature.device, signature.mix, signature.framework) == (None,) * 4


def test_a_row_without_a_version_is_of_version_0() -> None:
    row = {name: value for name, value in ROW_0.items() if name != "schema_version"}
    assert from_row(row) == from_row(ROW_0)


def test_new_columns_of_a_row_of_version_0_mean_nothing() -> None:
    assert upgrade(ROW_0 | {"batch_size": 7})["batch_size"] is None


@pytest.mark.parametrize("version", [SIGNATURE_VERSION + 1, -1, 99])
def test_an_unknown_version_is_refused_by_name(version: int) -> None:
    says = rf"schema_version: {version} is not accepted; give 0 to {SIGNATURE_VERSION}"
    with pytest.raises(UnknownVersion, match=says):
        upgrade(ROW_0 | {"schema_version": version})
    with pytest.raises(UnknownVersion, match=says):
        replace(FULL, schema_version=version)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(ValueError, match="gpu_id: is missing"):
        from_row(ROW_0 | {"gpu_id": None})


def test_a_message_of_version_0_is_read() -> None:
    signature = object.__new__(Signature)
    signature.__setstate__(VERSION_0)
    assert accepted(signature) == from_row(ROW_0)
    assert pickle.loads(pickle.dumps(accepted(signature))) == from_row(ROW_0)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ([*VERSION_0[:-1], NEWER], f"schema_version: {NEWER} is not accepted"),
        ([*VERSION_0, *[None] * 40], "a newer cotenant wrote it"),
        (VERSION_0[:3], "window_s is missing"),
    ],
)
def test_a_message_of_an_unknown_version_is_refused(state: list[Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        object.__new__(Signature).__setstate__(state)


def test_a_signature_in_a_journal_of_version_0_is_read_and_one_of_a_newer_version_refused() -> None:
    adapter = TypeAdapter(Signature)
    assert accepted(adapter.validate_python(ROW_0)) == from_row(ROW_0)
    assert adapter.validate_json(adapter.dump_json(FULL)) == FULL
    with pytest.raises(ValueError, match=f"schema_version: {NEWER} is not accepted"):
        adapter.validate_python(ROW_0 | {"schema_version": NEWER})


def test_a_profile_book_learns_the_same_from_both_versions() -> None:
    books = []
    for version in (0, SIGNATURE_VERSION):
        book = ProfileBook()
        for second in range(20):
            book.observe(from_row(ROW_0 | {"start_s": float(second), "schema_version": version}), "f")
        books.append(ProfileBook.from_json(book.to_json()).profile("job", "f"))
    assert books[0] == books[1]


# -- bad readings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2**64 - 1, 10**400, -1e30])
def test_an_absurd_reading_is_a_missing_one(value: Any) -> None:
    new = ("memory_growth_bytes_s", "step_time_p50_s", "step_time_p95_s", "read_bytes_s", "write_bytes_s", "batch_size")
    broken = replace(FULL, **dict.fromkeys(new, value), device=DeviceActivity(membw_util=value, power_w=200.0))
    signature = accepted(broken)
    assert [getattr(signature, name) for name in new] == [None] * len(new)
    assert signature.device == DeviceActivity(power_w=200.0)
    assert accepted(replace(FULL, mix=replace(MIX, gemm=value))).mix is None
    row = to_row(replace(FULL, util_mean=value, memory_bytes=value))
    assert (row["util_mean"], row["memory_bytes"]) == (None, None)


def test_a_sound_signature_is_accepted_as_it_is() -> None:
    assert accepted(FULL) is FULL


def test_what_the_scheduler_gets_has_no_details() -> None:
    assert brief(FULL) == replace(FULL, device=None, mix=None)
    assert brief(window()) == window()


def test_derived_rates() -> None:
    assert (FULL.step_time_s, FULL.launch_rate) == (0.1, 1200.0)
    assert (window(rate=None).step_time_s, window(rate=0.0).step_time_s, window(rate=1.0).launch_rate) == (None,) * 3


def test_fields_that_are_never_missing_say_so() -> None:
    always = {each.name for each in FIELDS if not each.none_when}
    assert always == {"schema_version", "job_id", "gpu_id", "start_s", "window_s", "samples", "neighbours"}
