"""The co-location data set on disk and in memory: schema, loading, merging, and the way to the predictors."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from colocation_runs import START_UNIX_S, WORKLOADS, Machine, true_n

from cotenant.forecasting.datasets import colocation
from cotenant.forecasting.datasets.colocation import (
    DataError,
    Tables,
    load_colocation,
    merge,
    observations,
    profiles,
    read_run,
    save,
    shipped,
    write_tables,
)
from cotenant.forecasting.datasets.columns import CARD, RULES, TABLES
from cotenant.forecasting.datasets.document import columns_table, with_tables
from cotenant.forecasting.datasets.schema import check, check_card, conform
from cotenant.forecasting.interference import UtilisationRule

ROOT = Path(__file__).parents[2]
NAMES = ("samples", "solo", "pairs")


def same(first: Tables, second: Tables) -> None:
    """Fail unless two data sets say the same."""
    for name in NAMES:
        pd.testing.assert_frame_equal(getattr(first, name), getattr(second, name))
    assert first.failures == second.failures
    assert first.dropped == second.dropped
    assert first.cards == second.cards


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two occasions, a triple, capped shares, and a set that did not fit."""
    machine = Machine().matrix()
    machine.together(["small", "medium", "large"])
    machine.together(["small", "large"], mode="mps_cap", shares=[0.3, 0.7])
    machine.together(["large", "large"], mode="mps_cap", shares=[0.3, 0.7])
    machine.events.append(
        {
            "format": 1,
            "visit": "timeslice/huge+large+medium#1",
            "mode": "timeslice",
            "members": ["huge", "large", "medium"],
            "member": "large",
            "event": "does_not_fit",
            "message": "out of memory",
        }
    )
    return machine.write(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def tables(run: Path) -> Tables:
    """The tables of the run."""
    return read_run(run)


def test_what_is_written_is_what_is_loaded(run: Path, tables: Tables, tmp_path: Path) -> None:
    written = write_tables(run, tmp_path / "data")
    same(written, tables)
    same(load_colocation(tmp_path / "data"), tables)
    same(load_colocation(run), tables)
    same(load_colocation(str(tmp_path / "data")), tables)
    first = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    assert sorted(first) == sorted(["card.json", *(f"{name}.{kind}" for name in NAMES for kind in ("csv", "parquet"))])
    save(load_colocation(tmp_path / "data"), tmp_path / "again")
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == first


def test_the_tables_of_a_run_go_beside_it_by_default(tmp_path: Path) -> None:
    machine = Machine()
    machine.solo("small")
    out = machine.write(tmp_path / "out")
    write_tables(out)
    assert load_colocation(out / "tables").pairs.empty
    with pytest.raises(DataError, match="a run of the measurement suite is in it; give another folder"):
        write_tables(out, out)


def test_parquet_and_csv_say_the_same(run: Path, tmp_path: Path) -> None:
    write_tables(run, tmp_path)
    for name in NAMES:
        exact = pd.read_parquet(tmp_path / f"{name}.parquet")
        text = pd.read_csv(tmp_path / f"{name}.csv", keep_default_na=False, dtype="str")
        assert list(text.columns) == list(exact.columns)
        for column in exact.columns:
            missing = exact[column].isna()
            assert ((text[column] == "") >= missing).all()
            if exact[column].dtype == "float64":
                read = pd.to_numeric(text[column][~missing])
                tolerance = 1e-10 if column == "started_unix_s" else 1e-5
                assert read.tolist() == pytest.approx(exact[column][~missing].tolist(), rel=tolerance)
            else:
                assert text[column][~missing].tolist() == [str(value) for value in exact[column][~missing].tolist()]


def test_shipped_data_sets_load_and_are_small() -> None:
    files = [path for path in colocation.SHIPPED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_000_000
    for name in shipped():
        assert len(load_colocation(name).samples) > 0


def test_a_shipped_name_is_loaded_by_its_name(
    run: Path, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(colocation, "SHIPPED", tmp_path)
    assert shipped() == []
    with pytest.raises(DataError, match=r"toy: there is no data set; .* a shipped name \(none yet\)"):
        load_colocation("toy")
    write_tables(run, tmp_path / "toy")
    assert shipped() == ["toy"]
    same(load_colocation("toy"), tables)


def test_the_package_takes_the_shipped_files_along() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["cotenant.forecasting.datasets"]
    folder = ROOT / "forecasting" / "datasets"
    files = {path for path in (folder / "shipped").rglob("*") if path.is_file()}
    assert files == {path for pattern in patterns for path in folder.glob(pattern)}


def test_broken_folders(run: Path, tmp_path: Path) -> None:
    write_tables(run, tmp_path)
    card = tmp_path / "card.json"
    good = json.loads(card.read_text(encoding="utf-8"))
    for content, message in (
        (good | {"format": 9}, "field 'format': 9 is not accepted; this version reads 1"),
        (good | {"runs": []}, r"field 'runs': \[\] is not accepted"),
        (good | {"runs": [good["runs"][0] | {"format": 3}]}, "field 'format': 3 is not accepted"),
        (good | {"runs": [good["runs"][0] | {"gpu_type": 5}]}, "'gpu_type': 5 is not accepted"),
    ):
        card.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(DataError, match=message):
            load_colocation(tmp_path)
    card.write_text(json.dumps(good), encoding="utf-8")
    (tmp_path / "solo.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"solo\.parquet: not a Parquet file"):
        load_colocation(tmp_path)
    (tmp_path / "solo.parquet").unlink()
    with pytest.raises(DataError, match=r"solo\.parquet: there is no such file"):
        load_colocation(tmp_path)
    card.unlink()
    with pytest.raises(DataError, match=r"card\.json: there is no such file"):
        load_colocation(tmp_path)


def test_every_table_passes_its_own_check(tables: Tables) -> None:
    for name in NAMES:
        assert check(name, getattr(tables, name)) == []
    assert check_card(tables.cards[0]) == []


BAD_VALUES: dict[str, tuple[str, str, object, str]] = {
    "negative": ("pairs", "throughput", -0.2, "give a number in (0, 10]"),
    "zero where it is excluded": ("pairs", "throughput", 0.0, "give a number in (0, 10]"),
    "infinite": ("solo", "rate", float("inf"), "give a number in [0, 1e+07]"),
    "2^64 bytes": ("solo", "memory_bytes", 2.0**64, "give a number in [0, 1.1259e+15]"),
    "250 %": ("samples", "util_mean", 2.5, "give a number in [0, 1.1]"),
    "missing name": ("samples", "member", None, "give a text; it may not be missing"),
    "not a number where one must be": ("samples", "window_s", float("nan"), "it may not be missing"),
    "an unknown rule": ("samples", "rejected", "bad luck", 'give one of "", no_rate'),
    "half a window": ("solo", "windows", 1.5, "give a whole number in [0, 1e+09]"),
    "text for a number": ("pairs", "util", "much", "give a number in [0, 1.1]"),
    "a flag for a number": ("pairs", "util", True, "give a number in [0, 1.1]"),
    "a number for a flag": ("pairs", "fits", 1, "give true or false"),
    "a number for a name": ("pairs", "set", 7, "give a text"),
    "a list for a number": ("pairs", "util", [0.5], "give a number in [0, 1.1]"),
}


@pytest.mark.parametrize(("name", "column", "value", "message"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_errors_name_table_column_row_value_and_what_is_accepted(
    tables: Tables, name: str, column: str, value: object, message: str
) -> None:
    frame = getattr(tables, name).astype("object").copy()
    frame.at[1, column] = value
    (problem,) = check(name, frame)
    assert (problem.table, problem.column, problem.row) == (name, column, 1)
    assert str(problem).startswith(f"{name}: column '{column}', row 1: {problem.value!r} is not accepted; give ")
    assert message in str(problem)
    with pytest.raises(DataError, match=f"column '{column}', row 1"):
        conform(name, frame)


def test_missing_extra_and_doubled(tables: Tables) -> None:
    with pytest.raises(DataError, match="pairs: column 'saving': None is not accepted; give the column"):
        conform("pairs", tables.pairs.drop(columns="saving"))
    wider = tables.pairs.assign(later=1)[["later", *reversed(list(tables.pairs.columns))]]
    pd.testing.assert_frame_equal(conform("pairs", wider), tables.pairs)
    doubled = pd.concat([tables.solo, tables.solo.iloc[[2]]], ignore_index=True)
    (problem,) = check("solo", doubled)
    assert problem.row == len(tables.solo)
    assert "each combination of gpu_type, mode, member, share once" in str(problem)
    many = tables.samples.assign(util_mean=9.0)
    with pytest.raises(DataError, match=r"… and \d+ more"):
        conform("samples", many)


def machine_of(run_id: str, *, seed: int = 0, begin: float = 0.0, **card: Any) -> Machine:
    return Machine(seed=seed, run_id=run_id, begin_unix_s=START_UNIX_S + begin, card=card)


def test_runs_on_one_type_are_pooled(tmp_path: Path) -> None:
    first, second = machine_of("a", seed=1), machine_of("b", seed=2, begin=1e5)
    parts = [read_run(m.matrix(occasions=n).write(tmp_path / m.run_id)) for m, n in ((first, 2), (second, 1))]
    both = merge(reversed(parts))
    assert [card["run_id"] for card in both.cards] == ["a", "b"]
    assert len(both.samples) == len(parts[0].samples) + len(parts[1].samples)
    occasions = both.samples.groupby("run_id")["occasion"].unique()
    assert [sorted(found) for found in occasions] == [[1, 2], [3]]
    row = both.pairs[(both.pairs["set"] == "huge+large") & (both.pairs["member"] == "huge")].iloc[0]
    assert (row["runs"], row["occasions"], row["windows"]) == (2, 3, 6)
    assert both.solo["windows"].sum() == parts[0].solo["windows"].sum() + parts[1].solo["windows"].sum()
    assert both.solo["mix_gemm"].tolist() == [0.5] * 4
    same(merge([*parts, tmp_path / "a"]), Tables(both.samples, both.solo, both.pairs, both.cards, (),
                                                 {"duplicates": len(parts[0].samples)}))  # fmt: skip
    third = read_run(machine_of("c", seed=3, begin=2e5).matrix(occasions=1).write(tmp_path / "c"))
    step_by_step, at_once = merge([both, third]), merge([*parts, third])
    same(step_by_step, at_once)


def test_types_of_devices_stay_apart(tmp_path: Path) -> None:
    parts = []
    for gpu_type, window_s in (("P100", 3.0), ("H100", 5.0)):
        machine = machine_of(gpu_type, method={"window_s": window_s, "settle_s": 0.5})
        machine.gpu_type = gpu_type
        parts.append(machine.matrix(occasions=1).write(tmp_path / gpu_type))
    both = merge(parts)
    assert both.gpu_types == ["H100", "P100"]
    assert both.pairs.groupby("gpu_type").size().tolist() == [len(read_run(part).pairs) for part in parts]
    assert (both.pairs["runs"] == 1).all()
    assert set(both.samples["occasion"]) == {1}
    with pytest.raises(DataError, match="gpu_type: None is not accepted; give one of 'H100', 'P100'"):
        profiles(both)
    assert len(observations(both, "timeslice", "P100")) == 16
    with pytest.raises(DataError, match="gpu_type: 'K80' is not accepted"):
        observations(both, "timeslice", "K80")


CONFLICTS: dict[str, tuple[dict[str, object], str]] = {
    "longer windows": ({"method": {"window_s": 4.0, "settle_s": 0.5}}, r"'method\.window_s': 4\.0 is not accepted"),
    "no settling": ({"method": {"window_s": 3.0, "settle_s": 0.0}}, r"'method\.settle_s': 0\.0 is not accepted"),
    "another workload of that name": ({"workloads": {"small": {"family": "gpt"}}}, r"'workloads\.small': .*gpt"),
}


@pytest.mark.parametrize(("card", "message"), CONFLICTS.values(), ids=CONFLICTS.keys())
def test_runs_that_cannot_be_pooled(tmp_path: Path, card: dict[str, Any], message: str) -> None:
    first, second = machine_of("a"), machine_of("b", begin=1e5, **card)
    for machine in (first, second):
        machine.solo("small")
        machine.write(tmp_path / machine.run_id)
    with pytest.raises(DataError, match=f"run b: field {message}.* beside run a; give runs on 'toy' with"):
        merge([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(DataError, match="an empty list is not accepted"):
        merge([])


def test_dry_runs_are_refused_unless_allowed(tmp_path: Path) -> None:
    machine = machine_of("made-up", dry_run=True)
    machine.solo("small")
    out = machine.write(tmp_path / "out")
    tables = write_tables(out)
    for refused in (lambda: load_colocation(out), lambda: load_colocation(out / "tables"), lambda: merge([tables])):
        with pytest.raises(DataError, match="run made-up: field 'dry_run': True is not accepted"):
            refused()
    same(load_colocation(out / "tables", allow_dry_run=True), tables)
    assert merge([out, out / "tables"], allow_dry_run=True).dropped == {"duplicates": 3}


def test_profiles(tables: Tables) -> None:
    members = profiles(tables)
    assert set(members) == set(WORKLOADS)
    small = members["small"]
    assert (small.util_mean, small.util_p95) == pytest.approx((0.2, 0.22))
    assert (small.memory_bytes, small.source, small.family) == (300_000_000, "history", "rl")
    assert small.fingerprint == "small"
    assert small.solo_step_rate == pytest.approx(20.0, rel=0.01)
    assert small.observed_s == 3.0 * tables.solo[tables.solo["member"] == "small"]["windows"].max()
    assert profiles(tables, "mps_cap")["small"].observed_s == 6.0
    assert profiles(tables, "mps_cap")["huge"] == members["huge"]  # only measured in the other mode
    assert members["huge"].util_p95 == 1.0
    assert members["huge"].membw_util is None


def test_a_profile_without_utilisation_is_unknown(tmp_path: Path) -> None:
    machine = Machine()
    machine.solo("small")
    for row in machine.rows:
        row["util_mean"] = None
    (profile,) = profiles(read_run(machine.write(tmp_path))).values()
    assert (profile.source, profile.util_mean, profile.memory_bytes) == ("unknown", 1.0, 300_000_000)


def test_observations(tables: Tables) -> None:
    seen = observations(tables, "timeslice")
    assert len(seen) == 4 * 1 + 6 * 2 + 3  # beside itself, pairs, the triple; what did not fit is not there
    for one in seen:
        assert one.n == pytest.approx(true_n(one.members, one.focal), rel=0.06)
        assert one.low is not None
        assert one.high is not None
        assert one.low <= one.n <= one.high
        assert one.families == tuple(WORKLOADS[name].family for name in one.members)
        assert one.shares == (None,) * len(one.members)
        predicted = UtilisationRule().predict(one.profiles, one.gpu_type)
        assert len(predicted) == len(one.members)
    held = {(one.members, one.focal): one for one in observations(tables, "mps_cap")}
    assert set(held) == {(pair, focal) for pair in (("large", "large"), ("large", "small")) for focal in (0, 1)}
    assert held[("large", "small"), 0].shares == (0.7, 0.3)
    assert held[("large", "large"), 0].n == pytest.approx(true_n(["large", "large"], 0, 0.3), rel=0.06)
    assert held[("large", "large"), 1].n == pytest.approx(true_n(["large", "large"], 1, 0.7), rel=0.06)
    with pytest.raises(DataError, match="mode: 'mps' is not accepted; measured on 'toy' are: mps_cap, timeslice"):
        observations(tables, "mps")


def test_the_document_says_what_the_declaration_says() -> None:
    page = (ROOT / "docs" / "colocation.md").read_text(encoding="utf-8")
    assert with_tables(page) == page, "run: python -m cotenant.forecasting.datasets.document docs/colocation.md"
    for columns in (*TABLES.values(), CARD):
        assert columns_table(columns) in page
        assert all(column.meaning and column.source for column in columns)
        assert all(column.unit for column in columns if column.kind == "number")
    assert all(f"| `{rule}` |" in page for rule in RULES if rule)
