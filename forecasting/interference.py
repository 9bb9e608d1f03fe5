"""The first interference predictor: the sum of utilisations."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.forecasting.types import DemandProfile, ThroughputPrediction


class UtilisationRule:
    """Predicts n from the sum of the members' solo utilisations (see ``InterferencePredictor``)."""

    name = "utilisation-rule"

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[ThroughputPrediction]:
        """Return one prediction per member, in order. Pure: same input, same output."""
        total = sum(member.util_mean for member in members)
        n = 1.0 / max(1.0, total)
        return [ThroughputPrediction(n, n, n, f"sum of utilisations {total:.2f}") for _ in members]
