"""Reading the alnair form, any form with renamed columns, the project's own tables; the command and its page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import invoke

from cotenant._characterise import read_inputs
from cotenant.forecasting.characterisation.tables import MEMORY, UTIL
from cotenant.forecasting.datasets import alnair, runs
from cotenant.forecasting.datasets.schema import DataError
from cotenant.forecasting.datasets.tables import Tables

HOSTILE = "<script>alert(1)</script>"
MODELS = ("ResNet50", "MobileNet", "small_bert/ bert_en_uncased_L-2_H-128_A-2 ", HOSTILE, "Reinforcement Learning ")
BATCHES = (2, 32, 128, 256, 1024)


def dataset() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = []
    for number, model in enumerate(MODELS):
        for batch in BATCHES:
            low, spread = 5.0 + 10 * number, 4.0 * np.log2(batch)
            rows.append(
                {
                    "ID": len(rows) + 1, "Model": model, "Dataset": "GTSRB", "Epoch": 3, "BS": batch,
                    "Run_Env": "High-RAM" if number % 2 else "Standard", "GPU_Util_%_ran": spread,
                    "Min_GPU_Util_%": low, "MGUP": low + spread, "MGMAP": min(98.0, 10.0 + 5 * number + batch / 16),
                    "MaGPUPR": rng.uniform(0, 90), "CPU_Thds": 16, "SCT_user": rng.uniform(0, 900),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dataset().to_csv(tmp_path / alnair.DATASET, index=False)
    names = ["ResNet50_bs20", "MobileNet_bs256", "RL_bs1024_ep5000", "SmallBERT_L2H128A2_bs256"]
    pairs = [
        {
            "task1": a, "task2": b, "cluster1": i % 2, "cluster2": j % 2, "solo1_s": 100.0, "solo2_s": 80.0,
            "packed1_s": 110.0 + i, "packed2_s": 90.0 + j, "slowdown1_pct_reported": 10.0 + i,
            "slowdown2_pct_reported": 12.5 + j * 1.25,
            "packing_saving_pct_reported": 40.0 if (i, j) == (0, 1) else 10.0,
        }
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i < j
    ]  # fmt: skip
    pd.DataFrame(pairs).to_csv(tmp_path / alnair.PAIRS, index=False)
    pd.DataFrame(
        {"gpu_util_pct": [30, 90], "peer_gpu_util_pct": [40, 95], "slowdown_ratio": [1.01, 2.0]}
    ).to_csv(tmp_path / alnair.DIRECTED, index=False)  # fmt: skip
    pd.DataFrame(
        {"Model": [1, 1, 1], "Batch Size": [2, 17, 32], "MGUP": [9.0, 15.0, 25.0], "MGMAP": [10.0, 11.0, 12.0]}
    ).to_csv(tmp_path / alnair.SYNTHETIC, index=False)
    return tmp_path


# -- the alnair form --------------------------------------------------------------------------------------------------


def test_the_alnair_form_is_read_with_roles_families_and_parameters(folder: Path) -> None:
    data = alnair.load_alnair(folder)
    table = data.runs.table
    assert set(table["family"]) == {"ResNet50", "MobileNet", "SmallBERT", HOSTILE, "Reinforcement Learning"}
    assert "SmallBERT L2H128A2" in set(table["architecture"])
    assert data.parameters["SmallBERT L2H128A2"] == pytest.approx(4.39e6, rel=0.01)
    roles = data.runs.features
    assert (roles["batch"], roles["epochs"], roles["high_ram"]) == ("before", "before", "before")
    assert (roles["GPU_Util_%_ran"], roles["MaGPUPR"], roles["SCT_user"]) == ("derived", "gpu", "host")
    assert "ID" not in roles
    assert data.pairs is not None
    assert len(data.pairs.table) == 6
    assert data.pairs.directed.columns.tolist() == ["util", "peer_util", "slowdown"]
    assert data.synthetic[UTIL]["ResNet50"][0].tolist() == [2.0, 17.0, 32.0]


def test_a_single_file_is_enough(tmp_path: Path) -> None:
    dataset().to_csv(tmp_path / "Dataset.csv", index=False)
    data = alnair.load_alnair(tmp_path / "Dataset.csv")
    assert (data.pairs, data.synthetic) == (None, {})


@pytest.mark.parametrize(
    ("task", "place"),
    [
        ("ResNet50_bs20", ("ResNet50", 20.0)),
        ("RL_bs1024_ep5000", ("Reinforcement Learning", 1024.0)),
        ("SmallBERT_L2H128A2_bs256", ("SmallBERT L2H128A2", 256.0)),
        ("Unknown_bs4", None),
        ("ResNet50", None),
    ],
)
def test_tasks_of_the_pairs_are_found_among_the_runs(folder: Path, task: str, place: tuple[str, float] | None) -> None:
    assert alnair.task_of(task, alnair.load_alnair(folder).runs) == place


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns="MGUP"), r"Dataset\.csv: column 'MGUP' is missing; there are: ID, Model"),
        (lambda t: t.iloc[:0], r"Dataset\.csv: it has no rows"),
        (lambda t: t.assign(MGUP=[np.nan, *t["MGUP"][1:]]), "'util_max', row 1: a missing value is not accepted"),
        (lambda t: t.assign(MGMAP=[*t["MGMAP"][:-1], 250.0]), "'memory_max', row 25: 250.0 is not accepted; give"),
        (lambda t: t.assign(BS=["x", *t["BS"][1:]]), "'batch', row 1: 'x' is not accepted"),
        (lambda t: t.assign(BS=[0, *t["BS"][1:]]), "'batch', row 1: 0 is not accepted; give a number from 1"),
        (lambda t: t.assign(Model=[None, *t["Model"][1:]]), "'Model', row 1: it is empty"),
    ],
    ids=["no column", "no rows", "NaN", "absurd", "words", "zero batch", "no name"],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, change: object, message: str) -> None:
    change(dataset()).to_csv(tmp_path / "Dataset.csv", index=False)  # type: ignore[operator]
    with pytest.raises(DataError, match=message):
        alnair.load_alnair(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe", b'"unclosed\n1,2\n3'], ids=["empty", "binary", "broken"])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "Dataset.csv").write_bytes(content)
    with pytest.raises(DataError, match=r"Dataset\.csv: "):
        alnair.load_alnair(tmp_path)


def test_a_pair_without_a_time_is_refused(folder: Path) -> None:
    pairs = pd.read_csv(folder / alnair.PAIRS)
    pairs.loc[2, "packed1_s"] = 0.0
    pairs.to_csv(folder / alnair.PAIRS, index=False)
    with pytest.raises(DataError, match=r"'packed_a_s', row 3: 0\.0 is not accepted"):
        alnair.load_alnair(folder)


# -- any form ---------------------------------------------------------------------------------------------------------


def test_columns_are_renamed_and_units_made_the_same(tmp_path: Path) -> None:
    table = pd.DataFrame(
        {"model": ["a", "a", "b"], "bs": [1, 2, 4], "util": [0.1, 0.2, 0.3], "mem": [2**30, 2**31, 2**32]}
    )
    table.to_parquet(tmp_path / "mine.parquet")
    mapping = {"family": "model", "batch": "bs", "util_max_fraction": "util", "memory_max_bytes": "mem"}
    found = runs.read_runs(tmp_path / "mine.parquet", mapping, 2.0**33).table
    assert found[UTIL].tolist() == pytest.approx([10.0, 20.0, 30.0])
    assert found[MEMORY].tolist() == pytest.approx([12.5, 25.0, 50.0])
    assert found["run"].tolist() == ["a batch 1", "a batch 2", "b batch 4"]


@pytest.mark.parametrize(
    ("mapping", "memory", "message"),
    [
        ({"colour": "bs"}, None, "columns: 'colour' is not accepted; give any of family"),
        ({"batch": "size"}, None, "column 'size' is missing"),
        ({"memory_max_bytes": "memory_max"}, None, "give it with --device-memory"),
    ],
)
def test_a_mapping_that_cannot_be_used_is_refused(
    tmp_path: Path, mapping: dict[str, str], memory: float | None, message: str
) -> None:
    pd.DataFrame({"family": ["a"], "batch": [1], UTIL: [1.0], "memory_max": [1.0]}).to_csv(tmp_path / "t.csv")
    with pytest.raises(DataError, match=message):
        runs.read_runs(tmp_path / "t.csv", mapping, memory)


def own_tables() -> Tables:
    members = [(f"{family}-{batch}", family, batch) for family in ("lenet", "lstm") for batch in (8, 16, 32)]
    solo = pd.DataFrame(
        [
            {"gpu_type": "cpu", "mode": "timeslice", "member": member, "share": None, "family": family,
             "architecture": family, "batch": batch, "kind": "training", "rate": 9.0, "util_mean": 0.5,
             "util_peak": 1.2, "memory_bytes": batch * 2.0**20}
            for member, family, batch in members
        ]
    )  # fmt: skip
    rates = {"lenet-8": 0.7, "lstm-8": 0.6}
    pairs = pd.DataFrame(
        [
            {"gpu_type": "cpu", "mode": "timeslice", "shares": shares, "set": "lenet-8+lstm-8", "size": 2,
             "member": m, "throughput": n}
            for shares in ("", "0.5/0.5")
            for m, n in rates.items()
        ]
    )  # fmt: skip
    card = {"gpu_type": "cpu", "memory_bytes": 2.0**30}
    return Tables(pd.DataFrame(), solo, pairs, (card,), (), {})


def test_the_projects_own_tables_are_runs_and_pairs() -> None:
    found, pairs = runs.own_runs(own_tables())
    assert found.source == "cpu, timeslice"
    assert found.table[UTIL].tolist() == [100.0] * 6  # several processes can use more than the device
    assert found.table["util_mean"].tolist() == [50.0] * 6
    assert found.table[MEMORY].iloc[2] == pytest.approx(3.125)
    assert pairs.table.to_dict("records") == [{"a": "lenet-8", "b": "lstm-8", "n_a": 0.7, "n_b": 0.6}]


def test_own_tables_without_such_runs_are_refused() -> None:
    with pytest.raises(DataError, match="mode: 'mps' is not accepted; measured are: timeslice on cpu"):
        runs.own_runs(own_tables(), mode="mps")
    with pytest.raises(DataError, match="gpu_type: 'H100' is not accepted; measured are: timeslice on cpu"):
        runs.own_runs(own_tables(), gpu_type="H100")


@pytest.mark.parametrize(("modes", "taken"), [(["duty", "timeslice"], "timeslice"), (["mps", "duty"], "mps")])
def test_time_slicing_is_taken_where_it_was_measured(modes: list[str], taken: str) -> None:
    tables = own_tables()
    solo = pd.concat([tables.solo.assign(mode=mode) for mode in modes], ignore_index=True)
    assert runs.own_runs(replace(tables, solo=solo))[0].source == f"cpu, {taken}"


def test_what_ships_has_pairs_to_characterise_unless_another_mode_is_asked_for() -> None:
    found = read_inputs(Path("cpu"))
    assert found.pairs is not None
    assert len(found.pairs.table) == 78  # of 91: a program beside itself is in one cluster whatever these are


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_page_the_numbers_and_the_classes(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, stdout, stderr = invoke("characterise", str(folder), "--out", str(out), "--quick")
    assert (code, stderr) == (0, "")
    assert "K = 3 clusters" in stdout
    report = json.loads((out / "report.json").read_text())
    assert report["data"]["runs"] == 25
    assert report["interference"]["contradictions"]
    assert json.loads((out / "classes.json").read_text())["version"] == 2
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<h2>Cold-start classes</h2>" in page
    assert "Not available" not in page
    assert page.index('"cluster 0"') < page.index('"cluster 1"') < page.index('"cluster 2"') < page.index('"MobileNet"')
    assert "goes on to the right →" in page  # on what is narrower than a chart
    own = page.replace(page[page.index("<script>") : page.index("</script>")], "")
    assert "http://" not in own.replace("http://www.w3.org", "")
    assert 'src="http' not in own
    assert HOSTILE not in page


def test_little_data_gives_a_page_that_says_so(tmp_path: Path) -> None:
    pd.DataFrame({"family": ["a", "a"], "batch": [1, 2], UTIL: [1.0, 2.0], "memory_max": [1.0, 3.0]}).to_csv(
        tmp_path / "t.csv"
    )
    code, stdout, _ = invoke(
        "characterise", str(tmp_path / "t.csv"), "--out", str(tmp_path / "out"), "--quick", "--json"
    )
    assert code == 0
    assert {finding["verdict"] for finding in json.loads(stdout)} == {"cannot be told"}
    assert "Not available" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("families", [1, 2])
def test_few_runs_of_few_families_give_a_page(tmp_path: Path, families: int) -> None:
    rows = [
        {"family": f"f{n % families}", "batch": 8 * (n + 1), UTIL: 20.0 + n * n, "memory_max": 5.0 + n, "size": n % 3}
        for n in range(3)
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "t.csv", index=False)
    code, _, err = invoke("characterise", str(tmp_path / "t.csv"), "--out", str(tmp_path / "out"), "--quick")
    assert (code, err) == (0, "")
    assert (tmp_path / "out" / "report.html").exists()


def test_the_shipped_measurements_are_found_by_their_name() -> None:
    found = read_inputs(Path("cpu"))
    assert len(found.runs.table) > 5
    assert found.pairs is not None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere", "--out", "o"], "data: nowhere does not exist; give a folder, a file, or a shipped name (cpu)"),
        ([".", "--out", "o"], "there is no data set"),
        ([".", "--out", "o", "--columns", "batch"], "columns: 'batch' is not accepted; give OURS=THEIRS"),
    ],
)
def test_bad_arguments_end_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, stderr = invoke("characterise", *args)
    assert code == 1
    assert message in " ".join(stderr.split())
