"""The demo behind ``make run``: real training jobs, one per device, in static halves, then packed by cotenant, twice.

First it packs with the predictors that cotenant began with, then with the present ones. Everything is measured on this
machine. Ray runs here too and asks for a token; jobs are the programs in ``examples/workloads``, which know nothing of
cotenant; devices are slices of real cores (the ``cpu`` backend).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from demo_demand import compare_forecasts
from demo_figures import Mode, figures
from demo_progress import NoProgressError, Standing
from demo_report import render_console, write_html
from demo_sets import compare_sets
from demo_values import MODES, PACKED
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cotenant.scheduler.names import prepare_ray_environment

# How predictions are made, and the modes that run so. Cotenant is started anew in between; what it has learnt stays.
STAGES = (
    ({"demand": "ewquantile", "interference": "rule", "cold_start": False, "retrain": False},
     ("exclusive", "static", "first")),
    ({"retrain": False}, ("cotenant",)),  # the rest as it comes; a training would take the machine from the jobs
)  # fmt: skip
TITLES = {name: f"{place}/{len(MODES)} {title}" for place, (name, title) in enumerate(MODES.items(), start=1)}
POLL_S = 0.5
EXPLAIN_EVERY_S = 3.0
EXAMPLES = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class DemoJob:
    """One job of the mix."""

    name: str
    family: str
    command: tuple[str, ...]
    hints: Mapping[str, Any]


def main() -> int:
    """Run the demo; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="where report.html and report.json go")
    parser.add_argument("--mix", type=Path, default=EXAMPLES.parent / "configs" / "demo.yaml", help="the jobs")
    arguments = parser.parse_args()
    console = Console()
    out = arguments.out.resolve()
    mix = load_mix(arguments.mix)
    started = time.monotonic()
    try:
        modes = run_modes(mix, out, console)
    except NoProgressError as error:
        console.print(f"[red]given up without a report: {error}[/red]")
        return 1
    report = figures(modes, {job.name: job.family for job in mix})
    report.update(comparison(modes, out), **context(), seconds=round(time.monotonic() - started, 1))
    (out / "report.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    write_html(report, out / "report.html")
    console.print(render_console(report))
    console.print(f"\nreport: {out / 'report.html'}\nfigures: {out / 'report.json'}")
    failed = [run["name"] for mode in report["modes"].values() for run in mode["runs"] if run["state"] != "SUCCEEDED"]
    if failed:
        console.print(f"[red]jobs that did not succeed: {', '.join(failed)}[/red]")
    return 1 if failed else 0


def load_mix(path: Path) -> list[DemoJob]:
    """Read the demo's jobs."""
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return [
        DemoJob(
            name=job["name"],
            family=job["family"],
            command=(sys.executable, *(str(word) for word in job["command"])),
            hints=job.get("hints", {}),
        )
        for job in jobs
    ]


def run_modes(mix: Sequence[DemoJob], out: Path, console: Console) -> list[Mode]:
    """Bring up Ray and cotenant with two devices and run the mix once per mode."""
    state = out / "state"
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir(parents=True)
    os.environ["COTENANT_HOME"] = str(state)
    prepare_ray_environment(local=True)
    import ray  # noqa: PLC0415 - after the environment it reads is set

    from cotenant.actors import cluster  # noqa: PLC0415
    from cotenant.configs.settings import (  # noqa: PLC0415
        ApiSettings,
        DeviceSettings,
        PredictionSettings,
        Settings,
    )
    from cotenant.scheduler.client import Client  # noqa: PLC0415

    console.print("starting Ray and cotenant on this machine …")
    ray.init(
        address="local", num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        namespace="cotenant",
    )  # fmt: skip
    modes: list[Mode] = []
    try:
        for number, (prediction, names) in enumerate(STAGES):
            settings = Settings(
                device=DeviceSettings(backend="cpu", count=2),
                api=ApiSettings(enabled=False),
                prediction=PredictionSettings(**prediction),
            )
            up = cluster.up(None, False, settings, None)
            if number == 0:
                console.print(f"cotenant runs on {up.hosts} host with {up.gpus} devices (each one CPU core)")
            with Client.connect() as client:
                modes += [run_mode(client, mode, mix, console) for mode in names]
            cluster.down(force=False)
        return modes
    finally:
        ray.shutdown()


def comparison(modes: Sequence[Mode], out: Path) -> dict[str, Any]:
    """Return how the first and the present predictors do on the same sets of jobs and the same windows."""
    from cotenant.forecasting.datasets.registry import (  # noqa: PLC0415 - heavy, and only wanted at the end
        SHIPPED,
        ModelFileError,
        Registry,
        load_interference,
    )
    from cotenant.forecasting.interference import UtilisationRule  # noqa: PLC0415

    learned, note = None, ""
    try:
        learned = load_interference(Registry(out / "state" / "models"), SHIPPED).predictor()
    except ModelFileError as error:
        note = f"The shipped interference model cannot be used: {error}"
    return {
        "sets": compare_sets(modes, {"first": UtilisationRule(), "cotenant": learned}),
        "demand": compare_forecasts(modes),
        "note": note,
    }


def run_mode(client: Any, mode: str, mix: Sequence[DemoJob], console: Console) -> Mode:
    """Submit the whole mix under one policy, wait for the end, and collect what was measured."""
    from cotenant.scheduler.hints import parse_hints  # noqa: PLC0415 - see run_modes

    tuning = client.tuning()
    policy = "cotenant" if mode in PACKED else mode
    placement = tuning.placement.model_copy(update={"policy": policy})
    client.set_tuning(tuning.model_copy(update={"placement": placement}))
    begun, busy_before = time.time(), busy_core_s()
    specs = [client.spec(job.command, parse_hints(job.hints, begun), name=job.name, cwd=str(EXAMPLES)) for job in mix]
    names = {spec.job_id: job.name for spec, job in zip(specs, mix, strict=True)}
    client.submit_many(specs)
    explanations: dict[str, str] = {}
    ended: set[str] = set()
    if not console.is_terminal:
        console.print(TITLES[mode])
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[running]}"))  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(TITLES[mode], total=len(mix), running="")
        standing, ask_again = Standing(mode, time.monotonic()), 0.0
        while True:
            views = [view for view in client.jobs(limit=len(mix)) if view.job_id in names]
            running = ", ".join(sorted(view.name for view in views if view.state == "RUNNING"))
            progress.update(bar, completed=sum(view.state.terminal for view in views), running=running)
            if time.monotonic() >= ask_again:  # watching must not cost what is watched
                ask_again = time.monotonic() + EXPLAIN_EVERY_S
                waiting = [view for view in views if view.state == "QUEUED"]
                explanations.update({view.name: client.explain(view.job_id).summary for view in waiting})
            for view in views:
                if view.state.terminal and view.job_id not in ended:
                    ended.add(view.job_id)
                    if not console.is_terminal:  # a log shows progress line by line
                        console.print(f"  {time.time() - begun:5.1f} s  {view.name} {view.state}")
            if len(ended) == len(mix):
                break
            standing.look(views, time.monotonic())
            time.sleep(POLL_S)
        progress.update(bar, running="")
    return Mode(
        name=mode,
        begun=begun,
        views=views,
        windows=client.windows(list(names)),
        devices=client.device_series(),
        waiting=explanations,
        busy_core_s=busy_core_s() - busy_before,
        elapsed_s=time.time() - begun,
        gpu_types={gpu.gpu_id: gpu.gpu_type for gpu in client.gpus()},
        serving=next((part.note for part in client.health().components if part.name == "models"), ""),
    )


def busy_core_s() -> float:
    """Return the CPU seconds that all processes of this machine have used since it started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def context() -> dict[str, Any]:
    """Return what the figures were measured with."""
    packages = ("cotenant", "ray", "torch")
    return {
        "commit": commit(),
        "machine": {"cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}},
    }


def commit() -> str | None:
    """Return the commit of this checkout, with ``-dirty`` where files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine
        return None
    return answer.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
