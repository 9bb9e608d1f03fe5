"""One Ray program, four uses of a lease: a task, an actor, Tune trials and Train workers.

Start a cotenant first (``cotenant up --local --devices 2``), then run ``python examples/ray_program.py``.
While it runs, ``cotenant top`` shows the leases, their shares and what they use. See ``docs/ray-programs.md``.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from typing import Any

import ray
import ray.train.torch
import torch
from ray import train, tune

import cotenant

STEPS = 200


def fit(model: torch.nn.Module, lr: float = 0.1) -> float:
    """Teach a model to add up its inputs; returns the last loss. Nothing in here knows of cotenant."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loss = torch.zeros(())
    for _ in range(STEPS):
        batch = torch.randn(256, 8)
        loss = torch.nn.functional.mse_loss(model(batch), batch.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@ray.remote
def task() -> float:
    """Train once."""
    return fit(torch.nn.Linear(8, 1))


@ray.remote
class Trainer:
    """Keeps a model and trains it on when asked."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(8, 1)

    def more(self) -> float:
        """Train on."""
        return fit(self.model)


def trial(config: dict[str, Any]) -> dict[str, float]:
    """A Tune trial takes its lease itself: it waits until this host has a share, and gives it back at the end."""
    with cotenant.lease(here=True, compute=0.4, gpu_memory="300MiB"):
        return {"loss": fit(torch.nn.Linear(8, 1), config["lr"])}


def worker() -> float:
    """A Train worker: the share of its local rank holds it, wherever the loop comes from."""
    return fit(ray.train.torch.prepare_model(torch.nn.Linear(8, 1)))


def main() -> None:
    """Use leases in all four ways."""
    with cotenant.lease(compute=0.4, gpu_memory="300MiB", name="tasks and actors") as lease:
        print(f"task: loss {ray.get(task.options(**lease.options()).remote()):.4f}")
        actor = Trainer.options(**lease.options()).remote()
        ray.get(actor.more.remote())
        print(f"actor: loss {ray.get(actor.more.remote()):.4f}")

    with tempfile.TemporaryDirectory() as storage:
        tuner = tune.Tuner(
            tune.with_resources(trial, {"cpu": 0.5}),
            param_space={"lr": tune.grid_search([0.01, 0.1])},
            tune_config=tune.TuneConfig(metric="loss", mode="min"),
            run_config=tune.RunConfig(storage_path=storage, verbose=0),
        )
        print(f"Tune: best learning rate {tuner.fit().get_best_result().config['lr']}")

        with cotenant.lease(gpus=2, compute=0.4, gpu_memory="300MiB", name="train") as lease:
            scaling, run = lease.train_options()
            trainer = ray.train.torch.TorchTrainer(
                worker,
                scaling_config=train.ScalingConfig(**scaling, resources_per_worker={"CPU": 0.5}),
                run_config=train.RunConfig(storage_path=storage, **run),
            )
            print(f"Train: loss {trainer.fit().return_value:.4f} with {len(lease)} workers")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # Ray's own
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # Tune's tables are not wanted here
    with cotenant.connect():  # joins the cluster that runs cotenant
        logging.getLogger("ray").setLevel(logging.ERROR)
        main()
