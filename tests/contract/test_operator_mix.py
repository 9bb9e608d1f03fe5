"""The operator mix of an unmodified program, from its launch to the signature; and what hints say of a job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import ENV, GPU, OTHER, Host
from profiling import Machine, job
from support import wait_until

from cotenant.actors.launcher import Launcher
from cotenant.actors.reports import Descriptors
from cotenant.actors.shim.bootstrap import OPERATOR_MIX
from cotenant.forecasting.types import DemandProfile
from cotenant.placement.types import Share

# The program's own lines; the two about the shim spare the test the warm-up of five seconds.
PROGRAM = """
import sys, torch, torch.optim
if "_cotenant_shim.operators" in sys.modules: sys.modules["_cotenant_shim.operators"].WARM_S = 0.0
net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    net(torch.ones(6, 3, 8, 8)).sum().backward()
    optimizer.step()
print("done")
"""


def launch(host: Host, steps: int, **env: str) -> None:
    host.launch(sys.executable, "-c", PROGRAM, str(steps), env={**ENV, **env}, shares=[Share("gpu-0", 4 << 30, 1.0)])
    host.exited(timeout_s=60.0)
    assert host.output() == "done\n", "nothing of the shim or of the profiler is in the program's output"


def test_a_profile_of_an_unmodified_program_reaches_the_signature(host: Host) -> None:
    launch(host, 40, **{OPERATOR_MIX: "1"})
    report = host.launcher.report("job")
    assert report is not None
    assert report.mix is not None
    assert (report.batch_size, report.framework, report.steps) == (6, "torch", 40)
    assert report.mix.conv > 0.0
    machine = Machine()
    machine.tick(job(0.0))
    (signature,) = machine.collect(report)
    assert (signature.mix, signature.batch_size) == (report.mix, 6)


def test_it_is_off_unless_asked_for(host: Host) -> None:
    launch(host, 40)
    report = host.launcher.report("job")
    assert report is not None
    assert (report.mix, report.batch_size, report.framework) == (None, None, "torch")
    assert len(report.recent[0].seconds) == 39  # of the first step it is not known when it began


def test_a_program_may_end_in_the_middle_of_a_profile(host: Host) -> None:
    launch(host, 21, **{OPERATOR_MIX: "1"})
    report = host.launcher.report("job")
    assert report is not None
    assert report.mix is None


@pytest.mark.parametrize(("own", "want"), [({}, "1"), ({OPERATOR_MIX: "0"}, "0")], ids=["setting", "the job's own"])
def test_a_host_can_ask_for_it_for_every_job(host: Host, own: dict[str, str], want: str) -> None:
    host.launcher = Launcher(host.path, (GPU, OTHER), variables={OPERATOR_MIX: "1"})
    host.python(f"import os; print(os.environ[{OPERATOR_MIX!r}])", env={**ENV, **own})
    host.exited()
    assert host.output() == f"{want}\n"


@pytest.mark.parametrize("setting", [{}, {OPERATOR_MIX: "1"}], ids=["off everywhere", "on everywhere"])
@pytest.mark.parametrize("own", [{}, {OPERATOR_MIX: "0"}, {OPERATOR_MIX: "1"}], ids=["silent", "own 0", "own 1"])
@pytest.mark.parametrize(("hint", "want"), [(True, "1"), (False, "0")])
def test_what_its_hint_says_counts(
    host: Host, setting: dict[str, str], own: dict[str, str], hint: bool, want: str
) -> None:
    host.launcher = Launcher(host.path, (GPU, OTHER), variables=setting)
    host.python(f"import os; print(os.environ[{OPERATOR_MIX!r}])", env={**ENV, **own}, operator_mix=hint)
    host.exited()
    assert host.output() == f"{want}\n"


@pytest.mark.parametrize(("hint", "want"), [(True, "1"), (False, "0"), (None, "1")])
def test_a_lease_gets_what_its_hint_says_even_from_the_next_host_agent(
    host: Host, hint: bool | None, want: str
) -> None:
    host.launcher = Launcher(host.path, (GPU, OTHER), variables={OPERATOR_MIX: "1"})
    host.launch(kind="lease", operator_mix=hint)
    assert host.launcher.environment("job", 1)[OPERATOR_MIX] == want
    if hint is not None:
        host.restart()
        assert host.launcher.environment("job", 1)[OPERATOR_MIX] == want


def test_a_lease_gets_it_too(host: Host) -> None:
    host.launcher = Launcher(host.path, (GPU, OTHER), variables={OPERATOR_MIX: "1"})
    host.launch(kind="lease")
    assert host.launcher.environment("job", 1)[OPERATOR_MIX] == "1"


def test_hints_about_the_job_outlive_the_host_agent(host: Host) -> None:
    said = Descriptors(32, "torch", planned=DemandProfile(0.5, 0.6, 1 << 30, source="hints"))
    assert host.python("import time; time.sleep(60)", descriptors=said).descriptors == said
    assert [launched.descriptors for launched in host.restart()] == [said]


def test_a_job_launched_before_there_were_descriptors_is_adopted(host: Host) -> None:
    launched = host.python("import time; time.sleep(60)")
    record = Path(launched.job_dir / "launch.json")
    wait_until(record.exists, 5, "the record is there")
    assert "batch_size" not in record.read_text()
    assert [each.descriptors for each in host.restart()] == [Descriptors()]
