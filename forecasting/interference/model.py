"""The learned model of one GPU type: physics mean, mixed effects, intervals; new evidence in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cotenant.forecasting.interference.intervals import (
    BOTH_NEW,
    FAMILY_FOCAL,
    FAMILY_OTHER,
    JOB_FOCAL,
    JOB_OTHER,
    PAIR,
    Band,
)
from cotenant.forecasting.interference.kernel import (
    FAMILY,
    JOB,
    MIXES,
    NEAR,
    ONE,
    USUAL_SCALES,
    Scales,
    Weights,
    by_neighbour,
    closeness,
    coupling,
    covariance,
)
from cotenant.forecasting.interference.physics import Physics
from cotenant.forecasting.interference.posterior import Posterior, solve
from cotenant.forecasting.interference.table import DEMANDS, UTIL, Floats, Ints, Jobs, PairTable

LEAST = 0.01  # a throughput of 0 would mean an infinite slowdown
GRID: Mapping[str, Floats] = {"util": np.linspace(0.0, 1.0, 11), "membw_util": np.linspace(0.0, 1.0, 6)}
MISSING_WIDENS = 1.25  # the interval, per feature of either job that had to be guessed
PAIRS_HALVE = 1.0  # measured partners, after which a job's newness counts half
NEW_JOB, NEW_FAMILY = 1, 2
PARTS = ("physics", "own", "neighbour")
_CHUNK = 1024  # rows at once: bounds the memory


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """How raw features become comparable, and what stands for a missing one.

    Attributes:
        centre: Shape (features,).
        spread: Shape (features,), above 0.
        intercept: Shape (features,): a missing feature is guessed as intercept + slope · utilisation.
        slope: Shape (features,).
    """

    centre: Floats
    spread: Floats
    intercept: Floats
    slope: Floats


@dataclass(frozen=True, slots=True, eq=False)
class PairPrediction:
    """Predictions for a list of ordered pairs; all of shape (pairs,).

    ``parts``: ``physics`` is the mean alone, a throughput. ``own`` and ``neighbour`` are added to it (on the logit
    scale in a model without utilisations): the focal job's own known effect, and the known aggressiveness of the
    neighbour. What is left of ``mid`` is what similar pairs did.
    """

    low: Floats
    mid: Floats
    high: Floats
    parts: Mapping[str, Floats]


@dataclass(frozen=True, slots=True, eq=False)
class PairModel:
    """A fitted model of one GPU type.

    Attributes:
        table: The measured pairs it rests on; features complete.
        scaling: Of the features.
        physics: The mean.
        mix: Which weights of the kernel, a key of ``MIXES``.
        logit: Whether effects add up on the logit scale (no utilisations known) instead of the throughput itself.
        unit: Standard deviation of the residuals around the mean, on that scale.
        trust: Shape (rows,): how much each row counts.
        bands: One per situation, see ``intervals``.
        alpha: Shape (rows,): the solution, where it is known already; None solves.
        scales: Length scales of the kernel and its noise.
    """

    table: PairTable
    scaling: Scaling
    physics: Physics
    mix: str
    logit: bool
    unit: float
    trust: Floats
    bands: tuple[Band, ...]
    alpha: Floats | None = None
    scales: Scales = USUAL_SCALES
    _spread: Floats = field(init=False, repr=False)
    _known: Jobs = field(init=False, repr=False)
    _lookup: _Lookup = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_known", self.standardised(self.table.jobs))
        object.__setattr__(self, "_lookup", _lookup(self.table, self._known, self.scaling, self.scales))
        alpha = self.posterior().alpha if self.alpha is None else self.alpha
        object.__setattr__(self, "alpha", alpha)
        spread = np.zeros((len(self.table.jobs), len(self.table.jobs)))
        np.add.at(spread, (self.table.focal, self.table.other), alpha)
        object.__setattr__(self, "_spread", spread)

    @property
    def weights(self) -> Weights:
        """The weights of the kernel's components."""
        return MIXES[self.mix]

    def posterior(self) -> Posterior:
        """Solve for all rows of the table."""
        table = self.table
        matrix = covariance(self.weights, self._known, table.focal, table.other, self.scales)
        return solve(matrix, self.residual(), self.noise(), self.trust)

    def residual(self) -> Floats:
        """Measured − mean of every row, in units of ``unit``."""
        table = self.table
        features = table.jobs.features
        mean = self.physics.mean(table.names, features[table.focal], features[table.other])
        return np.asarray((self.link(table.throughput) - self.link(mean)) / self.unit, dtype=np.float64)

    def noise(self) -> Floats:
        """Noise variance of every row, in units of ``unit`` squared."""
        return np.asarray(self.scales.noise + (self.table.noise / self.unit) ** 2, dtype=np.float64)

    def link(self, throughput: Floats) -> Floats:
        """From throughput to the scale on which effects add up."""
        cut = np.clip(throughput, 0.02, 0.98) if self.logit else np.clip(throughput, 0.0, 1.0)
        return np.asarray(np.log(cut / (1.0 - cut)) if self.logit else cut, dtype=np.float64)

    def unlink(self, value: Floats) -> Floats:
        """From that scale back to a throughput in (0, 1]."""
        plain = 1.0 / (1.0 + np.exp(-np.clip(value, -30.0, 30.0))) if self.logit else value
        return np.asarray(np.clip(plain, LEAST, 1.0), dtype=np.float64)

    def standardised(self, jobs: Jobs) -> Jobs:
        """The same jobs with comparable features."""
        return replace(jobs, features=(jobs.features - self.scaling.centre) / self.scaling.spread)

    def completed(self, jobs: Jobs) -> tuple[Jobs, Floats]:
        """Guess what is missing: first from the model's own record of the job, then from its utilisation.

        Returns:
            The jobs without NaN (a missing utilisation is 1, the worst), and per job how many features were guessed
            from other jobs.
        """
        values = np.array(jobs.features, dtype=np.float64)
        gaps = np.isnan(values)
        if not gaps.any():
            return jobs, np.zeros(len(jobs))
        for row, name in enumerate(jobs.ids):
            if name in self._lookup.place:
                known = self.table.jobs.features[self._lookup.place[name]]
                values[row, gaps[row]] = known[gaps[row]]
        gaps = np.isnan(values)
        if UTIL in self.table.names:
            column = self.table.names.index(UTIL)
            values[gaps[:, column], column] = 1.0
            util = values[:, column : column + 1]
        else:
            util = np.zeros((len(values), 1))
        guess = self.scaling.intercept + self.scaling.slope * util
        for column, name in enumerate(self.table.names):
            if name in DEMANDS:
                guess[:, column] = np.clip(guess[:, column], 0.0, 1.0)
        return replace(jobs, features=np.where(np.isnan(values), guess, values)), gaps.sum(axis=1).astype(np.float64)

    def with_evidence(self, rows: PairTable) -> PairModel:
        """The model after further measured pairs: the same prior, conditioned on them too, in closed form.

        What was measured anew of an ordered pair takes the place of what the model knew of it.

        Args:
            rows: Measured pairs with the same features. Jobs that the model knows keep the model's features.

        Raises:
            ValueError: The features are not the model's.
        """
        if rows.names != self.table.names:
            raise ValueError(f"evidence has the features {rows.names}; this model needs {self.table.names}")
        complete, _ = self.completed(rows.jobs)
        place = {name: k for k, name in enumerate(self.table.jobs.ids)}
        new = [k for k, name in enumerate(complete.ids) if name not in place]
        jobs = self.table.jobs.joined(complete.take(new)) if new else self.table.jobs
        place |= {complete.ids[k]: len(self.table.jobs) + n for n, k in enumerate(new)}
        moved = np.array([place[name] for name in complete.ids], dtype=np.intp)
        focal, other = moved[rows.focal], moved[rows.other]
        stays = ~np.isin(self.table.focal * len(jobs) + self.table.other, focal * len(jobs) + other)
        known = self.table.rows(stays)
        table = PairTable(
            self.table.names,
            jobs,
            np.concatenate([known.focal, focal]),
            np.concatenate([known.other, other]),
            np.concatenate([known.throughput, rows.throughput]),
            np.concatenate([known.noise, rows.noise]),
        )
        return replace(self, table=table, trust=np.concatenate([self.trust[stays], np.ones(len(rows))]), alpha=None)

    def without(self, rows: Ints, posterior: Posterior) -> PairModel:
        """The model as it would be without these rows, by the block inverse; ``posterior`` is this model's own."""
        keep = np.setdiff1d(np.arange(len(self.table)), rows)
        alpha = posterior.without(rows, keep)
        return replace(self, table=self.table.rows(keep), trust=self.trust[keep], alpha=alpha)

    def predict(self, jobs: Jobs, focal: Ints, other: Ints) -> PairPrediction:
        """Predict ordered pairs.

        Args:
            jobs: The jobs that occur; NaN features are guessed and widen the interval.
            focal: Shape (pairs,): position of the job whose throughput is wanted.
            other: Shape (pairs,): position of its neighbour.
        """
        complete, guessed = self.completed(jobs)
        mid, parts = self._mid(complete, focal, other)
        low, high = self._ends(complete, guessed, focal, other, mid)
        return PairPrediction(low, mid, high, parts)

    def _mid(self, jobs: Jobs, focal: Ints, other: Ints) -> tuple[Floats, dict[str, Floats]]:
        axes = [name for name in DEMANDS if name in self.table.names]
        surface = self._surface(jobs, axes)
        columns: dict[str, list[Floats]] = {name: [np.zeros(0)] for name in ("mid", *PARTS)}
        for start in range(0, len(focal), _CHUNK):
            f, o = focal[start : start + _CHUNK], other[start : start + _CHUNK]
            own, neighbour, similar = surface.effects(f, o)
            mean = self.physics.mean(self.table.names, jobs.features[f][:, None, :], surface.points[o])
            value = similar + (own + neighbour)[:, None]
            columns["mid"].append(surface.mid(self.unlink(self.link(mean) + self.unit * value), o))
            columns["physics"].append(surface.at(mean[:, 1:], jobs.features[o]))
            columns["own"].append(self.unit * own)
            columns["neighbour"].append(self.unit * neighbour)
        joined = {name: np.concatenate(parts) for name, parts in columns.items()}
        return joined.pop("mid"), joined

    def _surface(self, jobs: Jobs, axes: list[str]) -> _Surface:
        """Everything about these jobs that does not depend on who shares with whom."""
        lookup, scaled = self._lookup, self.standardised(jobs)
        alike = lookup.alike(scaled)
        recorded = np.array([lookup.place.get(name, -1) for name in jobs.ids], dtype=np.intp)
        points = _points(self.table.names, axes, jobs.features, self.table.jobs.features, recorded)
        others = [k for k, name in enumerate(self.table.names) if name not in axes]
        on_record = (points[:, 0] - self.scaling.centre) / self.scaling.spread
        return _Surface(
            self.table.names,
            axes,
            points,
            recorded >= 0,
            jobs.features,
            self._drive(alike),
            alike,
            closeness(on_record, self._known.features, len(self.table.names), self.scales),
            closeness(scaled.features[:, others], self._known.features[:, others], len(self.table.names), self.scales),
            lookup.grid,
        )

    def _drive(self, alike: Mapping[str, Floats]) -> dict[str, Floats]:
        """Per resemblance of the neighbours what it weighs beside each of these focal jobs: (jobs, known)."""
        drive = {side: sums @ self._spread for side, sums in by_neighbour(self.weights, alike).items()}
        as_focal, as_other = self._spread.sum(axis=1), self._spread.sum(axis=0)
        for side, weight in coupling(self.weights).items():
            drive[ONE] += weight * alike[side] * as_other
            drive[side] += weight * as_focal
        return drive

    def _ends(self, jobs: Jobs, guessed: Floats, focal: Ints, other: Ints, mid: Floats) -> tuple[Floats, Floats]:
        """Low and high ends: between those for new jobs and those for known ones, by how many pairs are known."""
        novelty, strange = self.novelty(jobs)
        below, above = np.zeros_like(mid), np.zeros_like(mid)
        for focal_new in (False, True):
            for other_new in (False, True):
                share = np.where(focal_new, strange[focal], 1.0 - strange[focal])
                share = share * np.where(other_new, strange[other], 1.0 - strange[other])
                low, high = self._band_ends(novelty[focal] * focal_new, novelty[other] * other_new, mid)
                below += share * (mid - low) ** 2
                above += share * (high - mid) ** 2
        widen = MISSING_WIDENS ** (guessed[focal] + guessed[other])
        low, high = mid - widen * np.sqrt(below), mid + widen * np.sqrt(above)
        return np.clip(low, LEAST, mid), np.clip(high, mid, 1.0)

    def _band_ends(self, focal: Ints, other: Ints, mid: Floats) -> tuple[Floats, Floats]:
        situation = situations(focal, other)
        low, high = np.empty_like(mid), np.empty_like(mid)
        for kind, band in enumerate(self.bands):
            rows = situation == kind
            low[rows], high[rows] = band.ends(mid[rows])
        widen = np.where((focal == NEW_FAMILY) & (other == NEW_FAMILY), BOTH_NEW, 1.0)
        return mid - widen * (mid - low), mid + widen * (high - mid)

    def novelty(self, jobs: Jobs) -> tuple[Ints, Floats]:
        """How new jobs are.

        Returns:
            Per job what it is without its own pairs: ``NEW_JOB`` of a family measured in other jobs, or ``NEW_FAMILY``;
            and how much that still counts, from 1 for a job without measured pairs to 0 for one with as many partners
            as any.
        """
        partners, relatives = self._lookup.partners, self._lookup.relatives
        kind, strange = np.empty(len(jobs), dtype=np.intp), np.empty(len(jobs))
        most = max(partners.values(), default=0)
        for row, (name, family) in enumerate(zip(jobs.ids, jobs.families, strict=True)):
            count = partners.get(name, 0)
            others = relatives.get(family, 0) - (count > 0)
            kind[row] = NEW_JOB if others > 0 else NEW_FAMILY
            strange[row] = PAIRS_HALVE * (most - count) / (most * (PAIRS_HALVE + count)) if count else 1.0
        return kind, strange


