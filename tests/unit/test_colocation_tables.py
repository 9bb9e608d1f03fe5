"""Tables of co-location measurements: what is rejected, what is computed, on runs whose truth is known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from colocation_runs import WORKLOADS, Machine, true_n

from cotenant.forecasting.datasets.colocation import DataError, Tables, read_run
from cotenant.forecasting.datasets.intervals import estimate


def pair(tables: Tables, names: str, member: str, mode: str = "timeslice") -> dict[str, Any]:
    """The one row of ``pairs`` for a set and its focal member."""
    frame = tables.pairs
    chosen = frame[(frame["set"] == names) & (frame["member"] == member) & (frame["mode"] == mode)]
    assert len(chosen) == 1
    row: dict[str, Any] = chosen.iloc[0].to_dict()
    return row


def alone(tables: Tables, member: str, mode: str = "timeslice") -> dict[str, Any]:
    """The one row of ``solo`` for a member."""
    frame = tables.solo
    chosen = frame[(frame["member"] == member) & (frame["mode"] == mode)]
    assert len(chosen) == 1
    row: dict[str, Any] = chosen.iloc[0].to_dict()
    return row


DRIFTS: dict[str, Callable[[float], float]] = {
    "steady": lambda seconds: 1.0,
    "warming up": lambda seconds: 1.0 - 0.06 * seconds / 1000.0,
    "a slow wave": lambda seconds: 1.0 + 0.04 * math.sin(seconds / 60.0),
}


@pytest.mark.parametrize("drift", DRIFTS.values(), ids=DRIFTS.keys())
def test_the_truth_lies_in_the_intervals(tmp_path: Path, drift: Callable[[float], float]) -> None:
    hits = figures = 0
    for seed in range(4):
        machine = Machine(seed=seed, drift=drift).matrix(occasions=3)
        tables = read_run(machine.write(tmp_path / str(seed)))
        for row in tables.pairs.to_dict("records"):
            names = row["set"].split("+")
            truth = true_n(names, names.index(row["member"]))
            assert row["throughput"] == pytest.approx(truth, rel=0.06)
            hits += row["throughput_low"] <= truth <= row["throughput_high"]
            figures += 1
    assert hits / figures >= 0.75  # 64 figures per drift, each with probability .8 or more


def test_without_noise_the_truth_is_found_exactly_whatever_drifts(tmp_path: Path) -> None:
    machine = Machine(noise=0.0, luck=0.0, drift=lambda seconds: 1.0 + 0.0005 * seconds)
    machine.together(["large", "huge"])
    tables = read_run(machine.write(tmp_path))
    first = tables.samples[tables.samples["throughput"].notna() & (tables.samples["position"] == 2)]
    assert first["throughput"].tolist() == pytest.approx([true_n(["large", "huge"], 0), true_n(["large", "huge"], 1)])
    # The last shared window has solo windows before it only: their rate lags behind what drifts.
    assert pair(tables, "huge+large", "huge")["throughput"] == pytest.approx(true_n(["large", "huge"], 1), rel=0.005)


def test_a_set_is_the_same_in_any_order_and_a_workload_beside_itself_is_one_row(tmp_path: Path) -> None:
    machine = Machine()
    machine.together(["small", "huge"], 1)
    machine.together(["huge", "small"], 2)
    machine.together(["huge", "huge"], 1)
    tables = read_run(machine.write(tmp_path))
    assert tables.pairs["set"].tolist() == ["huge+huge", "huge+small", "huge+small"]
    row = pair(tables, "huge+small", "small")
    assert (row["others"], row["families"], row["windows"], row["occasions"]) == ("huge", "bert+rl", 4, 2)
    itself = pair(tables, "huge+huge", "huge")
    assert (itself["others"], itself["windows"], itself["util_sum"]) == ("huge", 4, pytest.approx(1.9))
    assert itself["saving"] == pytest.approx(1 - 1 / (2 * itself["throughput"]), abs=0.02)


def test_saving_utilisation_and_counts(tmp_path: Path) -> None:
    tables = read_run(Machine().matrix().write(tmp_path))
    row = pair(tables, "huge+medium", "medium")
    total = row["throughput"] + pair(tables, "huge+medium", "huge")["throughput"]
    assert row["saving"] == pytest.approx(1 - 1 / total, abs=0.01)
    assert row["saving_low"] <= row["saving"] <= row["saving_high"]
    assert row["slowdown"] == pytest.approx(1 / row["throughput"])
    assert (row["util"], row["util_others"], row["util_sum"]) == pytest.approx((0.5, 0.95, 1.45))
    assert row["rate_shared"] / row["rate_solo"] == pytest.approx(row["throughput"], rel=0.01)
    one = alone(tables, "huge")
    assert (one["family"], one["batch"], one["windows"], one["occasions"]) == ("bert", 32, 26, 2)
    assert one["rate"] == pytest.approx(WORKLOADS["huge"].rate, rel=0.02)
    assert one["rate_low"] <= WORKLOADS["huge"].rate * 1.001
    assert (one["mix_gemm"], one["launches_per_step"], one["start_s"]) == (0.5, 120.0, 2.0)
    assert pd.isna(one["mix_conv"]) is False
    assert pd.isna(one["mix_attention"])
    assert pd.isna(one["power_w"])
    assert one["host_cores"] == pytest.approx(0.1)


def test_a_device_that_does_not_tell_members_apart_tells_the_utilisation_alone(tmp_path: Path) -> None:
    machine = Machine()
    machine.solo("small")
    machine.solo("huge")
    for row in machine.rows:
        row["util_mean"] = None
        row["device_util"] = 0.3 if row["member"] == "small" else None
    tables = read_run(machine.write(tmp_path))
    assert alone(tables, "small")["util_mean"] == 0.3
    assert pd.isna(alone(tables, "huge")["util_mean"])


def test_triples_and_capped_shares(tmp_path: Path) -> None:
    machine = Machine()
    machine.solo("large")
    machine.together(["small", "medium", "large"])
    machine.together(["large", "huge"], mode="mps_cap", shares=[0.7, 0.3])
    machine.together(["large", "huge"], mode="mps_cap", shares=[0.3, 0.7])
    tables = read_run(machine.write(tmp_path))
    three = pair(tables, "large+medium+small", "medium")
    assert (three["size"], three["others"], three["util_sum"]) == (3, "large+small", pytest.approx(1.5))
    held = tables.pairs[tables.pairs["mode"] == "mps_cap"]
    figures = held[["shares", "member", "share", "share_others"]].values.tolist()
    assert figures == [
        ["0.3/0.7", "huge", 0.3, "0.7"],
        ["0.3/0.7", "large", 0.7, "0.3"],
        ["0.7/0.3", "huge", 0.7, "0.3"],
        ["0.7/0.3", "large", 0.3, "0.7"],
    ]
    assert held["throughput"].tolist()[0] == pytest.approx(true_n(["huge", "large"], 0, 0.3), rel=0.05)


def test_a_set_that_does_not_fit_is_a_row_without_throughput(tmp_path: Path) -> None:
    machine = Machine()
    machine.solo("huge")
    machine.together(["small", "medium"])
    failed = {"format": 1, "mode": "timeslice", "member": "huge", "message": "out of memory"}
    machine.events += [
        {**failed, "visit": "timeslice/large+huge#1", "members": ["large", "huge"], "event": "does_not_fit"},
        {**failed, "visit": "timeslice/small+medium#2", "members": ["small", "medium"], "event": "hung"},
        {**failed, "visit": "mps_cap:70-30/small+huge#1", "mode": "mps_cap", "members": ["small", "huge"],
         "event": "does_not_fit"},
        {"format": 1, "visit": "mps/small#1", "mode": "mps", "event": "mps_refused", "message": "no"},
    ]  # fmt: skip
    tables = read_run(machine.write(tmp_path))
    too_large = pair(tables, "huge+large", "large")
    assert (too_large["fits"], too_large["windows"], too_large["failures"]) == (False, 0, 1)
    assert pd.isna(too_large["throughput"])
    assert pd.isna(too_large["saving"])
    capped = pair(tables, "huge+small", "small", "mps_cap")
    assert (capped["fits"], capped["shares"], capped["share"]) == (False, "0.3/0.7", 0.7)
    hung = pair(tables, "medium+small", "small")
    assert (hung["fits"], hung["windows"], hung["failures"]) == (True, 2, 1)
    assert [failure["event"] for failure in tables.failures] == ["does_not_fit", "hung", "does_not_fit", "mps_refused"]


def spoil(machine: Machine, position: int, **changes: float | None) -> None:
    """Change the window of the first member at a position of the only visit."""
    for row in machine.rows:
        if row["position"] == position and row["slot"] == 0:
            row.update({name: value for name, value in changes.items() if name != "times"})
            if "times" in changes:  # more or fewer steps of the same cost
                row["rate"] *= changes["times"]
                row["busy_s"] *= changes["times"]


RULES: dict[str, tuple[int, dict[str, float | None], str]] = {
    "no step ended": (2, {"steps": 0, "rate": None}, "no_rate"),
    "one step ended": (2, {"steps": 1, "rate": None}, "no_rate"),
    "a rate of zero": (2, {"rate": 0.0}, "no_rate"),
    "seven steps": (2, {"steps": 7}, "few_steps"),
    "eight steps": (2, {"steps": 8}, ""),
    "strangers for 6 %": (2, {"foreign_s": 0.18}, "foreign_load"),
    "strangers for 2 %": (2, {"foreign_s": 0.06}, ""),
    "strangers unknown": (2, {"foreign_s": None}, ""),
    "strangers in a solo window": (0, {"foreign_s": 1.0}, "foreign_load"),
    "an effort 20 % off": (0, {"busy_s": 0.2 * 1.2 * 3}, "unsteady_solo"),
    "an effort 5 % off": (0, {"busy_s": 0.2 * 1.05 * 3}, ""),
    "an effort not known": (0, {"busy_s": None}, ""),
    "thrice as fast as alone": (2, {"times": 3.0}, "absurd"),
}


@pytest.mark.parametrize(("position", "changes", "rule"), RULES.values(), ids=RULES.keys())
def test_rules(tmp_path: Path, position: int, changes: dict[str, float | None], rule: str) -> None:
    machine = Machine(noise=0.0, luck=0.0)
    machine.together(["small", "medium"])
    spoil(machine, position, **changes)
    samples = read_run(machine.write(tmp_path)).samples
    chosen = samples[(samples["position"] == position) & (samples["slot"] == 0)].iloc[0]
    assert chosen["rejected"] == rule
    assert (samples[samples["slot"] == 1]["rejected"] == "").all()
    if rule:
        assert pd.isna(chosen["throughput"])


def test_a_gpu_judges_solo_windows_by_their_step_time(tmp_path: Path) -> None:
    machine = Machine(noise=0.0, card={"device": "cuda"})
    machine.solo("small")
    machine.rows[1] |= {"step_p50_s": 0.06, "busy_s": None}
    rejected = read_run(machine.write(tmp_path)).samples["rejected"].tolist()
    assert rejected == ["", "unsteady_solo", ""]


def test_drift_between_the_solo_windows_rejects_only_what_lies_between(tmp_path: Path) -> None:
    machine = Machine(noise=0.0)
    machine.together(["small", "medium"])
    spoil(machine, 3, times=0.85)
    samples = read_run(machine.write(tmp_path)).samples
    own = samples[samples["slot"] == 0]
    assert own["rejected"].tolist() == ["", "drift", "", ""]
    assert own["rate_solo"].tolist()[3] == pytest.approx(own["rate"].tolist()[2])


def test_without_an_accepted_solo_window_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    machine = Machine()
    machine.together(["small", "medium"])
    for position in (0, 3):
        spoil(machine, position, foreign_s=2.0)
    tables = read_run(machine.write(tmp_path))
    row = pair(tables, "medium+small", "small")
    assert (row["windows"], row["rejected"], row["fits"]) == (0, 2, True)
    assert pd.isna(row["throughput"])
    assert pd.isna(row["saving"])  # no window was accepted for both
    assert pair(tables, "medium+small", "medium")["windows"] == 2
    assert alone(tables, "small")["rejected"] == 2
    assert pd.isna(alone(tables, "small")["rate"])
    assert pd.isna(row["util_sum"])


def test_rejected_windows_do_not_move_the_figures(tmp_path: Path) -> None:
    clean, spoilt = Machine().matrix(occasions=3), Machine().matrix(occasions=3)
    for row in spoilt.rows:
        if row["kind"] == "shared" and row["visit"].endswith("#2"):
            row.update(foreign_s=1.0, rate=row["rate"] * 0.4)
    expected = read_run(clean.write(tmp_path / "clean")).pairs
    found = read_run(spoilt.write(tmp_path / "spoilt")).pairs
    assert found["throughput"].tolist() == pytest.approx(expected["throughput"].tolist(), rel=0.03)
    assert (found["rejected"] == expected["windows"] - found["windows"]).all()
    assert (found["occasions"] == 2).all()


def rewrite(path: Path, change: Callable[[list[str]], Sequence[str]]) -> None:
    """Change the lines of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(change(lines)) + "\n", encoding="utf-8")


