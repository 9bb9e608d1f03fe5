"""Facts about this very device, each put to the test: what is documented, guessed or read elsewhere may not hold here.

Every check runs in a process of its own with a time limit: one that fails, hangs or crashes is "unknown" with its last
words as evidence, and the rest goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.colocation.devices import open_device
from benchmarks.colocation.facts.checks import ROOT, Check, Context, Evidence, Finding, Unknown, environment
from benchmarks.colocation.facts.on_cpu import CHECKS as CPU_CHECKS
from benchmarks.colocation.facts.on_cuda import CHECKS as CUDA_CHECKS

FORMAT = 1
Verdict = Literal["holds", "does not hold", "unknown"]
BUDGET_S = 240.0
_GRACE_S = 20.0  # for what a check must undo, such as its MPS daemon; once after its time and once after a signal
_LEAST_S = 5.0


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement about a device and what was seen of it.

    Attributes:
        id: Its short name.
        statement: What is claimed.
        verdict: Whether it holds on this device.
        evidence: Numbers and messages behind the verdict.
        seconds: How long it took to see.
    """

    id: str
    statement: str
    verdict: Verdict
    evidence: Evidence
    seconds: float


def checks_of(device: str) -> tuple[Check, ...]:
    """The checks of a device, the most valuable first."""
    return {"cpu": CPU_CHECKS, "cuda": CUDA_CHECKS}[device]


def run(
    device: str,
    out_dir: Path,
    dry_run: bool = False,
    *,
    only: Collection[str] = (),
    budget_s: float = BUDGET_S,
    tell: Callable[[str], None] = print,
) -> list[Fact]:
    """Put every statement to the test and write ``facts.json`` and the checks' logs.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        out_dir: Where ``facts.json`` and ``logs/facts-ID.log`` are written.
        dry_run: For cuda: tensors on the CPU, and whatever NVML is found.
        only: Ids of the facts that are wanted; none = all.
        budget_s: Time for all; what does not fit into it is "unknown".
        tell: Prints a line.

    Raises:
        DeviceError: No such device here.
        ValueError: ``only`` names a fact that does not exist.
    """
    chosen = [check for check in checks_of(device) if not only or check.name in only]
    unknown = sorted(set(only) - {check.name for check in chosen})
    if unknown:
        known = ", ".join(check.name for check in checks_of(device))
        raise ValueError(f"facts: {', '.join(unknown)} not known on {device}; give some of: {known}")
    opened = open_device(device, dry_run)
    identity = opened.identity()
    opened.close()
    (out_dir / "logs").mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + budget_s
    facts: list[Fact] = []
    for check in chosen:
        facts.append(_isolated(check, device, dry_run, deadline, identity=identity, logs=out_dir / "logs"))
        tell(_row(facts[-1]))
        _write(out_dir, device, dry_run, identity, facts)
    counts = [f"{sum(fact.verdict == verdict for fact in facts)} {verdict}" for verdict in get_args(Verdict)]
    tell(f"{len(facts)} facts about {device}{' (dry run)' if dry_run else ''}: {', '.join(counts)}")
    return facts


def _isolated(
    check: Check, device: str, dry_run: bool, deadline: float, *, identity: Mapping[str, Any], logs: Path
) -> Fact:
    began = time.monotonic()
    limit_s = min(check.limit_s, deadline - began)
    if limit_s < _LEAST_S:
        return Fact(check.name, check.statement, "unknown", {"why": "no time was left for it"}, 0.0)
    command = [sys.executable, "-m", "benchmarks.colocation.facts", "--one", check.name, "--device", device]
    command += ["--seconds", f"{limit_s:.1f}", "--identity", json.dumps(identity), *(["--dry-run"] if dry_run else [])]
    log = logs / f"facts-{check.name}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            output = _wait(process, limit_s)
        finally:
            _kill_group(process)
    verdict, evidence = _understood(output, process.returncode, log)
    if dry_run:
        evidence["dry_run"] = True
    return Fact(check.name, check.statement, verdict, evidence, round(time.monotonic() - began, 2))


def _wait(process: subprocess.Popen[str], limit_s: float) -> str:
    """What the process said in its time; one that takes longer may clean up, then it is killed."""
    # The check itself knows its deadline and ends with a reason; this is for one that hangs.
    try:
        return process.communicate(timeout=limit_s + _GRACE_S)[0]
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        return process.communicate(timeout=_GRACE_S)[0]
    except subprocess.TimeoutExpired:
        return ""


def _kill_group(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _understood(output: str, status: int, log: Path) -> tuple[Verdict, Evidence]:
    lines = output.splitlines()
    try:
        answer: Any = json.loads(lines[-1] if lines else "")
        verdict: Verdict = answer["verdict"]
        return verdict, dict(answer["evidence"])
    except (ValueError, KeyError, TypeError):
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        why = f"the check ended with status {status}" + (f": {last[0]}" if last else "")
        return "unknown", {"why": why}


def look(
    check: Check, device: str, dry_run: bool, seconds: float, identity: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Carry out one check in this process: its verdict and evidence."""
    context = Context(device, dry_run, time.monotonic() + seconds, dict(identity or {}))
    with context.stack:
        try:
            finding = check.look(context)
        except Unknown as error:
            return {"verdict": "unknown", "evidence": error.evidence}
        return {"verdict": _verdict(finding), "evidence": finding.evidence}


def _verdict(finding: Finding) -> Verdict:
    return "holds" if finding.holds else "does not hold"


def _write(out_dir: Path, device: str, dry_run: bool, identity: dict[str, Any], facts: list[Fact]) -> None:
    record = {
        "format": FORMAT,
        "device": device,
        "dry_run": dry_run,
        "identity": identity,
        "facts": [asdict(fact) for fact in facts],
    }
    fresh = out_dir / "facts.json.new"
    fresh.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    fresh.replace(out_dir / "facts.json")


def _row(fact: Fact) -> str:
    shown = "; ".join(f"{key} {_short(value)}" for key, value in fact.evidence.items())
    return f"{fact.verdict:<13}  {fact.id:<18}  {fact.seconds:5.1f} s  {fact.statement}\n{'':<17}{shown}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(entry)}" for key, entry in value.items()) + "}"
    return str(value)
