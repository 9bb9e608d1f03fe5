"""Three real training programs on one core of this machine, under static thirds and under cotenant, with a real Ray.

Every program runs alone first: that is its solo time, and the earlier run both methods know it by. Then every mix runs
under both methods, one after the other and in turns, so that whatever else the machine does hits both. Measured on a
machine that does other work, the figures say little: a program that does not get its core never reaches its share.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepres import APPLICATIONS, Figures, Found

from cotenant.scheduler.names import prepare_ray_environment

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TIMEOUT_S = 600.0
POLL_S = 0.25
_IC, _OD, _SR = "image_classification", "object_detection", "speech_recognition"
Command = tuple[str, ...]

_AS_FAST_AS_IT_COMPUTES = ("--storage-rate", "100000")

# By mix, the options of each program. What waits for its samples uses, alone on the core these figures are from, about
# .3, .7, .1 of it (steady); what reads as fast as it computes wants all of it, on any machine.
REAL: Mapping[str, Mapping[str, Command]] = {
    "steady": {
        _IC: ("--model", "lenet", "--steps", "300"),
        _OD: ("--steps", "800", "--storage-rate", "350"),
        _SR: ("--steps", "80", "--storage-rate", "60"),
    },
    "one heavy": {
        _IC: ("--model", "lenet", "--steps", "300"),
        _OD: ("--steps", "900", *_AS_FAST_AS_IT_COMPUTES),
        _SR: ("--steps", "80", "--storage-rate", "60"),
    },
    "evaluations": {
        _IC: ("--model", "mobilenet", "--prefetch", "0", "--steps", "200", "--eval-every", "40"),
        _OD: ("--steps", "600", "--eval-every", "120", *_AS_FAST_AS_IT_COMPUTES),
        _SR: ("--steps", "700", "--eval-every", "140", *_AS_FAST_AS_IT_COMPUTES),
    },
}
METHODS: Mapping[str, dict[str, dict[str, object]]] = {
    "static thirds": {"placement": {"policy": "static", "static_slots": APPLICATIONS}},
    "cotenant": {"placement": {"policy": "cotenant"}},
}


def measured(rounds: int = 2) -> Found:
    """Run all mixes ``rounds`` times under each method on one device of this machine; returns the figures."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(COTENANT_HOME=f"{folder}/home", COTENANT_RUN_DIR=f"{folder}/run")
        prepare_ray_environment(local=True)
        import ray  # noqa: PLC0415 - after the environment it reads is set

        from cotenant.actors import cluster  # noqa: PLC0415
        from cotenant.configs.settings import ApiSettings, DeviceSettings, PredictionSettings, Settings  # noqa: PLC0415
        from cotenant.scheduler.client import Client  # noqa: PLC0415
        from cotenant.scheduler.names import NAMESPACE  # noqa: PLC0415

        settings = Settings(
            device=DeviceSettings(backend="cpu", count=1),
            api=ApiSettings(enabled=False),
            prediction=PredictionSettings(retrain=False),  # a training would take the machine from the jobs
        )
        ray.init(address="local", num_gpus=1, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE)
        try:
            cluster.up(None, False, settings, None)
            with Client.connect() as client:
                found = {name: _mix(client, name, programs, rounds) for name, programs in REAL.items()}
            cluster.down(force=True)
        finally:
            ray.shutdown()
    return found


def _mix(client: Any, name: str, programs: Mapping[str, Command], rounds: int) -> dict[str, list[Figures]]:
    client.change_tuning(METHODS["cotenant"])
    solo = {program: _run(client, {program: options})[program] for program, options in programs.items()}
    _say(f"{name}: alone {', '.join(f'{program} {seconds:.0f} s' for program, seconds in solo.items())}")
    found: dict[str, list[Figures]] = {method: [] for method in METHODS}
    for _ in range(rounds):
        for method, changes in METHODS.items():
            client.change_tuning(changes)
            took = _run(client, programs)
            progress = tuple(solo[program] / took[program] for program in programs)
            found[method].append(Figures(sum(solo.values()) / max(took.values()), progress))
            _say(f"{name}: {method} {', '.join(f'{program} {seconds:.0f} s' for program, seconds in took.items())}")
    return found


def _run(client: Any, programs: Mapping[str, Command]) -> dict[str, float]:
    """Submit the programs together; returns how many seconds after that each had ended."""
    from cotenant.scheduler.hints import parse_hints  # noqa: PLC0415 - see measured

    hints = parse_hints({"max_slowdown": APPLICATIONS}, time.time())
    specs = [
        client.spec([sys.executable, f"workloads/{program}.py", *options], hints, name=program, cwd=str(EXAMPLES))
        for program, options in programs.items()
    ]
    begun = time.time()
    client.submit_many(specs)
    views = _ended(client, [spec.job_id for spec in specs])
    failed = [view.name for view in views if view.state != "SUCCEEDED"]
    if failed:
        raise RuntimeError(f"did not succeed: {', '.join(failed)}")
    return {view.name: (view.ended_at or time.time()) - begun for view in views}


def _ended(client: Any, job_ids: Sequence[str]) -> list[Any]:
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        views = [client.job(job_id) for job_id in job_ids]
        if all(view.state.terminal for view in views):
            return views
        time.sleep(POLL_S)
    raise TimeoutError(f"not all jobs ended within {TIMEOUT_S:g} s")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
