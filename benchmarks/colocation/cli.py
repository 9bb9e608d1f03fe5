"""The command line of the measurement suite."""

from __future__ import annotations

import argparse
import errno
import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.colocation import console, summary
from benchmarks.colocation.card import Card, add_workload, make_card, settle_card
from benchmarks.colocation.devices import CpuDevice, open_device
from benchmarks.colocation.modes import Mode, modes_for
from benchmarks.colocation.plan import BudgetTooSmall, ModeShares, Request, Timing, Traits, make_plan
from benchmarks.colocation.pool import GIB, Limits, Pool
from benchmarks.colocation.proc import available_memory_bytes
from benchmarks.colocation.process import Launch
from benchmarks.colocation.readings import Device, DeviceError
from benchmarks.colocation.records import Folder, FolderError, Record, finished_visits, read
from benchmarks.colocation.suite import Suite, Task
from benchmarks.colocation.visits import Method

WORKLOADS = "benchmarks.colocation.workloads"
_TABLES = "python -m benchmarks.colocation.tables"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LONGEST_SETTLE_S = 0.5
_SLACK, _SLACK_S = 1.2, 60.0  # without --minutes: what a run may take beyond its plan
_CONTEXT_BYTES = {"cpu": 64 << 20, "cuda": 600 << 20}
_FEWEST_MEMBERS, _MOST_MEMBERS = 3, 40  # an MPS server takes 48 clients
_HOST_BYTES = {"cpu": 450 << 20, "cuda": 5 * GIB // 2}  # of one member, about
_EXTRAS_S = {"cpu": 3.0, "cuda": 6.0}  # operator mix, suspending and resuming
_START_S = {"cpu": 6.0, "cuda": 12.0}


class Stopped(BaseException):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class UsageError(ValueError):
    """An option is not accepted; says which, what was given and what is accepted."""


def main(argv: Sequence[str] | None = None, workloads: str = WORKLOADS) -> int:
    """Run the command.

    Args:
        argv: Its arguments; None takes those of the process.
        workloads: The module with ``catalogue(device)`` and ``build(name, device, torch_device)``.

    Returns:
        The exit code: 0 done, 1 broken off by a failure, 2 not accepted, 128 + n ended by signal n.
    """
    options = _parser().parse_args(argv)
    try:
        _check_numbers(options)
        with ExitStack() as stack:
            device = open_device(options.device, options.dry_run)
            stack.callback(device.close)
            return _with_device(options, device, workloads)
    except (UsageError, DeviceError, FolderError, BudgetTooSmall) as error:
        print(f"error: {_in_words(error)}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: {error}; make room and run the same command again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the first member starts, or while tables are made
        return 128 + signal.SIGINT


@dataclass(frozen=True, slots=True)
class _Setup:
    """The command's options, made sense of on this device.

    Attributes:
        options: As they were given.
        device: The device.
        module: The module with the workloads.
        workloads: Descriptions of the chosen ones by name.
        modes: The chosen modes, the main one first.
        timing: How long things take.
        out: The output folder.
    """

    options: argparse.Namespace
    device: Device
    module: str
    workloads: Mapping[str, Any]
    modes: Sequence[Mode]
    timing: Timing
    out: Path


def _with_device(options: argparse.Namespace, device: Device, module: str) -> int:
    catalogue: Mapping[str, Any] = importlib.import_module(module).catalogue(options.device)
    modes = modes_for(device)
    if options.list:
        _show_lists(catalogue, modes)
        return 0
    setup = _Setup(
        options,
        device,
        module,
        _chosen("--workloads", options.workloads, catalogue),
        _usable_modes(options.modes, modes),
        _timing(options),
        options.out or Path("build/colocation") / options.device,
    )
    if options.plan:
        _show_plan(setup)
        return 0
    with Folder(setup.out) as folder:
        code = _under_signals(lambda: _work(setup, folder))
        console.show_summary(folder.windows, folder.events)
        if folder.windows:
            _make_tables(folder.path)
    return code


def _under_signals(work: Callable[[], None]) -> int:
    """Do the work; a signal ends it in good order. The exit code."""
    cores = os.sched_getaffinity(0)
    # What is ignored, as under nohup, stays ignored.
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _stop) for number in heard}
    try:
        work()
    except Stopped as stopped:
        print(f"\nended by {stopped}: the visit in progress is discarded, all others are kept")
        print("run the same command again to go on", flush=True)
        return 128 + stopped.number
    finally:
        os.sched_setaffinity(0, cores)
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 0


