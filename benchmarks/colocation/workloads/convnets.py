"""Image classifiers of five kinds, each for any width, depth and resolution.

Images are (N, 3, side, side). ``width`` scales the channels and ``depth`` the number of blocks. From 64 pixels on the
first layers shrink the image fast, as the published networks for photographs do; below that they keep it, as those for
thumbnails do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

CLASSES = 10
LARGE_SIDE = 64  # pixels


def unit(
    inputs: int, outputs: int, kernel: int = 3, *, stride: int = 1, groups: int = 1, act: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Convolution, batch normalisation and activation (``nn.Identity`` for none)."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), act())


def head(channels: int) -> nn.Sequential:
    """Mean over the image and a linear layer: logits (N, CLASSES)."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def stem(width: int, side: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """The first layer: a quarter of the side for large images, the whole side for small ones."""
    if side < LARGE_SIDE:
        return unit(3, width, act=act)
    return nn.Sequential(unit(3, width, 7, stride=2, act=act), nn.MaxPool2d(3, 2, 1))


def lenet(width: int, depth: int, side: int) -> nn.Module:
    """After LeNet-5 (LeCun et al., 1998): ``depth`` convolutions with pooling, then three linear layers."""
    layers: list[nn.Module] = []
    channels = 3
    for level in range(depth):
        layers += [nn.Conv2d(channels, width << level, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width << level
    flat = channels * (side >> depth) ** 2
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)
    )


class Added(nn.Module):
    """A block whose output is added to its input, which a projection fits to it where the shapes differ."""

    def __init__(self, block: nn.Module, shortcut: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.block, self.shortcut, self.act = block, shortcut, act

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.act(self.block(images) + self.shortcut(images))
        return result


def _projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return unit(inputs, outputs, 1, stride=stride, act=nn.Identity)


def resnet(width: int, depth: int, side: int) -> nn.Module:
    """After He et al. (2016): stages of ``depth`` residual blocks, with bottlenecks from three blocks a stage on."""
    bottleneck = depth >= 3
    layers: list[nn.Module] = [stem(width, side)]
    channels = width
    for stage in range(4 if side >= LARGE_SIDE else 3):
        inner = width << stage
        for index in range(depth):
            stride = 2 if stage and not index else 1
            outputs = 4 * inner if bottleneck else inner
            if bottleneck:
                block = nn.Sequential(
                    unit(channels, inner, 1),
                    unit(inner, inner, stride=stride),
                    unit(inner, outputs, 1, act=nn.Identity),
                )
            else:
                block = nn.Sequential(unit(channels, inner, stride=stride), unit(inner, inner, act=nn.Identity))
            layers.append(Added(block, _projection(channels, outputs, stride), nn.ReLU()))
            channels = outputs
    return nn.Sequential(*layers, head(channels))


class SqueezeExcite(nn.Module):
    """Weighs the channels by what the whole image shows (Hu et al., 2018)."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, squeezed, 1), nn.SiLU(), nn.Conv2d(squeezed, channels, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        return images * torch.sigmoid(self.weigh(images))


def _inverted(
    inputs: int, outputs: int, *, stride: int, widen: int, kernel: int, act: type[nn.Module], squeeze: bool
) -> nn.Module:
    """Widen, filter every channel by itself, narrow; added to the input where the shapes agree."""
    hidden = inputs * widen
    layers: list[nn.Module] = [
        unit(inputs, hidden, 1, act=act),
        unit(hidden, hidden, kernel, stride=stride, groups=hidden, act=act),
    ]
    if squeeze:
        layers.append(SqueezeExcite(hidden, max(4, inputs // 4)))
    block = nn.Sequential(*layers, unit(hidden, outputs, 1, act=nn.Identity))
    return Added(block, nn.Identity(), nn.Identity()) if stride == 1 and inputs == outputs else block


def mobilenet(width: int, depth: int, side: int) -> nn.Module:
    """After MobileNetV2 (Sandler et al., 2018): inverted residual blocks with ReLU6, ``depth`` per stage."""
    act = nn.ReLU6
    layers: list[nn.Module] = [unit(3, width, stride=2, act=act)]
    channels = width
    stages = (
        ((1, 1, 2), (1.5, 2, 6), (2, 2, 6), (4, 2, 6), (6, 1, 6))
        if side >= LARGE_SIDE
        else ((1.5, 1, 3), (2, 2, 3), (4, 2, 3))
    )
    for factor, first_stride, widen in stages:
        outputs = int(width * factor)
        for index in range(depth):
            stride = 1 if index else first_stride
            layers.append(_inverted(channels, outputs, stride=stride, widen=widen, kernel=3, act=act, squeeze=False))
            channels = outputs
    return nn.Sequential(*layers, unit(channels, 4 * channels, 1, act=act), head(4 * channels))


def efficientnet(width: int, depth: int, side: int) -> nn.Module:
    """After EfficientNet (Tan and Le, 2019): inverted blocks with squeeze-and-excite, SiLU and kernels of 3 and 5."""
    act = nn.SiLU
    layers: list[nn.Module] = [unit(3, width, stride=2, act=act)]
    channels = width
    plan = ((1, 1, 3), (1.5, 2, 3), (2, 2, 5), (4, 2, 3), (5, 1, 5), (6, 2, 5))
    for number, (factor, first_stride, kernel) in enumerate(plan if side >= LARGE_SIDE else plan[1:4]):
        outputs = int(width * factor)
        for index in range(depth + number // 2):
            stride = 1 if index else first_stride
            layers.append(_inverted(channels, outputs, stride=stride, widen=4, kernel=kernel, act=act, squeeze=True))
            channels = outputs
    return nn.Sequential(*layers, unit(channels, 4 * channels, 1, act=act), head(4 * channels))


class Parallel(nn.Module):
    """An Inception block (Szegedy et al., 2016): four branches side by side, their channels joined."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            (
                unit(inputs, width, 1),
                nn.Sequential(unit(inputs, width // 2, 1), unit(width // 2, width, 5)),
                nn.Sequential(unit(inputs, width, 1), unit(width, width), unit(width, width)),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), unit(inputs, width, 1)),
            )
        )
        self.outputs = 4 * width

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([branch(images) for branch in self.branches], dim=1)


def inception(width: int, depth: int, side: int) -> nn.Module:
    """Two or three stages of ``depth`` Inception blocks with pooling between them."""
    layers: list[nn.Module] = [stem(2 * width, side)]
    channels = 2 * width
    for stage in range(3 if side >= LARGE_SIDE else 2):
        layers.append(nn.MaxPool2d(3, 2, 1))
        for _ in range(depth):
            block = Parallel(channels, width << stage)
            layers.append(block)
            channels = block.outputs
    return nn.Sequential(*layers, head(channels))


ARCHITECTURES: dict[str, Callable[[int, int, int], nn.Module]] = {
    "lenet": lenet,
    "mobilenet": mobilenet,
    "resnet": resnet,
    "efficientnet": efficientnet,
    "inception": inception,
}
"""Name → function of width, depth and side."""
