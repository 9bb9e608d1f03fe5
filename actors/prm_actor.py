"""The Predictive Resource Manager: takes in windows, forecasts demand, keeps what was learnt of each job."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from cotenant.actors.demand import ServingForecaster
from cotenant.actors.forecasts import forecast_view
from cotenant.actors.history import open_history, store_folder
from cotenant.actors.learning import Evidence, Training
from cotenant.actors.messages import WindowBatch
from cotenant.actors.models import ModelShelf
from cotenant.actors.watch import PredictionLog, Watch
from cotenant.configs.settings import Settings
from cotenant.forecasting.interference.observations import Program
from cotenant.forecasting.profiles import ProfileBook, on_type
from cotenant.forecasting.signatures import accepted, brief
from cotenant.forecasting.types import DemandProfile, Forecast, JobMeasurement, Signature
from cotenant.scheduler.core.events import EvidenceGathered, MeasurementsReported
from cotenant.scheduler.errors import CotenantError
from cotenant.scheduler.names import NAMESPACE, SCHEDULER
from cotenant.scheduler.views import DemandScoreView, ForecastView, PredictionsView, TrainingView

KEEP_WINDOWS = 3600  # an hour of one-second windows per job and per GPU
SAVE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class _Look:
    """One host's windows, and what its jobs do alone."""

    batch: WindowBatch
    windows: Sequence[Signature]
    profiles: Mapping[str, DemandProfile]


