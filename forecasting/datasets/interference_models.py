"""Interference models on disk: one JSON file, no pickle, with a version, a checksum and the data's origin."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.forecasting.datasets.model_card import ModelFileError
from cotenant.forecasting.interference.bundle import InterferenceModels, ModelCard
from cotenant.forecasting.interference.intervals import SITUATIONS, Band
from cotenant.forecasting.interference.kernel import MIXES, Scales
from cotenant.forecasting.interference.model import PairModel, Scaling
from cotenant.forecasting.interference.observations import FEATURES, SCHEMA_VERSION
from cotenant.forecasting.interference.physics import PARAMS, Physics
from cotenant.forecasting.interference.table import Floats, Ints, Jobs, PairTable

FORMAT = "cotenant-interference"
VERSION = 2  # the kernel is part of what a file means: 2 has the contest of jobs, and features one by one
_WIDEST = 1e6  # of any number of a band: they are factors of throughputs, which are at most 1


def save_models(path: Path, bundle: InterferenceModels) -> None:
    """Write the models to ``path`` as JSON; an existing file is replaced at once or not at all."""
    body = {
        "card": asdict(bundle.card),
        "models": {gpu_type: _packed(model) for gpu_type, model in bundle.models.items()},
        "pooled": None if bundle.pooled is None else _packed(bundle.pooled),
    }
    text = json.dumps(
        {"format": FORMAT, "version": VERSION, "features_version": SCHEMA_VERSION, "sha256": _digest(body), **body},
        allow_nan=False,
    )
    half = path.with_name(path.name + ".part")
    half.write_text(text + "\n", encoding="utf-8")
    half.replace(path)


def load_models(path: Path) -> InterferenceModels:
    """Read models from ``path``.

    Raises:
        ModelFileError: The file is missing, damaged, of another version or holds impossible values.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: cannot be read as a model file: {error}") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ModelFileError(f"{path}: not a model file of this kind; its format must be {FORMAT!r}")
    for field, mine in (("version", VERSION), ("features_version", SCHEMA_VERSION)):
        if raw.get(field) != mine:
            raise ModelFileError(
                f"{path}: {field} {raw.get(field)!r} is not accepted; this program reads {mine}: fit again"
            )
    body: dict[str, Any] = {key: raw.get(key) for key in ("card", "models", "pooled")}
    if raw.get("sha256") != _digest(body):
        raise ModelFileError(f"{path}: damaged: the checksum does not match its content")
    try:
        models = {str(gpu_type): _unpacked(each) for gpu_type, each in body["models"].items()}
        pooled = None if body["pooled"] is None else _unpacked(body["pooled"])
        return InterferenceModels(models, pooled, ModelCard(**body["card"]))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, ArithmeticError) as error:
        raise ModelFileError(f"{path}: holds impossible values: {type(error).__name__}: {error}") from error


def _packed(model: PairModel) -> dict[str, Any]:
    table = model.table
    return {
        "names": list(table.names),
        "ids": list(table.jobs.ids),
        "families": list(table.jobs.families),
        "features": table.jobs.features.tolist(),
        "focal": table.focal.tolist(),
        "other": table.other.tolist(),
        "throughput": table.throughput.tolist(),
        "noise": table.noise.tolist(),
        "scaling": {name: getattr(model.scaling, name).tolist() for name in _SCALING},
        "physics": {"kind": model.physics.kind, "params": list(model.physics.params)},
        "mix": model.mix,
        "logit": model.logit,
        "unit": model.unit,
        "trust": model.trust.tolist(),
        "bands": [asdict(band) for band in model.bands],
        "scales": asdict(model.scales),
    }


_SCALING = ("centre", "spread", "intercept", "slope")


def _unpacked(raw: Mapping[str, Any]) -> PairModel:
    names = tuple(raw["names"])
    _check(set(names) <= set(FEATURES), "names", names, f"features among {FEATURES}")
    jobs = Jobs(tuple(raw["ids"]), tuple(raw["families"]), _floats(raw, "features", len(raw["ids"]), len(names)))
    rows = len(raw["focal"])
    table = PairTable(
        names,
        jobs,
        _positions(raw, "focal"),
        _positions(raw, "other"),
        _floats(raw, "throughput", rows),
        _floats(raw, "noise", rows),
    )
    scaling = Scaling(*(_floats(raw["scaling"], name, len(names)) for name in _SCALING))
    _check(bool(np.all(scaling.spread > 0.0)), "spread", scaling.spread, "numbers above 0")
    kind, params = raw["physics"]["kind"], tuple(float(value) for value in raw["physics"]["params"])
    _check(kind in PARAMS and len(params) == PARAMS[kind], "physics", (kind, params), f"one of {dict(PARAMS)}")
    _check(all(0.0 < value < math.inf for value in params), "physics", params, "finite numbers above 0")
    _check(raw["mix"] in MIXES, "mix", raw["mix"], f"one of {', '.join(MIXES)}")
    unit = float(raw["unit"])
    _check(0.0 < unit < math.inf, "unit", unit, "a finite number above 0")
    trust = _floats(raw, "trust", rows)
    _check(bool(np.all(trust > 0.0)), "trust", trust, "numbers above 0")
    bands = tuple(Band(**{key: float(value) for key, value in each.items()}) for each in raw["bands"])
    _check(len(bands) == len(SITUATIONS), "bands", len(bands), f"{len(SITUATIONS)} of them")
    widths = [value for band in bands for value in astuple(band)]
    _check(all(0.0 <= value <= _WIDEST for value in widths), "bands", raw["bands"], f"numbers from 0 to {_WIDEST:g}")
    _check(isinstance(raw["logit"], bool), "logit", raw["logit"], "true or false")
    physics, mix, logit = Physics(kind, params), str(raw["mix"]), bool(raw["logit"])
    scales = Scales(**raw.get("scales", {}))  # none in a file written before they could be chosen: the usual ones
    return PairModel(table, scaling, physics, mix, logit, unit, trust, bands, scales=scales)


def _floats(raw: Mapping[str, Any], field: str, *shape: int) -> Floats:
    values = np.array(raw[field], dtype=np.float64).reshape(shape)
    _check(bool(np.all(np.isfinite(values))), field, raw[field], "finite numbers")
    return values


def _positions(raw: Mapping[str, Any], field: str) -> Ints:
    values = np.array(raw[field]).reshape(-1)
    _check(values.dtype.kind == "i" or not len(values), field, raw[field], "whole numbers")
    return values.astype(np.intp)


def _check(holds: bool, field: str, value: object, accepted: str) -> None:
    if not holds:
        raise ValueError(f"{field}: {value!r:.120} is not accepted; give {accepted}")


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


__all__ = ["FORMAT", "VERSION", "ModelFileError", "load_models", "save_models"]
