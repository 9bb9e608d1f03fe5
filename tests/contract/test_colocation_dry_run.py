"""The suite as it runs on an NVIDIA GPU: NVML and the MPS control program are stand-ins, tensors are on the CPU."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
from fake_mps import FakeMps
from nvml_standin import Standin

from cotenant.forecasting.datasets.colocation import DataError, load_colocation

GPU = "gpu 0 uuid=GPU-a name=NVIDIA_H100 total=85899345920 used=6442450944 util=80 power=300000 clock=1700 temp=55"
COUNTERS = {2: 61.0, 5: 22.0, 10: 35.0, 12: 13.0}  # SM, tensor pipe, memory bandwidth, FP32 pipe, in percent
MODES = ("timeslice", "mps", "mps_cap", "duty")


@pytest.mark.timeout(300)
def test_every_mode_is_measured_read_and_marked(tmp_path, monkeypatch):
    standin = Standin(tmp_path / "standin")
    standin.set(
        "driver 580.1",
        f"{GPU} gpm=1 energy_rate=310 tx_rate=1000 rx_rate=2000",
        "children 0 memory=3221225472 sm=40 list=both",
        *(f"metric 0 {number} {percent}" for number, percent in COUNTERS.items()),
    )
    fake = FakeMps(tmp_path, monkeypatch)
    out = tmp_path / "out"
    options = f"--device cuda --dry-run --window 0.5 --minutes 8 --modes {','.join(MODES)} --out {out}".split()
    workloads = ["--workloads", "resnet-64,bert-16-serve"]
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as short:
        monkeypatch.setenv("TMPDIR", short)  # a socket's path must be short; pytest's folders are not
        done = standin.run([sys.executable, "-m", "benchmarks.colocation", *options, *workloads], timeout_s=280)
        assert done.returncode == 0, done.stderr
        assert not list(Path(short).glob("ct-mps-*"))
    assert fake.daemons() == []

    card = json.loads((out / "card.json").read_text())
    assert (card["gpu_type"], card["driver"], card["gpu_uuid"], card["dry_run"]) == (
        "NVIDIA H100",
        "580.1",
        "GPU-a",
        True,
    )
    windows = [json.loads(line) for line in (out / "windows.jsonl").read_text().splitlines()]
    assert {window["mode"] for window in windows} == set(MODES)
    assert {window["share"] for window in windows if window["kind"] == "shared"} == {None, 0.3, 0.5, 0.7}
    for window in windows:
        assert window["device_util"] == pytest.approx(0.8)
        assert window["power_w"] == pytest.approx(310, rel=0.2)
        assert (window["sm_active"], window["membw_util"]) == (pytest.approx(0.61), pytest.approx(0.35))

    with pytest.raises(DataError, match="dry"):
        load_colocation(out)
    pairs = load_colocation(out, allow_dry_run=True).pairs
    assert set(pairs["mode"]) == set(MODES)
