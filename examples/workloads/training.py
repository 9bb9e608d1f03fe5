"""What the training programs share: options, training loop, checkpoints, progress lines, stopping on signals."""

from __future__ import annotations

import argparse
import contextlib
import math
import pickle
import shutil
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

import numpy as np
import torch
from storage import split_address
from torch import nn

CHECKPOINT = "checkpoint.pt"
Metrics = dict[str, float]


class Stateful(Protocol):
    """A module or an optimizer."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class Task(Protocol):
    """One training program, as the loop sees it."""

    def train_step(self) -> Metrics:
        """One step; returns its ``"loss"`` and whatever else is to be shown."""

    def evaluate(self) -> Metrics:
        """Figures on data that was not trained on."""

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds, by name."""


class Supervised(ABC):
    """A task of one network and one optimizer, of which a step goes down the gradient of one loss."""

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = network
        self._optimizer = optimizer

    @abstractmethod
    def loss(self) -> torch.Tensor:
        """The loss on the next batch."""

    @abstractmethod
    def evaluate(self) -> Metrics:
        """See ``Task``."""

    def train_step(self) -> Metrics:
        loss = self.loss()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return {"loss": loss.item()}

    def parts(self) -> dict[str, Stateful]:
        return {"network": self._model, "optimizer": self._optimizer}


@dataclass(frozen=True, slots=True)
class Defaults:
    """Default values of the common options. ``storage_rate`` is in samples/s; None: the program reads no storage."""

    steps: int
    batch: int
    storage_rate: float | None = None


def positive_int(text: str) -> int:
    """An argparse type: a whole number above 0."""
    with contextlib.suppress(ValueError):
        if (value := int(text)) > 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not accepted; give a whole number above 0")


def natural(text: str) -> int:
    """An argparse type: a whole number from 0."""
    with contextlib.suppress(ValueError):
        if (value := int(text)) >= 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not accepted; give a whole number, 0 or above")


def positive(text: str) -> float:
    """An argparse type: a finite number above 0."""
    with contextlib.suppress(ValueError):
        if 0.0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not accepted; give a number above 0")


def address(text: str) -> str:
    """An argparse type: HOST:PORT."""
    try:
        split_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def make_parser(description: str, reads_storage: bool) -> argparse.ArgumentParser:
    """A parser with the options that every program has; ``fill_defaults`` completes what it returns."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=positive_int, help="train until this many steps are done")
    parser.add_argument("--seconds", type=positive, help="stop after this many seconds of training")
    parser.add_argument("--batch", type=positive_int, help="samples per step")
    parser.add_argument("--eval-every", type=natural, default=100, metavar="N", help="steps (0 = never; default 100)")
    parser.add_argument(
        "--checkpoint-every", type=natural, default=100, metavar="N", help="steps (0 = never; default 100)"
    )
    parser.add_argument("--log-every", type=positive, default=2.0, metavar="SECONDS", help="default 2")
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument("--out", type=Path, metavar="DIR", help="for the checkpoint; resumes from the one it has")
    if reads_storage:
        source = parser.add_mutually_exclusive_group()
        source.add_argument("--storage-rate", type=positive, help="samples per second of the storage server")
        source.add_argument("--storage", type=address, metavar="HOST:PORT", help="a storage server that runs already")
        parser.add_argument(
            "--prefetch", type=natural, default=2, help="batches read ahead (0 = read between steps; default 2)"
        )
    return parser


def fill_defaults(args: argparse.Namespace, defaults: Defaults) -> None:
    """Give the options that were not given their defaults, which depend on the model."""
    args.steps = defaults.steps if args.steps is None else args.steps
    args.batch = defaults.batch if args.batch is None else args.batch
    if defaults.storage_rate is not None and args.storage_rate is None:
        args.storage_rate = defaults.storage_rate


def prepare(args: argparse.Namespace) -> None:
    """One compute thread, and the seeds. Call before anything is built."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed % 2**32)


class _Signals:
    """Remembers a SIGTERM or SIGINT during the context; the loop looks between steps."""

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._remember) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.received = number


