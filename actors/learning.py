"""What the PRM learns beyond one job: how jobs slow each other down here, how right the predictions are, new models.

Everything is kept in the state directory, so a restart of the actor forgets at most what was measured of the sets that
are together at that moment, and told to the scheduler until it says that it has it. What is told of a set is always all
that is known of it: the scheduler may hear it twice.

A program that is found to go through phases has no rate alone, so what it did beside others was held against the rate
of some phase. All of that is withdrawn: here, in the file, and from the scheduler until it says that it has heard it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from cotenant.actors.messages import WindowBatch
from cotenant.actors.models import ModelShelf
from cotenant.actors.retraining import Outcome, Retrainer
from cotenant.configs.settings import PredictionSettings
from cotenant.forecasting.datasets.observation_file import load_observations, save_observations
from cotenant.forecasting.datasets.registry import Kind, ModelFileError
from cotenant.forecasting.interference.evidence import KEPT_SETS, EvidenceBook
from cotenant.forecasting.interference.observations import Observation, Program, SetKey
from cotenant.forecasting.pairing import PairTracker
from cotenant.forecasting.profiles import trim
from cotenant.forecasting.types import DemandProfile, Signature
from cotenant.scheduler.core.events import EvidenceGathered

TELL_EVERY_S = 5.0  # the scheduler takes evidence in at a cost, so in lots
ENOUGH_TO_TRAIN = 12  # measurements of sets since the last training
ENOUGH_WINDOWS = 20_000  # for trained demand experts: five and a half hours of one job
KEPT_VERSIONS = 10  # of each kind of model, beside the active one
MOST_PROGRAMS = 20_000  # that go through phases, as many as profiles are kept of
LONGEST_FILE = 5 * KEPT_SETS  # lines, before the file is written anew


class Evidence:
    """How fast jobs were beside each other, measured on this cluster; kept in a file. Not thread-safe.

    ``book`` holds all that is known.

    Args:
        path: The file.
        tell: Takes warnings.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path = path
        self.since_training = 0
        self.book = EvidenceBook()
        self._tell = tell
        self._tracker = PairTracker()
        self._untold: dict[SetKey, None] = {}
        self._phased: dict[Program, str] = {}  # which run shows it; empty: one that has ended
        self._unheard: dict[Program, Program] = {}  # withdrawn; a new object each time it happens, as while it is told
        self._unsaved: list[Observation | Program] = []
        self._sent_at = 0.0
        self._failing = False
        self._restore()

    def observe(
        self,
        batch: WindowBatch,
        windows: Sequence[Signature],
        profiles: Mapping[str, DemandProfile],
        phased: Collection[str] = (),
    ) -> list[Observation]:
        """Take in one host's windows; returns what they show of jobs that share a GPU.

        Args:
            batch: What the host sent.
            windows: Its windows.
            profiles: What its jobs do alone, by job id.
            phased: Those of its jobs that are found to go through phases.
        """
        found = self._tracker.observe(batch.at, windows, profiles, batch.gpu_types)
        for job_id in phased:
            self._tracker.discard(job_id)
        return self._keep(found)

    def see(self, job_id: str, program: Program, phased: bool) -> bool:
        """Take in whether a run of a program is found to go through phases.

        As long as one is, nothing is kept of the program's speed, and what was measured of that before is withdrawn.

        Args:
            job_id: The run; empty: an earlier one.
            program: The program, on the type of GPUs where it runs.
            phased: Whether it is found to.

        Returns:
            Whether that is new, so that something may have been withdrawn.
        """
        shown_by = self._phased.get(program)
        if not phased:
            if shown_by in {job_id, ""}:  # steady runs say nothing of one that still shows phases
                del self._phased[program]
            return False
        self._phased[program] = shown_by or job_id
        if shown_by is not None:
            return False
        if self.book.withdraw([program]):
            self.since_training += ENOUGH_TO_TRAIN  # a model may have learnt from it
        self._unsaved.append(program)
        self._unheard[program] = replace(program)
        for kept in (self._phased, self._unheard):
            trim(kept, MOST_PROGRAMS)
        return True

    def forget(self, job_id: str) -> list[Observation]:
        """Drop a job that ended; returns what was not told yet."""
        found = self._keep(self._tracker.forget(job_id))
        for program in [program for program, shown_by in self._phased.items() if shown_by == job_id]:
            self._phased[program] = ""
        return found

    def due(self, now: float) -> EvidenceGathered | None:
        """Return what the scheduler has to be told now, seconds after the last time: all that it has not taken in.

        None when there is nothing.
        """
        if not (self._untold or self._unheard) or 0.0 <= now - self._sent_at < TELL_EVERY_S:
            return None
        self._sent_at = now
        known = {key: found for key in self._untold if (found := self.book.of(key)) is not None}
        self._untold = dict.fromkeys(known)  # what the book has forgotten need not be told
        if not (known or self._unheard):
            return None
        return EvidenceGathered(tuple(known.values()), complete=True, withdrawn=tuple(self._unheard.values()))

    def told(self, event: EvidenceGathered) -> None:
        """The scheduler has taken this in; what was measured or withdrawn since then is still to be told."""
        for each in event.observations:
            if each.key is not None and self.book.of(each.key) is each:
                self._untold.pop(each.key, None)
        for program in event.withdrawn:
            if self._unheard.get(program) is program:
                del self._unheard[program]

    def save(self) -> None:
        """Append what is new to the file. When the disk is full it waits in memory, up to a limit."""
        try:
            save_observations(self.path, self._unsaved)
        except OSError as error:
            if not self._failing:
                self._tell(f"{self.path} cannot be written ({error}); trying again")
            self._failing = True
            del self._unsaved[:-LONGEST_FILE]
        else:
            self._failing = False
            self._unsaved = []

    def _keep(self, found: Iterable[Observation]) -> list[Observation]:
        """Keep what counts, and return it: a host that was not heard lately tells of a rate alone that is none."""
        kept = [each for each in found if each.program not in self._phased]
        self._note(kept)
        self._unsaved += kept
        self.since_training += len(kept)
        return kept

    def _note(self, found: Sequence[Observation]) -> None:
        for each in found:
            self.book.add(each)
            if each.key is not None:
                self._untold[each.key] = None

    def _restore(self) -> None:
        """Read the file, and shorten a long one to one line per set."""
        try:
            loaded = load_observations(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            self._tell(f"{self.path} cannot be read ({error})")
            return
        for problem in loaded.problems[:3]:
            self._tell(problem)
        self.since_training = len(loaded.observations)
        self._note(loaded.observations)
        self._unheard.update((each, each) for each in loaded.withdrawn)
        if len(loaded.observations) <= LONGEST_FILE:
            return
        try:
            fresh = self.path.with_suffix(".new")
            fresh.unlink(missing_ok=True)
            save_observations(fresh, [*loaded.withdrawn, *self.book.observations()])
            fresh.replace(self.path)
        except OSError as error:
            self._tell(f"{self.path} cannot be shortened ({error})")


class Training:
    """Decides when a model is trained again, and has it done. Not thread-safe.

    Args:
        settings: What predicts.
        shelf: Where models are.
        state_dir: Where logs go.
        store: The store of signatures; None = there is none, so demand cannot be learnt from it.
        retrainer: Runs the trainings.
    """

    def __init__(
        self,
        settings: PredictionSettings,
        shelf: ModelShelf,
        state_dir: Path,
        store: Path | None,
        retrainer: Retrainer | None = None,
    ) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._settings = settings
        self._shelf = shelf
        self._store = store
        self._retrainer = retrainer or Retrainer(settings.retrain_every_s, state_dir)
        self._path = state_dir / "training.json"
        self._windows = self._restore()
        self._learnt = 0  # of them, by the training that runs

    @property
    def running(self) -> str:
        """What is being trained and why; empty when nothing is."""
        return self._retrainer.running

    def count(self, windows: int) -> None:
        """Count windows that were written to the store."""
        self._windows += windows

    def save(self) -> None:
        """Write down what was counted, so that it survives the actor. On a full disk it is tried again."""
        with contextlib.suppress(OSError):
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps({"windows": self._windows}), encoding="utf-8")
            temporary.replace(self._path)

    def _restore(self) -> int:
        """Return what was counted before; a file that is missing or damaged only makes the next training later."""
        try:
            windows = json.loads(self._path.read_text(encoding="utf-8"))["windows"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return 0
        return windows if isinstance(windows, int) and windows > 0 else 0

    def poll(self, evidence: Evidence, reasons: Mapping[str, str]) -> Outcome | None:
        """Start what is due; return how a training ended, once.

        Args:
            evidence: What was measured of pairs.
            reasons: By kind of model, why it is to be trained again beyond having seen more.
        """
        outcome = self._retrainer.poll()
        if outcome is not None:
            self.outcomes[outcome.kind] = outcome
            if outcome.kind == "demand" and outcome.candidate:  # else nothing was learnt: too little, or it failed
                self._windows -= self._learnt
            self._tidy(outcome.kind)
        if self._settings.retrain:
            self._start_interference(evidence, reasons.get("interference", ""))
            self._start_demand(reasons.get("demand", ""))
        return outcome

    def _tidy(self, kind: str) -> None:
        """Delete old versions; the active one always stays. What cannot be deleted stays until the next training."""
        with contextlib.suppress(ModelFileError, OSError):  # a damaged registry is told by the shelf
            self._shelf.registry.prune(cast(Kind, kind), KEPT_VERSIONS)

    def close(self) -> None:
        """End a training that runs."""
        self._retrainer.close()

    def _start_interference(self, evidence: Evidence, drift: str) -> None:
        enough = evidence.since_training >= (1 if drift else ENOUGH_TO_TRAIN)
        if self._settings.interference != "learned" or not enough or not self._retrainer.may_start("interference"):
            return
        evidence.save()
        why = drift or f"{evidence.since_training} measurements of jobs that share GPUs since the last time"
        evidence.since_training = 0
        registry = ("--registry", str(self._shelf.registry.root))
        self._retrainer.start("interference", why, (*registry, "--evidence", str(evidence.path)))

    def _start_demand(self, drift: str) -> None:
        enough = self._windows >= ENOUGH_WINDOWS
        if self._settings.demand != "mixture" or self._store is None or not (drift or enough):
            return
        if self._retrainer.may_start("demand"):
            why = drift or f"{self._windows} windows since the last time"
            self._learnt = self._windows
            registry = ("--registry", str(self._shelf.registry.root))
            self._retrainer.start("demand", why, (*registry, "--store", str(self._store)))
