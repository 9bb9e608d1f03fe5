"""The helper for programs that save and continue: alone, broken files, and ranks as one."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from cotenant import checkpointing
from cotenant.checkpointing import INTERRUPTED, Checkpointer

RANKS = """
import os, signal, sys
import torch
import torch.distributed as dist
from cotenant.checkpointing import Checkpointer, stop_requested

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.meet", rank=rank, world_size=2)

# First as Ray Train's workers under a lease.
if rank == 1:
    os.environ["COTENANT_STOP_FILE"] = f"{sys.argv[1]}.stop"
step = 0
while not stop_requested():
    step += 1
    if rank == 1 and step == 5:
        open(f"{sys.argv[1]}.stop", "w").close()
print(f"rank {rank} until {step}", flush=True)
os.environ.pop("COTENANT_STOP_FILE", None)

model = torch.nn.Linear(1, 1)
try:
    with Checkpointer(sys.argv[1], model=model) as saved:
        first = saved.restore()
        print(f"rank {rank} from {first}", flush=True)
        for step in range(first, 1000):
            with torch.no_grad():
                model.weight.fill_(float(step + 1))
            if rank == 1 and step + 1 == first + 5:
                os.kill(os.getpid(), signal.SIGTERM)
            saved.step_done(step + 1)
finally:
    dist.destroy_process_group()  # torch may abort at the end of a process whose threads still talk
"""


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 2)).pow(2).mean().backward()
    optimizer.step()


def lines(model: torch.nn.Module) -> list[float]:
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


def train(directory: Path, until: int, stop_at: int | None = None, seed: int = 1) -> tuple[list[float], int]:
    """Train from the newest checkpoint on; returns the weights and how many steps this run made."""
    torch.manual_seed(seed)
    model, optimizer = trained()
    made = 0
    with Checkpointer(directory, model=model, optimizer=optimizer) as saved:
        for step in range(saved.restore(), until):
            one_step(model, optimizer)
            made += 1
            if step + 1 == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            saved.step_done(step + 1, loss=float(step))
    return lines(model), made


def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """Weights, moments of the optimizer and random numbers continue; no step is made twice."""
    whole, made = train(tmp_path / "whole", 20)
    assert made == 20
    with pytest.raises(SystemExit) as left:
        train(tmp_path / "parts", 20, stop_at=7)
    assert left.value.code == INTERRUPTED == 143
    with pytest.raises(SystemExit):
        train(tmp_path / "parts", 20, stop_at=15, seed=2)
    parts, made = train(tmp_path / "parts", 20, seed=3)
    assert (parts, made) == (whole, 5)


def stepped(directory: Path, interrupt_at: int) -> tuple[int, int]:
    """Train until SIGTERM, which comes before the n-th line of the helper itself that is executed.

    Returns after which step it came, and after which step the program left; the same when it never came.
    """
    lines, came, step = 0, 0, 0

    def look(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal lines, came
        if frame.f_code.co_filename != checkpointing.__file__ or frame.f_code.co_name == "_note":
            return None
        if event == "line":
            lines += 1
            if lines == interrupt_at:
                came = step
                os.kill(os.getpid(), signal.SIGTERM)
        return look

    before = sys.gettrace()
    with suppress(SystemExit), Checkpointer(directory, every_s=0.0) as saved:
        sys.settrace(look)
        try:
            for step in range(1, 6):
                saved.step_done(step)
        finally:
            sys.settrace(before)
    return came, step


def test_sigterm_is_heard_wherever_it_comes(tmp_path: Path) -> None:
    """Also between the question whether anybody was asked to end and its answer, which under torchrun takes long."""
    missed = []
    for at in itertools.count(1):
        came, left = stepped(tmp_path, at)
        if came == 0 or came > 2:
            break
        if left > came + 1:
            missed.append((at, came, left))
    assert (missed, came) == ([], 3)


def test_what_was_told_besides_comes_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as saved:
        saved.step_done(3, epoch=2, best=0.5)
        saved.save()
    again = Checkpointer(tmp_path, model=model, optimizer=optimizer)
    assert (again.restore(), again.extra) == (3, {"epoch": 2, "best": 0.5})


def test_random_numbers_of_python_continue(tmp_path: Path) -> None:
    saved = Checkpointer(tmp_path)
    random.seed(5)
    saved.save()
    first = random.random()
    random.seed(6)
    saved.restore()
    assert random.random() == first


def test_a_torn_file_is_passed_over_and_two_are_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, _ = trained()
    saved = Checkpointer(tmp_path, model=model)
    for step in (1, 2, 3):
        saved.step_done(step)
        saved.save()
    newest, older = sorted(tmp_path.iterdir(), reverse=True)
    assert (newest.name, older.name) == ("step-000000000003.pt", "step-000000000002.pt")
    newest.write_bytes(newest.read_bytes()[:100])
    assert Checkpointer(tmp_path, model=model).restore() == 2
    assert "step-000000000003.pt is not whole" in capfd.readouterr().err


def torn(whole: bytes, seed: int) -> bytes:
    damaged, rng = bytearray(whole), random.Random(seed)
    for _ in range(50):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


@pytest.mark.parametrize(
    "content",
    [b"", b"no archive\n", b"{}", bytes(5000), b"PK\x03\x04" + bytes(100), *range(12)],
    ids=lambda content: str(content)[:20],
)
def test_whatever_is_in_a_damaged_file_the_older_one_serves(tmp_path: Path, content: bytes | int) -> None:
    model, _ = trained()
    saved = Checkpointer(tmp_path, model=model)
    for step in (1, 2):
        saved.step_done(step)
        saved.save()
    newest = max(tmp_path.iterdir())
    newest.write_bytes(torn(newest.read_bytes(), content) if isinstance(content, int) else content)
    assert Checkpointer(tmp_path, model=model).restore() in ({1, 2} if isinstance(content, int) else {1})


class Odd:
    """Something with a state that is not loaded safely."""

    def state_dict(self) -> Any:
        return {"odd": Path("x")}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError(state)


def test_a_whole_file_that_cannot_be_loaded_is_no_beginning(tmp_path: Path) -> None:
    saved = Checkpointer(tmp_path, odd=Odd())
    saved.step_done(5)
    saved.save()
    with pytest.raises(pickle.UnpicklingError):
        Checkpointer(tmp_path, odd=Odd()).restore()


def test_a_write_that_was_cut_short_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = trained()
    saved = Checkpointer(tmp_path, model=model)
    saved.step_done(1)
    saved.save()

    def full(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    saved.step_done(2)
    with pytest.raises(OSError, match="No space"):
        saved.save()
    assert len(list(tmp_path.iterdir())) == 1, "half a file takes the room of the next one"
    monkeypatch.undo()
    assert Checkpointer(tmp_path, model=model).restore() == 1


def test_nothing_there_is_a_beginning(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path / "none").restore() == 0


def test_saves_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    saved = Checkpointer(tmp_path, every_s=60.0)
    for step in range(1, 10):
        now[0] += 20.0
        saved.step_done(step)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-000000000006.pt", "step-000000000009.pt"]


def test_an_error_on_the_way_out_saves_what_was_done(tmp_path: Path) -> None:
    """As when SIGTERM has ended the helper processes of a data loader."""
    model, _ = trained()
    with pytest.raises(SystemExit) as left, Checkpointer(tmp_path, model=model) as saved:
        saved.step_done(4)
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")
    assert left.value.code == INTERRUPTED
    assert Checkpointer(tmp_path, model=model).restore() == 4


class Hurried:
    """A part during whose saving SIGTERM comes once more, as from a shell's end or an impatient user."""

    def state_dict(self) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """It has no state."""


