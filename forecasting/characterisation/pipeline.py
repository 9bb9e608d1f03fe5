"""The characterisation from end to end: single runs and pairs in, all its numbers out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from cotenant.forecasting.characterisation import clusters, packing, prediction, selection, synthesis
from cotenant.forecasting.characterisation.coldstart import ColdStartClasses
from cotenant.forecasting.characterisation.findings import findings
from cotenant.forecasting.characterisation.tables import MEMORY, TARGETS, UTIL, Pairs, Runs

Array = npt.NDArray[np.float64]
Published = Mapping[str, Mapping[str, tuple[Array, Array]]]

FORMAT = 1
SCALING = "standard"
THRESHOLDS = (50.0, 60.0, 70.0, 80.0, 90.0)
QUICK_SEEDS, SEEDS = 5, 10


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is characterised.

    Attributes:
        runs: The single runs.
        pairs: Measured pairs, or None.
        locate: Name of a task of the pairs → (architecture, batch size) of a run, or None when it is none of them.
        published: Target → architecture → (batch sizes, values): synthetic values of somebody else, to be compared.
        classes: Cold-start classes fitted on the runs, or None.
    """

    runs: Runs
    pairs: Pairs | None = None
    locate: Callable[[str], tuple[str, float] | None] = lambda _: None
    published: Published = field(default_factory=dict)
    classes: ColdStartClasses | None = None


def characterise(inputs: Inputs, k: int = 3, quick: bool = False) -> dict[str, Any]:
    """Characterise workloads.

    Args:
        inputs: The data.
        k: Number of clusters that pairs are compared by, besides the clusters that came with them.
        quick: Fewer seeds, and only the quickest predictors.

    Returns:
        All numbers, ready for JSON: sections data, selection, synthesis, clusters, interference, prediction, cold_start
        and findings. A section that the data cannot fill is a string that says why.
    """
    seeds = QUICK_SEEDS if quick else SEEDS
    report: dict[str, Any] = {"format": FORMAT, "data": _data(inputs)}
    report["selection"] = {target: _or_why(_selected, inputs.runs, target) for target in TARGETS}
    report["synthesis"] = {target: _or_why(_synthesised, inputs, target) for target in TARGETS}
    report["clusters"] = _or_why(_clustered, inputs, k, seeds)
    report["interference"] = _or_why(_interfered, inputs, k)
    report["prediction"] = _or_why(_predicted, inputs.runs, quick)
    report["cold_start"] = inputs.classes.as_dict() if inputs.classes is not None else "no classes were fitted"
    report["findings"] = [asdict(finding) for finding in findings(report)]
    return report


def _or_why(section: Callable[..., Any], *arguments: object) -> Any:
    """Return a section, or the sentence why the data cannot fill it: pairs may be had without curves, and so on."""
    try:
        return section(*arguments)
    except ValueError as error:
        return str(error)


def _data(inputs: Inputs) -> dict[str, Any]:
    table = inputs.runs.table
    columns = ["run", "family", "architecture", "kind", "batch", *TARGETS]
    return {
        "source": inputs.runs.source,
        "runs": len(table),
        "families": int(table["family"].nunique()),
        "features": len(inputs.runs.features),
        "pairs": 0 if inputs.pairs is None else len(inputs.pairs.table),
        "rows": table[columns].to_dict(orient="records"),
    }


def _selected(runs: Runs, target: str) -> dict[str, Any]:
    names = list(runs.features)
    scores = selection.rank_features(runs.table, target, names, runs.table["family"].tolist())
    return {
        "features": [asdict(score) | {"role": runs.features[score.name]} for score in scores],
        "identities": [list(pair) for pair in selection.identities(runs.table, target, names)],
    }


