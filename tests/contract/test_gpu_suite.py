"""The suite for a real GPU, dry: NVML, MPS and torch are stand-ins, everything else is the product."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest
from fake_driver import FakeDriver
from fake_mps import FakeMps
from fake_torch import FakeTorch
from nvml_standin import Standin

TOTAL = 80 << 30
WHOLE = tuple(f"gpu {index} uuid=GPU-{index} name=NVIDIA_H100 total={TOTAL} used=0" for index in range(2))
MIG = (
    "gpu 0 uuid=GPU-0 name=NVIDIA_H100",
    "gpu 1 uuid=GPU-1 name=NVIDIA_H100 mig=1",
    f"instance 1 0 MIG-a name=NVIDIA_H100_MIG_3g.40gb total={TOTAL // 2} gi=1 ci=0",
    f"instance 1 2 MIG-b name=NVIDIA_H100_MIG_2g.20gb total={TOTAL // 4} gi=3 ci=0",
)


def run(tmp_path, monkeypatch, hardware, *options, checkpoints=False, **environment):
    """Run the suite on this hardware, whose driver can make checkpoints or not; returns how it ended."""
    standin = Standin(tmp_path / "nvml")
    standin.set(*hardware)
    if checkpoints:
        FakeDriver(tmp_path / "driver", standin, monkeypatch)
    FakeMps(tmp_path / "mps", monkeypatch)
    torch = FakeTorch(tmp_path)
    (tmp_path / "no-ray").mkdir()
    (tmp_path / "no-ray" / "ray.py").write_text("raise ImportError('no Ray on this machine')\n")
    path = os.pathsep.join([str(tmp_path / "no-ray"), torch.environment["PYTHONPATH"], *filter(None, sys.path)])
    return standin.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--out", str(tmp_path / "out"), *options],
        timeout_s=300.0,
        environment=torch.environment | {"PYTHONPATH": path, "PATH": os.environ["PATH"], **environment},
    )


@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    ("hardware", "visible", "measured", "methods"),
    [
        (WHOLE, "1,0", "NVIDIA H100", {"timeslice", "mps"}),
        (MIG, "MIG-b,MIG-a", "NVIDIA H100 MIG 2g.20gb", {"mig"}),
    ],
)
def test_every_case_runs(tmp_path, monkeypatch, *, hardware, visible, measured, methods):
    done = run(tmp_path, monkeypatch, hardware, CUDA_VISIBLE_DEVICES=visible)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert report["dry_run"] and report["failed"] == []
    assert report["machine"]["driver"]
    assert report["machine"]["gpu"] == measured
    cases = {(row["case"].split(",")[0].split(" to")[0], row["method"]) for row in report["rows"]}
    for case in ("held", "resized", "memory"):
        assert {method for other, method in cases if other == case} == methods
    assert ("paused", "signal") in cases
    assert {case for case, _ in cases} >= {"memory runs out", "moved", "demand rises", "demand falls"}
    assert all(row["met"] is not False for row in report["rows"] if row["goal"])
    without = "the driver checkpoints no process under MIG" if methods == {"mig"} else "driver checkpoints"
    assert any(without in line for line in report["skipped"]) or shutil.which("nvidia-smi")
    assert all(row["value"] == 1.0 for row in report["rows"] if row["case"].startswith("memory, "))
    assert len((tmp_path / "out" / "gpu.csv").read_text().splitlines()) == len(report["rows"]) + 1


def test_checkpoints_of_the_driver_are_measured_where_there_are_any(tmp_path, monkeypatch):
    cases = ("--case", "paused", "--case", "migrated")
    done = run(tmp_path, monkeypatch, WHOLE, *cases, checkpoints=True, CUDA_VISIBLE_DEVICES="1,0")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert (report["failed"], report["skipped"]) == ([], [])
    found = [(row["case"], row["method"], row["metric"]) for row in report["rows"] if "checkpoint" in row["method"]]
    assert found == [
        ("paused", "checkpoint", "until it stands still"),
        ("paused", "checkpoint", "device memory freed"),
        ("paused", "checkpoint", "until it steps again"),
        ("moved to another GPU", "driver checkpoint", "from the request to its next step"),
    ]


def test_no_device_to_measure_is_said(tmp_path, monkeypatch):
    done = run(tmp_path, monkeypatch, MIG, "--case", "held", CUDA_VISIBLE_DEVICES="7")
    assert done.returncode == 2
    assert "this host has 0 GPUs (CUDA_VISIBLE_DEVICES is '7'" in done.stderr
