"""The cold-start classes that come with the package: what they were fitted on, and that they are cautious."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command_line import invoke

from cotenant import __version__
from cotenant.forecasting.characterisation.coldstart import LEVELS, ColdStartClasses, Descriptors
from cotenant.forecasting.datasets.registry import SHIPPED, SHIPPED_MODELS, Registry, load_coldstart
from cotenant.forecasting.datasets.run_sources import read_run_data
from cotenant.forecasting.datasets.schema import DataError
from cotenant.forecasting.training.coldstart_recipe import class_count, train_coldstart
from cotenant.forecasting.training.recipes import Origin

ORIGIN = Origin("2026-11-28T00:00:00+00:00", __version__)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> ColdStartClasses:
    registry = Registry(tmp_path_factory.mktemp("registry"))
    assert registry.active("coldstart") == SHIPPED
    return load_coldstart(registry, SHIPPED)


def close(first: Any, second: Any) -> bool:
    """Whether two records of plain values are equal up to rounding of another processor's arithmetic."""
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(close(value, second[key]) for key, value in first.items())
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(close, first, second))
    if isinstance(first, float):
        return bool(first == pytest.approx(second, rel=1e-6, abs=1e-9))
    return bool(first == second)


def test_fitting_again_gives_what_is_shipped(shipped: ColdStartClasses, tmp_path: Path) -> None:
    trained = train_coldstart(read_run_data("cpu"), ORIGIN)
    trained.write(tmp_path)
    assert close(json.loads((tmp_path / "classes.json").read_text()), json.loads(json.dumps(shipped.as_dict())))
    card = json.loads((SHIPPED_MODELS / "coldstart" / "card.json").read_text())
    for name in ("metrics", "baselines", "options", "protocol", "features_version"):
        assert close(getattr(trained.card, name), card[name]), name
    assert [source["fingerprint"] for source in card["data"]] == [each.fingerprint for each in trained.card.data]


def test_it_says_what_could_be_tested_on_thirteen_runs(shipped: ColdStartClasses) -> None:
    assert shipped.gpu_types == ("cpu-core",)
    assert shipped.tested == dict.fromkeys(LEVELS, "population"), "every interval is that of families left out"
    assert "general" not in shipped.lines, "the sizes of the models are not in the data"
    assert len(shipped.centres) == 2


@pytest.mark.parametrize(
    "job",
    [
        Descriptors(),
        Descriptors(batch=16),
        Descriptors("language_model", "gpt2", None, 8, 124e6),
        Descriptors(None, "resnet50", None, 32, 25.6e6),
        Descriptors("speech", batch=1),
    ],
)
def test_an_unknown_family_gets_nothing(shipped: ColdStartClasses, job: Descriptors) -> None:
    assert shipped.prior(job) is None


@pytest.mark.parametrize("family", ["image_classification", "text_classification", "segmentation", "gan", "inference"])
def test_a_family_alone_says_nothing_about_memory(shipped: ColdStartClasses, family: str) -> None:
    profile = shipped.prior(Descriptors(family, "another", None, 64))
    assert profile is not None
    assert profile.memory_bytes is None


def test_every_workload_needs_at_most_what_is_expected_of_its_like(shipped: ColdStartClasses) -> None:
    for row in read_run_data("cpu").runs.table.itertuples():
        profile = shipped.prior(Descriptors(None, str(row.architecture), None, float(str(row.batch))))
        if profile is None:  # of two kinds measured at sizes far apart
            continue
        assert profile.util_p95 >= float(str(row.util_max)) / 100.0
        assert profile.util_mean >= float(str(row.util_mean)) / 100.0
        assert profile.memory_bytes is not None
        assert profile.memory_bytes >= float(str(row.memory_max)) / 100.0 * shipped.device_memory_bytes


# -- data of one's own -------------------------------------------------------------------------------------------------


def rows(families: int = 5) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"family": f"f{i}", "batch": batch, "util_max": 10.0 * i + step, "memory_max": 5.0 + i}
            for i in range(families)
            for step, batch in enumerate((8, 16, 32))
        ]
    )


SAID = {"--licence": "ours", "--gpu-type": "T4", "--device-memory": "16"}


def command(data: str, folder: Path, **more: str | None) -> tuple[int, str, str]:
    said = SAID | {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    options = [word for name, value in said.items() if value is not None for word in (name, value)]
    return invoke("train", "coldstart", data, "--registry", str(folder / "models"), "--activate", *options)


def test_a_table_of_ones_own_becomes_the_active_version(tmp_path: Path) -> None:
    rows().to_csv(tmp_path / "runs.csv", index=False)
    code, out, err = command(str(tmp_path / "runs.csv"), tmp_path)
    assert code == 0
    assert err.startswith("cotenant: no better than what is simpler: MAE 0.1513, ")
    assert err.count("\n") == 1
    assert "it is active" in out
    registry = Registry(tmp_path / "models")
    version = registry.active("coldstart")
    assert version not in {None, SHIPPED}
    loaded = load_coldstart(registry, str(version))
    assert (loaded.gpu_types, loaded.trained_on) == (("T4",), "runs.csv: single runs, T4 (ours)")
    assert loaded.prior(Descriptors("f1", batch=16)) is not None
    card = registry.card("coldstart", str(version))
    assert card.baselines["a whole GPU"] > card.metrics["MAE"]


def test_every_family_is_held_out(tmp_path: Path) -> None:
    rows().to_csv(tmp_path / "runs.csv", index=False)
    data = read_run_data(tmp_path / "runs.csv", licence="ours", gpu_type="T4", device_memory_bytes=1e10)
    told: list[tuple[str, int, int]] = []
    trained = train_coldstart(data, ORIGIN, progress=lambda *step: told.append(step))
    assert [fold.group for fold in trained.folds] == ["f0", "f1", "f2", "f3", "f4"]
    assert told[-1] == ("holding out every family", 5, 5)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"gpu_type": None}, "runs.csv: its GPU type is not known; give it with --gpu-type"),
        ({"device_memory": None}, "runs.csv: the memory of its device is not known; give it with --device-memory"),
        ({"licence": None}, "runs.csv: the licence of these data is not known"),
        ({"data": "nowhere"}, "nowhere: there is nothing; give a folder, a file, or a shipped name (cpu)"),
        ({"data": "cpu", "gpu_type": "H100"}, "gpu_type: 'H100' is not accepted; measured are: "),
        ({"data": "cpu", "gpu_type": "cpu-core", "mode": "mps"}, "mode: 'mps' is not accepted; measured are: "),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    rows().to_csv(tmp_path / "runs.csv", index=False)
    code, out, err = command(folder=tmp_path, **({"data": str(tmp_path / "runs.csv")} | said))
    assert (code, out) == (1, "")
    assert message in " ".join(err.split())


def test_three_families_are_too_few(tmp_path: Path) -> None:
    rows(3).to_csv(tmp_path / "runs.csv", index=False)
    data = read_run_data(tmp_path / "runs.csv", licence="ours", gpu_type="T4", device_memory_bytes=1e10)
    with pytest.raises(DataError, match="3 families are too few; give at least 4"):
        train_coldstart(data, ORIGIN)


def test_how_many_classes_so_many_runs_can_carry() -> None:
    assert [class_count(runs) for runs in (4, 11, 12, 17, 18, 49)] == [1, 1, 2, 2, 3, 3]
