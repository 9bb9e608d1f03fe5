"""The doctor: each check says what it found, and when something is wrong, what that costs and how to fix it."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_client import FakeClient

from cotenant.actors import doctor
from cotenant.actors.checks import Check
from cotenant.actors.enforcement.cgroup import MemoryGroups
from cotenant.actors.enforcement.choice import NO_WHOLE_GPUS
from cotenant.scheduler.errors import NotConnected
from cotenant.scheduler.names import ClusterRecord

Patch = Callable[[pytest.MonkeyPatch, Path], None]


def usage(total: int) -> Callable[[object], Any]:
    return lambda _path: SimpleNamespace(total=total, free=total, used=0)


def raises(error: Exception) -> Callable[..., Any]:
    def fail(*_args: object, **_how: object) -> None:
        raise error

    return fail


def not_installed(patch: pytest.MonkeyPatch, _tmp: Path) -> None:
    patch.setattr(importlib.metadata, "version", raises(importlib.metadata.PackageNotFoundError("ray")))


def no_affinity(patch: pytest.MonkeyPatch, _tmp: Path) -> None:
    patch.setattr(os, "sched_setaffinity", raises(PermissionError(1, "Operation not permitted")))


def unwritable_run_dir(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    patch.setenv("COTENANT_RUN_DIR", str(tmp / "deep" / "runs"))
    patch.setattr(doctor.tempfile, "TemporaryFile", raises(PermissionError(13, "Permission denied")))


def recorded(patch: pytest.MonkeyPatch, tmp_path: Path, mode: str | None) -> None:
    """A cluster that asks for a token was started from here."""
    patch.setenv("COTENANT_HOME", str(tmp_path))
    ClusterRecord("127.0.0.1:1", "token", "/its/token", 42, None).save()
    patch.delenv("RAY_AUTH_MODE", raising=False) if mode is None else patch.setenv("RAY_AUTH_MODE", mode)


def no_record(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorded(patch, tmp_path, None)
    ClusterRecord.remove()


def damaged_record(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorded(patch, tmp_path, None)
    (tmp_path / "cluster.json").write_text("[]")


BROKEN: list[tuple[Callable[[], Check], Patch, str, bool]] = [
    (doctor.check_python, lambda p, _: p.setattr(sys, "version_info", (3, 10, 1)), "on linux", True),
    (lambda: doctor.check_version("ray"), not_installed, "not installed", True),
    (
        lambda: doctor.check_version("torch"),
        lambda p, _: p.setattr(importlib.metadata, "version", lambda _: "2.12.1+cu130"),
        "2.12.1+cu130",
        True,
    ),
    (doctor.check_affinity, no_affinity, "refused (Operation not permitted)", True),
    (doctor.check_run_dir, unwritable_run_dir, "is not writable (Permission denied)", True),
    (doctor.check_cores, lambda p, _: p.setattr(os, "sched_getaffinity", lambda _: {3}), "1", False),
    (doctor.check_memory, lambda p, _: p.setattr(os, "sysconf", lambda _: 1024), "0.0 GiB", False),
    (doctor.check_memory, lambda p, _: p.setattr(doctor, "_memory_limit", lambda: 1 << 30), "(container limit)", False),
    (doctor.check_shm, lambda p, _: p.setattr(shutil, "disk_usage", usage(64 << 20)), "0.1 GiB", False),
    (
        doctor.check_shm,
        lambda p, _: p.setattr(shutil, "disk_usage", raises(OSError(2, "No such file"))),
        "missing",
        False,
    ),
    (
        lambda: doctor.check_limit("files", resource.RLIMIT_NOFILE, 4096, "-n"),
        lambda p, _: p.setattr(resource, "getrlimit", lambda _: (256, 1 << 20)),
        "256",
        False,
    ),
    (doctor.check_ray_auth, no_record, "not set", False),
    (
        doctor.check_ray_auth,
        lambda p, tmp: recorded(p, tmp, "disabled"),
        "it asks for a token, and RAY_AUTH_MODE",
        False,
    ),
    (doctor.check_ray_auth, damaged_record, "the record of 'cotenant up' cannot be read", False),
    (
        doctor.check_memory_groups,
        lambda p, _: p.setattr(doctor, "find_groups", lambda _: None),
        "cannot be made",
        False,
    ),
]


@pytest.mark.parametrize(("check", "breaking", "found", "essential"), BROKEN)
def test_what_is_wrong_is_named_with_its_cost_and_fix(
    *,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    check: Callable[[], Check],
    breaking: Patch,
    found: str,
    essential: bool,
) -> None:
    with monkeypatch.context() as patch:
        breaking(patch, tmp_path)
        got = check()
    assert (got.ok, got.essential) == (False, essential)
    assert found in got.found
    assert got.cost
    assert got.fix


@pytest.mark.parametrize(
    ("check", "mending"),
    [
        (
            lambda: doctor.check_version("ray"),
            lambda p, _: p.setattr(importlib.metadata, "version", lambda _: "2.100.0rc1"),
        ),
        (doctor.check_ray_auth, lambda p, _: p.setenv("RAY_AUTH_MODE", "disabled")),
        (doctor.check_ray_auth, lambda p, tmp: recorded(p, tmp, None)),
        (doctor.check_ray_auth, lambda p, tmp: recorded(p, tmp, "token")),
        (doctor.check_run_dir, lambda p, tmp: p.setenv("COTENANT_RUN_DIR", str(tmp / "new" / "dir"))),
        (
            lambda: doctor.check_limit("files", resource.RLIMIT_NOFILE, 4096, "-n"),
            lambda p, _: p.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2),
        ),
    ],
)
def test_what_is_right_is_ok(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, check: Callable[[], Check], mending: Patch
) -> None:
    with monkeypatch.context() as patch:
        mending(patch, tmp_path)
        got = check()
    assert (got.ok, got.cost, got.fix) == (True, "", "")


def test_a_limit_that_cannot_be_raised_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for hard, fix in ((1 << 20, "ulimit -n 4096"), (256, "raise the hard limit to 4096")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (256, hard))
        assert fix in doctor.check_limit("files", resource.RLIMIT_NOFILE, 4096, "-n").fix


def test_the_group_that_was_tried_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def find(name: str) -> MemoryGroups:
        (tmp_path / name).mkdir()
        return MemoryGroups(tmp_path / name, 2)

    monkeypatch.setattr(doctor, "find_groups", find)
    got = doctor.check_memory_groups()
    assert (got.ok, got.found, list(tmp_path.iterdir())) == (True, "version 2", [])


def test_core_lists_are_short() -> None:
    assert [doctor._ranges(cores) for cores in ([], [3], [0, 1, 2, 3, 8], [1, 3, 4])] == ["", "3", "0-3,8", "1,3-4"]


def test_this_host_is_examined_without_importing_ray_or_torch() -> None:
    script = (
        "import sys\nfrom cotenant.actors import doctor\nfound = doctor.checks()\n"
        "assert len({check.name for check in found}) == len(found) >= 12\n"
        "assert all(check.found and (check.ok or (check.cost and check.fix)) for check in found)\n"
        "assert not {'ray', 'torch'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_cluster() -> None:
    client = FakeClient()
    assert doctor.cluster_checks(lambda: client)[0].ok  # type: ignore[arg-type,return-value]
    client.well = False
    assert doctor.cluster_checks(lambda: client)[0].found == "prm: restarting"  # type: ignore[arg-type,return-value]
    (got,) = doctor.cluster_checks(raises(NotConnected("run 'cotenant up'")))
    assert (got.ok, got.essential, got.fix) == (False, True, "run 'cotenant up'")


def test_the_cluster_says_where_jobs_can_be_frozen_and_what_is_missing_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    said = {"h1": "", "h2": "cuda-core is not installed here", "h3": "", "h4": None, "h5": NO_WHOLE_GPUS}
    (host,) = client.hosts()
    views = [host.model_copy(update={"name": name, "no_freezing": missing}) for name, missing in said.items()]
    monkeypatch.setattr(client, "hosts", lambda: views)
    checks = doctor.cluster_checks(lambda: client)[1:]  # type: ignore[arg-type,return-value]
    assert [(check.name, check.ok) for check in checks] == [
        ("freezing: h1, h3", True),
        ("freezing: h2", False),
        ("freezing: h4", True),
        ("freezing: h5", True),
    ]
    able, unable, unknown, cores = checks
    assert "can be frozen" in able.found
    assert unable.found == said["h2"]
    assert "checkpoint: driver does nothing here" in unable.cost
    assert "cuda-core" in unable.fix
    assert unknown.found.startswith("not known yet")
    assert "counts as none" in cores.found
