"""What a submitted job may consist of: checked where it is described and again where it is journaled.

The journal keeps every submission and hands it to the core again after each restart, so nothing may get in that cannot
be written as UTF-8, that a host could not execute, or that the core cannot reason about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from cotenant.scheduler.errors import HintError, NotAccepted, shown
from cotenant.scheduler.hints import check_hints, check_job_id

if TYPE_CHECKING:
    from cotenant.configs.settings import Settings
    from cotenant.scheduler.core.model import JobSpec

MAX_NAME = 200
MAX_WORD_BYTES = 131_071  # Linux refuses longer arguments and variables (MAX_ARG_STRLEN)
MAX_PATH_BYTES = 4095
MAX_REASON = 1000

LEASE_CHECKPOINTS = "none or own for a lease: the driver cannot freeze a part of the Ray program that it belongs to"
_WORD = f"text in UTF-8 without NUL, at most {MAX_WORD_BYTES} bytes"


def check_spec(spec: JobSpec) -> None:
    """Check everything a user says about a job.

    Raises:
        NotAccepted: Names the field, the value and what is accepted.
    """
    check_job_id(spec.job_id)
    check_name(spec.name)
    if spec.kind == "command":
        check_command(spec.command)
        check_cwd(spec.cwd)
    check_environment(spec.env)
    check_hints(spec.hints)
    if spec.kind != "command" and spec.hints.checkpoint == "driver":
        raise HintError("checkpoint", "driver", LEASE_CHECKPOINTS)


def check_same(spec: JobSpec, kind: str, command: Sequence[str], hints: Mapping[str, object]) -> None:
    """Refuse a job whose id is known already, for something else: what is asked for now would be dropped silently.

    A relative deadline is another moment at each try, so only whether there is one is compared.

    Args:
        spec: The job that was submitted.
        kind: Kind of the job that is known.
        command: Its command.
        hints: Its hints, by the fields of ``Hints``.

    Raises:
        HintError: Of ``job_id``; names what is not the same.
    """
    if (kind, list(command)) != (spec.kind, list(spec.command)):
        raise HintError("job_id", spec.job_id, "another one: a job with this id and another command is known")
    wanted = asdict(spec.hints)
    if None not in (wanted["deadline_s"], hints["deadline_s"]):
        del wanted["deadline_s"]
    differing = [  # fields of times end in their unit, names of hints do not
        f"{field.removesuffix('_s')}: {shown(hints[field])} there, {shown(value)} here"
        for field, value in wanted.items()
        if hints[field] != value
    ]
    if differing:
        told = ", ".join(differing)
        raise HintError("job_id", spec.job_id, f"another one: a job with this id and other hints is known ({told})")


def check_queue(spec: JobSpec, settings: Settings) -> None:
    """Refuse a queue that there is not.

    While the settings name no queue, any name will do; otherwise only these and ``default``.

    Raises:
        HintError: Names the queue and those that there are.
    """
    queues, queue = settings.scheduling.queues, spec.hints.queue
    if queues and queue != "default" and queue not in queues:
        raise HintError("queue", queue, f"one of {', '.join(sorted({*queues, 'default'}))}")


def check_name(name: object) -> None:
    """Refuse a name that is empty, long, or could steer a terminal."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise NotAccepted("name", name, f"1 to {MAX_NAME} printable characters")


def check_command(command: Sequence[str]) -> None:
    """Refuse what no host could execute."""
    if isinstance(command, str):
        raise NotAccepted("command", command, f"a list of words, as {shown(command.split())}")
    if not command or not isinstance(command[0], str) or not command[0].strip():
        raise NotAccepted("command", command, 'a program and its arguments, as ["python", "train.py"]')
    for position, word in enumerate(command):
        if not _fits(word, MAX_WORD_BYTES):
            raise NotAccepted(f"command[{position}]", word, _WORD)


def check_cwd(cwd: object) -> None:
    """Refuse what is no absolute path."""
    if not _fits(cwd, MAX_PATH_BYTES) or not str(cwd).startswith("/"):
        raise NotAccepted("cwd", cwd, f"an absolute path in UTF-8, at most {MAX_PATH_BYTES} bytes")


def check_environment(env: Mapping[str, str]) -> None:
    """Refuse variables that ``execve`` does not take or the journal cannot hold."""
    for name, value in env.items():
        if not _fits(name, MAX_WORD_BYTES) or not name or "=" in name:
            raise NotAccepted("env", name, "names in UTF-8 without '=' and NUL")
        if not _fits(value, MAX_WORD_BYTES - len(name.encode()) - 1):
            raise NotAccepted(f"env.{name}", value, f"{_WORD} with its name")


def check_reason(reason: object) -> None:
    """Refuse a reason that the history of a job could not show."""
    if not _fits(reason, MAX_REASON):
        raise NotAccepted("reason", reason, f"text in UTF-8, at most {MAX_REASON} bytes")


def tidy_name(name: str) -> str:
    """Return a name made from a file's name, which may hold anything, as an acceptable one ("" = there is nothing)."""
    return "".join(char if char.isprintable() else "?" for char in name[:MAX_NAME])


def _fits(text: object, limit: int) -> bool:
    if not isinstance(text, str) or "\0" in text:
        return False
    try:
        return len(text.encode()) <= limit
    except UnicodeEncodeError:
        return False
