"""Retraining from what a cluster measured: adopts what is not worse, says why, and leaves the registry sound."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from interference_tables import measured
from trained_trees import add_trees

from cotenant.forecasting.datasets.observation_file import save_observations
from cotenant.forecasting.datasets.pair_sources import observations_of
from cotenant.forecasting.datasets.registry import SHIPPED, DemandExperts, Registry, load_demand, load_interference
from cotenant.forecasting.datasets.signature_store import SignatureStore
from cotenant.forecasting.interference.observations import Observation, Program
from cotenant.forecasting.interference.physics import SHARES_START, queue, shares
from cotenant.forecasting.signatures import to_row
from cotenant.forecasting.training import candidates, retrain
from cotenant.forecasting.training.candidates import OWN_DATA, newest_groups, surely_worse
from cotenant.forecasting.types import Signature


def here(gpu_type: str = "gpu-x") -> list[Observation]:
    """What a cluster measured: pairs of twelve programs, each for half a minute."""
    return [replace(each, gpu_type=gpu_type, seconds=30.0) for each in measured()]


def wrong(observations: list[Observation]) -> list[Observation]:
    """The same pairs with throughputs that follow no law."""
    draws = np.random.default_rng(0).random(len(observations)).tolist()
    return [
        replace(each, throughput=0.05 + 0.9 * n, low=0.04, high=1.0)
        for each, n in zip(observations, draws, strict=True)
    ]


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    out = capsys.readouterr().out.strip().splitlines()
    return json.loads(out[-1])


def run(registry: Path, evidence: Path) -> int:
    return retrain.main(["--kind", "interference", "--registry", str(registry), "--evidence", str(evidence)])


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    path = tmp_path / "evidence.jsonl"
    save_observations(path, here())
    return path


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "models")


def test_what_the_cluster_measured_makes_a_better_model(
    registry: Registry, evidence: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert registry.active("interference") == SHIPPED
    assert run(registry.root, evidence) == 0
    line = told(capsys)
    assert line["adopted"] is True
    assert line["kind"] == "interference"
    assert line["candidate"]["MAE"] <= line["active"]["MAE"]
    assert registry.active("interference") == line["version"]
    card = registry.card("interference", line["version"])
    assert [each.source for each in card.data][-1] == OWN_DATA
    assert card.data[0] == registry.card("interference", SHIPPED).data[0]
    models = load_interference(registry, line["version"])
    shipped = load_interference(registry, SHIPPED)
    assert set(models.models["gpu-x"].table.jobs.ids) == {each.focal.fingerprint for each in here()}
    assert set(models.models["cpu-core"].table.jobs.ids) == set(shipped.models["cpu-core"].table.jobs.ids)
    assert len(models.models["cpu-core"].table) == len(shipped.models["cpu-core"].table)


def test_nothing_new_changes_nothing(registry: Registry, evidence: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(registry.root, evidence) == 0
    version = told(capsys)["version"]
    assert run(registry.root, evidence) == 0
    line = told(capsys)
    assert (line["version"], line["adopted"]) == (None, False)
    assert "nothing was measured since" in line["reason"]
    assert registry.active("interference") == version


def test_later_models_keep_what_earlier_ones_knew(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for gpu_type in ("gpu-x", "gpu-y"):
        save_observations(tmp_path / gpu_type, here(gpu_type))
        assert run(registry.root, tmp_path / gpu_type) == 0
        line = told(capsys)
        assert line["adopted"], line["reason"]
    models = load_interference(registry, line["version"])
    assert set(models.models) == {"cpu-core", "gpu-x", "gpu-y"}
    assert "conv-0" in models.models["gpu-x"].table.jobs.ids
    assert [each.source for each in registry.card("interference", line["version"]).data].count(OWN_DATA) == 1


def test_what_was_withdrawn_is_not_carried_on_by_the_model_that_has_learnt_it(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {each.focal.fingerprint for each in here()}
    gone = here()[0].focal.fingerprint
    evidence = tmp_path / "evidence.jsonl"
    for each in here():
        slow = replace(each, throughput=0.03, low=0.02, high=0.04)
        save_observations(evidence, [slow if each.focal.fingerprint == gone else each])
    assert run(registry.root, evidence) == 0
    learnt = told(capsys)["version"]
    save_observations(evidence, [Program("gpu-x", gone)])
    assert run(registry.root, evidence) == 0
    line = told(capsys)
    assert line["adopted"], line["reason"]

    def focal(version: str) -> set[str]:
        table = load_interference(registry, version).models["gpu-x"].table
        return {each.focal.fingerprint for each in observations_of(table, "gpu-x")}

    assert focal(learnt) == known
    assert focal(line["version"]) == known - {gone}
    table = load_interference(registry, line["version"]).models["gpu-x"].table
    assert gone in table.jobs.ids  # as a neighbour


def test_measurements_without_a_law_are_not_adopted_over_a_good_model(
    registry: Registry, evidence: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(registry.root, evidence) == 0
    version = told(capsys)["version"]
    odd = tmp_path / "odd.jsonl"
    # The first jobs are mismeasured, the newest are not: whoever believes the first predicts the newest worse.
    good = here()
    newest = {each.focal.fingerprint for each in good[-24:]}
    first = [each for each in good if not {each.focal.fingerprint, each.others[0].fingerprint} & newest]
    rest = [each for each in good if {each.focal.fingerprint, each.others[0].fingerprint} & newest]
    save_observations(odd, [*wrong(first), *rest])
    assert run(registry.root, odd) == 0
    line = told(capsys)
    assert (line["adopted"], line["version"]) == (False, None)
    assert line["candidate"]["MAE"] > line["active"]["MAE"]
    assert "worse than" in line["reason"]
    assert registry.active("interference") == version
    assert len(registry.versions("interference")) == 2


@pytest.mark.parametrize(
    ("excess", "worse"),
    [
        ([0.0, 0.0, 0.0], False),
        ([-0.1, -0.2, -0.1], False),
        ([0.01, 0.01, 0.01], True),  # no noise at all
        ([0.03, -0.02, 0.0], False),  # mean .003, standard error .015
        ([0.03, 0.03, 0.0], True),  # .02, .01
        ([0.01], True),
        ([float("nan"), 0.0, 0.0], True),
    ],
)
@pytest.mark.parametrize("both_ways", [False, True])
def test_a_candidate_is_worse_when_its_errors_exceed_the_noise(
    excess: list[float], worse: bool, both_ways: bool
) -> None:
    focal, *others = list(dict.fromkeys(each.focal for each in here()))
    pairs = [replace(here()[0], focal=focal, others=(others[k],)) for k in range(len(excess))]
    if both_ways:  # two rows of the same jobs tell no more than one
        pairs += [replace(each, focal=each.others[0], others=(each.focal,)) for each in pairs]
        excess = excess * 2
    assert surely_worse(np.array(excess), pairs) is worse


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_little(registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    path = tmp_path / "evidence.jsonl"
    path.touch()
    save_observations(path, here()[:count])
    assert run(registry.root, path) == 3
    line = told(capsys)
    assert (line["adopted"], line["version"]) == (False, None)
    assert "needed are at least 3" in line["reason"]
    assert registry.active("interference") == SHIPPED


def test_few_jobs_are_held_out_one_by_one(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"conv-0", "attention-3", "agent-6"}
    few = [each for each in here() if {each.focal.fingerprint, each.others[0].fingerprint} <= names]
    path = tmp_path / "evidence.jsonl"
    save_observations(path, few)
    assert run(registry.root, path) == 0
    assert told(capsys)["candidate"]
    assert [sorted(each) for each in newest_groups(["a", "b"])] == [["a"], ["b"]]
    assert newest_groups(list("abcdefghijk")) == [{"j", "k"}]


def test_bad_lines_are_skipped_and_told(registry: Registry, evidence: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with evidence.open("ab") as file:
        file.write(b'{"schema_version": 99}\nnonsense\n')
    assert run(registry.root, evidence) == 0
    captured = capsys.readouterr()
    assert captured.err.count(": skipped: ") == 2
    assert json.loads(captured.out)["adopted"] is True


@pytest.mark.parametrize("what", ["missing", "folder", "choice"])
def test_faults_are_told_and_change_nothing(
    registry: Registry, evidence: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    if what == "choice":
        registry.root.mkdir()
        (registry.root / "active.json").write_text("{")
    path = {"missing": tmp_path / "none.jsonl", "folder": tmp_path, "choice": evidence}[what]
    assert run(registry.root, path) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert {"missing": "none.jsonl", "folder": str(tmp_path), "choice": "active.json"}[what] in captured.err
    assert registry.versions("interference")[1:] == []


def test_a_damaged_active_version_is_replaced(
    registry: Registry, evidence: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(registry.root, evidence) == 0
    version = told(capsys)["version"]
    (registry.folder("interference", version) / "interference.json").write_text("{}")
    assert run(registry.root, evidence) == 0
    captured = capsys.readouterr()
    line = json.loads(captured.out)
    assert "compared with what is shipped" in captured.err
    assert line["adopted"] is True
    assert registry.active("interference") == line["version"] != version


def test_the_utilisation_rule_is_what_must_be_beaten_when_there_is_no_model(
    registry: Registry, evidence: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrain, "Registry", lambda root: Registry(root, root / "none"))
    assert run(registry.root, evidence) == 0
    line = told(capsys)
    assert "the utilisation rule" in line["reason"]
    assert line["adopted"] is True


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--kind", "weather", "--registry", "x"],
        ["--kind", "interference", "--registry", "x"],
        ["--kind", "demand", "--registry", "x", "--evidence", "y"],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        retrain.main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_killed_process_leaves_the_registry_sound(registry: Registry, evidence: Path) -> None:
    program = (
        "import sys, time; from cotenant.forecasting.datasets import registry; from pathlib import Path;"
        "from cotenant.forecasting.training import retrain;"
        "real = registry._sync; registry._sync = lambda path: (print('writing', flush=True), time.sleep(60));"
        f"retrain.main(['--kind', 'interference', '--registry', {str(registry.root)!r},"
        f" '--evidence', {str(evidence)!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "writing\n"
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert registry.active("interference") == SHIPPED
    assert [each.version for each in registry.versions("interference")] == [SHIPPED]
    assert registry.broken("interference") == []


# -- demand -----------------------------------------------------------------------------------------------------------


def windows(program: str, start: float, ticks: int = 90) -> list[dict[str, Any]]:
    """Rows of a job whose utilisation repeats itself every twelve windows."""
    rng = np.random.default_rng(len(program))
    rows = []
    for tick in range(ticks):
        util = 0.8 if tick % 12 < 8 else 0.2
        signature = Signature(
            job_id=f"job-{program}",
            gpu_id="gpu-0",
            start_s=start + tick,
            window_s=1.0,
            samples=10,
            util_mean=util + float(rng.normal(0.0, 0.02)),
            util_peak=1.0,
            memory_bytes=1e9 + 1e8 * (tick % 12 < 8),
            memory_peak_bytes=2e9,
            step_rate=1.0,
            throttled_fraction=0.0,
            host_cores=1.0,
            neighbours=0,
            compute_share=1.0,
        )
        rows.append(to_row(signature) | {"fingerprint": program})
    return rows


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    writer = SignatureStore(root, 30.0, 1 << 30)
    for number, program in enumerate(("a", "bb", "ccc")):
        writer.write("host", windows(program, time.time() - 1000.0 + 200.0 * number))
    return root


def demand(registry: Path, store: Path, *more: str) -> int:
    return retrain.main(
        ["--kind", "demand", "--registry", str(registry), "--store", str(store), "--updates", "3", *more]
    )


def test_demand_is_learnt_from_the_store(
    registry: Registry, store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrain, "TrainingOptions", partial(retrain.TrainingOptions, trees=75))
    assert demand(registry.root, store) == 0
    line = told(capsys)
    assert set(line["candidate"]) == set(line["active"]) == {"util: MAE / persistence", "memory: MAE / persistence"}
    assert sum(line["candidate"].values()) <= sum(line["active"].values())
    assert line["adopted"], line["reason"]
    assert registry.active("demand") == line["version"] is not None
    assert {each.kind for each in load_demand(registry, line["version"]).util} == {"gru", "tcn", "trees"}
    assert demand(registry.root, store) == 0
    assert "nothing was recorded since" in told(capsys)["reason"]


@pytest.mark.parametrize(
    ("candidate", "untrained", "active", "reason"),
    [
        (1.01, 1.0, None, "worse than the untrained mixture"),
        (1.006, 1.0, 1.05, "worse than the untrained mixture"),  # though better than what is active
        (1.006, 1.05, 1.0, "worse than 2026"),
    ],
)
def test_demand_that_is_worse_than_what_serves_or_than_nothing_trained_is_not_adopted(
    *,
    registry: Registry,
    store: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    candidate: float,
    untrained: float,
    active: float | None,
    reason: str,
) -> None:
    asked: list[int] = []

    def figures(folds: list[object]) -> SimpleNamespace:
        """Of the candidate first and then, where there is one, of what is active: for both quantities."""
        asked.append(len(folds))
        theirs = active is not None and len(asked) % 2 == 0
        return SimpleNamespace(
            metrics={candidates.RELATIVE: active if theirs else candidate},
            baselines={f"{candidates.UNTRAINED}, {candidates.RELATIVE}": untrained},
        )

    monkeypatch.setattr(candidates, "combined", figures)
    monkeypatch.setattr(candidates, "fit_demand", lambda *_: {})
    version = None
    if active is not None:
        monkeypatch.setattr(retrain, "load_demand", lambda *_: DemandExperts((), ()))
        version = add_trees(registry)
        registry.activate("demand", version)
    assert demand(registry.root, store) == 0
    line = told(capsys)
    assert (line["adopted"], line["version"]) == (False, None)
    assert line["reason"].startswith(reason)
    assert registry.active("demand") == version


def own_rate(name: str) -> float:
    """Steps per second, from 10 to 100, that are a job's own."""
    return float(10.0 ** (1 + int(sha256(name.encode()).hexdigest()[:6], 16) / 16**6))