class _Progress:
    """Prints a line every ``every_s`` seconds: step, and means and steps per second since the last line."""

    def __init__(self, every_s: float, step: int, steps: int) -> None:
        self._every_s = every_s
        self._steps = steps
        self._started = self._line_at = time.perf_counter()
        self._started_step = self._line_step = step
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._recent: deque[float] = deque(maxlen=20)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def add(self, step: int, metrics: Metrics) -> None:
        self._recent.append(metrics["loss"])
        for name, value in metrics.items():
            self._sums[name] += value
        now = time.perf_counter()
        if now - self._line_at < self._every_s:
            return
        done = step - self._line_step
        shown = "  ".join(f"{name} {total / done:.4f}" for name, total in self._sums.items())
        print(f"step {step}/{self._steps}  {shown}  {done / (now - self._line_at):.2f} steps/s", flush=True)
        self._line_at, self._line_step = now, step
        self._sums.clear()

    def evaluation(self, step: int, metrics: Metrics) -> None:
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        print(f"evaluation at step {step}: {shown}", flush=True)

    def summary(self, step: int, loss: float) -> str:
        rate = (step - self._started_step) / self.elapsed_s
        loss = sum(self._recent) / len(self._recent) if self._recent else loss
        return f"{step} steps, {rate:.2f} steps/s, loss {loss:.4f}"


def train(task: Task, args: argparse.Namespace) -> int:
    """Train until ``--steps``, ``--seconds`` or a signal; returns the exit status (128 + number after a signal)."""
    with _Signals() as signals, _output_folder(args.out) as folder:
        checkpoint = folder / CHECKPOINT
        step, loss = _resume(task, checkpoint, args)
        progress = _Progress(args.log_every, step, args.steps)
        while step < args.steps and signals.received is None:
            metrics = task.train_step()
            step += 1
            loss = metrics["loss"]
            if not math.isfinite(loss):
                raise SystemExit(f"the loss is {loss} at step {step}: training has diverged")
            progress.add(step, metrics)
            if args.eval_every and step % args.eval_every == 0:
                progress.evaluation(step, task.evaluate())
            if args.checkpoint_every and step % args.checkpoint_every == 0:
                _save(task, checkpoint, args, step, loss)
            if args.seconds is not None and progress.elapsed_s >= args.seconds:
                break
        summary = progress.summary(step, loss)
        _save(task, checkpoint, args, step, loss)
    if signals.received is not None:
        name = signal.Signals(signals.received).name
        print(f"stopped by {name}, checkpoint written: {summary}", flush=True)
        return 128 + signals.received
    print(f"done: {summary}", flush=True)
    return 0


@contextlib.contextmanager
def _output_folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemExit(
                f"--out: {out} is not accepted ({error.strerror}); give a folder that can be written"
            ) from error
        yield out
        return
    folder = Path(tempfile.mkdtemp(prefix="training-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _save(task: Task, path: Path, args: argparse.Namespace, step: int, loss: float) -> None:
    state = {name: part.state_dict() for name, part in task.parts().items()}
    partial = path.with_suffix(".partial")
    torch.save({"model": vars(args).get("model"), "step": step, "loss": loss, "state": state}, partial)
    partial.replace(path)  # a checkpoint is whole or absent, whenever the program ends


def _resume(task: Task, path: Path, args: argparse.Namespace) -> tuple[int, float]:
    if not path.exists():
        return 0, math.nan
    other = "give another --out"
    try:
        saved = torch.load(path, weights_only=True)
        step, loss, model, state = int(saved["step"]), float(saved["loss"]), saved["model"], saved["state"]
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, TypeError) as error:
        raise SystemExit(f"--out: {path} cannot be read as a checkpoint ({error}); {other}") from error
    parts = task.parts()
    if model != vars(args).get("model") or state.keys() != parts.keys():
        raise SystemExit(f"--out: {path} is the checkpoint of another program or model ({model}); {other}")
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.manual_seed(args.seed + step)
    print(f"resuming at step {step}", flush=True)
    return step, loss
