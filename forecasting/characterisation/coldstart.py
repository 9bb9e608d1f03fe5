"""What to expect of a job that has never run here: a class and a prior, from what is known before it starts.

The fitted model is plain numbers (``as_dict``/``from_dict``, JSON) and is used without any library but numpy. The first
level that applies:

* architecture: the architecture was measured at smaller and at larger batch sizes: its curve, linear over log2(batch)
  for the utilisation, monotone cubic (PCHIP) over the batch size for the memory;
* beyond: it was measured, but at batch sizes at most a factor of two away: the value at the end of its curve;
* family: other architectures of its family were measured: the general line moved by their mean error, or their mean
  where the number of parameters is not known;
* general: a line over log2(batch) and log2(parameters);
* population: the distribution of all runs. The batch size alone says less than nothing about an unknown family.

The interval of a level comes from errors on runs which that level had not seen (a batch size left out, an architecture
left out, a family left out), so an unknown family gets a wide one. A level that too few runs could test has the
interval of the next wider one that was tested.

All of it holds for the GPU types it was measured on and for no other: a faster one is busy for a smaller part of the
time, and what a process needs besides its tensors differs too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cotenant.forecasting.types import DemandProfile

Array = npt.NDArray[np.float64]

VERSION = 2
QUANTITIES: tuple[str, ...] = ("util_mean", "util_p95", "memory")
LEVELS: tuple[str, ...] = ("architecture", "beyond", "family", "general", "population")
LINES: tuple[str, ...] = LEVELS[3:]  # levels that are lines
QUANTILES: tuple[float, ...] = (0.05, 0.1, 0.5, 0.9, 0.95)
HIGHEST = 4  # index of the quantile a cautious reader reserves
FARTHEST = 1.0  # log2 of the batch size beyond the measured ones; errors there were tested about one doubling away
LISTED_SIZES = 4  # batch sizes that are named one by one


class ColdStartError(ValueError):
    """A fitted model that cannot be read: another version, or a field that is missing or makes no sense."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """What is known of a job before it runs; what is not known is None.

    Attributes:
        family: Model family, for example "bert".
        architecture: One model, for example "bert L-4 H-512".
        kind: What it does or on what data, for example "training".
        batch: Samples per step on one device.
        parameters: Weights of the model.
    """

    family: str | None = None
    architecture: str | None = None
    kind: str | None = None
    batch: float | None = None
    parameters: float | None = None


@dataclass(frozen=True, slots=True)
class Prior:
    """What to expect of a job.

    Attributes:
        class_id: Its class, 0 = lightest.
        level: What the numbers rest on, one of ``LEVELS``.
        util_mean: Quantiles of the mean utilisation, fractions in [0, 1], at ``QUANTILES``.
        util_p95: Quantiles of the 95th percentile of the utilisation.
        memory_bytes: Quantiles of the largest device memory.
        reason: A sentence for people.
        sized: The size of the model is accounted for. If not, the memory is a mean over models of any size.
    """

    class_id: int
    level: str
    util_mean: tuple[float, ...]
    util_p95: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    reason: str
    sized: bool = True


class ColdStart(Protocol):
    """Says what to expect of a job that was never measured."""

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The GPU types it speaks of; nothing it says holds for others."""
        ...

    def describe(self, job: Descriptors) -> Prior:
        """Return what to expect of a job, with intervals and where they come from. Pure."""
        ...

    def family_of(self, architecture: str) -> str:
        """Return the family of an architecture; "" when it is not known or has several. Pure."""
        ...

    def prior(self, job: Descriptors) -> DemandProfile | None:
        """Return a cautious profile, or None when nothing better than "unknown" can be said. Pure."""
        ...


