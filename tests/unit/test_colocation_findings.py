"""From a run to the page of findings and its figures: one command each, every number computed, the same bytes twice."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest
from benchmarks.colocation import analysis, figures, findings, tables
from colocation_runs import Machine

from cotenant.forecasting.datasets.colocation import Tables, load_colocation, read_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything in it: two occasions, triples, two uncapped modes, capped shares, a failure."""
    machine = Machine(card={"processor": "Toy", "limits": ["a limit that the card tells"]}).matrix()
    machine.together(["small", "medium", "large"])
    machine.together(["medium", "large"], mode="mps")
    for shares in ([0.3, 0.7], [0.7, 0.3], [0.5, 0.5]):
        machine.together(["huge", "large"], mode="mps_cap", shares=shares)
    machine.together(["huge", "large"], mode="duty", shares=[0.5, 0.5])
    for row in machine.rows[:3]:
        row["foreign_s"] = 1.0
    machine.events.append(
        {
            "format": 1,
            "visit": "mps/huge+huge#1",
            "mode": "mps",
            "members": ["huge", "huge"],
            "member": "huge",
            "event": "does_not_fit",
            "message": "out of memory",
        }
    )
    return machine.write(tmp_path_factory.mktemp("runs") / "toy")


@pytest.fixture(scope="module")
def data(run: Path) -> Tables:
    """Its tables."""
    return read_run(run)


