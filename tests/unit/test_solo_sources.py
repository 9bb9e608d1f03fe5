"""Published single runs and speeds of MIG slices, on tiny files made here."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from cotenant.forecasting.datasets.mig_speeds import MigSpeeds, load_mig_speeds
from cotenant.forecasting.datasets.schema import DataError
from cotenant.forecasting.datasets.solo_sources import SoloFormat, SoloRun, read_solo_data, solo_fingerprint

MIB = 1 << 20
CARMA = (
    "Model,Max memory.used [MB],Faketensor Estimate [MB],Run folder,Time,batch_size\n"
    "net,2048.0,1024.5,t1_net.py_--batch_size_32_--epochs_1,t1,\n"
    "bert,4096.0,,t2_bert.py,t2,\n"
    "unet,1000.0,,t3_unet.py,t3,8\n"
)
GPUMEMNET = (
    "Filename,Total Parameters,Batch Size,Max GPU Memory (MiB),Avg GPUTL,Avg SMACT,Avg SMOCC\n"
    "input:1_depth:8_arch:pyramid_batch:64.out,1000,64,1500,25.0,0.5,0.25\n"
    "input:2.out,29,4,1443,,,\n"
)
MISO = '{"net": {"64": 2048, "128": 4096}}'
TEXTS: dict[SoloFormat, str] = {"carma": CARMA, "gpumemnet": GPUMEMNET, "miso": MISO}
SLICES = (
    "mig_slice,model,batch,n_iters,median_iter_s,speed_vs_7g\n"
    "1g.5gb,net,64,10,0.4,0.25\n7g.40gb,net,64,10,0.1,1.0\n7g.40gb,bert,2,10,0.05,1.0\n"
)


def written(folder: Path, text: str) -> Path:
    (folder / "data").write_text(text, encoding="utf-8")
    return folder / "data"


def test_carma(tmp_path: Path) -> None:
    data = read_solo_data(written(tmp_path, CARMA), "carma")
    assert data.runs == (
        SoloRun("net.py_--batch_size_32_--epochs_1", "net", 2048 * MIB, 32, estimate_bytes=2049 * MIB // 2),
        SoloRun("bert.py", "bert", 4096 * MIB),
        SoloRun("unet.py", "unet", 1000 * MIB, 8),
    )
    assert (data.source.licence, data.source.rows, data.source.restricted) == ("Apache-2.0", 3, False)


def test_gpumemnet(tmp_path: Path) -> None:
    path = tmp_path / "table.csv.gz"
    path.write_bytes(gzip.compress(GPUMEMNET.encode()))
    data = read_solo_data(path, "gpumemnet")
    program = "input:1_depth:8_arch:pyramid_batch:64"
    assert data.runs == (
        SoloRun(program, "MLP, pyramid", 1500 * MIB, 64, 1000, util_mean=0.25, sm_active=0.5, sm_occupancy=0.25),
        SoloRun("input:2", "MLP", 1443 * MIB, 4, 29),
    )
    assert data.source.restricted
    assert read_solo_data(path, "gpumemnet", "given by its authors").source.licence == "given by its authors"


def test_miso_memory(tmp_path: Path) -> None:
    data = read_solo_data(written(tmp_path, MISO), "miso")
    assert data.runs == (
        SoloRun("net_train64", "net", 2048 * MIB, 64),
        SoloRun("net_train128", "net", 4096 * MIB, 128),
    )
    assert data.source.licence == "MIT"
    assert data.source.fingerprint == solo_fingerprint(reversed(data.runs))
    assert data.source.fingerprint != solo_fingerprint([data.runs[0], replace(data.runs[1], batch=64)])


@pytest.mark.parametrize(
    ("form", "old", "new", "message"),
    [
        ("carma", "Run folder", "Folder", "column 'Run folder' is missing"),
        (
            "carma",
            "2048.0",
            "-1",
            r"line 2: column 'Max memory.used \[MB\]': -1.0 is not accepted; give a number from 1",
        ),
        ("carma", "4096.0", "", r"line 3: column 'Max memory.used \[MB\]' is empty"),
        ("carma", "1024.5", "many", "line 2: column 'Faketensor Estimate .*': many is not accepted"),
        ("carma", ",8\n", ",8.5\n", "line 4: column 'batch_size': 8.5 is not accepted; give a whole number from 1"),
        ("gpumemnet", ",25.0,", ",250,", "line 2: column 'Avg GPUTL': 250.* is not accepted"),
        ("gpumemnet", ",0.5,", ",50,", "line 2: column 'Avg SMACT': 50.* is not accepted; give a number from 0 to 1"),
        ("gpumemnet", ",1443,", ",1e30,", "line 3: column 'Max GPU Memory .MiB.': 1e.30 is not accepted"),
        ("miso", '"64"', '"x"', "'net': batch 'x' is not accepted"),
        ("miso", "2048", "true", "'net', batch 64: True is not accepted"),
        ("miso", "2048", "NaN", "'net', batch 64: nan is not accepted"),
        ("miso", '{"64": 2048, "128": 4096}', "7", "'net': 7 is not accepted"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, form: SoloFormat, old: str, new: str, message: str) -> None:
    path = written(tmp_path, TEXTS[form].replace(old, new, 1))
    with pytest.raises(DataError, match=f"^{path}: {message}"):
        read_solo_data(path, form)


@pytest.mark.parametrize("form", list(TEXTS))
@pytest.mark.parametrize("text", ["", "[" * 100_000, "\x00\x1f", "{}"], ids=["empty", "deep", "binary", "braces"])
def test_files_that_hold_nothing(tmp_path: Path, form: SoloFormat, text: str) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        read_solo_data(written(tmp_path, text), form)
    with pytest.raises(DataError, match="cannot be read"):
        read_solo_data(tmp_path / "absent", form)


def test_a_table_without_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it has no rows"):
        read_solo_data(written(tmp_path, CARMA.splitlines()[0] + "\n"), "carma")


def test_mig_speeds(tmp_path: Path) -> None:
    small, whole = "NVIDIA A100 MIG 1g.5gb", "NVIDIA A100 MIG 7g.40gb"
    assert load_mig_speeds(written(tmp_path, SLICES), "NVIDIA A100") == (
        MigSpeeds("net", 64, {small: 0.4, whole: 0.1}, {small: 0.25, whole: 1.0}),
        MigSpeeds("bert", 2, {whole: 0.05}, {whole: 1.0}),
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("median_iter_s", "seconds", "column 'median_iter_s' is missing"),
        ("0.4", "-0.4", "line 2: column 'median_iter_s': -0.4 is not accepted"),
        ("net,64,10,0.1", "net,6.4,10,0.1", "line 3: column 'batch': 6.4 is not accepted; give a whole number"),
        ("7g.40gb,net", "1g.5gb,net", "line 3: column 'mig_slice': 1g.5gb comes twice for net with batch 64"),
        (SLICES, "mig_slice,model,batch,median_iter_s\n", "it has no rows"),
    ],
)
def test_mig_speeds_that_cannot_be(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = written(tmp_path, SLICES.replace(old, new, 1))
    with pytest.raises(DataError, match=f"^{path}: {message}"):
        load_mig_speeds(path, "NVIDIA A100")
