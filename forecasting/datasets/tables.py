"""The co-location data set in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cotenant.forecasting.datasets.schema import DataError


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


def not_measured(where: str, mode: str, gpu_type: str | None, measured: Iterable[tuple[str, str]]) -> DataError:
    """Return the error for a sharing mode and a type of GPU that were not measured together; it names what is at fault.

    Args:
        where: The data.
        mode: The mode that is wanted.
        gpu_type: The type of GPU that is wanted; None when any would do.
        measured: What there is: types of GPU and modes.
    """
    there = set(measured)
    known = ", ".join(sorted(f"{its_mode} on {its_type}" for its_type, its_mode in there)) or "nothing"
    unknown_type = gpu_type is not None and gpu_type not in {its_type for its_type, _ in there}
    name, value = ("gpu_type", gpu_type) if unknown_type else ("mode", mode)
    return DataError(f"{where}: {name}: {value!r} is not accepted; measured are: {known}")


__all__ = ["Tables", "not_measured"]
