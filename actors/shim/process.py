"""The process that trains: counts its optimizer rounds and holds it to its share at each of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple, Union

from .bootstrap import OPERATOR_MIX, parse_cores
from .devices import CpuDevice, CudaDevice
from .operators import OperatorProfile
from .reportfile import Controls, ReportWriter, is_alive, read_reports
from .shareword import ShareReader, count_shares
from .still import held_still_s
from .throttle import Throttle

REFRESH_S = 1.0
POLL_S = 0.05
CPU = "cpu"
CUDA = "cuda"
_RECENT_S = 10.0


class Config(NamedTuple):
    """What the environment of a job says.

    Attributes:
        job_dir: The job's directory on this host.
        device_cores: For each of the job's shares on this host, the CPU cores of its device; none of a CUDA device.
        host_cores: Where helper processes may run; empty = where they do.
        share_index: The share to use when ``LOCAL_RANK`` does not say.
        operator_mix: Whether to profile a few steps now and then.
    """

    job_dir: str
    device_cores: tuple[frozenset[int], ...]
    host_cores: frozenset[int]
    share_index: int
    operator_mix: bool = False


class DeviceProcess:
    """This process' part of the job: its pin, its report, its share.

    Raises:
        OSError: The job directory cannot be used.
        ShareWordError: The share word cannot be read.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = threading.RLock()  # optimizers may step in several threads
        self._round: set[int] = set()
        self._steps = 0
        self._throttled_s = 0.0
        self._last_step_s = 0.0
        self._round_began_s = 0.0
        self._throttled_before_s = 0.0
        self._operators = OperatorProfile() if config.operator_mix else None
        self._controls = Controls(0)
        self._compute = 1.0
        self._peers = 1
        self._memory_bytes = 0
        self._refresh_at = 0.0
        self._still_s = held_still_s(config.job_dir, time.monotonic())
        self._use_share(_share_index(config))
        self._throttle = Throttle(cpu_clock=self._device.clock)
        if self._device.limits_early:
            self._load_share()
            self._limit_memory()
        self._publish()

    def on_step(self, optimizer: object) -> None:
        """Take note of one optimizer step and, when the share is used up, wait until it is not."""
        with self._lock:
            now = time.monotonic()
            due = now >= self._refresh_at or self._share.changed()
            if due:
                self._newly_still(now)
            if self._count(optimizer):
                self._note_round(now)
            self._last_step_s = now
            if due:
                self._refresh(now)
            self._publish()
            if self._compute < 1.0:
                self._hold()

    def release(self) -> None:
        """Off the device, and not limited any more."""
        self._device.leave()

    def _count(self, optimizer: object) -> bool:
        """Count rounds: one when the first optimizer steps, the next when one steps that has already stepped in it."""
        key = id(optimizer)
        if key in self._round:
            self._round.clear()
        begins = not self._round
        if begins:
            self._steps += 1
        self._round.add(key)
        return begins

    def _newly_still(self, now: float) -> float:
        """Return for how long the process has been held still since this was asked last, and leave that out of it all:
        it is no part of the round, and nobody pays for it.
        """
        before_s, self._still_s = self._still_s, held_still_s(self._config.job_dir, now)
        newly_s = max(0.0, self._still_s - before_s)
        self._round_began_s += newly_s
        self._throttle.skip(newly_s, self._counted(newly_s))
        return newly_s

    def _counted(self, still_s: float) -> float:
        """How much of it the device's clock counts all the same."""
        return still_s if self._device.clock is time.monotonic else 0.0

    def _note_round(self, now: float) -> None:
        """Take note of how long the round took that ends now, and look at its operators when that is due."""
        took_s = now - self._round_began_s if self._steps > 1 else 0.0
        held_s, self._throttled_before_s = self._throttled_s - self._throttled_before_s, self._throttled_s
        self._round_began_s = now
        if self._operators is not None:
            used_at = self._device.own_clock()
            measured = self._operators.on_round(self._steps, now, took_s - held_s)
            if measured is not None:
                self._report.write_mix(measured)
            if self._operators.disturbs:
                took_s = 0.0  # not what a step takes otherwise
                self._throttle.exempt(self._device.own_clock() - used_at)
        self._report.note_step_time(self._steps, took_s)

    def _refresh(self, now: float) -> None:
        """Everything that need not happen at each step: new shares, company on the share, a wandering pin, memory."""
        if self._steps == 1 and self._index != _share_index(self._config):
            self._use_share(_share_index(self._config))  # the program chose its rank after importing torch
        self._peers = self._count_peers(now)
        self._load_share()
        self._pin()
        self._limit_memory()
        if not self._controls & Controls.STEPS:
            self._controls |= Controls.STEPS
            self._throttle.restart()  # what led up to the first step, this included, was not training
        self._refresh_at = now + REFRESH_S

    def _use_share(self, index: int) -> None:
        self._index = index
        self._device = _device(self._config, index)
        self._share = ShareReader(f"{self._config.job_dir}/share", index)
        self._report = ReportWriter(self._config.job_dir, index)
        self._pin()

    def _load_share(self) -> None:
        share = self._share.read()
        if share is None:
            return
        compute = share.compute / self._peers
        if self._compute >= 1.0 > compute:
            self._throttle.restart()  # what was used while nothing was capped is nobody's debt
        self._compute = compute
        self._memory_bytes = share.memory_bytes // self._peers
        self._controls = self._controls | Controls.COMPUTE if compute < 1.0 else self._controls & ~Controls.COMPUTE

    def _count_peers(self, now: float) -> int:
        """Number of processes that train on the same share at the moment, this one included."""
        others = 0
        for report in read_reports(self._config.job_dir):
            stepping = report.steps > 0 and now - report.last_step_s < _RECENT_S
            same_share = report.share_index == self._index and report.pid != os.getpid()
            if stepping and same_share and is_alive(report):
                others += 1
        return 1 + others

    def _pin(self) -> None:
        self._device.enter()
        if self._device.pinned:
            self._controls |= Controls.PINNED

    def _limit_memory(self) -> None:
        limited = self._device.limit_memory(self._memory_bytes)
        # When it is not, the report says so.
        self._controls = self._controls | Controls.MEMORY if limited else self._controls & ~Controls.MEMORY

    def _hold(self) -> None:
        """Sleep off what was used beyond the share, in short pieces so that a grown share takes effect at once."""
        self._device.drain()
        wait_s = self._throttle.settle(self._compute * self._device.width)
        while wait_s > 0.0:
            started, used_at = time.monotonic(), self._device.own_clock()
            time.sleep(min(wait_s, POLL_S))
            slept_s = time.monotonic() - started
            if slept_s > REFRESH_S:  # more than was asked for
                still_s = self._newly_still(started + slept_s)
                slept_s = max(0.0, slept_s - still_s)
                used_at += self._counted(still_s)
            self._throttled_s += slept_s
            if self._share.changed():
                self._load_share()
            self._publish()
            self._throttle.exempt(self._device.own_clock() - used_at)
            wait_s = self._throttle.settle(self._compute * self._device.width) if self._compute < 1.0 else 0.0

    def _publish(self) -> None:
        self._report.write(self._steps, self._last_step_s, self._throttled_s, self._controls)


