"""The other networks: U-Net, the two halves of a DCGAN, a BERT-style encoder, and actor and critic."""

from __future__ import annotations

import torch
from benchmarks.colocation.workloads.convnets import CLASSES, unit
from torch import Tensor, nn
from torch.nn import functional

NOISE = 64  # numbers that a picture is drawn from
OBSERVED = 4  # numbers that a cart-pole shows
ACTIONS = 2


def vocabulary(width: int) -> int:
    """How many different words an encoder knows: for the width of BERT-base somewhat fewer than BERT's 30,000."""
    return 32 * width


class UNet(nn.Module):
    """After Ronneberger et al. (2015): images (N, 3, side, side) → logits of every pixel (N, side, side).

    Args:
        width: Channels of the first level; every level below has twice as many.
        depth: Levels below the first; ``side`` must be a multiple of 2 ** depth.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = self._pair(3, width)
        self.lower, self.lift, self.merge = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for level in range(depth):
            here, below = width << level, width << (level + 1)
            self.lower.append(nn.Sequential(nn.MaxPool2d(2), self._pair(here, below)))
            self.lift.append(nn.ConvTranspose2d(below, here, 2, 2))
            self.merge.append(self._pair(below, here))
        self.leave = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(unit(inputs, outputs), unit(outputs, outputs))

    def forward(self, images: Tensor) -> Tensor:
        levels: list[Tensor] = [self.enter(images)]
        for lower in self.lower:
            levels.append(lower(levels[-1]))
        current = levels.pop()
        for lift, merge in zip(reversed(self.lift), reversed(self.merge), strict=True):
            current = merge(torch.cat((levels.pop(), lift(current)), dim=1))
        logits: Tensor = self.leave(current)
        return logits.squeeze(1)


def _doublings(side: int) -> int:
    """How often 4 is doubled to get ``side``."""
    return side.bit_length() - 3


def generator(width: int, side: int) -> nn.Sequential:
    """After Radford et al. (2016): noise (N, NOISE, 1, 1) → pictures (N, 3, side, side) in [-1, 1].

    ``side`` is a power of 2 from 8 on; ``width`` is the number of channels before the last layer.
    """
    levels = _doublings(side)
    channels = width << (levels - 1)
    layers: list[nn.Module] = [nn.ConvTranspose2d(NOISE, channels, 4, bias=False)]
    for _ in range(levels - 1):
        layers += [
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.ConvTranspose2d(channels, channels // 2, 4, 2, 1, bias=False),
        ]
        channels //= 2
    return nn.Sequential(
        *layers, nn.BatchNorm2d(channels), nn.ReLU(), nn.ConvTranspose2d(channels, 3, 4, 2, 1), nn.Tanh()
    )


def discriminator(width: int, side: int) -> nn.Sequential:
    """The generator's opponent: pictures (N, 3, side, side) → a logit each (N,)."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    channels = width
    for _ in range(_doublings(side) - 1):
        layers += [
            nn.Conv2d(channels, 2 * channels, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.LeakyReLU(0.2),
        ]
        channels *= 2
    return nn.Sequential(*layers, nn.Conv2d(channels, 1, 4), nn.Flatten(0))


class _Layer(nn.Module):
    """Self-attention, then two linear layers; each added to its input and normalised (Devlin et al., 2019)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.triple, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList((nn.LayerNorm(width), nn.LayerNorm(width)))

    def forward(self, words: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.triple(words).chunk(3, dim=2)
        )
        seen = functional.scaled_dot_product_attention(query, key, value)
        words = self.norms[0](words + self.output(seen.transpose(1, 2).flatten(2)))
        result: Tensor = self.norms[1](words + self.inner(words))
        return result


class Encoder(nn.Module):
    """A BERT-style classifier: tokens (N, length) → logits (N, CLASSES).

    Args:
        width: Numbers per word. A head has 64 of them from 256 on, else 32.
        depth: Encoder layers.
        length: Words of a text.
    """

    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary(width), width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.norm = nn.LayerNorm(width)
        heads = max(1, width // (64 if width >= 256 else 32))
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(depth)))
        self.decide = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.layers(self.norm(self.words(tokens) + self.places))
        logits: Tensor = self.decide(words[:, 0])  # the first word stands for the text
        return logits


class ActorCritic(nn.Module):
    """States (…, OBSERVED) → logits of the actions (…, ACTIONS) and values (…); ``depth`` hidden layers each."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.actor = self._stack(width, depth, ACTIONS)
        self.critic = self._stack(width, depth, 1)

    @staticmethod
    def _stack(width: int, depth: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = [nn.Linear(OBSERVED, width), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(width, outputs))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(states), self.critic(states).squeeze(-1)
