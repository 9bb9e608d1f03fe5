"""Compares the predictors of interference on the same sets of jobs, whichever mode chose them. Pure: no I/O, no clock.

How well a predictor does in its own mode depends on the sets it chose there. Here every set that was together for long
enough, in either packed mode, is put to all predictors afterwards, on what was measured of the jobs alone. A predictor
that learns is told first what was measured of sets in earlier modes, as it is in the running system, and nothing later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from demo_figures import Mode, saving, steady, step_rate
from demo_values import PACKED, mean

from cotenant.forecasting.interference.evidence import EvidenceBook
from cotenant.forecasting.interference.observations import Observation
from cotenant.forecasting.pairing import PairTracker
from cotenant.forecasting.profiles import ProfileBook
from cotenant.forecasting.types import DemandProfile, InterferencePredictor, Signature
from cotenant.scheduler.core.models import Informable

LEAST_S = 5.0  # of windows of every member; in less a rate says little
SETTLING_WINDOWS = 2  # after a change of the set: somebody is being started or has ended within the window

Crowd = tuple[str, tuple[str, ...]]  # GPU type, names in order


@dataclass(frozen=True, slots=True)
class Alone:
    """What was measured of a job that had a device to itself; the rate in steps per second."""

    profile: DemandProfile
    rate: float


@dataclass(slots=True)
class _Together:
    """What was measured of one member of a set."""

    steps: float = 0.0
    seconds: float = 0.0

    def rate(self) -> float:
        return self.steps / self.seconds


def compare_sets(
    modes: Sequence[Mode],
    predictors: Mapping[str, InterferencePredictor | None],
    least_s: float = LEAST_S,
) -> dict[str, Any]:
    """Return what every predictor says of every set that was measured, and by how much it is wrong.

    Args:
        modes: In the order in which they ran; in the first one every job had a device to itself.
        predictors: By name; None = it could not be loaded, and says nothing.
        least_s: Seconds of windows with known step rate that every member of a set needs.

    Returns:
        ``together``: number of different sets that ever were; ``rows``: those that were measured, once for every packed
        mode they were measured in; ``members``: theirs; ``throughput_error``: mean absolute error of n over all
        members, by predictor; ``saving_error``: that of the packing saving over all rows. None where there is nothing
        to average.
    """
    alone = modes[0]
    profiles = profiles_alone(alone)
    rates = {view.name: step_rate(alone.windows.get(view.job_id, ())) for view in alone.views}
    known = {name: Alone(profiles[name], rate) for name, rate in rates.items() if rate and name in profiles}
    rows, crowds, told = [], set(), EvidenceBook()
    for mode in modes:
        if mode.name in PACKED:
            measured = _measured(mode)
            crowds.update(measured)
            informed = {key: _informed(each, told) for key, each in predictors.items()}
            rows += [
                {"mode": mode.name, **_row(gpu_type, members, known, informed)}
                for (gpu_type, names), members in sorted(measured.items())
                if known.keys() >= set(names) and min(each.seconds for each in members.values()) >= least_s
            ]
        for each in _shown(mode, profiles):
            told.add(each)
    return {
        "least_s": least_s,
        "together": len(crowds),
        "rows": rows,
        "members": sum(len(row["members"]) for row in rows),
        "throughput_error": {key: _throughput_error(rows, key) for key in predictors},
        "saving_error": {key: _saving_error(rows, key) for key in predictors},
    }


def _row(
    gpu_type: str,
    members: Mapping[str, _Together],
    alone: Mapping[str, Alone],
    predictors: Mapping[str, InterferencePredictor | None],
) -> dict[str, Any]:
    """Return what was measured and what is predicted of one set."""
    profiles = [alone[name].profile for name in members]
    said = {key: None if each is None else each.predict(profiles, gpu_type) for key, each in predictors.items()}
    measured = [each.rate() / alone[name].rate for name, each in members.items()]
    return {
        "gpu_type": gpu_type,
        "seconds": min(each.seconds for each in members.values()),
        "members": [
            {
                "name": name,
                "measured": measured[i],
                "predicted": {key: None if each is None else each[i].mid for key, each in said.items()},
            }
            for i, name in enumerate(members)
        ],
        "saving": saving(1.0, sum(measured)),
        "saving_predicted": {
            key: None if each is None else saving(1.0, sum(one.mid for one in each)) for key, each in said.items()
        },
    }


def _informed(predictor: InterferencePredictor | None, told: EvidenceBook) -> InterferencePredictor | None:
    return predictor.with_evidence(told.observations()) if isinstance(predictor, Informable) else predictor


def _shown(mode: Mode, profiles: Mapping[str, DemandProfile]) -> Iterator[Observation]:
    """Yield what a mode's windows show of jobs beside each other, as the running system learns it."""
    tracker = PairTracker()
    jobs = {view.job_id: profiles[view.name] for view in mode.views if view.name in profiles}
    moments: dict[float, list[Signature]] = {}
    for windows in mode.windows.values():
        for window in windows:
            moments.setdefault(window.start_s, []).append(window)
    for start_s, windows in sorted(moments.items()):
        yield from tracker.observe(start_s, windows, jobs, mode.gpu_types)
    for job_id in sorted(jobs):
        yield from tracker.forget(job_id)


