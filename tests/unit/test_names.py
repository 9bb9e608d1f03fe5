"""Where things are found, and what may be read by others."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray.exceptions import AuthenticationError

from cotenant.scheduler.errors import CotenantError, NotConnected
from cotenant.scheduler.names import ClusterRecord, prepare_ray_environment, ray_came_first
from cotenant.scheduler.transport import connect, join


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("COTENANT_HOME", str(tmp_path / "home"))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    ray_came_first.cache_clear()


def test_a_cluster_record_survives_and_is_private(tmp_path):
    record = ClusterRecord("127.0.0.1:6379", "token", "/secret", 42, "http://127.0.0.1:8266")
    record.save()
    assert ClusterRecord.load() == record
    mode = (tmp_path / "home" / "cluster.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    ClusterRecord.remove()
    assert ClusterRecord.load() is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"address": "h:1", "more": 1}'])
def test_a_record_of_another_version_is_told_with_its_path(tmp_path, content):
    path = tmp_path / "home" / "cluster.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(CotenantError, match=re.escape(str(path))):
        ClusterRecord.load()


@pytest.mark.parametrize(("token", "extra"), [(None, {}), ("/secret", {"RAY_AUTH_TOKEN_PATH": "/secret"})])
def test_rays_own_tools_get_what_they_need(token, extra):
    environment = ClusterRecord("h:1", "token", token, None, None).environment()
    assert environment == {"RAY_ADDRESS": "h:1", "RAY_AUTH_MODE": "token", **extra}


def test_a_local_ray_asks_for_a_token_by_default():
    prepare_ray_environment(local=True)
    path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = path.read_text()
    prepare_ray_environment(local=True)
    assert path.read_text() == first
    assert len(first) >= 32


def test_the_users_choice_of_authentication_stays(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    prepare_ray_environment(local=True)
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


@pytest.mark.parametrize("raised", [ConnectionError("timed out"), AuthenticationError("no token")])
def test_a_mode_that_the_cluster_does_not_have_is_named_where_it_cannot_be_joined(monkeypatch, raised):
    def refuse(**_):
        raise raised

    monkeypatch.setattr(ray, "init", refuse)
    for name in ("COTENANT_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    ClusterRecord("h:1", "token", "/its/token", None, None).save()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    told = 'h:1: it asks for a token, and RAY_AUTH_MODE is disabled here; unset it, or set .*: eval "..cotenant env."'
    with pytest.raises(NotConnected, match=told):
        join(None)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(NotConnected, match=r"no Ray cluster answers at h:1: (timed out|no token)"):
        join(None)


def test_a_recorded_cluster_is_joined_with_its_own_mode():
    ClusterRecord("h:1", "token", "/its/token", None, None).save()
    prepare_ray_environment(local=False)
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"]) == ("token", "/its/token")


def test_a_ray_that_was_imported_without_the_clusters_token_is_not_tried(monkeypatch):
    """It would try for twenty seconds, and then tell of a cluster that does not answer."""
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("tried"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for name in ("COTENANT_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    ClusterRecord("h:1", "token", "/its/token", None, None).save()
    told = r'run eval "..cotenant env." before the program, or use cotenant before'
    for _ in range(2):  # the first call says it in the environment, which Ray does not read any more
        with pytest.raises(NotConnected, match=told):
            connect(None)


def test_a_lease_that_is_the_first_of_cotenant_in_a_program_knows_the_clusters_token(tmp_path):
    ClusterRecord("h:1", "token", "/its/token", None, None).save()
    (tmp_path / "ray.py").write_text(
        "import os\nraise SystemExit(os.environ['RAY_AUTH_MODE'] + os.environ['RAY_AUTH_TOKEN_PATH'])\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", "import cotenant; cotenant.lease(compute=0.1)"],
        env=dict(os.environ, PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == "token/its/token"
