"""Can the targets be predicted for a family that was never measured? Leave-one-family-out, several feature sets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.ensemble import ExtraTreesRegressor, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import RidgeCV
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cotenant.forecasting.characterisation.tables import Runs

Array = npt.NDArray[np.float64]

MODELS: Mapping[str, Callable[[int], object]] = {
    "ridge": lambda _: make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 13))),
    "5 nearest": lambda _: make_pipeline(StandardScaler(), KNeighborsRegressor(5, weights="distance")),
    "Gaussian process": lambda seed: make_pipeline(
        StandardScaler(),
        GaussianProcessRegressor(
            ConstantKernel(1.0) * RBF(2.0) + WhiteKernel(0.1), normalize_y=True, random_state=seed
        ),
    ),
    "random forest": lambda seed: RandomForestRegressor(100, min_samples_leaf=2, random_state=seed),
    "extra trees": lambda seed: ExtraTreesRegressor(100, min_samples_leaf=2, random_state=seed),
}


@dataclass(frozen=True, slots=True)
class Score:
    """Error of one model with one feature set on families it had not seen, in percentage points.

    Attributes:
        features: Name of the feature set.
        model: The model; "mean" predicts the training mean.
        mae: Mean absolute error over runs.
        rmse: Root mean square error over runs.
        family_mae: Mean over families of their mean absolute error: every family weighs the same.
        by_family: Family → its mean absolute error.
    """

    features: str
    model: str
    mae: float
    rmse: float
    family_mae: float
    by_family: Mapping[str, float]


def feature_sets(runs: Runs) -> dict[str, Array]:
    """Return feature set → matrix, shape (runs, features): known before the run, with parameters, and measured ones.

    Batch size, epochs and parameters as log2. Sets whose features are missing or constant are left out.
    """
    before = [name for name, role in runs.features.items() if role == "before" and name != "parameters"]
    known = _logs(runs.table, before)
    sets = {"before the run": known}
    if "parameters" in runs.features:
        both = pd.concat([_logs(runs.table, ["batch"]), _logs(runs.table, ["parameters"])], axis=1)
        sets["batch and parameters"] = both
    for role, name in (("host", "host counters"), ("gpu", "other GPU counters")):
        columns = [feature for feature, its in runs.features.items() if its == role]
        sets[name] = runs.table[columns]
    return {
        name: kept.to_numpy(dtype=float)
        for name, matrix in sets.items()
        if len((kept := matrix.loc[:, matrix.nunique() > 1]).columns) and not kept.isna().to_numpy().any()
    }


def leave_family_out(
    runs: Runs, target: str, sets: Mapping[str, Array], models: Sequence[str] = tuple(MODELS), seed: int = 0
) -> tuple[Score, ...]:
    """Predict every family from the others.

    Args:
        runs: The runs.
        target: The target's column, percent.
        sets: Feature set → matrix, shape (runs, features), without missing values.
        models: Names in ``MODELS``.
        seed: Of the models that draw.

    Raises:
        ValueError: There are fewer than three families, so nothing can be left out.
    """
    families = runs.table["family"].to_numpy()
    if len(np.unique(families)) < 3:
        raise ValueError(f"there are {len(np.unique(families))} families; at least 3 are needed to leave one out")
    actual = runs.table[target].to_numpy(dtype=float)
    scores = [_score("none", "mean", actual, _means(actual, families), families)]
    for name, matrix in sets.items():
        for model in models:
            predicted = np.empty_like(actual)
            for held in _folds(families):
                fitted = _fit(model, seed, matrix[~held], actual[~held])
                predicted[held] = np.clip(fitted(matrix[held]), 0.0, 100.0)
            scores.append(_score(name, model, actual, predicted, families))
    return tuple(scores)


def _fit(model: str, seed: int, features: Array, values: Array) -> Callable[[Array], Array]:
    estimator: object = MODELS[model](seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a kernel width at its bound is an answer, too
        fitted = estimator.fit(features, values)  # type: ignore[attr-defined]
    return lambda rows: np.asarray(fitted.predict(rows), dtype=float)


def _folds(families: npt.NDArray[np.object_]) -> Iterator[npt.NDArray[np.bool_]]:
    for family in dict.fromkeys(families):
        yield families == family


def _means(actual: Array, families: npt.NDArray[np.object_]) -> Array:
    predicted = np.empty_like(actual)
    for held in _folds(families):
        predicted[held] = actual[~held].mean()
    return predicted


def _score(features: str, model: str, actual: Array, predicted: Array, families: npt.NDArray[np.object_]) -> Score:
    gaps = np.abs(predicted - actual)
    by_family = {str(families[held][0]): float(gaps[held].mean()) for held in _folds(families)}
    rmse = float(np.sqrt(np.mean(gaps**2)))
    return Score(features, model, float(gaps.mean()), rmse, float(np.mean(list(by_family.values()))), by_family)


def _logs(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return columns as log2 where all known values are above 0 and span more than a factor of four."""
    kept = table[list(names)].astype(float)
    for name in names:
        values = kept[name].dropna()
        if len(values) and values.min() > 0 and values.max() > 4 * values.min():
            kept[name] = np.log2(kept[name])
    return kept