def with_field(line: str, **fields: object) -> str:
    return json.dumps({**json.loads(line), **fields})


HARMLESS: dict[str, tuple[Callable[[list[str]], Sequence[str]], dict[str, int]]] = {
    "the same": (lambda lines: lines, {}),
    "backwards": (lambda lines: lines[::-1], {}),
    "a window twice": (lambda lines: [*lines, lines[3]], {"duplicates": 1}),
    "a torn last line": (lambda lines: [*lines, lines[0][:40]], {"torn_lines": 1}),
    "empty lines": (lambda lines: [lines[0], "", *lines[1:], " "], {}),
    "a field nobody knows": (lambda lines: [with_field(line, later=1) for line in lines], {"unknown_fields": 1}),
    "2^64 bytes": (lambda lines: [with_field(lines[0], memory_bytes=2.0**64), *lines[1:]], {"absurd_readings": 1}),
    "250 %": (lambda lines: [with_field(lines[0], util_mean=2.5), *lines[1:]], {"absurd_readings": 1}),
    "not a number": (lambda lines: [with_field(lines[0], power_w=math.nan), *lines[1:]], {"absurd_readings": 1}),
    "negative time": (lambda lines: [with_field(lines[0], wait_s=-1.0), *lines[1:]], {"absurd_readings": 1}),
    "a text for a number": (lambda lines: [with_field(lines[0], clock_mhz="fast"), *lines[1:]], {"absurd_readings": 1}),
}