@pytest.fixture(scope="module")
def docs(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with its page of findings."""
    to = tmp_path_factory.mktemp("docs")
    assert findings.main([str(run), "--to", str(to)]) == 0
    return to


def test_the_whole_chain_is_one_command_each(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main([str(run)]) == 0
    told = capsys.readouterr().out
    assert "rejected: 3 (foreign_load 3)" in told
    assert "failures: 1" in told
    other = Machine(seed=5, run_id="run-2", begin_unix_s=1.9e9).matrix(occasions=1).write(tmp_path / "other")
    merged = tmp_path / "merged"
    assert tables.main([str(run / "tables"), str(other), "--to", str(merged)]) == 0
    assert "2 runs on toy" in capsys.readouterr().out
    assert findings.main([str(merged), "--to", str(tmp_path / "docs")]) == 0
    assert "occasion" in (tmp_path / "docs" / "colocation-merged.md").read_text(encoding="utf-8")
    report = tmp_path / "figures.json"
    assert figures.main([str(merged), "--json", str(report)]) == 0
    assert json.loads(report.read_text(encoding="utf-8"))["benchmark"] == "colocation"


def test_the_page_says_what_the_data_say(docs: Path, data: Tables) -> None:
    page = (docs / "colocation-toy.md").read_text(encoding="utf-8")
    sets = analysis.measured_sets(data, "toy", "timeslice")
    assert len(sets) == 10
    for one in analysis.bins(sets):
        cells = (f"{one.slowdown:.2f}", f"{one.worst_slowdown:.2f}", f"{one.saving:.2f}", f"{one.lost}")
        assert f"| {one.pairs} | {' | '.join(cells)} |" in page
    for error in analysis.rule_errors(sets):
        assert f"| {error.rule} | {error.saving_error:.3f} |" in page
    off = [abs(one.first - one.second) for one in analysis.repeated(data, "toy", "timeslice")]
    assert len(off) == 16
    assert f"differs from the first by {statistics.median(off):.3f} in the median" in page
    assert "foreign load 3" in page
    assert "Visits that failed: does not fit 1." in page
    assert "* a limit that the card tells" in page
    assert "processor Toy" in page
    assert "No pair lost time by sharing." in page
    assert "3 members of sets of three" in page
    assert page.index("### Time-slicing") < page.index("### MPS with capped shares") < page.index("Held to a share")
    assert "Nothing was repeated on a second occasion" in page


def test_every_drawing_exists_and_every_file_is_used(docs: Path) -> None:
    page = (docs / "colocation-toy.md").read_text(encoding="utf-8")
    linked = re.findall(r"!\[[^]]+\]\((images/[^)]+)\)", page)
    there = {path.relative_to(docs).as_posix() for path in (docs / "images").iterdir()}
    assert len(linked) == len(set(linked))
    assert set(linked) == there
    wanted = {"slowdown", "saving", "asymmetry", "repeatability", "matrix", "three"}
    assert {f"images/colocation-toy-timeslice-{what}.svg" for what in wanted} <= there
    assert {"images/colocation-toy-mps_cap-capped.svg", "images/colocation-toy-duty-capped.svg"} <= there
    for path in (docs / "images").iterdir():
        text = path.read_text(encoding="utf-8")
        assert text.startswith("<?xml")
        assert "<dc:date>" not in text
        assert not re.search(r"[ \t]$", text, re.MULTILINE)


def test_the_same_data_give_the_same_bytes(run: Path, docs: Path, tmp_path: Path) -> None:
    tables.main([str(run), "--to", str(tmp_path / "toy")])
    findings.write_page(load_colocation(tmp_path / "toy"), "toy", tmp_path / "docs")
    again = {path.relative_to(tmp_path / "docs"): path for path in (tmp_path / "docs").rglob("*") if path.is_file()}
    assert len(again) > 10
    for name, path in again.items():
        assert path.read_bytes() == (docs / name).read_bytes(), name


def test_losing_pairs_are_named(tmp_path: Path) -> None:
    machine = Machine()
    for occasion in (1, 2):
        machine.together(["huge", "large"], occasion, truth=lambda names, slot, share: 0.4)
        machine.together(["small", "medium"], occasion)
    page = findings.write_page(read_run(machine.write(tmp_path / "run")), "lossy", tmp_path).read_text(encoding="utf-8")
    assert "1 of 2 pairs lost time by sharing (1 with the whole interval below 0), the lightest" in page
    assert "of them at U = 1.75." in page
    assert "smallest: −0." in page


def test_a_run_of_solo_windows_or_without_utilisation_makes_a_page(tmp_path: Path) -> None:
    machine = Machine()
    machine.solo("small")
    page = findings.write_page(read_run(machine.write(tmp_path / "solo")), "solo", tmp_path)
    assert "1 workloads; 0 sets" in page.read_text(encoding="utf-8")
    machine.together(["small", "huge"])
    for row in machine.rows:
        row["util_mean"] = None
        row["memory_bytes"] = None
    silent = read_run(machine.write(tmp_path / "silent"))
    assert analysis.measured_sets(silent, "toy", "timeslice") == []
    page = findings.write_page(silent, "silent", tmp_path)
    assert "| small | rl | timeslice |" in page.read_text(encoding="utf-8")
    assert [row.metric for row in figures.rows("silent", silent)] == [
        "rejected windows",
        "median width of the 80 % interval of n",
    ]


def test_types_of_devices_have_sections_and_drawings_of_their_own(tmp_path: Path) -> None:
    for gpu_type in ("Tesla P100", "H100"):
        machine = Machine(run_id=gpu_type, gpu_type=gpu_type).matrix(occasions=1)
        machine.write(tmp_path / gpu_type)
    to = tmp_path / "both"
    assert tables.main([str(tmp_path / "H100"), str(tmp_path / "Tesla P100"), "--to", str(to)]) == 0
    page = findings.write_page(load_colocation(to), "both", tmp_path).read_text(encoding="utf-8")
    assert page.index("## H100") < page.index("## Tesla P100")
    assert (tmp_path / "images" / "colocation-both-Tesla-P100-timeslice-saving.svg").exists()


def test_figures_are_rows_with_ours_and_the_baselines(data: Tables) -> None:
    rows = list(figures.rows("toy", data))
    timeslice = {(row.method, row.metric): row.value for row in rows if row.case == "toy, toy, timeslice"}
    assert {method for method, _ in timeslice} == {"cotenant", "product of pairs", *analysis.RULES}
    samples = data.samples[data.samples["mode"] == "timeslice"]
    assert timeslice["cotenant", "rejected windows"] == pytest.approx(3 / len(samples))
    sets = analysis.measured_sets(data, "toy", "timeslice")
    off = [abs(0.5 - one.saving[0]) for one in sets]
    assert timeslice["no interference", "MAE of the saving"] == pytest.approx(statistics.fmean(off))
    assert 0.0 < timeslice["cotenant", "MAE of n, second occasion against first"] < 0.03


def test_commands_say_what_is_wrong(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for main in (tables.main, findings.main, figures.main):
        assert main([str(tmp_path / "nowhere")]) == 2
        assert "there is no data set; give a folder of tables, a run, or a shipped name" in capsys.readouterr().err
    assert findings.main([str(run), "--name", "a/b", "--to", str(tmp_path)]) == 2
    assert "name: 'a/b' is not accepted" in capsys.readouterr().err
    monkeypatch.setattr(figures, "shipped", list)
    assert figures.main([]) == 2
    assert "no data set is shipped" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tables.main([str(run), str(run)])
    assert "--to: give the folder for the merged tables" in capsys.readouterr().err
    dry = Machine(card={"dry_run": True})
    dry.solo("small")
    dry.write(tmp_path / "dry")
    assert tables.main([str(tmp_path / "dry")]) == 2
    assert tables.main([str(tmp_path / "dry"), "--allow-dry-run"]) == 0
