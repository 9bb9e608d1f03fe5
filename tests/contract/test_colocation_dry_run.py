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
TESTS = Path(__file__).parents[1]
TINY = "import sys; from benchmarks.colocation.cli import main; sys.exit(main(sys.argv[1:], 'colocation_spin'))"


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Runs the suite on a GPU that is not there, and gives what it wrote: the card and the windows."""
    standin = Standin(tmp_path / "standin")
    standin.set(
        "driver 580.1",
        f"{GPU} gpm=1 energy_rate=310 tx_rate=1000 rx_rate=2000",
        "children 0 memory=3221225472 sm=40 list=both",
        *(f"metric 0 {number} {percent}" for number, percent in COUNTERS.items()),
    )
    fake = FakeMps(tmp_path, monkeypatch)
    out = tmp_path / "out"

    def run(*command: str) -> tuple[dict[str, object], list[dict[str, object]]]:
        options = ["--device", "cuda", "--dry-run", "--out", str(out)]
        with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as short:
            monkeypatch.setenv("TMPDIR", short)  # a socket's path must be short; pytest's folders are not
            done = standin.run([sys.executable, *command, *options], 150, {"PYTHONPATH": str(TESTS)})
            assert done.returncode == 0, done.stderr
            assert not list(Path(short).glob("ct-mps-*"))
        assert fake.daemons() == []
        windows = (out / "windows.jsonl").read_text().splitlines()
        return json.loads((out / "card.json").read_text()), [json.loads(line) for line in windows]

    return run


@pytest.mark.timeout(200)
def test_every_mode_is_measured_read_and_marked(measured, tmp_path):
    options = f"--window 0.3 --minutes 5 --modes {','.join(MODES)} --workloads spin-4".split()
    card, windows = measured("-c", TINY, *options)
    told = {name: card[name] for name in ("gpu_type", "driver", "gpu_uuid", "dry_run")}
    assert told == {"gpu_type": "NVIDIA H100", "driver": "580.1", "gpu_uuid": "GPU-a", "dry_run": True}
    assert {window["mode"] for window in windows} == set(MODES)
    assert {window["share"] for window in windows if window["kind"] == "shared"} == {None, 0.3, 0.5, 0.7}
    for window in windows:
        assert window["device_util"] == pytest.approx(0.8)
        assert window["power_w"] == pytest.approx(310, rel=0.2)
        assert (window["sm_active"], window["membw_util"]) == (pytest.approx(0.61), pytest.approx(0.35))
    with pytest.raises(DataError, match="dry"):
        load_colocation(tmp_path / "out")
    assert set(load_colocation(tmp_path / "out", allow_dry_run=True).pairs["mode"]) == set(MODES)


@pytest.mark.timeout(200)
def test_a_network_goes_the_same_way(measured):
    _, windows = measured(
        "-m", "benchmarks.colocation", *["--window", "0.5", "--modes", "timeslice", "--workloads", "resnet-64"]
    )
    assert {window["kind"] for window in windows} == {"solo", "shared"}
    assert all(window["steps"] > 0 and window["memory_bytes"] > 0 for window in windows)
