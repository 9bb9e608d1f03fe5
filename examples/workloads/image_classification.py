"""Image classification: tells handwritten digits apart with one of several convolutional networks.

python image_classification.py --model mobilenet --batch 48 --steps 300
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch
from data import TRAIN_DIGITS, Bytes, digits, split_digits
from loading import Batch, input_stream
from torch import Tensor, nn
from torch.nn import functional
from training import Defaults, Metrics, Supervised, fill_defaults, make_parser, prepare, train

TEST_BATCH = 64


def lenet() -> nn.Module:
    """After LeNet-5 (LeCun et al., 1998), wider: two convolutions with pooling, three linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 24, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(24, 48, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(48 * 25, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def _convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


class InvertedResidual(nn.Module):
    """The block of MobileNetV2 (Sandler et al., 2018): widen, filter each channel, narrow; added to its input."""

    def __init__(self, inputs: int, outputs: int, stride: int, widen: int) -> None:
        super().__init__()
        hidden = inputs * widen
        self.block = nn.Sequential(
            *_convolution(inputs, hidden, kernel=1), nn.ReLU6(),
            *_convolution(hidden, hidden, stride=stride, groups=hidden), nn.ReLU6(),
            *_convolution(hidden, outputs, kernel=1),
        )  # fmt: skip
        self.adds = stride == 1 and inputs == outputs

    def forward(self, images: Tensor) -> Tensor:
        answer: Tensor = self.block(images)
        return images + answer if self.adds else answer


def mobilenet() -> nn.Module:
    """A small MobileNetV2."""
    return nn.Sequential(
        *_convolution(1, 8, stride=2), nn.ReLU6(),
        InvertedResidual(8, 12, stride=1, widen=2),
        InvertedResidual(12, 16, stride=2, widen=3),
        InvertedResidual(16, 16, stride=1, widen=3),
        InvertedResidual(16, 32, stride=2, widen=3),
        InvertedResidual(32, 32, stride=1, widen=3),
        *_convolution(32, 96, kernel=1), nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10),
    )  # fmt: skip


class ResidualBlock(nn.Module):
    """The basic block of ResNet (He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            *_convolution(inputs, outputs, stride=stride), nn.ReLU(), *_convolution(outputs, outputs)
        )
        fits = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if fits else nn.Sequential(*_convolution(inputs, outputs, kernel=1, stride=stride))
        )

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.block(images) + self.shortcut(images))


def resnet() -> nn.Module:
    """A ResNet of 12 layers for small images."""
    return nn.Sequential(
        *_convolution(1, 16), nn.ReLU(),
        ResidualBlock(16, 16, stride=1),
        ResidualBlock(16, 32, stride=2), ResidualBlock(32, 32, stride=1),
        ResidualBlock(32, 64, stride=2), ResidualBlock(64, 64, stride=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Defaults]] = {
    "lenet": (lenet, Defaults(steps=190, batch=32, storage_rate=505.0)),
    "mobilenet": (mobilenet, Defaults(steps=230, batch=48, storage_rate=940.0)),
    "resnet": (resnet, Defaults(steps=250, batch=16, storage_rate=315.0)),
}


def decode(records: Bytes, rng: np.random.Generator) -> Batch:
    """Images, shifted by up to two pixels, and labels."""
    images, labels = split_digits(records)
    images = np.roll(images, rng.integers(-2, 3, 2), axis=(1, 2))
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))


def normalised(images: Tensor) -> Tensor:
    """Bytes (N, H, W) as numbers around 0, (N, 1, H, W)."""
    return images.unsqueeze(1).float().div_(128.0).sub_(0.6)


class ImageClassification(Supervised):
    """The task for the training loop."""

    def __init__(self, model: nn.Module, batches: Iterator[Batch]) -> None:
        super().__init__(model, torch.optim.Adam(model.parameters(), lr=2e-3))
        self._batches = batches
        images, labels = digits()
        self._test_images = torch.from_numpy(images[TRAIN_DIGITS:])
        self._test_labels = torch.from_numpy(labels[TRAIN_DIGITS:].astype(np.int64))

    def loss(self) -> Tensor:
        images, labels = next(self._batches)
        return functional.cross_entropy(self._model(normalised(images)), labels)

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        self._model.eval()
        logits = torch.cat([self._model(normalised(images)) for images in self._test_images.split(TEST_BATCH)])
        self._model.train()
        correct = logits.argmax(dim=1) == self._test_labels
        loss = functional.cross_entropy(logits, self._test_labels)
        return {"loss": loss.item(), "accuracy": correct.float().mean().item()}


def main() -> int:
    """Train with the options of the command line."""
    parser = make_parser("Train a network that tells handwritten digits apart.", reads_storage=True)
    parser.add_argument("--model", choices=sorted(MODELS), default="lenet")
    args: argparse.Namespace = parser.parse_args()
    build, defaults = MODELS[args.model]
    fill_defaults(args, defaults)
    prepare(args)
    with input_stream(args, "digits", TRAIN_DIGITS, decode) as batches:
        return train(ImageClassification(build(), batches), args)


if __name__ == "__main__":
    sys.exit(main())
