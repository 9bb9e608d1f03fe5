"""The forecast of one job as users see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from cotenant.forecasting.types import Forecast, Quantiles, Signature
from cotenant.scheduler.views import ForecastView, QuantilesView


def forecast_view(forecast: Forecast, windows: Sequence[Signature], served_by: str) -> ForecastView:
    """Return the view of a forecast.

    Args:
        forecast: The forecast.
        windows: What it rests on, oldest first.
        served_by: What made it, in words.
    """
    last = windows[-1]
    return ForecastView(
        job_id=forecast.job_id,
        util=_rows(forecast.util),
        memory=_rows(forecast.memory),
        peak_memory_bytes=forecast.largest_memory_bytes,
        windows=forecast.windows,
        measured_at=last.start_s + last.window_s,
        served_by=served_by,
        util_estimated=_estimated(windows, "util_source"),
        memory_estimated=_estimated(windows, "memory_source"),
    )


def _estimated(windows: Sequence[Signature], source: str) -> bool:
    """Whether what was last read on one of the GPUs is an estimate, be it that the last window has no reading."""
    last = {window.gpu_id: told for window in windows if (told := getattr(window, source)) is not None}
    return "device" in last.values()


def _rows(quantiles: Mapping[int, Quantiles]) -> list[QuantilesView]:
    return [QuantilesView(horizon_s=horizon, **asdict(each)) for horizon, each in sorted(quantiles.items())]
