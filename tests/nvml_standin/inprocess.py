"""The stand-in in the present process, for what needs real processes and many readings."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cotenant.actors.devices.nvml.library import Library
from nvml_standin import Standin


@contextmanager
def loaded(standin: Standin) -> Iterator[Library]:
    """Have nvidia-ml-py use the stand-in; whatever it had loaded before is back afterwards."""
    pynvml = importlib.import_module("pynvml")
    with pytest.MonkeyPatch.context() as inside:
        inside.setenv("NVML_STANDIN_STATE", str(standin.state))
        inside.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(standin.library)))
        inside.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        yield Library()
