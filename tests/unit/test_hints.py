"""Hints: what is accepted, what it means, and that everything else is refused by name."""

from __future__ import annotations

import dataclasses
import math
import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.scheduler.core.model import Hints
from cotenant.scheduler.errors import HintError
from cotenant.scheduler.hints import HINT_NAMES, describe, from_metadata, metadata_hints, parse_hints

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z
DOCS = Path(__file__).parents[2] / "docs" / "hints.md"

ACCEPTED = [
    ("gpus", "2", "gpus", 2),
    ("gpus", 2, "gpus", 2),
    ("gpus", 2.0, "gpus", 2),
    ("gpus", np.int64(3), "gpus", 3),
    ("gpu_memory", "2GiB", "gpu_memory", 2 * 2**30),
    ("gpu_memory", "512MiB", "gpu_memory", 512 * 2**20),
    ("gpu_memory", "8GB", "gpu_memory", 8 * 10**9),
    ("gpu_memory", " 1.5 gib ", "gpu_memory", 3 * 2**29),
    ("gpu_memory", "1073741824", "gpu_memory", 2**30),
    ("gpu_memory", 2**30, "gpu_memory", 2**30),
    ("gpu_memory", 2e9, "gpu_memory", 2 * 10**9),
    ("compute", "0.4", "compute", 0.4),
    ("compute", ".4", "compute", 0.4),
    ("compute", "40%", "compute", 0.4),
    ("compute", 1, "compute", 1.0),
    ("compute", np.float32(0.5), "compute", 0.5),
    ("priority", "high", "priority", "high"),
    ("priority", "LOW", "priority", "low"),
    ("deadline", "2h", "deadline_s", NOW + 7200),
    ("deadline", 90, "deadline_s", NOW + 90),
    ("deadline", timedelta(minutes=5), "deadline_s", NOW + 300),
    ("deadline", "2027-01-15T10:00:00Z", "deadline_s", NOW + 7200),
    ("deadline", "2027-01-15T12:00:00+02:00", "deadline_s", NOW + 7200),
    ("deadline", datetime(2027, 1, 15, 10, tzinfo=UTC), "deadline_s", NOW + 7200),
    ("criticality", "0", "criticality", 0.0),
    ("criticality", "75%", "criticality", 0.75),
    ("max_slowdown", "1.2", "max_slowdown", 1.2),
    ("max_slowdown", "20%", "max_slowdown", 1.2),
    ("max_slowdown", 1, "max_slowdown", 1.0),
    ("isolation", "hard", "isolation", "hard"),
    ("gang", "cluster", "gang", "cluster"),
    ("expected_duration", "1h30m", "expected_duration_s", 5400.0),
    ("expected_duration", "90s", "expected_duration_s", 90.0),
    ("expected_duration", "1d 2h", "expected_duration_s", 93600.0),
    ("expected_duration", "45", "expected_duration_s", 45.0),
    ("framework", "torch-2.13", "framework", "torch-2.13"),
    ("batch_size", "64", "batch_size", 64),
    ("model", "resnet50", "model", "resnet50"),
    ("model_family", "image_classification", "model_family", "image_classification"),
    ("parameters", "25.6M", "parameters", 25_600_000),
    ("parameters", "1.3B", "parameters", 1_300_000_000),
    ("parameters", " 110 m ", "parameters", 110_000_000),
    ("parameters", "1.5k", "parameters", 1500),
    ("parameters", "1T", "parameters", 10**12),
    ("parameters", "25557032", "parameters", 25_557_032),
    ("parameters", 25_557_032, "parameters", 25_557_032),
    ("parameters", 1.1e8, "parameters", 110_000_000),
    ("compute", "0.000000001", "compute", 1e-9),
    *(("operator_mix", value, "operator_mix", True) for value in (True, "true", "Yes", "ON", "1")),
    *(("operator_mix", value, "operator_mix", False) for value in (False, "false", "no", " off ", "0")),
    ("queue", "night", "queue", "night"),
    ("tenant", "team_a", "tenant", "team_a"),
    ("restart", "on_failure", "restart", "on_failure"),
    ("group", "web", "group", "web"),
    ("anti_affinity", "tenant:ml", "anti_affinity", "tenant:ml"),
    ("cpus", "4", "cpus", 4.0),
    ("cpus", 0.5, "cpus", 0.5),
    ("cpus", "1.00049", "cpus", 1.0),
    ("anti_affinity", "tenant:ml , group:web,tenant:ml", "anti_affinity", "group:web,tenant:ml"),
]

