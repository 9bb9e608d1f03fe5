"""Loading recorded series: units, interleaved GPUs, what cannot be read."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from cotenant.forecasting.datasets.series import read_nvidia_smi, read_pod_metric, windows

HEAD = "timestamp, power.draw [W], utilization.gpu [%], memory.used [MiB]\n"


def recording(path: Path, rows: list[str], head: str = HEAD) -> Path:
    with gzip.open(path, "wt") as file:
        file.write(head + "".join(row + "\n" for row in rows))
    return path


def two_gpus(ticks: int) -> list[str]:
    start = "2025/07/27 00:22:"
    return [
        f"{start}{20 + tick // 10}.{tick % 10}{gpu:02d}, {70 + gpu} W, {10 * gpu + tick} %, {100 + gpu} MiB"
        for tick in range(ticks)
        for gpu in (0, 1)
    ]


def test_interleaved_gpus_are_told_apart(tmp_path: Path) -> None:
    first, second = read_nvidia_smi(recording(tmp_path / "a.csv.gz", two_gpus(25)))
    assert (first.source, first.device, second.device) == ("a.csv.gz", 0, 1)
    assert first.util == pytest.approx(np.arange(25) / 100)
    assert second.util == pytest.approx((10 + np.arange(25)) / 100)
    assert second.memory_bytes[0] == 101 * 2**20
    assert second.power_w[0] == 71.0
    assert np.diff(first.seconds) == pytest.approx(0.1, abs=1e-5)


def test_numbers_without_units_are_read_and_broken_rows_dropped_with_their_burst(tmp_path: Path) -> None:
    rows = [row.replace(" W", "").replace(" %", "") for row in two_gpus(12)]
    rows[6] = "2025/07/27 00:22:20.300, [N/A], [N/A], [N/A]"
    first, second = read_nvidia_smi(recording(tmp_path / "b.csv.gz", rows))
    assert len(first.util) == len(second.util) == 11
    assert 0.03 not in first.util.round(4)


def test_windows_are_means_and_largest_values_and_gaps_are_bridged(tmp_path: Path) -> None:
    rows = [row for row in two_gpus(40) if "00:22:21." not in row]
    first, _ = read_nvidia_smi(recording(tmp_path / "c.csv.gz", rows))
    util, memory = windows(first)
    assert util == pytest.approx([0.045, 0.145, 0.245, 0.345])
    assert memory == pytest.approx(100 * 2.0**20)


@pytest.mark.parametrize("jump", ["2025/07/27 01:", "2080/07/27 00:", "1970/07/27 00:"])
def test_nothing_is_made_up_while_a_clock_jumps(tmp_path: Path, jump: str) -> None:
    rows = [*two_gpus(40)[:40], *(row.replace("2025/07/27 00:", jump) for row in two_gpus(40)[40:])]
    first, _ = read_nvidia_smi(recording(tmp_path / "jump.csv.gz", rows))
    util, memory = windows(first)
    wanted = [0.045, 0.145, np.nan, 0.245, 0.345]
    assert util == pytest.approx(wanted if jump > "2025" else wanted[3:] + wanted[2:3] + wanted[:2], nan_ok=True)
    assert np.isnan(memory).tolist() == np.isnan(util).tolist()


def test_rows_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    rows = [row for pair in range(24, -1, -1) for row in two_gpus(25)[2 * pair : 2 * pair + 2]]
    first, second = read_nvidia_smi(recording(tmp_path / "backwards.csv.gz", rows))
    assert first.util == pytest.approx(np.arange(25) / 100)
    assert second.util == pytest.approx((10 + np.arange(25)) / 100)


@pytest.mark.parametrize(
    ("head", "rows", "message"),
    [
        ("timestamp, power.draw [W], memory.used [MiB]\n", [], "no column utilization.gpu"),
        (HEAD, [], "no row has a time"),
        (HEAD, ["yesterday, 1 W, 1 %, 1 MiB"], "no row has a time"),
    ],
)
def test_what_is_wrong_with_a_recording_is_named(tmp_path: Path, head: str, rows: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_nvidia_smi(recording(tmp_path / "d.csv.gz", rows, head))


def pods(path: Path, text: str, names: tuple[str, ...] = ("x.csv",)) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def metric(times: list[float]) -> str:
    return "value,timestamp_anon,container_ip\n" + "".join(f"{t},{t},{pod}\n" for t in times for pod in ("p", "q"))


def test_pods_are_cut_at_gaps_and_short_pieces_left_out(tmp_path: Path) -> None:
    times = [57.0 * i for i in range(10)] + [5000.0 + 57.0 * i for i in range(3)]
    series = read_pod_metric(pods(tmp_path / "m.tar.gz", metric(times)), scale=2.0, shortest=5)
    assert [each.source for each in series] == ["p", "q"]
    assert series[0].values == pytest.approx(np.array(times[:10]) / 2.0)
    (tmp_path / "m.csv").write_text(metric(times))
    assert len(read_pod_metric(tmp_path / "m.csv", shortest=2)) == 4


def test_what_is_wrong_with_a_pod_metric_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no column container_ip"):
        read_pod_metric(pods(tmp_path / "m.tar.gz", "value,timestamp_anon\n1,2\n"))
    with pytest.raises(ValueError, match="holds 2 files"):
        read_pod_metric(pods(tmp_path / "two.tar.gz", metric([1.0]), ("a.csv", "b.csv")))
