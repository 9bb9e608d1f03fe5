"""Mixes of three applications for one device: image classification, object detection, speech recognition.

Utilisations are of the size that such programs have on the ``cpu`` device and on GPUs (``benchmarks/workloads.py``,
``docs/colocation-cpu.md``): small convolutional networks .2 to .5, detectors .7 to .95, recurrent networks .3 to .6;
reading, evaluating and decoding on the host leave the device to others. The accepted slowdown is 3 for everybody: what
an equal third of the device means for a program that could fill it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from deepres_device import Application, Phase, Work

THREE = {"max_slowdown": 3.0}
LONG_S = 300.0


@dataclass(frozen=True, slots=True)
class Mix:
    """Jobs of three applications. ``equal``: they are alike to their owner, so that fairness can be judged."""

    name: str
    works: tuple[Work, ...]
    equal: bool = True


def mixes(seed: int, length: float = 1.0) -> list[Mix]:
    """Return all mixes; phases, sensitivities and arrivals vary with the seed by up to a fifth.

    Args:
        seed: The seed.
        length: How long jobs are, relative to the full benchmark.
    """
    rng = np.random.default_rng((seed, 5))

    def about(value: float) -> float:
        return value * float(rng.uniform(0.8, 1.2))

    def app(name: str, *phases: tuple[float, float]) -> Application:
        varied = tuple(
            Phase(about(seconds), min(1.0, util * float(rng.uniform(0.95, 1.05)))) for seconds, util in phases
        )
        return Application(name, varied, sensitivity=float(rng.uniform(0.03, 0.09)))

    def together(*apps: Application) -> tuple[Work, ...]:
        return tuple(Work(each, LONG_S, hints=THREE) for each in apps)

    return [_of_length(made(app, about, together), length) for made in _MIXES]


def _of_length(mix: Mix, length: float) -> Mix:
    if length == 1.0 or any(work.submit_s for work in mix.works):  # a stream of short jobs stays as it is
        return mix
    works = (
        replace(work, solo_s=work.solo_s * length, deadline_s=work.deadline_s and work.deadline_s * length)
        for work in mix.works
    )
    return replace(mix, works=tuple(works))


_App = Callable[..., Application]
_About = Callable[[float], float]
_Together = Callable[..., tuple[Work, ...]]


def _steady(app: _App, _about: _About, together: _Together) -> Mix:
    return Mix("steady", together(app("ic", (60, 0.35)), app("od", (60, 0.7)), app("sr", (60, 0.3))))


def _one_heavy(app: _App, _about: _About, together: _Together) -> Mix:
    return Mix("one heavy", together(app("ic", (60, 0.2)), app("od", (60, 0.94)), app("sr", (60, 0.3))))


def _all_heavy(app: _App, _about: _About, together: _Together) -> Mix:
    return Mix("all heavy", together(app("ic", (60, 0.7)), app("od", (60, 0.94)), app("sr", (60, 0.6))))


def _epochs(app: _App, _about: _About, together: _Together) -> Mix:
    return Mix("epochs", together(*_trainings(app)))


def _trainings(app: _App) -> tuple[Application, Application, Application]:
    """Each loads, trains, evaluates and begins again."""
    return (
        app("ic", (8, 0.1), (24, 0.5), (8, 0.3)),
        app("od", (15, 0.15), (45, 0.95), (15, 0.3)),
        app("sr", (12, 0.2), (20, 0.8), (12, 0.1)),
    )


def _bursts(app: _App, _about: _About, together: _Together) -> Mix:
    """Mostly on the host, with bursts that fill the device, as detectors and decoders that work off what came in."""
    return Mix(
        "bursts",
        together(app("ic", (20, 0.08), (6, 0.95)), app("od", (30, 0.1), (15, 0.98)), app("sr", (12, 0.05), (5, 0.9))),
    )


def _unequal(app: _App, about: _About, _together: _Together) -> Mix:
    ic, od, sr = app("ic", (60, 0.4)), app("od", (60, 0.8)), app("sr", (20, 0.5), (10, 0.1))
    return Mix("unequal lengths", (Work(ic, about(120.0), hints=THREE), Work(od, about(400.0), hints=THREE),
                                   Work(sr, about(240.0), hints=THREE)))  # fmt: skip


def _deadlines(app: _App, about: _About, _together: _Together) -> Mix:
    """A training in the background; now and then a detection and a recognition job that have to be done in time."""
    ic, od, sr = app("ic", (10, 0.1), (40, 0.7)), app("od", (30, 0.85)), app("sr", (20, 0.55))
    late = [Work(od, 40.0, about(30.0) + 130.0 * turn, deadline_s=90.0, hints=THREE) for turn in range(4)]
    later = [Work(sr, 30.0, about(50.0) + 90.0 * turn, deadline_s=55.0, hints=THREE) for turn in range(5)]
    return Mix("deadlines", (Work(ic, LONG_S, hints=THREE), *late, *later), equal=False)


def _priorities(app: _App, _about: _About, _together: _Together) -> Mix:
    """The epochs again; recognition is worth more to its owner, with a deadline, classification less."""
    ic, od, sr = _trainings(app)
    return Mix("priorities", (
        Work(ic, LONG_S, hints={**THREE, "priority": "low"}),
        Work(od, LONG_S, hints=THREE),
        Work(sr, LONG_S, deadline_s=450.0, hints={**THREE, "priority": "high"}),
    ), equal=False)  # fmt: skip


_MIXES = (_steady, _one_heavy, _all_heavy, _epochs, _bursts, _unequal, _deadlines, _priorities)
