"""A small storage server: serves training samples over a local socket at a limited rate, as remote storage does.

Every connection has a token bucket of its own, refilled at ``--rate`` samples per second. A read waits until its
samples are paid for; each read's price varies by ± 10 %. The training programs start a server by themselves; one can
also be started by hand and given to them with ``--storage``:

    python storage.py --dataset digits --rate 500
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from data import RECORDS, Bytes

JITTER = 0.1  # the price of a read varies by this fraction
BURST_S = 0.01  # how much unused time a connection may save up
MAX_READ = 65536  # samples

_HELLO = struct.Struct("<II")  # number of records, bytes of one record
_COUNT = struct.Struct("<I")


class TokenBucket:
    """Tells how long a read has to wait so that the rate holds in the long run. A read may run the bucket into debt.

    Args:
        rate: Samples per second.
        burst: Samples that can be saved up while nobody reads.
        now: The current time in seconds, of any monotonic clock.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._updated = now

    def take(self, samples: float, now: float) -> float:
        """Take ``samples`` at time ``now``; returns the seconds to wait before handing them out."""
        self._tokens = min(self._burst, self._tokens + (now - self._updated) * self._rate) - samples
        self._updated = now
        return max(0.0, -self._tokens / self._rate)


class StorageClient:
    """One connection to a storage server. Not to be shared by threads or processes.

    Args:
        address: ``HOST:PORT`` of the server.
        dataset: The expected data set; a server of something else is refused.

    Raises:
        ConnectionError: No server answers there, or it serves other data.
    """

    def __init__(self, address: str, dataset: str) -> None:
        host, port = split_address(address)
        try:
            self._socket = socket.create_connection((host, port))
        except OSError as error:
            raise ConnectionError(f"no storage server answers at {address}: {error}") from error
        self._file = self._socket.makefile("rb")
        name = self._file.readline(64).decode().strip()
        if name != dataset:
            self.close()
            raise ConnectionError(f"the storage server at {address} serves {name!r}, not {dataset!r}")
        self.records, self.record_bytes = _HELLO.unpack(self._exactly(_HELLO.size))

    def read(self, indices: np.ndarray) -> Bytes:
        """The records at ``indices``, (N, record_bytes); waits as long as the storage needs."""
        self._socket.sendall(_COUNT.pack(len(indices)) + indices.astype("<u4").tobytes())
        content = self._exactly(len(indices) * self.record_bytes)
        return np.frombuffer(bytearray(content), dtype=np.uint8).reshape(len(indices), self.record_bytes)

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        content = self._file.read(size)
        if len(content) < size:
            raise ConnectionError("the storage server closed the connection")
        return content


class _Connection(socketserver.StreamRequestHandler):
    server: StorageServer
    disable_nagle_algorithm = True

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the reader has ended, which is how reading ends
            self._serve()

    def _serve(self) -> None:
        records, rate = self.server.records, self.server.rate
        self.wfile.write(self.server.dataset.encode() + b"\n" + _HELLO.pack(*records.shape))
        bucket = TokenBucket(rate, burst=rate * BURST_S, now=time.monotonic())
        while len(head := self.rfile.read(_COUNT.size)) == _COUNT.size:
            (count,) = _COUNT.unpack(head)
            if count > MAX_READ:
                return
            indices = np.frombuffer(self.rfile.read(4 * count), dtype="<u4")
            if len(indices) < count or (count and indices.max() >= len(records)):
                return
            price = count * random.uniform(1.0 - JITTER, 1.0 + JITTER)
            time.sleep(bucket.take(price, time.monotonic()))
            self.wfile.write(records[indices].tobytes())


class StorageServer(socketserver.ThreadingTCPServer):
    """Serves one data set on a free local port.

    Args:
        dataset: A name in ``data.RECORDS``.
        rate: Samples per second and connection.
        port: The port; 0 takes a free one.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, dataset: str, rate: float, port: int = 0) -> None:
        self.dataset = dataset
        self.rate = rate
        self.records = RECORDS[dataset]()
        super().__init__(("127.0.0.1", port), _Connection)


@contextlib.contextmanager
def running_server(dataset: str, rate: float) -> Iterator[str]:
    """A storage server in a child process for the time of the context; yields its ``HOST:PORT``."""
    command = [sys.executable, str(Path(__file__)), "--dataset", dataset, "--rate", str(rate), "--owned"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            line = server.stdout.readline()
            if not line.startswith("listening on "):
                raise ConnectionError("the storage server did not start; its message is above")
            yield line.removeprefix("listening on ").strip()
        finally:
            server.kill()


def split_address(address: str) -> tuple[str, int]:
    """``HOST:PORT`` in its two parts; ValueError when it is not one."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{address!r} is not HOST:PORT, for example 127.0.0.1:9000")
    return host, int(port)


def _end_with_owner(server: StorageServer) -> None:
    sys.stdin.read()  # returns when the owner has closed its end, however it ended
    server.shutdown()


def main() -> None:
    """Serve until interrupted, or until the owner ends."""
    parser = argparse.ArgumentParser(description="Serve training samples at a limited rate.")
    parser.add_argument("--dataset", choices=sorted(RECORDS), required=True)
    parser.add_argument("--rate", type=float, required=True, help="samples per second and connection")
    parser.add_argument("--port", type=int, default=0, help="0 (the default) takes a free one")
    parser.add_argument("--owned", action="store_true", help="end when standard input closes, and not on a signal")
    args = parser.parse_args()
    if not 0 < args.rate < float("inf"):
        parser.error(f"argument --rate: {args.rate} is not accepted; give a number above 0")
    with StorageServer(args.dataset, args.rate, args.port) as server:
        if args.owned:
            # A signal to the whole process group must leave the owner its input until it has written its checkpoint.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            threading.Thread(target=_end_with_owner, args=(server,), daemon=True).start()
        print("listening on {}:{}".format(*server.server_address), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main()
