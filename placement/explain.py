"""Turning fit errors into sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from cotenant.placement.types import FitError, FitErrorKind

GIB = float(1 << 30)
MOST_DECIMALS = 6


def explain(errors: Sequence[FitError]) -> str:
    """Fold the errors into one message with counts: "3 GPUs: 6.0 GiB short; 2 GPUs: predicted slowdown 1.41 > 1.25".

    Errors about the cluster come first, then those about hosts, then the kinds by the number of GPUs they rule out.
    Where the numbers of one kind differ, those of the GPU nearest to fitting are told.
    """
    groups: dict[FitErrorKind, list[FitError]] = {}
    for error in errors:
        groups.setdefault(error.kind, []).append(error)
    cluster = [_CLUSTER[kind](groups[kind]) for kind in _CLUSTER if kind in groups]
    hosts = [f"{_count(groups[kind], 'host')}: {_HOST[kind](groups[kind])}" for kind in _HOST if kind in groups]
    ranked = sorted((kind for kind in groups if kind in _GPU), key=lambda kind: -_number(groups[kind]))
    gpus = [f"{_count(groups[kind], 'GPU')}: {_GPU[kind](groups[kind])}" for kind in ranked]
    return "; ".join([*cluster, *hosts, *gpus])


def about_one(errors: Sequence[FitError]) -> str:
    """Say why one GPU does not take a job: "6.0 GiB short". The errors are of an attempt to place it on that one."""
    groups: dict[FitErrorKind, list[FitError]] = {}
    for error in errors:
        groups.setdefault(error.kind, []).append(error)
    of_one = {**_HOST, **_GPU}
    return "; ".join(of_one[kind](groups[kind]) for kind in groups if kind in of_one) or explain(errors)


def would_help(errors: Sequence[FitError]) -> list[str]:
    """Return what the submitter or an administrator could change, the kinds that rule out most GPUs first."""
    groups: dict[FitErrorKind, list[FitError]] = {}
    for error in errors:
        groups.setdefault(error.kind, []).append(error)
    ranked = sorted(groups, key=lambda kind: -_number(groups[kind]))
    helps = (_HELP[kind](groups[kind]) for kind in ranked)
    return list(dict.fromkeys(help_ for help_ in helps if help_))


def _count(errors: Sequence[FitError], what: str) -> str:
    count = _number(errors)
    return f"1 {what}" if count == 1 else f"{count} {what}s"


def _number(errors: Sequence[FitError]) -> int:
    return sum(error.count for error in errors)


def _nearest(errors: Iterable[FitError]) -> tuple[float, float]:
    """Return (needed, available) of the error with the smallest gap between the two."""
    pairs = [(error.needed or 0.0, error.available or 0.0) for error in errors]
    return min(pairs, key=lambda pair: abs(pair[0] - pair[1]))


def decimals(limit: float, *parts: float) -> int:
    """Return with how many decimals it shows that these numbers add up to more than the limit: two, or more."""
    if math.fsum(parts) <= limit:
        return 2
    excess = (digits for digits in range(2, MOST_DECIMALS) if _rounded(digits, *parts) > round(limit, digits))
    return next(excess, MOST_DECIMALS)


def _rounded(digits: int, *parts: float) -> float:
    return round(math.fsum(round(part, digits) for part in parts), digits)


def memory_text(value: float) -> str:
    """Return bytes as people read them."""
    if value >= 1024.0 * GIB:
        return f"{value / (1024.0 * GIB):.1f} TiB"
    return f"{value / GIB:.1f} GiB" if value >= 0.1 * GIB else f"{value / (1 << 20):.0f} MiB"


def at_most_memory(value: float) -> str:
    """Return bytes as a size that a hint accepts and that is not larger: what is rounded up would be refused again."""
    unit, name = (GIB, "GiB") if value >= GIB else (float(1 << 20), "MiB")
    return f"{math.floor(value / unit * 10.0) / 10.0:.1f} {name}"


def _at_least(errors: Sequence[FitError]) -> str:
    differ = len({(error.needed, error.available) for error in errors}) > 1
    return "at least " if differ or any(error.varies for error in errors) else ""


def _memory_short(errors: Sequence[FitError]) -> str:
    needed, available = _nearest(errors)
    missing = max(needed - available, float(1 << 20))  # less would be told as nothing
    return f"{_at_least(errors)}{memory_text(missing)} short"


def _memory_never(errors: Sequence[FitError]) -> str:
    needed, available = _nearest(errors)
    most = memory_text(available)
    return f"too small: {memory_text(needed)} of memory wanted, at most {most} can be had even when empty"


def _cpus_short(errors: Sequence[FitError]) -> str:
    needed, available = _nearest(errors)
    return f"{_at_least(errors)}{_cpus_text(needed - available)} short"


def _cpus_never(errors: Sequence[FitError]) -> str:
    needed, available = _nearest(errors)
    return f"too few processors: {needed:g} wanted, at most {available:g} can be had even when empty"


def _cpus_text(cpus: float) -> str:
    return f"{cpus:g} processor{'s' if cpus != 1 else ''}"


def _compute_short(errors: Sequence[FitError]) -> str:
    needed, available = _nearest(errors)
    digits = decimals(available, needed)
    return f"compute {needed:.{digits}f} wanted, {available:.{digits}f} free"


def _slowdown(whose: str) -> Callable[[Sequence[FitError]], str]:
    def text(errors: Sequence[FitError]) -> str:
        needed, available = _nearest(errors)
        digits = decimals(available, needed)
        return f"predicted slowdown{whose} {needed:.{digits}f} > {available:.{digits}f}"

    return text


def _share_limit(errors: Sequence[FitError]) -> str:
    needed, limit = _nearest(errors)
    return f"would carry {needed:.0f} jobs, the limit is {limit:.0f}"


def _no_saving(errors: Sequence[FitError]) -> str:
    _, saving = _nearest(errors)
    return f"sharing would take longer than one after the other (predicted saving {saving:.0%})"


def _too_few_gpus(errors: Sequence[FitError]) -> str:
    needed, available = _nearest(errors)
    return f"wants {needed:.0f} GPU{'s' if needed != 1 else ''}, {available:.0f} free"


def _too_few_on_host(errors: Sequence[FitError]) -> str:
    needed, available = _nearest(errors)
    return f"wants {needed:.0f} GPUs on one host, at most {available:.0f} free on one host"


def _gpus_never(errors: Sequence[FitError]) -> str:
    needed, available = _nearest(errors)
    return f"wants {needed:.0f} GPUs, at most {available:.0f} of this cluster could ever serve it together"


def _gpus_to_come(errors: Sequence[FitError]) -> str:
    needed, available = _nearest(errors)
    return f"wants {needed:.0f} GPUs, at most {available:.0f} are there to serve it together: more are asked for"


def _details(errors: Sequence[FitError]) -> str:
    return "; ".join(dict.fromkeys(error.detail or "a quota is used up" for error in errors))


def _help_quota(errors: Sequence[FitError]) -> str:
    if any(error.never for error in errors):
        return "ask for less, or have an administrator raise the limit"
    return "wait for one of these jobs to end, or have an administrator raise the limit"


def _says(text: str) -> Callable[[Sequence[FitError]], str]:
    return lambda _: text


def _help_memory(errors: Sequence[FitError]) -> str:
    _, available = _nearest(errors)
    return (
        f"ask for at most {at_most_memory(available)} of gpu_memory per GPU"
        if available > 0
        else "wait for memory to be freed"
    )


def _help_cpus(errors: Sequence[FitError]) -> str:
    _, available = _nearest(errors)
    return f"ask for fewer cpus: no host with GPUs it could use has more than {available:g} processors"


def _help_compute(errors: Sequence[FitError]) -> str:
    _, available = _nearest(errors)
    most = math.floor(round(available * 100.0, 6)) / 100.0  # what is rounded up would be refused again
    return f"ask for compute of at most {most:.2f}" if most > 0 else "wait for a job to end"


def _help_own_slowdown(errors: Sequence[FitError]) -> str:
    needed, _ = _nearest(errors)
    return f"accept max_slowdown {math.ceil(round(needed * 100.0, 6)) / 100.0:.2f}"


def _help_gpus(errors: Sequence[FitError]) -> str:
    _, available = _nearest(errors)
    return f"ask for at most {available:.0f} GPU{'s' if available != 1 else ''}" if available > 0 else "add a GPU host"


_CLUSTER: Mapping[FitErrorKind, Callable[[Sequence[FitError]], str]] = {
    "quota_gpus": _details,
    "quota_whole": _details,
    "quota_jobs": _details,
    "quota_closed": _details,
    "gpus_never": _gpus_never,
    "gpus_to_come": _gpus_to_come,
    "kind_to_come": lambda _: "wants GPUs that only hosts had which have left the cluster: such are asked for",
    "too_few_gpus": _too_few_gpus,
    "too_few_on_host": _too_few_on_host,
}

_HOST: Mapping[FitErrorKind, Callable[[Sequence[FitError]], str]] = {
    "cpus_never": _cpus_never,
    "cpus_short": _cpus_short,
}

_GPU: Mapping[FitErrorKind, Callable[[Sequence[FitError]], str]] = {
    "memory_never": _memory_never,
    "memory_short": _memory_short,
    "compute_short": _compute_short,
    "slowdown_self": _slowdown(""),
    "slowdown_neighbour": _slowdown(" of a neighbour"),
    "no_saving": _no_saving,
    "exclusive_resident": _says("taken by a job that does not share"),
    "exclusive_wanted": _says("in use, and the job does not share"),
    "anti_affinity": _says("carries a job that it must not share with (anti_affinity)"),
    "instance": _says("a MIG instance, which a job of several GPUs cannot use"),
    "instance_wanted": _says("a MIG instance in use, and the job does not share one"),
    "unprofiled_resident": _says("a neighbour is still being measured"),
    "unprofiled_self": _says(
        "in use, and the job wants GPUs of its own: one that was never measured shares only with both hints, "
        "gpu_memory and compute"
    ),
    "share_limit": _share_limit,
    "not_schedulable": _says("not available"),
    "held": _says("held for another job"),
    "not_tried": _says("not looked at closely, since they are used more than others that did not suit"),
}

_HELP: Mapping[FitErrorKind, Callable[[Sequence[FitError]], str]] = {
    "memory_never": _help_memory,
    "memory_short": _help_memory,
    "cpus_never": _help_cpus,
    "cpus_short": _says("wait for jobs on these hosts to end, or ask for fewer cpus"),
    "compute_short": _help_compute,
    "slowdown_self": _help_own_slowdown,
    "slowdown_neighbour": _says("wait for a neighbour to end: the jobs already there accept no more slowdown"),
    "no_saving": _says("wait for a GPU with a lighter neighbour"),
    "exclusive_resident": _says("wait for the job that does not share to end"),
    "exclusive_wanted": _says("allow sharing: isolation soft instead of hard"),
    "anti_affinity": _says("wait for the jobs to end that it is kept apart from, or say less in anti_affinity"),
    "instance": _says("ask for 1 GPU, or for GPUs that are not partitioned"),
    "instance_wanted": _says("allow sharing a MIG instance (isolation none), or wait for one to be free"),
    "unprofiled_resident": _says(
        "wait a few seconds until the neighbour is measured; where utilisation cannot be read (on many MIG instances), "
        "nobody joins a job that does not give both gpu_memory and compute"
    ),
    "unprofiled_self": _says("give gpu_memory and compute, so that the job need not be measured alone first"),
    "share_limit": _says("wait for a job to end, or raise max_jobs_per_gpu"),
    "not_schedulable": _says("bring the unavailable GPUs back ('cotenant doctor' on their hosts says why)"),
    "held": _says("wait for the job to start that they are held for"),
    "not_tried": _says("wait for a GPU with a lighter neighbour"),
    "too_few_gpus": _help_gpus,
    "too_few_on_host": _says("allow the GPUs to lie on several hosts: gang cluster instead of host"),
    "gpus_never": _help_gpus,
    "gpus_to_come": _says("wait for nodes that Ray's autoscaler adds, if it has a node type as large"),
    "kind_to_come": _says("wait for such a node, if Ray's autoscaler still has a node type with these GPUs"),
    "quota_gpus": _help_quota,
    "quota_whole": _says("give both gpu_memory and compute, so that the job need not take whole GPUs to be measured"),
    "quota_jobs": _help_quota,
    "quota_closed": _says("have an administrator open it: its limit is 0 jobs"),
}