REFUSED = [
    *(
        (name, value)
        for name in HINT_NAMES
        for value in ("", "   ", True, [], {}, math.nan, math.inf, "x" * 5000, "\0")
        if (name, value) != ("operator_mix", True)
    ),
    *(
        (name, value)
        for name in ("gpus", "batch_size", "parameters")
        for value in ("0", "-1", 0, -1, 1.5, "1.5", "two", 10**30, "1_0", "٢")
    ),
    *(
        ("gpu_memory", value)
        for value in ("0GiB", "-2GiB", "2GiBs", "2 G", "2h", "nanGiB", "1e3", "9999999TiB", 0, 1.5)
    ),
    *(("compute", value) for value in ("0", "0%", "1.01", "140%", "-0.4", "nan", "inf", "40 %%", 0, 1.4, -0.1, "0,4")),
    *(("cpus", value) for value in ("0", 0, -1, "-2", 0.0001, "4097", "4 cores", "50%")),
    *(("criticality", value) for value in ("1.1", "-1", 2, "101%", "high")),
    *(("max_slowdown", value) for value in ("0.9", "-20%", 0, "101", "fast", "1.2x")),
    *(
        ("expected_duration", value)
        for value in ("0", "0s", "-5s", "5 parsecs", "2GiB", "30m1h", "11000d", 1e300, 10**400)
    ),
    *(
        ("deadline", value)
        for value in ("0", "-2h", "2026-01-01T00:00:00Z", "2030-01-01T00:00:00", "2030-01-01", "tomorrow")
    ),
    ("deadline", datetime(2030, 1, 1)),  # no zone
    ("deadline", "9999-12-31T23:59:59Z"),
    ("deadline", NOW),
    *(("deadline", value) for value in (5e-324, "3e-83", "0.00000001", timedelta(microseconds=0))),
    *(
        ("parameters", value)
        for value in ("25.6", "25.6G", "25MB", "M", "0.0001K", "-1M", "1e9", "1001T", "1,000", 10**15 + 1)
    ),
    *(("operator_mix", value) for value in (1, 0, 1.0, "2", "maybe", "truee", "none")),
    *(
        ("anti_affinity", value)
        for value in (
            "web",
            "group:",
            "group:a b",
            "host:a",
            "group:a,",
            "tenant:é",
            ",",
            3,
            ["group:a"],
            ",".join(f"group:g{n}" for n in range(33)),
            "group:" + "a" * 64,
        )
    ),
    *(("priority", value) for value in ("urgent", 1, "hi gh")),
    *((name, value) for name in ("isolation", "gang", "restart") for value in ("maybe", 3)),
    *(
        (name, value)
        for name in ("queue", "tenant", "group", "framework", "model", "model_family")
        for value in ("a b", "-a", "a" * 64, "é", 3)
    ),
]


@pytest.mark.parametrize(("name", "value", "field", "expected"), ACCEPTED)
def test_accepted(name: str, value: object, field: str, expected: object) -> None:
    got = getattr(parse_hints({name: value}, NOW), field)
    assert got == pytest.approx(expected) if isinstance(expected, float) else got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_refused_by_name_value_and_what_is_accepted(name: str, value: object) -> None:
    with pytest.raises(HintError) as caught:
        parse_hints({name: value}, NOW)
    assert caught.value.field == name
    assert caught.value.value is value
    assert caught.value.accepted == {doc.name: doc.accepted for doc in describe()}[name]


def test_nothing_said_and_none_are_the_defaults() -> None:
    assert parse_hints({}, NOW) == Hints() == parse_hints(dict.fromkeys(HINT_NAMES), NOW)


@pytest.mark.parametrize(
    ("name", "message"),
    [("gpu_mem", "did you mean gpu_memory"), ("Compute", "did you mean compute"), ("xyz", "one of gpus,")],
)
def test_unknown_hint(name: str, message: str) -> None:
    with pytest.raises(HintError, match=message):
        parse_hints({name: "1"}, NOW)


