"""The co-location data set in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """A co-location data set.

    Attributes:
        samples: One row per member and window.
        solo: One row per GPU type, mode, member and share.
        pairs: One row per GPU type, mode, shares, set and focal member.
        cards: What each run was measured on and how, one per run, in order of time.
        failures: Sets that did not fit, hung, died or were refused, as they happened.
        dropped: What was left out while reading, by reason.
    """

    samples: pd.DataFrame
    solo: pd.DataFrame
    pairs: pd.DataFrame
    cards: tuple[Mapping[str, Any], ...]
    failures: tuple[Mapping[str, Any], ...]
    dropped: Mapping[str, int]

    @property
    def gpu_types(self) -> list[str]:
        """The types of devices in it."""
        return sorted({card["gpu_type"] for card in self.cards})


__all__ = ["Tables"]
