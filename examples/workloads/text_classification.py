"""Text classification: a BERT-style encoder tells from which data set's description a passage is.

python text_classification.py --batch 6 --steps 280
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from data import PADDING, UNKNOWN, Corpus, corpus, passages
from torch import Tensor, nn
from torch.nn import functional
from training import Defaults, Metrics, Supervised, fill_defaults, make_parser, prepare, train

DEFAULTS = Defaults(steps=280, batch=6)
LENGTH = 96  # words in a passage
WORD_DROPOUT = 0.1


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each added to its input and normalised (Devlin et al., 2019)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.forward_network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.attention_norm = nn.LayerNorm(width)
        self.forward_norm = nn.LayerNorm(width)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = words.shape
        query, key, value = self.project(words).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        words = self.attention_norm(words + self.mix(attended.transpose(1, 2).reshape(batch, length, width)))
        answer: Tensor = self.forward_norm(words + self.forward_network(words))
        return answer


class Encoder(nn.Module):
    """Embeddings of words and positions, ``layers`` encoder layers, and a linear layer on the mean over the words."""

    def __init__(self, vocabulary: int, classes: int, width: int = 128, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.classify = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        present = tokens != PADDING
        mask = present[:, None, None, :]
        hidden = self.norm(self.words(tokens) + self.positions)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        weights = present.unsqueeze(2).float()
        answer: Tensor = self.classify((hidden * weights).sum(dim=1) / weights.sum(dim=1))
        return answer


def draw(texts: Corpus, batch: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Random training passages (N, LENGTH) of random texts, some words hidden, and the texts' numbers (N,)."""
    labels = rng.integers(0, len(texts.names), batch)
    tokens = np.full((batch, LENGTH), PADDING, dtype=np.int64)
    for row, label in zip(tokens, labels, strict=True):
        text = texts.train[label]
        start = rng.integers(0, max(1, len(text) - LENGTH + 1))
        passage = text[start : start + LENGTH]
        row[: len(passage)] = passage
    tokens[(tokens != PADDING) & (rng.random(tokens.shape) < WORD_DROPOUT)] = UNKNOWN
    return torch.from_numpy(tokens), torch.from_numpy(labels)


class TextClassification(Supervised):
    """The task for the training loop."""

    def __init__(self, batch: int, seed: int) -> None:
        self._texts = corpus()
        self._batch = batch
        self._rng = np.random.default_rng(seed)
        network = Encoder(len(self._texts.vocabulary) + UNKNOWN + 1, len(self._texts.names))
        super().__init__(network, torch.optim.AdamW(network.parameters(), lr=5e-4))
        tests = [passages(text, LENGTH) for text in self._texts.test]
        self._test_tokens = torch.from_numpy(np.concatenate(tests))
        self._test_labels = torch.repeat_interleave(torch.tensor([len(test) for test in tests]))

    def loss(self) -> Tensor:
        tokens, labels = draw(self._texts, self._batch, self._rng)
        return functional.cross_entropy(self._model(tokens), labels)

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        logits = self._model(self._test_tokens)
        correct = logits.argmax(dim=1) == self._test_labels
        loss = functional.cross_entropy(logits, self._test_labels)
        return {"loss": loss.item(), "accuracy": correct.float().mean().item()}


def main() -> int:
    """Train with the options of the command line."""
    parser = make_parser("Train a BERT-style encoder that tells texts apart.", reads_storage=False)
    args = parser.parse_args()
    fill_defaults(args, DEFAULTS)
    prepare(args)
    return train(TextClassification(args.batch, args.seed), args)


if __name__ == "__main__":
    sys.exit(main())
