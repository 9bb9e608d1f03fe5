"""The suite for a real GPU, dry: NVML, MPS and torch are stand-ins, everything else is the product."""

from __future__ import annotations

import json
import os
import sys

from fake_mps import FakeMps
from fake_torch import FakeTorch
from nvml_standin import Standin


def test_every_case_runs(tmp_path, monkeypatch):
    standin = Standin(tmp_path / "nvml")
    standin.set("gpu 0 uuid=GPU-a name=NVIDIA_H100 total=85899345920 used=1000000000")
    FakeMps(tmp_path / "mps", monkeypatch)
    torch = FakeTorch(tmp_path)
    path = os.pathsep.join([torch.environment["PYTHONPATH"], *[entry for entry in sys.path if entry]])
    done = standin.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--out", str(tmp_path / "out")],
        timeout_s=100.0,
        environment=torch.environment | {"PYTHONPATH": path, "PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert report["dry_run"] and report["failed"] == []
    assert report["machine"]["driver"]
    cases = {(row["case"].split(",")[0].split(" to")[0], row["method"]) for row in report["rows"]}
    assert cases >= {(case, method) for case in ("held", "resized", "memory") for method in ("timeslice", "mps")}
    assert ("paused", "signal") in cases
    assert all(row["value"] == 1.0 for row in report["rows"] if row["case"].startswith("memory"))
    assert len((tmp_path / "out" / "gpu.csv").read_text().splitlines()) == len(report["rows"]) + 1
