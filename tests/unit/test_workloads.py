"""The example training programs: their data, physics, storage, options, and one program from start to end."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support import wait_until

WORKLOADS = Path(__file__).parents[2] / "examples" / "workloads"
MODULES = ("cartpole", "data", "object_detection", "speech_recognition", "storage", "training")


@pytest.fixture(scope="module")
def programs() -> dict[str, ModuleType]:
    """The programs' modules, imported as the programs import them, and gone from ``sys.modules`` afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(WORKLOADS))
    try:
        return {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(WORKLOADS))
        for name in set(sys.modules) - before:
            if name in MODULES:
                del sys.modules[name]


# Cart-pole physics


def test_upright_pole_pushed_right_falls_left(programs: dict[str, ModuleType]) -> None:
    push, turn = programs["cartpole"].accelerations(np.zeros((1, 4)), np.array([10.0]))
    # By hand, from Florian's equations (23) and (24) with an upright pole: 10 N on 1.1 kg, pole of 0.1 kg and 0.5 m.
    by_hand = -(10 / 1.1) / (0.5 * (4 / 3 - 0.1 / 1.1))
    assert turn[0] == pytest.approx(by_hand)
    assert push[0] == pytest.approx((10 - 0.1 * 0.5 * by_hand) / 1.1)


def test_energy_is_kept_without_a_force(programs: dict[str, ModuleType]) -> None:
    cartpole = programs["cartpole"]
    state = np.array([[0.0, 0.0, 0.1, 0.0]])

    def energy(now: np.ndarray) -> float:
        speed, angle, spin = now[0, 1], now[0, 2], now[0, 3]
        mass, length = cartpole.POLE_MASS, cartpole.HALF_LENGTH
        kinetic = 0.5 * (cartpole.CART_MASS + mass) * speed**2 + mass * length * speed * spin * np.cos(angle)
        return float(kinetic + (2 / 3) * mass * length**2 * spin**2 + mass * cartpole.GRAVITY * length * np.cos(angle))

    start = energy(state)
    for _ in range(20_000):  # one second, in steps so small that Euler's error is far below the tolerance
        push, turn = cartpole.accelerations(state, np.zeros(1))
        state = state + 5e-5 * np.stack([state[:, 1], push, state[:, 3], turn], axis=1)
    assert abs(state[0, 2]) > 0.5  # it did fall
    assert energy(state) == pytest.approx(start, rel=1e-3)


def test_poles_fall_and_start_anew(programs: dict[str, ModuleType]) -> None:
    poles = programs["cartpole"].CartPoles(3, seed=1)
    lengths = []
    for step in range(1, 40):
        fell, ended = poles.step(np.ones(3, dtype=np.int64))
        assert (fell <= ended).all()
        if ended[0]:
            lengths.append(step)
            assert np.abs(poles.state[0]).max() <= 0.05
    assert 7 <= lengths[0] <= 12  # always pushing one way fells the pole in about ten steps
    assert len(lengths) >= 3


def test_process_plays_the_same_game(programs: dict[str, ModuleType]) -> None:
    cartpole = programs["cartpole"]
    local, remote = cartpole.CartPoles(4, seed=3), cartpole.CartPoleProcess(4, latency_s=1e-4, seed=3)
    try:
        for _ in range(30):
            actions = (local.state[:, 2] > 0).astype(np.int64)
            for mine, theirs in zip(local.step(actions), remote.step(actions), strict=True):
                assert (mine == theirs).all()
            assert np.allclose(local.state, remote.state, atol=1e-6)
    finally:
        remote.close()


# Storage