@pytest.mark.parametrize("error", [None, RuntimeError("DataLoader worker (pid 1) exited unexpectedly")])
def test_a_second_sigterm_cuts_no_saving_short(tmp_path: Path, error: Exception | None) -> None:
    cut_short: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: cut_short.append(number))
    try:
        with pytest.raises(SystemExit), Checkpointer(tmp_path, hurried=Hurried()) as saved:
            if error is not None:
                saved.step_done(4)
            os.kill(os.getpid(), signal.SIGTERM)
            if error is not None:
                raise error
            saved.step_done(4)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert cut_short == []
    assert Checkpointer(tmp_path, hurried=Hurried()).restore() == 4


def test_an_error_that_has_another_cause_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Checkpointer(tmp_path) as saved:
        saved.step_done(4)
        raise RuntimeError("nan")
    assert list(tmp_path.iterdir()) == []


def test_the_handler_is_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Checkpointer(tmp_path) as saved:
        assert not saved.stop_requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_where_cotenant_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTENANT_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("COTENANT_CONTINUES", "1")
    Checkpointer().save()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000000.pt"]
    assert checkpointing.continues()
    monkeypatch.delenv("COTENANT_CHECKPOINT_DIR")
    monkeypatch.delenv("COTENANT_CONTINUES")
    assert not checkpointing.continues()
    with pytest.raises(ValueError, match="directory: None is not accepted here"):
        Checkpointer()


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, cotenant.checkpointing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ranks_leave_together(tmp_path: Path) -> None:
    """Rank 1 of two hears it at its fifth step: both leave at that step, and rank 0 has written."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    words = [sys.executable, str(script), str(tmp_path / "saved")]
    ranks = [subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [INTERRUPTED, INTERRUPTED]
    assert said == ["rank 0 until 5\nrank 0 from 0\n", "rank 1 until 5\nrank 1 from 0\n"]
    model = torch.nn.Linear(1, 1)
    assert Checkpointer(tmp_path / "saved", model=model).restore() == 5
    assert float(model.weight.detach()) == 5.0


def test_a_process_with_the_options_of_an_earlier_term_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTENANT_STOP_FILE", str(tmp_path / "job.1" / "stop.json"))
    with pytest.raises(RuntimeError, match="anew in each of its terms"):
        checkpointing.stop_requested()


def test_under_a_lease_the_block_is_left_in_any_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There Ray owns the signals and what SystemExit means: what is behind the block goes on."""
    stop_file = tmp_path / "stop.json"
    monkeypatch.setenv("COTENANT_STOP_FILE", str(stop_file))
    before = signal.getsignal(signal.SIGTERM)

    def loop(until: int) -> tuple[int, bool]:
        with Checkpointer(tmp_path / "saved") as saved:
            for step in range(saved.restore(), until):
                assert not checkpointing.stop_requested()
                if step == 3:
                    stop_file.touch()
                saved.step_done(step + 1)
        assert signal.getsignal(signal.SIGTERM) is before
        return saved.step, saved.stop_requested

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(loop, 10).result() == (4, True)
        stop_file.unlink()
        assert pool.submit(loop, 10).result() == (10, False)
        with pytest.raises(SystemExit), Checkpointer(tmp_path):
            raise SystemExit(INTERRUPTED)  # the program's own