def situations(focal: Ints, other: Ints) -> Ints:
    """Which band holds, from the novelty of both jobs: 0 = known, ``NEW_JOB`` or ``NEW_FAMILY``."""
    hardest = np.maximum(focal, other)
    of_focal = np.array([PAIR, JOB_FOCAL, FAMILY_FOCAL], dtype=np.intp)
    of_other = np.array([PAIR, JOB_OTHER, FAMILY_OTHER], dtype=np.intp)
    return np.where(focal == hardest, of_focal[hardest], of_other[hardest])


@dataclass(frozen=True, slots=True, eq=False)
class _Lookup:
    """What of a model does not change from one prediction to the next."""

    known: Jobs
    scales: Scales
    place: Mapping[str, int]
    families: Mapping[str, Floats]  # per family, which known jobs belong to it: (known,)
    partners: Mapping[str, int]  # of every measured job, how many it was measured beside
    relatives: Mapping[str, int]  # measured jobs per family
    grid: Mapping[str, Floats]

    def alike(self, jobs: Jobs) -> dict[str, Floats]:
        """``kernel.sides`` of these standardised jobs and the known ones, from what is prepared."""
        count = len(self.known)
        nobody = np.zeros(count)
        same_job = np.zeros((len(jobs), count))
        for row, name in enumerate(jobs.ids):
            if name in self.place:
                same_job[row, self.place[name]] = 1.0
        family = np.array([self.families.get(name, nobody) for name in jobs.families]).reshape(len(jobs), count)
        return {
            ONE: np.ones((len(jobs), count)),
            JOB: same_job,
            FAMILY: family,
            **closeness(jobs.features, self.known.features, jobs.features.shape[1], self.scales),
        }


