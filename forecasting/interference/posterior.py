"""The linear algebra of the model: solve, solve robustly, and predict rows as if they had never been seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import lapack

from cotenant.forecasting.interference.table import Floats, Ints

TAILS = 4.0  # degrees of freedom of the noise: a measurement far off counts little (Student's t)
ROBUST_ROUNDS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """A solved Gaussian process.

    Attributes:
        inverse: Shape (rows, rows): inverse of covariance plus noise.
        alpha: Shape (rows,): inverse times residuals.
        trust: Shape (rows,): how much each row counts; 1 = an ordinary one, near 0 = far off.
    """

    inverse: Floats
    alpha: Floats
    trust: Floats

    def held_out(self, residual: Floats, rows: Ints) -> Floats:
        """What the others predict for these rows: exactly the result of solving again without them.

        Source: the block inverse; Rasmussen and Williams, Gaussian Processes for Machine Learning, section 5.4.2.
        """
        return np.asarray(
            residual[rows] - np.linalg.solve(self.inverse[np.ix_(rows, rows)], self.alpha[rows]), dtype=np.float64
        )

    def without(self, rows: Ints, keep: Ints) -> Floats:
        """``alpha`` of the rows kept, had the others never been there."""
        gone = np.linalg.solve(self.inverse[np.ix_(rows, rows)], self.alpha[rows])
        return np.asarray(self.alpha[keep] - self.inverse[np.ix_(keep, rows)] @ gone, dtype=np.float64)


def solve(covariance: Floats, residual: Floats, noise: Floats, trust: Floats) -> Posterior:
    """Solve with noise variance ``noise / trust`` per row (all in units of the residual's variance).

    Raises:
        ValueError: The covariance is not positive definite.
    """
    factor, failed = lapack.dpotrf(covariance + np.diag(noise / trust), lower=True)
    inverse, stuck = lapack.dpotri(factor, lower=True)
    if failed or stuck:
        raise ValueError("the covariance of the measured pairs is not positive definite; are there NaN features?")
    inverse = np.tril(inverse) + np.tril(inverse, -1).T  # only the lower half is filled in
    return Posterior(inverse, inverse @ residual, trust)


def solve_robustly(covariance: Floats, residual: Floats, noise: Floats, tails: float = TAILS) -> Posterior:
    """Solve under Student-t noise by reweighting: rows the others contradict lose trust.

    Args:
        covariance: Shape (rows, rows), in units of the residual's variance.
        residual: Shape (rows,).
        noise: Shape (rows,): variance of every row's noise, in the same units.
        tails: Degrees of freedom of the noise.

    Raises:
        ValueError: The covariance is not positive definite.
    """
    posterior = solve(covariance, residual, noise, np.ones(len(residual)))
    for _ in range(ROBUST_ROUNDS - 1):
        spread = noise / posterior.trust
        error = spread * posterior.alpha
        doubt = spread - spread**2 * np.diag(posterior.inverse)
        trust = (tails + 1.0) / (tails + (error**2 + doubt) / noise)
        posterior = solve(covariance, residual, noise, trust)
    return posterior
