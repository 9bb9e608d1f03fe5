"""The helper processes of a workload: a loader that reads a slow storage, cart-poles, and the clients of a service.

`processes.Helper` runs this file as a script. It needs the standard library only, so a helper starts in some hundredths
of a second and weighs 10 MiB. A helper waits for orders on standard input, really sleeps where its owner's input would
be slow, and ends with its owner.
"""

from __future__ import annotations

import ctypes
import heapq
import json
import math
import mmap
import os
import random
import select
import signal
import struct
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

BURST_S = 0.002  # how much unused time a storage may save up
JITTER = 0.1  # reads, environment steps and think times vary by this fraction
REQUEST = struct.Struct("<H")  # the number of a request
FELL, ENDED = 1, 2  # flags of one cart-pole after a step

_ORDERS, _ANSWERS = 0, 1  # standard input and output
_PR_SET_PDEATHSIG = 1

_GRAVITY = 9.8  # m/s²
_CART_KG, _POLE_KG = 1.0, 0.1
_HALF_POLE_M = 0.5
_FORCE_N = 10.0
_TICK_S = 0.02
_TRACK_M = 2.4
_FALLEN = math.radians(12.0)
_LONGEST_EPISODE = 500  # steps


class TokenBucket:
    """Holds a storage to its rate in the long run. A read may put the bucket into debt and then has to wait.

    Args:
        rate: Samples per second.
        burst: Samples that can be saved up while nobody reads.
        now: The time in seconds, of any monotonic clock.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._seen = now

    def wait_s(self, samples: float, now: float) -> float:
        """Take ``samples`` at the time ``now``; how many seconds the reader has to wait for them."""
        earned = (now - self._seen) * self._rate
        self._seen = now
        self._level = min(self._burst, self._level + earned) - samples
        return max(0.0, -self._level / self._rate)


class CartPole:
    """One cart that balances a pole.

    The equations are those of Barto, Sutton and Anderson (1983) in the form of Florian, "Correct equations for the
    dynamics of the cart-pole system" (2007), without friction, integrated by Euler's method.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._restart()

    def _restart(self) -> None:
        self.state = [self._rng.uniform(-0.05, 0.05) for _ in range(4)]
        self._age = 0

    def step(self, right: bool) -> int:
        """Push the cart; ``state`` is then the next one, of a new episode where this one ended. Returns the flags."""
        place, speed, angle, spin = self.state
        sine, cosine = math.sin(angle), math.cos(angle)
        total = _CART_KG + _POLE_KG
        drive = ((_FORCE_N if right else -_FORCE_N) + _POLE_KG * _HALF_POLE_M * spin * spin * sine) / total
        turn = (_GRAVITY * sine - cosine * drive) / (_HALF_POLE_M * (4.0 / 3.0 - _POLE_KG * cosine * cosine / total))
        push = drive - _POLE_KG * _HALF_POLE_M * turn * cosine / total
        self.state = [
            place + _TICK_S * speed,
            speed + _TICK_S * push,
            angle + _TICK_S * spin,
            spin + _TICK_S * turn,
        ]
        self._age += 1
        flags = 0
        if abs(self.state[0]) > _TRACK_M or abs(self.state[2]) > _FALLEN:
            flags = FELL | ENDED
        elif self._age >= _LONGEST_EPISODE:
            flags = ENDED
        if flags:
            self._restart()
        return flags


def load(*, shared_fd: int, slots: int, batch: int, record_bytes: int, records: int, rate: float, seed: int) -> None:
    """Fill slots of shared memory with randomly drawn records of a storage that gives ``rate`` samples per second.

    Args:
        shared_fd: Memory for ``slots`` batches of ``batch`` records of ``record_bytes`` bytes each.
        slots: How many batches the memory holds.
        batch: Samples per batch.
        record_bytes: Bytes per sample.
        records: How many different samples the storage holds.
        rate: Samples per second, ± 10 % from read to read.
        seed: Seed of the records, of their order and of the variation.
    """
    rng = random.Random(seed)
    storage = memoryview(rng.randbytes(records * record_bytes))
    shared = memoryview(mmap.mmap(shared_fd, slots * batch * record_bytes))
    bucket = TokenBucket(rate, burst=rate * BURST_S, now=time.monotonic())
    while order := os.read(_ORDERS, 1):  # one byte: the slot to fill
        place = order[0] * batch * record_bytes
        for _ in range(batch):
            record = rng.randrange(records) * record_bytes
            shared[place : place + record_bytes] = storage[record : record + record_bytes]
            place += record_bytes
        price = batch * rng.uniform(1.0 - JITTER, 1.0 + JITTER)
        time.sleep(bucket.wait_s(price, time.monotonic()))
        os.write(_ANSWERS, order)


