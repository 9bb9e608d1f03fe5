"""Scores of trained models as they are, and whether the data they are scored on are those they were trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cotenant.forecasting.datasets.model_card import Card, DataSource
from cotenant.forecasting.datasets.registry import DemandExperts
from cotenant.forecasting.interference.bundle import InterferenceModels
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.training.demand_artefact import DemandArtefact, Kind
from cotenant.forecasting.training.demand_fit import Examples
from cotenant.forecasting.training.objectives import (
    CONSTANT,
    EWMA,
    DemandHoldOut,
    answers_to,
    judge_pairs,
    scored_pairs,
)
from cotenant.forecasting.training.scores import FoldScore


def frozen_interference(version: str, models: InterferenceModels, observations: Sequence[Observation]) -> FoldScore:
    """Score models on all measured pairs; there is no constant baseline, which would have to be learnt from them."""
    pairs = scored_pairs([each for each in observations if each.key is not None])
    score = judge_pairs(f"version {version}, as it is", pairs, answers_to(pairs, models.predictor()), ())
    baselines = {name: value for name, value in score.baselines.items() if name != CONSTANT}
    return FoldScore(score.group, score.rows, score.metrics, baselines)


def frozen_demand(version: str, quantity: str, experts: DemandExperts, hold: DemandHoldOut) -> FoldScore:
    """Score trained experts on all series; the average's gain would have to be learnt from them, so it is left out."""
    artefacts: Mapping[Kind, DemandArtefact] = {
        each.kind: each for each in (experts.util if quantity == "util" else experts.memory)
    }

    def ready(_examples: Examples) -> Mapping[Kind, DemandArtefact]:
        return artefacts

    score = hold.score(set(hold.groups), ready)
    baselines = {name: value for name, value in score.baselines.items() if not name.startswith(EWMA)}
    return FoldScore(f"version {version}, as it is", score.rows, score.metrics, baselines)


def known_data(card: Card, sources: Sequence[DataSource]) -> list[str]:
    """Return a warning for each of the sources that a model was trained on."""
    learnt = {each.fingerprint for each in card.data}
    return [
        f"{each.source}: version {card.version} was trained on these very data; its score on them says nothing about "
        "others"
        for each in sources
        if each.fingerprint in learnt
    ]


__all__ = ["frozen_demand", "frozen_interference", "known_data"]
