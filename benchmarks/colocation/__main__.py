"""``python -m benchmarks.colocation``: see README.md."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# A bare machine has this checkout and torch, and nothing installed from it.
if importlib.util.find_spec("cotenant") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from benchmarks.colocation.cli import main

if __name__ == "__main__":
    sys.exit(main())
