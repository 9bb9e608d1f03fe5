"""A stand-in for ``libnvidia-ml.so.1``: compiles it, describes its hardware, runs programs with it.

    standin = Standin(tmp_path)
    standin.set("gpu 0 uuid=GPU-1 total=1000 used=600")
    answer = standin.python("import pynvml; ...; print(json.dumps(...))")

``README.md`` beside this file describes the lines of the state file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SONAME = "libnvidia-ml.so.1"
_SOURCES = (HERE / "standin.c", HERE / "state.c")
# Callers write answers with json and need the repository's packages; both are there without asking.
_PRELUDE = "import json, sys\nsys.path.insert(0, {root!r})\n"


def compiler() -> str | None:
    """The C compiler of this machine, None when there is none."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build(folder: Path, without: Sequence[str] = ()) -> Path:
    """Compile the stand-in.

    Args:
        folder: Where ``libnvidia-ml.so.1`` is written.
        without: Functions that it must not have, as an old driver lacks them.

    Returns:
        The library.
    """
    found = compiler()
    if found is None:
        pytest.skip("no C compiler on this machine (cc, gcc or clang): the stand-in for NVML cannot be built")
    exports = folder / "exports.map"
    exports.write_text("{ global: nvml*; local: " + "".join(f"{name}; " for name in without) + "*; };\n")
    library = folder / SONAME
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-shared", "-fPIC", f"-Wl,-soname,{SONAME}"]
    command = [found, *flags, f"-Wl,--version-script,{exports}", "-o", library, *_SOURCES]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return library


class Standin:
    """One compiled stand-in and its state file, both in ``folder``."""

    def __init__(self, folder: Path, without: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.library = build(folder, without)
        self.state = folder / "hardware"
        self.set()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to find the stand-in instead of a driver."""
        return {"LD_LIBRARY_PATH": str(self.library.parent), "NVML_STANDIN_STATE": str(self.state)}

    def set(self, *lines: str) -> None:
        """Describe the hardware anew; running programs see it at their next call, all of it or nothing."""
        fresh = self.state.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(self.state)

    def python(self, code: str, timeout_s: float = 30.0, **environment: str) -> Any:
        """Run Python code in a process of its own with the stand-in; returns what its last line says in JSON."""
        done = self.run([sys.executable, "-c", _PRELUDE.format(root=str(ROOT)) + code], timeout_s, environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def run(
        self, command: Sequence[str], timeout_s: float = 60.0, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command from the repository's root with the stand-in."""
        env = {**os.environ, **self.environment, "OMP_NUM_THREADS": "1", **(environment or {})}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=env, cwd=ROOT, check=False
        )
