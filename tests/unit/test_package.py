"""The package as users and their programs meet it: names, weight, one name per module, and the shape of the tree."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import cotenant

ROOT = Path(__file__).parents[2]
ROOMS = ("actors", "configs", "dashboards", "forecasting", "placement", "scheduler")
# Alone in a fresh interpreter, whose site packages may load things of their own before anything is imported.
LIGHT = """
import sys
before = set(sys.modules)
import {module}
after = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(after - sys.stdlib_module_names - {{"cotenant"}}))
"""


def test_exported_names() -> None:
    assert sorted(cotenant.__all__) == [
        "LeaseLost",
        "connect",
        "get_available_resources",
        "lease",
        "release_resources",
        "request_resource_allocation",
        "set_resource_limits",
        "submit",
    ]
    assert all(getattr(cotenant, name).__doc__ for name in cotenant.__all__)
    own = [name for name, value in vars(cotenant).items() if getattr(value, "__module__", None) == "cotenant"]
    assert {name for name in own if not name.startswith("_")} <= set(cotenant.__all__)


def test_the_version_is_said_once_and_the_same_everywhere() -> None:
    assert importlib.metadata.version("cotenant") == cotenant.__version__


@pytest.mark.parametrize("module", ["cotenant", "cotenant.actors.shim", "cotenant.actors.runner"])
def test_what_runs_inside_jobs_imports_the_standard_library_only(module: str) -> None:
    told = subprocess.run(
        [sys.executable, "-c", LIGHT.format(module=module)], capture_output=True, text=True, check=True
    )
    assert told.stdout == "[]\n"


@pytest.mark.parametrize("path", sorted((ROOT / "actors" / "shim").rglob("*.py")), ids=lambda path: path.name)
def test_no_line_of_the_shim_imports_anything_else(path: Path) -> None:
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            roots.add((node.module or "").partition(".")[0])
    assert roots <= sys.stdlib_module_names | {"_cotenant_shim"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_refuses_its_bare_name(room: str) -> None:
    spec = importlib.util.spec_from_file_location(room, ROOT / room / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=f"import this package as 'cotenant.{room}', not as '{room}'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_linked_into_the_package_relatively(room: str) -> None:
    assert (ROOT / "src" / "cotenant" / room).readlink() == Path("..", "..", room)


def test_every_room_is_known_here() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(ROOMS)


@pytest.mark.parametrize("folder", [*ROOMS, "benchmarks", "docs", "examples", "tests"])
def test_a_root_folder_explains_itself_in_forty_lines(folder: str) -> None:
    assert 0 < len((ROOT / folder / "README.md").read_text(encoding="utf-8").splitlines()) <= 40


def test_no_file_outgrows_five_hundred_lines() -> None:
    folders = (*ROOMS, "benchmarks", "examples", "src", "tests")
    lengths = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {path: lines for path, lines in lengths.items() if lines > 500} == {}
