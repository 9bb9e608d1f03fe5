"""Turns what the demo measured into its figures. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from demo_values import PACKED, mean

WARM_UP_WINDOWS = 2  # the first steps of a program are slower (caches, allocator), on every device


@dataclass(frozen=True, slots=True)
class Mode:
    """One run of the mix.

    Attributes:
        name: "exclusive", "static", "first" (packed with the first predictors) or "cotenant" (with the present ones).
        begun: Unix seconds at submission.
        views: The jobs after they ended (``JobView``).
        windows: Job id → its measured windows (``Signature``).
        devices: GPU id → (Unix seconds, utilisation, memory bytes).
        waiting: Job name → the last explanation while it was queued.
        busy_core_s: CPU seconds that all processes of the machine used during the mode.
        elapsed_s: How long the mode took.
        gpu_types: GPU id → its type.
        serving: What predicted, in the scheduler's words.
    """

    name: str
    begun: float
    views: Sequence[Any]
    windows: Mapping[str, Sequence[Any]]
    devices: Mapping[str, Sequence[tuple[float, float | None, float | None]]]
    waiting: Mapping[str, str]
    busy_core_s: float
    elapsed_s: float
    gpu_types: Mapping[str, str] = field(default_factory=dict)
    serving: str = ""


def figures(modes: Sequence[Mode], families: Mapping[str, str]) -> dict[str, Any]:
    """Return the report; ``jobs`` and what follows it are about mode "cotenant", ``packed`` about either packed mode.

    The individual slowdown of a job is its step rate alone (mode "exclusive") over its step rate in a packed mode,
    both from the first to the last step of the run, stalls, evaluations and checkpoints included. The packing saving is
    1 - T_together / T_alone: the time for which devices were occupied in the packed mode over the sum of the jobs'
    run times alone. The predicted saving replaces T_alone by what the predictions say the jobs did in the same time.
    """
    by_name = {mode.name: mode for mode in modes}
    either = {name: _packed(by_name[name], by_name["exclusive"], families) for name in PACKED}
    packed, present = by_name["cotenant"], either["cotenant"]
    return {
        "jobs": present["jobs"],
        "modes": {mode.name: _mode(mode, families) for mode in modes},
        "packed": either,
        "packing_saving_measured": present["saving_measured"],
        "packing_saving_predicted": present["saving_predicted"],
        "unfairness": present["unfairness"],
        "decisions": _decisions(packed),
        "refusals": [{"job": name, "text": _with_names(text, packed)} for name, text in packed.waiting.items()],
    }


def saving(together_s: float, alone_s: float) -> float | None:
    """Return the packing saving of work that takes some time together and some alone."""
    return 1.0 - together_s / alone_s if alone_s > 0 else None


def step_rate(windows: Sequence[Any]) -> float | None:
    """Return steps per second from the first to the last step, warm-up left out; None with too few windows."""
    span = [w for w in steady(windows) if w.step_rate is not None]
    return float(sum(w.step_rate * w.window_s for w in span) / sum(w.window_s for w in span)) if span else None


def steady(windows: Sequence[Any]) -> Sequence[Any]:
    """Return the windows from the first to the last with steps, without the warm-up; none when there are too few."""
    moving = [i for i, window in enumerate(windows) if window.step_rate]
    return windows[moving[WARM_UP_WINDOWS] : moving[-1] + 1] if len(moving) > WARM_UP_WINDOWS else ()


def _packed(mode: Mode, alone: Mode, families: Mapping[str, str]) -> dict[str, Any]:
    """Return what sharing did in one packed mode, as measured and as predicted there."""
    jobs = [_job(view, alone, mode, families) for view in mode.views]
    slowdowns = [job["slowdown_measured"] for job in jobs if job["slowdown_measured"] is not None]
    occupied = _occupied_s(mode)
    measured, predicted = saving(occupied, sum(_run_s(view) for view in alone.views)), saving(occupied, _work_s(mode))
    return {
        "serving": mode.serving,
        "jobs": jobs,
        "saving_measured": measured,
        "saving_predicted": predicted,
        "saving_error": abs(predicted - measured) if predicted is not None and measured is not None else None,
        "throughput_error": mean(_throughput_error(job) for job in jobs if job["neighbours"]),
        "unfairness": max(slowdowns) / min(slowdowns) if slowdowns else None,
    }


def _throughput_error(job: Mapping[str, Any]) -> float | None:
    """Return how far the predicted normalised throughput of a job was off, over its whole run."""
    measured, predicted = job["slowdown_measured"], job["slowdown_predicted"]
    return abs(1.0 / predicted - 1.0 / measured) if measured and predicted else None


def _job(view: Any, alone: Mode, packed: Mode, families: Mapping[str, str]) -> dict[str, Any]:
    solo_view = next(other for other in alone.views if other.name == view.name)
    solo_windows = alone.windows.get(solo_view.job_id, ())
    solo, shared = step_rate(solo_windows), step_rate(packed.windows.get(view.job_id, ()))
    names = {other.job_id: other.name for other in packed.views}
    busy = [window.util_mean for window in solo_windows if window.util_mean is not None and window.step_rate]
    return {
        "name": view.name,
        "family": families[view.name],
        "solo_rate": solo,
        "shared_rate": shared,
        "slowdown_measured": solo / shared if solo and shared else None,
        "slowdown_predicted": _slowdown_predicted(view),
        "max_slowdown": view.hints.get("max_slowdown"),
        "utilisation": sum(busy) / len(busy) if busy else None,
        "neighbours": sorted({names[n] for c in view.colocations for n in c.neighbours}),
    }


def _slowdown_predicted(view: Any) -> float | None:
    """1 / the time-weighted mean of the predicted normalised throughput over the run."""
    spans = [(c.end - c.start, 1.0 / c.slowdown_predicted) for c in view.colocations if c.end is not None]
    total = sum(seconds for seconds, _ in spans)
    return total / sum(seconds * throughput for seconds, throughput in spans) if total > 0 else None


def _mode(mode: Mode, families: Mapping[str, str]) -> dict[str, Any]:
    names = {view.job_id: view.name for view in mode.views}
    ends = [view.ended_at - mode.begun for view in mode.views]
    return {
        "makespan_s": max(ends),
        "mean_completion_s": sum(ends) / len(ends),
        "device_hours": _occupied_s(mode) / 3600.0,
        "foreign_cores": _foreign_cores(mode),
        "runs": [_run(view, mode, names, families) for view in mode.views],
        "devices": {
            gpu_id: [[at - mode.begun, util] for at, util, _ in series if 0 <= at - mode.begun <= max(ends) + 1]
            for gpu_id, series in mode.devices.items()
        },
    }


def _foreign_cores(mode: Mode) -> float:
    """Return the cores that were used by anything but the jobs: Ray, cotenant, and whatever else runs here."""
    by_jobs = sum(
        ((window.util_mean or 0.0) + (window.host_cores or 0.0)) * window.window_s
        for windows in mode.windows.values()
        for window in windows
    )
    return max(0.0, mode.busy_core_s - by_jobs) / mode.elapsed_s if mode.elapsed_s > 0 else 0.0


def _run(view: Any, mode: Mode, names: Mapping[str, str], families: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": view.name,
        "family": families[view.name],
        "device": view.colocations[-1].gpu_id if view.colocations else None,
        "queued_s": view.submitted_at - mode.begun,
        "start_s": view.started_at - mode.begun if view.started_at else None,
        "end_s": view.ended_at - mode.begun,
        "state": str(view.state),
        "neighbours": sorted({names[n] for c in view.colocations for n in c.neighbours}),
        "colocations": [
            {
                "start_s": c.start - mode.begun,
                "end_s": c.end - mode.begun,
                "neighbours": [names[n] for n in c.neighbours],
                "slowdown_predicted": c.slowdown_predicted,
            }
            for c in view.colocations
            if c.end is not None
        ],
    }


def _run_s(view: Any) -> float:
    return float(view.ended_at - view.started_at) if view.started_at else 0.0


def _occupied_s(mode: Mode) -> float:
    """Return device seconds for which at least one job held the device."""
    by_device: dict[str, list[tuple[float, float]]] = {}
    for view in mode.views:
        for c in view.colocations:
            if c.end is not None:
                by_device.setdefault(c.gpu_id, []).append((c.start, c.end))
    return sum(_union_s(spans) for spans in by_device.values())


def _union_s(spans: Sequence[tuple[float, float]]) -> float:
    total, covered = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total


def _work_s(mode: Mode) -> float:
    """Return the solo seconds that the jobs did together, as predicted: sum over jobs of n times its duration."""
    return sum(
        (c.end - c.start) / c.slowdown_predicted for view in mode.views for c in view.colocations if c.end is not None
    )


def _decisions(mode: Mode) -> list[dict[str, Any]]:
    lines = [
        {"job": view.name, "at_s": change.at - mode.begun, "text": _with_names(change.reason, mode)}
        for view in mode.views
        for change in view.history
        if str(change.state) == "STARTING"
    ]
    return sorted(lines, key=lambda line: line["at_s"])


def _with_names(text: str, mode: Mode) -> str:
    """Return the text with the jobs' names in place of their ids."""
    for view in mode.views:
        text = text.replace(view.job_id, view.name)
    return text
