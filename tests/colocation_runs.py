"""Made-up runs of the measurement suite whose truth is known: what the tables must find again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
WINDOW_S = 3.0
SETTLE_S = 0.5
START_UNIX_S = 1_800_000_000.0


@dataclass(frozen=True)
class Workload:
    """A workload: steps per second and utilisation alone."""

    rate: float
    util: float
    family: str = "resnet"
    memory_bytes: int = 400_000_000


WORKLOADS: Mapping[str, Workload] = {
    "small": Workload(20.0, 0.2, "rl", 300_000_000),
    "medium": Workload(15.0, 0.5, "unet"),
    "large": Workload(30.0, 0.8, "resnet"),
    "huge": Workload(25.0, 0.95, "bert", 900_000_000),
}


def true_n(names: Sequence[str], slot: int, share: float | None = None) -> float:
    """The truth: half of the excess over 1 is paid by everybody, and the heavier of two pays a little more."""
    utils = [WORKLOADS[name].util for name in names]
    excess = max(0.0, math.fsum(utils) - 1.0)
    n = 1.0 / (1.0 + 0.5 * excess + 0.1 * excess * (utils[slot] - sum(utils) / len(utils)))
    return n if share is None else min(n, share / utils[slot])


@dataclass
class Machine:
    """Writes the files of one run.

    Attributes:
        seed: Of the noise.
        run_id: Name of the run.
        gpu_type: Type of the device.
        noise: Standard deviation of the log of one window's rate.
        luck: Standard deviation of the log of one member's throughput from occasion to occasion.
        drift: Relative speed of the device by seconds since the start.
        card: Fields of the card that differ from the usual ones.
    """

    seed: int = 0
    run_id: str = "run-1"
    gpu_type: str = "toy"
    noise: float = 0.005
    luck: float = 0.01
    drift: Callable[[float], float] = lambda seconds: 1.0
    card: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    extras: list[Row] = field(default_factory=list)
    begin_unix_s: float = START_UNIX_S

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._now = self.begin_unix_s

    def solo(self, name: str, occasion: int = 1, mode: str = "timeslice") -> None:
        """Visit a workload alone: three windows and the extras."""
        visit = f"{mode}/{name}#{occasion}"
        for position in range(3):
            self._window(visit, position, [name], 0)
        mix = {"gemm": 0.5, "conv": 0.2, "other": 0.3}
        extra = {"member": name, "mode": mode, "mix": mix, "launches_per_step": 120.0, "start_s": 2.0}
        self.extras.append({"format": 1, **extra})

    def together(
        self,
        names: Sequence[str],
        occasion: int = 1,
        mode: str = "timeslice",
        shares: Sequence[float] | None = None,
        truth: Callable[[Sequence[str], int, float | None], float] = true_n,
    ) -> None:
        """Visit a set: twice each member alone in turn and then all together."""
        held = [None] * len(names) if shares is None else list(shares)
        of_shares = "" if shares is None else ":" + "-".join(f"{100 * share:.0f}" for share in shares)
        visit = f"{mode}{of_shares}/{'+'.join(names)}#{occasion}"
        luck = np.exp(self._rng.normal(0.0, self.luck, len(names)))
        size = len(names)
        for start in (0, size + 1):
            for slot in range(size):
                self._window(visit, start + slot, names, slot)
            together_at = self._now
            for slot in range(size):
                self._now = together_at
                n = truth(names, slot, held[slot]) * float(luck[slot])
                self._window(visit, start + size, names, slot, n=n, share=held[slot])

    def matrix(self, occasions: int = 2, names: Iterable[str] = WORKLOADS, mode: str = "timeslice") -> Machine:
        """Visit every workload alone and every pair, on some occasions."""
        known = list(names)
        for occasion in range(1, occasions + 1):
            for name in known:
                self.solo(name, occasion, mode)
            for i, first in enumerate(known):
                for second in known[i:]:
                    self.together([first, second], occasion, mode)
        return self

    def write(self, folder: Path) -> Path:
        """Write the files to ``folder`` and return it."""
        folder.mkdir(parents=True, exist_ok=True)
        workloads = {
            name: {"family": what.family, "architecture": name, "batch": 32, "kind": "training", "reads": "prefetch"}
            for name, what in WORKLOADS.items()
        }
        card = {
            "format": 1,
            "run_id": self.run_id,
            "device": "cpu",
            "gpu_type": self.gpu_type,
            "gpu_uuid": None,
            "host_cores": 2,
            "memory_bytes": 2**33,
            "torch": "2.13",
            "python": "3.11",
            "date": "2026-11-28",
            "commit": "abc",
            "method": {"window_s": WINDOW_S, "settle_s": SETTLE_S},
            "workloads": workloads,
            "dry_run": False,
            "limits": ["made up"],
        }
        (folder / "card.json").write_text(json.dumps(card | self.card), encoding="utf-8")
        for name, rows in (("windows", self.rows), ("events", self.events), ("solo_extras", self.extras)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return folder

    def _window(self, visit: str, position: int, names: Sequence[str], slot: int, **shared: float | None) -> None:
        """Write one row: alone, or with ``n`` and ``share`` together with the others."""
        what = WORKLOADS[names[slot]]
        n = shared.get("n") or 1.0
        self._now += SETTLE_S
        speed = self.drift(self._now + WINDOW_S / 2 - self.begin_unix_s)
        rate = what.rate * speed * n * math.exp(self._rng.normal(0.0, self.noise))
        step_s = 1.0 / rate
        self.rows.append(
            {
                "format": 1,
                "visit": visit,
                "mode": visit.partition("/")[0].partition(":")[0],
                "kind": "shared" if shared else "solo",
                "position": position,
                "members": list(names),
                "member": names[slot],
                "slot": slot,
                "share": shared.get("share"),
                "started_unix_s": self._now,
                "window_s": WINDOW_S,
                "steps": int(rate * WINDOW_S),
                "rate": rate,
                "step_p10_s": 0.9 * step_s,
                "step_p50_s": step_s,
                "step_p90_s": 1.1 * step_s,
                "step_p99_s": 1.3 * step_s,
                "step_cv": 0.1,
                # The same work in every step: only a faster or slower device changes it.
                "busy_s": rate * WINDOW_S * what.util / (what.rate * speed),
                "util_mean": min(1.0, what.util * n),
                "util_peak": min(1.0, what.util * n * 1.1),
                "wait_s": 0.1,
                "host_busy_s": 0.3,
                "foreign_s": 0.0,
                "memory_bytes": what.memory_bytes,
                "power_w": None,
            }
        )
        self._now += WINDOW_S
