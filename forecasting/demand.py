"""The first demand forecaster: exponentially weighted histograms, no training."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.forecasting.types import Forecast, Signature


class EwQuantileForecaster:
    """Quantiles of utilisation and memory from exponentially weighted history (see ``DemandForecaster``)."""

    name = "ew-quantile"

    def observe(self, signature: Signature) -> None:
        """Take in one window. Out-of-order, absurd or empty windows are ignored, never fatal."""
        self.observe_batch((signature,))

    def observe_batch(self, signatures: Sequence[Signature]) -> None:
        """Take in many windows at once, in order; much cheaper than one by one."""
        raise NotImplementedError

    def forecast(self, job_id: str) -> Forecast | None:
        """Return the forecast of a job, or None when nothing usable was observed yet."""
        return self.forecast_batch((job_id,)).get(job_id)

    def forecast_batch(self, job_ids: Sequence[str]) -> dict[str, Forecast]:
        """Return the forecasts of those of the jobs that have one; much cheaper than one by one."""
        raise NotImplementedError

    def forget(self, job_id: str) -> None:
        """Drop the state of a job that ended. Unknown ids are ignored."""
        raise NotImplementedError
