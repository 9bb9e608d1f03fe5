"""From single runs to cold-start classes with a card: fitted on everything, judged on families they had not seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from cotenant.forecasting.characterisation.coldstart import ColdStartClasses
from cotenant.forecasting.characterisation.tables import UTIL
from cotenant.forecasting.datasets.model_card import Card
from cotenant.forecasting.datasets.registry import CLASSES_FILE, FEATURES
from cotenant.forecasting.datasets.run_sources import RunData
from cotenant.forecasting.datasets.schema import DataError
from cotenant.forecasting.training.coldstart import fit, unseen_family
from cotenant.forecasting.training.objectives import COVERAGE, MAE, WIDTH
from cotenant.forecasting.training.recipes import Origin, Progress, Trained, silent
from cotenant.forecasting.training.scores import FoldScore, combined

LEAST_FAMILIES = 4  # with three left, errors on left-out ones can still be found
RUNS_PER_CLASS = 6
MOST_CLASSES = 3


def train_coldstart(data: RunData, origin: Origin, *, seed: int = 0, progress: Progress = silent) -> Trained:
    """Fit cold-start classes on all runs, and judge the recipe by leaving each family out.

    Args:
        data: Single runs.
        origin: For the card.
        seed: Of K-means.
        progress: Told after every family and the fit.

    Raises:
        DataError: There are too few families or runs.
    """
    runs = data.runs
    families = sorted(set(runs.table["family"]))
    if len(families) < LEAST_FAMILIES:
        raise DataError(
            f"{runs.source}: {len(families)} families are too few; give at least {LEAST_FAMILIES}, or nobody can tell "
            "how far off a guess about another family is"
        )
    count = class_count(len(runs.table))
    folds = []
    for done, family in enumerate(families):
        progress("holding out every family", done, len(families))
        try:
            score = unseen_family(runs, family, count, seed)
        except ValueError as error:
            raise DataError(f"{runs.source}: without {family} too little is left: {error}") from error
        rest = runs.table.loc[runs.table["family"] != family, UTIL]
        held = runs.table.loc[runs.table["family"] == family, UTIL]
        metrics = {
            MAE: score.mae["util_p95"] / 100.0,
            COVERAGE: score.coverage["util_p95"],
            WIDTH: score.width["util_p95"] / 100.0,
            "memory MAE": score.mae["memory"] / 100.0,
            "memory within the reserve, coverage": score.reserved,
        }
        baselines = {
            "mean of the other families' runs": float((held - rest.mean()).abs().mean()) / 100.0,
            "a whole GPU": float((100.0 - held).mean()) / 100.0,
        }
        folds.append(FoldScore(family, score.runs, metrics, baselines))
    progress("holding out every family", len(families), len(families))
    model = replace(fit(runs, count, seed), trained_on=f"{data.source.source} ({data.source.licence})")
    whole = combined(folds)
    card = Card(
        kind="coldstart",
        version="",
        made_at=origin.made_at,
        program=origin.program,
        features_version=FEATURES["coldstart"],
        data=(data.source,),
        metrics=whole.metrics,
        baselines=whole.baselines,
        protocol=f"leave one family out ({len(folds)} of them); errors of the 95th percentile of the utilisation and, "
        "where it says so, of the memory, fractions of the device",
        seed=seed,
        options={"classes": count, "gpu_types": list(model.gpu_types), "tested": dict(model.tested)},
    )
    return Trained(card, lambda folder: write_classes(model, folder), tuple(folds))


def class_count(runs: int) -> int:
    """Return how many classes so many runs can carry."""
    return max(1, min(MOST_CLASSES, runs // RUNS_PER_CLASS))


def write_classes(model: ColdStartClasses, folder: Path) -> None:
    """Write the classes as the registry reads them."""
    text = json.dumps(model.as_dict(), indent=1, ensure_ascii=False, allow_nan=False)
    (folder / CLASSES_FILE).write_text(text + "\n", encoding="utf-8")


__all__ = ["LEAST_FAMILIES", "class_count", "train_coldstart", "write_classes"]
