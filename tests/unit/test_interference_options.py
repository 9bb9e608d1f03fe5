"""What is chosen before an interference model is fitted: the model carries it, its file keeps it."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interference_tables import measured, profiles, world

from cotenant.forecasting.datasets.interference_models import ModelFileError, load_models, save_models
from cotenant.forecasting.interference.kernel import MIXES, Scales
from cotenant.forecasting.interference.model import PairModel
from cotenant.forecasting.interference.table import STEP, Jobs, PairTable
from cotenant.forecasting.training.interference import InterferenceOptions, fit_interference, fit_pairs

TABLE = world()


def mids(model: PairModel, table: PairTable = TABLE) -> np.ndarray:
    return model.predict(table.jobs, table.focal, table.other).mid


def seal(path: Path, raw: dict[str, Any]) -> None:
    """Write a changed model file with the checksum that fits."""
    body = {key: raw[key] for key in ("card", "models", "pooled")}
    raw["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(raw))


def test_the_defaults_are_what_was_fitted_with_before() -> None:
    assert np.array_equal(
        mids(fit_pairs(TABLE, "timeslice")), mids(fit_pairs(TABLE, "timeslice", InterferenceOptions()))
    )


@pytest.mark.parametrize("changed", [{"near": 0.4}, {"far": 5.0}, {"noise": 0.2}, {"tails": 50.0}])
def test_every_option_changes_what_is_predicted(changed: dict[str, float]) -> None:
    model = fit_pairs(TABLE, "timeslice", InterferenceOptions(**changed))
    assert not np.allclose(mids(model), mids(fit_pairs(TABLE, "timeslice")), atol=1e-6)


@pytest.mark.parametrize("mix", MIXES)
def test_a_mix_that_is_chosen_is_taken(mix: str) -> None:
    assert fit_pairs(TABLE, "timeslice", InterferenceOptions(mix=mix)).mix == mix


def test_the_pull_holds_the_shares_model_near_its_start() -> None:
    jobs = Jobs(TABLE.jobs.ids, TABLE.jobs.families, np.column_stack([TABLE.jobs.features, np.linspace(-3.0, 0.0, 12)]))
    table = PairTable((*TABLE.names, STEP), jobs, TABLE.focal, TABLE.other, TABLE.throughput)
    free, held = (fit_pairs(table, "mps", InterferenceOptions(prior_pull=pull)).physics for pull in (0.0, 100.0))
    assert held.params == pytest.approx((0.85, 1.07, 0.91, 0.05), rel=0.01)
    assert free.params != pytest.approx(held.params, rel=0.01)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"near": 0.0}, "near: 0.0 is not accepted"),
        ({"far": math.inf}, "far: inf is not accepted"),
        ({"noise": -1.0}, "noise: -1.0 is not accepted"),
        ({"tails": math.nan}, "tails: nan is not accepted"),
        ({"prior_pull": -0.1}, "prior_pull: -0.1 is not accepted"),
        ({"mix": "magic"}, "mix: 'magic' is not accepted; give one of effects of jobs"),
    ],
)
def test_absurd_options_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InterferenceOptions(**changed)


def test_a_model_file_keeps_the_scales(tmp_path: Path) -> None:
    models = fit_interference(measured(), "made up", "none", "timeslice", InterferenceOptions(near=0.5, noise=0.1))
    save_models(tmp_path / "m.json", models)
    again = load_models(tmp_path / "m.json")
    assert again.models["a"].scales == Scales(near=0.5, noise=0.1)
    pairs = [[a, b] for a in profiles()[:4] for b in profiles()[:4]]
    first, second = (each.predictor().predict_many(pairs, "a") for each in (models, again))
    assert np.allclose([p.mid for each in first for p in each], [p.mid for each in second for p in each])


@pytest.mark.parametrize("scales", [{"near": 0.0}, {"near": "wide"}, {"further": 3.0}, []])
def test_a_model_file_with_impossible_scales_is_refused(tmp_path: Path, scales: object) -> None:
    save_models(tmp_path / "m.json", fit_interference(measured(), "made up", "none", "timeslice"))
    raw = json.loads((tmp_path / "m.json").read_text())
    raw["pooled"]["scales"] = scales
    seal(tmp_path / "m.json", raw)
    with pytest.raises(ModelFileError, match="holds impossible values"):
        load_models(tmp_path / "m.json")


def test_a_model_file_without_scales_has_the_usual_ones(tmp_path: Path) -> None:
    save_models(tmp_path / "m.json", fit_interference(measured(), "made up", "none", "timeslice"))
    raw = json.loads((tmp_path / "m.json").read_text())
    for each in (*raw["models"].values(), raw["pooled"]):
        del each["scales"]
    seal(tmp_path / "m.json", raw)
    assert load_models(tmp_path / "m.json").models["a"].scales == Scales()