def _synthesised(inputs: Inputs, target: str) -> dict[str, Any]:
    curves = synthesis.curves_of(inputs.runs.table, target)
    scores = []
    for abscissa in synthesis.ABSCISSAS:
        for method in synthesis.METHODS:
            points = synthesis.hold_out(curves, method, abscissa)
            scores.append(
                {
                    "method": method,
                    "abscissa": abscissa,
                    "interior": asdict(synthesis.errors_of(points[points["interior"]])),
                    "extrapolated": asdict(synthesis.errors_of(points[~points["interior"]])),
                    "self_consistency": asdict(synthesis.round_trip(curves, method, abscissa)),
                }
            )
    method, abscissa = synthesis.best_combination(curves)
    audit = synthesis.audit(curves, inputs.published.get(target, {}))
    drawn = [_drawn(curve, method, abscissa) for curve in curves if len(curve.batch) > synthesis.MIN_POINTS]
    return {
        "scores": scores,
        "best": {"method": method, "abscissa": abscissa},
        "chosen_on_other_families": asdict(synthesis.errors_of(synthesis.chosen_elsewhere(curves))),
        "published": audit.head(4).to_dict(orient="records"),
        "curves": drawn,
    }


def _drawn(curve: synthesis.Curve, method: str, abscissa: str) -> dict[str, Any]:
    at = np.geomspace(curve.batch[0], curve.batch[-1], 60)
    made = synthesis.interpolated(curve.batch, curve.value, at, method, abscissa)
    points = {"batch": curve.batch.tolist(), "value": curve.value.tolist()}
    return {"name": curve.name, **points, "drawn_batch": at.tolist(), "drawn_value": made.tolist()}


def _clustered(inputs: Inputs, k: int, seeds: int) -> dict[str, Any]:
    points = inputs.runs.table[list(TARGETS)].to_numpy(dtype=float)
    sweeps = {how: clusters.sweep(clusters.scaled(points, how), seeds=seeds) for how in clusters.SCALINGS}
    labels = clusters.clustered(clusters.scaled(points, SCALING), k)
    found: dict[str, Any] = {
        "k": k,
        "labels": labels.tolist(),
        "summary": clusters.summary(labels, {UTIL: points[:, 0], MEMORY: points[:, 1]}),
        "sweeps": {how: _swept(counts) for how, counts in sweeps.items()},
        "scaling_agreement": {
            how: clusters.agreement(labels, clusters.clustered(clusters.scaled(points, how), k))
            for how in clusters.SCALINGS
        },
    }
    synthetic = _synthetic_points(inputs)
    if len(synthetic):
        both = np.concatenate([points, synthetic])
        counts = clusters.sweep(clusters.scaled(both, SCALING), seeds=seeds)
        found["sweeps"]["with synthetic rows"] = _swept(counts)
        again = clusters.clustered(clusters.scaled(both, SCALING), k)[: len(points)]
        found["agreement_with_synthetic"] = clusters.agreement(labels, again)
    return found


def _swept(counts: tuple[clusters.ClusterCount, ...]) -> dict[str, Any]:
    return {
        "counts": [asdict(count) for count in counts],
        "elbow_inertia": clusters.elbow([count.inertia for count in counts]),
        "elbow_distortion": clusters.elbow([count.distortion for count in counts]),
        "by_silhouette": clusters.by_silhouette(counts),
        "by_gap": clusters.by_gap(counts),
    }


def _synthetic_points(inputs: Inputs) -> Array:
    """Return synthetic (util, memory) rows, made by each target's best interpolation; none without curves."""
    choice = {}
    for target in TARGETS:
        curves = synthesis.curves_of(inputs.runs.table, target)
        if all(len(curve.batch) <= synthesis.MIN_POINTS for curve in curves):
            return np.empty((0, len(TARGETS)))
        choice[target] = synthesis.best_combination(curves)
    return synthesis.synthesise(inputs.runs.table, choice)[list(TARGETS)].to_numpy(dtype=float)


