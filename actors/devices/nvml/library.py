"""NVIDIA's management library through ``nvidia-ml-py``: one kind of error, and a way to ask where no answer is normal.

Everything that talks to NVML goes through here: the device backend, enforcement and the doctor. Calls are safe from
several threads. A call can hang in the driver: whoever must not wait for ever makes it through ``watchdog``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np

from cotenant.actors.devices.nvml.watchdog import Hung, call_within

START_TIMEOUT_S = 20.0  # the driver sets up every GPU when nobody keeps it awake (persistence mode)
CLOSE_TIMEOUT_S = 5.0

# Return codes of NVML (nvml.h).
SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION = 0, 1, 2, 3, 4
NOT_FOUND, INSUFFICIENT_SIZE, DRIVER_NOT_LOADED, TIMEOUT = 6, 7, 9, 10
LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED = 12, 13, 15, 16
VERSION_MISMATCH, GPU_NOT_FOUND = 18, 28
# After these a GPU, or the whole driver, can do nothing for anybody.
_GONE = frozenset({DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH, GPU_NOT_FOUND})

# After these there is no point in asking again.
_NEVER = frozenset({NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND})

_START_WORDS = {
    LIBRARY_NOT_FOUND: "there is no libnvidia-ml.so.1: no NVIDIA driver is installed, or the container has none of it",
    DRIVER_NOT_LOADED: "the NVIDIA kernel module is not loaded",
    VERSION_MISMATCH: "the NVIDIA driver was updated while its old kernel module is still loaded: reboot, or reload it",
    NO_PERMISSION: "this user may not use the NVIDIA devices (/dev/nvidia*)",
}


class NvmlUnavailable(RuntimeError):
    """NVML cannot be used on this host; the message says why.

    Attributes:
        code: NVML's return code; None when the library was not even asked.
    """

    def __init__(self, reason: str, code: int | None = None) -> None:
        self.code = code
        super().__init__(reason)


class NvmlSilent(NvmlUnavailable):
    """The driver is there but has not answered; it may do so later.

    Attributes:
        answer: Where the driver's answer will be.
    """

    def __init__(self, reason: str, answer: Future[Any] | None) -> None:
        self.answer = answer
        super().__init__(reason)


class NvmlFailure(RuntimeError):
    """A function of NVML failed.

    Attributes:
        function: Its name.
        code: NVML's return code. A function that the driver, or nvidia-ml-py, does not have gives
            ``FUNCTION_NOT_FOUND``.
    """

    def __init__(self, function: str, code: int, text: str) -> None:
        self.function = function
        self.code = code
        super().__init__(f"{function}: {text}")

    @property
    def gone(self) -> bool:
        """Whether the GPU, or the driver, is of no use to anybody any more."""
        return self.code in _GONE


class Library:
    """NVML, started. Handles it gives are only good with it; ``close`` ends them.

    Args:
        timeout_s: How long the driver may take to start; None = as long as it likes.
        start: An earlier start that has not come back (``NvmlSilent``): waited for, however long, instead of another.

    Raises:
        NvmlUnavailable: No nvidia-ml-py, no driver, or versions that do not match.
        NvmlSilent: The driver did not answer in time.
    """

    def __init__(self, timeout_s: float | None = START_TIMEOUT_S, start: Future[Any] | None = None) -> None:
        try:
            self.module: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise NvmlUnavailable("nvidia-ml-py is not installed") from error
        self._errors = (self.module.NVMLError, self.module.NVMLLibraryMismatchError)
        try:
            if start is None:
                call_within(timeout_s, "nvmlInit", self.call, "nvmlInit")
            else:
                start.result()
        except NvmlFailure as error:
            raise NvmlUnavailable(_START_WORDS.get(error.code, str(error)), error.code) from error
        except Hung as error:
            raise NvmlSilent(str(error), error.answer) from error

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of nvidia-ml-py.

        Raises:
            NvmlFailure: It failed, or there is no such function.
        """
        try:
            return getattr(self.module, name)(*args)
        except self._errors as error:
            # The mismatch of a versioned function is no NVMLError and has no code: the driver is older than it.
            raise NvmlFailure(name, getattr(error, "value", FUNCTION_NOT_FOUND), str(error)) from None
        except AttributeError:
            if hasattr(self.module, name):
                raise
            raise NvmlFailure(name, FUNCTION_NOT_FOUND, "this nvidia-ml-py does not know it") from None

    def close(self) -> None:
        """Let go of the driver. Call once; not while a call of another thread is under way."""
        with suppress(NvmlFailure, Hung):  # there is nothing to let go of any more, or it does not let go
            call_within(CLOSE_TIMEOUT_S, "nvmlShutdown", self.call, "nvmlShutdown")


def fields_of(structure: Any, *names: str) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads fields of a structure of nvidia-ml-py; reading its attributes costs ten times more.

    Args:
        structure: The class, a ctypes structure.
        names: Its fields.
    """
    getters = [getattr(structure, name).__get__ for name in names]
    return lambda record: tuple([get(record) for get in getters])


def columns_of(structure: Any, *names: str) -> Callable[[Sequence[Any]], Iterable[tuple[Any, ...]]]:
    """Return a function that reads fields of many records at once, which nvidia-ml-py has cut out of one array.

    Args:
        structure: Their class, a ctypes structure.
        names: The fields.
    """
    layout = np.dtype(structure)

    def read(records: Sequence[Any]) -> Iterable[tuple[Any, ...]]:
        if not records:
            return ()
        table = np.frombuffer(records[0]._b_base_, layout, len(records))
        return zip(*(table[name].tolist() for name in names), strict=True)

    return read


class Asker:
    """Asks for readings of one device, where a device that does not say is an ordinary answer: None.

    What the device or the driver cannot do at all, or does not let this user do, is asked once. Used by one thread.

    Attributes:
        failures: Why there was no answer, by function; the newest.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self.failures: dict[str, NvmlFailure] = {}

    def ask(self, name: str, *args: Any, usual: Container[int] = ()) -> Any:
        """Call a function; None when it fails.

        Args:
            name: The function.
            args: Its arguments.
            usual: Return codes that only mean that there is nothing to say at the moment.

        Raises:
            NvmlFailure: The GPU or the driver is gone (``NvmlFailure.gone``).
        """
        if not self.can(name):
            return None
        try:
            answer = self._library.call(name, *args)
        except NvmlFailure as error:
            if error.gone:
                raise
            if error.code not in usual:
                self.failures[name] = error
            return None
        self.failures.pop(name, None)
        return answer

    def can(self, name: str) -> bool:
        """Whether asking may make sense; True until the function was asked."""
        failure = self.failures.get(name)
        return failure is None or failure.code not in _NEVER
