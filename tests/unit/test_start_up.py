"""What a process imports before it can answer: a crashed actor is back only after that."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import cotenant.actors.host_agent
print(*sorted({"scipy", "pandas", "sqlalchemy", "torch", "sklearn", "plotly", "optuna", "fastapi"} & set(sys.modules)))
del sys.modules["cotenant.actors.host_agent"]
import cotenant.actors.scheduler_actor
heavy = {"scipy.optimize", "pandas", "torch", "sklearn", "plotly", "optuna", "fastapi", "cotenant.actors.host_agent"}
print(*sorted(heavy & set(sys.modules)))
"""


def test_actors_import_nothing_heavy_that_they_do_not_need() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=110, check=False)
    assert (done.stdout.split("\n"), done.stderr) == (["", "", ""], "")