@pytest.mark.parametrize(
    ("rate", "reads", "gap_s", "want_s"),
    [
        (100.0, [50, 50, 50], 0.0, 1.5),  # the reader never pauses: the rate alone counts
        (100.0, [50, 50, 50], 0.2, 1.5),  # pauses shorter than a read's wait are hidden
        (10.0, [1] * 20, 0.0, 2.0),  # small reads
    ],
)
def test_token_bucket_keeps_the_rate(
    programs: dict[str, ModuleType], rate: float, reads: list[int], gap_s: float, want_s: float
) -> None:
    bucket = programs["storage"].TokenBucket(rate, burst=0.0, now=0.0)
    issued, delivered = 0.0, 0.0
    for samples in reads:
        delivered = issued + bucket.take(samples, issued)
        issued = max(delivered, issued + gap_s)
    assert delivered == pytest.approx(want_s)


def test_token_bucket_saves_up_no_more_than_its_burst(programs: dict[str, ModuleType]) -> None:
    bucket = programs["storage"].TokenBucket(100.0, burst=10.0, now=0.0)
    assert bucket.take(10, now=0.0) == 0.0
    assert bucket.take(15, now=60.0) == pytest.approx(0.05)  # a minute of idling saved 10 samples, not 6,000


def test_server_serves_the_records_that_are_asked_for(programs: dict[str, ModuleType]) -> None:
    storage, data = programs["storage"], programs["data"]
    with storage.running_server("digits", 1e6) as address:
        client = storage.StorageClient(address, "digits")
        images, labels = data.split_digits(client.read(np.array([5, 0, 1796])))
        client.close()
        with pytest.raises(ConnectionError, match="serves 'digits', not 'scenes'"):
            storage.StorageClient(address, "scenes")
    want_images, want_labels = data.digits()
    assert (images == want_images[[5, 0, 1796]]).all()
    assert (labels == want_labels[[5, 0, 1796]]).all()
    with pytest.raises(ConnectionError, match="no storage server answers"):
        storage.StorageClient(address, "digits")


# Data


def test_digits(programs: dict[str, ModuleType]) -> None:
    images, labels = programs["data"].digits()
    assert images.shape == (1797, 32, 32)
    assert images.dtype == np.uint8
    assert images.max() == 255
    assert np.bincount(labels).tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]  # as the data set's page says


def test_enlarging_keeps_corners_and_interpolates(programs: dict[str, ModuleType]) -> None:
    enlarged = programs["data"].enlarge(np.array([[[0.0, 100.0], [0.0, 100.0]]], dtype=np.float32), 4)
    assert enlarged[0].tolist() == [[0, 25, 75, 100]] * 4


def test_scenes_are_always_the_same_and_marked(programs: dict[str, ModuleType]) -> None:
    data = programs["data"]
    images, masks = data.scenes()
    assert images.shape == masks.shape == (600, 64, 64)
    assert set(np.unique(masks)) == {0, 1}
    assert 0.02 < masks.mean() < 0.3
    assert images[masks == 1].min() > 100
    assert (images[masks == 0] > 150).any()  # clutter as bright as ink
    assert (data.scenes()[0] == images).all()


def test_words(programs: dict[str, ModuleType]) -> None:
    assert programs["data"].words("The 8x8 Digits, (UCI)!") == ["the", "8", "x", "8", "digits", "uci"]


def test_corpus_knows_only_the_words_of_its_training_part(programs: dict[str, ModuleType]) -> None:
    data = programs["data"]
    texts = data.corpus()
    assert "digits" in texts.names
    assert len(texts.names) == len(texts.train) == len(texts.test) >= 10
    assert sorted(texts.vocabulary.values()) == list(range(2, len(texts.vocabulary) + 2))
    assert all(tokens.min() >= data.UNKNOWN for tokens in texts.train + texts.test)
    trained = np.unique(np.concatenate(texts.train))
    assert np.isin(np.concatenate(texts.test), np.append(trained, data.UNKNOWN)).all()


@pytest.mark.parametrize(("words", "length", "want"), [(5, 2, (3, 2)), (4, 2, (2, 2)), (0, 3, (1, 3))])
def test_passages(programs: dict[str, ModuleType], words: int, length: int, want: tuple[int, int]) -> None:
    cut = programs["data"].passages(np.arange(2, 2 + words), length)
    assert cut.shape == want
    assert cut.ravel()[:words].tolist() == list(range(2, 2 + words))
    assert (cut.ravel()[words:] == programs["data"].PADDING).all()