@dataclass(frozen=True, slots=True)
class CurvePoints:
    """One architecture as measured.

    Attributes:
        family: Its family.
        kind: Its kind.
        log2_batch: Ascending, shape (m,).
        values: Quantity → value at each, fractions in [0, 1], shape (m,).
    """

    family: str
    kind: str
    log2_batch: tuple[float, ...]
    values: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class ColdStartClasses:
    """A fitted model; see the module. Made by ``cotenant.forecasting.training.coldstart.fit``.

    Attributes:
        device_memory_bytes: Memory of the device it was measured on; memory values are fractions of it.
        architectures: ``curve_key`` → what was measured.
        families: Normalised name → quantity → mean over its architectures.
        offsets: Normalised name → quantity → mean error of the general line for it; only where sizes are known.
        lines: Level → quantity → (intercept, slope per log2 batch, slope per log2 parameters); "general" is missing
            where too few sizes are known.
        errors: Level → quantity → quantiles at ``QUANTILES`` of actual − predicted on runs the level had not seen.
        centres: Class → (util_p95, memory) of its centre, lightest first.
        scale: Width of either axis for the distance to a centre.
        trained_on: Where the numbers come from, with the licence of the data.
        gpu_types: The GPU types they hold for; empty = not known, so for none.
        tested: Level → the level whose errors its interval is made of; missing where none could be tested.
        version: Format of this record.
    """

    device_memory_bytes: float
    architectures: Mapping[str, CurvePoints]
    families: Mapping[str, Mapping[str, float]]
    offsets: Mapping[str, Mapping[str, float]]
    lines: Mapping[str, Mapping[str, tuple[float, float, float]]]
    errors: Mapping[str, Mapping[str, tuple[float, ...]]]
    centres: tuple[tuple[float, float], ...]
    scale: tuple[float, float]
    trained_on: str
    gpu_types: tuple[str, ...] = ()
    tested: Mapping[str, str] = field(default_factory=dict)
    version: int = VERSION

    def describe(self, job: Descriptors) -> Prior:
        """Return what to expect of a job, with its interval and where it comes from."""
        level, points, reason, sized = self._located(job)
        quantiles = {
            name: tuple(min(1.0, max(0.0, points[name] + error)) for error in self.errors[level][name])
            for name in QUANTITIES
        }
        return Prior(
            class_id=self.nearest(points["util_p95"], points["memory"]),
            level=level,
            util_mean=quantiles["util_mean"],
            util_p95=quantiles["util_p95"],
            memory_bytes=tuple(value * self.device_memory_bytes for value in quantiles["memory"]),
            reason=reason,
            sized=sized,
        )

    def prior(self, job: Descriptors) -> DemandProfile | None:
        """Return a cautious profile: the upper ends of the intervals. None when nothing that helps is known.

        Cautious because a job taken too lightly hurts its neighbours before the first measurement corrects it. The
        memory is None where the size of the model is not accounted for.
        """
        found = self.describe(job)
        if found.level == "population" or found.level not in self.tested:
            return None
        return DemandProfile(
            util_mean=found.util_mean[HIGHEST],
            util_p95=max(found.util_p95[HIGHEST], found.util_mean[HIGHEST]),
            memory_bytes=math.ceil(found.memory_bytes[HIGHEST]) if found.sized else None,
            source="class",
            family=job.family or self.family_of(job.architecture or ""),
        )

    def family_of(self, architecture: str) -> str:
        """Return the family of an architecture; "" when it is not known or has several."""
        families = {points.family for points in self._measured(normalised(architecture), None)}
        return families.pop() if len(families) == 1 else ""

    def nearest(self, util: float, memory: float) -> int:
        """Return the class with the nearest centre; both are fractions of the device."""
        gaps = [math.hypot((util - u) / self.scale[0], (memory - m) / self.scale[1]) for u, m in self.centres]
        return gaps.index(min(gaps))

    def as_dict(self) -> dict[str, Any]:
        """Return the model as plain numbers for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ColdStartClasses:
        """Read ``as_dict`` back.

        Raises:
            ColdStartError: Another version, a missing field, or a number that is not finite.
        """
        version = record.get("version")
        if version != VERSION:
            raise ColdStartError(
                f"version {version!r} is not accepted; this program reads version {VERSION}: fit again"
            )
        try:
            return _checked(_read(record))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, ArithmeticError) as error:
            raise ColdStartError(f"the model cannot be read ({type(error).__name__}: {error}); fit it again") from error

    def _located(self, job: Descriptors) -> tuple[str, dict[str, float], str, bool]:
        """Return (level, point estimate per quantity as fractions, reason, size accounted for)."""
        batch = _log2(job.batch)
        name = job.architecture or job.family
        known = self._measured(normalised(name), job.kind)
        if known and batch is not None:
            away = max(max(each.log2_batch[0] - batch, batch - each.log2_batch[-1]) for each in known)
            if away <= FARTHEST:
                reason = f"{name} at batch {job.batch:g}: measured at {' or '.join(map(_sizes, known))}"
                return "architecture" if away <= 0.0 else "beyond", _heaviest(known, batch), reason, True
        size, family = _log2(job.parameters), normalised(job.family or self.family_of(name or ""))
        line = self._line("general", batch, size)
        if line and family in self.offsets:
            moved = {key: value + self.offsets[family][key] for key, value in line.items()}
            return "family", moved, f"other sizes of {family} were measured", True
        if family in self.families:
            return "family", dict(self.families[family]), f"other runs of {family} were measured", False
        if line:
            reason = "nothing of its family was measured: guessed from batch size and parameters"
            return "general", line, reason, True
        return "population", self._line("population", 0.0, 0.0), "nothing of its family was measured", False

    def _measured(self, name: str, kind: str | None) -> list[CurvePoints]:
        """Return the curves of an architecture: the one of this kind or, when none was said, those of all kinds."""
        if kind is not None:
            return [points for points in [self.architectures.get(curve_key(name, kind))] if points]
        return [points for key, points in self.architectures.items() if key.partition(":")[0] == name]

    def _line(self, level: str, batch: float | None, size: float | None) -> dict[str, float]:
        """Return what a line says; nothing when there is none or one of its inputs is not known."""
        if level not in self.lines or batch is None or size is None:
            return {}
        return {
            name: base + per_batch * batch + per_size * size
            for name, (base, per_batch, per_size) in self.lines[level].items()
        }


def normalised(name: str | None) -> str:
    """Return a name in the form in which names are compared: lower case letters and digits only."""
    return "".join(letter for letter in (name or "").lower() if letter.isalnum())


def curve_key(architecture: str, kind: str) -> str:
    """Return the key of an architecture's curve: what it does matters as much as what it is."""
    return f"{normalised(architecture)}:{normalised(kind)}"


