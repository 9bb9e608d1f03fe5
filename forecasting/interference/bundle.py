"""Fitted models together with where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cotenant.forecasting.interference.learned import LearnedInterference
from cotenant.forecasting.interference.model import PairModel
from cotenant.forecasting.interference.observations import Observation


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Where a set of models comes from and how good it is.

    Attributes:
        source: What was measured, in words.
        licence: Licence of the training data.
        data_fingerprint: SHA-256 of the training data.
        metrics: By name, for example ``"cpu-slice: leave-family-out MAE"``.
    """

    source: str
    licence: str
    data_fingerprint: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class InterferenceModels:
    """Everything a predictor needs.

    Attributes:
        models: One model per GPU type.
        pooled: One model over all types, for types without one.
        card: Their origin.
    """

    models: Mapping[str, PairModel]
    pooled: PairModel | None
    card: ModelCard

    def predictor(self, evidence: Sequence[Observation] = ()) -> LearnedInterference:
        """A predictor from these models and what was measured on this cluster."""
        return LearnedInterference(self.models, self.pooled, evidence)
