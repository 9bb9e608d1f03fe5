"""The configurations of the suite: which networks, how large, and what makes them wait.

The rates and waiting times are what spreads the solo utilisation; what it is on a machine, the suite measures. Those
of the ``cpu`` catalogue were chosen by CPU time per step on one core of a server. Those of the ``cuda`` catalogue are
meant to spread the solo utilisation of an H100 over 10 to 100 %; they are estimates that have not been run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Description:
    """What a workload is.

    Attributes:
        name: ``architecture-batch`` or ``architecture-batch-variant``.
        family: image_classification, segmentation, reinforcement_learning, gan, text_classification or inference.
        architecture: The kind of network.
        batch: Samples per step; environments for reinforcement learning; the largest batch of a service.
        kind: training or inference.
        reads: What it waits for: none, prefetch, sync, environment or requests.
    """

    name: str
    family: str
    architecture: str
    batch: int
    kind: str
    reads: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Samples are in memory."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Samples come from a storage of ``rate`` samples per second, ``ahead`` batches in advance (0: between steps)."""

    rate: float
    ahead: int = 2


@dataclass(frozen=True, slots=True)
class Environments:
    """Cart-poles whose step takes ``latency_s``; a training step follows every ``horizon`` of them."""

    latency_s: float
    horizon: int


@dataclass(frozen=True, slots=True)
class Clients:
    """``count`` clients that ask, wait for the answer and think for ``think_s``."""

    count: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Arrivals:
    """``rate`` requests per second; a batch starts when it is full or its first request has waited ``gather_s``."""

    rate: float
    gather_s: float


Source = Memory | Storage | Environments | Clients | Arrivals


@dataclass(frozen=True, slots=True)
class Configuration:
    """Everything needed to build a workload.

    Attributes:
        family: See ``Description``.
        architecture: A name in ``convnets.ARCHITECTURES``, or unet, dcgan, bert, cartpole.
        batch: See ``Description``.
        width: Channels, or numbers per word or layer.
        depth: Blocks per stage, levels or layers.
        extent: Side of the images in pixels, or words of a text; not used for reinforcement learning.
        source: What it reads from.
        variant: The last part of the name.
        mixed: Whether it computes in bfloat16 where that is accurate enough (and convolves channels-last).
    """

    family: str
    architecture: str
    batch: int
    width: int
    depth: int
    extent: int
    source: Source
    variant: str = ""
    mixed: bool = False

    def describe(self) -> Description:
        """The configuration's description."""
        name = f"{self.architecture}-{self.batch}"
        match self.source:
            case Memory():
                reads = "none"
            case Storage(ahead=ahead):
                reads = "prefetch" if ahead else "sync"
            case Environments():
                reads = "environment"
            case Clients() | Arrivals():
                reads = "requests"
        return Description(
            name=f"{name}-{self.variant}" if self.variant else name,
            family=self.family,
            architecture=self.architecture,
            batch=self.batch,
            kind="inference" if self.family == INFERENCE else "training",
            reads=reads,
        )

    def shrunk(self) -> Configuration:
        """The same program at a toy size, for a dry run of a GPU's configuration without a GPU."""
        batch = min(self.batch, 4)
        source: Source
        match self.source:
            case Storage(ahead=ahead):
                source = Storage(rate=batch / 0.004, ahead=ahead)
            case Environments():
                source = Environments(latency_s=0.001, horizon=4)
            case Clients(count=count):
                source = Clients(count=count, think_s=0.005)
            case Arrivals():
                source = Arrivals(rate=batch / 0.01, gather_s=0.02)
            case Memory():
                source = self.source
        extent = 16 if self.family in (TEXT, GAN) else 32
        return replace(self, batch=batch, width=8, depth=min(self.depth, 2), extent=extent, source=source)


IMAGES = "image_classification"
SEGMENTATION = "segmentation"
REINFORCEMENT = "reinforcement_learning"
GAN = "gan"
TEXT = "text_classification"
INFERENCE = "inference"

# In pixels: what the cpu device can compute some tens of times per second.
_THUMBNAIL = 32

_CPU = (
    # Mostly waiting.
    Configuration(REINFORCEMENT, "cartpole", 16, 160, 2, 0, Environments(latency_s=0.0042, horizon=16)),
    Configuration(IMAGES, "lenet", 32, 16, 2, _THUMBNAIL, Storage(rate=400.0)),
    Configuration(INFERENCE, "mobilenet", 1, 32, 2, 96, Clients(count=2, think_s=0.07), variant="serve"),
    # Between.
    Configuration(INFERENCE, "bert", 8, 128, 4, 48, Arrivals(rate=220.0, gather_s=0.06), variant="serve"),
    Configuration(IMAGES, "mobilenet", 48, 12, 1, _THUMBNAIL, Storage(rate=560.0)),
    Configuration(IMAGES, "efficientnet", 24, 8, 1, _THUMBNAIL, Storage(rate=1150.0, ahead=0), variant="sync"),
    Configuration(IMAGES, "resnet", 16, 12, 1, _THUMBNAIL, Storage(rate=900.0, ahead=0), variant="sync"),
    Configuration(SEGMENTATION, "unet", 4, 8, 3, 64, Storage(rate=80.0)),
    # Mostly computing.
    Configuration(GAN, "dcgan", 16, 20, 0, _THUMBNAIL, Storage(rate=375.0)),
    Configuration(SEGMENTATION, "unet", 8, 8, 2, 48, Storage(rate=1000.0, ahead=0), variant="sync"),
    Configuration(IMAGES, "inception", 16, 8, 1, _THUMBNAIL, Storage(rate=620.0)),
    Configuration(IMAGES, "resnet", 32, 8, 2, _THUMBNAIL, Storage(rate=575.0)),
    Configuration(TEXT, "bert", 6, 128, 3, 96, Memory()),
)

