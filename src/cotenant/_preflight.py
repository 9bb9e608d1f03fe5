"""What is checked and read before a job is submitted, so that obvious mistakes cost no GPU time. Light to import."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant.scheduler import specs
from cotenant.scheduler.errors import CotenantError, shown
from cotenant.scheduler.hints import parse_hints

if TYPE_CHECKING:
    from cotenant.scheduler.core.model import Hints

RAY_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # that is the variable's name, not a placeholder for it
SUBMISSION_ID = "job_submission_id"
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
MAX_PLANNED = 1000  # copies of one job in a plan
_PLAN_KEYS = ("name", "command", "hints", "count")


def working_directory(given: str | None) -> str:
    """Return the directory a job shall run in as an absolute path.

    Raises:
        CotenantError: It does not exist, is no directory, or may not be entered and read.
    """
    # os.path and not pathlib, which raises for ~nobody, for names that are too long or may not be looked at.
    try:
        path = str(Path.cwd() if given is None else Path(os.path.expanduser(given)).absolute())  # noqa: PTH111
    except OSError as error:
        raise CotenantError(f"cwd: the current directory is gone ({error.strerror}); give one with --cwd") from error
    if not os.path.isdir(path):  # noqa: PTH112
        raise CotenantError(f"cwd: {shown(path)} is not a directory; give one with --cwd")
    if not os.access(path, os.R_OK | os.X_OK):
        raise CotenantError(f"cwd: {shown(path)} may not be read; give a readable directory with --cwd")
    specs.check_cwd(path)
    return path


def check_command(command: Sequence[str], cwd: str) -> None:
    """Refuse an empty command, a program that cannot run, a script that is not there, and one without its ``python``.

    Raises:
        CotenantError: With what is wrong.
    """
    if not command or not command[0].strip():
        raise CotenantError("command: it is empty; give it after --, for example: cotenant submit -- python train.py")
    specs.check_command(command)
    program = Path(cwd, command[0])
    if "/" in command[0] and not os.access(program, os.X_OK):
        what = "may not be executed" if os.path.exists(program) else "does not exist"  # noqa: PTH110
        raise CotenantError(f"command: {shown(command[0])} {what} (looked in {cwd})")
    if program.suffix == ".py" and "/" not in command[0] and program.is_file() and shutil.which(command[0]) is None:
        raise CotenantError(f"command: {shown(command[0])} is a script, not a program; put 'python' before it")
    script = _script(command)
    if script is not None and not os.path.exists(Path(cwd, script)):  # noqa: PTH110
        raise CotenantError(f"command: the script {shown(script)} does not exist in {cwd}; give another path or --cwd")


def doubts(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Say what will probably fail, and may be right on the host that the job runs on; empty when nothing is.

    Args:
        command: A command that was checked.
        variables: The environment that it will have.
    """
    program, path = command[0], variables.get("PATH", os.defpath)
    if "/" in program or shutil.which(program, path=path) is not None:
        return ""
    names = {name for folder in path.split(os.pathsep) for name in _names_in(folder)}
    alike = difflib.get_close_matches(program, sorted(names), n=1, cutoff=0.8)
    hint = f"; did you mean {shown(alike[0])}?" if alike else ""
    return f"command: {shown(program)} is not on PATH here: the job fails unless it is on the host it runs on{hint}"


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder or ".")  # noqa: PTH208 - many folders, and only the names
    except OSError:
        return []  # PATH often names folders that are not there


def _script(command: Sequence[str]) -> str | None:
    """Return the script a Python command runs; None when it runs a module, a text, its input, or is not Python."""
    if not _PYTHON.fullmatch(Path(command[0]).name):
        return None
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-"):
            return word
        if word == "-":
            return None
        if word == "--check-hash-based-pycs":
            next(words, None)
        if word.startswith("--"):
            continue
        for position, flag in enumerate(word[1:], start=2):
            if flag in "cm":
                return None
            if flag in "WX":  # these take the rest of the word or the next word
                if position == len(word):
                    next(words, None)
                break
    return None


def default_name(command: Sequence[str]) -> str:
    """Return what people call a job: its script, else its program."""
    scripts = [word for word in command if word.endswith(".py")]
    return specs.tidy_name(Path((scripts or [*command, "job"])[0]).stem) or "job"


