"""``python -m benchmarks.colocation.facts --device cpu --out DIR``: put the facts about a device to the test."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

# A bare machine has this checkout and torch, and nothing installed from it.
if importlib.util.find_spec("cotenant") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))

from benchmarks.colocation import facts
from benchmarks.colocation.readings import DeviceError


def main(argv: Sequence[str] | None = None) -> int:
    """See the module; 2 when the facts cannot be tested at all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.colocation.facts", description=facts.__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--out", type=Path, default=Path("build/facts"), metavar="DIR")
    parser.add_argument("--dry-run", action="store_true", help="for cuda: tensors on the CPU")
    parser.add_argument("--only", nargs="+", default=(), metavar="ID")
    parser.add_argument("--minutes", type=float, default=facts.BUDGET_S / 60, help="time for all (default: 4)")
    parser.add_argument("--one", metavar="ID", help=argparse.SUPPRESS)  # how the checks are isolated
    parser.add_argument("--seconds", type=float, default=30.0, help=argparse.SUPPRESS)
    parser.add_argument("--identity", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one is not None:
        return _one(options)
    try:
        facts.run(options.device, options.out, options.dry_run, only=tuple(options.only), budget_s=60 * options.minutes)
    except (DeviceError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _one(options: argparse.Namespace) -> int:
    # Ends like an exception, so that what the check started is undone.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    check = next(check for check in facts.checks_of(options.device) if check.name == options.one)
    answer = facts.look(check, options.device, options.dry_run, options.seconds, options.identity)
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
