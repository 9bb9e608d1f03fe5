"""Input from a storage server: through a loader process that reads ahead, or between the steps without one."""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Callable, Iterator

import numpy as np
import torch
from data import Bytes
from storage import StorageClient, running_server
from torch.utils.data import DataLoader, IterableDataset

Batch = tuple[torch.Tensor, ...]
Decode = Callable[[Bytes, np.random.Generator], Batch]


class StoredSamples(IterableDataset[Batch]):
    """An endless stream of batches of randomly drawn records.

    Args:
        address: ``HOST:PORT`` of the storage server.
        dataset: Its data set.
        decode: Makes tensors of records; gets a random generator for augmentation.
        records: How many records, from the first on, may be drawn.
        batch: Samples per batch.
        seed: Seed of the draw.
    """

    def __init__(self, address: str, dataset: str, decode: Decode, *, records: int, batch: int, seed: int) -> None:
        self._address = address
        self._dataset = dataset
        self._records = records
        self._batch = batch
        self._decode = decode
        self._seed = seed

    def __iter__(self) -> Iterator[Batch]:
        with contextlib.closing(StorageClient(self._address, self._dataset)) as client:
            rng = np.random.default_rng(self._seed)
            while True:
                yield self._decode(client.read(rng.integers(0, self._records, self._batch)), rng)


@contextlib.contextmanager
def input_stream(args: argparse.Namespace, dataset: str, records: int, decode: Decode) -> Iterator[Iterator[Batch]]:
    """Batches as the options say: own or given storage server, ``--prefetch`` batches ahead or none."""
    with contextlib.ExitStack() as stack:
        where = args.storage or stack.enter_context(running_server(dataset, args.storage_rate))
        samples = StoredSamples(where, dataset, decode, records=records, batch=args.batch, seed=args.seed)
        if args.prefetch == 0:
            yield iter(samples)
            return
        loader = DataLoader(
            samples, batch_size=None, num_workers=1, prefetch_factor=args.prefetch, worker_init_fn=_ignore_signals
        )
        yield iter(loader)


def _ignore_signals(_worker: int) -> None:
    # A signal to the whole process group is the training program's to answer; the loader ends with it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