@pytest.mark.parametrize(("mode", "kinds"), [("mps", {"shares"}), ("timeslice", {"queue", "fair"})])
def test_how_the_gpus_are_shared_is_found_out(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, kinds: set[str]
) -> None:
    pairs = []
    for each in here():
        jobs = [replace(job, solo_step_rate=own_rate(job.fingerprint)) for job in (each.focal, *each.others)]
        u, v = (np.array(job.util_mean) for job in jobs)
        ratio = np.log(own_rate(jobs[1].fingerprint) / own_rate(jobs[0].fingerprint))
        n = float(shares(u, v, ratio, SHARES_START) if mode == "mps" else queue(u, v, np.array(0.0)))
        pairs.append(replace(each, focal=jobs[0], others=(jobs[1],), throughput=n, low=0.99 * n, high=n))
    save_observations(tmp_path / "pairs.jsonl", pairs)
    assert run(registry.root, tmp_path / "pairs.jsonl") == 0
    line = told(capsys)
    assert line["adopted"], line["reason"]
    assert load_interference(registry, line["version"]).models["gpu-x"].physics.kind in kinds


def test_demand_of_too_few_programs(registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "store").mkdir()
    assert demand(registry.root, tmp_path / "store") == 3
    assert "needed are at least 3" in told(capsys)["reason"]


def test_a_store_that_is_not_there(registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demand(registry.root, tmp_path / "none") == 1
    assert "none" in capsys.readouterr().err
