"""The forecast of one job as users see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from cotenant.forecasting.types import Forecast, Quantiles, Signature
from cotenant.scheduler.views import ForecastView, QuantilesView


def forecast_view(forecast: Forecast, last: Signature, served_by: str) -> ForecastView:
    """Return the view of a forecast.

    Args:
        forecast: The forecast.
        last: The last window it rests on.
        served_by: What made it, in words.
    """
    return ForecastView(
        job_id=forecast.job_id,
        util=_rows(forecast.util),
        memory=_rows(forecast.memory),
        peak_memory_bytes=forecast.largest_memory_bytes,
        windows=forecast.windows,
        measured_at=last.start_s + last.window_s,
        served_by=served_by,
        util_estimated=last.util_estimated,
        memory_estimated=last.memory_estimated,
    )


def _rows(quantiles: Mapping[int, Quantiles]) -> list[QuantilesView]:
    return [QuantilesView(horizon_s=horizon, **asdict(each)) for horizon, each in sorted(quantiles.items())]
