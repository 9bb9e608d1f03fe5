"""Alibaba's pods on Alibaba's hosts: how much of the GPUs is allocated once 130 % of them were asked for.

The snapshot of FGD's authors (USENIX ATC '23): pods drawn from the trace in random order are allocated one by one and
stay, until what was asked adds up to 130 % of the GPUs. A pod asks for processors, memory, and a part of one GPU or
several whole ones. Everybody gets the same pods in the same order, knows the same and keeps the same limits. Pods
without a GPU go, under every method, to the host with the most processors left for each GPU it has left.

Ours is the shipped placement: the part is a guarantee of compute, nobody slows anybody down, the processors are the
hint ``cpus``; hosts without the memory are closed to the pod, since hosts' memory is nothing cotenant knows. What is
typically asked for it learns as the pods come; FGD is told that of the whole trace beforehand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from common import Row
from numpy.typing import NDArray
from peers_work import Selection

from cotenant.configs.settings import PlacementSettings
from cotenant.forecasting.profiles import from_hints
from cotenant.forecasting.types import DemandProfile, ThroughputPrediction
from cotenant.placement.engine import policy
from cotenant.placement.mix import Mix, worth_of
from cotenant.placement.room import kind_of
from cotenant.placement.statement import Statement
from cotenant.placement.types import GpuView, Placement, Request
from cotenant.scheduler.simulation.published import cpus_of, openb_nodes
from cotenant.scheduler.simulation.rows import read_table

ASKED = 1.3  # of the GPUs there are
MEMORY = 1 << 30  # of every GPU; the trace does not say what pods use
PART_OF_MEMORY = MEMORY // 48
PUBLISHED = {"Random": 87.5, "GpuPacking": 92.0, "BestFit": 93.1, "FGD": 95.4}
QUICK_STEP = 20
SEEDS = 3
CUT_BEST = "parts cut from as few GPUs as possible"
CASE = "openb, 130 % of 6,212 GPUs asked for"
NO_INTERFERENCE = ThroughputPrediction(1.0, 1.0, 1.0, "guaranteed")
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pod:
    """What a pod asks for: ``cpu`` processors and ``memory`` MiB in all, ``part`` of each of its GPUs."""

    cpu: float
    memory: float
    gpus: int
    part: float
    cpus: float  # processors for each GPU


@dataclass(slots=True)
class Hosts:
    """The hosts: processors, memory (MiB), and what is free of each GPU, shape (hosts, 8), -1 where there is none."""

    cpu: Numbers
    memory: Numbers
    free: Numbers

    def able(self, pod: Pod) -> NDArray[np.int64]:
        """Return the hosts that can take the pod."""
        fits = (self.cpu >= pod.cpu - 1e-6) & (self.memory >= pod.memory)
        return np.flatnonzero(fits & ((self.free >= pod.part - 1e-6).sum(axis=1) >= pod.gpus))

    def take(self, pod: Pod, host: int, gpus: Sequence[int]) -> None:
        """Allocate the pod."""
        self.cpu[host] -= pod.cpu
        self.memory[host] -= pod.memory
        self.free[host, list(gpus)] = np.round(self.free[host, list(gpus)] - pod.part, 6)


Choose = Callable[[Hosts, Pod, NDArray[np.int64]], tuple[int, list[int]]]
"""Picks one of the able hosts, and GPUs of it."""


class Guaranteed:
    """Nobody slows anybody down: everybody has the compute it was promised."""

    name = "guaranteed"

    def predict(self, members: list[DemandProfile], gpu_type: str) -> list[ThroughputPrediction]:
        """See ``InterferencePredictor.predict``."""
        return [NO_INTERFERENCE] * len(members)


def pods(selection: Selection) -> list[Pod]:
    """Return the pods of the trace, those without a GPU too: they take processors."""
    path = selection.data / "traces" / "alibaba" / "openb_pod_list_default.csv.gz"
    found = []
    for row in read_table(path):
        gpus, part = row.whole("num_gpu"), row.number("gpu_milli") / 1000.0
        cpu, cpus = row.number("cpu_milli") / 1000.0, (cpus_of(row) or 0.0) if gpus else 0.0
        found.append(Pod(cpu, row.number("memory_mib"), gpus, part, cpus))
    return found


# -- baselines ------------------------------------------------------------------------------------------------------


def tightest(hosts: Hosts, pod: Pod, host: int) -> list[int]:
    """Return the GPUs of the host where least is left over."""
    fitting = np.flatnonzero(hosts.free[host] >= pod.part - 1e-6)
    found: list[int] = fitting[np.argsort(hosts.free[host, fitting], kind="stable")][: pod.gpus].tolist()
    return found


def best_fit(hosts: Hosts, pod: Pod, able: NDArray[np.int64]) -> tuple[int, list[int]]:
    """The host with the least left of GPUs, processors and memory together, each against the largest host."""
    left = np.maximum(hosts.free[able], 0.0).sum(axis=1) / 8.0 + hosts.cpu[able] / 128.0 + hosts.memory[able] / 1e6
    host = int(able[left.argmin()])
    return host, tightest(hosts, pod, host)


def packing(hosts: Hosts, pod: Pod, able: NDArray[np.int64]) -> tuple[int, list[int]]:
    """Shared GPUs before idle ones, used hosts before empty ones, and the GPU with the least left over."""
    free = hosts.free[able]
    fitting = np.where(free >= pod.part - 1e-6, free, np.inf)
    least = np.sort(fitting, axis=1)[:, max(pod.gpus, 1) - 1]
    used = ((free >= 0.0) & (free < 1.0)).any(axis=1)
    order = np.lexsort((hosts.cpu[able], least, ~used, least >= 1.0))
    host = int(able[order[0]])
    return host, tightest(hosts, pod, host)


def at_random(rng: np.random.Generator) -> Choose:
    """Return a method that takes any host and GPUs that fit."""

    def choose(hosts: Hosts, pod: Pod, able: NDArray[np.int64]) -> tuple[int, list[int]]:
        host = int(rng.choice(able))
        return host, rng.permutation(np.flatnonzero(hosts.free[host] >= pod.part - 1e-6))[: pod.gpus].tolist()

    return choose


class Fgd:
    """Fragmentation gradient descent (Weng et al., USENIX ATC '23): where the expected fragments grow least.

    Free GPUs are fragments for a kind of pod that its host cannot take; on a host that can, those with less free than
    the pod needs are. ``known``: the pods whose frequencies weigh the kinds.
    """

    def __init__(self, known: Sequence[Pod]) -> None:
        counts: dict[tuple[float, int, float], int] = {}
        for pod in known:
            if pod.gpus:
                counts[pod.cpu, pod.gpus, pod.part] = counts.get((pod.cpu, pod.gpus, pod.part), 0) + 1
        table = np.array(list(counts))
        self._cpu, self._gpus, self._part = table.T[:, :, None]
        self._weight = np.array(list(counts.values())) / sum(counts.values())

    def fragments(self, cpu: Numbers, free: Numbers) -> Numbers:
        """Return the expected fragments, shape (cases,), of hosts with so much left."""
        fits = free >= self._part[:, :, None] - 1e-6
        free = np.maximum(free, 0.0)
        can = (fits.sum(axis=2) >= self._gpus) & (cpu >= self._cpu - 1e-6)
        lost = np.where(fits, 0.0, free).sum(axis=2)
        found: Numbers = self._weight @ np.where(can, lost, free.sum(axis=1))
        return found

    def __call__(self, hosts: Hosts, pod: Pod, able: NDArray[np.int64]) -> tuple[int, list[int]]:
        """Choose."""
        _, alike = np.unique(np.column_stack([np.sort(hosts.free[able]), hosts.cpu[able]]), axis=0, return_index=True)
        cases = []
        for host in able[np.sort(alike)].tolist():
            if pod.gpus > 1:
                cases.append((host, tightest(hosts, pod, host)))
                continue
            fitting = np.flatnonzero(hosts.free[host] >= pod.part - 1e-6)
            _, first = np.unique(hosts.free[host, fitting], return_index=True)
            cases.extend((host, [gpu]) for gpu in fitting[first].tolist())
        at = np.array([host for host, _ in cases])
        free = hosts.free[at].copy()
        for row, (_, gpus) in enumerate(cases):
            free[row, gpus] -= pod.part
        grown = self.fragments(hosts.cpu[at] - pod.cpu, free) - self.fragments(hosts.cpu[at], hosts.free[at])
        left = free[np.arange(len(cases)), [gpus[0] for _, gpus in cases]]
        return cases[int(np.lexsort((hosts.cpu[at], left, np.round(grown, 9)))[0])]


# -- ours -----------------------------------------------------------------------------------------------------------


class Ours:
    """The shipped placement."""

    def __init__(self, views: Sequence[GpuView], places: Sequence[tuple[int, int]]) -> None:
        self._statement, self._told, self._mix = Statement(views), Guaranteed(), Mix()
        self._places = {view.gpu_id: place for view, place in zip(views, places, strict=True)}
        self._host_of = np.array([host for host, _ in places])
        self._settings = PlacementSettings(max_jobs_per_gpu=48, memory_margin=0.0)
        self._number = 0

    def __call__(self, hosts: Hosts, pod: Pod, able: NDArray[np.int64]) -> tuple[int, list[int]] | None:
        """Choose among all hosts with the memory; None when the placement finds none."""
        self._number += 1
        fleet = self._statement.fleet
        fleet.schedulable[:] = (hosts.memory >= pod.memory)[self._host_of]
        request = Request(
            f"pod-{self._number}",
            pod.gpus,
            PART_OF_MEMORY,
            pod.part,
            from_hints(pod.part, PART_OF_MEMORY),
            1e6,
            exclusive=pod.part >= 1.0,
            cpus=pod.cpus,
        )
        self._mix.note(kind_of(request, MEMORY))
        fleet.demand = self._mix.demand()
        answer = policy("cotenant").place(request, fleet, self._told, self._settings, len(fleet))
        if not isinstance(answer, Placement):
            return None
        self._statement.place(request, answer)
        chosen = [self._places[share.gpu_id] for share in answer.shares]
        return chosen[0][0], [gpu for _, gpu in chosen]

    def give(self, host: int, cpu: float) -> None:
        """Note that a pod without a GPU has so many of the host's processors."""
        self._statement.fleet.kept[host] += round(cpu * 1000.0)


Make = Callable[[Sequence[GpuView], Sequence[tuple[int, int]], Sequence[Pod], np.random.Generator], Choose | Ours]
METHODS: Mapping[str, Make] = {
    "random": lambda _views, _places, _asked, rng: at_random(rng),
    "packing": lambda _views, _places, _asked, _rng: packing,
    "best fit": lambda _views, _places, _asked, _rng: best_fit,
    "FGD": lambda _views, _places, asked, _rng: Fgd(asked),
    "cotenant": lambda views, places, _asked, _rng: Ours(views, places),
}


def allocated(selection: Selection, asked: Sequence[Pod], method: str, seed: int) -> float:
    """Place pods in random order until 130 % are asked for; return the fraction of the GPUs that is allocated."""
    path = selection.data / "traces" / "alibaba" / "openb_node_list_gpu_node.csv.gz"
    memory = [row.number("memory_mib") for row in read_table(path)]
    step = QUICK_STEP if selection.quick else 1
    nodes = openb_nodes(path, MEMORY).nodes[::step]
    free = np.array([[1.0] * node.gpus + [-1.0] * (8 - node.gpus) for node in nodes])
    hosts = Hosts(np.array([node.cpus or 0.0 for node in nodes]), np.array(memory[::step]), free)
    places = [(number, gpu) for number, node in enumerate(nodes) for gpu in range(node.gpus)]
    views = [
        GpuView(f"{nodes[host].name}/{gpu}", nodes[host].name, nodes[host].gpu_type, MEMORY, host_cpus=nodes[host].cpus)
        for host, gpu in places
    ]
    choose = METHODS[method](views, places, asked, np.random.default_rng(seed))
    rng, total = np.random.default_rng(seed), len(views)
    wanted = held = 0.0
    while True:
        for number in rng.permutation(len(asked)).tolist():
            pod = asked[number]
            wanted += pod.gpus * pod.part
            able = hosts.able(pod)
            if not pod.gpus and len(able):
                left = np.maximum(hosts.free[able], 0.0).sum(axis=1)
                host = int(able[((hosts.cpu[able] - pod.cpu) / (left + 1.0)).argmax()])
                hosts.take(pod, host, [])
                if isinstance(choose, Ours):
                    choose.give(host, pod.cpu)
            elif pod.gpus and len(able):
                chosen = choose(hosts, pod, able)
                if chosen is not None:
                    hosts.take(pod, *chosen)
                    held += pod.gpus * pod.part
            if wanted >= ASKED * total:
                if hosts.cpu.min() < -0.1 or hosts.memory.min() < 0.0 or hosts.free[hosts.free > -1.0].min() < -1e-6:
                    raise AssertionError(f"{method}: a host holds more than it has")
                return held / total


def cut_best(asked: Sequence[Pod]) -> float:
    """Return what can be allocated when the parts are asked for as in the trace, and cut from as few GPUs as possible.

    Processors and the order of the pods do not matter to it. (By duality the fewest GPUs are the worth of the parts.)
    """
    parts: dict[int, float] = {}
    for pod in asked:
        size = round(pod.part * 100.0)
        if pod.gpus == 1 and size < 100:
            parts[size] = parts.get(size, 0.0) + 1.0
    worth, wanted = worth_of(parts), sum(pod.gpus * pod.part for pod in asked)
    over = sum(count * (float(worth[size]) - size / 100.0) for size, count in parts.items())
    return wanted / (wanted + over)


def openb(selection: Selection) -> Iterator[Row]:
    """What FGD's authors publish, and what every method reaches here."""
    case = selection.named(CASE, f"every {QUICK_STEP}th host of")
    for name, percent in () if selection.quick else PUBLISHED.items():
        yield Row(case, f"{name}, as published", "GPUs allocated", percent / 100.0, "1")
    asked = pods(selection)
    if selection.wants(case, CUT_BEST):
        yield Row(case, CUT_BEST, "GPUs allocated", cut_best(asked), "1")
    for method in METHODS:
        if not selection.wants(case, method):
            continue
        found = []
        for seed in range(1 if selection.quick else SEEDS):
            found.append(allocated(selection, asked, method, seed))
            print(f"{case}: {method}, seed {seed}: {found[-1]:.4f}", file=sys.stderr, flush=True)
        spread = float(np.std(found)) if len(found) > 1 else None
        goal = ">= 0.96" if method == "cotenant" and not selection.quick else None
        yield Row(case, method, "GPUs allocated", float(np.mean(found)), "1", spread, goal=goal)