def _lookup(table: PairTable, known: Jobs, scaling: Scaling, scales: Scales) -> _Lookup:
    axes = [name for name in DEMANDS if name in table.names]
    columns = [table.names.index(name) for name in axes]
    mesh = np.meshgrid(*(GRID[name] for name in axes), indexing="ij")
    demands = np.stack([axis.ravel() for axis in mesh], axis=1) if axes else np.zeros((1, 0))
    demands = (demands - scaling.centre[columns]) / scaling.spread[columns]
    names = set(known.families) - {""}
    beside = np.zeros((len(known), len(known)), dtype=np.bool_)
    beside[table.focal, table.other] = beside[table.other, table.focal] = True
    partners = {known.ids[k]: int(count) for k, count in enumerate(beside.sum(axis=1)) if count}
    families = [known.families[k] for k in np.flatnonzero(beside.any(axis=1))]
    return _Lookup(
        known,
        scales,
        {name: k for k, name in enumerate(known.ids)},
        {name: np.array([name == each for each in known.families], dtype=np.float64) for name in names},
        partners,
        {name: families.count(name) for name in names},
        closeness(demands, known.features[:, columns], len(table.names), scales),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Surface:
    """Predictions over the demands a neighbour might have, of which the first point is what the model has on record.

    A Gaussian process need not fall when the neighbour wants more. So it is evaluated on a grid of demands, replaced
    by the surface halfway between the largest falling one below it and the smallest falling one above it, and
    interpolated. A neighbour on record keeps its exact prediction at the demands on record, and moves from there as the
    falling surface does.
    """

    names: tuple[str, ...]
    axes: list[str]
    points: Floats  # (jobs, 1 + grid, features)
    recorded: NDArray[np.bool_]  # (jobs,)
    features: Floats
    drive: Mapping[str, Floats]
    alike: Mapping[str, Floats]
    exact: Mapping[str, Floats]  # closeness at the demands on record: (jobs, known)
    rest: Mapping[str, Floats]  # closeness but for the demands: (jobs, known)
    grid: Mapping[str, Floats]  # closeness of the demands of the grid's points: (grid, known)

    def effects(self, focal: Ints, other: Ints) -> tuple[Floats, Floats, Floats]:
        """The learnt effects of pairs, in standard deviations.

        Returns:
            What is the focal job's own, whoever the neighbour is, and what is known of this very neighbour (or its
            family), both of shape (pairs,); what similar neighbours did, of shape (pairs, points).
        """
        neighbour = np.zeros(len(focal))
        for side in (JOB, FAMILY):
            neighbour += np.einsum("rj,rj->r", self.drive[side][focal], self.alike[side][other])
        similar = np.zeros((len(focal), self.points.shape[1]))
        for side, grid in self.grid.items():
            force, rest = self.drive[side][focal], self.rest[side][other]
            similar[:, 0] += np.einsum("rj,rj->r", force, self.exact[side][other])
            if side == NEAR:
                similar[:, 1:] += (force * rest) @ grid.T
            else:
                similar[:, 1:] += np.einsum("rj,rj->r", force, rest)[:, None] + force @ grid.T
        return self.drive[ONE][focal].sum(axis=1), neighbour, similar

    def mid(self, throughput: Floats, other: Ints) -> Floats:
        """From predictions at the points, shape (pairs, points), to one per pair at the neighbour's own demands."""
        falling = self.falling(throughput[:, 1:])
        here = self.at(falling, self.features[other])
        exact = throughput[:, 0] + here - self.at(falling, self.points[other, 0])
        return np.asarray(np.clip(np.where(self.recorded[other], exact, here), LEAST, 1.0), dtype=np.float64)

    def falling(self, values: Floats) -> Floats:
        """The surface that falls along every demand."""
        shape = values.shape[0], *(len(GRID[name]) for name in self.axes)
        least = most = values.reshape(shape)
        for axis in range(1, len(shape)):
            least = np.minimum.accumulate(least, axis=axis)
            most = np.flip(np.maximum.accumulate(np.flip(most, axis), axis=axis), axis)
        return np.asarray((least + most).reshape(values.shape) / 2.0, dtype=np.float64)

    def at(self, values: Floats, features: Floats) -> Floats:
        """Interpolate linearly between the grid's points at each row's own demands: shape (rows,)."""
        cube = values.reshape(values.shape[0], *(len(GRID[name]) for name in self.axes))
        rows = np.arange(len(cube))
        for name in self.axes:
            knots = len(GRID[name])
            place = np.clip(features[:, self.names.index(name)], 0.0, 1.0) * (knots - 1)
            left = np.minimum(place.astype(np.intp), knots - 2)
            part = (place - left).reshape(-1, *([1] * (cube.ndim - 2)))
            cube = cube[rows, left] * (1.0 - part) + cube[rows, left + 1] * part
        return np.asarray(cube.reshape(len(features)), dtype=np.float64)


def _points(names: tuple[str, ...], axes: list[str], features: Floats, known: Floats, recorded: Ints) -> Floats:
    """Every job with its demands on record, then with each combination of the grid: (jobs, 1 + grid, features)."""
    mesh = np.meshgrid(*(GRID[name] for name in axes), indexing="ij")
    count = mesh[0].size if mesh else 1
    points = np.repeat(features[:, None, :], count + 1, axis=1)
    for name, values in zip(axes, mesh, strict=True):
        column = names.index(name)
        points[:, 1:, column] = values.ravel()
        points[:, 0, column] = np.where(recorded >= 0, known[recorded, column], features[:, column])
    return points


__all__ = ["GRID", "LEAST", "PairModel", "PairPrediction", "Scaling", "situations"]
