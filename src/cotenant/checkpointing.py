"""For training programs that can be suspended and moved: save on SIGTERM at the next step, continue from there.

The standard library only; torch is imported when something is saved or loaded. ``docs/checkpointing.md`` says what is
expected of a job with the hint ``checkpoint: own``; this is one way to do it::

    with Checkpointer(model=model, optimizer=optimizer) as saved:
        for step in range(saved.restore(), STEPS):
            ...  # one step
            saved.step_done(step + 1)
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

DIRECTORY = "COTENANT_CHECKPOINT_DIR"
CONTINUES = "COTENANT_CONTINUES"
STOP_FILE = "COTENANT_STOP_FILE"  # in processes under a lease: when it is there, they are to save and end
INTERRUPTED = 128 + signal.SIGTERM  # exit code of a program that has saved and is to be continued
KEPT = 2
_PREFIX, _SUFFIX = "step-", ".pt"


class Stateful(Protocol):
    """What models, optimizers and learning-rate schedulers have."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over a state."""
        ...


class Checkpointer:
    """Saves and restores a training program. Use it in a ``with`` block, in the main thread.

    Under torchrun (any initialised ``torch.distributed`` group) all ranks are one: whoever hears SIGTERM tells the
    others at the next step, rank 0 writes, and all leave together. That costs a reduction of one number per step.

    Under a lease of a Ray program it works in any thread, Ray Train's among them. There nobody sends a signal: the
    request is found, and once all is saved the ``with`` block is left and the program goes on behind it; look at
    ``stop_requested`` there.

    Args:
        directory: Where to keep checkpoints; None = where cotenant says (``$COTENANT_CHECKPOINT_DIR``).
        every_s: Save after so many seconds as well; None = only on SIGTERM. What is done since is lost in a crash.
        parts: What is saved, by name: models, optimizers, schedulers, anything with a state that ``torch.load`` takes
            with ``weights_only=True``.

    Raises:
        ValueError: No directory is given, and this is no job that is told one.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, every_s: float | None = None, **parts: Stateful
    ) -> None:
        where = os.environ.get(DIRECTORY) if directory is None else directory
        if not where:
            raise ValueError(
                f"directory: None is not accepted here; give one, or run as a job with the hint checkpoint: own "
                f"(which sets ${DIRECTORY})"
            )
        self._dir = Path(where)
        self._parts = parts
        self._every_s = every_s
        self._saved_at = time.monotonic()
        self._asked = False
        self._leased = STOP_FILE in os.environ
        self._before: Any = None
        self.step = 0  # the last step that was done
        self.extra: dict[str, Any] = {}  # what was last told of it besides

    @property
    def stop_requested(self) -> bool:
        """Whether this process has been asked to save and end."""
        return self._asked

    def restore(self) -> int:
        """Take over the newest checkpoint that is whole; returns the number of steps done, 0 when there is none.

        Files that cannot be read to their end are passed over, with a line on standard error.

        Raises:
            pickle.UnpicklingError: A part has a state that cannot be loaded safely.
            KeyError: The checkpoint is of other parts.
        """
        import torch  # noqa: PLC0415 - only when needed

        for path in self._files():
            try:
                content = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # a damaged file can raise anything
                if _is_whole(path):
                    raise
                _say(f"{path} is not whole and is passed over: {error}")
                continue
            for name, part in self._parts.items():
                part.load_state_dict(content["parts"][name])
            if _ranks() == 1:
                torch.set_rng_state(content["torch_rng"])
                version, numbers, gauss = content["python_rng"]
                random.setstate((version, tuple(numbers), gauss))
            self.step, self.extra = int(content["step"]), dict(content["extra"])
            break
        return self.step

    def step_done(self, step: int, **extra: Any) -> None:
        """Say that so many steps are done; to be called right after each. Saves when it is time to.

        Args:
            step: Number of steps done.
            extra: Plain values to keep with it (``self.extra`` after ``restore``).

        Raises:
            SystemExit: The job was asked to end; all is saved. Let it through (to the end of the block, in a lease).
        """
        self.step, self.extra = step, extra
        if _anybody(self._asked or _lease_asked()):
            self._asked = True  # never set to what was found: SIGTERM may have come while the ranks agreed
            self.save()
            raise SystemExit(INTERRUPTED)
        if self._every_s is not None and time.monotonic() - self._saved_at >= self._every_s:
            self.save()

    def save(self) -> None:
        """Save now: written whole or not at all. Every rank has to call it; rank 0 writes."""
        import torch  # noqa: PLC0415

        if _rank() == 0:
            version, numbers, gauss = random.getstate()
            content = {
                "step": self.step,
                "extra": self.extra,
                "parts": {name: part.state_dict() for name, part in self._parts.items()},
                "torch_rng": torch.get_rng_state(),
                "python_rng": [version, list(numbers), gauss],
            }
            self._dir.mkdir(parents=True, exist_ok=True)
            path = self._dir / f"{_PREFIX}{self.step:012d}{_SUFFIX}"
            temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            try:
                with temporary.open("wb") as file:
                    torch.save(content, file)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)  # half a file on a full disk would leave the next one no room
                raise
            _sync(self._dir)
            self._tidy()
        if _ranks() > 1:
            torch.distributed.barrier()  # nobody leaves, and is missed, before all is written
        self._saved_at = time.monotonic()

    # -- inside -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if not self._leased:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._leased:
            return self._asked and isinstance(error, SystemExit) and error.code == INTERRUPTED
        try:
            return self._leave(error)
        finally:  # not before all is saved: a second SIGTERM would end it half way
            signal.signal(signal.SIGTERM, self._before)

    def _leave(self, error: BaseException | None) -> bool:
        """Save what the way out of the block has left unsaved."""
        if error is None or isinstance(error, SystemExit) or not self._asked or _ranks() > 1:
            return False
        # SIGTERM has ended a helper process, of a data loader perhaps: what was done until the last step is whole.
        _say(f"asked to end, and met {type(error).__name__} on the way: saving step {self.step}")
        self.save()
        raise SystemExit(INTERRUPTED) from error

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True

    def _files(self) -> list[Path]:
        """The checkpoints, newest first."""
        return sorted(self._dir.glob(f"{_PREFIX}*{_SUFFIX}"), reverse=True)

    def _tidy(self) -> None:
        """Remove older checkpoints and what a killed process has left."""
        for path in [*self._files()[KEPT:], *self._dir.glob(f"{_PREFIX}*.tmp")]:
            with suppress(FileNotFoundError):
                path.unlink()


def stop_requested() -> bool:
    """Whether this process, started under a lease of a Ray program, is to save and end.

    For programs that save in their own way; ``Checkpointer`` asks by itself. All ranks of an initialised
    ``torch.distributed`` group get the same answer, so that they save the same step; each has to ask after each step.

    Raises:
        RuntimeError: The lease was over before this process was started: it has the options of an earlier term.
    """
    return _anybody(_lease_asked())


def continues() -> bool:
    """Whether this job was started before: there may be a checkpoint."""
    return os.environ.get(CONTINUES) == "1"


def _lease_asked() -> bool:
    """Whether the lease this process was started under is to be given back."""
    path = os.environ.get(STOP_FILE)
    if path is None:
        return False
    # After every step: pathlib would take several times as long.
    asked = os.path.exists(path)  # noqa: PTH110
    if not asked and not os.path.isdir(os.path.dirname(path)):  # noqa: PTH112, PTH120
        raise RuntimeError(
            "the lease that this process was started under is not held any more: call lease.options() or "
            "lease.train_options() anew in each of its terms"
        )
    return asked


def _anybody(mine: bool) -> bool:
    """Whether it is so in any rank."""
    if _ranks() == 1:
        return mine
    import torch  # noqa: PLC0415

    on_gpu = torch.distributed.get_backend() == "nccl"
    one = torch.tensor([int(mine)], device="cuda" if on_gpu else "cpu")
    torch.distributed.all_reduce(one, op=torch.distributed.ReduceOp.MAX)
    return bool(one.item())


def _distributed() -> Any:
    """Return ``torch.distributed`` when this process is a rank of an initialised group, without importing anything."""
    found = getattr(sys.modules.get("torch"), "distributed", None)
    return found if found is not None and found.is_available() and found.is_initialized() else None


def _rank() -> int:
    group = _distributed()
    return 0 if group is None else int(group.get_rank())


def _ranks() -> int:
    group = _distributed()
    return 1 if group is None else int(group.get_world_size())


def _is_whole(path: Path) -> bool:
    """Whether all that was written is there, byte by byte."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # noqa: BLE001 - of a damaged archive anything can be wrong
        return False


def _sync(folder: Path) -> None:
    """Make sure that the name of a new file outlives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _say(text: str) -> None:
    print(f"cotenant: {text}", file=sys.stderr, flush=True)  # noqa: T201 - to the job's output


__all__ = ["INTERRUPTED", "Checkpointer", "Stateful", "continues", "stop_requested"]
