"""What a second of each job's work is worth where all work is to be done as soon as can be.

How soon that is, at best, says a linear program (Gavel, Narayanan et al. 2020, has it for the same aim)::

    minimise    T
    subject to  each job does all it has left:   sum over choices c with j of  x[c] speed_j[c]  >=  left_j
                nobody runs longer than T:       sum over choices c with j of  x[c]             <=  T
                no type is used beyond its GPUs: sum over choices c on t of    x[c] gpus_c      <=  T gpus_t

where a choice is a job alone or two side by side on a GPU type, and ``x`` for how long it runs. Its dual variables of
the first lines are what is wanted: by how much ``T`` falls with every second's work that a job has less to do. Whoever
runs what is worth most by them at any time is done after ``T`` if it can be divided so; so an assignment of jobs to
GPUs only has to maximise the sum of these prices times speeds, and be asked again once something has changed.
"""

from __future__ import annotations

import numpy as np

from cotenant.placement.fleet import Floats, Integers
from cotenant.scheduler.core.choices import Choices


def prices_of_work(choices: Choices, left_s: Floats, gpus: Integers, there: Integers) -> Floats:
    """Return by how many seconds all is done sooner for a second's work less of each job; all alike if nobody knows.

    Args:
        choices: Who may run on which GPU type.
        left_s: What each job has left, seconds alone on its fastest type, above 0.
        gpus: GPUs of each job.
        there: GPUs of each type that there are for them.
    """
    from scipy.optimize import linprog  # noqa: PLC0415 - takes long, and few clusters need it
    from scipy.sparse import coo_array  # noqa: PLC0415

    jobs, count, kinds = len(left_s), len(choices), len(there)
    each, pairs = np.arange(count), np.flatnonzero(choices.paired)
    second = choices.second[pairs]
    rows = [choices.first, second, jobs + choices.first, jobs + second, 2 * jobs + choices.part]
    columns = [each, pairs, each, pairs, each]
    values = [-choices.first_speed, -choices.second_speed[pairs], np.ones(count), np.ones(len(pairs))]
    values.append(gpus[choices.first].astype(np.float64))
    rows.append(np.arange(jobs, 2 * jobs + kinds))
    columns.append(np.full(jobs + kinds, count))
    values.append(-np.concatenate([np.ones(jobs), there.astype(np.float64)]))
    matrix = coo_array(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
        shape=(2 * jobs + kinds, count + 1),
    )
    scale = float(left_s.max())
    limits = np.concatenate([-left_s / scale, np.zeros(jobs + kinds)])
    longest = np.zeros(count + 1)
    longest[count] = 1.0
    solved = linprog(longest, A_ub=matrix.tocsr(), b_ub=limits, bounds=(0.0, None), method="highs")
    if solved.x is None:  # somebody can run nowhere just now
        return np.ones(jobs)
    prices: Floats = np.maximum(0.0, -np.asarray(solved.ineqlin.marginals[:jobs]))
    return prices