def _work(setup: _Setup, folder: Folder) -> None:
    """Check facts where that is asked for, then measure. Facts alone when no time is given beside them."""
    options = setup.options
    began = time.monotonic()
    method = Method(window_s=setup.timing.window_s, settle_s=setup.timing.settle_s)
    new = make_card(options.device, setup.device.identity(), method.card(), dry_run=options.dry_run)
    card = settle_card(folder.path, new)
    for name, description in setup.workloads.items():
        add_workload(folder.path, card, name, _traits(description))
    if options.facts:
        from benchmarks.colocation import facts  # noqa: PLC0415 - needed for this alone

        limit_s = facts.BUDGET_S if options.minutes is None else min(facts.BUDGET_S, 60.0 * options.minutes)
        facts.run(options.device, folder.path, options.dry_run, budget_s=limit_s)
        if options.minutes is None:
            return
    # A budget that is too small is refused here, before anything starts.
    planned_s = make_plan(_request(setup, folder.windows, folder.events)).seconds
    budget_s = _SLACK * planned_s + _SLACK_S if options.minutes is None else 60.0 * options.minutes
    task = Task(
        {name: description.family for name, description in setup.workloads.items()},
        setup.modes,
        method,
        setup.timing,
        options.occasion,
        began + budget_s,
        matrix_only=options.minutes is None,
    )
    _leave_core(setup.device)
    _run_suite(setup, task, folder, card)


def _run_suite(setup: _Setup, task: Task, folder: Folder, card: Card) -> None:
    launch = Launch(
        setup.options.device, _torch_device(setup.options), _core(setup.device), setup.module, folder.path / "logs"
    )
    pool = Pool(launch, _limits(setup.device))
    suite = Suite(task, folder, card=card, device=setup.device, pool=pool, progress=console.Progress())
    try:
        suite.run()
    finally:
        _deaf()
        suite.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.colocation",
        description="Measure what workloads do alone on a device and how they slow each other down when they share it.",
        epilog="A run can be ended at any time and goes on where it was when the same command is given again.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="one core, or one GPU (default cpu)")
    parser.add_argument("--minutes", type=float, help="time to use (default: enough for every pair in the first mode)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go (default build/colocation/DEVICE)")
    parser.add_argument("--modes", metavar="A,B", help="ways of sharing, the main one first (default: all there are)")
    parser.add_argument("--workloads", metavar="A,B", help="workloads to measure (default: all there are)")
    parser.add_argument("--window", type=float, default=3.0, metavar="S", help="length of a window (default 3)")
    parser.add_argument("--occasion", type=int, default=1, metavar="K", help="number of this repetition (default 1)")
    parser.add_argument(
        "--facts",
        action="store_true",
        help="check what is said about sharing this device; with --minutes, measure in what is left of them",
    )
    parser.add_argument("--plan", action="store_true", help="say what would run and how long it takes; run nothing")
    parser.add_argument("--dry-run", action="store_true", help="cuda: go through everything with tensors on the CPU")
    parser.add_argument("--list", action="store_true", help="list workloads and modes")
    return parser


def _check_numbers(options: argparse.Namespace) -> None:
    if options.minutes is not None and not 0.0 < options.minutes <= 10_000.0:
        raise UsageError(f"--minutes: {options.minutes:g} is not accepted; give a number above 0, at most 10000")
    if not 0.1 <= options.window <= 600.0:
        raise UsageError(f"--window: {options.window:g} is not accepted; give seconds from 0.1 to 600")
    if options.occasion < 1:
        raise UsageError(f"--occasion: {options.occasion} is not accepted; give 1 or more")
    if options.dry_run and options.device != "cuda":
        raise UsageError("--dry-run is for --device cuda; on cpu run it with --window 0.1")


def _chosen(option: str, text: str | None, known: Mapping[str, Any]) -> dict[str, Any]:
    """The named entries in the order given; all of them when nothing is given."""
    if text is None:
        return dict(known)
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        given = ", ".join(map(repr, unknown)) or repr(text)
        raise UsageError(f"{option}: {given} is not accepted; give some of {', '.join(known)}")
    return {name: known[name] for name in names}


def _usable_modes(text: str | None, modes: Mapping[str, Mode]) -> list[Mode]:
    """The named modes, which must all be possible here; all that are possible when nothing is given."""
    chosen = _chosen("--modes", text, modes)
    usable: list[Mode] = []
    reasons: list[str] = []
    for name, mode in chosen.items():
        possible, why = mode.available()
        if possible:
            usable.append(mode)
        else:
            reasons.append(f"{name} cannot be measured here: {why}")
    if reasons and (text is not None or not usable):
        raise UsageError(f"--modes: {'; '.join(reasons)}")
    return usable


