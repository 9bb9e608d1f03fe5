"""How jobs that share a GPU slow each other down: the first rule, and the model learned from measured pairs."""

from __future__ import annotations

from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.interference.rule import UtilisationRule

__all__ = ["Observation", "UtilisationRule"]
