"""How long the demo waits: as long as its jobs progress, and not much longer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cotenant.scheduler.core.model import JobState

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEP_S = 200.0  # between two looks; two without progress are too long


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """Import the demo as it runs, with its own folder on the path."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import demo

        yield demo
    for name in set(sys.modules) - before:
        if name.startswith("demo"):
            sys.modules.pop(name)


def job(state: str = "RUNNING", *, epoch: int = 1, measured_at: float = 0.0, step_rate: float | None = None) -> Any:
    usage = SimpleNamespace(measured_at=measured_at, step_rate=step_rate)
    return SimpleNamespace(job_id="id-a", name="a", state=JobState(state), epoch=epoch, usage=usage)


@pytest.mark.parametrize(
    "looks",
    [
        [job("QUEUED"), job("STARTING"), job("RUNNING"), job("SUCCEEDED")],
        [job(epoch=epoch) for epoch in range(1, 5)],
        [job(measured_at=at, step_rate=0.1) for at in (1.0, 2.0, 3.0, 4.0)],
    ],
    ids=["states", "starts", "steps"],
)
def test_a_slow_machine_may_take_its_time(demo: ModuleType, looks: list[Any]) -> None:
    standing = demo.Standing("static", 0.0)
    for number, view in enumerate(looks, start=1):
        standing.look([view], number * STEP_S)


@pytest.mark.parametrize(
    "looks",
    [
        [job("QUEUED")] * 3,
        [job(measured_at=at, step_rate=0.0) for at in (1.0, 2.0, 3.0)],
        [job(measured_at=at) for at in (1.0, 2.0, 3.0)],
        [job(measured_at=1.0, step_rate=0.1), job(measured_at=2.0, step_rate=0.0), job(measured_at=3.0)],
    ],
    ids=["waits", "no step", "nothing said", "no step any more"],
)
def test_what_stands_still_is_given_up_with_its_names(demo: ModuleType, looks: list[Any]) -> None:
    standing = demo.Standing("static", 0.0)
    standing.look([looks[0]], STEP_S)
    standing.look([looks[1]], 2 * STEP_S)
    with pytest.raises(demo.NoProgressError, match=rf"^mode static: .* for 300 s \(a {looks[0].state}\)$"):
        standing.look([looks[2]], 3 * STEP_S)


def test_giving_up_is_one_line(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stand(*_: object) -> None:
        raise demo.NoProgressError("mode static: no job has progressed for 300 s (a RUNNING)")

    monkeypatch.setattr(demo, "run_modes", stand)
    monkeypatch.setattr(demo, "Console", lambda: Console(width=200))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path)])
    assert demo.main() == 1
    said = "given up without a report: mode static: no job has progressed for 300 s (a RUNNING)\n"
    assert capsys.readouterr().out == said
