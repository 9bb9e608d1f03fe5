"""Predicted against actual on disk: one table of demand forecasts, one of throughputs beside others.

``daily.py`` tells how the files lie. ``load_forecast_log`` and ``load_slowdown_log`` read them with pandas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pyarrow as pa

from cotenant.forecasting.datasets.daily import DailyFiles, parts_of, readable
from cotenant.forecasting.scoring import ScoredForecast, ScoredSlowdown

VERSION = "1"
FORECASTS, SLOWDOWNS = "forecasts", "slowdowns"
TIME = "at"

_META = {"cotenant.prediction_log_version": VERSION}
_NUMBER, _TEXT = pa.float64(), pa.string()
_FORECAST_SCHEMA = pa.schema(
    {
        TIME: _NUMBER,
        "job_id": _TEXT,
        "gpu_id": _TEXT,
        "horizon_s": pa.int64(),
        "quantity": _TEXT,
        **dict.fromkeys(("p50", "p90", "p95", "p99", "actual", "persistence"), _NUMBER),
    },
    metadata=_META,
)
_SLOWDOWN_SCHEMA = pa.schema(
    {
        TIME: _NUMBER,
        "gpu_type": _TEXT,
        "focal": _TEXT,
        "others": pa.list_(_TEXT),
        **dict.fromkeys(("measured", "low", "predicted", "high", "rule", "seconds"), _NUMBER),
    },
    metadata=_META,
)


def forecast_log(root: Path, keep_days: float, keep_bytes: int) -> DailyFiles:
    """Return the writer of demand forecasts; see ``DailyFiles``."""
    return DailyFiles(root / FORECASTS, _FORECAST_SCHEMA, TIME, keep_days, keep_bytes)


def slowdown_log(root: Path, keep_days: float, keep_bytes: int) -> DailyFiles:
    """Return the writer of throughputs; see ``DailyFiles``."""
    return DailyFiles(root / SLOWDOWNS, _SLOWDOWN_SCHEMA, TIME, keep_days, keep_bytes)


def forecast_row(scored: ScoredForecast) -> Mapping[str, object]:
    """Return a scored forecast as a row; ``at`` is when the forecast was made."""
    row = asdict(scored)
    return {TIME: row.pop("made_at"), **row}


def slowdown_row(scored: tuple[float, ScoredSlowdown]) -> Mapping[str, object]:
    """Return a scored throughput as a row; ``at`` is when its measurement ended."""
    at, row = scored
    return {TIME: at, **asdict(row)}


def load_forecast_log(root: Path) -> pd.DataFrame:
    """Read the log of demand forecasts below ``root``; empty when there is none. Damaged files are warned of."""
    return _load(root / FORECASTS, _FORECAST_SCHEMA.names)


def load_slowdown_log(root: Path) -> pd.DataFrame:
    """Read the log of throughputs below ``root``; empty when there is none. Damaged files are warned of."""
    return _load(root / SLOWDOWNS, _SLOWDOWN_SCHEMA.names)


def _load(root: Path, names: Sequence[str]) -> pd.DataFrame:
    tables = [table.to_pandas() for part in parts_of(root) if (table := readable(part.path)) is not None]
    if not tables:
        return pd.DataFrame(columns=list(names))
    whole: pd.DataFrame = pd.concat(tables, ignore_index=True)
    return whole.sort_values(TIME, ignore_index=True)


__all__ = [
    "forecast_log",
    "forecast_row",
    "load_forecast_log",
    "load_slowdown_log",
    "slowdown_log",
    "slowdown_row",
]
