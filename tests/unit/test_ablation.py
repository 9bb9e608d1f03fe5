"""What the ablation leaves out is there to be left out."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_variant_finds_what_it_switches_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for variant in importlib.import_module("ablation").VARIANTS:
        with variant.patched():
            pass