@pytest.mark.parametrize(("change", "dropped"), HARMLESS.values(), ids=HARMLESS.keys())
def test_what_is_put_right_and_counted(
    tmp_path: Path, change: Callable[[list[str]], Sequence[str]], dropped: dict[str, int]
) -> None:
    machine = Machine()
    machine.together(["small", "medium"])
    machine.solo("small")
    expected = read_run(machine.write(tmp_path))
    rewrite(tmp_path / "windows.jsonl", change)
    if "torn_lines" in dropped:
        text = (tmp_path / "windows.jsonl").read_text(encoding="utf-8")
        (tmp_path / "windows.jsonl").write_text(text.rstrip("\n"), encoding="utf-8")
    found = read_run(tmp_path)
    assert found.dropped == dropped
    pd.testing.assert_frame_equal(found.pairs, expected.pairs)
    assert len(found.samples) == len(expected.samples)


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "another format": ({"format": 2}, r"windows.jsonl:1: field 'format': 2 is not accepted; this version reads 1"),
    "no format": ({"format": None}, "field 'format': None is not accepted"),
    "a mode nobody knows": ({"mode": "magic"}, "'mode': 'magic' is not accepted; give one of timeslice, mps"),
    "no window length": ({"window_s": None}, "'window_s': None is not accepted; give a number in"),
    "an endless window": ({"window_s": 1e9}, "'window_s': 1000000000.0 is not accepted"),
    "negative steps": ({"steps": -1}, "'steps': -1 is not accepted; give a whole number in"),
    "half a step": ({"steps": 2.5}, "'steps': 2.5 is not accepted"),
    "true steps": ({"steps": True}, "'steps': True is not accepted"),
    "no members": ({"members": []}, "'members': .* is not accepted; give a list of names"),
    "a name with a plus": ({"members": ["a+b", "c"]}, "'members': .* is not accepted"),
    "another slot": ({"slot": 1}, "'slot': 1 is not accepted; give the place of 'small'"),
    "no occasion": ({"visit": "timeslice/small+medium"}, "'visit': 'timeslice/small.medium' is not accepted"),
    "occasion zero": ({"visit": "timeslice/small+medium#0"}, "'visit': .*occasions from 1"),
    "no time": ({"started_unix_s": math.nan}, "'started_unix_s': nan is not accepted"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_with_place_value_and_what_is_accepted(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    machine = Machine()
    machine.together(["small", "medium"])
    machine.write(tmp_path)
    rewrite(tmp_path / "windows.jsonl", lambda lines: [with_field(lines[0], **fields), *lines[1:]])
    with pytest.raises(DataError, match=message):
        read_run(tmp_path)


def test_files_that_are_missing_broken_or_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"card\.json: there is no such file"):
        read_run(tmp_path)
    machine = Machine()
    machine.solo("small")
    machine.write(tmp_path)
    rewrite(tmp_path / "windows.jsonl", lambda lines: [lines[0], "{", lines[1]])
    with pytest.raises(DataError, match=r"windows\.jsonl:2: not JSON"):
        read_run(tmp_path)
    rewrite(tmp_path / "windows.jsonl", lambda lines: ["[1]"])
    with pytest.raises(DataError, match=r"windows\.jsonl:1: list is not accepted; give a JSON object"):
        read_run(tmp_path)
    rewrite(tmp_path / "windows.jsonl", lambda lines: [])
    with pytest.raises(DataError, match="there is no window in it"):
        read_run(tmp_path)
    (tmp_path / "windows.jsonl").unlink()
    with pytest.raises(DataError, match=r"windows\.jsonl: there is no such file"):
        read_run(tmp_path)
    (tmp_path / "card.json").write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match="give a JSON object"):
        read_run(tmp_path)