def test_metadata_takes_only_our_keys() -> None:
    metadata = {
        "cotenant.gpu_memory": "8GiB",
        "cotenant.compute": "0.4",
        "job_submission_id": "x",
        "gpu_memory": "9GiB",
    }
    assert from_metadata(metadata, NOW) == Hints(gpu_memory=8 * 2**30, compute=0.4)
    assert metadata_hints(metadata) == {"gpu_memory": "8GiB", "compute": "0.4"}


def test_metadata_unknown_key_names_the_close_match() -> None:
    with pytest.raises(HintError, match=r"^cotenant\.gpu_mem: '8GiB' .* did you mean cotenant\.gpu_memory"):
        from_metadata({"cotenant.gpu_mem": "8GiB"}, NOW)


# -- any input at all -------------------------------------------------------------------------------------------------

_near_misses = st.from_regex(
    r"-?[0-9]{0,4}\.?[0-9]{0,3} ?(%|[kKMGT]?i?[bB]|[dhms]|[0-9]h[0-9]m|e[0-9]{1,3}|)", fullmatch=True
)
_values = st.one_of(
    st.text(),
    _near_misses,
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.lists(st.integers(), max_size=2),
    st.timedeltas(),
    st.datetimes(timezones=st.one_of(st.none(), st.just(UTC), st.just(timezone(timedelta(hours=-14))))),
    st.datetimes(timezones=st.just(timezone(timedelta(hours=14)))).map(datetime.isoformat),
)


def _check(hints: Hints) -> None:
    """Every field within the range its documentation states."""
    assert 1 <= hints.gpus <= 4096
    assert hints.gpu_memory is None or 1 <= hints.gpu_memory <= 2**60
    assert hints.compute is None or 0.0 < hints.compute <= 1.0
    assert hints.criticality is None or 0.0 <= hints.criticality <= 1.0
    assert hints.max_slowdown is None or 1.0 <= hints.max_slowdown <= 100.0
    assert hints.deadline_s is None or NOW < hints.deadline_s < math.inf
    assert hints.expected_duration_s is None or 0.0 < hints.expected_duration_s < math.inf
    assert hints.batch_size is None or hints.batch_size >= 1
    assert hints.parameters is None or 1 <= hints.parameters <= 10**15
    assert hints.priority in {"low", "normal", "high"}
    assert hints.isolation in {"none", "soft", "hard"}
    assert hints.gang in {"host", "cluster"}
    assert hints.restart in {"never", "on_node_loss", "on_failure"}
    for text in (hints.queue, hints.tenant, hints.group, hints.framework, hints.model, hints.model_family):
        assert text is None or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", text)
    for field in dataclasses.fields(hints):
        assert type(getattr(hints, field.name)) in {int, float, str, bool, type(None)}


@given(st.sampled_from(HINT_NAMES), _values)
def test_any_value_parses_to_valid_hints_or_is_refused(name: str, value: object) -> None:
    try:
        hints = parse_hints({name: value}, NOW)
    except HintError as error:
        assert error.field == name
        assert name in str(error)
    else:
        _check(hints)


@given(st.dictionaries(st.one_of(st.sampled_from([f"cotenant.{name}" for name in HINT_NAMES]), st.text()), st.text()))
def test_any_metadata_parses_to_valid_hints_or_is_refused(metadata: dict[str, str]) -> None:
    try:
        _check(from_metadata(metadata, NOW))
    except HintError as error:
        assert error.field.removeprefix("cotenant.") in {key.removeprefix("cotenant.") for key in metadata}


# -- the manual -------------------------------------------------------------------------------------------------------


def test_every_field_of_hints_can_be_said() -> None:
    assert {name.removesuffix("_s") for name in HINT_NAMES} == {
        field.name.removesuffix("_s") for field in dataclasses.fields(Hints)
    }


def test_the_manual_holds_the_table() -> None:
    text = DOCS.read_text(encoding="utf-8")
    missing = [
        row
        for doc in describe()
        if (row := f"| `{doc.name}` | {doc.accepted} | {doc.default} | {doc.meaning} |") not in text
    ]
    assert not missing, "put these rows into docs/hints.md:\n" + "\n".join(missing)
