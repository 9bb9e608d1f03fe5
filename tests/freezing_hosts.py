"""A host agent with a job that counts, to be frozen and thawed; the test turns its device loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agents import job_spec, make_agent
from fake_driver import COUNT, FakeDriver
from nvml_standin import Standin
from nvml_standin.inprocess import loaded
from support import wait_until

from cotenant.actors import freezing, jobfiles, runner
from cotenant.actors.host_agent import HostAgent
from cotenant.actors.jobfiles import Freeze
from cotenant.configs.settings import DeviceSettings, EnforcementSettings, LeaseSettings, Settings
from cotenant.placement.types import Share
from cotenant.scheduler.core.commands import StartJob, StopJob

GIB = 1 << 30
GPUS = tuple(f"gpu {index} uuid=GPU-{name} total={16 * GIB} used={GIB}" for index, name in enumerate("abc"))
SETTINGS = Settings(
    device=DeviceSettings(backend="nvml"),
    enforcement=EnforcementSettings(mps="off"),
    lease=LeaseSettings(ttl_s=600.0),  # nobody renews here
)
WAIT_S = 40.0


class Host:
    """The agent, whose device loop the test turns, and one job on it that counts."""

    def __init__(self, make: Callable[[], HostAgent], driver: FakeDriver) -> None:
        self._make = make
        self.driver = driver
        self.agent = make()

    def until(self, holds: Callable[[], object], what: str) -> None:
        def turn() -> bool:
            self.agent._look()
            return bool(holds())

        try:
            wait_until(turn, WAIT_S, what, poll_s=0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}; told was {self.events}") from None

    def start(self, gpu: str = "GPU-a", *, revision: int = 0, program: str = COUNT) -> None:
        spec = job_spec("job", sys.executable, "-c", program)
        spec = replace(spec, hints=replace(spec.hints, checkpoint="driver"))
        self.apply(StartJob("h1", spec, 1, revision, (Share(gpu, 2 * GIB, 0.5),), ""))
        self.until(lambda: self.told() == ["job_started"], "it runs")
        self.spec = spec
        if program == COUNT:
            self.until(lambda: self.driver.on("abc".index(gpu[-1])), "it is on its GPU")
            self.counts()

    def apply(self, command: Any) -> None:
        assert self.agent.apply([command]) == []

    def freeze(self, revision: int = 0) -> None:
        self.apply(StopJob("h1", "job", 1, 5.0, "make room", freezes=True, revision=revision))

    def is_sampled_on(self, gpu: str) -> None:
        self.until(lambda: [job.gpu_id for job in self.agent._profiler.newest.jobs] == [gpu], "it is sampled there")

    def frozen(self) -> None:
        self.freeze()
        self.until(lambda: self.last() != "job_started", "that has come to an end")
        assert self.last() == "job_frozen", self.events[-1]

    def thaw(self, gpu: str = "GPU-a", revision: int = 1) -> None:
        self.apply(StartJob("h1", self.spec, 1, revision, (Share(gpu, 2 * GIB, 0.4),), "", thaws=True))

    def stop(self, grace_s: float = 5.0) -> None:
        self.apply(StopJob("h1", "job", 1, grace_s, "enough"))

    def restart(self) -> None:
        """Another agent follows this one."""
        self.agent.shut_down()
        self.agent = self._make()

    def record(self, freeze: Freeze | None) -> None:
        """Leave what an agent leaves that is killed in the middle."""
        jobfiles.write_freeze(self.job_dir, freeze)

    @property
    def job_dir(self) -> Path:
        return self.agent._launcher._dir / "job.1"

    @property
    def events(self) -> list[Any]:
        return list(self.agent._uplink._events)

    def told(self) -> list[str]:
        return [event.kind for event in self.events if event.job_id == "job"]

    def last(self) -> str:
        return (self.told() or [""])[-1]

    def item(self) -> tuple[str, int, bool]:
        (item,) = self.agent.report(1, (), "").inventory
        return item.phase, item.revision, item.frozen

    def checkpoints(self) -> list[bool]:
        return [gpu.checkpoints for gpu in self.agent.report(1, (), "").host.gpus]

    def states(self) -> set[str]:
        return {process.state for process in runner.descendants(self.root_pid)}

    @property
    def root_pid(self) -> int:
        (launched,) = self.agent._launcher.running()
        assert launched.root_pid is not None
        return launched.root_pid

    @property
    def pid(self) -> int:
        (process,) = runner.descendants(self.root_pid)
        return process.pid

    def count(self) -> int:
        data, *_ = self.agent._launcher.read_output("job", 1, 0, 1 << 20)
        lines = data.decode().split()
        assert lines == [str(number) for number in range(1, len(lines) + 1)], "it goes on where it was, and once"
        return len(lines)

    def counts(self) -> None:
        before = self.count()
        self.until(lambda: self.count() > before + 2, "it counts on")

    def ended(self) -> Any:
        def told() -> bool:
            self.driver.sweep()
            return self.last() == "job_exited"

        self.until(told, "its end is told")
        assert self.told().count("job_exited") == 1
        return self.events[-1]


@contextmanager
def freezing_host(standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """Run a host with two GPUs whose driver is played by stand-ins, and leave no job of it behind."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(freezing, "VACATED_S", 4.0)
    monkeypatch.setattr("cotenant.actors.vacating.PATIENCE_S", 2.0)
    standin.set(*GPUS)
    driver = FakeDriver(tmp_path / "driver", standin, monkeypatch)
    with loaded(standin) as library:
        host = Host(lambda: make_agent(monkeypatch, tmp_path, SETTINGS), driver)
        yield host
        driver.say()
        for launched in host.agent._launcher.running():
            host.agent._launcher.stop(launched.job_id, launched.epoch, 0.0, "the test is over")
        host.until(lambda: not host.agent._launcher.running() and not host.agent._launcher.freezing.moving(), "no job")
        host.agent.shut_down()
        library.close()
