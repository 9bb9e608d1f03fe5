"""Holds predictions against what then happened: rolling figures for people, rows for a log, drift for retraining."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from cotenant.actors.history import Backlog
from cotenant.actors.models import ModelShelf
from cotenant.configs.settings import SignatureSettings
from cotenant.forecasting.datasets.prediction_log import forecast_log, forecast_row, slowdown_log, slowdown_row
from cotenant.forecasting.drift import Drift, DriftDetector
from cotenant.forecasting.interference.evidence import EvidenceBook
from cotenant.forecasting.interference.observations import Observation, Program
from cotenant.forecasting.scoring import (
    PEAK_HORIZON_S,
    ForecastScores,
    HorizonScore,
    ScoredForecast,
    ScoredSlowdown,
    SlowdownScores,
)
from cotenant.forecasting.types import Forecast, Signature
from cotenant.scheduler.core.models import informed
from cotenant.scheduler.views import DemandScoreView, SlowdownScoreView

FOLDER = "predictions"
DRIFT_HORIZON_S = 5  # what resizing looks at; of its forecasts every fifth is watched: the others overlap with it
DRIFT_QUANTITIES = ("util", "memory")
SHOWN_DRIFTS = 16
MOST_WATCHED = 40_000  # jobs, times quantities


class PredictionLog:
    """Writes scored predictions below the state directory, kept as long as the history of signatures.

    Args:
        settings: Of the history.
        state_dir: The state directory.
    """

    def __init__(self, settings: SignatureSettings, state_dir: Path) -> None:
        bounds = (state_dir / FOLDER, settings.keep_days, settings.keep_bytes)
        every_s = settings.write_every_s
        self.forecasts = Backlog[ScoredForecast](forecast_log(*bounds), every_s, forecast_row, what="log of forecasts")
        self.slowdowns = Backlog[tuple[float, ScoredSlowdown]](
            slowdown_log(*bounds), every_s, slowdown_row, what="log of slowdowns"
        )

    def close(self) -> None:
        """Write what waits."""
        self.forecasts.close()
        self.slowdowns.close()


class Watch:
    """What the PRM predicted, against what it measured. Not thread-safe.

    Args:
        shelf: Where the models are; the interference model in force is asked before a measurement becomes evidence.
        log: Where scored predictions go; None = nowhere.
        known: What was measured before.
    """

    def __init__(self, shelf: ModelShelf, log: PredictionLog | None, known: Sequence[Observation] = ()) -> None:
        self._shelf = shelf
        self._log = log
        self._forecasts = ForecastScores()
        self._slowdowns = SlowdownScores()
        self._book = EvidenceBook(known)
        self._versions: Mapping[str, str] | None = None
        self._demand: str | None = None
        self._drift = {"demand": DriftDetector(0.95), "interference": DriftDetector(0.8)}
        # When the last forecast of a job and quantity that is watched for drift was made.
        self._watched: dict[tuple[str, str], float] = {}
        self._reasons: dict[str, str] = {}
        self.drifts: deque[str] = deque(maxlen=SHOWN_DRIFTS)
        self.follow()

    def follow(self) -> None:
        """Judge the models that are active in the registry."""
        versions = self._shelf.wanted()
        demand = versions.pop("demand", None)
        if demand != self._demand:
            self._demand = demand
            self._drift["demand"] = DriftDetector(0.95)  # what went before was another model's
        if versions != self._versions:
            self._versions = versions
            self._drift["interference"] = DriftDetector(0.8)
            self._interference = self._shelf.load(versions).interference
            self._predictor = informed(self._interference, self._book.observations())

    def windows(self, host_id: str, signatures: Sequence[Signature], fingerprints: Mapping[str, str]) -> None:
        """Score the forecasts whose moment these windows are."""
        rows = self._forecasts.observe(signatures)
        for row in rows:
            if row.quantity in DRIFT_QUANTITIES and row.horizon_s == DRIFT_HORIZON_S and self._apart(row):
                program, memory = fingerprints.get(row.job_id, ""), row.quantity == "memory"
                # Memory is of one scale only as a part of what is held.
                error = abs(row.actual - row.p50) / (max(1.0, row.actual) if memory else 1.0)
                found = self._drift["demand"].update((row.quantity, program), error, row.actual <= row.p95)
                self._note("demand", f"{'memory of ' if memory else ''}program {program}", found, row.made_at)
        if self._log is not None and rows:
            self._log.forecasts.add(host_id, rows)

    def forecasts(self, forecasts: Mapping[str, Forecast], at: float, signatures: Sequence[Signature]) -> None:
        """Keep forecasts until their moment comes."""
        self._forecasts.expect(forecasts, at, signatures)

    def slowdowns(self, host_id: str, at: float, observations: Sequence[Observation]) -> None:
        """Score what was predicted of jobs that share a GPU; from then on the predictor knows the measurements."""
        rows = []
        for observation in observations:
            members = [observation.focal, *observation.others]
            predicted = self._predictor.predict(members, observation.gpu_type)[0]
            row = self._slowdowns.add(observation, predicted)
            rows.append((at, row))
            found = self._drift["interference"].update(row.gpu_type, abs(row.predicted - row.measured), row.covered)
            self._note("interference", f"GPU type {row.gpu_type}", found, at)
            self._book.add(observation)
        if rows:
            self._predictor = informed(self._interference, self._book.observations())
        if self._log is not None and rows:
            self._log.slowdowns.add(host_id, rows)

    def withdraw(self, programs: Collection[Program]) -> None:
        """Have predictions be judged without what was measured of the speed of these programs."""
        if programs and self._book.withdraw(programs):
            self._predictor = informed(self._interference, self._book.observations())

    def _apart(self, row: ScoredForecast) -> bool:
        """Whether a forecast does not overlap with the last one of the job and quantity that was watched."""
        key = row.job_id, row.quantity
        if 0.0 <= row.made_at - self._watched.get(key, -math.inf) < DRIFT_HORIZON_S - 0.5:
            return False
        self._watched.pop(key, None)
        self._watched[key] = row.made_at
        while len(self._watched) > MOST_WATCHED:
            del self._watched[next(iter(self._watched))]
        return True

    def reasons(self) -> dict[str, str]:
        """Return, by kind of model, why it should be trained again; a kind that has not drifted is missing."""
        return dict(self._reasons)

    def retrained(self, kind: str) -> None:
        """A training has looked at what drifted."""
        self._reasons.pop(kind, None)

    def _note(self, kind: str, of: str, found: Drift | None, at: float) -> None:
        if found is not None:
            moment = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
            self._reasons[kind] = f"drift ({of}): {found.reason}"
            self.drifts.append(f"{moment} {kind}, {of}: {found.reason}")

    def forget(self, job_id: str) -> None:
        """Drop a job that ended; what it told of the predictions stays."""
        self._forecasts.forget(job_id)
        for quantity in DRIFT_QUANTITIES:
            self._watched.pop((job_id, quantity), None)

    def demand_scores(self, job_id: str | None = None) -> list[DemandScoreView] | None:
        """Return how good the demand forecasts were lately, of one job or of all; None when the job is not known."""
        score = self._forecasts.overall() if job_id is None else self._forecasts.score(job_id)
        if score is None:
            return None
        peaks = {PEAK_HORIZON_S: score.peaks_under}
        return [_demand_view(horizon, each, peaks.get(horizon)) for horizon, each in sorted(score.horizons.items())]

    def slowdown_scores(self) -> list[SlowdownScoreView]:
        """Return how good the predictions of throughput were lately, per GPU type."""
        return [
            SlowdownScoreView(
                gpu_type=gpu_type,
                scored=each.scored,
                error=each.error,
                rule_error=each.rule_error,
                bias=each.bias,
                coverage=each.coverage,
            )
            for gpu_type, each in sorted(self._slowdowns.by_type().items())
        ]

    def close(self) -> None:
        """Write the log."""
        if self._log is not None:
            self._log.close()


def _demand_view(horizon_s: int, score: HorizonScore, peaks_under: float | None) -> DemandScoreView:
    return DemandScoreView(
        horizon_s=horizon_s,
        scored=score.scored,
        util_error=score.util_error,
        util_persistence_error=score.util_persistence_error,
        util_coverage_p95=score.coverage_p95,
        memory_violations=score.memory_violations,
        memory_waste=None if score.memory_waste_percent is None else score.memory_waste_percent / 100.0,
        memory_peaks_under=peaks_under,
    )
