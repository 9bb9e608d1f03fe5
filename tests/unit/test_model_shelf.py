"""From the registry to models that serve, and what serves when something there is broken."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from registering import card
from trained_trees import add_trees

from cotenant.actors.models import ModelShelf
from cotenant.configs.settings import PredictionSettings
from cotenant.forecasting.datasets.registry import Registry, write_shipped
from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.interference.learned import LearnedInterference


def shelf(path: Path, **settings: object) -> ModelShelf:
    return ModelShelf(PredictionSettings.model_validate(settings), path)


def test_what_is_shipped_serves_when_nothing_else_is_active(tmp_path: Path) -> None:
    models = shelf(tmp_path)
    wanted = models.wanted()
    assert wanted["interference"] == "shipped"
    found = models.load(wanted)
    assert isinstance(found.interference, LearnedInterference)
    assert found.serving["interference"] == "shipped"
    assert not found.warnings


def test_what_is_switched_off_is_not_wanted(tmp_path: Path) -> None:
    models = shelf(tmp_path, interference="rule", demand="ewquantile", cold_start=False)
    assert models.wanted() == {}
    found = models.load({})
    assert isinstance(found.interference, UtilisationRule)
    assert found.cold_start is None
    assert not found.warnings


@pytest.mark.parametrize("version", ["20200101T000000Z-00000000", "../..", ""])
def test_a_version_that_cannot_be_used_is_told_and_what_is_shipped_serves(tmp_path: Path, version: str) -> None:
    found = shelf(tmp_path).load({"interference": version})
    assert isinstance(found.interference, LearnedInterference)
    assert found.serving["interference"] == "shipped"
    assert len(found.warnings) == 1
    assert "interference" in found.warnings[0]


@pytest.mark.parametrize("content", ["{", "[]", '{"interference": 5}', '{"demand": "shipped"}', '{"weather": "x"}'])
def test_a_damaged_choice_is_told_and_what_is_shipped_serves(tmp_path: Path, content: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "active.json").write_text(content)
    models = shelf(tmp_path)
    assert models.wanted() == {"interference": "shipped", "coldstart": "shipped"}  # no demand model ships
    assert models.demand(models.wanted()) == ("", None, ())
    assert not models.load(models.wanted()).warnings
    (warning,) = models.warnings(models.wanted())
    assert "active.json" in warning


@pytest.mark.parametrize("harm", [shutil.rmtree, lambda folder: (folder / "interference.json").write_text("{}")])
def test_what_serves_from_files_that_are_gone_is_told(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    models = shelf(tmp_path)
    version = again(models.registry)
    models.registry.activate("interference", version)
    serving = models.load(models.wanted()).serving
    assert models.warnings(serving) == ()
    harm(models.registry.folder("interference", version))
    (warning,) = models.warnings(serving)
    assert f"interference model {version} serves until cotenant is restarted" in warning
    assert not models.warnings(models.load(models.wanted()).serving)  # told by what loads it, once


def test_what_was_fitted_to_other_gpus_is_told_of(tmp_path: Path) -> None:
    models = shelf(tmp_path)
    found = models.load(models.wanted())
    for types in ((), ("cpu-core",)):
        assert models.serving(found, types) == {"interference": "shipped", "coldstart": "shipped"}
    said = models.serving(found, {"NVIDIA H100", "cpu-core"})
    assert said["interference"].startswith("shipped (fitted to cpu-core; for NVIDIA H100 an estimate")
    assert said["coldstart"] == "shipped (fitted to cpu-core; of jobs on NVIDIA H100, cpu-core it says nothing)"
    rule = shelf(tmp_path, interference="rule", cold_start=False)
    assert rule.serving(rule.load({}), ("NVIDIA H100",)) == {"interference": "utilisation rule"}


def again(registry: Registry) -> str:
    """The shipped interference model as a version of its own."""
    folder = registry.folder("interference", "shipped")
    card = replace(registry.card("interference", "shipped"), version="")
    return registry.add("interference", card, lambda path: shutil.copy(folder / "interference.json", path))


def test_without_trained_experts_the_mixture_serves_as_it_is(tmp_path: Path) -> None:
    models = shelf(tmp_path)
    assert models.demand(models.wanted()) == ("", None, ())
    version, experts, warnings = models.demand({"demand": "20200101T000000Z-00000000"})
    assert (version, experts) == ("", None)
    (warning,) = warnings  # none ships, so nothing is to be said of one that does
    assert "20200101T000000Z-00000000 cannot be used" in warning


def test_experts_that_serve_in_the_place_of_others_are_told_by_their_own_version(tmp_path: Path) -> None:
    models = shelf(tmp_path)
    models.registry = Registry(tmp_path / "models", tmp_path / "shipped")
    version = add_trees(Registry(tmp_path / "elsewhere"))
    made = tmp_path / "elsewhere" / "demand" / version
    write_shipped(
        tmp_path / "shipped" / "demand",
        card(kind="demand"),
        lambda folder: shutil.copy(made / "util-trees.npz", folder),
    )
    served, experts, (warning,) = models.demand({"demand": "20200101T000000Z-00000000"})
    assert served == "shipped"
    assert experts is not None
    assert "cannot be used" in warning
