"""The numbers behind the findings: everything is computed from the tables of one data set, nothing is drawn here."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cotenant.forecasting.datasets.colocation import Tables, observations
from cotenant.forecasting.datasets.columns import MODES
from cotenant.forecasting.interference import UtilisationRule
from cotenant.forecasting.types import DemandProfile

BINS = ((0.0, 0.9), (0.9, 1.1), (1.1, 1.5), (1.5, math.inf))
UNEQUAL = 0.1  # utilisations that differ by less count as equal

Rule = Callable[[Sequence[DemandProfile]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class MeasuredSet:
    """One set of members that shared the device without caps.

    Attributes:
        names: The members.
        utils: Their utilisations alone.
        ns: Their measured throughputs.
        saving: The packing saving of the set, and the ends of its 80 % interval (None with fewer than two windows).
        predicted: The throughputs that each simple rule predicts.
    """

    names: tuple[str, ...]
    utils: tuple[float, ...]
    ns: tuple[float, ...]
    saving: tuple[float, float | None, float | None]
    predicted: dict[str, tuple[float, ...]]

    @property
    def util_sum(self) -> float:
        """The sum of the utilisations alone."""
        return math.fsum(self.utils)

    @property
    def slowdowns(self) -> tuple[float, ...]:
        """1/n of each member."""
        return tuple(1.0 / n for n in self.ns)

    @property
    def lighter_first(self) -> tuple[float, float] | None:
        """Throughput of the lighter and of the heavier of two; None for equal ones."""
        if abs(self.utils[0] - self.utils[1]) < UNEQUAL:
            return None
        return (self.ns[0], self.ns[1]) if self.utils[0] < self.utils[1] else (self.ns[1], self.ns[0])


@dataclass(frozen=True, slots=True)
class Bin:
    """Pairs whose summed utilisation lies in (above, up_to]."""

    above: float
    up_to: float
    pairs: int
    slowdown: float
    worst_slowdown: float
    saving: float
    lost: int


@dataclass(frozen=True, slots=True)
class RuleError:
    """How far a rule is off: mean absolute error and mean error (predicted - measured) of the saving, and of n."""

    rule: str
    saving_error: float
    saving_bias: float
    n_error: float


@dataclass(frozen=True, slots=True)
class Repeated:
    """A member's throughput in one set on two occasions."""

    name: str
    first: float
    second: float


@dataclass(frozen=True, slots=True)
class Triple:
    """A member's throughput in a set of three, and the product of its throughputs beside each of the other two."""

    name: str
    measured: float
    product: float


@dataclass(frozen=True, slots=True)
class Capped:
    """A member held to a share: the share, its throughput, and its utilisation alone."""

    name: str
    share: float
    n: float
    util: float

    @property
    def reachable(self) -> float:
        """The throughput that the share allows alone, when speed is proportional to it: min(1, share / util)."""
        return min(1.0, self.share / self.util) if self.util > 0.0 else 1.0


RULES: dict[str, Rule] = {
    "utilisation rule": lambda members: [one.mid for one in UtilisationRule().predict(members, "")],
    "sum rule": lambda members: [1.0 / max(1.0, math.fsum(m.util_mean for m in members))] * len(members),
    "no interference": lambda members: [1.0] * len(members),
}


def saving_of(ns: Iterable[float]) -> float:
    """Packing saving 1 - 1/sum(n)."""
    return 1.0 - 1.0 / math.fsum(ns)


def rows_of(tables: Tables, gpu_type: str, mode: str) -> list[dict[str, Any]]:
    """The measured rows of ``pairs`` for one type of device and one mode."""
    frame = tables.pairs
    chosen = frame[(frame["gpu_type"] == gpu_type) & (frame["mode"] == mode) & frame["throughput"].notna()]
    records: list[dict[str, Any]] = chosen.to_dict("records")  # type: ignore[assignment]
    return records


def measured_sets(tables: Tables, gpu_type: str, mode: str, size: int = 2) -> list[MeasuredSet]:
    """The sets of ``size`` members measured without caps, those whose members' utilisations are known."""
    if not rows_of(tables, gpu_type, mode):
        return []
    savings = {row["set"]: row for row in rows_of(tables, gpu_type, mode) if not row["shares"]}
    found: defaultdict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    members: dict[tuple[str, ...], tuple[DemandProfile, ...]] = {}
    for seen in observations(tables, mode, gpu_type):
        if len(seen.members) == size and all(share is None for share in seen.shares):
            found[seen.members][seen.members[seen.focal]] = seen.n
            members[seen.members] = seen.profiles
    sets = []
    for names, ns in found.items():
        row = savings["+".join(names)]
        complete = len(ns) == len(set(names)) and not pd.isna(row["saving"])
        if complete and all(profile.source == "history" for profile in members[names]):
            sets.append(
                MeasuredSet(
                    names=names,
                    utils=tuple(profile.util_mean for profile in members[names]),
                    ns=tuple(ns[name] for name in names),
                    saving=(row["saving"], _number(row["saving_low"]), _number(row["saving_high"])),
                    predicted={name: tuple(rule(members[names])) for name, rule in RULES.items()},
                )
            )
    return sorted(sets, key=lambda one: (one.util_sum, one.names))


