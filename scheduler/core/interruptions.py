"""Saying why a job was taken from its GPUs."""

from __future__ import annotations

from cotenant.placement.explain import memory_text
from cotenant.scheduler.core.model import Interruption


def tell(why: Interruption) -> str:
    """Say it for people: "gets GPUs of its own: saves 340 s, costs 60 s"."""
    makes_room = {
        "priority": f"whose priority {why.against or 0.0:.2f} beats its {_value(why)}",
        "shorter": "which has much less to do",
        "memory": f"which {_need(why)} than its share",
    }
    if why.kind in makes_room:
        return f"makes room for job {why.for_job}, {makes_room[why.kind]}"
    match why.kind:
        case "apart":
            limit = 1.0 / (why.against or 1.0)
            slowed = f"job {why.for_job} on its GPU is slowed down {1.0 / (why.value or 1.0):.2f} > {limit:.2f}"
            return f"{slowed}: {_worth(why)}"
        case "unshare":
            return f"gets GPUs of its own, or faster ones, which were free: {_worth(why)}"
        case "trade":
            places = "changes places on GPUs of several types with others"
            loses = (why.gain_s or 0.0) < 0.0
            return f"{places}, who gain more speed by it than it loses" if loses else f"{places}: {_worth(why)}"
        case _:
            return "as asked"


def _need(why: Interruption) -> str:
    if why.against is None:
        return "needs more memory"
    return f"is forecast to need {memory_text(int(why.against))}, more"


def _worth(why: Interruption) -> str:
    return f"saves {why.gain_s or 0.0:.0f} s and costs {why.cost_s or 0.0:.0f} s"


def _value(why: Interruption) -> str:
    return f"{why.value or 0.0:.2f}"