def play(count: int, latency_s: float, seed: int) -> None:
    """Play ``count`` cart-poles; a step of all takes ``latency_s`` ± 10 %, as a simulator's or a robot's does.

    An order is one byte per pole (1 pushes right). An answer is four floats per pole (position, speed, angle, angular
    speed) and then a byte of flags per pole. The first answer comes unasked.
    """
    rng = random.Random(seed)
    poles = [CartPole(rng) for _ in range(count)]
    flags = bytes(count)
    while True:
        states = array("f", [value for pole in poles for value in pole.state])
        _write_all(states.tobytes() + flags)
        actions = _read_exactly(count)
        if not actions:
            return
        time.sleep(latency_s * rng.uniform(1.0 - JITTER, 1.0 + JITTER))
        flags = bytes(pole.step(action == 1) for pole, action in zip(poles, actions, strict=True))


def ask_and_think(clients: int, think_s: float, seed: int) -> None:
    """Clients that ask, wait for the answer, think for ``think_s`` ± 10 % and ask again (a closed loop)."""
    rng = random.Random(seed)
    begin = time.monotonic()
    thinking = [(begin + think_s * client / clients, client) for client in range(clients)]
    while True:
        now = time.monotonic()
        while thinking and thinking[0][0] <= now:
            os.write(_ANSWERS, REQUEST.pack(heapq.heappop(thinking)[1]))
        answered = _answers(max(0.0, thinking[0][0] - time.monotonic()) if thinking else None)
        if answered is None:
            return
        for client in answered:
            pause = think_s * rng.uniform(1.0 - JITTER, 1.0 + JITTER)
            heapq.heappush(thinking, (time.monotonic() + pause, client))


def arrive(rate: float, most_waiting: int, seed: int) -> None:
    """Requests that arrive ``rate`` times per second whatever the service does (an open loop).

    Gaps vary evenly by ± 50 %. While ``most_waiting`` requests wait for an answer, further ones are turned away.
    """
    rng = random.Random(seed)
    number = waiting = 0
    due = time.monotonic()
    while True:
        now = time.monotonic()
        while due <= now and waiting < most_waiting:
            os.write(_ANSWERS, REQUEST.pack(number))
            number = (number + 1) % 65536
            waiting += 1
            due += rng.uniform(0.5, 1.5) / rate
        full = waiting == most_waiting
        answered = _answers(None if full else max(0.0, due - time.monotonic()))
        if answered is None:
            return
        waiting -= len(answered)
        if full:  # what arrived in the meantime was turned away
            due = max(due, time.monotonic() + rng.uniform(0.5, 1.5) / rate)


def _answers(timeout_s: float | None) -> list[int] | None:
    """The numbers of the requests answered within the time, perhaps none; None when the owner has ended."""
    if not select.select([_ORDERS], [], [], timeout_s)[0]:
        return []
    content = os.read(_ORDERS, REQUEST.size * 1024)
    return [number for (number,) in REQUEST.iter_unpack(content)] if content else None


def _read_exactly(size: int) -> bytes:
    """``size`` bytes of orders; none when the owner has ended."""
    content = b""
    while len(content) < size:
        more = os.read(_ORDERS, size - len(content))
        if not more:
            return b""
        content += more
    return content


def _write_all(content: bytes) -> None:
    while content:
        content = content[os.write(_ANSWERS, content) :]


def _settle(owner: int, cores: list[int]) -> None:
    """End with the owner, leave Ctrl-C to it, and run on ``cores``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != owner:  # it ended before it could be followed
        sys.exit()
    os.sched_setaffinity(0, cores)


ROLES: dict[str, Callable[..., None]] = {"load": load, "play": play, "ask_and_think": ask_and_think, "arrive": arrive}


def main() -> None:
    """Do what the only argument says: a JSON object with the owner's pid, the cores, the role and its arguments."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    _settle(order["owner"], order["cores"])
    try:
        ROLES[order["role"]](**order["arguments"])
    except BrokenPipeError:  # the owner has closed its end, which is how a helper ends
        return


if __name__ == "__main__":
    main()
