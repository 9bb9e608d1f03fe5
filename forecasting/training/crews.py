"""Who does the trials of a study: this process, several processes of this machine, or tasks of a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Protocol, cast

import optuna

from cotenant.forecasting.training.studies import (
    Plan,
    Progress,
    StudyError,
    bury,
    nameless,
    one_trial,
    opened,
    progress,
    put_back,
    quiet,
)

LOOK_EVERY_S = 1.0  # how often progress is told while trials run
NAMELESS_S = 3.0  # from the beginning of a trial until its worker has left its name, at most
MOST_DEATHS = 3  # of workers without any trial done in between

Told = Callable[[Progress], None]


class WorkerDied(Exception):
    """Workers ended in the middle of their trials; these were put back into the queue."""


class Crew(Protocol):
    """Does trials.

    Attributes:
        at_once: How many at the same time.
    """

    at_once: int

    @property
    def busy(self) -> int:
        """How many trials were begun and are not over."""
        ...

    def begin(self) -> None:
        """Begin one more trial."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until some trial is over, at most for so long.

        Raises:
            WorkerDied: A worker died; what it did is in the queue again.
        """
        ...

    def close(self) -> None:
        """End at once; trials that are not over are put back into the queue."""
        ...


def run(study: optuna.Study, crew: Crew, trials: int, timeout_s: float | None, told: Told) -> None:
    """Have trials done until the study has so many; those of an earlier run count. Closes the crew.

    Args:
        study: The study.
        crew: Who does them.
        trials: How many the study is to have.
        timeout_s: After so many seconds no further trial begins; None = no limit.
        told: Told how far it is, about once a second.

    Raises:
        StudyError: Workers keep dying.
    """
    begun, deaths = time.monotonic(), 0
    try:
        while True:
            now = progress(study)
            told(now)
            in_time = timeout_s is None or time.monotonic() - begun < timeout_s
            while in_time and crew.busy < min(crew.at_once, trials - now.done):
                crew.begin()
            if not crew.busy:
                return
            try:
                crew.wait(LOOK_EVERY_S)
            except WorkerDied as error:
                deaths = deaths + 1 if progress(study).done == now.done else 1
                if deaths > MOST_DEATHS:
                    raise StudyError(f"workers: {error}, {deaths} times in a row; see their output") from error
    finally:
        crew.close()
        _bury_nameless(study)


def _bury_nameless(study: optuna.Study) -> None:
    """Put back what a worker had begun that was killed before it left its name: those that stay without one."""
    end = time.monotonic() + NAMELESS_S
    while (found := nameless(study)) and time.monotonic() < end:
        time.sleep(0.05)  # workers of another run of the study are about to leave theirs
    for trial in found:
        put_back(study, trial)


class Alone:
    """This process does the trials, one by one."""

    at_once = 1

    def __init__(self, plan: Plan, study: optuna.Study) -> None:
        self._plan, self._study = plan, study
        self._name = f"{os.uname().nodename}:{os.getpid()}"
        self.busy = 0

    def begin(self) -> None:
        """Note that a trial is to be done."""
        self.busy = 1

    def wait(self, timeout_s: float) -> None:
        """Do it; that takes as long as it takes."""
        one_trial(self._plan, self._study, self._name)
        self.busy = 0

    def close(self) -> None:
        """Put back what was not finished."""
        bury(self._study, {self._name})


@dataclass(slots=True)
class _Worker:
    """One process, the end of the pipe to it, and whether it is at work."""

    name: str
    process: SpawnProcess
    pipe: Connection
    busy: bool = False


class Processes:
    """Several processes of this machine, each on one core."""

    def __init__(self, plan: Plan, study: optuna.Study) -> None:
        self._plan, self._study = plan, study
        self.at_once = plan.at_once
        self._workers: list[_Worker] = []

    @property
    def busy(self) -> int:
        """How many trials were begun and are not over."""
        return sum(worker.busy for worker in self._workers)

    def begin(self) -> None:
        """Begin one more trial, in a process that is free or a new one."""
        worker = next((worker for worker in self._workers if not worker.busy), None) or self._start()
        with suppress(BrokenPipeError):  # it died while it was free; waiting for it tells
            worker.pipe.send(True)
        worker.busy = True

    def wait(self, timeout_s: float) -> None:
        """Wait until some trial is over."""
        pipes = {worker.pipe: worker for worker in self._workers if worker.busy}
        for pipe in connection.wait(list(pipes), timeout_s):
            worker = pipes[cast("Connection", pipe)]
            try:
                worker.pipe.recv()
            except (EOFError, ConnectionResetError) as error:
                self._end(worker)
                raise WorkerDied(f"a process ended with exit code {worker.process.exitcode}") from error
            worker.busy = False

    def close(self) -> None:
        """End the processes at once."""
        for worker in tuple(self._workers):
            worker.process.kill()
            self._end(worker)

    def _start(self) -> _Worker:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        name = uuid.uuid4().hex
        process = context.Process(target=_serve, args=(self._plan, name, there), daemon=True)
        process.start()
        there.close()  # so that the pipe ends when the process does
        worker = _Worker(name, process, here)
        self._workers.append(worker)
        return worker

    def _end(self, worker: _Worker) -> None:
        worker.process.join()
        worker.pipe.close()
        self._workers.remove(worker)
        bury(self._study, {worker.name})


def _serve(plan: Plan, name: str, pipe: Connection) -> None:
    """Do a trial whenever told to, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the first one decides
    if torch := sys.modules.get("torch"):  # which most problems have imported by now
        torch.set_num_threads(1)
    quiet()
    with opened(plan) as study, suppress(EOFError, BrokenPipeError):
        while pipe.recv():
            one_trial(plan, study, name)
            pipe.send(True)
