"""Leases in Ray programs on one real host with two cpu devices: actors, Tune, Train, loss, the example."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import support
from ray import cloudpickle
from support import alive, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

# Ray's workers cannot import the tests.
for module in (sys.modules[__name__], support):
    cloudpickle.register_pickle_by_value(module)

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_program.py"


def make_trainer() -> Any:
    """A small real training loop: returns a function that makes one step of about a millisecond."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, target = torch.randn(256, 64), torch.randn(256, 1)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()

    return step


class CountedSleep:
    """Counts the sleeps of this thread; the shim holds a program to its share by sleeping in the optimizer's hook."""

    def __init__(self) -> None:
        self.count = 0
        self._sleep, self._thread = time.sleep, threading.get_ident()

    def __call__(self, seconds: float) -> None:
        self.count += threading.get_ident() == self._thread
        self._sleep(seconds)


def trial(config: dict[str, Any]) -> dict[str, Any]:
    """Trains under a lease until it has been measured and all three trials run, then a little without a lease."""
    import resource

    import cotenant

    step = make_trainer()
    time.sleep = sleep = CountedSleep()  # type: ignore[assignment]
    everywhere = os.sched_getaffinity(0)
    with (
        cotenant.lease(here=True, compute=0.4, gpu_memory="300MiB", max_slowdown=5.0) as lease,
        cotenant.connect() as c,
    ):
        seen: dict[str, Any] = {"job_id": lease.job_id, "gpu_id": lease.shares[0].gpu_id}
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for _ in range(100):
                step()
            usage = c.job(lease.job_id).usage
            running = [view for view in c.jobs(active_only=True) if view.state == "RUNNING"]
            seen["together"] = max(seen.get("together", 0), len(running))
            if usage and usage.step_rate and seen["together"] == 3:
                seen |= {"step_rate": usage.step_rate, "controls": usage.controls}
                seen["granted"] = [gpu.compute_granted for gpu in c.gpus()]  # one look: shares move meanwhile
                Path(config["barrier"], lease.job_id).touch()
            if len(list(Path(config["barrier"]).iterdir())) == 3:
                break
        seen["inside"] = sorted(os.sched_getaffinity(0))
    sleep.count = 0
    for _ in range(200):
        step()
    unlimited = resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    return {
        **seen,
        "sleeps_after": sleep.count,
        "everywhere_again": os.sched_getaffinity(0) == everywhere,
        "unlimited": unlimited,
    }


def test_tune_trials_share_devices_and_go_on_unthrottled_after_their_lease(single, tmp_path):
    from ray import tune

    barrier = tmp_path / "barrier"
    barrier.mkdir()
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 0.5}),
        param_space={"barrier": str(barrier), "lr": tune.grid_search([1, 2, 3])},
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    )
    results = tuner.fit()
    assert not results.errors
    seen = [result.metrics for result in results]
    assert {one["together"] for one in seen} == {3}, "all three hold a lease at the same time"
    assert len({one["gpu_id"] for one in seen}) == 2, "they share two devices"
    assert all(granted <= 1.0 + 1e-9 for one in seen for granted in one["granted"])
    for one in seen:
        assert one["step_rate"] > 1, one
        assert "held to the share" in one["controls"]
        assert len(one["inside"]) == 1, "the process is on its device"
        assert one["sleeps_after"] == 0, one
        assert one["everywhere_again"], one
        assert one["unlimited"], one
        ended = single.finish(single.client.job(one["job_id"]))
        assert (ended.state, ended.reason) == ("CANCELLED", "released")


def test_a_lease_taken_here_waits_until_this_host_has_room(single):
    import cotenant

    first = cotenant.lease(gpus=2, compute=0.7, gpu_memory="100MiB", isolation="hard")
    with pytest.raises(TimeoutError, match=r"no share within 1 s: .*waits"):
        cotenant.lease(here=True, compute=0.5, timeout_s=1.0)
    granted = threading.Event()

    def take() -> None:
        with cotenant.lease(compute=0.5, gpu_memory="100MiB"):
            granted.set()

    waiting = threading.Thread(target=take)
    waiting.start()
    assert not granted.wait(1.0)
    first.release()
    first.release()
    assert granted.wait(20), "it is granted when the other is released"
    waiting.join(20)
    with pytest.raises(cotenant.LeaseLost, match="released"):
        first.options()


