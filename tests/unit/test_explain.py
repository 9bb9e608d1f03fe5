"""Fit errors as sentences."""

from __future__ import annotations

from typing import get_args

import pytest
from packing import GIB, MIB

from cotenant.placement.explain import decimals, explain, memory_text, would_help
from cotenant.placement.types import FitError, FitErrorKind


def errors(kind: FitErrorKind, *numbers: tuple[float | None, float | None]) -> list[FitError]:
    return [FitError(kind, f"g{i}", needed, available) for i, (needed, available) in enumerate(numbers)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param([], "", id="nothing"),
        pytest.param(
            [
                *errors("slowdown_self", (1.41, 1.25), (1.41, 1.25)),
                *errors("memory_short", *[(8.0 * GIB, 2.0 * GIB)] * 3),
            ],
            "3 GPUs: 6.0 GiB short; 2 GPUs: predicted slowdown 1.41 > 1.25",
            id="counts, most first",
        ),
        pytest.param(
            errors("memory_short", (8.0 * GIB, 2.0 * GIB), (8.0 * GIB, 7.5 * GIB)),
            "2 GPUs: at least 0.5 GiB short",
            id="the nearest to fitting",
        ),
        pytest.param(errors("memory_short", (50.0 * MIB, 0.0)), "1 GPU: 50 MiB short", id="small numbers in MiB"),
        pytest.param(
            errors("memory_never", (96.0 * GIB, 80.0 * GIB)),
            "1 GPU: too small: 96.0 GiB of memory wanted, at most 80.0 GiB can be had even when empty",
            id="never",
        ),
        pytest.param(errors("compute_short", (0.6, 0.5)), "1 GPU: compute 0.60 wanted, 0.50 free", id="compute"),
        pytest.param(
            errors("slowdown_neighbour", (1.5, 1.1)),
            "1 GPU: predicted slowdown of a neighbour 1.50 > 1.10",
            id="neighbour",
        ),
        pytest.param(errors("share_limit", (5, 4)), "1 GPU: would carry 5 jobs, the limit is 4", id="limit"),
        pytest.param(
            [
                FitError("too_few_gpus", None, 3, 4),
                FitError("too_few_on_host", None, 3, 2),
                *errors("not_schedulable", (None, None)),
            ],
            "wants 3 GPUs, 4 free; wants 3 GPUs on one host, at most 2 free on one host; 1 GPU: not available",
            id="the cluster first",
        ),
        pytest.param(
            [FitError("gpus_never", None, 9, 8, never=True)],
            "wants 9 GPUs, at most 8 of this cluster could ever serve it together",
            id="too large",
        ),
        pytest.param(
            [FitError("gpus_to_come", None, 9, 8)],
            "wants 9 GPUs, at most 8 are there to serve it together: more are asked for",
            id="too large for now",
        ),
    ],
)
def test_message(given: list[FitError], message: str) -> None:
    assert explain(given) == message


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (errors("memory_short", (8.0 * GIB, 2.0 * GIB)), "ask for at most 2.0 GiB of gpu_memory per GPU"),
        (errors("slowdown_self", (1.412, 1.25)), "accept max_slowdown 1.42"),
        (errors("compute_short", (0.6, 0.5)), "ask for compute of at most 0.50"),
        (
            errors("unprofiled_self", (None, None)),
            "give gpu_memory and compute, so that the job need not be measured alone first",
        ),
        (
            [FitError("too_few_on_host", None, 3, 2)],
            "allow the GPUs to lie on several hosts: gang cluster instead of host",
        ),
        ([FitError("gpus_never", None, 9, 8)], "ask for at most 8 GPUs"),
        (
            [FitError("gpus_to_come", None, 9, 8)],
            "wait for nodes that Ray's autoscaler adds, if it has a node type as large",
        ),
        ([FitError("too_few_gpus", None, 1, 0)], "add a GPU host"),
    ],
)
def test_hints_are_concrete(given: list[FitError], hint: str) -> None:
    assert would_help(given) == [hint]


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        (
            errors("slowdown_self", (1.2634, 1.26)),
            "1 GPU: predicted slowdown 1.263 > 1.260",
            "accept max_slowdown 1.27",
        ),
        (
            errors("slowdown_neighbour", (1.5003, 1.5)),
            "1 GPU: predicted slowdown of a neighbour 1.5003 > 1.5000",
            "wait for a neighbour to end: the jobs already there accept no more slowdown",
        ),
        (
            errors("compute_short", (0.4, 0.3979)),
            "1 GPU: compute 0.400 wanted, 0.398 free",
            "ask for compute of at most 0.39",
        ),
        (errors("compute_short", (0.5, 0.004)), "1 GPU: compute 0.50 wanted, 0.00 free", "wait for a job to end"),
        (
            errors("memory_short", (2.0 * GIB + 100.0, 2.0 * GIB)),
            "1 GPU: 1 MiB short",
            "ask for at most 2.0 GiB of gpu_memory per GPU",
        ),
    ],
)
def test_a_near_miss_shows_and_what_would_help_is_enough(given: list[FitError], message: str, hint: str) -> None:
    """A job that accepted what it was told was refused with 'predicted slowdown 1.26 > 1.26'."""
    assert explain(given) == message
    assert would_help(given) == [hint]


@pytest.mark.parametrize(
    ("limit", "parts", "digits"),
    [
        (1.0, (1.6,), 2),
        (1.0, (1.004,), 3),
        (1.0, (0.502, 0.502), 3),
        (1.0, (0.6, 0.6), 2),
        (1.0, (1.0 + 1e-9,), 6),
        (1.0, (0.5,), 2),
    ],
)
def test_as_many_decimals_as_it_takes_to_see_an_excess(limit: float, parts: tuple[float, ...], digits: int) -> None:
    assert decimals(limit, *parts) == digits


def test_hints_for_most_gpus_come_first_and_once() -> None:
    given = [
        *errors("compute_short", (0.6, 0.5)),
        *errors("share_limit", (5, 4), (5, 4)),
        *errors("memory_never", (9.0 * GIB, 8.0 * GIB)),
        *errors("memory_short", (9.0 * GIB, 8.0 * GIB)),
    ]
    assert would_help(given) == [
        "wait for a job to end, or raise max_jobs_per_gpu",
        "ask for compute of at most 0.50",
        "ask for at most 8.0 GiB of gpu_memory per GPU",
    ]


@pytest.mark.parametrize("kind", get_args(FitErrorKind))
def test_every_kind_has_a_sentence_and_a_hint(kind: FitErrorKind) -> None:
    given = errors(kind, (2.0, 1.0))
    assert explain(given)
    assert len(would_help(given)) == 1


@pytest.mark.parametrize(
    ("size", "text"),
    [(900 * 1024 * GIB, "900.0 TiB"), (1024 * GIB, "1.0 TiB"), (1023 * GIB, "1023.0 GiB"), (GIB / 100, "10 MiB")],
)
def test_memory_is_told_in_a_unit_that_suits_it(size: float, text: str) -> None:
    assert memory_text(size) == text
