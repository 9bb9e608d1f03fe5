"""Jobs that begin to be held back by their share are told of before their window ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.actors.heldback import HeldBackWatch
from cotenant.actors.shim.reportfile import PREFIX, ReportWriter, ThrottleReader


def told(job_dir: Path, held_per_tick: list[float | None]) -> dict[int, float]:
    """What is told in ticks of 0.1 s, by tick: the process was held back that long in each; None = no report yet."""
    watch, writer, held_s = HeldBackWatch(), None, 0.0
    found: dict[int, float] = {}
    for tick, held in enumerate(held_per_tick):
        if held is not None:
            writer = writer or ReportWriter(str(job_dir), 0)
            held_s += held
            writer.write(tick + 1, 0.1 * tick, held_s, 0)
        for job_id, fraction in watch.look(100.0 + 0.1 * tick, {"a": job_dir}).items():
            assert job_id == "a"
            found[tick] = round(fraction, 2)
    watch.close()
    return found


@pytest.mark.parametrize(
    ("held_per_tick", "expected"),
    [
        pytest.param([0.0] * 20, {}, id="never"),
        pytest.param([0.0] * 6 + [0.1] * 20, {6: 0.33}, id="begins, and lasts: told once, within two samples"),
        pytest.param([0.0] * 6 + [0.03] + [0.0] * 10, {}, id="a moment"),
        pytest.param([0.08] * 20, {3: 0.8}, id="from the beginning"),
        pytest.param([0.0] * 6 + [0.1] * 6 + [0.0] * 6 + [0.1] * 6, {6: 0.33, 18: 0.33}, id="begins again"),
        pytest.param([0.0] * 6 + ([0.1] * 2 + [0.0] * 3) * 3, {6: 0.33, 16: 0.33}, id="on and off: once a second"),
        pytest.param([None] * 8 + [0.0] * 16 + [0.1] * 3, {24: 0.33}, id="its first process comes later"),
    ],
)
def test_told_when_it_begins(tmp_path: Path, held_per_tick: list[float | None], expected: dict[int, float]) -> None:
    assert told(tmp_path, held_per_tick) == expected


def test_another_run_of_a_job_begins_anew(tmp_path: Path) -> None:
    watch = HeldBackWatch()
    for epoch, held_s in enumerate((50.0, 0.0)):
        folder = tmp_path / f"a.{epoch}"
        folder.mkdir()
        writer = ReportWriter(str(folder), 0)
        writer.write(1, 1.0, held_s, 0)
        assert [watch.look(10.0 * epoch + 0.1 * tick, {"a": folder}) for tick in range(8)] == [{}] * 8
    watch.close()


def test_what_is_no_report_is_left_out(tmp_path: Path) -> None:
    for name, content in (("1", b""), ("2", b"CTREPRT\0"), ("3", b"x" * 1000)):
        (tmp_path / f"{PREFIX}{name}").write_bytes(content)
        with pytest.raises(ValueError, match=r".+"):
            ThrottleReader(str(tmp_path / f"{PREFIX}{name}"))
    assert told(tmp_path, [0.0] * 6 + [0.1] * 3) == {6: 0.33}
