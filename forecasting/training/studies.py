"""Optuna studies of a problem: where they are kept, whose data they belong to, how one trial is done."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
import sqlalchemy
import sqlalchemy.event
import sqlalchemy.exc
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from cotenant.forecasting.training.scores import FoldScore, combined

if TYPE_CHECKING:  # a worker loads what its problem needs, and no more
    from cotenant.forecasting.training.problems import Options, Problem

JOURNAL_SUFFIX = ".journal"
HEARTBEAT_S = 10
DEAD_AFTER_S = 60  # without a heartbeat
RETRIES = 2  # of a trial whose worker died
BUSY_S = 60.0  # how long one waits for another that writes to the same SQLite file
FIRST_RANDOM = 8  # trials before the sampler learns from them
NEVER_PRUNED = 4  # first complete trials
LEAST_FOLDS = 2  # before a trial can be pruned

_IDENTITY, _DEFAULT, _SCORE, _ERROR, _WORKER = "identity", "default", "score", "error", "worker"
_UNFIT = (ValueError, ArithmeticError, np.linalg.LinAlgError)  # options with which nothing can be trained


class StudyError(ValueError):
    """A study that cannot be used or gave no result; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a worker needs.

    Attributes:
        problem: What is tuned.
        location: Where the study is kept, see ``located``.
        study: Its name.
        seed: Of the sampler.
        at_once: How many trials run at the same time.
    """

    problem: Problem
    location: str
    study: str
    seed: int
    at_once: int = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a study is.

    Attributes:
        complete: Trials that were scored to the end.
        pruned: Trials that were given up: after some groups they were worse than half of the others.
        unfit: Trials with options that cannot be trained with.
        best: The least objective so far; None when there is none.
        default: That of the default options; None when it is not there yet.
    """

    complete: int
    pruned: int
    unfit: int
    best: float | None
    default: float | None

    @property
    def done(self) -> int:
        """Trials that need not be done again."""
        return self.complete + self.pruned + self.unfit


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a study found.

    Attributes:
        progress: How many trials.
        best: The options with the least objective on the inner groups.
        default: The options used without tuning.
        best_score: Score of the best on the inner groups, each held out in turn; optimistic, as the best of many.
        default_score: Score of the default options on the same.
        best_unseen: Score of the best on groups that the study never saw.
        default_unseen: Score of the default options on the same.
        objective: Name of the metric that was to be small.
    """

    progress: Progress
    best: Options
    default: Options
    best_score: FoldScore
    default_score: FoldScore
    best_unseen: FoldScore
    default_unseen: FoldScore
    objective: str

    @property
    def holds(self) -> bool:
        """Whether the best options are also better on groups that the study never saw."""
        return self.best_unseen.metrics[self.objective] < self.default_unseen.metrics[self.objective]

    @property
    def chosen(self) -> Options:
        """What to train with: the best options where their gain holds, else the default."""
        return self.best if self.holds else self.default


def quiet() -> None:
    """Keep optuna from writing about every trial; what matters is told by progress and errors."""
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)


def located(where: str, study: str) -> str:
    """Return where a study is kept: ``where`` is a database URL, a file ``*.journal``, or a folder for SQLite files.

    Raises:
        StudyError: The folder cannot be made.
    """
    if "://" in where or where.endswith(JOURNAL_SUFFIX):
        return where
    folder = Path(where)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StudyError(f"storage: {where} is not accepted ({error.strerror}); give a folder or a URL") from error
    return f"sqlite:///{folder.resolve() / study}.db"


@contextmanager
def opened(plan: Plan) -> Iterator[optuna.Study]:
    """Open the study of a plan; it is made where there is none, with the default options as its first trial.

    Raises:
        StudyError: The storage cannot be used, or its study belongs to other data or another question.
    """
    with _said_clearly(plan.location):
        storage = _storage(plan.location)
    try:
        with _said_clearly(plan.location):
            study = _study(plan, storage)
        yield study
    finally:
        if isinstance(storage, RDBStorage):
            storage.remove_session()
            storage.engine.dispose()


def _storage(location: str) -> BaseStorage:
    if location.endswith(JOURNAL_SUFFIX):
        return JournalStorage(JournalFileBackend(location))
    sqlite = location.startswith("sqlite")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # heartbeats, for years
        storage = RDBStorage(
            location,
            engine_kwargs={"connect_args": {"timeout": BUSY_S}} if sqlite else {},
            heartbeat_interval=HEARTBEAT_S,
            grace_period=DEAD_AFTER_S,
            heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(RETRIES),
        )
    if sqlite:
        _locked_from_the_start(storage.engine)
    return storage


def _locked_from_the_start(engine: sqlalchemy.Engine) -> None:
    """Have every transaction on SQLite hold its lock from its beginning.

    SQLite locks nothing for reading, so of a trial that waits two workers would both read that it does, and do it.
    """

    @sqlalchemy.event.listens_for(engine, "connect")
    def _(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # Python's own BEGIN comes too late

    @sqlalchemy.event.listens_for(engine, "begin")
    def _(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()  # connections from before


def _study(plan: Plan, storage: BaseStorage) -> optuna.Study:
    study = optuna.create_study(
        study_name=plan.study,
        storage=storage,
        direction="minimize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=NEVER_PRUNED, n_warmup_steps=LEAST_FOLDS - 1),
    )
    trials = study.get_trials(deepcopy=False)
    # A sampler that begins again with the same seed would draw the same first trials again.
    study.sampler = optuna.samplers.TPESampler(
        n_startup_trials=FIRST_RANDOM, seed=plan.seed + 7919 * len(trials), constant_liar=plan.at_once > 1
    )
    known, wanted = study.user_attrs.get(_IDENTITY), dict(plan.problem.identity)
    if known is None and not trials:
        study.set_user_attr(_IDENTITY, wanted)
    elif not isinstance(known, dict):
        raise StudyError(
            f"study: {plan.study!r} in {plan.location} was not made by 'cotenant tune'; give another --study"
        )
    else:
        _check_identity(plan, known, wanted)
    hopeful = (TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING)
    if not any(trial.user_attrs.get(_DEFAULT) and trial.state in hopeful for trial in trials):
        study.enqueue_trial(dict(plan.problem.default()), user_attrs={_DEFAULT: True})
    return study


def _check_identity(plan: Plan, known: dict[str, Any], wanted: dict[str, Any]) -> None:
    first = ("kind", "data", "quantity", "mode", "seed")  # what the user said, before what follows from it
    for name in sorted({*known, *wanted}, key=lambda key: (first.index(key) if key in first else len(first), key)):
        if known.get(name) != wanted.get(name):
            raise StudyError(
                f"study: {plan.study!r} in {plan.location} belongs to another {name}: {known.get(name)!r}, "
                f"not {wanted.get(name)!r}; give another --study, or what it was made with"
            )


@contextmanager
def _said_clearly(location: str) -> Iterator[None]:
    """Turn whatever is wrong with a storage into one error that names it."""
    try:
        yield
    except StudyError:
        raise
    except (
        sqlalchemy.exc.SQLAlchemyError,
        optuna.exceptions.OptunaError,
        OSError,
        ImportError,
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
    ) as error:
        text = (str(error).splitlines() or [""])[0]
        raise StudyError(
            f"storage: {location} cannot be used ({type(error).__name__}: {text}); "
            "give another --storage, or move the file away to start anew"
        ) from error


def one_trial(plan: Plan, study: optuna.Study, worker: str) -> None:
    """Do one trial: one that waits, else one with options that the sampler chooses.

    Args:
        plan: Of the study.
        study: Opened here.
        worker: Who does it; when that one is dead its trial can be found by this name.
    """

    def objective(trial: optuna.Trial) -> float:
        trial.set_user_attr(_WORKER, worker)
        try:
            return _scored(plan.problem, trial)
        except _UNFIT as error:
            trial.set_user_attr(_ERROR, f"{type(error).__name__}: {error}")
            raise

    study.optimize(objective, n_trials=1, catch=_UNFIT)


def _scored(problem: Problem, trial: optuna.Trial) -> float:
    options = problem.suggest(trial)
    folds: list[FoldScore] = []
    value = 0.0
    for step, fold in enumerate(problem.folds(options)):
        folds.append(fold)
        value = combined(folds).metrics[problem.objective]
        trial.report(value, step)
        last = len(folds) == problem.steps
        if not last and not trial.user_attrs.get(_DEFAULT) and trial.should_prune():
            raise optuna.TrialPruned
    trial.set_user_attr(_SCORE, asdict(combined(folds)))
    return value


def bury(study: optuna.Study, workers: Container[str]) -> int:
    """Fail the running trials of workers that are dead, and put them back into the queue unless that was tried twice.

    Returns:
        How many there were. A trial whose end was noted while this looked is not among them.
    """
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return sum(put_back(study, trial) for trial in running if trial.user_attrs.get(_WORKER) in workers)


def nameless(study: optuna.Study) -> list[FrozenTrial]:
    """Return the running trials whose worker has not left its name yet: it does so just after it has begun."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return [trial for trial in running if _WORKER not in trial.user_attrs]


