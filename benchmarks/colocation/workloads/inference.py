"""The inference services: one answers each request by itself, the other gathers requests into batches."""

from __future__ import annotations

import select
import time

import torch
from benchmarks.colocation.workloads import models
from benchmarks.colocation.workloads.base import Place, Workload
from benchmarks.colocation.workloads.catalogue import Arrivals, Clients, Configuration
from benchmarks.colocation.workloads.convnets import ARCHITECTURES
from benchmarks.colocation.workloads.feeding import Transfer
from benchmarks.colocation.workloads.helper import REQUEST
from benchmarks.colocation.workloads.processes import Helper
from benchmarks.colocation.workloads.training import CHANNELS, image_network, images_of, tokens_of
from torch import Tensor, nn

CONTENTS = 32  # different requests
WAITING_BATCHES = 3  # batches of requests that may wait; further requests are turned away


class Service(Workload):
    """Waits for requests, answers up to ``batch`` of them at once. A step is one such answer."""

    def __init__(self, configuration: Configuration, place: Place, seed: int) -> None:
        super().__init__(configuration.describe(), place)
        self._batch, self._extent = configuration.batch, configuration.extent
        self._vocabulary = models.vocabulary(configuration.width)
        self._reads_images = configuration.architecture in ARCHITECTURES
        self._network = self._make(configuration, place).eval()
        record_bytes = CHANNELS * self._extent**2 if self._reads_images else 2 * self._extent
        rng = torch.Generator().manual_seed(seed)
        self._contents = torch.randint(0, 256, (CONTENTS, record_bytes), dtype=torch.uint8, generator=rng)
        self._transfer = Transfer(place.torch_device, staged=place.staged)
        self._gather_s, self._clients = self._start(configuration, seed)

    def _make(self, configuration: Configuration, place: Place) -> nn.Module:
        if self._reads_images:
            return image_network(configuration, place)
        return place.put(models.Encoder(configuration.width, configuration.depth, self._extent))

    @staticmethod
    def _start(configuration: Configuration, seed: int) -> tuple[float, Helper]:
        """How long a batch may gather, and the process that sends requests."""
        match configuration.source:
            case Clients(count=count, think_s=think_s):
                return 0.0, Helper("ask_and_think", {"clients": count, "think_s": think_s, "seed": seed})
            case Arrivals(rate=rate, gather_s=gather_s):
                most = WAITING_BATCHES * configuration.batch
                return gather_s, Helper("arrive", {"rate": rate, "most_waiting": most, "seed": seed})
            case source:
                raise ValueError(f"source {source} is not accepted for a service; give Clients or Arrivals")

    def step(self) -> float:
        requests = self._gather()
        outputs = self._answer(self._transfer(self._contents[[number % CONTENTS for number in requests]]))
        self._clients.write(b"".join(REQUEST.pack(number) for number in requests))
        return float(outputs.mean())

    def _gather(self) -> list[int]:
        """The numbers of 1 to ``batch`` requests; waits for the first, and a while for the others."""
        content = self._clients.read(REQUEST.size * self._batch)
        until = time.monotonic() + self._gather_s
        while (missing := REQUEST.size * self._batch - len(content)) > 0:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._clients], [], [], left)[0]:
                break
            content += self._clients.read(missing)
        return [number for (number,) in REQUEST.iter_unpack(content)]

    @torch.inference_mode()
    def _answer(self, records: Tensor) -> Tensor:
        """The network's outputs for records on the device; on the host, (N, CLASSES)."""
        with self._place.precision():
            if self._reads_images:
                outputs = self._network(images_of(records, self._extent, self._place.memory_format()))
            else:
                outputs = self._network(tokens_of(records, self._extent, self._vocabulary))
        answers: Tensor = outputs.float().cpu()
        return answers

    def helper_pids(self) -> list[int]:
        return [self._clients.pid]

    def close(self) -> None:
        self._clients.close()
