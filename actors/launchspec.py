"""What is launched: the record on disk, what is accepted, and the environment a job gets."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from cotenant.actors import runner
from cotenant.actors.reports import Descriptors
from cotenant.actors.shim.bootstrap import OPERATOR_MIX
from cotenant.actors.shim.resources import TOKEN
from cotenant.placement.types import Share

SITE_DIR = str(Path(__file__).absolute().parent / "shim" / "site")
JOB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
# Not taken over from whoever submits: it may be a job itself, with caps of its own.
_OWN_VARIABLES = frozenset(("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")) | frozenset(
    "COTENANT_" + name
    for name in (
        "JOB_ID",
        "EPOCH",
        "JOB_DIR",
        "DEVICE",
        "CORES",
        "HOST_CORES",
        "SHARE_INDEX",
        "ATTACH",
        "SHIM_WARNED",
        "DATA_LIMIT",
        "AGENT",
        "LEASE_TOKEN",
        "CHECKPOINT_DIR",
        "CONTINUES",
        "STOP_FILE",
    )
)


class LaunchError(RuntimeError):
    """The job could not be started; nothing of it is left.

    Attributes:
        exit_code: What a shell would return.
        retry: Whether another try makes sense.
        retry_after_s: What serves the host's GPUs let the job down, and may be there then; None = it did not.
    """

    def __init__(
        self,
        reason: str,
        *,
        exit_code: int = runner.EXIT_NOT_EXECUTABLE,
        retry: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        self.exit_code = exit_code
        self.retry = retry
        self.retry_after_s = retry_after_s
        super().__init__(reason)


class Launch(TypedDict):
    """Content of ``launch.json``. ``env`` is the command's whole environment."""

    job_id: str
    epoch: int
    kind: Literal["command", "lease"]
    fingerprint: str
    gpu_ids: list[str]
    command: list[str]
    cwd: str
    env: dict[str, str]
    host_cores: list[int]
    grace_s: float
    batch_size: NotRequired[int | None]
    framework: NotRequired[str | None]
    family: NotRequired[str | None]
    planned: NotRequired[dict[str, Any] | None]
    operator_mix: NotRequired[bool]
    token: NotRequired[str]


class Described(TypedDict, total=False):
    """What is in ``launch.json`` only where the job's hints say it."""

    batch_size: int | None
    framework: str | None
    family: str | None
    planned: dict[str, Any] | None
    operator_mix: bool


def described(descriptors: Descriptors | None, operator_mix: bool | None) -> Described:
    """Return what the hints say of the job, None = nothing."""
    said: Described = {} if operator_mix is None else {"operator_mix": operator_mix}
    if descriptors is not None:
        said["batch_size"], said["framework"] = descriptors.batch_size, descriptors.framework
        said["family"] = descriptors.family
        said["planned"] = asdict(descriptors.planned) if descriptors.planned else None
    return said


def check(launch: Launch, shares: Sequence[Share], gpus: Container[str]) -> None:
    """Check what can be checked before anything is done.

    Args:
        launch: What shall be launched.
        shares: Its shares on this host.
        gpus: Ids of this host's GPUs.

    Raises:
        LaunchError: Something is not accepted; the message names field, value and what is accepted.
    """
    if not JOB_ID.fullmatch(launch["job_id"]):
        raise _refused(
            "job_id", launch["job_id"], "1 to 200 letters, digits, '_', '-' and '.', the first no '-' or '.'"
        )
    if launch["epoch"] < 0:
        raise _refused("epoch", launch["epoch"], "a whole number >= 0")
    if not (math.isfinite(launch["grace_s"]) and launch["grace_s"] >= 0):
        raise _refused("grace_s", launch["grace_s"], "seconds >= 0")
    if not shares:
        raise _refused("shares", [], "at least one share of a GPU of this host")
    for share in shares:
        if share.gpu_id not in gpus:
            raise _refused("shares.gpu_id", share.gpu_id, "the id of a GPU of this host")
        if not 0.0 < share.compute <= 1.0:
            raise _refused("shares.compute", share.compute, "a fraction in (0, 1]")
        if share.memory_bytes < 0:
            raise _refused("shares.memory_bytes", share.memory_bytes, "bytes >= 0")
    if launch["kind"] == "command":
        _check_command(launch)


def _check_command(launch: Launch) -> None:
    if not launch["command"] or not launch["command"][0]:
        raise _refused("command", launch["command"], "a program and its arguments", runner.EXIT_NOT_FOUND)
    if not launch["cwd"].startswith("/"):
        raise _refused("cwd", launch["cwd"], "an absolute path")
    for argument in (*launch["command"], launch["cwd"]):
        if "\0" in argument:
            raise _refused("command, cwd", argument, "text without NUL characters")
    for name, value in launch["env"].items():
        if "\0" in name + value or "=" in name or not name:
            raise _refused("env", f"{name}={value}", "names without '=' and NUL, values without NUL")


def _refused(field: str, value: object, accepted: str, exit_code: int = runner.EXIT_NOT_EXECUTABLE) -> LaunchError:
    return LaunchError(f"{field}: {value!r} is not accepted; give {accepted}", exit_code=exit_code)


def base_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return a command's environment before cotenant's own variables are added.

    A job may be submitted from inside another job, so that one's variables are dropped.
    """
    base = {name: value for name, value in env.items() if name not in _OWN_VARIABLES}
    base.setdefault("PATH", os.environ.get("PATH", os.defpath))
    base.setdefault("PYTHONUNBUFFERED", "1")  # output is followed while the job runs
    return base


def job_variables(
    job_id: str, epoch: int, job_dir: Path, python_path: str, *, operator_mix: bool | None = None, token: str = ""
) -> dict[str, str]:
    """Return the variables by which the shim finds its job.

    Args:
        job_id: The job.
        epoch: Epoch of its lease.
        job_dir: Its directory.
        python_path: The PYTHONPATH there is already.
        operator_mix: What its hint says, which wins over what its environment says; None = nothing.
        token: By which it shows the host agent that the lease is its own.
    """
    others = [entry for entry in python_path.split(os.pathsep) if entry and entry != SITE_DIR]
    variables = {
        "COTENANT_JOB_ID": job_id,
        "COTENANT_EPOCH": str(epoch),
        "COTENANT_JOB_DIR": str(job_dir),
        TOKEN: token,
        "PYTHONPATH": os.pathsep.join([SITE_DIR, *others]),
    }
    return variables if operator_mix is None else variables | {OPERATOR_MIX: "1" if operator_mix else "0"}
