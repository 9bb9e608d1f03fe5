"""Interference predictors for the shipped core in a simulation: what it may know of how jobs get along."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.types import DemandProfile, ThroughputPrediction
from cotenant.scheduler.simulation.truth import Truth

ERROR = 0.07  # half-width of the band around a tabled value: the mean error of leave-one-family-out predictions


class TablePredictor:
    """Answers from a table of pairs, found by the members' fingerprints; the utilisation rule where it has none.

    With the truth as its table it is an oracle; with predictions made without a job's family it is what a scheduler may
    know before it has seen the pair.

    Args:
        table: Answers for a set of workloads.
        error: Half-width of the interval around its answers; 0 for an oracle.
    """

    def __init__(self, table: Truth, error: float = ERROR) -> None:
        self.name = "table-of-pairs"
        self._table, self._error = table, error
        self._rule = UtilisationRule()

    def predict(self, members: Sequence[DemandProfile], gpu_type: str) -> Sequence[ThroughputPrediction]:
        """See ``InterferencePredictor.predict``."""
        if not members:
            return []
        if len(members) == 1:
            return self._rule.predict(members, gpu_type)
        try:
            together = self._table.together(tuple(member.fingerprint for member in members), gpu_type)
        except KeyError:
            return self._rule.predict(members, gpu_type)
        return [
            ThroughputPrediction(max(0.01, n - self._error), n, min(1.0, n + self._error), "from the table of pairs")
            for n in together
        ]