class Prm:
    """State and methods of the PRM actor. One call per host per second.

    What was learnt is saved in the state directory, so a restart of the actor forgets at most ``SAVE_EVERY_S`` seconds;
    the short-term forecast state of running jobs is rebuilt from the next windows.
    """

    def __init__(self, state_dir: str, settings_json: str) -> None:
        """Make the PRM.

        Args:
            state_dir: Where it keeps what it has learnt.
            settings_json: All settings.
        """
        settings = Settings.model_validate_json(settings_json)
        folder = Path(state_dir)
        self._history = open_history(settings.signatures, folder)
        self._path = folder / "profiles.json"
        self._book = self._load()
        self._shelf = ModelShelf(settings.prediction, folder)
        self._forecaster = ServingForecaster(settings.prediction, self._shelf)
        self._evidence = Evidence(folder / "evidence.jsonl", _log)
        # What was saved before its program was found to go through phases, by this version or an older one.
        for program in {each.program: None for each in self._evidence.book.observations()}:
            self._evidence.see("", program, self._phased(None, program))
        store = store_folder(settings.signatures, folder) if settings.signatures.enabled else None
        log = PredictionLog(settings.signatures, folder) if settings.signatures.enabled else None
        self._watch = Watch(self._shelf, log, self._evidence.book.observations())
        self._training = Training(settings.prediction, self._shelf, folder, store)
        self._myself = _own_handle()
        self._telling: tuple[Any, EvidenceGathered] | None = None
        self._waiting: list[WindowBatch] = []
        self._saved_at = 0.0
        self._jobs: dict[str, deque[Signature]] = {}
        self._devices: dict[str, deque[tuple[float, float | None, float | None]]] = {}
        self._jobs_on_host: dict[str, set[str]] = {}

    def ping(self) -> int:
        """Return the process id; used by health checks."""
        return os.getpid()

    def serving(self) -> str:
        """Say what forecasts demand; used by health checks."""
        return f"demand: {self._forecaster.serving}"

    def observe(self, batch: WindowBatch) -> None:
        """Take in one host's windows. In the actor they wait for those that have arrived already: one look at the
        windows of many hosts costs hardly more than one at those of a single host.
        """
        self._waiting.append(batch)
        if self._myself is None:
            self.work_off()
        elif len(self._waiting) == 1:
            self._myself.work_off.remote()  # comes after what has arrived by now

    def work_off(self) -> None:
        """Take in what waits, and send the scheduler the forecasts it leads to."""
        waiting, self._waiting = self._waiting, []
        batches: list[WindowBatch] = []
        windows: list[list[Signature]] = []
        for batch in waiting:
            try:
                usable = [accepted(each) for each in batch.signatures if each.job_id in batch.fingerprints]
            except ValueError as error:  # of a newer agent: the other hosts are not to blame
                _log(f"windows of host {batch.host_id} are left out: {error}")
                continue
            batches.append(batch)
            windows.append(usable)
        foreseen = {key: said for batch in batches for key, said in batch.foreseen.items()}
        for batch, signatures in zip(batches, windows, strict=True):
            self._prime(batch, signatures)
        self._forecaster.observe_batch([signature for signatures in windows for signature in signatures], foreseen)
        looks = [self._learn(batch, signatures) for batch, signatures in zip(batches, windows, strict=True)]
        jobs = dict.fromkeys(job_id for look in looks for job_id in look.profiles)
        forecasts = self._forecaster.forecast_batch(list(jobs))
        for look in looks:
            try:
                known = {job_id: forecasts[job_id] for job_id in look.profiles if job_id in forecasts}
                self._tell_scheduler(look, known)
            except (ValueError, RayError) as error:  # it is being started anew; learning goes on
                _log(f"the scheduler cannot be told: {error}")
            self._forget_ended(look.batch)
        if batches and not 0.0 <= batches[-1].at - self._saved_at < SAVE_EVERY_S:
            self._saved_at = batches[-1].at
            self._save()
            self._forecaster.follow()
            self._watch.follow()
            self._train()

    def close(self) -> None:
        """Write down what was learnt and measured; called before the actor is ended."""
        self._training.close()
        self._save()
        if self._history is not None:
            self._history.close()
        self._watch.close()

    def predictions(self) -> PredictionsView:
        """Return what forecasts demand here, how good predictions were lately, and what is being learnt."""
        note = self._forecaster.note()
        return PredictionsView(
            serving={"demand": self._forecaster.serving},
            warnings=[*self._forecaster.warnings, *([note] if note else [])],
            evidence=0,
            demand=self._watch.demand_scores() or [],
            slowdowns=self._watch.slowdown_scores(),
            drift=list(self._watch.drifts),
            training=self._training.running,
            trainings=[TrainingView(**asdict(each)) for _, each in sorted(self._training.outcomes.items())],
        )

    def forecast(self, job_id: str) -> ForecastView | None:
        """Return what a job is expected to demand; None before its first window, and once it has ended."""
        windows, found = self._jobs.get(job_id), self._forecaster.forecast(job_id)
        return forecast_view(found, windows, self._forecaster.serves(job_id)) if windows and found else None

    def forecast_scores(self, job_id: str) -> list[DemandScoreView] | None:
        """Return how good the demand forecasts of a job were lately; None when it is not known."""
        return self._watch.demand_scores(job_id)

    def windows(self, job_ids: list[str]) -> dict[str, list[Signature]]:
        """Return the recorded windows of these jobs (the last hour at most), oldest first."""
        return {job_id: list(self._jobs.get(job_id, ())) for job_id in job_ids}

    def devices(self) -> dict[str, list[tuple[float, float | None, float | None]]]:
        """Return per GPU the recorded (Unix time, utilisation, memory bytes), oldest first."""
        return {gpu_id: list(readings) for gpu_id, readings in self._devices.items()}

    def latest_devices(self) -> dict[str, tuple[float, float | None, float | None]]:
        """Return per GPU the last (Unix time, utilisation, memory bytes)."""
        return {gpu_id: readings[-1] for gpu_id, readings in self._devices.items()}

    def _prime(self, batch: WindowBatch, signatures: Sequence[Signature]) -> None:
        """Tell the forecaster what earlier runs showed, else what a job was placed with, before its first window."""
        for signature in signatures:
            if signature.job_id not in self._jobs_on_host.get(batch.host_id, set()):
                program = on_type(batch.fingerprints[signature.job_id], batch.gpu_types.get(signature.gpu_id, ""))
                known = self._book.profile(None, program)
                if known.source != "history":
                    known = batch.planned.get(signature.job_id, known)
                self._forecaster.prime(signature.job_id, known)

    def _learn(self, batch: WindowBatch, signatures: Sequence[Signature]) -> _Look:
        """Keep what one host's windows tell of its jobs, alone and beside each other."""
        if self._history is not None:
            self._history.add_windows(batch.host_id, signatures, batch.fingerprints)
            self._training.count(len(signatures))
        briefs = [brief(signature) for signature in signatures]  # an hour of details would not fit into memory
        for signature in briefs:
            gpu_type = batch.gpu_types.get(signature.gpu_id, "")
            known_as = replace(signature, job_id=on_type(signature.job_id, gpu_type))
            self._book.observe(known_as, on_type(batch.fingerprints[signature.job_id], gpu_type))
            self._jobs.setdefault(signature.job_id, deque(maxlen=KEEP_WINDOWS)).append(signature)
        profiles = {
            signature.job_id: self._profile(batch, signature.job_id, batch.gpu_types.get(signature.gpu_id, ""))
            for signature in briefs
        }
        self._watch.windows(batch.host_id, briefs, batch.fingerprints)
        observations = self._evidence.observe(batch, briefs, profiles, self._see_phases(batch, briefs))
        self._watch.slowdowns(batch.host_id, batch.at, observations)
        for device in batch.devices:
            readings = self._devices.setdefault(device.gpu_id, deque(maxlen=KEEP_WINDOWS))
            readings.append((batch.at, device.util, device.memory_bytes))
        return _Look(batch, briefs, profiles)

    def _see_phases(self, batch: WindowBatch, signatures: Sequence[Signature]) -> set[str]:
        """Return the jobs that are found to go through phases; what their programs did beside others is withdrawn."""
        jobs: set[str] = set()
        new: list[Program] = []
        for signature in signatures:
            job_id = signature.job_id
            program = Program(batch.gpu_types.get(signature.gpu_id, ""), batch.fingerprints[job_id])
            phased = self._phased(job_id, program)
            if phased:
                jobs.add(job_id)
            if self._evidence.see(job_id, program, phased):
                new.append(program)
        self._watch.withdraw(new)
        return jobs

    def _phased(self, job_id: str | None, program: Program) -> bool:
        job = None if job_id is None else on_type(job_id, program.gpu_type)
        return self._book.goes_through_phases(job, on_type(program.fingerprint, program.gpu_type))

    def _profile(self, batch: WindowBatch, job_id: str, gpu_type: str) -> DemandProfile:
        fingerprint = batch.fingerprints[job_id]
        known = self._book.profile(on_type(job_id, gpu_type), on_type(fingerprint, gpu_type))
        return replace(known, fingerprint=fingerprint, family=batch.families.get(job_id, ""))

    def _tell_scheduler(self, look: _Look, forecasts: Mapping[str, Forecast]) -> None:
        batch = look.batch
        self._watch.forecasts(forecasts, batch.at, look.windows)
        measurements = [
            JobMeasurement(
                job_id=signature.job_id,
                fingerprint=batch.fingerprints[signature.job_id],
                signature=signature,
                forecast=forecasts.get(signature.job_id) or _nothing(signature.job_id),
                profile=look.profiles[signature.job_id],
            )
            for signature in look.windows
        ]
        scheduler = ray.get_actor(SCHEDULER, NAMESPACE)
        self._tell_evidence(scheduler, batch.at)  # whatever predicts now: another predictor may have to know tomorrow
        if measurements:
            scheduler.measurements.remote(MeasurementsReported(batch.host_id, tuple(measurements)))

    def _tell_evidence(self, scheduler: Any, now: float) -> None:
        """Tell what is due, one lot at a time: the next once the scheduler has answered, or is gone."""
        if self._telling is not None:
            answer, event = self._telling
            if not ray.wait([answer], timeout=0)[0]:
                return
            self._telling = None
            try:
                ray.get(answer)
            except (CotenantError, RayError) as error:  # told again a little later
                _log(f"the scheduler did not take evidence in: {type(error).__name__}")
            else:
                self._evidence.told(event)
        due = self._evidence.due(now)
        if due is not None:
            self._telling = scheduler.evidence.remote(due), due

    def _forget_ended(self, batch: WindowBatch) -> None:
        present = {signature.job_id for signature in batch.signatures}
        for job_id in self._jobs_on_host.get(batch.host_id, set()) - present:
            self._forecaster.forget(job_id)
            self._watch.forget(job_id)
            self._watch.slowdowns(batch.host_id, batch.at, self._evidence.forget(job_id))
        self._jobs_on_host[batch.host_id] = present
        if len(self._jobs) > 20_000:  # ended jobs' series are kept for reports, but not for ever
            for job_id in list(self._jobs)[:10_000]:
                del self._jobs[job_id]

    def _train(self) -> None:
        outcome = self._training.poll(self._evidence, self._watch.reasons())
        if outcome is not None:
            self._watch.retrained(outcome.kind)
            _log(f"trained {outcome.kind}: {outcome.reason}")

    def _load(self) -> ProfileBook:
        try:
            return ProfileBook.from_json(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return ProfileBook()
        except (ValueError, OSError) as error:
            # What was learnt can be learnt again; keep the file for whoever wants to know what happened to it.
            kept = self._path.with_suffix(".unreadable")
            _log(f"{self._path} cannot be read ({error}); to be kept as {kept}")
        try:
            self._path.replace(kept)
        except OSError as error:  # a folder that cannot be written: all else works without it
            _log(f"{self._path} cannot be kept ({error})")
        return ProfileBook()

    def _save(self) -> None:
        try:
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(self._book.to_json(), encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            _log(f"{self._path} cannot be written ({error}); trying again")
        self._evidence.save()
        self._training.save()


def _nothing(job_id: str) -> Forecast:
    """The forecast of a job of which nothing can be read: its steps and what holds it back count all the same."""
    return Forecast(job_id, {}, {}, 0.0, 0)


def _own_handle() -> Any:
    """The handle of the actor this runs in; None outside of one."""
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return None
    return ray.get_runtime_context().current_actor


def _log(text: str) -> None:
    print(f"cotenant prm: {text}", flush=True)  # noqa: T201 - the actor's log
