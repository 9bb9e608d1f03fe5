"""Examines a host: what cotenant needs, whether it is there, what its absence costs and how to fix it.

Every check is a function without side effects that last. Nothing here imports ray or torch: their absence is a finding.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cotenant.actors.checks import Check, verdict
from cotenant.actors.enforcement.cgroup import find_groups
from cotenant.actors.enforcement.choice import NO_WHOLE_GPUS
from cotenant.actors.gpudoctor import freezing_verdict, gpu_checks
from cotenant.scheduler.errors import CotenantError
from cotenant.scheduler.names import SET_ENVIRONMENT, ClusterRecord

if TYPE_CHECKING:
    from cotenant.scheduler.client import Client
    from cotenant.scheduler.views import Health, HostView

MIN_PYTHON = (3, 11)
MIN_VERSIONS = {"ray": (2, 60), "torch": (2, 13)}
MIN_SHM_BYTES = 1 << 30
MIN_MEMORY_BYTES = 4 << 30
MIN_CORES = 2
MIN_FILES = 4096
MIN_PROCESSES = 4096
_GIB = 1 << 30


def checks() -> list[Check]:
    """Examine this host, most important first."""
    return [
        check_python(),
        *(check_version(name) for name in MIN_VERSIONS),
        check_affinity(),
        check_run_dir(),
        check_cores(),
        check_memory(),
        check_shm(),
        check_limit("open files", resource.RLIMIT_NOFILE, MIN_FILES, "-n"),
        check_limit("processes", resource.RLIMIT_NPROC, MIN_PROCESSES, "-u"),
        check_ray_auth(),
        check_memory_groups(),
        *gpu_checks(),
    ]


def check_python() -> Check:
    """Python itself, on Linux."""
    wanted = ".".join(map(str, MIN_PYTHON))
    return verdict(
        "python",
        sys.version_info[:2] >= MIN_PYTHON and sys.platform == "linux",
        f"{platform.python_version()} on {sys.platform}",
        "cotenant does not run",
        f"use Python {wanted} or newer on Linux",
        essential=True,
    )


def check_version(package: str) -> Check:
    """An installed package, from its metadata: importing torch takes seconds."""
    minimum = MIN_VERSIONS[package]
    wanted = ".".join(map(str, minimum))
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = "not installed"
    return verdict(
        package,
        found != "not installed" and _numbers(found) >= minimum,
        found,
        "cotenant does not run" if package == "ray" else "training jobs and forecasts do not run",
        f"pip install '{package}>={wanted}'",
        essential=True,
    )


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+", maxsplit=1)[0].split(".")
    return tuple(int("".join(char for char in part if char.isdigit()) or 0) for part in parts[:2])


def check_affinity() -> Check:
    """Pinning processes to cores, without which a ``cpu`` device is not a device."""
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, allowed)  # changes nothing, but is refused where pinning is forbidden
        ok, found = True, f"allowed, cores {_ranges(sorted(allowed))}"
    except OSError as error:
        ok, found = False, f"refused ({error.strerror})"
    return verdict(
        "core pinning",
        ok,
        found,
        "jobs cannot be held on their device's cores",
        "allow sched_setaffinity for this user or container (seccomp profile)",
        essential=True,
    )


def _ranges(numbers: list[int]) -> str:
    """Return 0-3,8 for [0, 1, 2, 3, 8]."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def check_run_dir() -> Check:
    """The directory running jobs live in."""
    base = Path(os.environ.get("COTENANT_RUN_DIR") or tempfile.gettempdir())
    parent = next(path for path in (base, *base.absolute().parents) if path.exists())
    ok, free = False, 0
    try:
        with tempfile.TemporaryFile(dir=parent):
            ok, free = True, shutil.disk_usage(parent).free
        found = f"{base}, {free / _GIB:.1f} GiB free"
    except OSError as error:
        found = f"{base} is not writable ({error.strerror})"
    return verdict(
        "run directory", ok, found, "no job can start", "set COTENANT_RUN_DIR to a writable directory", essential=True
    )


def check_cores() -> Check:
    """Cores this process may use."""
    cores = len(os.sched_getaffinity(0))
    return verdict(
        "cores",
        cores >= MIN_CORES,
        str(cores),
        "jobs, their helper processes and Ray itself all share one core",
        f"give the machine or container at least {MIN_CORES} cores",
    )