def curve_at(points: CurvePoints, log2_batch: float) -> dict[str, float]:
    """Return the quantities of a measured architecture at a batch size, its ends held constant outside."""
    x = np.asarray(points.log2_batch)
    at = float(np.clip(log2_batch, x[0], x[-1]))
    return {
        name: monotone_cubic(2.0**x, np.asarray(values), 2.0**at)
        if name == "memory"  # grows with the batch, in steps of the allocator
        else float(np.interp(at, x, values))
        for name, values in points.values.items()
    }


def _heaviest(curves: Sequence[CurvePoints], log2_batch: float) -> dict[str, float]:
    """Return the largest value of each quantity: which of the kinds the job is was not said."""
    values = [curve_at(points, log2_batch) for points in curves]
    return {name: max(each[name] for each in values) for name in QUANTITIES}


def monotone_cubic(x: Array, y: Array, at: float) -> float:
    """Return a monotone piecewise cubic (PCHIP) through points, at one place between them.

    Source: Fritsch and Butland, "A method for constructing local monotone piecewise cubic interpolants", SIAM J. Sci.
    Stat. Comput. 5 (1984); the ends take the one-sided slope. With fewer than three points it is linear.
    """
    if len(x) < 3:
        return float(np.interp(at, x, y))
    widths = np.diff(x)
    chords = np.diff(y) / widths
    slopes = np.concatenate(([chords[0]], _inner_slopes(widths, chords), [chords[-1]]))
    index = int(np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(widths) - 1))
    t, width = (at - x[index]) / widths[index], widths[index]
    return float(
        y[index] * (1 + 2 * t) * (1 - t) ** 2
        + width * slopes[index] * t * (1 - t) ** 2
        + y[index + 1] * t**2 * (3 - 2 * t)
        + width * slopes[index + 1] * t**2 * (t - 1)
    )


