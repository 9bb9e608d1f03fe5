"""The columns of the co-location data set: name, type, unit, what is accepted, when missing, where from.

This is the one place that says it: the checks (``schema.py``) and the tables of ``docs/colocation.md`` are made of it.
Every source and condition below is a plain phrase because people read it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["string", "integer", "number", "flag"]

FORMAT = 1
MODES = ("timeslice", "mps", "mps_cap", "duty")
RULES = ("", "no_rate", "few_steps", "foreign_load", "unsteady_solo", "drift", "no_solo", "absurd")
FAMILY_KINDS = ("training", "inference")
MIX = ("gemm", "conv", "attention", "elementwise", "normalisation", "reduce", "memcpy", "collective", "other")

_SILENT = "when the device does not say"
_RAW = "windows.jsonl"
_SOLO = "median over accepted solo windows"
_EXTRA = "solo_extras.jsonl, median over visits"
_CARD = "card.json"
_PEBIBYTE = 2.0**50


@dataclass(frozen=True, slots=True)
class Column:
    """One column of one table.

    Attributes:
        name: Its name.
        kind: Its type: ``string``, ``integer``, ``number`` (float64) or ``flag`` (true or false).
        meaning: What it says.
        source: Where it comes from.
        unit: Its unit; ``"1"`` is a bare fraction, empty for names.
        na: When it may be missing; empty means never.
        low: Smallest value accepted.
        high: Largest value accepted.
        above: ``low`` itself is not accepted.
        values: The only strings accepted; empty accepts all.
    """

    name: str
    kind: Kind
    meaning: str
    source: str
    unit: str = ""
    na: str = ""
    low: float | None = None
    high: float | None = None
    above: bool = False
    values: tuple[str, ...] = ()

    @property
    def accepted(self) -> str:
        """What is accepted, in words."""
        if self.values:
            return "one of " + ", ".join(value or '""' for value in self.values)
        if self.kind in {"string", "flag"}:
            return "a text" if self.kind == "string" else "true or false"
        noun = "a whole number" if self.kind == "integer" else "a number"
        if self.low is None or self.high is None:
            return noun
        return f"{noun} in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"


def _name(name: str, meaning: str, source: str, na: str = "", values: tuple[str, ...] = ()) -> Column:
    return Column(name, "string", meaning, source, na=na, values=values)


def _count(name: str, meaning: str, source: str, low: float = 0.0, high: float = 1e9, *, na: str = "") -> Column:
    return Column(name, "integer", meaning, source, na=na, low=low, high=high)


def _fraction(name: str, meaning: str, source: str, na: str = _SILENT, high: float = 1.1) -> Column:
    return Column(name, "number", meaning, source, "1", na, 0.0, high)


def _seconds(name: str, meaning: str, source: str, na: str = _SILENT, high: float = 86400.0) -> Column:
    return Column(name, "number", meaning, source, "s", na, 0.0, high)


def _amount(name: str, unit: str, high: float, meaning: str, source: str, *, na: str = _SILENT) -> Column:
    return Column(name, "number", meaning, source, unit, na, 0.0, high)


def _throughput(name: str, meaning: str, source: str, na: str) -> Column:
    return Column(name, "number", meaning, source, "1", na, 0.0, 10.0, above=True)


def _device_readings(source: str) -> tuple[Column, ...]:
    """What a GPU tells of itself over a window."""
    return (
        _fraction("device_util", "utilisation of the whole device", source),
        _fraction("membw_util", "use of the memory bandwidth", source),
        _fraction("sm_active", "time in which multiprocessors had work", source),
        _fraction("tensor_active", "use of the tensor pipe", source),
        _fraction("fp32_active", "use of the 32-bit float pipe", source),
        _amount("power_w", "W", 5000.0, "power of the whole device", source),
        _amount("clock_mhz", "MHz", 10000.0, "clock of the multiprocessors", source),
        Column("temperature_c", "number", "temperature of the device", source, "°C", _SILENT, -50.0, 200.0),
        _amount("pcie_rx_bytes_s", "B/s", 1e13, "host to device traffic", source),
        _amount("pcie_tx_bytes_s", "B/s", 1e13, "device to host traffic", source),
    )


_FEW = "when fewer than two steps ended"

SAMPLES: tuple[Column, ...] = (
    _name("run_id", "the run", _CARD),
    _name("gpu_type", "type of the device", _CARD),
    _name("visit", "mode/set#occasion, as measured", _RAW),
    _count(
        "occasion", "when the set was visited: 1 is the first time", "the visit; runs that are pooled go on counting", 1
    ),
    _name("mode", "how the device was shared", _RAW, values=MODES),
    _name("kind", "alone, or together with the rest of the set", _RAW, values=("solo", "shared")),
    _count("position", "index of the window in its visit", _RAW),
    _name("set", "the visit's members in their order, joined by +", _RAW),
    _count("size", "number of members of the set", _RAW, 1, 16),
    _name("member", "the workload the row is about", _RAW),
    _count("slot", "its place in the set, from 0", _RAW, 0, 15),
    Column(
        "share", "number", "share of the device it was held to", _RAW, "1", "when it was not held", 0.0, 1.0, above=True
    ),
    Column("started_unix_s", "number", "start of the counted window", _RAW, "s, Unix", "", 0.0, 1e11),
    Column("window_s", "number", "length of the counted window", _RAW, "s", "", 0.0, 3600.0, above=True),
    _count("steps", "steps that ended in the window", _RAW),
    _amount("rate", "steps/s", 1e7, "(steps − 1) / time between the first and the last end of a step", _RAW, na=_FEW),
    _seconds("step_p10_s", "10th percentile of the step time", _RAW, _FEW),
    _seconds("step_p50_s", "median step time", _RAW, _FEW),
    _seconds("step_p90_s", "90th percentile of the step time", _RAW, _FEW),
    _seconds("step_p99_s", "99th percentile of the step time", _RAW, _FEW),
    _amount("step_cv", "1", 1000.0, "standard deviation of the step time / its mean", _RAW, na=_FEW),
    _seconds("busy_s", "device time used; on cpu: CPU time of the training process", _RAW),
    _fraction("util_mean", "utilisation by this member", _RAW),
    _fraction("util_peak", "95th percentile of its utilisation, read at 10 Hz", _RAW, high=2.0),
    _seconds("wait_s", "time it was ready and waited for the device (cpu only)", _RAW),
    _seconds("host_busy_s", "CPU time of its helper processes", _RAW),
    _seconds("foreign_s", "CPU time of strangers on the device's core", _RAW),
    _amount("memory_bytes", "B", _PEBIBYTE, "largest memory of the member in the window", _RAW),
    *_device_readings(_RAW),
    _name("rejected", "the rule that rejected the window; empty: accepted", "rejection rules", values=RULES),
    _amount(
        "rate_solo",
        "steps/s",
        1e7,
        "rate alone at the middle of this window",
        "interpolated",
        na="unless shared and accepted",
    ),
    _throughput("throughput", "n = rate / rate_solo", "interpolated", "unless shared and accepted"),
)

_NONE_LEFT = "when no window was accepted"
_NO_SPREAD = "when fewer than two windows were accepted"

SOLO: tuple[Column, ...] = (
    _name("gpu_type", "type of the device", _CARD),
    _name("mode", "how the device was shared in the visits", _RAW, values=MODES),
    _name("member", "the workload", _RAW),
    Column(
        "share", "number", "share it was held to even alone", _RAW, "1", "when it was not held", 0.0, 1.0, above=True
    ),
    _name("family", "its family of workloads", _CARD, "when the card does not say"),
    _name("architecture", "its architecture", _CARD, "when the card does not say"),
    _count("batch", "samples in a step", _CARD, 1, 1e7, na="when the card does not say"),
    _name("kind", "training or inference", _CARD, "when the card does not say", FAMILY_KINDS),
    _name(
        "reads",
        "how it gets its input: none, prefetch, sync, environment or requests",
        _CARD,
        "when the card does not say",
    ),
    _count("runs", "runs that are pooled in this row", "counted", 1),
    _count("occasions", "occasions with an accepted window", "counted"),
    _count("windows", "accepted solo windows", "counted"),
    _count("rejected", "rejected solo windows", "counted"),
    _amount("rate", "steps/s", 1e7, "rate alone", _SOLO, na=_NONE_LEFT),
    _amount("rate_low", "steps/s", 1e7, "lower end of the 80 % interval", "statistics", na=_NO_SPREAD),
    _amount("rate_high", "steps/s", 1e7, "upper end of the 80 % interval", "statistics", na=_NO_SPREAD),
    _fraction("util_mean", "utilisation alone; the whole device's where it does not tell members apart", _SOLO),
    _fraction("util_peak", "95th percentile of the utilisation", _SOLO, high=2.0),
    _amount("memory_bytes", "B", _PEBIBYTE, "largest memory", "largest over accepted solo windows"),
    _seconds("step_p10_s", "10th percentile of the step time", _SOLO, _NONE_LEFT),
    _seconds("step_p50_s", "median step time", _SOLO, _NONE_LEFT),
    _seconds("step_p90_s", "90th percentile of the step time", _SOLO, _NONE_LEFT),
    _seconds("step_p99_s", "99th percentile of the step time", _SOLO, _NONE_LEFT),
    _amount("step_cv", "1", 1000.0, "standard deviation of the step time / its mean", _SOLO, na=_NONE_LEFT),
    _amount("host_cores", "cores", 1024.0, "CPU time of the helper processes / window", _SOLO),
    *_device_readings(_SOLO),
    *(
        _fraction(f"mix_{name}", f"part of the kernel (operator) time: {name}", _EXTRA, "when not profiled")
        for name in MIX
    ),
    _amount("launches_per_step", "1", 1e9, "kernels (operators) started in a step", _EXTRA, na="when not profiled"),
    _seconds("start_s", "start of the process until it is warm", _EXTRA, "when not measured"),
    _amount("context_bytes", "B", _PEBIBYTE, "device memory of the bare process", _EXTRA, na="when not measured"),
    _seconds("suspend_s", "time to suspend it", _EXTRA, "when the driver cannot"),
    _seconds("resume_s", "time to resume it", _EXTRA, "when the driver cannot"),
    Column(
        "profiler_overhead",
        "number",
        "step time with the 10 Hz profiler / without − 1",
        _EXTRA,
        "1",
        "when not measured",
        -1.0,
        10.0,
    ),
)

_NOT_MEASURED = "when the set did not fit or no window was accepted"
_INTERVAL_NA = "when the set did not fit or fewer than two windows were accepted"

PAIRS: tuple[Column, ...] = (
    _name("gpu_type", "type of the device", _CARD),
    _name("mode", "how the device was shared", _RAW, values=MODES),
    _name("shares", "share of each member in the order of the set, joined by /; empty: not held", _RAW),
    _name("set", "the members, sorted, joined by +; a triple has three", _RAW),
    _count("size", "number of members", _RAW, 2, 16),
    _name("member", "the focal member: the one whose throughput is given", _RAW),
    Column("share", "number", "share it was held to", _RAW, "1", "when it was not held", 0.0, 1.0, above=True),
    _name("others", "the other members, joined by +", _RAW),
    _name("share_others", "their shares, joined by /; empty: not held", _RAW),
    _name("families", "families in the order of the set, joined by +", _CARD),
    _count("runs", "runs that are pooled in this row (0: it did not fit)", "counted"),
    _count("occasions", "occasions with an accepted window", "counted"),
    _count("windows", "accepted shared windows", "counted"),
    _count("rejected", "rejected shared windows", "counted"),
    _count("failures", "times that the set failed: out of memory, hung, died", "events.jsonl"),
    Column("fits", "flag", "false: out of memory, never measured", "events.jsonl"),
    _throughput("throughput", "n: rate together / rate alone", "median over accepted windows", _NOT_MEASURED),
    _throughput("throughput_low", "lower end of its 80 % interval", "statistics", _INTERVAL_NA),
    _throughput("throughput_high", "upper end of its 80 % interval", "statistics", _INTERVAL_NA),
    Column("slowdown", "number", "1 / n", "of throughput", "1", _NOT_MEASURED, 0.1, 1e6),
    Column(
        "saving",
        "number",
        "packing saving of the set, 1 − 1/Σn",
        "median over windows accepted for all members",
        "1",
        "when no window was accepted for all members",
        -1e6,
        1.0,
    ),
    Column(
        "saving_low",
        "number",
        "lower end of its 80 % interval",
        "statistics",
        "1",
        "when fewer than two such windows",
        -1e6,
        1.0,
    ),
    Column(
        "saving_high",
        "number",
        "upper end of its 80 % interval",
        "statistics",
        "1",
        "when fewer than two such windows",
        -1e6,
        1.0,
    ),
    _fraction("util", "utilisation of the focal member alone", "solo", "when its solo row does not say"),
    _fraction("util_others", "sum of the others' utilisations alone", "solo", "when a solo row does not say", 20.0),
    _fraction("util_sum", "sum of all utilisations alone", "solo", "when a solo row does not say", 20.0),
    _amount(
        "rate_solo",
        "steps/s",
        1e7,
        "rate alone around the shared windows",
        "median over accepted windows",
        na=_NOT_MEASURED,
    ),
    _amount("rate_shared", "steps/s", 1e7, "rate together", "median over accepted windows", na=_NOT_MEASURED),
)

_OPTIONAL = "when not known"

CARD: tuple[Column, ...] = (
    _count("format", "number of this format", "the suite", FORMAT, FORMAT),
    _name("run_id", "unique name of the run", "the suite"),
    _name("device", "which kind of device", "--device", values=("cpu", "cuda")),
    _name("gpu_type", "its type; runs of one type are pooled", "the device"),
    _name("gpu_uuid", "which one it was", "the device", _OPTIONAL),
    _count("host_cores", "CPU cores of the host that could be used", "the system", 1, 1e6, na=_OPTIONAL),
    _count("memory_bytes", "memory of the device", "the device", 0, _PEBIBYTE, na=_OPTIONAL),
    _name("driver", "driver version", "the device", _OPTIONAL),
    _name("cuda", "CUDA version", "the device", _OPTIONAL),
    _name("torch", "PyTorch version", "the process", _OPTIONAL),
    _name("python", "Python version", "the process", _OPTIONAL),
    _name("system", "operating system", "the system", _OPTIONAL),
    _name("processor", "processor of the host", "the system", _OPTIONAL),
    _name("date", "when the run began", "the system", _OPTIONAL),
    _name("commit", "commit of the suite", "git", _OPTIONAL),
    Column("dry_run", "flag", "true: not measured, refused by the loader", "the suite"),
)

TABLES: dict[str, tuple[Column, ...]] = {"samples": SAMPLES, "solo": SOLO, "pairs": PAIRS}
KEYS: dict[str, tuple[str, ...]] = {
    "samples": ("run_id", "visit", "position", "slot"),
    "solo": ("gpu_type", "mode", "member", "share"),
    "pairs": ("gpu_type", "mode", "shares", "set", "member", "share"),
}

__all__ = ["CARD", "FORMAT", "KEYS", "MIX", "MODES", "PAIRS", "RULES", "SAMPLES", "SOLO", "TABLES", "Column", "Kind"]
