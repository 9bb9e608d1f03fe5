"""Made-up models for a registry. It imports little, for processes that are started only to use the registry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from cotenant.forecasting.datasets.registry import FEATURES, Card, DataSource, Kind, Registry

SOURCE = DataSource("made up", "Apache-2.0", "0" * 64, 40)


def card(second: int = 0, kind: Kind = "interference", **other: Any) -> Card:
    """The card of a made-up model; keywords are fields of ``Card``."""
    made = Card(
        kind=kind,
        version="",
        made_at=f"2026-01-02T03:04:{second:02d}+00:00",
        program="0.1.0",
        features_version=FEATURES[kind],
        data=(SOURCE,),
        metrics={"MAE": 0.05},
        baselines={"constant": 0.2},
        protocol="leave one family out",
        options={"mode": "timeslice"},
    )
    return replace(made, **other)


def text(folder: Path) -> None:
    """Write a model that is only a file."""
    (folder / "interference.json").write_text("{}")


def add_several(root: str, number: int) -> None:
    """Add five versions of one kind, two of each content over all processes, and tidy beside it."""
    registry = Registry(Path(root))
    for second in range(5):
        name = registry.add("interference", card(second, seed=number % 2), text)
        registry.prune("demand", 0)
        assert name


def choose_often(root: str, names: list[str]) -> None:
    """Choose each of these versions ten times."""
    registry = Registry(Path(root), Path(root) / "none")
    for _ in range(10):
        for name in names:
            registry.activate("coldstart", name)
