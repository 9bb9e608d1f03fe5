"""Alibaba's pods on Alibaba's hosts: how much of the GPUs is allocated once 130 % of them were asked for.

The snapshot of FGD's authors (USENIX ATC '23): pods drawn from the trace in random order are allocated one by one and
stay, until what was asked adds up to 130 % of the GPUs. A pod asks for processors, memory, perhaps a GPU type, and a
part of one GPU or several whole ones. Ours is the shipped placement: the part is a guarantee of compute, nobody slows
anybody down, hosts without the processors or the memory are closed to the pod.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from common import Row
from peers_work import Selection

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.profiles import from_hints
from cotenant.forecasting.types import DemandProfile, ThroughputPrediction
from cotenant.placement.engine import policy
from cotenant.placement.statement import Statement
from cotenant.placement.types import GpuView, Placement, Request
from cotenant.scheduler.simulation.traces import read_table

ASKED = 1.3  # of the GPUs there are
MEMORY = 1 << 30  # of every GPU; the trace does not say what pods use
PUBLISHED = {"Random": 87.5, "GpuPacking": 92.0, "BestFit": 93.1, "FGD": 95.4}
SEEDS = 2
CASE = "openb, 130 % of 6,212 GPUs asked for"
NO_INTERFERENCE = ThroughputPrediction(1.0, 1.0, 1.0, "guaranteed")


@dataclass(frozen=True, slots=True)
class Host:
    """What a host has: processors in 1/1000, memory in MiB, GPUs of one type."""

    name: str
    cpu: float
    memory: float
    gpus: int
    gpu_type: str


@dataclass(frozen=True, slots=True)
class Pod:
    """What a pod asks for; ``part`` of each of its GPUs. No types = any."""

    cpu: float
    memory: float
    gpus: int
    part: float
    types: tuple[str, ...]


class Guaranteed:
    """Nobody slows anybody down: everybody has the compute it was promised."""

    name = "guaranteed"

    def predict(self, members: list[DemandProfile], gpu_type: str) -> list[ThroughputPrediction]:
        """See ``InterferencePredictor.predict``."""
        return [NO_INTERFERENCE] * len(members)


def hosts(selection: Selection) -> list[Host]:
    """Return the hosts that have GPUs."""
    path = selection.data / "traces" / "alibaba" / "openb_node_list_gpu_node.csv.gz"
    return [
        Host(row.text("sn"), row.number("cpu_milli"), row.number("memory_mib"), row.whole("gpu"), row.text("model"))
        for row in read_table(path)
    ]


def pods(selection: Selection) -> list[Pod]:
    """Return the pods of the trace, those without a GPU too: they take processors."""
    path = selection.data / "traces" / "alibaba" / "openb_pod_list_default.csv.gz"
    found = []
    for row in read_table(path):
        types = tuple(each for each in str(row.fields.get("gpu_spec") or "").split("|") if each)
        part = row.number("gpu_milli") / 1000.0
        found.append(Pod(row.number("cpu_milli"), row.number("memory_mib"), row.whole("num_gpu"), part, types))
    return found


def allocated(cluster: list[Host], asked: list[Pod], seed: int) -> float:
    """Place pods in random order until 130 % are asked for; return the fraction of the GPUs that is allocated."""
    rng = np.random.default_rng(seed)
    total = sum(host.gpus for host in cluster)
    cpu, memory = np.array([h.cpu for h in cluster]), np.array([h.memory for h in cluster])
    kinds = np.array([h.gpu_type for h in cluster])
    views = [
        GpuView(f"{host.name}/{index}", host.name, host.gpu_type, MEMORY)
        for host in cluster
        for index in range(host.gpus)
    ]
    of_host = np.repeat(np.arange(len(cluster)), [host.gpus for host in cluster])
    engine, settings = policy("cotenant"), PlacementSettings(max_jobs_per_gpu=48, memory_margin=0.0)
    statement, told = Statement(views), Guaranteed()
    wanted = held = 0.0
    order = iter(rng.permutation(len(asked)))
    number = 0
    while wanted < ASKED * total:
        place = next(order, None)
        if place is None:
            order = iter(rng.permutation(len(asked)))
            continue
        pod, number = asked[int(place)], number + 1
        wanted += pod.gpus * pod.part
        able = (cpu >= pod.cpu) & (memory >= pod.memory)
        if pod.types:
            able &= np.isin(kinds, pod.types)
        if not pod.gpus:
            spots = np.flatnonzero(able)
            if len(spots):
                host = int(spots[np.argmin(cpu[spots])])
                cpu[host] -= pod.cpu
                memory[host] -= pod.memory
            continue
        statement.fleet.schedulable[:] = able[of_host]
        profile = from_hints(pod.part, MEMORY // 48)
        request = Request(f"pod-{number}", pod.gpus, MEMORY // 48, pod.part, profile, 1e6, exclusive=pod.part >= 1.0)
        answer = engine.place(request, statement.fleet, told, settings, total)
        if not isinstance(answer, Placement):
            continue
        statement.place(request, answer)
        host = int(of_host[statement.fleet.position(answer.shares[0].gpu_id)])
        cpu[host] -= pod.cpu
        memory[host] -= pod.memory
        held += pod.gpus * pod.part
    return held / total


def openb(selection: Selection) -> Iterator[Row]:
    """What FGD's authors publish, and ours."""
    for name, percent in PUBLISHED.items():
        yield Row(CASE, f"{name}, as published", "GPUs allocated", percent / 100.0, "1")
    if not selection.wants(CASE, "cotenant"):
        return
    cluster, asked = hosts(selection), pods(selection)
    if selection.quick:
        cluster = cluster[::20]
    found = [allocated(cluster, asked, seed) for seed in range(1 if selection.quick else SEEDS)]
    spread = float(np.std(found)) if len(found) > 1 else None
    yield Row(CASE, "cotenant", "GPUs allocated", float(np.mean(found)), "1", spread, goal=">= 0.96")
