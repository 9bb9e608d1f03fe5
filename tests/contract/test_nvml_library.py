"""Starting NVML and asking it, through the real nvidia-ml-py: every way in which it is not there, or says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvml_standin import SONAME, Standin

START = """
from cotenant.actors.devices.nvml.library import Asker, Library, NvmlFailure, NvmlUnavailable
def start(**how):
    try:
        return Library(**how)
    except NvmlUnavailable as error:
        print(json.dumps([error.code, str(error)]))
        sys.exit()
def outcome(function, *args):
    try:
        return function(*args)
    except NvmlFailure as error:
        return [error.function, error.code, error.gone]
"""


def unavailable(standin: Standin, **how: str) -> tuple[int | None, str]:
    timeout = how.pop("timeout_s", "20")
    code, text = standin.python(f"{START}\nstart(timeout_s={timeout})\nprint(json.dumps([0, 'it started']))", **how)
    return code, text


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("fault nvmlInit 18", 18, "was updated while its old kernel module is still loaded"),
        ("fault nvmlInit 9", 9, "kernel module is not loaded"),
        ("fault nvmlInit 4", 4, "this user may not use the NVIDIA devices"),
        ("fault nvmlInit 999", 999, "nvmlInit: "),
    ],
)
def test_a_driver_that_does_not_start_says_why(standin: Standin, line: str, code: int, words: str) -> None:
    standin.set(line)
    got, text = unavailable(standin)
    assert got == code
    assert words in text


def test_a_driver_that_hangs_at_the_start_is_given_up(standin: Standin) -> None:
    standin.set("hang nvmlInit")
    assert unavailable(standin, timeout_s="0.2") == (None, "nvmlInit: a call did not return within 0.2 s")


def test_no_library(standin: Standin, tmp_path_factory: pytest.TempPathFactory) -> None:
    code, text = unavailable(standin, LD_LIBRARY_PATH=str(tmp_path_factory.mktemp("empty")))
    if code == 0:
        pytest.skip(f"this machine has a {SONAME} of its own")
    assert code == 12
    assert "no NVIDIA driver is installed" in text


def test_an_old_driver_and_an_old_binding_lack_functions(tmp_path: Path) -> None:
    standin = Standin(tmp_path, ["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlGpmSampleAlloc"])
    standin.set("gpu 0", "fault nvmlDeviceGetMigMode 3")
    names = ("nvmlDeviceGetComputeRunningProcesses", "nvmlGpmSampleAlloc", "nvmlOfTomorrow", "nvmlDeviceGetMigMode")
    code = (
        f"{START}\nlibrary = start()\nhandle = library.call('nvmlDeviceGetHandleByIndex', 0)\nasker = Asker(library)\n"
        f"found = [outcome(library.call, name, *([] if 'Alloc' in name else [handle])) for name in {names!r}]\n"
        "silent = asker.ask('nvmlDeviceGetMigMode', handle)\n"
        "print(json.dumps([found, silent, sorted(asker.failures)]))"
    )
    found, silent, notes = standin.python(code)
    assert found == [[name, 3 if "Mig" in name else 13, False] for name in names]
    assert (silent, notes) == (None, ["nvmlDeviceGetMigMode"])


@pytest.mark.parametrize(("code", "gone"), [(15, True), (16, True), (18, True), (9, True), (3, False), (999, False)])
def test_a_gpu_that_is_gone_is_no_missing_reading(standin: Standin, code: int, gone: bool) -> None:
    standin.set("gpu 0", f"fault nvmlDeviceGetPowerUsage {code}")
    script = (
        f"{START}\nlibrary = start()\nhandle = library.call('nvmlDeviceGetHandleByIndex', 0)\n"
        "print(json.dumps(outcome(Asker(library).ask, 'nvmlDeviceGetPowerUsage', handle)))"
    )
    assert standin.python(script) == (["nvmlDeviceGetPowerUsage", code, True] if gone else None)
