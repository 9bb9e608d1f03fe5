"""The Predictive Resource Manager: takes in windows, forecasts demand, keeps what was learnt of each job."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import ray

from cotenant.actors.history import open_history
from cotenant.actors.messages import WindowBatch
from cotenant.configs.settings import SignatureSettings
from cotenant.forecasting.demand import EwQuantileForecaster
from cotenant.forecasting.profiles import ProfileBook
from cotenant.forecasting.signatures import accepted, brief
from cotenant.forecasting.types import JobMeasurement, Signature
from cotenant.scheduler.core.events import MeasurementsReported
from cotenant.scheduler.names import NAMESPACE, SCHEDULER

KEEP_WINDOWS = 3600  # an hour of one-second windows per job and per GPU
SAVE_EVERY_S = 5.0


class Prm:
    """State and methods of the PRM actor. One call per host per second; its cost grows with the number of jobs only.

    What was learnt (the profile book) is saved in the state directory, so a restart of the actor forgets at most
    ``SAVE_EVERY_S`` seconds; the short-term forecast state of running jobs is rebuilt from the next windows.
    """

    def __init__(self, state_dir: str, signatures_json: str | None = None) -> None:
        """Make the PRM.

        Args:
            state_dir: Where it keeps what it has learnt.
            signatures_json: The settings of the signature store; None = no store.
        """
        kept = None if signatures_json is None else SignatureSettings.model_validate_json(signatures_json)
        self._history = None if kept is None else open_history(kept, Path(state_dir))
        self._path = Path(state_dir) / "profiles.json"
        self._forecaster = EwQuantileForecaster()
        self._book = self._load()
        self._saved_at = 0.0
        self._jobs: dict[str, deque[Signature]] = {}
        self._devices: dict[str, deque[tuple[float, float | None, float | None]]] = {}
        self._jobs_on_host: dict[str, set[str]] = {}

    def ping(self) -> int:
        """Return the process id; used by health checks."""
        return os.getpid()

    def observe(self, batch: WindowBatch) -> None:
        """Take in one host's windows and send the scheduler the forecasts they lead to."""
        signatures = [accepted(signature) for signature in batch.signatures]
        if self._history is not None:
            self._history.add_windows(batch.host_id, signatures, batch.fingerprints)
        self._forecaster.observe_batch(signatures)
        briefs = [brief(signature) for signature in signatures]  # an hour of details would not fit into memory
        for signature in briefs:
            self._book.observe(signature, batch.fingerprints[signature.job_id])
            self._jobs.setdefault(signature.job_id, deque(maxlen=KEEP_WINDOWS)).append(signature)
        forecasts = self._forecaster.forecast_batch(list(dict.fromkeys(s.job_id for s in briefs)))
        measurements = [
            JobMeasurement(
                job_id=signature.job_id,
                fingerprint=batch.fingerprints[signature.job_id],
                signature=signature,
                forecast=forecasts[signature.job_id],
                profile=self._book.profile(signature.job_id, batch.fingerprints[signature.job_id]),
            )
            for signature in briefs
            if signature.job_id in forecasts
        ]
        for device in batch.devices:
            readings = self._devices.setdefault(device.gpu_id, deque(maxlen=KEEP_WINDOWS))
            readings.append((batch.at, device.util, device.memory_bytes))
        self._forget_ended(batch)
        if measurements:
            scheduler = ray.get_actor(SCHEDULER, NAMESPACE)
            scheduler.measurements.remote(MeasurementsReported(batch.host_id, tuple(measurements)))
        if batch.at - self._saved_at >= SAVE_EVERY_S:
            self._save()
            self._saved_at = batch.at

    def close(self) -> None:
        """Write down what was learnt and measured; called before the actor is ended."""
        self._save()
        if self._history is not None:
            self._history.close()

    def windows(self, job_ids: list[str]) -> dict[str, list[Signature]]:
        """Return the recorded windows of these jobs (the last hour at most), oldest first."""
        return {job_id: list(self._jobs.get(job_id, ())) for job_id in job_ids}

    def devices(self) -> dict[str, list[tuple[float, float | None, float | None]]]:
        """Return per GPU the recorded (Unix time, utilisation, memory bytes), oldest first."""
        return {gpu_id: list(readings) for gpu_id, readings in self._devices.items()}

    def latest_devices(self) -> dict[str, tuple[float, float | None, float | None]]:
        """Return per GPU the last (Unix time, utilisation, memory bytes)."""
        return {gpu_id: readings[-1] for gpu_id, readings in self._devices.items()}

    def _forget_ended(self, batch: WindowBatch) -> None:
        present = {signature.job_id for signature in batch.signatures}
        for job_id in self._jobs_on_host.get(batch.host_id, set()) - present:
            self._forecaster.forget(job_id)
        self._jobs_on_host[batch.host_id] = present
        if len(self._jobs) > 20_000:  # ended jobs' series are kept for reports, but not for ever
            for job_id in list(self._jobs)[:10_000]:
                del self._jobs[job_id]

    def _load(self) -> ProfileBook:
        if not self._path.exists():
            return ProfileBook()
        try:
            return ProfileBook.from_json(self._path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            # What was learnt can be learnt again; keep the file for whoever wants to know what happened to it.
            kept = self._path.with_suffix(".unreadable")
            self._path.replace(kept)
            print(f"cotenant prm: {self._path} cannot be read ({error}); kept as {kept}", flush=True)  # noqa: T201
            return ProfileBook()

    def _save(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(self._book.to_json(), encoding="utf-8")
        temporary.replace(self._path)
