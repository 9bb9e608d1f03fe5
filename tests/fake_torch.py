"""A stand-in for torch on a GPU: as much of it as the shim touches, in a folder for a job's PYTHONPATH.

What the program does with "CUDA" is told in the file that ``FAKE_TORCH_NOTES`` names, one JSON line per call. The GPU
has 1000 bytes; ``torch.cuda.held`` of them are in the allocator's hands and ``torch.cuda.used`` in use.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_INIT = """
from torch import cuda
from torch.optim import optimizer as _optimizer


class optim:
    SGD = _optimizer.SGD
"""
_OPTIMIZER = """
_hooks = []


def register_optimizer_step_post_hook(hook):
    _hooks.append(hook)


class SGD:
    def step(self):
        for hook in _hooks:
            hook(self, (), {})
"""
_CUDA = """
import json, os, types

held = used = 0
_queued, _ready = [], []


def _note(what, *more):
    with open(os.environ["FAKE_TORCH_NOTES"], "a") as file:
        file.write(json.dumps([what, *more]) + "\\n")


def init():
    _ready.append(True)
    for call in _queued:
        call()


def is_initialized():
    return bool(_ready)


def _lazy_call(call):
    call() if _ready else _queued.append(call)


def get_device_properties(index):
    return types.SimpleNamespace(total_memory=1000)


def memory_reserved(index):
    return held


def empty_cache():
    global held
    held = used
    _note("empty_cache")


def set_per_process_memory_fraction(fraction, index):
    _note("fraction", fraction, index)


def is_current_stream_capturing():
    return False


def current_stream():
    return types.SimpleNamespace(synchronize=lambda: None)
"""


class FakeTorch:
    """The folder, and what a program did."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "torch-site"
        self._notes = folder / "torch-notes"
        for name, text in {
            "__init__": _INIT,
            "cuda": _CUDA,
            "optim/__init__": "",
            "optim/optimizer": _OPTIMIZER,
        }.items():
            path = self.site / "torch" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    @property
    def environment(self) -> dict[str, str]:
        """What a job needs to find it."""
        return {"PYTHONPATH": str(self.site), "FAKE_TORCH_NOTES": str(self._notes)}

    @property
    def done(self) -> list[Any]:
        """What it was asked, in order."""
        return [json.loads(line) for line in self._notes.read_text().splitlines()] if self._notes.exists() else []