def _timing(options: argparse.Namespace) -> Timing:
    return Timing(
        window_s=options.window,
        settle_s=round(min(_LONGEST_SETTLE_S, options.window / 6.0), 3),
        start_s=_START_S[options.device],
        extras_s=options.window + _EXTRAS_S[options.device],
        parallel=_parallel(options.device),
    )


def _parallel(device: str) -> int:
    cores = len(os.sched_getaffinity(0))
    return max(1, min(8, cores // 2)) if device == "cuda" else min(2, cores)


def _request(setup: _Setup, windows: Sequence[Record], events: Sequence[Record]) -> Request:
    alone = summary.solos(windows)
    minutes = setup.options.minutes
    return Request(
        workloads={
            name: Traits(description.family, alone[name].utilisation if name in alone else None)
            for name, description in setup.workloads.items()
        },
        modes=[ModeShares(mode.name, mode.shares, mode.restarts) for mode in setup.modes],
        budget_s=None if minutes is None else 60.0 * minutes,
        matrix_only=minutes is None,
        timing=setup.timing,
        occasion=setup.options.occasion,
        done=finished_visits(windows, events),
        widths=summary.widths(summary.together(windows)),
    )


def _show_plan(setup: _Setup) -> None:
    windows, events = read(setup.out)
    request = _request(setup, windows, events)
    console.show_plan(make_plan(request), len(request.done))
    if not windows:
        print("after the workloads have been measured alone, the order of the pairs follows their utilisation")


def _show_lists(catalogue: Mapping[str, Any], modes: Mapping[str, Mode]) -> None:
    width = max(map(len, catalogue))
    for name, description in catalogue.items():
        traits = _traits(description)
        print(
            f"{name:{width}}  {traits['family']:22}  {traits['kind']:9}  batch {traits['batch']:<5}  {traits['reads']}"
        )
    for name, mode in modes.items():
        possible, why = mode.available()
        print(f"mode {name}" + ("" if possible else f" (not here: {why})"))


def _traits(description: Any) -> dict[str, Any]:
    return {name: getattr(description, name) for name in ("family", "architecture", "batch", "kind", "reads")}


def _torch_device(options: argparse.Namespace) -> str:
    # A member sees its GPU as the only one.
    return "cuda:0" if options.device == "cuda" and not options.dry_run else "cpu"


def _core(device: Device) -> int | None:
    return device.core if isinstance(device, CpuDevice) else None


def _leave_core(device: Device) -> None:
    """Keep this process, and what it starts, off the core that is the device."""
    others = os.sched_getaffinity(0) - {_core(device)}
    if others:
        os.sched_setaffinity(0, others)


def _limits(device: Device) -> Limits:
    """How many members may be warm: as host memory allows, and device memory on a GPU."""
    host_bytes = int(0.8 * available_memory_bytes())
    device_bytes = device.identity().get("memory_bytes")
    return Limits(
        members=max(_FEWEST_MEMBERS, min(_MOST_MEMBERS, host_bytes // _HOST_BYTES[device.name])),
        memory_bytes=host_bytes if device.name == "cpu" else device_bytes and int(0.9 * device_bytes),
        member_bytes=_CONTEXT_BYTES[device.name],
        parallel=_parallel(device.name),
    )


def _make_tables(out: Path) -> None:
    """Make the tables, or say which command makes them where the libraries are."""
    try:
        from cotenant.forecasting.datasets.colocation import DataError, write_tables  # noqa: PLC0415
    except ModuleNotFoundError as error:
        print(f"no tables: {error.name} is not installed here; where it is, run: {_TABLES} {out}")
        return
    try:
        write_tables(out)
    except DataError as error:
        print(f"no tables: {error}", file=sys.stderr)
    else:
        print(f"tables are in {out / 'tables'}")


def _stop(number: int, frame: FrameType | None) -> None:
    del frame
    _deaf()
    raise Stopped(number)


def _deaf() -> None:
    """Let nothing interrupt the cleaning up."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _in_words(error: Exception) -> str:
    if isinstance(error, BudgetTooSmall):
        given, needed = error.budget_s / 60.0, error.needed_s / 60.0
        return (
            f"--minutes: {given:.2g} is not accepted; the next visit needs at least {math.ceil(100 * needed) / 100:g}"
        )
    return str(error)
