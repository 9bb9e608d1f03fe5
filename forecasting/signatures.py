"""The schema of signatures: every column's name, unit, source and NA rule; rows, and reading of older ones.

A row is a signature as flat columns: what is kept on disk and what models learn from. ``FIELDS`` is the one place where
columns are declared; ``docs/signatures.md`` shows it as a table. A missing reading is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from cotenant.forecasting.types import SIGNATURE_VERSION, DeviceActivity, OperatorMix, Signature
from cotenant.forecasting.versions import check_version

Kind = Literal["text", "number", "whole"]
Scope = Literal["window", "job", "device"]

_BYTES = float(1 << 50)
_RATE = 1e15  # bytes per second, launches per second
_SECONDS = 1e12
_PEAK = 1.1  # fractions are read a little late or early: up to here it is noise, beyond it is absurd
MIX = "mix_"

_ASLEEP = "no reading in the window"
_NO_SAY = "the device does not say"


@dataclass(frozen=True, slots=True)
class SignatureField:
    """One column.

    Attributes:
        name: Of the column.
        unit: Of its values; "1" for a bare fraction or count.
        scope: Of whom it tells: the window itself, the job, or the whole device with all its jobs.
        source: Where it comes from.
        none_when: When it is None ("" = never).
        kind: What its values are.
        least: Smallest believable value.
        most: Largest believable value; beyond it a reading counts as missing.
        cpu: Whether the ``cpu`` backend can read it.
        nvidia: Whether an NVIDIA backend can: "yes", "some" (models or drivers), "no".
        since: Schema version it came with.
    """

    name: str
    unit: str
    scope: Scope
    source: str
    none_when: str
    kind: Kind = "number"
    least: float = 0.0
    most: float = _PEAK
    cpu: bool = True
    nvidia: Literal["yes", "some", "no"] = "yes"
    since: int = 0

    def believable(self, value: object) -> bool:
        """Return whether a value can be true; None (missing) is."""
        if value is None:
            return True
        if self.kind == "text":
            return isinstance(value, str)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if not self.least <= value <= self.most:  # NaN and infinities fail the comparison
            return False
        return self.kind == "number" or value == math.floor(value)


def _device(
    name: str,
    unit: str,
    source: str,
    most: float = _PEAK,
    *,
    cpu: bool = False,
    nvidia: Literal["yes", "some"] = "some",
    since: int = 1,
) -> SignatureField:
    return SignatureField(name, unit, "device", source, _NO_SAY, most=most, cpu=cpu, nvidia=nvidia, since=since)


def _mixed(operator_class: str, what: str) -> SignatureField:
    return SignatureField(
        MIX + operator_class,
        "1",
        "job",
        f"torch.profiler in the job, a few steps: part of the device time in {what}",
        "operator mix off (the default), or not measured yet",
        since=1,
    )


FIELDS: tuple[SignatureField, ...] = (
    SignatureField("schema_version", "1", "window", "the host agent's version", "", "whole", most=SIGNATURE_VERSION),
    SignatureField("job_id", "text", "window", "the scheduler", "", "text"),
    SignatureField("gpu_id", "text", "window", "the device backend", "", "text"),
    SignatureField("start_s", "s", "window", "the host's wall clock, Unix seconds", "", most=_SECONDS),
    SignatureField("window_s", "s", "window", "the host's monotonic clock", "", most=_SECONDS),
    SignatureField("samples", "1", "window", "number of device samples in it", "", "whole", most=1e6),
    SignatureField("util_mean", "1", "job", "device time counter over the window, else mean of ratios", _ASLEEP),
    SignatureField("util_peak", "1", "job", "largest sample of the same", _ASLEEP),
    SignatureField(
        "util_age_s",
        "s",
        "job",
        "mean age of the driver's readings behind it; 0 for a counter",
        _ASLEEP,
        most=_SECONDS,
        since=2,
    ),
    SignatureField(
        "util_source",
        "text",
        "job",
        '"counter" of device time, the driver by "process", or "device": a part of the whole device\'s, an estimate',
        _ASLEEP,
        "text",
        since=2,
    ),
    SignatureField(
        "memory_bytes", "B", "job", "last sample (`cpu`: resident memory on the device)", _ASLEEP, most=_BYTES
    ),
    SignatureField(
        "memory_source",
        "text",
        "job",
        'the job\'s "process"es, or "device": what is in use on a device that it has to itself, an estimate',
        _ASLEEP,
        "text",
        since=3,
    ),
    SignatureField("memory_peak_bytes", "B", "job", "largest sample of the same", _ASLEEP, most=_BYTES),
    SignatureField(
        "memory_growth_bytes_s",
        "B/s",
        "job",
        "last sample less the window's first, over the time between them",
        "fewer than two samples with a reading",
        least=-_RATE,
        most=_RATE,
        since=1,
    ),
    SignatureField(
        "step_rate",
        "1/s",
        "job",
        "the shim's step counter, from the end of a step to the end of a step",
        "no optimizer step seen yet, or one under way for the whole window",
        most=1e9,
    ),
    SignatureField(
        "step_time_p50_s",
        "s",
        "job",
        "the shim: steps that ended in the window, at most the last 48 of a process; time held back included",
        "no step ended in the window",
        most=_SECONDS,
        since=1,
    ),
    SignatureField(
        "step_time_p95_s",
        "s",
        "job",
        "the same, 95th percentile",
        "no step ended in the window",
        most=_SECONDS,
        since=1,
    ),
    SignatureField(
        "throttled_fraction",
        "1",
        "job",
        "the shim: time held back by the job's own share, over the window",
        "no optimizer step seen yet",
    ),
    SignatureField("compute_share", "1", "job", "the share in force at the end of the window", "share taken back"),
    SignatureField("neighbours", "1", "window", "other jobs with a share of the GPU", "", "whole", most=1e6),
    SignatureField(
        "host_cores", "1", "job", "CPU time of its processes off the device, over the window", _ASLEEP, most=1e6
    ),
    SignatureField(
        "read_bytes_s",
        "B/s",
        "job",
        "`rchar` of /proc/PID/io over the process tree: read() and the like, page cache included; not recv, not mmap",
        "not allowed to read it, or fewer than two readings",
        most=_RATE,
        since=1,
    ),
    SignatureField(
        "write_bytes_s",
        "B/s",
        "job",
        "`wchar` of the same",
        "not allowed to read it, or fewer than two readings",
        most=_RATE,
        since=1,
    ),
    SignatureField(
        "batch_size",
        "1",
        "job",
        "hint `batch_size`, else leading dimension seen by the operator mix",
        "no hint and not observed",
        "whole",
        least=1,
        most=2**31 - 1,
        since=1,
    ),
    SignatureField(
        "framework",
        "text",
        "job",
        'hint `framework`, else "torch" once the shim has seen it',
        "no hint and not observed",
        "text",
        since=1,
    ),
    _mixed("gemm", "matrix products"),
    _mixed("conv", "convolutions"),
    _mixed("attention", "attention"),
    _mixed("elementwise", "element-wise operators and optimizers"),
    _mixed("normalisation", "batch, layer and group norms"),
    _mixed("reduce", "sums, maxima, softmax, losses, pooling"),
    _mixed("memcpy", "copies, fills, gathers"),
    _mixed("collective", "communication between GPUs"),
    _mixed("other", "everything else"),
    SignatureField(
        "mix_launches_per_step",
        "1",
        "job",
        "the same profile: kernels launched (`cpu`: operators executed) per step",
        "operator mix off (the default), or not measured yet",
        most=1e9,
        since=1,
    ),
    SignatureField(
        "mix_step",
        "1",
        "job",
        "the job's step at which it was measured",
        "operator mix off (the default), or not measured yet",
        "whole",
        most=1e15,
        since=1,
    ),
    _device("device_util", "1", "mean of the device's own utilisation", cpu=True, nvidia="yes"),
    _device("device_membw_util", "1", "NVML memory utilisation, or GPM metric 10 (DRAM bandwidth)", nvidia="yes"),
    _device("device_sm_active", "1", "GPM metric 2"),
    _device("device_tensor_active", "1", "GPM metric 5"),
    _device("device_fp16_active", "1", "GPM metric 13"),
    _device("device_fp32_active", "1", "GPM metric 12"),
    _device("device_fp64_active", "1", "GPM metric 11"),
    _device("device_pcie_rx_bytes_s", "B/s", "PCIe byte counters (NVML fields 198), else GPM metric 21", _RATE),
    _device("device_pcie_tx_bytes_s", "B/s", "PCIe byte counters (NVML field 197), else GPM metric 20", _RATE),
    _device("device_nvlink_rx_bytes_s", "B/s", "NVLink byte counters, summed over links", _RATE),
    _device("device_nvlink_tx_bytes_s", "B/s", "NVLink byte counters, summed over links", _RATE),
    _device("device_power_w", "W", "NVML energy counter, else mean of its power readings", 1e5, nvidia="yes"),
    _device("device_sm_clock_mhz", "MHz", "NVML clock of the multiprocessors", 1e5, nvidia="yes", since=2),
    _device("device_temperature_c", "°C", "NVML temperature", 1e3, nvidia="yes", since=2),
)
BY_NAME: Mapping[str, SignatureField] = {each.name: each for each in FIELDS}
COLUMNS: tuple[str, ...] = tuple(BY_NAME)

_DEVICE = "device_"
_DEVICE_NAMES = tuple(each.name for each in fields(DeviceActivity))
_MIX_NAMES = tuple(each.name for each in fields(OperatorMix))
_PLAIN_NAMES = tuple(each.name for each in fields(Signature) if each.name not in ("device", "mix"))
_REQUIRED = tuple(each.name for each in FIELDS if not each.none_when and each.name != "schema_version")
# Judged here; what version 0 had is judged where it is used (``windows``, ``sanity``), which also count.
_JUDGED = tuple(BY_NAME[name] for name in _PLAIN_NAMES if BY_NAME[name].since)
_JUDGED_DEVICE = tuple((name, BY_NAME[_DEVICE + name]) for name in _DEVICE_NAMES)
_JUDGED_MIX = tuple((name, BY_NAME[MIX + name]) for name in _MIX_NAMES)


def to_row(signature: Signature) -> dict[str, Any]:
    """Return a signature as flat columns, in the order of ``FIELDS``. Readings that cannot be true become None."""
    values = {name: getattr(signature, name) for name in _PLAIN_NAMES}
    values |= {_DEVICE + name: getattr(signature.device, name, None) for name in _DEVICE_NAMES}
    values |= {MIX + name: getattr(signature.mix, name, None) for name in _MIX_NAMES}
    return {
        each.name: values[each.name] if not each.none_when or each.believable(values[each.name]) else None
        for each in FIELDS
    }


def placed(row: Mapping[str, Any]) -> bool:
    """Return whether all that a row always has is there and can be true; if not, it tells of no window at all."""
    return all(row[name] is not None and BY_NAME[name].believable(row[name]) for name in _REQUIRED)


def from_row(row: Mapping[str, Any]) -> Signature:
    """Return the signature a row of this or an older version tells of. Columns that are not of the schema are ignored.

    Args:
        row: Column name -> value; None or NaN = missing.

    Raises:
        UnknownVersion: A newer version wrote it.
        ValueError: A column that is never missing is.
    """
    upgraded = upgrade(row)
    values: dict[str, Any] = {name: None if value != value else value for name, value in upgraded.items()}  # noqa: PLR0124 (NaN)
    for name in _REQUIRED:
        if values.get(name) is None:
            raise ValueError(f"{name}: is missing; a signature always has it")
    whole = [each.name for each in FIELDS if each.kind == "whole" and values[each.name] is not None]
    values |= {name: int(values[name]) for name in whole}
    device = DeviceActivity(**{name: values[_DEVICE + name] for name in _DEVICE_NAMES})
    mix = {name: values[MIX + name] for name in _MIX_NAMES}
    return Signature(
        **{name: values[name] for name in _PLAIN_NAMES},
        device=None if device == DeviceActivity() else device,
        mix=None if mix["gemm"] is None else OperatorMix(**mix),
    )


def upgrade(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of this version made from one of this or an older version. A row without a version is of version 0.

    Raises:
        UnknownVersion: A newer version wrote it.
    """
    written = row.get("schema_version")
    version = 0 if written is None else int(written)
    check_version(version, SIGNATURE_VERSION)
    upgraded = dict(row)
    for step in _UPGRADES[version:]:
        upgraded = step(upgraded)
    return dict.fromkeys(COLUMNS) | upgraded | {"schema_version": SIGNATURE_VERSION}


