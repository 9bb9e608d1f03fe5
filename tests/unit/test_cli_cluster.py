"""The commands that plan, start, stop and examine: what reaches the client, what is printed, how it ends."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import invoke
from fake_client import GIB, FakeClient, job_view

from cotenant.configs.settings import Settings
from cotenant.scheduler.core.model import Hints, JobState
from cotenant.scheduler.errors import CotenantError, NotConnected
from cotenant.scheduler.tuning import Changes
from cotenant.scheduler.views import JobView, TuningView

# -- plan -------------------------------------------------------------------------------------------------------------


def test_plan_file(client: FakeClient, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "jobs:\n- {name: bert, command: python 'my train.py', count: 2, hints: {gpu_memory: 2GiB, compute: 0.4}}\n"
        "- {command: [python, -m, x]}\n- {hints: {gpu_memory: 1TiB}}\n"
    )
    assert invoke("plan", "--file", str(path), "--set", "placement.packing_bias=0.7")[0] == 2
    jobs, changes = client.planned
    bert = Hints(gpu_memory=2 * GIB, compute=0.4)
    command = ["python", "my train.py"]
    assert jobs == [
        ("bert-1", bert, command),
        ("bert-2", bert, command),
        ("python", Hints(), ["python", "-m", "x"]),
        ("job", Hints(gpu_memory=2**40), []),
    ]
    assert changes == {"placement": {"packing_bias": 0.7}}


def test_plan_of_other_settings_alone(client: FakeClient) -> None:
    code, out, _ = invoke("plan", "--set", "placement.max_jobs_per_gpu=8", "--set", "resize.enabled=false")
    assert code == 0
    assert client.planned == ([], {"placement": {"max_jobs_per_gpu": 8}, "resize": {"enabled": False}})
    assert "job-1  train  waits  starts now  fits" in out
    assert "1 of 1 running ones looked at" in out


def test_settings_are_shown_and_changed(client: FakeClient) -> None:
    assert "placement.packing_bias=0.5\n" in invoke("settings")[1]
    limits = "scheduling.tenants={ml: {most_gpus: 3}}"
    code, out, _ = invoke("settings", "placement.packing_bias=0.9", limits)
    assert code == 0
    assert out.splitlines()[0] == "placement.packing_bias=0.9 (was 0.5)"
    assert out.splitlines()[1].startswith('scheduling.tenants={"ml": {')
    assert out.splitlines()[1].endswith("(was {})")
    assert len(out.splitlines()) == 2, "no other settings"
    assert invoke("settings", "placement.packing_bias=0.9")[1] == "placement.packing_bias=0.9 (as before)\n"
    assert len(json.loads(invoke("settings", "placement.packing_bias=0.9", "--json")[1])["placement"]) > 1
    assert client.current.scheduling.tenants["ml"].most_gpus == 3
    assert json.loads(invoke("settings", "--json")[1])["placement"]["packing_bias"] == 0.9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("packing_bias=1", "set: 'packing_bias=1' is not accepted; give section.key=value"),
        ("placement.confidence", "set: 'placement.confidence' is not accepted; give section.key=value"),
        ("placement.confidence=[", "placement.confidence: '[' is not accepted; give a value in YAML"),
        ("placement.confidence=2", "placement.confidence: 2 is not accepted; give a number >= 0.5 and <= 0.95"),
        ("placement.confidense=0.9", "placement: 'confidense' is not accepted; give a known name; did you mean confid"),
        ("lease.ttl_s=3", "settings: 'lease' is not accepted; give one of placement, resize, scheduling"),
        ("resize.enabled=1", "resize.enabled: 1 is not accepted; give true or false"),
        (
            "scheduling.queues={bad name: {weight: 1}, ok: {}}",
            "scheduling.queues: {'bad name': {'weight': 1}, 'ok': {}} is not accepted; give names, each with {weight: "
            "a number > 0 and <= 1e+06, most_gpus: a number > 0 or null, most_jobs: a whole number >= 0 or null}; give "
            "names that begin with a letter or a digit, of letters, digits, '.', '_' and '-', at most 63: 'bad name' "
            "is none",
        ),
        ("placement.speeds={V100: .inf}", "placement.speeds: {'V100': inf} is not accepted; give names, each with"),
    ],
)
@pytest.mark.parametrize("command", [["plan", "--set"], ["settings"]])
def test_settings_that_are_not_accepted(client: FakeClient, command: list[str], text: str, message: str) -> None:
    before = client.current
    code, out, err = invoke(*command, text)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {message}")
    assert client.current == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "give a list of jobs under 'jobs'"),
        ("jobs: []", "give a list of jobs"),
        (
            "[",
            "plan.yaml: is no readable YAML file (line 1, column 2: expected the node content, but found",
        ),
        ("jobs: 1\njobs: 2", "(line 2, column 1: key 'jobs' is given twice)"),
        ("jobs: \a", "(character 7: special characters are not allowed)"),
        ("jobs: [3]", "jobs[0]: 3 is not accepted; give a mapping"),
        ("jobs: [{nam: x}]", "jobs[0]: 'nam' is not accepted; give name, command, hints, count"),
        ("jobs: [{}, {count: 0}]", "jobs[1].count: 0 is not accepted"),
        ("jobs: [{count: true}]", "jobs[0].count: True is not accepted"),
        ("jobs: [{hints: 3}]", "jobs[0].hints: 3 is not accepted"),
        ("jobs: [{command: 3}]", "jobs[0].command: 3 is not accepted"),
        ('jobs: [{command: "\'"}]', 'command: "\'" is not accepted'),
        ("jobs: [{hints: {gpus: true}}]", "gpus: True is not accepted"),
        ("jobs: [{hints: {gpuss: 1}}]", "did you mean gpus"),
    ],
)
def test_bad_plan_files(client: FakeClient, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    code, _, err = invoke("plan", "--file", str(path))
    assert code == 1
    assert message in err


def test_plan_file_missing_or_mixed(client: FakeClient, tmp_path: Path) -> None:
    told = "gone.yaml: cannot be read (No such file or directory); give a YAML file of jobs"
    assert told in invoke("plan", "--file", "gone.yaml")[2]
    assert "give either --file or" in invoke("plan", "--file", "gone.yaml", "--gpus", "2")[2]


@dataclass(frozen=True)
class UpReport:
    """As in ``actors/cluster.py``."""

    address: str
    hosts: int
    gpus: int
    api_url: str | None
    token_path: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class DownReport:
    """As in ``actors/cluster.py``."""

    found: bool
    stopped_jobs: int
    notes: tuple[str, ...]


# -- up, down, doctor -------------------------------------------------------------------------------------------------


def test_up_checks_settings_first(client: FakeClient, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("placement: {packing_bias: 3}")
    code, _, err = invoke("up", "--config", "bad.yaml")
    assert (code, err) == (
        1,
        "error: bad.yaml: placement.packing_bias: 3 is not accepted; give a number >= 0 and <= 1\n",
    )
    assert "give either --local or --address" in invoke("up", "--local", "--address", "a:1")[2]


def test_up_and_down_report(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def up(address: object, local: bool, settings: Settings, api_class: type) -> UpReport:
        seen.append((address, local, settings.device.count, api_class))
        return UpReport("127.0.0.1:1", 1, 2, "http://127.0.0.1:8266", "/t", ("a note",))

    def down(force: bool, tell: Callable[[str], None]) -> DownReport:
        tell("waiting")
        return DownReport(True, 3 if force else 0, ())

    fakes = {
        "actors": ("cluster", SimpleNamespace(up=up, down=down)),
        "dashboards": ("server", SimpleNamespace(Api="the API")),
    }
    for room, (name, fake) in fakes.items():  # the real ones import Ray
        monkeypatch.setitem(sys.modules, f"cotenant.{room}.{name}", fake)
        monkeypatch.setattr(importlib.import_module(f"cotenant.{room}"), name, fake, raising=False)
    code, out, err = invoke("up", "--local", "--devices", "2")
    waits = "cotenant: starting Ray and cotenant on this machine: half a minute, longer where others work\n"
    assert (code, err) == (0, f"{waits}cotenant: a note\n")
    assert "127.0.0.1:1: 1 host, 2 GPUs" in out
    assert "http://127.0.0.1:8266 (token in /t)" in out
    assert seen == [(None, True, 2, "the API")]
    assert json.loads(invoke("up", "--json")[1])["gpus"] == 2
    assert invoke("down", "--force")[1] == ("stopped; jobs stopped: 3\n")
    _, out, err = invoke("down", "--json")
    assert json.loads(out) == {"found": True, "stopped_jobs": 0, "notes": []}
    assert err == "cotenant: waiting\n", "what is waited for is told there too"


def test_doctor_warns_with_0_and_fails_with_1(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    from cotenant.actors import doctor
    from cotenant.actors.doctor import Check

    found = [Check("a", True, "x"), Check("b", False, "y", "costs", "mend")]
    monkeypatch.setattr(doctor, "checks", lambda: list(found))
    code, out, _ = invoke("doctor")
    assert code == 0
    assert all(word in out for word in ("ok", "warn", "cost: costs", "fix:  mend"))
    found.append(Check("c", False, "z", "all", "buy", essential=True))
    assert invoke("doctor")[0] == 1
    assert [check["name"] for check in json.loads(invoke("doctor", "--json")[1])] == ["a", "b", "c"]


def test_doctor_asks_the_cluster(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    from cotenant.actors import doctor

    monkeypatch.setattr(doctor, "checks", list)
    assert invoke("doctor", "--cluster")[0] == 0
    client.well = False
    assert "prm: restarting" in invoke("doctor", "--cluster")[1]
    client.error = CotenantError("run 'cotenant up'")
    code, out, _ = invoke("doctor", "--cluster")
    assert code == 1
    assert "fix:  run 'cotenant up'" in out


@pytest.mark.parametrize("order", [["job-1", "nope", "job-2"], ["nope", "job-1", "job-2"], ["job-1", "job-2", "nope"]])
def test_stop_says_what_it_has_stopped_beside_what_is_not_known(client: FakeClient, order: list[str]) -> None:
    client.known["job-2"] = job_view("job-2")
    code, out, said = invoke("stop", *order)
    assert (code, out) == (1, "job-1 STOPPING\njob-2 STOPPING\n")
    assert said == "error: no job 'nope': 'cotenant ps --all' lists the jobs that are known\n"
    assert [job_id for job_id, _ in client.stopped] == ["job-1", "job-2"]


def test_stop_says_what_it_has_stopped_when_the_scheduler_is_gone(client: FakeClient) -> None:
    stop = client.stop

    def ends(job_id: str, reason: str = "") -> JobView:
        if client.stopped:
            raise NotConnected("the scheduler is gone")
        return stop(job_id, reason)

    client.stop = ends  # type: ignore[method-assign]
    assert invoke("stop", "job-1", "job-1") == (1, "job-1 STOPPING\n", "error: the scheduler is gone\n")


@pytest.mark.parametrize("command", [["plan", "--set"], ["settings"]])
def test_a_table_of_settings_that_loses_names_is_told(client: FakeClient, command: list[str]) -> None:
    """Another limit for one queue took all limits off the others, without a word."""
    three = "scheduling.queues={night: {weight: 2}, day: {most_gpus: 1}, closed: {most_jobs: 0}}"
    assert invoke("settings", three)[2] == ""
    assert invoke(*command, three)[2] == ""
    code, _, said = invoke(*command, "scheduling.queues={night: {most_jobs: 5}}")
    assert (code, " ".join(said.split())) == (
        0,
        "cotenant: warning: scheduling.queues is replaced as a whole and does not name day, closed any more: what was "
        "set there is gone, and other_queues counts",
    )


def test_jobs_that_fail_of_other_settings_are_told(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"not_placeable": True, "reason": "the quota does not allow it", "shares": []}
    client.known = {
        "job-1": job_view("job-1"),
        "job-2": job_view("job-2", JobState.QUEUED, shares=[]),
        "job-3": job_view("job-3", JobState.FAILED, **gone),
    }
    change = client.change_tuning

    def changed(changes: Changes) -> TuningView:
        client.known["job-2"] = job_view("job-2", JobState.FAILED, **gone)
        return change(changes)

    monkeypatch.setattr(client, "change_tuning", changed)
    code, _, said = invoke("settings", "scheduling.tenants={default: {most_gpus: 0.1}}")
    assert (code, said) == (0, "cotenant: warning: job job-2 waited and has failed: the quota does not allow it\n")
