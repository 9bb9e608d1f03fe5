"""Which demand forecaster serves in the PRM: the one of the active model, watched, and swapped without a gap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.actors.models import ModelShelf
from cotenant.configs.settings import PredictionSettings
from cotenant.forecasting.demand import EwQuantileForecaster, MixtureForecaster
from cotenant.forecasting.demand.guarded import BatchForecaster, Factory, GuardedForecaster
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


@dataclass(frozen=True, slots=True)
class Named:
    """What makes a forecaster, and what people know that by."""

    name: str
    make: Factory

    def __call__(self) -> BatchForecaster:
        return self.make()


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
        self._served = ""
        self._trouble: tuple[str, ...] = ()
        super().__init__(Named(UNTRAINED, MixtureForecaster) if self._mixture else Named(FIRST, _First))
        self.follow()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with trained experts: they cannot be used, or not once this is restarted."""
        return *self._trouble, *self._shelf.gone({"demand": self._served})

    @property
    def serving(self) -> str:
        """What forecasts demand here, or is about to; see ``note``. One that failed at that is not meant any more."""
        factory = self._factory if self._coming is None else self._coming.factory
        return factory.name if isinstance(factory, Named) else str(factory)

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
        self._served, experts, self._trouble = self._shelf.demand(wanted)
        if experts is None:
            factory = Named(UNTRAINED, MixtureForecaster)
        else:
            factory = Named(f"mixture with trained experts, version {self._served}", experts.forecaster)
        if self._primary is not None and isinstance(self._factory, Named) and self._factory.name == factory.name:
            self.stay()
        else:
            self.swap(factory)
