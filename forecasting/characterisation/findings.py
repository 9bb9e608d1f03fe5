"""Do the findings of the alnair data set's authors hold on these data? Each with its numbers, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["holds", "holds in part", "does not hold", "cannot be told"]

CLUSTERS = 3
SAVINGS = (0.41, 0.21)
SAVING_TOLERANCE = 0.03
THRESHOLD = 70.0
HARDLY = 1.10  # slowed down by at most a tenth: in part where only the mean or only nine of ten are
CONVINCING_P = 0.05


@dataclass(frozen=True, slots=True)
class Finding:
    """One claim and what the data say.

    Attributes:
        claim: The claim.
        verdict: Whether it holds.
        why: The numbers, in sentences.
    """

    claim: str
    verdict: Verdict
    why: str


def findings(report: Mapping[str, Any]) -> list[Finding]:
    """Judge the three claims by the sections clusters and interference of a report.

    Better numbers never give a worse verdict. The third claim is judged once for each table of pairs.
    """
    return [_three_clusters(report["clusters"]), *_savings(report["interference"]), *_threshold(report["interference"])]


def _three_clusters(section: Mapping[str, Any] | str) -> Finding:
    claim = f"There are K = {CLUSTERS} clusters of workloads."
    if isinstance(section, str):
        return Finding(claim, "cannot be told", section)
    sweeps = section["sweeps"]
    elbows = [sweep[key] for sweep in sweeps.values() for key in ("elbow_inertia", "elbow_distortion")]
    others = [sweep[key] for sweep in sweeps.values() for key in ("by_silhouette", "by_gap")]
    at_three = next((count for count in sweeps["standard"]["counts"] if count["k"] == CLUSTERS), None)
    best = max((c for c in sweeps["standard"]["counts"] if c["silhouette"] is not None), key=lambda c: c["silhouette"])
    why = (
        f"The elbow is at {_list(elbows)} (inertia and distortion, every scaling); the silhouette is best with "
        f"{_list(sweep['by_silhouette'] for sweep in sweeps.values())} clusters and the gap statistic chooses "
        f"{_list(sweep['by_gap'] for sweep in sweeps.values())}."
    )
    if at_three is not None:
        why += (
            f" With {CLUSTERS} the silhouette is {at_three['silhouette']:.2f}, with {best['k']} it is "
            f"{best['silhouette']:.2f}. Single starts with different seeds agree to {at_three['seed_agreement']:.2f}, "
            f"clusters of 80 % of the runs to {at_three['subsample_agreement']:.2f} (adjusted Rand index)."
        )
    elbow_holds = elbows.count(CLUSTERS) > len(elbows) / 2
    others_hold = others.count(CLUSTERS) > len(others) / 2
    verdict: Verdict = "holds" if elbow_holds and others_hold else "does not hold"
    return Finding(claim, "holds in part" if elbow_holds != others_hold else verdict, why)


def _savings(section: Mapping[str, Any] | str) -> list[Finding]:
    size = f"Pairs across clusters save {100 * SAVINGS[0]:.0f} % and pairs within one {100 * SAVINGS[1]:.0f} %."
    sense = "Pairs across clusters get along better than pairs within one."
    if isinstance(section, str):
        return [Finding(claim, "cannot be told", section) for claim in (size, sense)]
    name, compared = next(((key, section["by"][key]) for key in ("given", "own") if key in section["by"]), ("", ""))
    if isinstance(compared, str):
        return [Finding(claim, "cannot be told", compared or "no clusters") for claim in (size, sense)]
    saving, bound = compared["contrast"]["saving"], compared["contrast"]["bound"]
    rate, slowdown = compared["contrast"]["rate_saving"], compared["contrast"]["overlap_slowdown"]
    clusters = "the authors' clusters" if name == "given" else "our clusters"
    sized = all(
        abs(saving[key] - wanted) <= SAVING_TOLERANCE for key, wanted in zip(("across", "within"), SAVINGS, strict=True)
    )
    same = saving["across"] > saving["within"]
    first = Finding(
        size,
        "holds" if sized else ("holds in part" if same and saving["p"] <= CONVINCING_P else "does not hold"),
        f"By {clusters}, {saving['pairs_across']} pairs across save {_percent(saving['across'])} on average (median "
        f"{_percent(saving['across_median'])}) and {saving['pairs_within']} within save {_percent(saving['within'])} "
        f"({_percent(saving['within_median'])}); relabelling the tasks gives such a difference with "
        f"{told_p(saving['p'])}. Unequal lengths explain part of it: the most that could be saved is "
        f"{_percent(bound['across'])} across and "
        f"{_percent(bound['within'])} within.",
    )
    better = rate["across"] > rate["within"] and slowdown["across"] < slowdown["within"]
    second = Finding(
        sense,
        "does not hold" if not better else ("holds" if rate["p"] <= CONVINCING_P else "cannot be told"),
        f"While both run, pairs across save {_percent(rate['across'])} and pairs within {_percent(rate['within'])} "
        f"({told_p(rate['p'])}); they slow each other down by {_percent(slowdown['across'])} "
        f"and {_percent(slowdown['within'])} ({told_p(slowdown['p'])})."
        + ("" if rate["p"] <= CONVINCING_P else " So few pairs cannot show that the cluster matters."),
    )
    return [first, second]


def _threshold(section: Mapping[str, Any] | str) -> list[Finding]:
    claim = f"Pairs each below {THRESHOLD:.0f} % utilisation hardly interfere"
    if isinstance(section, str):
        return [Finding(f"{claim}.", "cannot be told", section)]
    found: list[Finding] = []
    for key, words in (("below", "."), ("second_matrix", " in the second matrix (MPS).")):
        groups = {row["group"]: row for row in section.get(key, []) if row["threshold"] == THRESHOLD}
        if "both below" not in groups:
            continue
        both = groups["both below"]
        why = (
            f"{both['pairs']} directions with both below {THRESHOLD:.0f} % are slowed down {both['mean']:.2f} times on "
            f"average, 90 % of them at most {both['p90']:.2f}, the worst {both['worst']:.2f}"
            + (f"; with none below it is {groups['none below']['mean']:.2f}." if "none below" in groups else ".")
            + f" It holds where the average and 90 % are at most {HARDLY:.2f}, in part where one of them is."
        )
        verdicts: tuple[Verdict, ...] = ("does not hold", "holds in part", "holds")
        found.append(Finding(claim + words, verdicts[(both["mean"] <= HARDLY) + (both["p90"] <= HARDLY)], why))
    unknown = f"no pair has both utilisations known and below {THRESHOLD:.0f} %"
    return found or [Finding(f"{claim}.", "cannot be told", unknown)]


def _list(values: Any) -> str:
    return " or ".join(map(str, sorted(set(values))))


def told_p(value: float) -> str:
    """Return a probability in words; one that is small is not told as nothing."""
    return "p < 0.01" if value < 0.01 else f"p = {value:.2f}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"
