"""Speech recognition: a recurrent network that writes down the phones of made-up words, trained with CTC.

python speech_recognition.py --batch 16 --steps 200
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import torch
from data import BANDS, PHONES, TRAIN_UTTERANCES, Bytes, split_utterances, utterances
from loading import Batch, input_stream
from torch import Tensor, nn
from torch.nn import functional
from training import Defaults, Metrics, Supervised, fill_defaults, make_parser, prepare, train

DEFAULTS = Defaults(steps=220, batch=16, storage_rate=150.0)
BLANK = 0


class Recogniser(nn.Module):
    """After Deep Speech (Hannun et al., 2014), small: a convolution, a recurrent layer both ways, a linear layer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.hear = nn.Conv1d(BANDS, width, 5, stride=2, padding=2)
        self.remember = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.write = nn.Linear(2 * width, PHONES + 1)

    def forward(self, sounds: Tensor) -> Tensor:
        """Return log-probabilities (T, N, PHONES + 1) of sounds (N, FRAMES, BANDS)."""
        heard = functional.relu(self.hear(sounds.transpose(1, 2))).transpose(1, 2)
        answer: Tensor = self.write(self.remember(heard)[0]).log_softmax(dim=2).transpose(0, 1)
        return answer


def decode(records: Bytes, rng: np.random.Generator) -> Batch:
    """Spectrograms, louder or softer, and phones."""
    sounds, phones = split_utterances(records)
    louder = np.clip(sounds * rng.uniform(0.8, 1.2), 0, 255).astype(np.uint8)
    return torch.from_numpy(louder), torch.from_numpy(phones.astype(np.int64))


def normalised(sounds: Tensor) -> Tensor:
    """Bytes as numbers around 0."""
    return sounds.float().div_(64.0).sub_(1.0)


def spelt(best: Tensor) -> list[int]:
    """Return what the most likely symbols (T,) say: repeated ones once, blanks left out."""
    symbols = torch.unique_consecutive(best).tolist()
    return [symbol for symbol in symbols if symbol != BLANK]


class SpeechRecognition(Supervised):
    """The task for the training loop."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        network = Recogniser()
        super().__init__(network, torch.optim.Adam(network.parameters(), lr=3e-3))
        self._batches = batches
        sounds, phones = utterances()
        self._test_sounds = torch.from_numpy(sounds[TRAIN_UTTERANCES:])
        self._test_phones = [row[row > 0].tolist() for row in phones[TRAIN_UTTERANCES:]]

    def loss(self) -> Tensor:
        sounds, phones = next(self._batches)
        likely = self._model(normalised(sounds))
        heard = torch.full((len(sounds),), len(likely), dtype=torch.long)
        return functional.ctc_loss(likely, phones, heard, (phones > 0).sum(dim=1), blank=BLANK)

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        self._model.eval()
        best = self._model(normalised(self._test_sounds)).argmax(dim=2)
        self._model.train()
        right = sum(spelt(best[:, n]) == phones for n, phones in enumerate(self._test_phones))
        return {"words right": right / len(self._test_phones)}


def main() -> int:
    """Train with the options of the command line."""
    parser = make_parser("Train a network that writes down the phones of made-up words.", reads_storage=True)
    args = parser.parse_args()
    fill_defaults(args, DEFAULTS)
    prepare(args)
    with input_stream(args, "utterances", TRAIN_UTTERANCES, decode) as batches:
        return train(SpeechRecognition(batches), args)


if __name__ == "__main__":
    sys.exit(main())