def bins(sets: Sequence[MeasuredSet]) -> list[Bin]:
    """The pairs by summed utilisation; empty bins are left out."""
    found = []
    for above, up_to in BINS:
        inside = [one for one in sets if above < one.util_sum <= up_to]
        if inside:
            slowdowns = [slowdown for one in inside for slowdown in one.slowdowns]
            found.append(
                Bin(
                    above=above,
                    up_to=up_to,
                    pairs=len(inside),
                    slowdown=statistics.median(slowdowns),
                    worst_slowdown=max(slowdowns),
                    saving=statistics.median(one.saving[0] for one in inside),
                    lost=sum(one.saving[0] < 0.0 for one in inside),
                )
            )
    return found


def rule_errors(sets: Sequence[MeasuredSet]) -> list[RuleError]:
    """How far the simple rules are off; none of them was fitted to this data set."""
    errors = []
    for rule in RULES:
        off = [saving_of(one.predicted[rule]) - one.saving[0] for one in sets]
        off_n = [abs(p - n) for one in sets for p, n in zip(one.predicted[rule], one.ns, strict=True)]
        if off:
            errors.append(
                RuleError(
                    rule, statistics.fmean(abs(value) for value in off), statistics.fmean(off), statistics.fmean(off_n)
                )
            )
    return errors


def repeated(tables: Tables, gpu_type: str, mode: str) -> list[Repeated]:
    """The throughput of each member in each set on the first two occasions on which it was accepted."""
    frame = tables.samples
    chosen = frame[(frame["gpu_type"] == gpu_type) & (frame["mode"] == mode) & frame["throughput"].notna()]
    found: defaultdict[tuple[str, ...], defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in chosen.to_dict("records"):
        shares = row["visit"].partition("/")[0]
        found[shares, row["set"], row["member"], str(row["share"])][int(row["occasion"])].append(row["throughput"])
    pairs = []
    for (_, names, member, _), by_occasion in sorted(found.items()):
        medians = [statistics.median(by_occasion[occasion]) for occasion in sorted(by_occasion)]
        if len(medians) > 1:
            pairs.append(Repeated(f"{member} in {names}", medians[0], medians[1]))
    return pairs


def triples(tables: Tables, gpu_type: str, mode: str) -> list[Triple]:
    """Members of sets of three whose throughputs beside each of the other two are known."""
    ns: dict[tuple[str, str], float] = {}
    threes = []
    for row in rows_of(tables, gpu_type, mode):
        if row["size"] == 2 and not row["shares"]:
            ns[row["member"], row["others"]] = row["throughput"]
        elif row["size"] == 3 and not row["shares"]:
            threes.append(row)
    found = []
    for row in threes:
        beside = [ns.get((row["member"], other)) for other in row["others"].split("+")]
        if all(n is not None for n in beside):
            product = math.prod(n for n in beside if n is not None)
            found.append(Triple(f"{row['member']} in {row['set']}", row["throughput"], product))
    return found


def capped(tables: Tables, gpu_type: str, mode: str) -> list[Capped]:
    """Members that were held to a share beside another member."""
    return [
        Capped(f"{row['member']} in {row['set']}", row["share"], row["throughput"], row["util"])
        for row in rows_of(tables, gpu_type, mode)
        if not pd.isna(row["share"]) and not pd.isna(row["util"])
    ]


def matrix(sets: Sequence[MeasuredSet]) -> tuple[list[str], list[list[float | None]]]:
    """Names by utilisation, and the throughput of each (row) beside each (column)."""
    utils = {name: util for one in sets for name, util in zip(one.names, one.utils, strict=True)}
    names = sorted(utils, key=lambda name: (utils[name], name))
    ns: dict[tuple[str, str], float] = {}
    for one in sets:
        ns[one.names[0], one.names[1]] = one.ns[0]
        ns[one.names[1], one.names[0]] = one.ns[1]
    return names, [[ns.get((row, column)) for column in names] for row in names]


def interval_widths(tables: Tables, gpu_type: str, mode: str) -> list[float]:
    """Widths of the 80 % intervals of n."""
    rows = rows_of(tables, gpu_type, mode)
    return [row["throughput_high"] - row["throughput_low"] for row in rows if not pd.isna(row["throughput_low"])]


def rejected_fraction(tables: Tables, gpu_type: str, mode: str) -> float:
    """The part of the windows that a rule rejected."""
    frame = tables.samples
    chosen = frame[(frame["gpu_type"] == gpu_type) & (frame["mode"] == mode)]
    return float((chosen["rejected"] != "").mean())


def modes(tables: Tables, gpu_type: str) -> list[str]:
    """The modes in which sets were measured, the one that needs nothing first."""
    frame = tables.pairs
    measured = set(frame[(frame["gpu_type"] == gpu_type) & frame["throughput"].notna()]["mode"].tolist())
    return [mode for mode in MODES if mode in measured]


def _number(value: float) -> float | None:
    return None if pd.isna(value) else float(value)