def _device(config: Config, index: int) -> Union[CpuDevice, CudaDevice]:  # noqa: UP007 - Python 3.9 reads this
    cores = config.device_cores[index]
    return CpuDevice(cores, config.host_cores) if cores else CudaDevice(index)


def _share_index(config: Config) -> int:
    """Which of the job's shares this process uses: ``LOCAL_RANK`` where a launcher such as torchrun sets it."""
    rank = os.environ.get("LOCAL_RANK", "")
    index = int(rank) if rank.isdecimal() else config.share_index
    return index % len(config.device_cores)


def read_config(environ: Mapping[str, str]) -> Config:
    """Read the job's environment.

    Raises:
        KeyError: A variable is missing.
        ValueError: A variable has a value that is not accepted.
        OSError: There is no readable share word.
    """
    device, job_dir = environ["COTENANT_DEVICE"], environ["COTENANT_JOB_DIR"]
    index = int(environ.get("COTENANT_SHARE_INDEX", "0"))
    operator_mix = environ.get(OPERATOR_MIX, "0") == "1"
    shares = count_shares(f"{job_dir}/share")
    if device == CUDA:
        return Config(job_dir, (frozenset(),) * shares, frozenset(), index, operator_mix)
    if device != CPU:
        raise ValueError(f"COTENANT_DEVICE: {device!r} is not accepted; give '{CPU}' or '{CUDA}'")
    cores = tuple(parse_cores(part) for part in environ["COTENANT_CORES"].split(";"))
    if len(cores) != shares:
        raise ValueError(f"COTENANT_CORES: names {len(cores)} devices, the share word has {shares} shares")
    return Config(job_dir, cores, parse_cores(environ["COTENANT_HOST_CORES"]), index, operator_mix)