def loop(config: dict[str, Any]) -> bool:
    """A data-parallel loop that ends when it is asked to, or ten steps after a checkpoint; returns whether it is done.

    Every rank writes down where it is, and what it does.
    """
    import tempfile

    import ray.train
    import ray.train.torch
    import torch

    from cotenant.actors.shim.reportfile import read_report
    from cotenant.checkpointing import stop_requested

    torch.set_num_threads(1)
    model = ray.train.torch.prepare_model(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, last, rank = 0, 1_000_000, ray.train.get_context().get_world_rank()
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            content = torch.load(f"{folder}/state.pt")
        model.load_state_dict(content["model"])
        step, last = content["step"], content["step"] + 10

    def weights() -> float:
        return sum(parameter.sum().item() for parameter in model.parameters())

    while step < last:
        before = weights()
        optimizer.zero_grad()
        model(torch.randn(256, 64)).square().mean().backward()
        optimizer.step()
        step += 1
        done = {"step": step, "before": before, "after": weights(), "epoch": os.environ["COTENANT_EPOCH"]}
        with Path(config["out"], f"steps-{rank}").open("a") as log:
            log.write(json.dumps(done) + "\n")
        if step == 21:
            report = read_report(f"{os.environ['COTENANT_JOB_DIR']}/report-{os.getpid()}")
            seen = {
                "pid": os.getpid(),
                "share": report.share_index if report else None,
                "cores": sorted(os.sched_getaffinity(0)),
                "backend": torch.distributed.get_backend(),
            }
            place = Path(config["out"], str(rank))
            place.with_suffix(".new").write_text(json.dumps(seen))
            place.with_suffix(".new").rename(place)
        if stop_requested():
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    torch.save({"model": model.state_dict(), "step": step}, f"{folder}/state.pt")
                kept = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
                ray.train.report({"step": step}, checkpoint=kept)
            return False
    return True


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
def test_train_workers_run_each_under_a_share_and_are_suspended_and_resumed_as_one(single, tmp_path):
    """When asked, both ranks save the same step and end; they go on from there, and no step is lost or made twice."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    import cotenant

    def work() -> str:
        with cotenant.lease(gpus=2, compute=0.4, gpu_memory="300MiB", checkpoint="own", grace=80) as lease:
            for _ in lease.terms():
                scaling, run = lease.train_options()
                trainer = TorchTrainer(
                    loop,
                    train_loop_config={"out": str(tmp_path)},
                    scaling_config=ScalingConfig(**scaling),
                    run_config=RunConfig(name="saves", storage_path=str(tmp_path / "train"), **run),
                )
                if trainer.fit().return_value:
                    return lease.job_id
        return "never done"

    def steps() -> list[list[dict[str, Any]]]:
        logs = [tmp_path / "steps-0", tmp_path / "steps-1"]
        return [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            ranks = [tmp_path / "0", tmp_path / "1"]
            wait_until(lambda: all(rank.exists() for rank in ranks) or working.done(), 90, "both ranks train")
            assert not working.done(), working.exception()
            seen = [json.loads(rank.read_text()) for rank in ranks]
            assert [one["backend"] for one in seen] == ["gloo", "gloo"]
            assert [one["share"] for one in seen] == [0, 1]
            assert len({tuple(one["cores"]) for one in seen}) == 2, "each rank is on its own device"
            [view] = single.client.jobs(active_only=True)
            wait_until(
                lambda: (
                    (usage := single.client.job(view.job_id).usage)
                    and usage.step_rate
                    and "2 processes train" in usage.controls
                ),
                30,
                f"the job's steps are counted ({single.client.job(view.job_id)})",
            )
            single.client.suspend(view.job_id)
            single.reach(view, "SUSPENDED", 80.0)
            for one in seen:
                wait_until(lambda pid=one["pid"]: not alive(pid), 15, "the workers have ended")
            assert all(view.job_id not in gpu.jobs for gpu in single.client.gpus())
            before = steps()
            single.client.resume(view.job_id)
            assert working.result(120) == view.job_id
        finally:
            single.settle()  # whoever waits for a term, or trains, is let go
    made = len(before[0])
    for done, after in zip(before, steps(), strict=True):
        assert after[:made] == done
        assert [one["step"] for one in after] == list(range(1, made + 11))
        assert [one["epoch"] for one in after] == ["1"] * made + ["2"] * 10
        assert all(one["after"] == two["before"] for one, two in itertools.pairwise(after)), "the weights continue"
    ended = single.client.job(view.job_id)
    assert (ended.reason, ended.restarts, ended.epoch) == ("released", 0, 2)


def leased_actor() -> Any:
    import ray

    @ray.remote
    class Trainer:
        def start(self) -> int:
            def train() -> None:
                step = make_trainer()
                while True:
                    step()

            threading.Thread(target=train, daemon=True).start()
            return os.getpid()

        def environment(self) -> dict[str, str]:
            return dict(os.environ)

    return Trainer


def test_a_leased_actor_is_measured_and_told_when_an_administrator_stops_its_lease(single):
    import ray
    from ray.exceptions import RayActorError

    import cotenant

    with cotenant.lease(compute=0.4, gpu_memory="300MiB") as lease:
        user_env = {"PYTHONPATH": "/users/own", "OMP_NUM_THREADS": "3", "MINE": "yes"}
        actor = leased_actor().options(**lease.options(runtime_env={"env_vars": user_env})).remote()
        environment = ray.get(actor.environment.remote(), timeout=60)
        assert environment["PYTHONPATH"].split(os.pathsep)[1:] == ["/users/own"]
        assert (environment["OMP_NUM_THREADS"], environment["MINE"]) == ("3", "yes")
        pid = ray.get(actor.start.remote(), timeout=60)
        wait_until(
            lambda: (
                (usage := single.client.job(lease.job_id).usage)
                and usage.step_rate
                and usage.util_mean
                and usage.memory_bytes
                and "held to the share" in usage.controls
            ),
            30,
            "the actor's steps, compute and memory are measured",
        )
        lease.check()
        single.client.stop(lease.job_id, "maintenance")
        wait_until(lambda: lease.lost, 10, "the holder is told")
        for use in (lease.check, lease.options, lease.attach, lambda: lease.shares):
            with pytest.raises(cotenant.LeaseLost, match="maintenance"):
                use()
        wait_until(lambda: not alive(pid), 15, "the leased actor ends with its lease")
        with pytest.raises(RayActorError):
            ray.get(actor.environment.remote(), timeout=20)


def test_a_process_that_attached_itself_outlives_a_lost_lease(single):
    import ray

    import cotenant

    @ray.remote(num_cpus=0)
    def guest() -> tuple[str, int]:
        step = make_trainer()
        with cotenant.lease(here=True, compute=0.5, gpu_memory="300MiB") as lease, cotenant.connect() as client:
            with pytest.raises(RuntimeError, match="already under a share"), cotenant.lease(here=True):
                pass
            step()
            client.stop(lease.job_id, "maintenance")
            client.wait(lease.job_id, 20)
            job_dir = Path(lease._attachment._marker).parent  # type: ignore[union-attr, arg-type]
            wait_until(lambda: not job_dir.exists(), 20, "the host forgets the lease")
            until = time.monotonic() + 1.5  # the shim looks around once a second
            while time.monotonic() < until:
                step()
            wait_until(lambda: lease.lost, 10, "the holder is told")
            return lease.lost or "", os.getpid()

    reason, pid = ray.get(guest.remote(), timeout=60)
    assert "maintenance" in reason
    assert alive(pid)


def test_an_error_in_the_block_comes_through_and_frees_the_lease(single):
    import cotenant

    with pytest.raises(ZeroDivisionError), cotenant.lease(compute=0.5, gpu_memory="100MiB") as lease:
        _ = 1 / 0
    assert single.finish(single.client.job(lease.job_id)).reason == "released"


def test_a_lease_that_nobody_refers_to_is_freed(single):
    import cotenant

    lease = cotenant.lease(compute=0.5, gpu_memory="100MiB")
    job_id = lease.job_id
    with pytest.warns(ResourceWarning, match=job_id):
        del lease
    assert "nobody refers" in single.finish(single.client.job(job_id), 20).reason


def test_arguments_and_pickling_are_refused_clearly(single):
    import pickle

    import cotenant

    with cotenant.lease(gpus=2, compute=0.3, gpu_memory="100MiB") as lease:
        for index in (2, -1, True, "0"):
            with pytest.raises(ValueError, match=r"index: .* is not accepted; give .* 0 to 1"):
                lease.options(index)
        for name in ("num_gpus", "scheduling_strategy", "label_selector"):
            with pytest.raises(ValueError, match=name):
                lease.options(**{name: 1})
        with pytest.raises(TypeError, match="belongs to the process that took it"):
            pickle.dumps(lease)


def test_the_example_runs(single, tmp_path):
    environment = {**os.environ, "RAY_ADDRESS": single.cluster.address}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.split(":")[0] for line in done.stdout.splitlines() if "(raylet)" not in line]  # it notes ended workers
    assert said == ["task", "actor", "Tune", "Train"], done.stdout + done.stderr