# Options


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "--steps: '0' is not accepted; give a whole number above 0"),
        (["--steps", "1.5"], "--steps: '1.5' is not accepted; give a whole number above 0"),
        (["--batch", "-3"], "--batch: '-3' is not accepted; give a whole number above 0"),
        (["--seconds", "nan"], "--seconds: 'nan' is not accepted; give a number above 0"),
        (["--storage-rate", "inf"], "--storage-rate: 'inf' is not accepted; give a number above 0"),
        (["--eval-every", "-1"], "--eval-every: '-1' is not accepted; give a whole number, 0 or above"),
        (["--storage", "nowhere"], "--storage: 'nowhere' is not HOST:PORT, for example 127.0.0.1:9000"),
        (["--storage", "a:1", "--storage-rate", "5"], "not allowed with argument"),
        (["--epochs", "3"], "unrecognized arguments: --epochs 3"),
    ],
)
def test_bad_options(
    programs: dict[str, ModuleType], capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        programs["training"].make_parser("A program.", reads_storage=True).parse_args(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# The loop


class Line:
    """The smallest task: fits a line."""

    def __init__(self, torch: ModuleType, kill_at: int | None = None) -> None:
        self._torch = torch
        self._kill_at = kill_at
        self.model = torch.nn.Linear(1, 1)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.steps = self.evaluations = 0

    def train_step(self) -> dict[str, float]:
        self.steps += 1
        if self.steps == self._kill_at:
            os.kill(os.getpid(), signal.SIGTERM)
        inputs = self._torch.randn(8, 1)
        loss = (self.model(inputs) - 3 * inputs - 1).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return {"loss": loss.item()}

    def evaluate(self) -> dict[str, float]:
        self.evaluations += 1
        return {"loss": 0.0}

    def parts(self) -> dict[str, Any]:
        return {"network": self.model, "optimizer": self._optimizer}


Arguments = Callable[..., argparse.Namespace]


@pytest.fixture
def arguments(programs: dict[str, ModuleType]) -> Arguments:
    """Makes the options of a program from a command line."""
    return lambda *argv: programs["training"].make_parser("A program.", reads_storage=False).parse_args(argv)


def test_loop_evaluates_checkpoints_and_resumes(
    programs: dict[str, ModuleType], arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    training, out = programs["training"], ("--out", str(tmp_path / "new" / "out"))
    first = Line(torch)
    assert training.train(first, arguments("--steps", "40", "--eval-every", "15", *out)) == 0
    assert (first.steps, first.evaluations) == (40, 2)
    assert re.fullmatch(r"done: 40 steps, [\d.]+ steps/s, loss [\d.]+", capsys.readouterr().out.splitlines()[-1])

    second = Line(torch)
    assert training.train(second, arguments("--steps", "41", "--eval-every", "0", *out)) == 0
    assert (second.steps, second.evaluations) == (1, 0)
    assert "resuming at step 40" in capsys.readouterr().out
    assert abs(second.model.weight.item() - 3) < abs(Line(torch).model.weight.item() - 3)

    assert training.train(Line(torch), arguments("--steps", "41", *out)) == 0
    assert "done: 41 steps, 0.00 steps/s" in capsys.readouterr().out


def test_loop_stops_after_seconds(programs: dict[str, ModuleType], arguments: Arguments) -> None:
    import torch

    task = Line(torch)
    assert programs["training"].train(task, arguments("--steps", "1000000000", "--seconds", "0.05")) == 0
    assert 1 <= task.steps < 1_000_000


def test_sigterm_writes_a_checkpoint(
    programs: dict[str, ModuleType], arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    handler = signal.getsignal(signal.SIGTERM)
    args = arguments("--steps", "1000", "--checkpoint-every", "0", "--out", str(tmp_path))
    assert programs["training"].train(Line(torch, kill_at=7), args) == 143
    assert signal.getsignal(signal.SIGTERM) == handler
    assert "stopped by SIGTERM, checkpoint written: 7 steps" in capsys.readouterr().out
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 7


def test_a_checkpoint_that_does_not_fit_is_refused(
    programs: dict[str, ModuleType], arguments: Arguments, tmp_path: Path
) -> None:
    import torch

    train, args = programs["training"].train, arguments("--steps", "2", "--out", str(tmp_path))
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(SystemExit, match=r"--out: .*checkpoint.pt cannot be read as a checkpoint"):
        train(Line(torch), args)
    torch.save({"model": "resnet", "step": 1, "loss": 0.5, "state": {}}, tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit, match=r"is the checkpoint of another program or model \(resnet\)"):
        train(Line(torch), args)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"--out: .* is not accepted \(Not a directory\); give a folder"):
        train(Line(torch), arguments("--steps", "2", "--out", str(tmp_path / "file" / "out")))


def test_divergence_is_an_error(programs: dict[str, ModuleType], arguments: Arguments) -> None:
    import torch

    task = Line(torch)
    torch.nn.init.constant_(task.model.weight, float("nan"))
    with pytest.raises(SystemExit, match="the loss is nan at step 1"):
        programs["training"].train(task, arguments("--steps", "2"))


def test_a_program_from_start_to_end(tmp_path: Path) -> None:
    command = [sys.executable, str(WORKLOADS / "image_classification.py"), "--storage-rate", "5000"]
    command += ["--steps", "100000", "--log-every", "0.3", "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, process_group=0) as process:
        assert process.stdout is not None and process.stderr is not None
        losses: list[float] = []
        for line in process.stdout:
            losses += [float(loss) for loss in re.findall(r"^step .* loss ([\d.]+) ", line)]
            if losses and losses[-1] < 2.0:  # it learns: chance is 2.3
                break
        os.killpg(process.pid, signal.SIGTERM)  # the helpers get it too, and must not take the input away
        last = process.stdout.read()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
        assert process.stderr.read() == ""
    assert re.search(r"stopped by SIGTERM, checkpoint written: \d+ steps", last)
    assert (tmp_path / "checkpoint.pt").exists()
    wait_until(lambda: not group_exists(process.pid), 10.0, "the helper processes have ended")


def group_exists(group: int) -> bool:
    """Whether a process of this process group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# Detection and speech


def test_boxes_are_around_the_ink_of_each_cell(programs: dict[str, ModuleType]) -> None:
    masks = np.zeros((1, 64, 64), dtype=np.uint8)
    masks[0, 4:12, 8:24] = 1
    masks[0, 32:64, 48:64] = 1
    found = programs["object_detection"].boxes(masks)[0]
    assert found[0, 0].tolist() == [1.0, 4 / 32, 8 / 32, 12 / 32, 24 / 32]
    assert found[1, 1].tolist() == [1.0, 0.0, 16 / 32, 1.0, 1.0]
    assert found[0, 1].tolist() == found[1, 0].tolist() == [0.0] * 5


def test_utterances_are_always_the_same_and_their_phones_come_back(programs: dict[str, ModuleType]) -> None:
    data = programs["data"]
    sounds, phones = data.utterances()
    again, _ = data.utterances()
    assert (sounds == again).all()
    assert (phones.max(), phones.min()) == (data.PHONES, 0)
    assert {np.count_nonzero(word) for word in phones} == {3, 4, 5, 6}
    spectrograms, labels = data.split_utterances(data.RECORDS["utterances"]())
    assert (spectrograms == sounds).all()
    assert (labels == phones).all()


def test_what_a_recogniser_says_is_spelt_without_blanks_and_repetitions(programs: dict[str, ModuleType]) -> None:
    torch = programs["speech_recognition"].torch
    assert programs["speech_recognition"].spelt(torch.tensor([0, 3, 3, 0, 3, 5, 5, 0])) == [3, 3, 5]