CARDS: dict[str, tuple[dict[str, object], str]] = {
    "another format": ({"format": 7}, "field 'format': 7 is not accepted; this version reads 1"),
    "no type": ({"gpu_type": None}, "'gpu_type': None is not accepted; give a text; it may not be missing"),
    "another device": ({"device": "tpu"}, "'device': 'tpu' is not accepted; give one of cpu, cuda"),
    "no method": ({"method": {}}, "'method.window_s': None is not accepted"),
    "no workloads": ({"workloads": None}, "'workloads': None is not accepted"),
    "dry run not said": ({"dry_run": "no"}, "'dry_run': 'no' is not accepted; give true or false"),
}


@pytest.mark.parametrize(("fields", "message"), CARDS.values(), ids=CARDS.keys())
def test_cards_that_are_refused(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    machine = Machine(card=fields)
    machine.solo("small")
    with pytest.raises(DataError, match=message):
        read_run(machine.write(tmp_path))


def test_the_interval_by_hand() -> None:
    assert estimate([], []).median is None
    one = estimate([0.5], [1])
    assert (one.median, one.low, one.high, one.windows) == (pytest.approx(0.5), None, None, 1)
    # Two windows of one occasion: t(.9, 1) = 3.0777, sd = |d| / sqrt 2, so the half width is 3.0777 |d| / 2.
    two = estimate([1.0, math.exp(0.02)], [1, 1])
    assert (two.low, two.high) == pytest.approx((math.exp(0.01 - 0.030777), math.exp(0.01 + 0.030777)), abs=1e-4)
    # Two occasions whose means differ by as much: the same, however many windows each has.
    four = estimate([1.0, 1.0, math.exp(0.02), math.exp(0.02)], [1, 1, 2, 2])
    assert (four.low, four.high) == pytest.approx((two.low, two.high))
    # Means that agree by luck do not make it narrow.
    lucky = estimate([0.9, 1.1, 1.1, 0.9], [1, 1, 2, 2])
    assert lucky.high is not None
    assert lucky.high - 1.0 > 0.05
    with pytest.raises(ValueError, match="give numbers above 0"):
        estimate([1.0, 0.0], [1, 1])
    with pytest.raises(ValueError, match="give 2, one per value"):
        estimate([1.0, 1.0], [1])


@pytest.mark.parametrize(("occasions", "windows", "luck"), [(1, 4, 0.0), (2, 2, 0.0), (2, 2, 0.02), (4, 2, 0.05)])
def test_the_interval_holds_the_truth_as_often_as_it_says(occasions: int, windows: int, luck: float) -> None:
    rng = np.random.default_rng(7)
    groups = np.repeat(np.arange(occasions), windows).tolist()
    hits = 0
    for _ in range(1000):
        x = rng.normal(0.0, luck, occasions).repeat(windows) + rng.normal(0.0, 0.01, occasions * windows)
        found = estimate(np.exp(x).tolist(), groups)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 1.0 <= found.high
    assert 0.78 <= hits / 1000 <= 0.95