def check_memory() -> Check:
    """Memory of the host, or of the container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _memory_limit()
    usable = min(total, limit) if limit is not None else total
    return verdict(
        "memory",
        usable >= MIN_MEMORY_BYTES,
        f"{usable / _GIB:.1f} GiB" + (" (container limit)" if usable < total else ""),
        "a Ray head (about 0.8 GiB) and training jobs (about 0.4 GiB each) may not fit",
        f"give the machine or container at least {MIN_MEMORY_BYTES // _GIB} GiB",
    )


def _memory_limit() -> int | None:
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def check_shm() -> Check:
    """Shared memory, which Ray's object store and data loaders live in."""
    try:
        usage = shutil.disk_usage("/dev/shm")
        ok, found = usage.total >= MIN_SHM_BYTES, f"{usage.total / _GIB:.1f} GiB, {usage.free / _GIB:.1f} GiB free"
    except OSError as error:
        ok, found = False, f"missing ({error.strerror})"
    return verdict(
        "/dev/shm",
        ok,
        found,
        "Ray falls back to slow files, and data loaders may be killed",
        "start the container with --shm-size=2g, or remount /dev/shm larger",
    )


def check_limit(name: str, kind: int, wanted: int, flag: str) -> Check:
    """A limit of this user's processes."""
    soft, hard = resource.getrlimit(kind)
    unlimited = soft == resource.RLIM_INFINITY
    raisable = hard == resource.RLIM_INFINITY or hard >= wanted
    return verdict(
        f"limit: {name}",
        unlimited or soft >= wanted,
        "unlimited" if unlimited else str(soft),
        "many jobs at once fail to start",
        f"ulimit {flag} {wanted}" if raisable else f"raise the hard limit to {wanted} (limits.conf, or the container)",
    )


def check_ray_auth() -> Check:
    """Ray's token authentication, whose default depends on what ran on this machine before."""
    mode = os.environ.get("RAY_AUTH_MODE")
    try:
        record = ClusterRecord.load()
    except CotenantError as error:
        found = f"{mode or 'not set'}; the record of 'cotenant up' cannot be read"
        return Check("RAY_AUTH_MODE", False, found, "cotenant's commands do not find the cluster", str(error))
    if record is not None and mode is None:  # cotenant's own commands set it
        told = f"not set; the cluster of 'cotenant up' has {record.auth_mode} (for Ray's own tools: {SET_ENVIRONMENT})"
        return Check("RAY_AUTH_MODE", True, told)
    if record is not None and (wrong := record.disagrees()):
        return Check(
            "RAY_AUTH_MODE",
            False,
            f"{mode}; cluster {record.address}: {wrong}",
            "no job can be submitted from here",
            SET_ENVIRONMENT,
        )
    return verdict(
        "RAY_AUTH_MODE",
        mode is not None,
        mode or "not set",
        "whether Ray asks for a token depends on what ran here before; processes that disagree cannot connect",
        "export RAY_AUTH_MODE=token (or disabled) for Ray and cotenant alike",
    )


def check_memory_groups() -> Check:
    """Memory groups of the kernel, tried out: whether one can be made is not written anywhere."""
    groups = find_groups(f"cotenant-doctor-{os.getpid()}")
    if groups is not None:
        with contextlib.suppress(OSError):
            groups.base.rmdir()
    return verdict(
        "memory cgroups",
        groups is not None,
        "cannot be made" if groups is None else f"version {groups.version}",
        "on CPU devices jobs with isolation hard are held to their memory by a limit in each process only",
        "delegate a cgroup with the memory controller to this user (systemd: Delegate=yes, and DelegateSubgroup= so "
        "that the unit's own group holds no process)",
    )


def cluster_checks(connect: Callable[[], Client]) -> list[Check]:
    """A running cotenant, asked for its own health, and for what its hosts say that they can do."""
    try:
        with connect() as client:
            health, hosts = client.health(), client.hosts()
    except CotenantError as error:
        cost = "no job can be submitted from here"
        return [Check("cluster", False, "not reachable", cost, str(error), essential=True)]
    return [_cluster(health), *_freezing(hosts)]


def _cluster(health: Health) -> Check:
    wrong = [f"{part.name}: {part.note or 'does not answer'}" for part in health.components if not part.ok]
    return verdict(
        "cluster",
        health.ok,
        "; ".join(wrong) or f"{len(health.components)} parts answer",
        "parts that do not answer come back by themselves within seconds, or their host is lost",
        "look again in a few seconds; then 'cotenant hosts' and Ray's logs",
        essential=True,
    )


def _freezing(hosts: Sequence[HostView]) -> list[Check]:
    """Where the driver can freeze jobs, hosts that say the same in one line."""
    said: dict[str | None, list[str]] = {}
    for host in hosts:
        said.setdefault(host.no_freezing, []).append(host.name)
    return [_freezes(missing, names) for missing, names in said.items()]


def _freezes(missing: str | None, names: Sequence[str]) -> Check:
    name = f"freezing: {', '.join(names)}"
    if missing is None:
        return Check(name, True, "not known yet; hosts find out within half a minute after they have joined")
    if missing == NO_WHOLE_GPUS:
        return Check(name, True, f"no; {missing}: checkpoint: driver counts as none (checkpoint: own works)")
    return freezing_verdict(name, missing)
