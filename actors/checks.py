"""What the doctor finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        name: What was looked at.
        ok: Whether it is as it should be.
        found: What is there.
        cost: What its absence costs; empty when ``ok``.
        fix: What to do; empty when ``ok``.
        essential: Without it cotenant cannot work here at all.
    """

    name: str
    ok: bool
    found: str
    cost: str = ""
    fix: str = ""
    essential: bool = False


def verdict(name: str, ok: bool, found: str, cost: str, fix: str, *, essential: bool = False) -> Check:
    """Return a finding; cost and fix are only told when it is not as it should be."""
    return Check(name, True, found, essential=essential) if ok else Check(name, False, found, cost, fix, essential)
