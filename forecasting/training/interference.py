"""Fitting the interference model to measured pairs. Seconds, not minutes; nothing is random."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from cotenant.forecasting.datasets import bridge
from cotenant.forecasting.interference.bundle import InterferenceModels, ModelCard
from cotenant.forecasting.interference.intervals import (
    FAMILY_FOCAL,
    FAMILY_OTHER,
    JOB_FOCAL,
    JOB_OTHER,
    PAIR,
    UNCALIBRATED,
    Band,
    calibrate,
    enough,
    fill,
)
from cotenant.forecasting.interference.kernel import FAR_SCALE, MIXES, NEAR_SCALE, NOISE, Scales, covariance
from cotenant.forecasting.interference.model import LEAST, PairModel, Scaling
from cotenant.forecasting.interference.observations import FEATURES, MOST_THROUGHPUT, Observation, features, pairs_of
from cotenant.forecasting.interference.physics import SHARES_START, Physics
from cotenant.forecasting.interference.posterior import TAILS, Posterior, solve, solve_robustly
from cotenant.forecasting.interference.table import DEMANDS, STEP, UTIL, Floats, Ints, Jobs, PairTable
from cotenant.forecasting.profiles import on_type
from cotenant.forecasting.types import DemandProfile

LEAST_ROWS = 12  # below, there is nothing to learn a model from
_CHOICE_ROWS = 800  # for choosing between physics and mixes; more rows change no choice
_SOFT = 0.05  # where a residual of the physics stops counting as a square
_GUESS_SLOPE_NEEDS = 4  # jobs


@dataclass(frozen=True, slots=True)
class InterferenceOptions:
    """What is chosen before a fit, not by it. The defaults were chosen on published pairs (``docs/interference.md``).

    Attributes:
        near: Length scale over all features at once, in standard deviations of a feature times √features.
        far: Length scale over one feature after the other, in standard deviations.
        noise: Of one measurement, as a share of the variance of the residual.
        tails: Degrees of freedom of the noise: the fewer, the less a measurement far off counts.
        prior_pull: Of the shares model's parameters towards their start, in residuals per e-fold.
        mix: Weights of the kernel, a key of ``MIXES``; None chooses by leave-family-out error inside the data.
    """

    near: float = NEAR_SCALE
    far: float = FAR_SCALE
    noise: float = NOISE
    tails: float = TAILS
    prior_pull: float = 0.15
    mix: str | None = None

    def __post_init__(self) -> None:
        Scales(self.near, self.far, self.noise)  # refuses what cannot be
        if not 0.0 < self.tails < math.inf:
            raise ValueError(f"tails: {self.tails} is not accepted; give a finite number above 0")
        if not 0.0 <= self.prior_pull < math.inf:
            raise ValueError(f"prior_pull: {self.prior_pull} is not accepted; give a finite number of at least 0")
        if self.mix is not None and self.mix not in MIXES:
            raise ValueError(f"mix: {self.mix!r} is not accepted; give one of {', '.join(MIXES)}, or None")

    @property
    def scales(self) -> Scales:
        """What of these a fitted model carries."""
        return Scales(self.near, self.far, self.noise)


USUAL_OPTIONS = InterferenceOptions()


def fit_pairs(table: PairTable, mode: str | None = None, options: InterferenceOptions = USUAL_OPTIONS) -> PairModel:
    """Fit the model of one GPU type.

    The mean and the mix of effects are chosen by leave-one-family-out error inside ``table``.

    Args:
        table: Measured pairs; NaN features are allowed.
        mode: How the GPU was shared: "timeslice" and "mps" have a mean of their own; None finds out which fits better.
        options: What is chosen beforehand.

    Raises:
        ValueError: Fewer than ``LEAST_ROWS`` rows, or a feature that no measured job has.
    """
    if len(table) < LEAST_ROWS:
        raise ValueError(f"{len(table)} measured pairs are too few to fit a model; give at least {LEAST_ROWS}")
    table, scaling = _complete(table.measured_only())
    drafts = list(_drafts(table, scaling, mode, options))
    if len(drafts) > 1:
        stride = math.ceil(len(table) / _CHOICE_ROWS)
        errors = [_choice_error(draft, stride) for draft in drafts]
        draft = drafts[int(np.argmin(errors))]
    else:
        draft = drafts[0]
    matrix = covariance(draft.weights, draft.standardised(table.jobs), table.focal, table.other, draft.scales)
    posterior = solve_robustly(matrix, draft.residual(), draft.noise(), options.tails)
    model = replace(draft, trust=posterior.trust, alpha=posterior.alpha)
    return replace(model, bands=_bands(model, posterior))


def held_out_mids(model: PairModel, posterior: Posterior, groups: Ints) -> Iterator[tuple[int, Ints, Floats]]:
    """For every group of jobs: its number, the rows that touch it and their predictions without them."""
    table = model.table
    residual = model.residual()
    features = table.jobs.features
    mean = model.link(model.physics.mean(table.names, features[table.focal], features[table.other]))
    for group in np.unique(groups[np.concatenate([table.focal, table.other])]):
        rows = np.flatnonzero(table.touched(groups, int(group)))
        if len(rows) < len(table):
            yield int(group), rows, model.unlink(mean[rows] + model.unit * posterior.held_out(residual, rows))


def _complete(table: PairTable) -> tuple[PairTable, Scaling]:
    """Fill in missing features and find their scale, from the jobs that were measured."""
    measured = np.unique(np.concatenate([table.focal, table.other]))
    values = table.jobs.features[measured]
    util = values[:, table.names.index(UTIL)] if UTIL in table.names else np.full(len(values), np.nan)
    intercept, slope = np.zeros(len(table.names)), np.zeros(len(table.names))
    for column, name in enumerate(table.names):
        known = np.isfinite(values[:, column])
        if not known.any():
            raise ValueError(f"feature {name!r} is missing for every measured job; leave it out")
        intercept[column] = float(np.mean(values[known, column]))
        both = known & np.isfinite(util)
        # Only demands follow the utilisation, and never downwards: a guess must not undo the monotone prediction.
        if name in DEMANDS and name != UTIL and both.sum() >= _GUESS_SLOPE_NEEDS and np.ptp(util[both]) > 0.0:
            fitted = np.polyfit(util[both], values[both, column], 1)
            if fitted[0] > 0.0:
                slope[column], intercept[column] = fitted
    all_values = table.jobs.features
    all_util = all_values[:, table.names.index(UTIL)] if UTIL in table.names else np.zeros(len(all_values))
    all_util = np.where(np.isnan(all_util), 1.0, all_util)
    guess = intercept + slope * all_util[:, None]
    for column, name in enumerate(table.names):
        if name == UTIL:
            guess[:, column] = 1.0
        elif name in DEMANDS:
            guess[:, column] = np.clip(guess[:, column], 0.0, 1.0)
    full = np.where(np.isnan(all_values), guess, all_values)
    spread = full[measured].std(axis=0) * _widened(len(np.unique(table.families()[measured])))
    scaling = Scaling(full[measured].mean(axis=0), np.where(spread > 1e-9, spread, 1.0), intercept, slope)
    return replace(table, jobs=Jobs(table.jobs.ids, table.jobs.families, full)), scaling


def _widened(families: int) -> float:
    """How much farther than the measured ones a further family lies from their mean, in their standard deviations.

    Of k values the unbiased variance is k / (k − 1) of the plain one, and a further value is 1 + 1/k of that from their
    mean, in the mean.
    """
    return math.sqrt((families + 1) / (families - 1)) if families > 1 else 1.0


def _drafts(table: PairTable, scaling: Scaling, mode: str | None, options: InterferenceOptions) -> Iterator[PairModel]:
    """Every combination of mean and mix, not yet solved."""
    for physics, logit in _means(table, mode, options):
        for mix in MIXES if options.mix is None else (options.mix,):
            trust, alpha = np.ones(len(table)), np.zeros(len(table))
            draft = PairModel(table, scaling, physics, mix, logit, 1.0, trust, (UNCALIBRATED,), alpha, options.scales)
            unit = float(np.sqrt(np.mean(draft.residual() ** 2)))  # effects have mean 0: where the mean is off, too
            yield replace(draft, unit=max(unit, 1e-3))


def _means(table: PairTable, mode: str | None, options: InterferenceOptions) -> Iterator[tuple[Physics, bool]]:
    if UTIL not in table.names:
        yield Physics("constant", (float(np.median(np.clip(table.throughput, 0.02, 0.98))),)), True
        return
    if mode != "mps" or STEP not in table.names:
        yield Physics("queue"), False
        yield Physics("fair"), False
    if mode != "timeslice" and STEP in table.names:
        yield _fit_shares(table, options.prior_pull), False


def _fit_shares(table: PairTable, pull: float) -> Physics:
    features = table.jobs.features
    focal, other, target = features[table.focal], features[table.other], np.clip(table.throughput, 0.0, 1.0)
    start = np.log(SHARES_START)

    def errors(logs: Floats) -> Floats:
        fitted = Physics("shares", tuple(np.exp(logs))).mean(table.names, focal, other)
        return np.concatenate([fitted - target, pull * (logs - start)])

    found = least_squares(errors, start, loss="soft_l1", f_scale=_SOFT, max_nfev=60)
    return Physics("shares", tuple(float(value) for value in np.exp(found.x)))


def _choice_error(draft: PairModel, stride: int) -> float:
    """Mean absolute error, leaving families out (jobs, where there are fewer than three families)."""
    table = draft.table.rows(np.arange(0, len(draft.table), stride))
    draft = replace(draft, table=table, trust=np.ones(len(table)), alpha=np.zeros(len(table)))
    matrix = covariance(draft.weights, draft.standardised(table.jobs), table.focal, table.other, draft.scales)
    posterior = solve(matrix, draft.residual(), draft.noise(), draft.trust)
    groups = _families(table)
    errors = [
        np.abs(mids - np.clip(table.throughput[rows], 0.0, 1.0))
        for _, rows, mids in held_out_mids(draft, posterior, groups)
    ]
    return float(np.mean(np.concatenate(errors))) if errors else math.inf


def _families(table: PairTable) -> Ints:
    groups = table.families()
    used = groups[np.concatenate([table.focal, table.other])]
    return groups if len(np.unique(used)) >= 3 else np.arange(len(table.jobs), dtype=np.intp)


def _bands(model: PairModel, posterior: Posterior) -> tuple[Band, ...]:
    """Calibrate an interval for every situation from rows predicted without their pair, job or family."""
    table = model.table
    bands: dict[int, Band] = {}
    jobs = np.arange(len(table.jobs), dtype=np.intp)
    for groups, of_focal, of_other in (
        (_families(table), FAMILY_FOCAL, FAMILY_OTHER),
        (jobs, JOB_FOCAL, JOB_OTHER),
    ):
        held = list(held_out_mids(model, posterior, groups))
        for situation, is_focal in ((of_focal, True), (of_other, False)):
            _calibrate_into(
                bands,
                situation,
                table,
                held,
                lambda rows, group, g=groups, f=is_focal: (g[table.focal[rows]] == group) == f,
            )
    _calibrate_into(
        bands,
        PAIR,
        table,
        list(_held_out_pairs(model, posterior)),
        lambda rows, group: np.ones(len(rows), dtype=np.bool_),
    )
    return fill(bands)


def _calibrate_into(
    bands: dict[int, Band],
    situation: int,
    table: PairTable,
    held: list[tuple[int, Ints, Floats]],
    wanted: Callable[..., Floats],
) -> None:
    mids, measured, groups = [np.zeros(0)], [np.zeros(0)], [np.zeros(0, dtype=np.intp)]
    for group, rows, predicted in held:
        pick = wanted(rows, group)
        mids.append(predicted[pick])
        measured.append(np.clip(table.throughput[rows[pick]], 0.0, 1.0))
        groups.append(np.full(int(np.sum(pick)), group, dtype=np.intp))
    numbers = np.concatenate(groups)
    if enough(numbers):
        bands[situation] = calibrate(np.concatenate(mids), np.concatenate(measured), numbers)


def _held_out_pairs(model: PairModel, posterior: Posterior) -> Iterator[tuple[int, Ints, Floats]]:
    table = model.table
    size = len(table.jobs)
    keys = np.minimum(table.focal, table.other) * size + np.maximum(table.focal, table.other)
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(keys[order]) > 0])
    residual = model.residual()
    features = table.jobs.features
    mean = model.link(model.physics.mean(table.names, features[table.focal], features[table.other]))
    for rows in np.split(order, starts[1:]):
        yield int(keys[rows[0]]), rows, model.unlink(mean[rows] + model.unit * posterior.held_out(residual, rows))


def fit_interference(
    observations: Sequence[Observation],
    source: str,
    licence: str,
    mode: str | None = None,
    options: InterferenceOptions = USUAL_OPTIONS,
) -> InterferenceModels:
    """Fit one model per GPU type and one over all types.

    A type with fewer than ``LEAST_ROWS`` ordered pairs gets no model of its own; the pooled one serves it. So it does a
    type on which no utilisation can be read (MIG instances), whose pairs teach nothing of jobs never met.

    Args:
        observations: Measured pairs (larger sets are left out); every job needs a fingerprint.
        source: What was measured, in words, for the model's card.
        licence: Licence of the data, for the model's card.
        mode: How the GPU was shared, see ``fit_pairs``.
        options: What is chosen beforehand.

    Raises:
        ValueError: Too few pairs for any model, or no utilisation was measured.
    """
    blind = {each.gpu_type for each in observations} - {each.gpu_type for each in observations if _tells_use(each)}
    told = [each for each in observations if each.gpu_type not in blind] or observations  # of none: refused below
    models: dict[str, PairModel] = {}
    metrics: dict[str, float] = {}
    for gpu_type in sorted({each.gpu_type for each in told}):
        mine = [each for each in told if each.gpu_type == gpu_type]
        table = pairs_of(mine, _features_of(mine))
        if len(table) >= LEAST_ROWS:
            models[gpu_type] = fit_pairs(table, mode, options)
            metrics |= {f"{gpu_type}: {name}": value for name, value in _metrics(models[gpu_type]).items()}
    # The same program on another GPU type is another job: what it is there says nothing exact about here.
    renamed = [_on_its_type(each) for each in told]
    pooled = fit_pairs(pairs_of(renamed, _features_of(renamed)), mode, options)
    card = ModelCard(source, licence, _fingerprint(observations), metrics)
    return InterferenceModels(models, pooled, card)


def _tells_use(observation: Observation) -> bool:
    return any(math.isfinite(features(job)[UTIL]) for job in (observation.focal, *observation.others))


def _features_of(observations: Sequence[Observation]) -> tuple[str, ...]:
    """The features that at least half of the jobs have; utilisation always."""
    profiles = {job.fingerprint: job for each in observations for job in (each.focal, *each.others)}
    rows = [features(profile) for profile in profiles.values()]
    shares = {name: sum(math.isfinite(row[name]) for row in rows) / max(1, len(rows)) for name in FEATURES}
    if not shares[UTIL]:
        raise ValueError("util_mean: no measured job has one; measure jobs alone before pairs")
    return tuple(name for name in FEATURES if name == UTIL or shares[name] >= 0.5)


def _on_its_type(each: Observation) -> Observation:
    def named(job: DemandProfile) -> DemandProfile:
        return replace(job, fingerprint=on_type(job.fingerprint, each.gpu_type))

    return replace(each, focal=named(each.focal), others=tuple(map(named, each.others)))


def _metrics(model: PairModel) -> dict[str, float]:
    """Errors on held-out groups, with the rows' trust found beforehand on all of them: slightly optimistic."""
    posterior = model.posterior()
    table = model.table
    result = {"pairs": float(len(table)), "jobs": float(len(table.jobs))}
    jobs = np.arange(len(table.jobs), dtype=np.intp)
    for name, groups in (("leave-family-out MAE", table.families()), ("leave-job-out MAE", jobs)):
        errors = [
            np.abs(mids - np.clip(table.throughput[rows], 0.0, 1.0))
            for _, rows, mids in held_out_mids(model, posterior, groups)
        ]
        if errors:
            result[name] = float(np.mean(np.concatenate(errors)))
    return result


def _fingerprint(observations: Sequence[Observation]) -> str:
    text = "\n".join(sorted(repr(each) for each in observations))
    return hashlib.sha256(text.encode()).hexdigest()


def from_suite(measurements: Iterable[bridge.Observation]) -> list[Observation]:
    """The measurement suite's observations as the model takes them, without those held to shares.

    An interval that was not measured is the throughput alone.
    """
    found = []
    for each in measurements:
        if any(share is not None for share in each.shares):
            continue
        n = min(max(each.n, LEAST), MOST_THROUGHPUT)
        others = tuple(profile for k, profile in enumerate(each.profiles) if k != each.focal)
        low = n if each.low is None else min(n, max(each.low, LEAST))
        high = n if each.high is None else min(MOST_THROUGHPUT, max(n, each.high))
        found.append(Observation(each.gpu_type, each.profiles[each.focal], others, n, low, high))
    return found
