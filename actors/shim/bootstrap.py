"""What every Python of a job does at its start: as little as possible, until it imports torch.

Jobs start many short-lived Pythons, so this module imports almost nothing; the rest of the shim comes with torch.
Nothing here may change what the job computes, and no failure may stop it: a process whose environment does not fit runs
as if there were no shim, and says so in one line.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would cost more than all of this module
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

TRIGGER = "torch.optim.optimizer"
ATTACH_PREFIX = "attach-"
OPERATOR_MIX = "COTENANT_OPERATOR_MIX"  # "1": profile a few steps now and then
STARTED = "started"  # the whole process belongs to the job, which takes it along when it ends
STOP = "stop.json"  # in the job's directory: it is asked to end
JOINED = "joined"  # the process put itself under the job's share and goes on when the job has ended
OUT_OF_MEMORY = "out-of-memory"  # in the job's directory: one of its processes has ended for want of memory
_WARNED = "COTENANT_SHIM_WARNED"
_HELPER_MARKS = ("--multiprocessing-fork", "from multiprocessing.")


def install() -> None:
    """Prepare this process. Called once, before any of the user's code runs."""
    helper = _is_multiprocessing_helper()
    pinned = os.environ.get("COTENANT_DEVICE") != "cuda"
    if os.environ.get(OPERATOR_MIX) == "1":
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or torch's profiler writes onto the program's stderr
    try:
        if helper and pinned:
            from .memory import lift  # noqa: PLC0415

            os.sched_setaffinity(0, parse_cores(os.environ["COTENANT_HOST_CORES"]))
            lift()
        elif os.environ.pop("COTENANT_ATTACH", "") == "1":
            if not _join_lease(os.environ["COTENANT_JOB_DIR"]):
                return
            if pinned:
                share_index = int(os.environ.get("COTENANT_SHARE_INDEX", "0"))
                os.sched_setaffinity(0, parse_cores(os.environ["COTENANT_CORES"].split(";")[share_index]))
    except (KeyError, OSError, ValueError) as error:
        warn(error)

    def begin(module: Any) -> None:
        try:
            from .attachment import begin  # noqa: PLC0415

            # A helper that turns out to train (torch.multiprocessing.spawn) goes onto the device at its first step.
            begin(module, pin_early=not helper)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the shim, torch must be imported
            warn(error)

    _tell_of_want_of_memory(os.environ["COTENANT_JOB_DIR"])
    when_imported(begin)
    sys.meta_path.append(_LastResort())


def _join_lease(job_dir: str) -> bool:
    """Put this process under a lease; one that is over gives it no GPU, which belongs to others by now."""
    over = False
    try:
        mark(job_dir, STARTED)
        # Whoever ends a lease writes this first and then looks for processes: one of the two sees the other.
        with open(f"{job_dir}/{STOP}", encoding="utf-8") as file:
            over = not _asks(file.read())
    except FileNotFoundError:
        over = not os.path.isdir(job_dir)
    if over:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        _say(f"the lease of {os.environ.get('COTENANT_JOB_ID', 'its job')} is over: this process gets no GPU")
    return not over


def _asks(request: str) -> bool:
    """Whether a request to stop leaves it to the program to save and give the lease back."""
    from json import loads  # noqa: PLC0415 - hardly ever needed

    return bool(loads(request).get("asks"))


def _tell_of_want_of_memory(job_dir: str) -> None:
    """Leave a note when this process ends because an allocation failed, which its share may be to blame for."""
    before = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        if _wants_memory(kind, error):
            try:
                with open(f"{job_dir}/{OUT_OF_MEMORY}", "w", encoding="ascii"):
                    pass
            except OSError:
                pass  # then it ends as any other failure
        before(kind, error, trace)

    sys.excepthook = hook


def _wants_memory(kind: Any, error: Any) -> bool:
    """Whether an error says that there was too little of what the share is of: on a GPU that is its own memory only."""
    text = str(error) if issubclass(kind, RuntimeError) else ""
    if kind.__name__ == "OutOfMemoryError":  # torch's, of a device
        return True
    if os.environ.get("COTENANT_DEVICE") == "cuda":
        return "CUDA out of memory" in text or "CUDA error: out of memory" in text
    return issubclass(kind, MemoryError) or "can't allocate memory" in text


def when_imported(action: Callable[[Any], None]) -> None:
    """Call ``action`` with the module of torch's optimizers when it is there, now or later."""
    if TRIGGER in sys.modules:
        action(sys.modules[TRIGGER])
    else:
        # A finder is whatever has this method; the base class would drag in half of importlib.
        sys.meta_path.insert(0, _TorchWatcher(action))


class _TorchWatcher:
    """Lets the import of torch's optimizers happen as ever and acts when it is done."""

    def __init__(self, action: Callable[[Any], None]) -> None:
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        if fullname != TRIGGER:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find and finder is not self else None
            if spec is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        """Make this one loader object act when it has executed the module."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._action(module)

        loader.exec_module = exec_module


class _LastResort:
    """Lets a job ``import cotenant`` where that is not installed: it gets the virtual GPU interface, and no more."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        if fullname != "cotenant":
            return None
        from importlib.machinery import ModuleSpec  # noqa: PLC0415 - only where it is asked for

        return ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See ``importlib.abc.Loader``."""
        from . import resources  # noqa: PLC0415

        return resources

    def exec_module(self, module: ModuleType) -> None:
        """See ``importlib.abc.Loader``: it has been executed."""


def warn(error: Exception) -> None:
    """Say once per job that a process runs uncontrolled, and why."""
    what = f"{error.args[0]} is not set" if isinstance(error, KeyError) else str(error)
    _say(f"this process runs without its share being enforced: {what}")


def _say(what: str) -> None:
    """Say something on standard error, once per job."""
    if os.environ.get(_WARNED) or sys.stderr is None:
        return
    os.environ[_WARNED] = "1"
    sys.stderr.write(f"cotenant: {what}\n")


def mark(job_dir: str, kind: str) -> str:
    """Leave a marker by which the host agent finds a process that it did not start; returns its path."""
    from .reportfile import start_ticks  # noqa: PLC0415

    path = f"{job_dir}/{ATTACH_PREFIX}{os.getpid()}"
    with open(f"{path}.new", "w", encoding="ascii") as file:
        file.write(f"{start_ticks('self')} {kind}")
    os.replace(f"{path}.new", path)
    return path


def parse_cores(text: str) -> frozenset[int]:
    """Read a comma list of CPU cores; ValueError when it is none."""
    return frozenset(int(core) for core in text.split(","))


def _is_multiprocessing_helper() -> bool:
    """True in processes that multiprocessing starts afresh: spawned children, the fork server, the resource tracker."""
    return any(sign in argument for argument in sys.orig_argv[1:] for sign in _HELPER_MARKS)