def _interfered(inputs: Inputs, k: int) -> dict[str, Any]:
    if inputs.pairs is None or inputs.pairs.table.empty:
        raise ValueError("there are no measured pairs")
    seconds = "solo_a_s" in inputs.pairs.table
    pairs = packing.measured(inputs.pairs.table) if seconds else packing.from_rates(inputs.pairs.table)
    places = _located(inputs, pairs)
    labels = {"own": _own_labels(inputs, places, k)}
    if {"cluster_a", "cluster_b"} <= set(pairs.columns):
        given = dict(zip(pairs["a"], pairs["cluster_a"], strict=True))
        labels["given"] = given | dict(zip(pairs["b"], pairs["cluster_b"], strict=True))
    util = {task: place[0] for task, place in places.items()}
    directed = packing.directions(pairs, util)
    columns = ["a", "b", "slowdown_a", "slowdown_b", "n_a", "n_b", "bound", *packing.MEASURES]
    found: dict[str, Any] = {
        "in_seconds": seconds,
        "pairs": pairs[columns].to_dict(orient="records"),
        "contradictions": packing.contradictions(pairs)[["a", "b"]].to_dict(orient="records"),
        "tasks": {task: {UTIL: place[0], MEMORY: place[1]} for task, place in places.items()},
        "by": {name: _compared(pairs, its) for name, its in labels.items()},
        "below": packing.threshold_table(directed, THRESHOLDS),
        "directed": directed.to_dict(orient="records"),
    }
    if "given" in labels and (common := [task for task in labels["own"] if task in labels["given"]]):
        found["label_agreement"] = clusters.agreement(
            [labels["own"][task] for task in common], [labels["given"][task] for task in common]
        )
    if not inputs.pairs.directed.empty:
        found["second_matrix"] = packing.threshold_table(inputs.pairs.directed, THRESHOLDS)
        found["second_directed"] = inputs.pairs.directed.to_dict(orient="records")
    return found


def _located(inputs: Inputs, pairs: pd.DataFrame) -> dict[Hashable, tuple[float, float]]:
    """Return task → (utilisation, memory) alone: as measured, or interpolated between measured batch sizes."""
    measured = inputs.runs.table.groupby("run")[list(TARGETS)].mean()
    curves = {t: {c.name: c for c in synthesis.curves_of(inputs.runs.table, t)} for t in TARGETS}
    found: dict[Hashable, tuple[float, float]] = {}
    for task in sorted({*pairs["a"], *pairs["b"]}):
        if task in measured.index:
            found[task] = (float(measured.loc[task, UTIL]), float(measured.loc[task, MEMORY]))
        elif (place := inputs.locate(task)) is not None:
            values = [_at(curves[target][place[0]], place[1]) for target in TARGETS]
            if all(value is not None for value in values):
                found[task] = (float(values[0] or 0.0), float(values[1] or 0.0))
    return found


def _at(curve: synthesis.Curve, batch: float) -> float | None:
    """Return the curve's value, linear over log2 of the batch size; None beyond its ends."""
    if not curve.batch[0] <= batch <= curve.batch[-1]:
        return None
    return float(np.interp(np.log2(batch), np.log2(curve.batch), curve.value))


def _own_labels(inputs: Inputs, places: Mapping[Hashable, tuple[float, float]], k: int) -> dict[Hashable, int]:
    """Return the nearest of the runs' k clusters for every located task."""
    points = inputs.runs.table[list(TARGETS)].to_numpy(dtype=float)
    labels = clusters.clustered(clusters.scaled(points, SCALING), k)
    centres = np.array([points[labels == label].mean(axis=0) for label in range(k)]) / points.std(axis=0)
    return {
        task: int(np.argmin(np.linalg.norm(centres - np.array(place) / points.std(axis=0), axis=1)))
        for task, place in places.items()
    }


def _compared(pairs: pd.DataFrame, labels: Mapping[Hashable, int]) -> dict[str, Any] | str:
    known = pairs[pairs["a"].isin(list(labels)) & pairs["b"].isin(list(labels))]
    try:
        contrasts = {measure: asdict(packing.contrast(known, labels, measure)) for measure in packing.MEASURES}
        bound = asdict(packing.contrast(known, labels, "bound"))
    except ValueError as error:
        return str(error)
    return {
        "labels": {str(task): int(label) for task, label in labels.items()},
        "contrast": contrasts | {"bound": bound},
        "cluster_pairs": packing.by_cluster_pair(known, labels),
    }


def _predicted(runs: Runs, quick: bool) -> dict[str, Any]:
    sets = prediction.feature_sets(runs)
    models = ("ridge", "5 nearest") if quick else tuple(prediction.MODELS)
    return {
        target: [asdict(score) for score in prediction.leave_family_out(runs, target, sets, models)]
        for target in TARGETS
    }
