"""What is built: a source distribution becomes a wheel with real files in place of the links, and it works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("actors", "configs", "dashboards", "forecasting", "placement", "scheduler")
NOT_SOURCE = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", ".*_cache", "__pycache__")
BUILD_SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
USE = """
from pathlib import Path
import cotenant.actors
from cotenant.configs.loader import load
from cotenant.actors import shim
from cotenant.forecasting.datasets.colocation import load_colocation, shipped
from cotenant.forecasting.datasets.registry import Registry, load_coldstart, load_interference
here = Path(cotenant.__file__).parent
load(None, {})
assert all(len(load_colocation(name).pairs) > 0 for name in shipped()) and shipped()
models = Registry(Path("models"))
assert load_interference(models, models.active("interference")).models
assert load_coldstart(models, models.active("coldstart")).families
print(here)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a source distribution of a copy of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "tree"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=NOT_SOURCE)
    _run(copy, "-c", BUILD_SDIST, str(folder))
    (sdist,) = folder.glob("*.tar.gz")
    _run(folder, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", str(sdist))
    (built,) = folder.glob("*.whl")
    return built


def _run(cwd: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_it_holds_every_source_file_of_every_room(wheel: Path) -> None:
    sources = {
        f"cotenant/{path.relative_to(ROOT)}": path
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".py", ".yaml", ".html", ".js", ".css", ".csv", ".json", ".parquet"}
    }
    sources |= {f"cotenant/{path.name}": path for path in (ROOT / "src" / "cotenant").glob("*.py")}
    sources["cotenant/py.typed"] = ROOT / "src" / "cotenant" / "py.typed"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("cotenant/")}
        assert packed == set(sources)
        assert [name for name, path in sources.items() if archive.read(name) != path.read_bytes()] == []


def test_it_works_where_this_tree_is_not(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    assert _run(tmp_path, "-c", USE, PYTHONPATH=str(tmp_path)) == f"{tmp_path / 'cotenant'}\n"
