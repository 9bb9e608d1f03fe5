"""One member process: a warm workload that waits on standard input until it is told to run a window.

    python -m benchmarks.colocation.member --workload NAME --device cpu --torch-device cpu --parent PID

Commands come in and answers go out as JSON, one object a line; README.md beside this file lists them. Whatever the
workload prints goes to standard error.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TextIO

from benchmarks.colocation.proc import cpu_clock_s, run_delay_s
from benchmarks.colocation.stepping import run_window

WARM_STEPS = 5
_PR_SET_PDEATHSIG = 1


class Channel:
    """The two lines to the controller, kept apart from what the workload and its helpers read and write."""

    def __init__(self) -> None:
        self._commands: TextIO = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self._answers: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)

    def tell(self, **answer: Any) -> None:
        """Send one object."""
        self._answers.write(json.dumps(answer) + "\n")

    def next(self) -> dict[str, Any] | None:
        """Wait for a command; None when there will be none."""
        line = self._commands.readline()
        return json.loads(line) if line else None


class Runner:
    """Carries out commands on one workload.

    Args:
        workload: What ``build`` gave.
        torch: The torch module, or None for a workload that does without.
        device: ``"cpu"`` or ``"cuda"``: what the member counts as device time.
        torch_device: Where its tensors are.
    """

    def __init__(self, workload: Any, torch: ModuleType | None, device: str, torch_device: str) -> None:
        self._workload = workload
        self._torch = torch
        self._device = device
        self._cuda: Any = torch.cuda if torch is not None and torch_device.startswith("cuda") else None

    def step(self) -> None:
        """One step, its work on the device included."""
        self._workload.step()
        self._workload.synchronize()

    def window(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run one window; see README.md for the answer."""
        helpers = list(self._workload.helper_pids())
        before: dict[str, Any] = {}

        def begin() -> None:
            before["wait"] = run_delay_s()
            before["host"] = cpu_clock_s(helpers)

        self._forget_peak()
        counted = run_window(
            self.step,
            command["start"],
            command["count_from"],
            command["until"],
            duty=command["duty"],
            duty_of_steps=self._device == "cuda",
            on_count=begin,
        )
        on_cpu = self._device == "cpu"
        return {
            "event": "window",
            "steps": len(counted.ends),
            "first_s": counted.ends[0] if counted.ends else None,
            "last_s": counted.ends[-1] if counted.ends else None,
            "step_s": counted.step_s,
            "busy_s": counted.busy_s if on_cpu else None,
            "wait_s": _since(before.get("wait"), run_delay_s()) if on_cpu else None,
            "host_busy_s": _since(before.get("host"), cpu_clock_s(helpers)),
            "memory_bytes": self.memory_bytes(),
        }

    def mix(self, steps: int) -> dict[str, Any]:
        """Shares of the operator classes in the time of ``steps`` steps."""
        return {"event": "mix", **self._workload.operator_mix(steps)}

    def memory_bytes(self) -> int | None:
        """Largest device memory since the last window began; on a core it is the resident memory of this process."""
        if self._cuda is not None:
            return int(self._cuda.max_memory_reserved())
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
        return None

    def _forget_peak(self) -> None:
        if self._cuda is not None:
            self._cuda.reset_peak_memory_stats()
        else:
            with suppress(PermissionError):  # then the peak is that of the process's whole life
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def main(argv: Sequence[str] | None = None) -> None:
    """Build the workload, say so, and carry out commands until there are no more."""
    options = _options(argv)
    channel = Channel()
    _end_with(options.parent)
    _report_failures(channel)
    began = time.monotonic()
    module = importlib.import_module(options.module)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    if options.core is not None:
        pin(options.core)
    imported = time.monotonic()
    workload = module.build(options.workload, options.device, options.torch_device)
    built = time.monotonic()
    runner = Runner(workload, torch, options.device, options.torch_device)
    for _ in range(WARM_STEPS):
        runner.step()
    channel.tell(
        event="ready",
        pid=os.getpid(),
        import_s=imported - began,
        build_s=built - imported,
        warm_s=time.monotonic() - built,
        memory_bytes=runner.memory_bytes(),
    )
    while (command := channel.next()) is not None and command["cmd"] != "quit":
        channel.tell(**(runner.window(command) if command["cmd"] == "run" else runner.mix(command["steps"])))
    workload.close()


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", required=True, help="its name")
    parser.add_argument("--module", default="benchmarks.colocation.workloads", help="where build() is")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True, help="what is shared")
    parser.add_argument("--torch-device", required=True, help="where tensors are, for example cuda:0")
    parser.add_argument("--core", type=int, help="the core to stay on; helper processes run on any other")
    parser.add_argument("--parent", type=int, required=True, help="the controller's process; this one ends with it")
    return parser.parse_args(argv)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when the controller ends, and end at once when it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the controller has ended")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a member that crashes leaves no file


def _report_failures(channel: Channel) -> None:
    """Tell the controller why this process ends, whatever the reason, before the trace goes to standard error."""
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        cause = "out_of_memory" if out_of_memory(error) else "other"
        with suppress(BrokenPipeError):
            channel.tell(event="error", kind=cause, message=f"{kind.__name__}: {error}"[:2000])
        usual(kind, error, trace)

    sys.excepthook = hook


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of the device or of the host, ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in message or "can't allocate memory" in message)


def pin(core: int) -> None:
    """Keep every thread of this process on one core. The workload puts its helper processes on the others."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {core})


def _since(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None else max(0.0, now - before)


if __name__ == "__main__":
    main()