def put_back(study: optuna.Study, trial: FrozenTrial) -> bool:
    """Fail a trial and put it back into the queue unless that was tried twice; False when it has ended meanwhile."""
    try:
        failed = study.tell(trial.number, state=TrialState.FAIL)
    except (optuna.exceptions.UpdateFinishedTrialError, ValueError):  # ended before, or in the middle of, telling
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        RetryHeartbeatStaleTrialCallback(RETRIES)(study, failed)
    return True


def progress(study: optuna.Study) -> Progress:
    """Count the trials of a study."""
    trials = study.get_trials(deepcopy=False)
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    return Progress(
        len(complete),
        sum(trial.state is TrialState.PRUNED for trial in trials),
        sum(trial.state is TrialState.FAIL and _ERROR in trial.user_attrs for trial in trials),
        min((_value(trial) for trial in complete), default=None),
        next((_value(trial) for trial in complete if trial.user_attrs.get(_DEFAULT)), None),
    )


def outcome(plan: Plan, study: optuna.Study) -> Outcome:
    """Say what a study found, and score it on the groups that it never saw.

    Raises:
        StudyError: Nothing, or not even the default options, could be scored.
    """
    trials = study.get_trials(deepcopy=False)
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    usual = next((trial for trial in complete if trial.user_attrs.get(_DEFAULT)), None)
    if usual is None:
        errors = [trial.user_attrs[_ERROR] for trial in trials if _ERROR in trial.user_attrs]
        why = f": {errors[0]}" if errors else " yet; give the study more time or trials"
        raise StudyError(f"the default options could not be scored{why}")
    best = min(complete, key=lambda trial: (_value(trial), not trial.user_attrs.get(_DEFAULT), trial.number))
    return Outcome(
        progress(study),
        dict(best.params),
        dict(usual.params),
        FoldScore(**best.user_attrs[_SCORE]),
        FoldScore(**usual.user_attrs[_SCORE]),
        plan.problem.unseen(best.params),
        plan.problem.unseen(usual.params),
        plan.problem.objective,
    )


def _value(trial: FrozenTrial) -> float:
    assert trial.value is not None  # it is complete
    return trial.value