_CUDA = (
    Configuration(IMAGES, "lenet", 256, 32, 2, 32, Storage(rate=25_000.0)),
    Configuration(IMAGES, "mobilenet", 32, 32, 2, 96, Storage(rate=2_500.0, ahead=0), variant="sync"),
    Configuration(IMAGES, "mobilenet", 64, 32, 3, 128, Storage(rate=2_000.0)),
    Configuration(IMAGES, "mobilenet", 128, 32, 3, 224, Storage(rate=1_600.0), variant="mixed", mixed=True),
    Configuration(IMAGES, "resnet", 16, 64, 3, 224, Storage(rate=600.0, ahead=0), variant="sync"),
    Configuration(IMAGES, "resnet", 32, 64, 2, 128, Storage(rate=4_000.0, ahead=0), variant="sync"),
    Configuration(IMAGES, "resnet", 64, 64, 3, 224, Storage(rate=650.0)),
    Configuration(IMAGES, "resnet", 128, 64, 3, 224, Storage(rate=1_800.0), variant="mixed", mixed=True),
    Configuration(IMAGES, "resnet", 256, 64, 2, 64, Memory()),
    Configuration(IMAGES, "efficientnet", 32, 32, 2, 224, Storage(rate=350.0)),
    Configuration(IMAGES, "efficientnet", 96, 32, 2, 160, Storage(rate=1_500.0), variant="mixed", mixed=True),
    Configuration(IMAGES, "inception", 32, 64, 3, 160, Storage(rate=700.0)),
    Configuration(
        IMAGES, "inception", 64, 64, 3, 224, Storage(rate=2_500.0, ahead=0), variant="sync-mixed", mixed=True
    ),
    Configuration(SEGMENTATION, "unet", 4, 32, 4, 256, Storage(rate=200.0, ahead=0), variant="sync"),
    Configuration(SEGMENTATION, "unet", 8, 48, 4, 256, Storage(rate=90.0)),
    Configuration(SEGMENTATION, "unet", 16, 64, 4, 256, Memory(), variant="mixed", mixed=True),
    Configuration(REINFORCEMENT, "cartpole", 64, 256, 2, 0, Environments(latency_s=0.002, horizon=32)),
    Configuration(REINFORCEMENT, "cartpole", 256, 2048, 3, 0, Environments(latency_s=0.001, horizon=16)),
    Configuration(GAN, "dcgan", 64, 64, 0, 64, Storage(rate=3_000.0)),
    Configuration(GAN, "dcgan", 128, 64, 0, 64, Memory()),
    Configuration(TEXT, "bert", 16, 768, 12, 128, Storage(rate=150.0)),
    Configuration(TEXT, "bert", 32, 768, 12, 128, Memory(), variant="mixed", mixed=True),
    Configuration(TEXT, "bert", 64, 512, 4, 128, Storage(rate=4_000.0, ahead=0), variant="sync-mixed", mixed=True),
    Configuration(INFERENCE, "resnet", 1, 64, 3, 224, Clients(count=4, think_s=0.02), variant="serve"),
    Configuration(INFERENCE, "resnet", 32, 64, 3, 224, Arrivals(rate=1_200.0, gather_s=0.03), variant="serve"),
    Configuration(
        INFERENCE, "bert", 1, 768, 12, 128, Clients(count=4, think_s=0.01), variant="serve-mixed", mixed=True
    ),
    Configuration(INFERENCE, "bert", 16, 768, 12, 128, Arrivals(rate=400.0, gather_s=0.05), variant="serve"),
)

CONFIGURATIONS = MappingProxyType(
    {
        device: MappingProxyType({configuration.describe().name: configuration for configuration in configurations})
        for device, configurations in (("cpu", _CPU), ("cuda", _CUDA))
    }
)
"""Device → name → configuration."""


def configurations(device: str) -> MappingProxyType[str, Configuration]:
    """Name → configuration; ValueError for a device that is not one."""
    if device not in CONFIGURATIONS:
        raise ValueError(f"device {device!r} is not accepted; give one of {', '.join(CONFIGURATIONS)}")
    return CONFIGURATIONS[device]


def configuration(name: str, device: str) -> Configuration:
    """The configuration of this name; ValueError with the names that there are."""
    known = configurations(device)
    if name not in known:
        raise ValueError(f"workload {name!r} is not in the {device} catalogue; give one of {', '.join(known)}")
    return known[name]


def catalogue(device: str) -> dict[str, Description]:
    """Name → description of every configuration for ``device`` (cpu or cuda)."""
    return {name: each.describe() for name, each in configurations(device).items()}
