"""The suite for a real GPU, dry: NVML, MPS and torch are stand-ins, everything else is the product."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest
from fake_mps import FakeMps
from fake_torch import FakeTorch
from nvml_standin import Standin


@pytest.mark.timeout(320)
def test_every_case_runs(tmp_path, monkeypatch):
    standin = Standin(tmp_path / "nvml")
    total = 80 << 30
    standin.set(*(f"gpu {index} uuid=GPU-{index} name=NVIDIA_H100 total={total} used=0" for index in range(2)))
    FakeMps(tmp_path / "mps", monkeypatch)
    torch = FakeTorch(tmp_path)
    (tmp_path / "no-ray").mkdir()
    (tmp_path / "no-ray" / "ray.py").write_text("raise ImportError('no Ray on this machine')\n")
    path = os.pathsep.join([str(tmp_path / "no-ray"), torch.environment["PYTHONPATH"], *filter(None, sys.path)])
    done = standin.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--out", str(tmp_path / "out")],
        timeout_s=300.0,
        environment=torch.environment | {"PYTHONPATH": path, "PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert report["dry_run"] and report["failed"] == []
    assert report["machine"]["driver"]
    cases = {(row["case"].split(",")[0].split(" to")[0], row["method"]) for row in report["rows"]}
    assert cases >= {(case, method) for case in ("held", "resized", "memory") for method in ("timeslice", "mps")}
    assert ("paused", "signal") in cases
    assert {case for case, _ in cases} >= {"memory runs out", "moved", "demand rises", "demand falls"}
    assert all(row["met"] is not False for row in report["rows"] if row["goal"])
    assert any("driver checkpoints" in line for line in report["skipped"]) or shutil.which("nvidia-smi")
    assert all(row["value"] == 1.0 for row in report["rows"] if row["case"].startswith("memory, "))
    assert len((tmp_path / "out" / "gpu.csv").read_text().splitlines()) == len(report["rows"]) + 1
