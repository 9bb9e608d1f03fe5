"""The training workloads that read samples: image classification, segmentation, DCGAN, text classification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from benchmarks.colocation.workloads import convnets, models
from benchmarks.colocation.workloads.base import Place, Workload
from benchmarks.colocation.workloads.catalogue import GAN, IMAGES, SEGMENTATION, TEXT, Configuration, Memory, Storage
from benchmarks.colocation.workloads.feeding import Batches, Generated, Stored, Transfer
from torch import Tensor, nn
from torch.nn import functional

CHANNELS = 3


class Learner(Protocol):
    """A network with its optimizer: what one step does with a batch."""

    record_bytes: int

    def learn(self, records: Tensor) -> Tensor:
        """One update from ``records``, uint8 (batch, record_bytes) on the device; returns the loss, a scalar there."""


def images_of(records: Tensor, side: int, memory_format: torch.memory_format) -> Tensor:
    """The images at the start of records (N, ...): (N, 3, side, side), values from -1 to 1."""
    pixels = records[:, : CHANNELS * side * side].view(-1, CHANNELS, side, side)
    return pixels.to(torch.float32, memory_format=memory_format).div(127.5).sub(1.0)


def tokens_of(records: Tensor, length: int, vocabulary: int) -> Tensor:
    """Texts of ``length`` tokens, two bytes each, at the start of records: (N, length), below ``vocabulary``."""
    pairs = records[:, : 2 * length].long().view(-1, length, 2)
    return (pairs[:, :, 0] * 256 + pairs[:, :, 1]) % vocabulary


def labels_of(records: Tensor) -> Tensor:
    """The class that the last byte of each record says, (N,)."""
    return records[:, -1].long() % convnets.CLASSES


class Supervised:
    """One network that learns to tell what the last bytes of a record say about the rest.

    Args:
        network: The network.
        optimizer: Its optimizer.
        record_bytes: Bytes of a sample.
        decode: Records → the network's input and the wanted answer.
        criterion: Output and wanted answer → loss.
        place: Where.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        record_bytes: int,
        decode: Callable[[Tensor], tuple[Tensor, Tensor]],
        criterion: Callable[[Tensor, Tensor], Tensor],
        place: Place,
    ) -> None:
        self.record_bytes = record_bytes
        self._network, self._optimizer = network, optimizer
        self._decode, self._criterion = decode, criterion
        self._place = place

    def learn(self, records: Tensor) -> Tensor:
        inputs, wanted = self._decode(records)
        with self._place.precision():
            loss = self._criterion(self._network(inputs), wanted)
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        return loss.detach()


def classifier(configuration: Configuration, place: Place) -> Supervised:
    """Image classification."""
    side = configuration.extent
    network = image_network(configuration, place)
    return Supervised(
        network,
        torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9),
        record_bytes=CHANNELS * side * side + 1,
        decode=lambda records: (
            images_of(records, side, place.memory_format()),
            records[:, -1].long() % convnets.CLASSES,
        ),
        criterion=functional.cross_entropy,
        place=place,
    )


def segmenter(configuration: Configuration, place: Place) -> Supervised:
    """Segmentation into two kinds of pixels."""
    side = configuration.extent
    network = place.put(models.UNet(configuration.width, configuration.depth))

    def decode(records: Tensor) -> tuple[Tensor, Tensor]:
        mask = records[:, CHANNELS * side * side :].view(-1, side, side)
        return images_of(records, side, place.memory_format()), (mask & 1).float()

    return Supervised(
        network,
        torch.optim.Adam(network.parameters(), lr=1e-4),
        record_bytes=(CHANNELS + 1) * side * side,
        decode=decode,
        criterion=functional.binary_cross_entropy_with_logits,
        place=place,
    )


def text_classifier(configuration: Configuration, place: Place) -> Supervised:
    """Text classification."""
    length, vocabulary = configuration.extent, models.vocabulary(configuration.width)
    network = place.put(models.Encoder(configuration.width, configuration.depth, length))
    return Supervised(
        network,
        torch.optim.AdamW(network.parameters(), lr=1e-5),
        record_bytes=2 * length + 1,
        decode=lambda records: (tokens_of(records, length, vocabulary), labels_of(records)),
        criterion=functional.cross_entropy,
        place=place,
    )


class Adversaries:
    """A DCGAN: first the discriminator learns from true and drawn pictures, then the generator from its judgement."""

    def __init__(self, configuration: Configuration, place: Place) -> None:
        side, width = configuration.extent, configuration.width
        self.record_bytes = CHANNELS * side * side
        self._side, self._place = side, place
        self._generator = place.put(models.generator(width, side))
        self._discriminator = place.put(models.discriminator(width, side))
        self._drawing = torch.optim.Adam(self._generator.parameters(), lr=1e-4, betas=(0.5, 0.999))
        self._judging = torch.optim.Adam(self._discriminator.parameters(), lr=1e-4, betas=(0.5, 0.999))

    def learn(self, records: Tensor) -> Tensor:
        true = images_of(records, self._side, self._place.memory_format())
        noise = torch.randn(len(true), models.NOISE, 1, 1, device=true.device)
        with self._place.precision():
            drawn = self._generator(noise)
            blame = functional.softplus(-self._discriminator(true)).mean()
            blame = blame + functional.softplus(self._discriminator(drawn.detach())).mean()
        self._judging.zero_grad()
        torch.autograd.backward(blame)
        self._judging.step()

        with self._place.precision():
            exposed = functional.softplus(-self._discriminator(drawn)).mean()
        self._drawing.zero_grad()
        torch.autograd.backward(exposed)
        self._drawing.step()
        return (blame + exposed).detach()


def image_network(configuration: Configuration, place: Place) -> nn.Module:
    """The classifier that the configuration names, on its device."""
    make = convnets.ARCHITECTURES[configuration.architecture]
    return place.put(make(configuration.width, configuration.depth, configuration.extent))


_LEARNERS: dict[str, Callable[[Configuration, Place], Learner]] = {
    IMAGES: classifier,
    SEGMENTATION: segmenter,
    GAN: Adversaries,
    TEXT: text_classifier,
}


class Training(Workload):
    """Reads a batch, copies it to the device, learns from it and reads the loss."""

    def __init__(self, configuration: Configuration, place: Place, seed: int) -> None:
        super().__init__(configuration.describe(), place)
        self._learner = _LEARNERS[configuration.family](configuration, place)
        self._transfer = Transfer(place.torch_device, staged=place.staged)
        self._batches = _batches(configuration, self._learner.record_bytes, seed)

    def step(self) -> float:
        return float(self._learner.learn(self._transfer(self._batches.next())).item())

    def helper_pids(self) -> list[int]:
        return self._batches.pids()

    def close(self) -> None:
        self._batches.close()


def _batches(configuration: Configuration, record_bytes: int, seed: int) -> Batches:
    match configuration.source:
        case Memory():
            return Generated(configuration.batch, record_bytes, seed)
        case Storage(rate=rate, ahead=ahead):
            return Stored(configuration.batch, record_bytes, rate=rate, ahead=ahead, seed=seed)
        case source:
            raise ValueError(f"source {source} is not accepted for {configuration.family}; give Memory or Storage")
