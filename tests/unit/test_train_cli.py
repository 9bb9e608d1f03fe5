"""``cotenant train`` and ``cotenant models``: from files as users have them to versions in a registry."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import invoke
from interference_tables import world
from registering import card, text

from cotenant import _models
from cotenant._models import note_errors, note_licence
from cotenant.forecasting.datasets import series_sources, solo_sources
from cotenant.forecasting.datasets.model_card import NOT_STATED, DataSource
from cotenant.forecasting.datasets.pair_sources import needed_licence, read_pair_data
from cotenant.forecasting.datasets.registry import SHIPPED, Kind, Registry, load_demand, load_interference
from cotenant.forecasting.datasets.run_sources import read_run_data
from cotenant.forecasting.datasets.series import ValueSeries
from cotenant.forecasting.datasets.series_sources import GENAI_LICENCE, from_signatures, read_series_data
from cotenant.forecasting.datasets.signature_store import SignatureStore
from cotenant.forecasting.datasets.solo_sources import read_solo_data
from cotenant.forecasting.signatures import to_row
from cotenant.forecasting.training import demand_fit
from cotenant.forecasting.training.recipes import Origin, train_interference
from cotenant.forecasting.types import DemandProfile, Signature


def mps_table() -> pd.DataFrame:
    """The made-up world as a matrix of slowdowns under MPS."""
    table = world()
    util, names = table.jobs.features[:, 0] * 100.0, table.jobs.families
    rows = [
        {
            "job": names[a],
            "batch": int(a),
            "gpu_util_pct": util[a],
            "solo_us_per_10steps": 1e5 + 1e4 * a,
            "peer": names[b],
            "peer_batch": int(b),
            "peer_gpu_util_pct": util[b],
            "peer_solo_us_per_10steps": 1e5 + 1e4 * b,
            "slowdown_ratio": 1.0 / n,
        }
        for a, b, n in zip(table.focal, table.other, table.throughput, strict=True)
    ]
    return pd.DataFrame(rows)


def smi(path: Path, seed: int, ticks: int = 120) -> Path:
    """A recording of one GPU whose utilisation repeats itself."""
    rng = np.random.default_rng(seed)
    stamps = pd.Timestamp("2026-01-01") + pd.to_timedelta(np.arange(ticks), unit="s")
    busy = np.arange(ticks) % 12 < 8
    pd.DataFrame(
        {
            "timestamp": stamps.strftime("%Y/%m/%d %H:%M:%S.%f"),
            "power.draw [W]": "100 W",
            "utilization.gpu [%]": np.clip(np.where(busy, 80, 20) + rng.integers(-3, 4, ticks), 0, 100),
            "memory.used [MiB]": np.where(busy, 4000, 3500),
        }
    ).to_csv(path, index=False)
    return path


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    path = tmp_path / "matrix.csv"
    mps_table().to_csv(path, index=False)
    return path


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    folder = tmp_path / "recordings"
    folder.mkdir()
    for number in range(3):
        smi(folder / f"run{number}.csv", number)
    return folder


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "models")


def at(registry: Registry) -> tuple[str, str]:
    return ("--registry", str(registry.root))


def test_interference_from_a_published_form(registry: Registry, matrix: Path) -> None:
    code, out, err = invoke("train", "interference", str(matrix), *at(registry), "--activate", "--json")
    assert (code, err) == (0, "")
    card = json.loads(out)
    assert card["active"] is True
    assert card["options"]["mode"] == "mps"
    assert card["data"][0]["licence"] == "Apache-2.0"
    assert card["data"][0]["rows"] == 144
    assert "leave one family out (4 of them)" in card["protocol"]
    assert card["metrics"]["MAE"] < min(card["baselines"].values())
    assert set(card["baselines"]) == {"constant mean", "utilisation rule", "half of the excess"}
    predictor = load_interference(registry, card["version"]).predictor()
    job = DemandProfile(0.5, 0.5, None, source="history")
    assert predictor.predict([job, job], "Tesla P100-PCIE-16GB")[0].mid < 1.0
    again = json.loads(invoke("train", "interference", str(matrix), *at(registry), "--json")[1])
    assert again["metrics"] == card["metrics"]
    assert again["files"] == card["files"]


def test_the_shipped_model_is_what_the_shipped_data_give() -> None:
    data = read_pair_data("cpu")
    fresh = train_interference([data], Origin("2026-01-01T00:00:00+00:00", "test"))
    registry = Registry(Path("/nonexistent"))
    card, models = registry.card("interference", SHIPPED), load_interference(registry, SHIPPED)
    assert card.data == (data.source,)
    assert dict(card.options) == dict(fresh.card.options)
    assert dict(card.metrics) == pytest.approx(dict(fresh.card.metrics), abs=1e-6)
    assert dict(card.baselines) == pytest.approx(dict(fresh.card.baselines), abs=1e-6)
    assert list(models.models) == ["cpu-core"]
    assert card.metrics["MAE"] < min(card.baselines.values())


def test_the_shipped_model_is_for_the_device_that_runs() -> None:
    from cotenant.actors.devices.cpu import GPU_TYPE

    assert GPU_TYPE in load_interference(Registry(Path("/nonexistent")), SHIPPED).models


def test_demand_from_recordings(registry: Registry, recordings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_fit, "TrainingOptions", partial(demand_fit.TrainingOptions, trees=5))
    code, out, err = invoke(
        "train", "demand", str(recordings), *at(registry), "--updates", "2", "--licence", "non-commercial, ours"
    )
    assert code == 0, err
    assert "mind what that forbids" in err
    version = registry.versions("demand")[0].version
    assert f"demand {version}" in out
    assert f"cotenant models activate demand {version}" in out
    for quantity in ("util", "memory"):  # every figure that it is judged by, beside what serves without it
        assert f"\n{quantity}: MAE / persistence: " in out
        assert f"; {quantity}: untrained mixture, MAE / persistence: " in out
    loaded = load_demand(registry, version)
    assert [each.kind for each in loaded.util] == ["gru", "tcn", "trees"]
    assert [each.kind for each in loaded.memory] == ["trees"]
    assert loaded.forecaster().name
    listed = invoke("models", "list", "demand", *at(registry))[1]
    assert "non-commercial, ours" in listed
    assert "util: MAE / persistence" in listed
    assert "RESTRICTED" in invoke("models", "show", "demand", version[:16], *at(registry))[1]


def test_data_of_many_files_is_told_in_short_and_its_licence_once(
    registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = tuple(DataSource(f"{'a long name ' * 8}{k}", "non-commercial", f"{k}" * 64, 40) for k in range(4))
    made = card(data=sources)
    registry.add("interference", made, text)
    listed = invoke("models", "list", "interference", *at(registry))[1]
    assert "and 3 more (160 rows)" in listed
    assert max(map(len, listed.splitlines())) < 300
    note_licence(made)
    assert capsys.readouterr().err.count("mind what that forbids") == 1


def test_demand_from_a_signature_store(tmp_path: Path) -> None:
    rows = []
    for tick in [*range(80), *range(5000, 5080)]:
        signature = Signature("j", "g", 1e9 + tick, 1.0, 10, 0.4, 0.5, 1e9, 1e9, None, 0.5, None, 0, 1.0)
        rows.append(to_row(signature) | {"fingerprint": "program"})
    SignatureStore(tmp_path / "store", 1e6, 1 << 30).write("host", rows)
    util, memory = from_signatures(tmp_path / "store")
    assert [each.source for each in (*util, *memory)] == ["program", "program"]
    assert len(util[0].values) == 161  # the long silence is one gap
    assert np.isnan(util[0].values[80])
    assert np.nanmax(util[0].values) == pytest.approx(0.8)  # held back for half of the time
    assert read_series_data(tmp_path / "store", licence="ours").tick_s == 1.0


def test_readings_that_cannot_be(tmp_path: Path) -> None:
    path = smi(tmp_path / "one.csv", 0, 300)
    frame = pd.read_csv(path)
    frame.loc[5, "memory.used [MiB]"] = 18446744073707737660 // 2**20
    frame.to_csv(path, index=False)
    found = read_series_data(path, licence="ours")
    assert np.nanmax(found.memory[0].values) == 4000 * 2**20  # a driver that slipped once
    frame["utilization.gpu [%]"] = 250
    frame.to_csv(path, index=False)
    code, _, err = invoke("train", "demand", str(path), "--licence", "ours")
    assert code == 1
    assert "one.csv: column 'utilization.gpu': 300 of 300 readings" in err
    assert "the first is 250" in err


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.drop(columns="peer"), "column 'peer' is missing"),
        (lambda t: t.assign(gpu_util_pct=np.nan), "line 2: column 'gpu_util_pct' is empty"),
        (lambda t: t.assign(gpu_util_pct=250.0), "column 'gpu_util_pct': 250.0 is not accepted; give a number from 0"),
        (lambda t: t.assign(slowdown_ratio="fast"), "column 'slowdown_ratio': fast is not accepted"),
        (lambda t: t.assign(slowdown_ratio=0.0), "column 'slowdown_ratio'"),
        (lambda t: t.assign(solo_us_per_10steps=-1.0), "column 'solo_us_per_10steps'"),
        (lambda t: t.iloc[:0], "it has no rows"),
        (lambda t: t.iloc[:8], "ordered pairs of jobs are too few to train on; give at least 12"),
    ],
)
def test_bad_pairs(
    registry: Registry, matrix: Path, spoil: Callable[[pd.DataFrame], pd.DataFrame], message: str
) -> None:
    spoil(mps_table()).to_csv(matrix, index=False)
    code, _, err = invoke("train", "interference", str(matrix), *at(registry), "--format", "alnair-mps")
    assert code == 1
    assert err.startswith("error: ")
    assert message in err
    assert "matrix.csv" in err or "too few" in err
    assert not registry.root.exists()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_text(""), "cannot be read"),
        (lambda path: path.write_bytes(b"\x1f\x8bnot gzip"), "cannot be read"),
        (lambda path: path.write_text("a,b\n1,2\n"), "no column timestamp"),
        (lambda path: path.write_text("timestamp,power.draw,utilization.gpu,memory.used\n,,,\n"), "no row has a time"),
        (lambda path: smi(path, 0, 10), "too little to train on"),
        (lambda path: smi(path, 0), "give at least 2 to hold one out"),
    ],
)
def test_bad_recordings(registry: Registry, tmp_path: Path, write: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "bad.csv"
    write(path)
    code, _, err = invoke("train", "demand", str(path), *at(registry), "--licence", "ours", "--format", "nvidia-smi")
    assert code == 1
    assert message in err
    assert "bad.csv" in err or "too little" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "interference", "nowhere"), "nowhere: there is nothing"),
        (("train", "interference", "cpu", "--mode", "mps"), "mode: 'mps' is not accepted; measured are: duty"),
        (("train", "interference", "cpu", "--gpu-type", "H100"), "gpu_type: 'H100' is not accepted; measured are: "),
        (("train", "interference", "cpu", "--mode", "mig"), "mode: 'mig' is not accepted; give timeslice, mps"),
        (("train", "interference", "cpu", "--format", "csv"), "format: 'csv' is not accepted; give suite, lucid"),
        (("train", "interference", "cpu", "--groups", "row"), "groups: 'row' is not accepted; give family, job"),
        (("train", "demand", "nowhere"), "nowhere: there is nothing"),
        (("train", "demand", ".", "--experts", "lstm"), "experts: 'lstm' is not accepted; give gru, tcn, trees"),
        (("models", "show", "weather"), "kind: 'weather' is not accepted"),
        (("models", "activate", "demand", "latest"), "version: 'latest' is not accepted"),
    ],
)
def test_what_is_not_accepted(arguments: tuple[str, ...], message: str) -> None:
    code, _, err = invoke(*arguments)
    assert code == 1
    assert message in err


def test_a_licence_must_be_known(recordings: Path) -> None:
    code, _, err = invoke("train", "demand", str(recordings))
    assert code == 1
    assert "the licence of these data is not known; give it in words with --licence" in err


def test_what_is_said_of_a_licence_never_hides_a_known_one(registry: Registry, matrix: Path) -> None:
    said = invoke("train", "interference", str(matrix), *at(registry), "--licence", "research use", "--json")
    assert json.loads(said[1])["data"][0]["licence"] == "Apache-2.0; said to be: research use"
    assert "mind what that forbids" in said[2]


@pytest.mark.parametrize("said", [None, "", "  ", "mine, free for all", NOT_STATED, "S-Lab: non-commercial"])
def test_a_known_licence_that_forbids_goes_on_forbidding(said: str | None) -> None:
    known = "S-Lab: non-commercial"
    kept = needed_licence(said, known, "data")
    assert DataSource("data", kept, "0" * 64, 1).restricted
    assert kept.startswith(known)
    assert ("said to be: mine" in kept) is (said == "mine, free for all")
    assert needed_licence(said, NOT_STATED, "data") == ((said or "").strip() or NOT_STATED)


def test_every_reader_keeps_the_licence_it_knows(
    tmp_path: Path, matrix: Path, recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_pair_data(matrix, licence="ours").source.licence == "Apache-2.0; said to be: ours"
    assert read_pair_data("cpu", licence="ours").source.licence == "Apache-2.0"  # there is no doubt of what ships
    assert read_run_data("cpu", licence="ours").source.licence == "Apache-2.0"
    assert read_series_data(recordings, licence="ours").source.licence == "ours"
    path = tmp_path / "memory_by_model.json"
    path.write_text(json.dumps({"resnet": {"8": 1000.0}}))
    monkeypatch.setitem(solo_sources._FORMS, "miso", (lambda _path: (), "MISO's", "MIT"))
    assert read_solo_data(path, "miso", "ours").source.licence == "MIT; said to be: ours"
    pods = tmp_path / "duty_cycle.csv"
    pods.write_text("x\n")
    monkeypatch.setattr(series_sources, "_from_genai", lambda _path: ([ValueSeries("a", "a", np.zeros(99))], []))
    assert read_series_data(pods, "genai", "ours").source.licence == f"{GENAI_LICENCE}; said to be: ours"


def test_choosing_and_deleting(registry: Registry, matrix: Path) -> None:
    versions = []
    for _ in range(3):
        invoke("train", "interference", str(matrix), *at(registry))
        versions = [each.version for each in registry.versions("interference")]
    first = versions[1]  # after the shipped one
    assert invoke("models", "activate", "interference", first, *at(registry))[0] == 0
    listed = json.loads(invoke("models", "list", *at(registry), "--json")[1])
    assert [each["version"] for each in listed if each["active"] and each["kind"] == "interference"] == [first]
    assert "deleted" in invoke("models", "prune", "interference", "--keep", "1", *at(registry))[1]
    assert [each.version for each in registry.versions("interference")] == [SHIPPED, first, versions[3]]
    assert "shipped is active" in invoke("models", "deactivate", "interference", *at(registry))[1]
    assert registry.active("interference") == SHIPPED
    assert "nothing to delete" in invoke("models", "prune", "demand", *at(registry))[1]
    assert "there is no active demand model" in invoke("models", "show", "demand", *at(registry))[2]


@pytest.mark.parametrize(
    ("kind", "metric", "rival"),
    [
        ("interference", "MAE", "half of the excess"),
        ("demand", "util: MAE / persistence", "util: untrained mixture, MAE / persistence"),
        ("demand", "memory: MAE / persistence", "memory: untrained mixture, MAE / persistence"),
        ("coldstart", "MAE", "mean of the other families' runs"),
    ],
)
def test_what_is_worse_than_what_is_simpler_is_told(
    capsys: pytest.CaptureFixture[str], kind: Kind, metric: str, rival: str
) -> None:
    for value, said in ((0.5, "worse"), (0.4 + 1e-12, "no better"), (0.3, None)):
        note_errors(card(kind=kind, metrics={metric: value, "RMSE": 9.0}, baselines={rival: 0.4, "made up": 0.01}))
        told = capsys.readouterr().err
        assert told.count(f"{said} than what is simpler: {metric} {value:.4g}, {rival} 0.4") == (said is not None)
        assert bool(told) is (said is not None)
    note_errors(card(kind=kind, metrics={metric: 0.5}, baselines={}))
    assert not capsys.readouterr().err


def test_training_and_activating_tell_it(registry: Registry, matrix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = ("train", "interference", str(matrix), *at(registry))
    assert "worse than" not in invoke(*train)[2]
    version = registry.versions("interference")[-1].version
    monkeypatch.setitem(_models._FIGURES, "interference", (("RMSE", ("perfect",)),))
    monkeypatch.setattr(_models, "_best", lambda _card, _rivals: ("perfect", 0.0))
    for command in (train, ("models", "activate", "interference", version, *at(registry))):
        assert "worse than what is simpler: RMSE" in invoke(*command)[2]


def test_a_broken_version_is_told_and_hides_nothing(registry: Registry, matrix: Path) -> None:
    invoke("train", "interference", str(matrix), *at(registry), "--activate")
    broken = registry.active("interference")
    assert broken is not None
    invoke("train", "interference", str(matrix), *at(registry))
    (registry.folder("interference", broken) / "interference.json").write_text("{}")
    code, out, err = invoke("models", "list", "interference", *at(registry))
    assert code == 0
    assert out.count("\ninterference") == 2  # the shipped one and the sound one
    assert "interference.json: damaged" in err
    assert f"the active version {broken} cannot be used" in err
    (registry.root / "active.json").write_text("{")
    code, out, err = invoke("models", "list", "interference", *at(registry))
    assert (code, out.count("\ninterference")) == (0, 2)
    assert "active.json" in err


def served(registry: Registry) -> list[tuple[str, bool, bool]]:
    listed = json.loads(invoke("models", "list", "interference", *at(registry), "--json")[1])
    return [(each["version"], each["active"], each["serves"]) for each in listed]


def test_what_serves_in_the_place_of_another_is_listed(registry: Registry, matrix: Path) -> None:
    assert served(registry) == [(SHIPPED, True, True)]
    version = trained(registry, matrix, "--activate")
    assert served(registry) == [(SHIPPED, False, False), (version, True, True)]
    (registry.root / "active.json").write_text("{")
    assert served(registry) == [(SHIPPED, False, True), (version, False, False)]
    (registry.root / "active.json").unlink()
    registry.activate("interference", version)
    (registry.folder("interference", version) / "interference.json").write_text("{}")
    assert served(registry) == [(SHIPPED, False, True)]
    assert " serves " in invoke("models", "list", "interference", *at(registry))[1]


def trained(registry: Registry, data: Path, *arguments: str) -> str:
    card = json.loads(invoke("train", "interference", str(data), *at(registry), "--json", *arguments)[1])
    return str(card["version"])


@pytest.mark.parametrize("command", ["deactivate", "activate", "train"])
def test_damaged_choices_are_put_aside_by_the_next_choice(registry: Registry, matrix: Path, command: str) -> None:
    version = trained(registry, matrix)
    (registry.root / "active.json").write_text("{")
    arguments = {
        "deactivate": ("models", "deactivate", "interference"),
        "activate": ("models", "activate", "interference", version),
        "train": ("train", "interference", str(matrix), "--activate"),
    }[command]
    code, _, err = invoke(*arguments, *at(registry))
    assert code == 0
    assert "active.unreadable; of every other kind what is shipped is active" in err.replace("\n", "")
    assert (registry.active("interference") == SHIPPED) is (command == "deactivate")
    assert invoke("models", "list", *at(registry))[2] == ""


def test_a_version_that_could_not_be_activated_is_named(
    registry: Registry, matrix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Registry, "activate", full)
    code, _, err = invoke("train", "interference", str(matrix), *at(registry), "--activate")
    assert code == 1
    version = registry.versions("interference")[-1].version
    assert f"interference {version} is in {registry.root}, but it is not active: " in err
    assert "No space left on device" in err


def test_the_start_of_a_name_finds_damaged_versions_too_and_more_than_one_is_said(
    registry: Registry, matrix: Path
) -> None:
    first, second = trained(registry, matrix), trained(registry, matrix)
    code, _, err = invoke("models", "activate", "interference", first[:4], *at(registry))
    assert code == 1
    assert f"version: {first[:4]!r} is ambiguous; it begins {first}, {second}" in err
    (registry.folder("interference", second) / "interference.json").write_text("{}")
    for said in (second, second[:-1]):
        for command in ("show", "activate"):
            code, _, err = invoke("models", command, "interference", said, *at(registry))
            assert code == 1
            assert "interference.json: damaged" in err


def test_what_does_not_ship_is_said(registry: Registry) -> None:
    code, _, err = invoke("models", "activate", "demand", SHIPPED, *at(registry))
    assert code == 1
    assert "no demand model ships; to have no trained one serve: cotenant models deactivate demand" in err


def test_activating_says_what_gpus_a_model_was_fitted_to(registry: Registry, matrix: Path) -> None:
    version = trained(registry, matrix)
    for arguments in (
        ("models", "activate", "interference", version),
        ("train", "interference", str(matrix), "--activate"),
    ):
        assert "is active; it was fitted to Tesla P100-PCIE-16GB" in invoke(*arguments, *at(registry))[1]