def _inner_slopes(widths: Array, chords: Array) -> Array:
    left, right = chords[:-1], chords[1:]
    first, second = 2 * widths[1:] + widths[:-1], widths[1:] + 2 * widths[:-1]
    same = left * right > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        means = (first + second) / (first / left + second / right)
    return np.where(same, means, 0.0)


def _log2(value: float | None) -> float | None:
    return math.log2(value) if value is not None and math.isfinite(value) and value > 0 else None


def _sizes(points: CurvePoints) -> str:
    sizes = [f"{2**value:.0f}" for value in points.log2_batch]
    if len(sizes) > LISTED_SIZES:
        return f"{len(sizes)} batch sizes from {sizes[0]} to {sizes[-1]}"
    return " and ".join(part for part in (", ".join(sizes[:-1]), sizes[-1]) if part)


def _read(record: Mapping[str, Any]) -> ColdStartClasses:
    return ColdStartClasses(
        device_memory_bytes=float(record["device_memory_bytes"]),
        architectures={name: _read_curve(points) for name, points in record["architectures"].items()},
        families={name: {key: float(v[key]) for key in QUANTITIES} for name, v in record["families"].items()},
        offsets={name: {key: float(v[key]) for key in QUANTITIES} for name, v in record["offsets"].items()},
        lines={
            level: {key: _three(record["lines"][level][key]) for key in QUANTITIES}
            for level in LINES
            if level == "population" or level in record["lines"]
        },
        errors={level: {key: _floats(record["errors"][level][key]) for key in QUANTITIES} for level in LEVELS},
        centres=tuple((float(util), float(memory)) for util, memory in record["centres"]),
        scale=(float(record["scale"][0]), float(record["scale"][1])),
        trained_on=str(record["trained_on"]),
        gpu_types=tuple(str(name) for name in record["gpu_types"]),
        tested={str(level): str(by) for level, by in record["tested"].items()},
    )


def _read_curve(record: Mapping[str, Any]) -> CurvePoints:
    values = {key: _floats(record["values"][key]) for key in QUANTITIES}
    return CurvePoints(str(record["family"]), str(record["kind"]), _floats(record["log2_batch"]), values)


def _checked(model: ColdStartClasses) -> ColdStartClasses:
    numbers: list[float] = [model.device_memory_bytes, *model.scale, *(x for centre in model.centres for x in centre)]
    for by_quantity in (*model.lines.values(), *model.errors.values()):
        numbers += [number for values in by_quantity.values() for number in values]
    for means in (*model.families.values(), *model.offsets.values()):
        numbers += means.values()
    for points in model.architectures.values():
        numbers += [*points.log2_batch, *(number for values in points.values.values() for number in values)]
        if not points.log2_batch or any(len(v) != len(points.log2_batch) for v in points.values.values()):
            raise ValueError("an architecture's curve has no points or columns of different length")
        if any(later <= earlier for earlier, later in zip(points.log2_batch, points.log2_batch[1:], strict=False)):
            raise ValueError("an architecture's batch sizes do not ascend")
    if any(len(values) != len(QUANTILES) for level in model.errors.values() for values in level.values()):
        raise ValueError(f"errors must have {len(QUANTILES)} quantiles each")
    if not {*model.tested, *model.tested.values()} <= {*LEVELS}:
        raise ValueError(f"tested must name levels: {', '.join(LEVELS)}")
    if not all(map(math.isfinite, numbers)) or not model.centres or min(*model.scale, model.device_memory_bytes) <= 0:
        raise ValueError("a number is not finite, there is no class, or a scale is not positive")
    return model


def _floats(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    base, per_batch, per_size = values
    return float(base), float(per_batch), float(per_size)


__all__ = [
    "QUANTILES",
    "VERSION",
    "ColdStart",
    "ColdStartClasses",
    "ColdStartError",
    "CurvePoints",
    "Descriptors",
    "Prior",
    "curve_at",
    "curve_key",
    "normalised",
]
