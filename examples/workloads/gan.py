"""A DCGAN that draws digits: two networks, two optimizers.

python gan.py --batch 16 --steps 270
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import torch
from data import TRAIN_DIGITS, Bytes, digits, split_digits
from loading import Batch, input_stream
from torch import Tensor, nn
from torch.nn import functional
from training import Defaults, Metrics, Stateful, fill_defaults, make_parser, prepare, train

DEFAULTS = Defaults(steps=270, batch=16, storage_rate=370.0)
NOISE = 32
WIDTH = 22


def generator() -> nn.Sequential:
    """Noise (N, 32, 1, 1) → pictures (N, 1, 32, 32) in [-1, 1]; layers after Radford et al., 2016."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 4 * WIDTH, 4, bias=False), nn.BatchNorm2d(4 * WIDTH), nn.ReLU(),
        nn.ConvTranspose2d(4 * WIDTH, 2 * WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * WIDTH), nn.ReLU(),
        nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(),
        nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def discriminator() -> nn.Sequential:
    """Pictures (N, 1, 32, 32) → how real they look (N,), a logit."""
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * WIDTH), nn.LeakyReLU(0.2),
        nn.Conv2d(2 * WIDTH, 4 * WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(4 * WIDTH), nn.LeakyReLU(0.2),
        nn.Conv2d(4 * WIDTH, 1, 4), nn.Flatten(0),
    )  # fmt: skip


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)


def decode(records: Bytes, _rng: np.random.Generator) -> Batch:
    """Images only."""
    return (torch.from_numpy(split_digits(records)[0].copy()),)


def normalised(images: Tensor) -> Tensor:
    """Bytes (N, H, W) as numbers in [-1, 1], (N, 1, H, W)."""
    return images.unsqueeze(1).float().div_(127.5).sub_(1.0)


def sliced_distance(one: Tensor, other: Tensor, directions: Tensor) -> float:
    """Sliced Wasserstein distance of two samples of equal size (N, D): mean over ``directions`` (D, K)."""
    return (one @ directions).sort(dim=0)[0].sub((other @ directions).sort(dim=0)[0]).abs().mean().item()


class Gan:
    """The task for the training loop."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._generator = generator().apply(_initialise)
        self._discriminator = discriminator().apply(_initialise)
        self._generator_optimizer = torch.optim.Adam(self._generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
        self._discriminator_optimizer = torch.optim.Adam(self._discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
        self._test = normalised(torch.from_numpy(digits()[0][TRAIN_DIGITS:])).flatten(1)
        self._directions = functional.normalize(torch.randn(self._test.shape[1], 64), dim=0)

    def train_step(self) -> Metrics:
        (images,) = next(self._batches)
        real = normalised(images)
        fake = self._generator(torch.randn(len(real), NOISE, 1, 1))

        on_real, on_fake = self._discriminator(real), self._discriminator(fake.detach())
        discriminator_loss = functional.softplus(-on_real).mean() + functional.softplus(on_fake).mean()
        self._discriminator_optimizer.zero_grad()
        discriminator_loss.backward()
        self._discriminator_optimizer.step()

        generator_loss = functional.softplus(-self._discriminator(fake)).mean()
        self._generator_optimizer.zero_grad()
        generator_loss.backward()
        self._generator_optimizer.step()
        return {"loss": generator_loss.item(), "discriminator_loss": discriminator_loss.item()}

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        drawn = self._generator(torch.randn(len(self._test), NOISE, 1, 1)).flatten(1)
        return {"distance": sliced_distance(drawn, self._test, self._directions)}

    def parts(self) -> dict[str, Stateful]:
        return {
            "generator": self._generator,
            "discriminator": self._discriminator,
            "generator_optimizer": self._generator_optimizer,
            "discriminator_optimizer": self._discriminator_optimizer,
        }


def main() -> int:
    """Train with the options of the command line."""
    parser = make_parser("Train a DCGAN that draws digits.", reads_storage=True)
    args = parser.parse_args()
    fill_defaults(args, DEFAULTS)
    prepare(args)
    with input_stream(args, "digits", TRAIN_DIGITS, decode) as batches:
        return train(Gan(batches), args)


if __name__ == "__main__":
    sys.exit(main())
