"""Model files, and loaders of published pairs on tiny files made here."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interference_tables import measured, profiles

from cotenant.forecasting.datasets.interference_models import ModelFileError, load_models, save_models
from cotenant.forecasting.datasets.pair_sources import read_pair_data
from cotenant.forecasting.datasets.pairs import (
    load_alnair_mps,
    load_alnair_pairs,
    load_gavel,
    load_gpulet,
    load_lucid,
)
from cotenant.forecasting.datasets.schema import DataError
from cotenant.forecasting.interference.table import BANDWIDTH, STEP
from cotenant.forecasting.training.interference import fit_interference
from cotenant.forecasting.training.recipes import pooled

SOLO = "model,dataset,batchsize,amp,speed,gpu_util,gmem_util,gmem\nA,D,32,0,64,50,20,1024\nB,D,64,1,32,90,60,2048\n"
PAIRS = ",model1,dataset1,batchsize1,amp1,speed1,model2,dataset2,batchsize2,amp2,speed2\n0,A,D,32,0,0.9,B,D,64,1,0.7\n"
MPS = (
    "job,batch,gpu_util_pct,solo_us_per_10steps,peer,peer_batch,peer_gpu_util_pct,peer_solo_us_per_10steps,slowdown_ratio\n"
    "net,1,40,100000,rnn,8,80,200000,1.25\n"
)
TIMES = "task1,task2,solo1_s,solo2_s,packed1_s,packed2_s\nNet_bs1,Rnn_bs8,100,50,125,100\n"


def gavel() -> dict[str, Any]:
    a, b = "('Net (batch size 16)', 1)", "('A3C', 1)"
    rates = {a: {"null": 10.0, a: [5.0, 5.0], b: [8.0, 1.0]}, b: {"null": 2.0, a: [1.0, 8.0], b: [0.0, 0.0]}}
    return {gpu: {**rates, "('Net (batch size 16)', 4)": {"null": 30.0}} for gpu in ("v100", "p100", "k80")}


def gpulet(folder: Path, name: str = "interference.csv") -> Path:
    alone = "vgg19,4,20,throughput,200,latency,0.02,1\nnet,1,80,throughput,500,latency,0.002,1\n"
    together = b"vgg19,4,20,net,1,throughput,150,latency,0.027,1\nnet,1,80,vgg19,4,throughput,450,latency,0.0022,1\n"
    (folder / "inference.csv").write_text(alone)
    (folder / "mem_util.csv").write_text("vgg19,4,20,mem_util,12.5,l2_util,20,0\n")
    (folder / name).write_bytes(gzip.compress(together) if name.endswith(".gz") else together)
    return folder


class TestModelFiles:
    def saved(self, path: Path) -> Path:
        save_models(path / "m.json", fit_interference(measured(), "made up", "none", "timeslice"))
        return path / "m.json"

    def test_a_saved_model_predicts_the_same(self, tmp_path: Path) -> None:
        models = fit_interference(measured(), "made up", "none", "timeslice")
        save_models(tmp_path / "m.json", models)
        again = load_models(tmp_path / "m.json")
        assert again.card == models.card
        pairs = [[a, b] for a in profiles()[:4] for b in profiles()[:4]]
        for gpu_type in ("a", "never seen"):
            first = models.predictor().predict_many(pairs, gpu_type)
            second = again.predictor().predict_many(pairs, gpu_type)
            assert np.allclose([p.low for each in first for p in each], [p.low for each in second for p in each])
            assert np.allclose([p.mid for each in first for p in each], [p.mid for each in second for p in each])
        assert list(tmp_path.iterdir()) == [tmp_path / "m.json"]

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda text: text[: len(text) // 2], "cannot be read as a model file"),
            (lambda text: "[]", "not a model file of this kind"),
            (lambda text: text.replace('"version": 2', '"version": 0', 1), "version 0 is not accepted"),
            (lambda text: text.replace('"features_version": 1', '"features_version": 0'), "features_version 0 is not"),
            (lambda text: text.replace('"unit": 0.', '"unit": 1.', 1), "damaged: the checksum"),
        ],
    )
    def test_what_cannot_be_used_says_why(self, tmp_path: Path, spoil: Callable[[str], str], message: str) -> None:
        path = self.saved(tmp_path)
        path.write_text(spoil(path.read_text()))
        with pytest.raises(ModelFileError, match=message):
            load_models(path)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("mix", "magic", "mix: 'magic' is not accepted"),
            ("unit", 0.0, "unit: 0.0 is not accepted"),
            ("physics", {"kind": "shares", "params": [1.0]}, "physics: "),
            ("names", ["util", "warp_stalls"], "names: "),
            ("trust", [], "impossible values"),
            ("bands", [], "bands: 0 is not accepted"),
            ("focal", [999], "impossible values"),
        ],
    )
    def test_impossible_values_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: object, message: str
    ) -> None:
        path = self.saved(tmp_path)
        raw = json.loads(path.read_text())
        raw["models"]["a"][field] = value
        monkeypatch.setattr("cotenant.forecasting.datasets.interference_models._digest", lambda body: raw["sha256"])
        path.write_text(json.dumps(raw))
        with pytest.raises(ModelFileError, match=message):
            load_models(path)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match=r"none\.json"):
            load_models(tmp_path / "none.json")


class TestLoaders:
    def test_lucid(self, tmp_path: Path) -> None:
        (tmp_path / "single_data.csv").write_text(SOLO)
        (tmp_path / "colocate_info.csv").write_text(PAIRS)
        table = load_lucid(tmp_path)
        assert table.throughput.tolist() == [0.9, 0.7]
        assert table.jobs.families == ("A", "B")
        assert table.jobs.features[0] == pytest.approx([0.5, 0.2, np.log(0.5), np.log(2.0**30)])
        assert table.focal.tolist() == table.other[::-1].tolist()

    def test_lucid_without_a_solo_run(self, tmp_path: Path) -> None:
        (tmp_path / "single_data.csv").write_text(SOLO.rsplit("B", 1)[0])
        (tmp_path / "colocate_info.csv").write_text(PAIRS)
        with pytest.raises(DataError, match=r"no solo run of B\|D\|64\|1"):
            load_lucid(tmp_path)

    def test_alnair_matrix(self, tmp_path: Path) -> None:
        (tmp_path / "m.csv").write_text(MPS)
        table = load_alnair_mps(tmp_path / "m.csv")
        assert table.throughput.tolist() == [0.8]
        assert table.jobs.features[table.focal[0]] == pytest.approx([0.4, np.log(0.01)])

    def test_alnair_times(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text(TIMES)
        table = load_alnair_pairs(tmp_path / "t.csv")
        assert table.throughput.tolist() == [0.8, 0.5]
        assert table.jobs.families == ("Net", "Rnn")

    @pytest.mark.parametrize("pack", [lambda text: text.encode(), lambda text: gzip.compress(text.encode())])
    def test_gavel(self, tmp_path: Path, pack: Callable[[str], bytes]) -> None:
        (tmp_path / "g").write_bytes(pack(json.dumps(gavel())))
        table = load_gavel(tmp_path / "g", "p100")
        names = table.jobs.ids
        found = {(names[a], names[b]): n for a, b, n in zip(table.focal, table.other, table.throughput, strict=True)}
        net, agent = "Net (batch size 16)", "A3C"
        assert found == {(net, net): 0.5, (net, agent): 0.8, (agent, net): 0.5}
        assert set(table.jobs.families) == {"Net", "A3C"}
        assert np.isfinite(table.jobs.features).all()

    @pytest.mark.parametrize("name", ["interference.csv", "interference.csv.gz"])
    def test_gpulet(self, tmp_path: Path, name: str) -> None:
        table = load_gpulet(gpulet(tmp_path, name=name))
        names = table.jobs.ids
        found = {(names[a], names[b]): n for a, b, n in zip(table.focal, table.other, table.throughput, strict=True)}
        assert found == {("vgg19:4@20%", "net:1@80%"): 0.75, ("net:1@80%", "vgg19:4@20%"): 0.9}
        assert table.names == (BANDWIDTH, STEP)
        features = dict(zip(names, table.jobs.features.tolist(), strict=True))
        assert features["vgg19:4@20%"] == pytest.approx([0.125, math.log(4 / 200)])
        assert math.isnan(features["net:1@80%"][0])  # mem_util.csv does not tell
        assert set(table.jobs.families) == {"vgg19", "net"}

    def test_gpulet_as_data_to_train_on(self, tmp_path: Path) -> None:
        data = read_pair_data(gpulet(tmp_path))
        assert data.mode == "mps"
        assert data.source.restricted
        assert {each.focal.source for each in data.observations} == {"unknown"}
        assert {each.focal.membw_util for each in data.observations} == {0.125, None}
        with pytest.raises(DataError, match="no job in it has a utilisation"):
            pooled([data])

    @pytest.mark.parametrize(
        ("name", "old", "new", "message"),
        [
            ("inference.csv", "net,", "other,", r"interference\.csv: line 1: no solo run of net:1@80% in inference"),
            ("inference.csv", ",1\n", "\n", r"inference\.csv: it has 7 columns; expected 8"),
            ("inference.csv", ",200,", ",0,", r"inference\.csv: line 1: column 'throughput': 0 is not accepted"),
            ("inference.csv", ",500,", ",,", r"inference\.csv: line 2: column 'throughput' is empty"),
            ("mem_util.csv", ",12.5,", ",250,", r"mem_util\.csv: line 1: column 'mem_util': 250 is not accepted"),
            ("interference.csv", ",throughput,450", ",latency,450", "line 2: latency is not accepted before 'throughp"),
            ("interference.csv", ",150,", ",20000,", "line 1: column 'throughput': 20000 is not accepted; vgg19:4@2"),
            ("interference.csv", ",20,", ",100,", "line 1: column 'mps_pct': 100 is not accepted"),
            ("interference.csv", None, "", r"interference\.csv: cannot be read"),
        ],
    )
    def test_gpulet_that_cannot_be(self, tmp_path: Path, name: str, old: str | None, new: str, message: str) -> None:
        path = gpulet(tmp_path) / name
        text = path.read_text()
        path.write_text(new if old is None else text.replace(old, new))
        with pytest.raises(DataError, match=message):
            load_gpulet(tmp_path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("job,batch\n1,2\n", "column 'gpu_util_pct' is missing"),
            (MPS.replace(",80,", ",,"), "line 2: column 'peer_gpu_util_pct' is empty"),
        ],
    )
    def test_bad_tables_are_named(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "m.csv").write_text(text)
        with pytest.raises(DataError, match=message):
            load_alnair_mps(tmp_path / "m.csv")

    def test_absent_and_foreign_files(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="cannot be read"):
            load_alnair_pairs(tmp_path / "absent.csv")
        (tmp_path / "g").write_text("[]")
        with pytest.raises(DataError, match="GPU type 'v100' is missing"):
            load_gavel(tmp_path / "g", "v100")
        with pytest.raises(DataError, match="give one of v100"):
            load_gavel(tmp_path / "g", "a100")
        (tmp_path / "g").write_text("{")
        with pytest.raises(DataError, match="cannot be read"):
            load_gavel(tmp_path / "g", "v100")
        (tmp_path / "g").write_text(json.dumps({**gavel(), "k80": {}}))
        with pytest.raises(DataError, match="no solo rate"):
            load_gavel(tmp_path / "g", "v100")


def test_the_file_says_nothing_of_this_machine(tmp_path: Path) -> None:
    models = fit_interference(measured(), "made up", "none", "timeslice")
    save_models(tmp_path / "m.json", replace(models, card=replace(models.card, metrics={})))
    assert str(tmp_path) not in (tmp_path / "m.json").read_text()