def profiles_alone(alone: Mode) -> dict[str, DemandProfile]:
    """Return what was measured of every job alone, by name, as the profiles in the running system say it."""
    book = ProfileBook()
    found = {}
    for view in alone.views:
        for window in alone.windows.get(view.job_id, ()):
            book.observe(window, view.fingerprint)
        profile = book.profile(None, view.fingerprint)
        if profile.source == "history":
            family = view.hints.get("model_family") or ""
            found[view.name] = replace(profile, fingerprint=view.fingerprint, family=family)
    return found


def _measured(mode: Mode) -> dict[Crowd, dict[str, _Together]]:
    """Return every set of two or more that was on one GPU, with what was measured of its members while all trained."""
    found: dict[Crowd, dict[str, _Together]] = {}
    names = {view.job_id: view.name for view in mode.views}
    training = {
        (job_id, window.start_s)
        for job_id, windows in mode.windows.items()
        if job_id in names
        for window in steady(windows)
    }
    for gpu_id, windows, settled in _moments(mode):
        gpu_type = mode.gpu_types.get(gpu_id, "")
        crowd = gpu_type, tuple(sorted(names[job_id] for job_id in windows))
        members = found.setdefault(crowd, {name: _Together() for name in crowd[1]})
        if settled and all((job_id, window.start_s) in training for job_id, window in windows.items()):
            for job_id, window in windows.items():
                if window.step_rate is not None:
                    member = members[names[job_id]]
                    member.steps += window.step_rate * window.window_s
                    member.seconds += window.window_s
    return found


def _moments(mode: Mode) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield, in order, the windows of one moment of one GPU on which several jobs are, and whether the set settled."""
    known = {view.job_id for view in mode.views}
    by_place: dict[tuple[str, float], dict[str, Any]] = {}
    for job_id, windows in mode.windows.items():
        if job_id in known:
            for window in windows:
                by_place.setdefault((window.gpu_id, window.start_s), {})[job_id] = window
    same: dict[str, tuple[frozenset[str], int]] = {}
    for (gpu_id, _), windows in sorted(by_place.items(), key=lambda item: item[0]):
        if any(window.neighbours != len(windows) - 1 for window in windows.values()):
            same.pop(gpu_id, None)  # somebody is there who was not measured: the set is not known
            continue
        members = frozenset(windows)
        before, count = same.get(gpu_id, (members, 0))
        count = count + 1 if before == members else 1
        same[gpu_id] = members, count
        if len(members) > 1:
            yield gpu_id, windows, count > SETTLING_WINDOWS


def _throughput_error(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return mean(
        abs(member["predicted"][key] - member["measured"])
        for row in rows
        for member in row["members"]
        if member["predicted"][key] is not None
    )


def _saving_error(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return mean(
        abs(row["saving_predicted"][key] - row["saving"])
        for row in rows
        if row["saving"] is not None and row["saving_predicted"][key] is not None
    )
