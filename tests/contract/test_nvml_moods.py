"""A host agent whose driver says anything at all, and another thing each time: it goes on, and believes what can be."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agents import job_spec, make_agent
from nvml_standin import Standin
from nvml_standin.inprocess import loaded
from support import wait_until

from cotenant.actors import runner
from cotenant.configs.settings import DeviceSettings, EnforcementSettings, Settings
from cotenant.placement.types import Share
from cotenant.scheduler.core.commands import StartJob, StopJob

GIB = 1 << 30
TOTAL = 16 * GIB
GPUS = tuple(f"gpu {index} uuid=GPU-{name} name=NVIDIA_H100 total={TOTAL}" for index, name in enumerate("ab"))
SLEEP = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
JOBS = {"one": "GPU-a", "two": "GPU-a", "three": "GPU-b"}
BYTES = (0, GIB, 17 * GIB, 2**64 - 1, 18446744073707737660)
PERCENT = (0, 50, 100, 101, 4294967295)
CODES = (1, 2, 3, 4, 6, 7, 9, 10, 13, 15, 16, 18, 28, 999)
FUNCTIONS = (
    "*",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetHandleByUUID",
    "nvmlGpmSampleGet",
    "nvmlGpmMetricsGet",
    "nvmlDeviceGetPowerUsage",
    "nvmlEventSetCreate",
    "nvmlEventSetWait",
)


def mood(rnd: random.Random, pids: list[int]) -> list[str]:
    lines = [f"{gpu} used={rnd.choice(BYTES)} util={rnd.choice(PERCENT)}" for gpu in GPUS]
    for _ in range(rnd.randrange(4)):
        whose = f"process {rnd.randrange(2)} pid={rnd.choice((*pids, 0, 1, 99999, 4294967295))}"
        where = rnd.choice(("compute", "mps", "both", "none"))
        lines.append(f"{whose} memory={rnd.choice(BYTES)} sm={rnd.choice(PERCENT)} list={where}")
    lines += [
        f"fault {rnd.choice(FUNCTIONS)} {rnd.choice(CODES)} {rnd.choice(('0', '1', ''))}"
        for _ in range(rnd.choice((0, 0, 1, 2)))
    ]
    return lines + ([f"xid {rnd.randrange(2)} {rnd.choice((13, 48, 79))}"] if rnd.random() < 0.1 else [])


@pytest.mark.parametrize("seed", range(4))
def test_the_agent_goes_on(standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = Settings(device=DeviceSettings(backend="nvml"), enforcement=EnforcementSettings(mps="off"))
    rnd, later_s = random.Random(seed), [0.0]
    standin.set(*GPUS)
    with loaded(standin) as library:
        agent: Any = make_agent(monkeypatch, tmp_path, settings)
        agent.scheduler.observe = SimpleNamespace(remote=lambda batch: None)
        clock = agent._backend._clock
        for owner in (agent._backend, agent._backend._passes, *(s.board for s in agent._backend._crew.stations)):
            monkeypatch.setattr(owner, "_clock", lambda: clock() + later_s[0])
        starts = [StartJob("h1", job_spec(job, *SLEEP), 1, 0, (Share(gpu, GIB, 0.3),), "") for job, gpu in JOBS.items()]
        assert agent.apply(starts) == []
        wait_until(lambda: len(agent._launcher.running()) == len(JOBS), 10, "all run")
        roots = [pid for job in JOBS for pid in agent._launcher.root_pids(job)]
        pids = roots + [process.pid for root in roots for process in runner.descendants(root)]
        for step in range(60):
            standin.set(*mood(rnd, pids))
            later_s[0] += rnd.choice((0.1, 0.1, 0.6, 1.1, 6.0))
            agent._look()
            if step % 4 == 0:
                agent._take_in_gpus()
                agent._close_window()
                report = agent.report(step, (), "")
                assert all(gpu.healthy or gpu.fault for gpu in report.host.gpus)
                assert {item.phase for item in report.inventory} == {"running"}
            sample = agent._profiler.newest
            assert all(job.util is None or 0.0 <= job.util <= 1.0 for job in sample.jobs)
            assert all(gpu.memory_bytes is None or 0 <= gpu.memory_bytes <= TOTAL for gpu in sample.devices)
        standin.set(*GPUS)
        assert agent.apply([StopJob("h1", job, 1, 0.0, "enough") for job in JOBS]) == []
        wait_until(lambda: not agent._launcher.running(), 10, "no job is left")
        agent.shut_down()
        library.close()