def _from_version_0(row: Mapping[str, Any]) -> dict[str, Any]:
    """Version 0 measured nothing of what version 1 added, so all of that is missing; nothing changed its meaning."""
    return dict(row) | {each.name: None for each in FIELDS if each.since > 0}


def _from_version_1(row: Mapping[str, Any]) -> dict[str, Any]:
    """Version 2 added where utilisation comes from, clocks and temperatures."""
    return dict(row) | {each.name: None for each in FIELDS if each.since > 1}


def _from_version_2(row: Mapping[str, Any]) -> dict[str, Any]:
    """Version 3 added where memory comes from."""
    return dict(row) | {each.name: None for each in FIELDS if each.since > 2}


_UPGRADES: tuple[Callable[[Mapping[str, Any]], dict[str, Any]], ...] = (
    _from_version_0,
    _from_version_1,
    _from_version_2,
)


def accepted(signature: Signature) -> Signature:
    """Return a signature of this version, with None for those of the newer readings that cannot be true.

    Raises:
        UnknownVersion: A newer version wrote it.
    """
    check_version(signature.schema_version, SIGNATURE_VERSION)
    wrong: dict[str, Any] = {each.name: None for each in _JUDGED if not each.believable(getattr(signature, each.name))}
    device, mix = signature.device, signature.mix
    if device is not None:
        bad = {name: None for name, each in _JUDGED_DEVICE if not each.believable(getattr(device, name))}
        wrong |= {"device": replace(device, **bad)} if bad else {}
    if mix is not None and not all(each.believable(getattr(mix, name)) for name, each in _JUDGED_MIX):
        wrong["mix"] = None
    if signature.schema_version != SIGNATURE_VERSION:
        wrong["schema_version"] = SIGNATURE_VERSION
    return replace(signature, **wrong) if wrong else signature


def brief(signature: Signature) -> Signature:
    """Return the signature without what only models and the history need: the scheduler journals the rest."""
    if signature.device is None and signature.mix is None:
        return signature
    return replace(signature, device=None, mix=None)


def markdown_table() -> str:
    """Return ``FIELDS`` as the table in ``docs/signatures.md``."""
    head = ("column", "unit", "of", "source", "None when", "`cpu`", "NVIDIA", "since")
    rows = [
        (
            f"`{each.name}`",
            each.unit,
            each.scope,
            each.source,
            each.none_when or "never",
            "yes" if each.cpu else "no",
            each.nvidia,
            str(each.since),
        )
        for each in FIELDS
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)) + "\n"


__all__ = [
    "BY_NAME",
    "COLUMNS",
    "FIELDS",
    "SignatureField",
    "accepted",
    "brief",
    "from_row",
    "markdown_table",
    "placed",
    "to_row",
    "upgrade",
]
