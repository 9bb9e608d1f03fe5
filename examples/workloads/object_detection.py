"""Object detection: finds handwritten digits in cluttered pictures, with a detector that looks once.

python object_detection.py --batch 8 --steps 200
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from data import SCENE_SIDE, TRAIN_SCENES, Bytes, scenes, split_scenes
from loading import Batch, input_stream
from torch import Tensor, nn
from torch.nn import functional
from training import Defaults, Metrics, Supervised, fill_defaults, make_parser, prepare, train

DEFAULTS = Defaults(steps=220, batch=8, storage_rate=130.0)
CELLS = 2  # a picture is CELLS x CELLS cells, each with at most one digit
CELL = SCENE_SIDE // CELLS


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.1),
        nn.MaxPool2d(2),
    ]  # fmt: skip


class Detector(nn.Module):
    """After YOLO (Redmon et al., 2016), small: five convolutions down to one column per cell, which says everything."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        widths = (1, width, 2 * width, 4 * width, 4 * width, 8 * width)
        layers = [layer for inputs, outputs in itertools.pairwise(widths) for layer in _block(inputs, outputs)]
        self.see = nn.Sequential(*layers)
        self.say = nn.Conv2d(widths[-1], 5, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return (N, CELLS, CELLS, 5): whether there is a digit (logit), and its box, fractions of the cell."""
        answer: Tensor = self.say(self.see(images)).permute(0, 2, 3, 1)
        return answer


def boxes(masks: Bytes) -> npt.NDArray[np.float32]:
    """Return (N, CELLS, CELLS, 5) of masks (N, 64, 64): 1, top, left, bottom, right of a cell's digit, else 0."""
    cells = masks.reshape(len(masks), CELLS, CELL, CELLS, CELL).transpose(0, 1, 3, 2, 4) > 0
    found = np.zeros((len(masks), CELLS, CELLS, 5), dtype=np.float32)
    rows, columns = cells.any(axis=4), cells.any(axis=3)
    found[..., 0] = rows.any(axis=3)
    for place, line in enumerate((rows, columns)):
        found[..., 1 + place] = line.argmax(axis=3) / CELL
        found[..., 3 + place] = 1.0 - line[..., ::-1].argmax(axis=3) / CELL
    return found * found[..., :1]


def decode(records: Bytes, rng: np.random.Generator) -> Batch:
    """Images, mirrored half of the time, and boxes."""
    images, masks = split_scenes(records)
    if rng.random() < 0.5:
        images, masks = images[:, :, ::-1], masks[:, :, ::-1]
    return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(boxes(np.ascontiguousarray(masks)))


def normalised(images: Tensor) -> Tensor:
    """Bytes (N, H, W) as numbers around 0, (N, 1, H, W)."""
    return images.unsqueeze(1).float().div_(128.0).sub_(0.7)


class ObjectDetection(Supervised):
    """The task for the training loop."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        network = Detector()
        super().__init__(network, torch.optim.Adam(network.parameters(), lr=2e-3))
        self._batches = batches
        images, masks = scenes()
        self._test_images = torch.from_numpy(images[TRAIN_SCENES:])
        self._test_boxes = torch.from_numpy(boxes(masks[TRAIN_SCENES:]))

    def loss(self) -> Tensor:
        images, wanted = next(self._batches)
        said = self._model(normalised(images))
        there = wanted[..., 0]
        found = functional.binary_cross_entropy_with_logits(said[..., 0], there)
        where = (functional.smooth_l1_loss(said[..., 1:], wanted[..., 1:], reduction="none").sum(dim=3) * there).mean()
        return found + 5.0 * where

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        self._model.eval()
        said = self._model(normalised(self._test_images))
        self._model.train()
        there = self._test_boxes[..., 0] > 0
        missed = (said[..., 1:] - self._test_boxes[..., 1:]).abs().mean(dim=3)[there]
        return {"found": ((said[..., 0] > 0) == there).float().mean().item(), "box error": missed.mean().item()}


def main() -> int:
    """Train with the options of the command line."""
    parser = make_parser("Train a detector that finds digits in cluttered pictures.", reads_storage=True)
    args = parser.parse_args()
    fill_defaults(args, DEFAULTS)
    prepare(args)
    with input_stream(args, "scenes", TRAIN_SCENES, decode) as batches:
        return train(ObjectDetection(batches), args)


if __name__ == "__main__":
    sys.exit(main())
