"""A problem of no cost to tune. It imports little, for processes that are started only to work on it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import optuna

from cotenant.forecasting.training.scores import FoldScore


@dataclass
class Toy:
    """A problem of no cost: the objective is (x - 3)²; above ``cliff`` it cannot be trained with."""

    data: str = "d1"
    cliff: float = 1e9
    deadly: str = ""  # a file; whoever finds it there deletes it and dies
    seen: list[float] = field(default_factory=list)

    kind: Literal["interference", "demand"] = "interference"
    objective = "error"
    inner = ("a", "b", "c", "d")
    outer = ("e",)
    steps = 4

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {"kind": self.kind, "data": self.data, "seed": 0}

    def default(self) -> Mapping[str, Any]:
        return {"x": 1.0}

    def suggest(self, trial: optuna.Trial) -> Mapping[str, Any]:
        return {"x": trial.suggest_float("x", -10.0, 10.0)}

    def folds(self, options: Mapping[str, Any]) -> Iterator[FoldScore]:
        x = float(options["x"])
        self.seen.append(x)
        if x > self.cliff:
            raise ValueError(f"x: {x} cannot be trained with")
        for group in self.inner:
            if self.deadly and group == "b" and Path(self.deadly).exists():
                Path(self.deadly).unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            yield FoldScore(group, 1, {"error": (x - 3.0) ** 2}, {"simple": 4.0})

    def unseen(self, options: Mapping[str, Any]) -> FoldScore:
        return FoldScore("e", 1, {"error": (float(options["x"]) - 2.5) ** 2}, {"simple": 5.0})


class Murderous(Toy):
    """Nobody survives it."""

    def folds(self, options: Mapping[str, Any]) -> Iterator[FoldScore]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().folds(options)