def environment(pairs: Sequence[str], base: Mapping[str, str]) -> dict[str, str]:
    """Return ``base`` with the variables of ``--env NAME=VALUE`` on top.

    Raises:
        CotenantError: A pair without a name or without "=".
    """
    merged = dict(base)
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise CotenantError(f"env: {shown(pair)} is not accepted; give NAME=VALUE")
        merged[name] = value
    specs.check_environment(merged)
    return merged


def ray_job_metadata(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of the Ray job this process was started by; empty outside of one.

    Raises:
        CotenantError: The variable Ray sets does not hold what Ray puts there.
    """
    text = environ.get(RAY_JOB_CONFIG)
    if not text:
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CotenantError(f"environment variable {RAY_JOB_CONFIG}: is not JSON ({error}); unset it") from error
    metadata = config.get("metadata") if isinstance(config, dict) else None
    if metadata is not None and not isinstance(metadata, dict):
        raise CotenantError(f"environment variable {RAY_JOB_CONFIG}: its metadata is not an object; unset it")
    return metadata or {}


def read_plan(path: Path) -> list[dict[str, Any]]:
    """Read a plan file: ``jobs``, a list of ``{name, command, hints, count}``, all optional.

    Raises:
        CotenantError: The file cannot be read or holds something else.
    """
    from cotenant.configs import yamlfile  # noqa: PLC0415 - only `plan --file` needs it

    try:
        content = yamlfile.read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CotenantError(f"{path}: cannot be read ({error.strerror}); give a YAML file of jobs") from error
    except (UnicodeDecodeError, yamlfile.YamlError) as error:
        raise CotenantError(f"{path}: is no readable YAML file ({error})") from error
    jobs = content.get("jobs") if isinstance(content, dict) else None
    if not isinstance(jobs, list) or not jobs:
        raise CotenantError(f"{path}: give a list of jobs under 'jobs', each with {', '.join(_PLAN_KEYS)}")
    planned = [_planned(job, f"{path}: jobs[{position}]") for position, job in enumerate(jobs)]
    total = sum(job.get("count", 1) for job in planned)
    if total > MAX_PLANNED:
        raise CotenantError(f"{path}: {total} jobs are not accepted; give at most {MAX_PLANNED}, counted with 'count'")
    return planned


def planned_jobs(job: Mapping[str, Any]) -> list[tuple[str, Hints, list[str]]]:
    """Return the hypothetical jobs one entry of a plan stands for.

    Raises:
        NotAccepted: A name, command or hint that is not accepted.
    """
    words, count = job.get("command", []), job.get("count", 1)
    name = job.get("name")
    if name is None:
        name = default_name(words)
    specs.check_name(name)
    if words:
        specs.check_command(words)
    hints = parse_hints(job.get("hints", {}), time.time())
    return [(name if count == 1 else f"{name}-{index}", hints, words) for index in range(1, count + 1)]


def _planned(job: object, where: str) -> dict[str, Any]:
    """Return one entry with its command as words."""
    if not isinstance(job, dict):
        raise CotenantError(f"{where}: {shown(job)} is not accepted; give a mapping with {', '.join(_PLAN_KEYS)}")
    for key in job:
        if key not in _PLAN_KEYS:
            raise CotenantError(f"{where}: {shown(key)} is not accepted; give {', '.join(_PLAN_KEYS)}")
    if not isinstance(job.get("hints", {}), dict):
        raise CotenantError(f"{where}.hints: {shown(job['hints'])} is not accepted; give hint names with values")
    name = job.get("name")
    if name is not None and not isinstance(name, str):
        raise CotenantError(f"{where}.name: {shown(name)} is not accepted; give a text")
    words = _words(job.get("command", []), where)
    count = job.get("count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_PLANNED:
        raise CotenantError(
            f"{where}.count: {shown(count)} is not accepted; give a whole number from 1 to {MAX_PLANNED}"
        )
    return {**job, "command": words}


def _words(command: object, where: str) -> list[str]:
    """Return a command as words. A number among them is meant as it is written."""
    if isinstance(command, str):
        try:
            return shlex.split(command)
        except ValueError as error:
            raise CotenantError(f"{where}.command: {shown(command)} is not accepted ({error}); close it") from error
    if not isinstance(command, list) or not all(type(word) in (str, int, float) for word in command):
        raise CotenantError(f"{where}.command: {shown(command)} is not accepted; give a text or a list of words")
    return [str(word) for word in command]
