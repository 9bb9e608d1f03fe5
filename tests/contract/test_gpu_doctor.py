"""What the doctor says of NVIDIA GPUs: on the stand-in for NVML, and without a driver."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from nvml_standin import SONAME, Standin
from nvml_standin.inprocess import loaded

from cotenant.actors import gpudoctor
from cotenant.actors.checks import Check
from cotenant.actors.devices.nvml.library import Library
from cotenant.actors.enforcement.pausing import CheckpointPause

HOPPER = "gpu 0 uuid=GPU-0 name=NVIDIA_H100"
HEALTHY = {
    "nvidia driver": "580.00.00, CUDA 13.0",
    "GPUs": "2 × NVIDIA H100",
    "GPU permissions": "device files can be used",
    "GPU compute mode": "default",
    "GPU use by process": "told",
    "process numbers": "those of the host",
    "GPM counters": "read",
    "MIG": "off; GPUs are shared as a whole",
    "MPS": "nvidia-cuda-mps-control",
    "GPU checkpoints": "jobs with checkpoint: driver can be frozen, on whole GPUs; they run without MPS",
}


@pytest.fixture
def gpu_host(standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    """A host where nothing is missing."""
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text("")
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpudoctor, "DEVICE_FILES", (str(control),))
    monkeypatch.setattr(CheckpointPause, "missing", lambda _: "")
    monkeypatch.setattr(gpudoctor, "PidMap", lambda: Numbers(same=True))
    standin.set(HOPPER)
    with loaded(standin):
        yield standin


class Numbers:
    """What is known of the numbers of processes."""

    def __init__(self, same: bool = False) -> None:
        self.same = self.translates = same


def by_name(checks: list[Check]) -> dict[str, Check]:
    assert len({check.name for check in checks}) == len(checks)
    assert all(check.found and bool(check.cost) == bool(check.fix) == (not check.ok) for check in checks)
    return {check.name: check for check in checks}


def test_where_nothing_is_missing(gpu_host: Standin) -> None:
    gpu_host.set(HOPPER, "gpu 1 uuid=GPU-1 name=NVIDIA_H100")
    found = by_name(gpudoctor.gpu_checks())
    assert {name: check.found for name, check in found.items()} == HEALTHY
    assert all(check.ok for check in found.values())


@pytest.mark.parametrize(
    ("lines", "name", "says"),
    [
        ((HOPPER, "gpu 1 uuid=GPU-1", "fault * 15 1"), "GPUs", "1 × NVIDIA H100; GPU 1 is left out: "),
        ((f"{HOPPER} mode=2",), "GPU compute mode", "prohibited"),
        ((HOPPER, "fault nvmlDeviceGetProcessUtilization 4"), "GPU use by process", "nvmlDeviceGetProcessUtilization"),
        ((f"{HOPPER} gpm=0",), "GPM counters", "this GPU has none (Hopper and later have)"),
        ((HOPPER, "fault nvmlGpmSampleGet 4"), "GPM counters", "nvmlGpmSampleGet: "),
        ((f"{HOPPER} mig=1", "instance 0 3 MIG-a name=NVIDIA_H100"), "GPU use by process", "not told of MIG instances"),
    ],
)
def test_what_is_missing_on_a_gpu_is_named(gpu_host: Standin, lines: tuple[str, ...], name: str, says: str) -> None:
    gpu_host.set(*lines)
    wrong = {each: check for each, check in by_name(gpudoctor.gpu_checks()).items() if not check.ok}
    assert list(wrong) == [name]
    assert wrong[name].found.startswith(says)
    assert not wrong[name].essential


def test_what_is_missing_on_the_host_is_named(
    gpu_host: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_host.set(f"{HOPPER} mode=3")
    assert by_name(gpudoctor.gpu_checks())["GPU compute mode"].ok  # MPS is there
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(gpudoctor, "DEVICE_FILES", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr(CheckpointPause, "missing", lambda _: "cuda-core is not installed here")
    monkeypatch.setattr(gpudoctor, "PidMap", Numbers)
    wrong = {each: check for each, check in by_name(gpudoctor.gpu_checks()).items() if not check.ok}
    assert {name: check.found for name, check in wrong.items()} == {
        "GPU permissions": f"no access to {tmp_path / 'nvidiactl'}",
        "GPU compute mode": "exclusive process",
        "process numbers": "a container's own",
        "MPS": "nvidia-cuda-mps-control is not on PATH",
        "GPU checkpoints": "cuda-core is not installed here",
    }


def test_instances_are_counted(gpu_host: Standin) -> None:
    gpu_host.set(f"{HOPPER} mig=1", "instance 0 0 MIG-a", "instance 0 3 MIG-b")
    assert by_name(gpudoctor.gpu_checks())["MIG"].found == "on for 1 GPUs, 2 instances"


@pytest.mark.parametrize(
    ("lines", "kernel", "ok", "essential", "says"),
    [
        (("fault nvmlInit 9",), None, True, False, "none; GPUs are slices of CPU cores"),
        (("fault nvmlInit 9",), "NVRM version: 580", False, False, "NVRM version: 580, but the NVIDIA kernel module"),
        (("fault nvmlInit 18",), "NVRM version: 570", False, True, "the NVIDIA driver was updated"),
        ((HOPPER, "fault nvmlDeviceGetCount_v2 999"), None, False, True, "nvmlDeviceGetCount: "),
        ((HOPPER, "hang nvmlInit"), None, False, True, "nvmlInit: a call did not return within 0.5 s"),
        (
            (HOPPER, "hang nvmlSystemGetDriverVersion"),
            None,
            False,
            False,
            "the driver's version: a call did not return",
        ),
    ],
)
def test_a_driver_that_does_not_work(
    *,
    standin: Standin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: tuple[str, ...],
    kernel: str | None,
    ok: bool,
    essential: bool,
    says: str,
) -> None:
    version = tmp_path / "version"
    if kernel is not None:
        version.write_text(f"{kernel}\nGCC version\n")
    monkeypatch.setattr(gpudoctor, "KERNEL_DRIVER", version)
    monkeypatch.setattr(gpudoctor, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(gpudoctor, "Library", partial(Library, 0.5))
    standin.set("gpu 0")
    with loaded(standin):
        standin.set(*lines)
        check = by_name(gpudoctor.gpu_checks())["nvidia driver"]
        standin.set("gpu 0")  # whatever hangs comes back
    assert (check.name, check.ok, check.essential) == ("nvidia driver", ok, essential)
    assert check.found.startswith(says)


@pytest.mark.parametrize(
    ("hung", "gpus", "cost"),
    [
        ("nvmlInit", None, "the host joins without its GPUs, and uses them once the driver answers"),
        ("nvmlSystemGetDriverVersion", True, "the host joins all the same, with the GPUs that answer"),
    ],
)
def test_what_a_driver_that_hangs_costs(
    gpu_host: Standin, monkeypatch: pytest.MonkeyPatch, hung: str, gpus: bool | None, cost: str
) -> None:
    """The host agent does start: its GPUs may come."""
    monkeypatch.setattr(gpudoctor, "Library", partial(Library, 0.3))
    monkeypatch.setattr(gpudoctor, "TIMEOUT_S", 0.3)
    gpu_host.set(HOPPER, f"hang {hung}")
    found = by_name(gpudoctor.gpu_checks())
    gpu_host.set(HOPPER)
    assert found["nvidia driver"].cost.startswith(cost)
    assert (found["GPUs"].ok if "GPUs" in found else None) == gpus


def test_no_gpu_can_be_used(gpu_host: Standin) -> None:
    gpu_host.set(HOPPER, "fault * 15 0")
    found = by_name(gpudoctor.gpu_checks())
    assert list(found) == ["nvidia driver", "GPUs"]
    assert (found["GPUs"].ok, found["GPUs"].essential) == (False, True)


def test_gpus_that_cannot_even_be_counted(gpu_host: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.actors.devices.nvml.discovery.TIMEOUT_S", 0.3)
    gpu_host.set(HOPPER, "hang nvmlDeviceGetCount_v2")
    found = by_name(gpudoctor.gpu_checks())["GPUs"]
    gpu_host.set(HOPPER)
    assert (found.ok, found.essential) == (False, True)
    assert "nvmlDeviceGetCount: a call did not return within 0.3 s" in found.found


def test_the_command_line_prints_them(standin: Standin) -> None:
    standin.set(HOPPER)
    command = [str(Path(sys.executable).parent / "cotenant"), "doctor"]
    said = json.loads(standin.run([*command, "--json"]).stdout)
    assert {each["name"]: each["found"] for each in said}["GPUs"] == "1 × NVIDIA H100"
    text = standin.run(command).stdout
    assert all(name in text for name in ("GPUs", "MPS", "MIG", "GPM counters", "GPU checkpoints"))


def test_without_a_driver(standin: Standin, tmp_path: Path) -> None:
    code = "from cotenant.actors.gpudoctor import gpu_checks\nprint(json.dumps([c.found for c in gpu_checks()]))"
    found = standin.python(code, LD_LIBRARY_PATH=str(tmp_path))
    if len(found) > 2:
        pytest.skip(f"this machine has a {SONAME} of its own")
    assert found[0].startswith("none; GPUs are slices of CPU cores")
    assert found[1].startswith("no; without NVIDIA's driver nothing is frozen")
