"""The registry of trained models: whole or not at all, sound or refused with the reason, safe beside others."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interference_tables import measured
from registering import SOURCE, add_several, card, choose_often, text

from cotenant.forecasting.characterisation.coldstart import VERSION, ColdStartClasses
from cotenant.forecasting.datasets.interference_models import save_models
from cotenant.forecasting.datasets.model_card import read_card
from cotenant.forecasting.datasets.registry import (
    FEATURES,
    KINDS,
    SHIPPED,
    DamagedChoices,
    Kind,
    ModelFileError,
    Registry,
    load_coldstart,
    load_demand,
    load_interference,
    write_shipped,
)
from cotenant.forecasting.demand.mixture import UTIL_SCALES
from cotenant.forecasting.training.demand_artefact import save_artefact
from cotenant.forecasting.training.demand_fit import TrainingOptions, train_demand
from cotenant.forecasting.training.interference import fit_interference

MODELS = fit_interference(measured()[:40], "made up", "none", "timeslice")


def models(folder: Path) -> None:
    save_models(folder / "interference.json", MODELS)


def classes(folder: Path) -> None:
    quantities = ("util_mean", "util_p95", "memory")
    levels = ("architecture", "beyond", "family", "general", "population")
    made = ColdStartClasses(
        device_memory_bytes=1e9,
        architectures={},
        families={},
        offsets={},
        lines={"population": dict.fromkeys(quantities, (0.5, 0.0, 0.0))},
        errors={level: dict.fromkeys(quantities, (-0.4, -0.2, 0.0, 0.2, 0.4)) for level in levels},
        centres=((0.2, 0.1), (0.9, 0.5)),
        scale=(1.0, 1.0),
        trained_on="made up",
    )
    (folder / "classes.json").write_text(json.dumps(made.as_dict()))


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "models", tmp_path / "shipped")


@pytest.fixture
def with_shipped(registry: Registry, tmp_path: Path) -> Registry:
    write_shipped(tmp_path / "shipped" / "interference", card(), models)
    return registry


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_nothing_there_and_nothing_shipped(registry: Registry) -> None:
    assert [registry.active(kind) for kind in KINDS] == [None] * 3
    assert [registry.versions(kind) for kind in KINDS] == [[]] * 3
    with pytest.raises(ModelFileError, match=r"version: 'shipped' is not accepted; give one of: there are none yet"):
        load_interference(registry, SHIPPED)


def test_a_version_comes_back_as_it_was_added(registry: Registry) -> None:
    name = registry.add("interference", card(), models)
    assert name.startswith("20260102T030400Z-")
    found = registry.card("interference", name)
    assert found == replace(card(), version=name, files=found.files)
    assert list(found.files) == ["interference.json"]
    assert registry.versions("interference") == [found]
    assert registry.active("interference") is None
    registry.activate("interference", name)
    assert registry.active("interference") == name
    assert load_interference(registry, name).card == MODELS.card
    assert sorted(path.name for path in registry.folder("interference", name).iterdir()) == [
        "card.json",
        "interference.json",
    ]


def test_the_same_content_is_the_same_version(registry: Registry) -> None:
    assert registry.add("interference", card(), models) == registry.add("interference", card(), models)
    assert registry.add("interference", card(seed=1), models) != registry.add("interference", card(), models)


def test_the_shipped_version_serves_until_another_is_chosen(with_shipped: Registry) -> None:
    assert with_shipped.active("interference") == SHIPPED
    name = with_shipped.add("interference", card(1), models)
    assert [each.version for each in with_shipped.versions("interference")] == [SHIPPED, name]
    with_shipped.activate("interference", name)
    assert with_shipped.active("interference") == name
    for back in (None, SHIPPED):
        with_shipped.activate("interference", name)
        with_shipped.activate("interference", back)
        assert with_shipped.active("interference") == SHIPPED
    assert load_interference(with_shipped, SHIPPED).card == MODELS.card


def test_cold_start_classes(registry: Registry) -> None:
    name = registry.add("coldstart", card(kind="coldstart"), classes)
    registry.activate("coldstart", name)
    assert load_coldstart(registry, name).trained_on == "made up"
    assert FEATURES["coldstart"] == VERSION


def test_demand_experts_join_the_mixture(registry: Registry) -> None:
    rng = np.random.default_rng(0)
    settings = UTIL_SCALES[0][1]
    trained = train_demand([rng.random(80)], settings, ("trees", "gru"), TrainingOptions(updates=1, trees=2, leaves=3))

    def experts(folder: Path) -> None:
        save_artefact(trained["gru"], folder / "util-gru.npz")
        save_artefact(trained["trees"], folder / "memory-trees.npz")

    name = registry.add("demand", card(kind="demand"), experts)
    registry.activate("demand", name)
    loaded = load_demand(registry, name)
    assert [each.kind for each in loaded.util] == ["gru"]
    assert [each.kind for each in loaded.memory] == ["trees"]
    assert loaded.forecaster().forecast("nobody") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "weather"}, "kind: 'weather' is not accepted; give one of interference, demand, coldstart"),
        ({"kind": "demand"}, "kind: 'demand' is not accepted; give 'interference'"),
        ({"format": "other"}, "its format must be 'cotenant-model'"),
        ({"format_version": 2}, "format_version: 2 is not accepted"),
        ({"features_version": 99}, "features_version: 99 is not accepted; give 1: fit the model again"),
        ({"made_at": "yesterday"}, "made_at: 'yesterday' is not accepted"),
        ({"made_at": "2026-01-02T03:04:05"}, "made_at"),
        ({"metrics": {"MAE": None}}, "metrics"),
        ({"metrics": [1]}, "metrics"),
        ({"data": []}, "data"),
        ({"data": [{"source": "x", "licence": "", "fingerprint": "0" * 64, "rows": 1}]}, "data"),
        ({"data": [{"source": "x", "licence": "y", "fingerprint": "0", "rows": 1}]}, "data"),
        ({"files": {"../../etc/passwd": "0" * 64}}, "files"),
        ({"seed": "one"}, "seed"),
        ({"program": None}, "program"),
        ({"protocol": ""}, "protocol"),
        ({"version": "shipped"}, "version"),
        ({"metrics": {"MAE": 0.01}}, "damaged"),
    ],
)
def test_a_card_that_is_not_accepted(registry: Registry, change: dict[str, Any], message: str) -> None:
    name = registry.add("interference", card(), models)
    sound = registry.add("interference", card(5), models)
    path = registry.folder("interference", name) / "card.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelFileError, match=message) as caught:
        registry.card("interference", name)
    assert str(path) in str(caught.value)
    assert [each.version for each in registry.versions("interference")] == [sound]
    assert len(registry.broken("interference")) == 1


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "card.json").unlink(), r"card\.json: cannot be read"),
        (lambda folder: (folder / "card.json").write_bytes(b"\xff\xfe"), r"card\.json: cannot be read"),
        (lambda folder: (folder / "card.json").write_text("[]"), r"card\.json: not the card"),
        (lambda folder: (folder / "card.json").write_text("[" * 100_000), r"card\.json: cannot be read"),
        (lambda folder: (folder / "interference.json").unlink(), r"interference\.json: cannot be read"),
        (lambda folder: (folder / "interference.json").write_bytes(b""), r"interference\.json: damaged"),
        (lambda folder: damage(folder / "interference.json"), r"interference\.json: damaged"),
        (shutil.rmtree, "version"),
    ],
)
def test_a_version_that_was_damaged(registry: Registry, harm: Callable[[Path], object], message: str) -> None:
    sound = registry.add("interference", card(0), models)
    name = registry.add("interference", card(1), models)
    registry.activate("interference", name)
    harm(registry.folder("interference", name))
    for use in (load_interference, lambda registry, name: registry.activate("interference", name)):
        with pytest.raises(ModelFileError, match=message):
            use(registry, name)
    assert [each.version for each in registry.versions("interference")] == [sound]
    assert registry.active("interference") == name  # whoever serves it must learn that it is broken
    registry.activate("interference", None)
    assert registry.active("interference") is None


@pytest.mark.parametrize(
    ("kind", "load"), [("interference", load_interference), ("coldstart", load_coldstart), ("demand", load_demand)]
)
def test_files_with_the_right_checksum_and_wrong_content(
    registry: Registry, kind: Kind, load: Callable[[Registry, str], object]
) -> None:
    names = {"interference": "interference.json", "coldstart": "classes.json", "demand": "util-gru.npz"}
    for content in ("", "{}", "[1]", '{"version": 1}', "[" * 100_000, "1" * 5000):
        name = registry.add(kind, card(kind=kind), lambda folder, c=content: (folder / names[kind]).write_text(c))
        with pytest.raises(ModelFileError, match=names[kind].replace(".", r"\.")):
            load(registry, name)
        with pytest.raises(ModelFileError):
            registry.activate(kind, name)
    name = registry.add(kind, card(kind=kind), lambda folder: (folder / "other.bin").write_text("x"))
    with pytest.raises(ModelFileError, match="files"):
        load(registry, name)


@pytest.mark.parametrize("name", ["../..", "latest", "", "20260102T030400Z-0123456", "/etc"])
def test_names_that_are_no_versions(registry: Registry, name: str) -> None:
    for use in (
        registry.card,
        registry.folder,
        registry.activate,
    ):
        with pytest.raises(ModelFileError, match="version"):
            use("interference", name)


def test_unknown_kinds(registry: Registry) -> None:
    weather: Any = "weather"
    for use in (
        lambda: registry.add(weather, card(), models),
        lambda: registry.versions(weather),
        lambda: registry.active(weather),
        lambda: registry.activate(weather, None),
        lambda: registry.prune(weather, 1),
    ):
        with pytest.raises(ModelFileError, match="kind: 'weather' is not accepted; give one of interference"):
            use()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"weather": "x"}', '{"demand": "../x"}', '{"demand": 1}', "\x00", "[" * 100_000]
)
def test_a_damaged_file_of_choices(registry: Registry, content: str) -> None:
    name = registry.add("interference", card(), models)
    (registry.root / "active.json").write_text(content)
    for use in (
        lambda: registry.active("interference"),
        lambda: registry.prune("interference", 0),
    ):
        with pytest.raises(DamagedChoices, match=r"active\.json.*delete it, or activate a version anew"):
            use()
    for kind in KINDS:
        assert registry.serving(kind) is None
    for version in (name, None):  # nothing in it was heeded, so either choice may begin it anew
        (registry.root / "active.json").write_text(content)
        aside = registry.activate("interference", version)
        assert aside is not None
        assert aside.read_text() == content
        assert registry.active("interference") == registry.serving("interference") == version
        assert registry.activate("interference", version) is None


def test_a_file_of_choices_that_cannot_be_read_is_left_alone(registry: Registry) -> None:
    (registry.root / "active.json").mkdir(parents=True)
    with pytest.raises(ModelFileError, match=r"active\.json: cannot be read"):
        registry.activate("interference", None)


def test_what_serves_is_what_is_sound(with_shipped: Registry) -> None:
    name = with_shipped.add("interference", card(1), models)
    with_shipped.activate("interference", name)
    assert with_shipped.serving("interference") == name
    damage(with_shipped.folder("interference", name) / "interference.json")
    assert (with_shipped.active("interference"), with_shipped.serving("interference")) == (name, SHIPPED)
    assert with_shipped.serving("demand") is None


@pytest.mark.parametrize(
    "other",
    [
        {"metrics": {"MAE": float("nan")}},
        {"options": {"x": float("inf")}},
        {"options": {"x": object()}},
        {"data": ()},
        {"made_at": "2026-01-02"},
        {"protocol": ""},
    ],
)
def test_a_card_that_could_not_be_read_back_is_not_written(registry: Registry, other: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError):
        registry.add("interference", card(**other), models)
    assert list((registry.root / "interference").iterdir()) == []


@pytest.mark.parametrize("files", [lambda _: None, lambda f: (f / "sub").mkdir(), lambda f: (f / "card.json").touch()])
def test_a_version_needs_files(registry: Registry, files: Callable[[Path], None]) -> None:
    with pytest.raises(ModelFileError, match="one or more files"):
        registry.add("interference", card(), files)
    assert registry.versions("interference") == []


def test_a_writer_that_fails_leaves_nothing(registry: Registry) -> None:
    def full(folder: Path) -> None:
        (folder / "interference.json").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        registry.add("interference", card(), full)
    assert list((registry.root / "interference").iterdir()) == []


def test_what_a_killed_writer_left_is_no_version_and_goes(registry: Registry) -> None:
    registry.add("interference", card(), models)
    for name, age in ((".part-old", 7200.0), (".part-new", 0.0)):
        folder = registry.root / "interference" / name
        folder.mkdir()
        (folder / "interference.json").write_text("half")
        now = folder.stat().st_mtime
        os.utime(folder, (now - age, now - age))
    assert len(registry.versions("interference")) == 1
    registry.add("interference", card(1), models)
    assert sorted(p.name for p in (registry.root / "interference").glob(".part-*")) == [".part-new"]
    assert len(registry.versions("interference")) == 2


def test_pruning_keeps_the_newest_and_the_active(with_shipped: Registry) -> None:
    names = [with_shipped.add("interference", card(second), models) for second in range(5)]
    with_shipped.activate("interference", names[1])
    assert with_shipped.prune("interference", 2) == [names[0], names[2]]
    assert [each.version for each in with_shipped.versions("interference")] == [SHIPPED, names[1], names[3], names[4]]
    assert with_shipped.prune("interference", 0) == [names[3], names[4]]
    assert with_shipped.prune("demand", 0) == []
    assert with_shipped.active("interference") == names[1]
    with pytest.raises(ValueError, match="keep: -1"):
        with_shipped.prune("interference", -1)


def test_versions_of_one_second_are_ordered_by_their_cards(registry: Registry) -> None:
    moments = [f"2026-01-02T03:04:05.{micro:06d}+00:00" for micro in (500, 20, 900000, 3, 0)]
    for moment in moments:
        registry.add("interference", card(made_at=moment), text)
    assert [each.made_at for each in registry.versions("interference")] == sorted(moments)


def test_licences_that_restrict() -> None:
    for licence, restricted in (
        ("Apache-2.0", False),
        ("S-Lab License 1.0: non-commercial", True),
        ("for noncommercial use", True),
        ("research use only", True),
        ("none stated: measure only", True),
        ("CC-BY 4.0", False),
    ):
        assert card(data=(SOURCE, replace(SOURCE, licence=licence))).restricted is restricted


def test_many_processes_add_the_same_and_others(registry: Registry) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.starmap(add_several, [(str(registry.root), number) for number in range(4)])
    assert len(registry.versions("interference")) == 10
    assert registry.broken("interference") == []
    assert list((registry.root / "interference").glob(".part-*")) == []


def test_choices_of_several_kinds_do_not_lose_each_other(registry: Registry) -> None:
    names = [registry.add("coldstart", card(second, kind="coldstart"), classes) for second in range(2)]
    other = registry.add("interference", card(), models)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        done = pool.apply_async(choose_often, (str(registry.root), names))
        while not done.ready():
            registry.activate("interference", other)
            assert registry.active("interference") == other
            registry.activate("interference", None)
        done.get()
    assert registry.active("coldstart") == names[1]


def test_what_ships_is_sound() -> None:
    registry = Registry(Path("/nonexistent"))
    for kind in KINDS:
        assert registry.broken(kind) == []
        for each in registry.versions(kind):
            assert each.version == SHIPPED
            assert not each.restricted


def test_a_shipped_model_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "interference"
    write_shipped(folder, card(), models)
    (folder / "stray.txt").touch()
    write_shipped(folder, card(7), text)
    assert sorted(path.name for path in folder.iterdir()) == ["card.json", "interference.json"]
    found = read_card(folder, "interference", SHIPPED, FEATURES["interference"])
    assert found.made_at.endswith(":07+00:00")
    assert found.files["interference.json"] == hashlib.sha256(b"{}").hexdigest()
