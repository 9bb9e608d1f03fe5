"""Image segmentation: a U-Net marks the ink of digits in cluttered pictures.

python segmentation.py --batch 4 --steps 280
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import torch
from data import TRAIN_SCENES, Bytes, scenes, split_scenes
from loading import Batch, input_stream
from torch import Tensor, nn
from torch.nn import functional
from training import Defaults, Metrics, Supervised, fill_defaults, make_parser, prepare, train

DEFAULTS = Defaults(steps=280, batch=4, storage_rate=92.0)


def _double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """After U-Net (Ronneberger et al., 2015): down and up again, each level joined with its like on the way up.

    Args:
        width: Channels of the first level; each level below has twice as many.
        levels: Number of levels below the first.
    """

    def __init__(self, width: int, levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.first = _double_convolution(1, width)
        self.down = nn.ModuleList(_double_convolution(widths[i], widths[i + 1]) for i in range(levels))
        self.up = nn.ModuleList(nn.ConvTranspose2d(widths[i + 1], widths[i], 2, 2) for i in range(levels))
        self.join = nn.ModuleList(_double_convolution(2 * widths[i], widths[i]) for i in range(levels))
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        kept = [self.first(images)]
        for down in self.down:
            kept.append(down(functional.max_pool2d(kept[-1], 2)))
        current = kept.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            current = join(torch.cat([kept.pop(), up(current)], dim=1))
        answer: Tensor = self.last(current)
        return answer


def decode(records: Bytes, rng: np.random.Generator) -> Batch:
    """Images and masks, mirrored half of the time."""
    images, masks = split_scenes(records)
    if rng.random() < 0.5:
        images, masks = images[:, :, ::-1], masks[:, :, ::-1]
    return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(np.ascontiguousarray(masks))


def normalised(images: Tensor) -> Tensor:
    """Bytes (N, H, W) as numbers around 0, (N, 1, H, W)."""
    return images.unsqueeze(1).float().div_(128.0).sub_(0.7)


class Segmentation(Supervised):
    """The task for the training loop."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        network = UNet(width=8)
        super().__init__(network, torch.optim.Adam(network.parameters(), lr=2e-3))
        self._batches = batches
        images, masks = scenes()
        self._test_images = torch.from_numpy(images[TRAIN_SCENES:])
        self._test_masks = torch.from_numpy(masks[TRAIN_SCENES:]).bool()

    def loss(self) -> Tensor:
        images, masks = next(self._batches)
        return functional.binary_cross_entropy_with_logits(self._model(normalised(images)).squeeze(1), masks.float())

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        self._model.eval()
        marked = self._model(normalised(self._test_images)).squeeze(1) > 0
        self._model.train()
        both, either = (marked & self._test_masks).sum().item(), (marked | self._test_masks).sum().item()
        return {"overlap": both / either}


def main() -> int:
    """Train with the options of the command line."""
    parser = make_parser("Train a U-Net that marks digits in cluttered pictures.", reads_storage=True)
    args = parser.parse_args()
    fill_defaults(args, DEFAULTS)
    prepare(args)
    with input_stream(args, "scenes", TRAIN_SCENES, decode) as batches:
        return train(Segmentation(batches), args)


if __name__ == "__main__":
    sys.exit(main())
