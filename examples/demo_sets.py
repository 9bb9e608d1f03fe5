"""Compares the predictors of interference on the same sets of jobs, whichever mode chose them. Pure: no I/O, no clock.

How well a predictor does in its own mode depends on the sets it chose there. Here every set that was together for long
enough, in whichever mode, is put to all predictors afterwards, on what was measured of the jobs alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from demo_figures import Mode, saving, steady, step_rate
from demo_values import mean

from cotenant.forecasting.profiles import ProfileBook
from cotenant.forecasting.types import DemandProfile, InterferencePredictor

LEAST_S = 5.0  # of windows of every member; in less a rate says little
SETTLING_WINDOWS = 2  # after a change of the set: somebody is being started or has ended within the window

Crowd = tuple[str, tuple[str, ...]]  # GPU type, names in order


@dataclass(slots=True)
class _Together:
    """What was measured of one member of a set: steps and seconds, by mode."""

    steps: float
    seconds: dict[str, float]

    def rate(self) -> float:
        return self.steps / sum(self.seconds.values())


def compare_sets(
    modes: Sequence[Mode],
    alone: Mode,
    predictors: Mapping[str, InterferencePredictor | None],
    least_s: float = LEAST_S,
) -> dict[str, Any]:
    """Return what every predictor says of every set that was measured, and by how much it is wrong.

    Args:
        modes: The modes in which jobs were packed.
        alone: The mode in which every job had a device to itself.
        predictors: By name; None = it could not be loaded, and says nothing.
        least_s: Seconds of windows with known step rate that every member of a set needs.

    Returns:
        ``together``: number of sets that ever were; ``rows``: those that were measured; ``members``: theirs;
        ``throughput_error``: mean absolute error of n over all members, by predictor; ``saving_error``: that of the
        packing saving over all sets. None where there is nothing to average.
    """
    profiles = profiles_alone(alone)
    solo = {view.name: step_rate(alone.windows.get(view.job_id, ())) for view in alone.views}
    rows = []
    crowds = _measured(modes)
    for (gpu_type, names), members in sorted(crowds.items()):
        known = {name: rate for name in names if (rate := solo.get(name)) and name in profiles}
        if len(known) < len(names) or any(sum(members[name].seconds.values()) < least_s for name in names):
            continue
        said = {
            key: None if each is None else each.predict([profiles[name] for name in names], gpu_type)
            for key, each in predictors.items()
        }
        measured = [members[name].rate() / known[name] for name in names]
        rows.append(
            {
                "gpu_type": gpu_type,
                "seconds": {mode.name: _shortest(members, names, mode.name) for mode in modes},
                "members": [
                    {
                        "name": name,
                        "measured": measured[i],
                        "predicted": {key: None if each is None else each[i].mid for key, each in said.items()},
                    }
                    for i, name in enumerate(names)
                ],
                "saving": saving(1.0, sum(measured)),
                "saving_predicted": {
                    key: None if each is None else saving(1.0, sum(one.mid for one in each))
                    for key, each in said.items()
                },
            }
        )
    return {
        "least_s": least_s,
        "together": len(crowds),
        "rows": rows,
        "members": sum(len(row["members"]) for row in rows),
        "throughput_error": {key: _throughput_error(rows, key) for key in predictors},
        "saving_error": {key: _saving_error(rows, key) for key in predictors},
    }


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


def _measured(modes: Iterable[Mode]) -> dict[Crowd, dict[str, _Together]]:
    """Return every set of two or more that was on one GPU, with what was measured of its members while all trained."""
    found: dict[Crowd, dict[str, _Together]] = {}
    for mode in modes:
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
            members = found.setdefault(crowd, {name: _Together(0.0, {}) for name in crowd[1]})
            if settled and all((job_id, window.start_s) in training for job_id, window in windows.items()):
                for job_id, window in windows.items():
                    if window.step_rate is not None:
                        member = members[names[job_id]]
                        member.steps += window.step_rate * window.window_s
                        member.seconds[mode.name] = member.seconds.get(mode.name, 0.0) + window.window_s
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


def _shortest(members: Mapping[str, _Together], names: Sequence[str], mode: str) -> float:
    return min(members[name].seconds.get(mode, 0.0) for name in names)


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
