"""Which demand forecaster serves in the PRM: the one of the active model, watched, and swapped without a gap."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.actors.models import ModelShelf
from cotenant.configs.settings import PredictionSettings
from cotenant.forecasting.demand import EwQuantileForecaster, MixtureForecaster
from cotenant.forecasting.demand.guarded import GuardedForecaster
from cotenant.forecasting.demand.hostside import Foreseen
from cotenant.forecasting.types import DemandProfile, Signature

UNTRAINED = "mixture, no trained experts"
FIRST = "weighted history"


class _First(EwQuantileForecaster):
    """The first forecaster in the place of the mixture: it knows nothing but windows."""

    def prime(self, job_id: str, profile: DemandProfile) -> None:
        """See ``BatchForecaster``."""

    def observe_batch(self, signatures: Sequence[Signature], foreseen: Foreseen | None = None) -> None:
        """See ``BatchForecaster``."""
        super().observe_batch(signatures)


class ServingForecaster(GuardedForecaster):
    """The forecaster that the settings and the registry ask for. Not thread-safe.

    Args:
        settings: What is to predict.
        shelf: Where trained experts are.
    """

    def __init__(self, settings: PredictionSettings, shelf: ModelShelf) -> None:
        self._shelf = shelf
        self._mixture = settings.demand == "mixture"
        self._version: str | None = None
        self.serving = UNTRAINED if self._mixture else FIRST
        self.warnings: tuple[str, ...] = ()
        super().__init__(MixtureForecaster if self._mixture else _First)
        self.follow()

    def serves(self, job_id: str) -> str:
        """Say what forecasts a job now: it may not be what is to serve, see ``note``."""
        if self._primary is None or job_id in self._fallen:
            return f"{FIRST}, in the place of: {self.serving}"
        return f"{self.serving}; it is still learning, the one before it forecasts" if self._coming else self.serving

    def follow(self) -> None:
        """Have the experts serve that are active in the registry, from the moment they have seen enough."""
        if not self._mixture:
            return
        wanted = self._shelf.wanted()
        version = wanted.get("demand")
        if version == self._version:
            return
        self._version = version
        experts, self.warnings = self._shelf.demand(wanted)
        if experts is None:
            self.serving = UNTRAINED
            self.swap(MixtureForecaster)
        else:
            self.serving = f"mixture with trained experts, version {version}"
            self.swap(experts.forecaster)
