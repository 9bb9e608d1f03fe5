"""A power limit through the real nvidia-ml-py, with the stand-in for NVML."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from nvml_standin import Standin
from support import wait_until

from cotenant.actors import runner
from cotenant.actors.enforcement import power
from cotenant.actors.enforcement.power import RECORD, PowerLimit

GPUS = [
    f"gpu {index} uuid=GPU-{name} limit=700000 limit_min=200000 limit_max=700000" for index, name in enumerate("ab")
]
CODE = """
from pathlib import Path
import pynvml
from cotenant.actors.enforcement import power as module
from cotenant.actors.enforcement.power import PowerLimit

plain, patience_s = module.call_within, {patience_s}
module.call_within = lambda _, gpu_id, *call: plain(patience_s.get(gpu_id, 20.0), gpu_id, *call)

def limits():
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2)]
    return [pynvml.nvmlDeviceGetPowerManagementLimit(handle) for handle in handles]

said, seen = [], [limits()]
for agent in range({agents}):
    power = PowerLimit(Path({folder!r}), ["GPU-a", "GPU-b"], {watts})
    power._calls.call(60.0, int)  # it is done
    seen.append(limits())
for _ in range(2 if {watts} else 0):
    power.restore()
seen.append(limits())
print(json.dumps([seen, power.notes, list(map(str, Path({folder!r}).iterdir()))]))
"""


def limit(
    standin: Standin, folder: Path, watts: float | None, agents: int = 1, **patience_s: float
) -> tuple[list[list[int]], list[str], list[str]]:
    answer: Any = standin.python(CODE.format(folder=str(folder), watts=watts, agents=agents, patience_s=patience_s))
    return tuple(answer)


def test_the_limit_is_set_and_put_back(standin, tmp_path):
    standin.set(*GPUS)
    seen, notes, left = limit(standin, tmp_path, 350.0)
    assert seen == [[700_000, 700_000], [350_000, 350_000], [700_000, 700_000]]
    assert (notes, left) == ([], [])


def test_gpus_that_come_later_are_limited_too(standin, tmp_path):
    """Also where none was there at first."""
    standin.set(*GPUS)
    code = f"""
from pathlib import Path
from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.devices.nvml.library import Library
from cotenant.actors.enforcement.host import HostEnforcement
from cotenant.configs.settings import EnforcementSettings

def limits():
    library = Library()
    handles = [library.call("nvmlDeviceGetHandleByIndex", index) for index in range(2)]
    return [library.call("nvmlDeviceGetPowerManagementLimit", handle) for handle in handles]

host = HostEnforcement(Path({str(tmp_path)!r}), (), EnforcementSettings(power_limit_w=350.0, mps="off"))
seen = [limits()]
for index, name in enumerate("ab"):
    host.add_gpus([GpuInfo(f"GPU-{{name}}", "H100", index, 1 << 30, {{"CUDA_VISIBLE_DEVICES": f"GPU-{{name}}"}})])
    host._power._calls.call(60.0, int)  # it is done
    seen.append(limits())
host.close()
print(json.dumps([*seen, limits(), host.notes]))
"""
    assert standin.python(code) == [
        [700_000, 700_000], [350_000, 700_000], [350_000, 350_000], [700_000, 700_000], []
    ]  # fmt: skip


def test_an_agent_that_follows_another_still_knows_what_was_there_before(standin, tmp_path):
    standin.set(*GPUS)
    seen, notes, _ = limit(standin, tmp_path, 350.0, agents=2)
    assert seen[-2:] == [[350_000, 350_000], [700_000, 700_000]]
    assert notes == []


def test_a_limit_that_the_gpus_do_not_take_is_named(standin, tmp_path):
    standin.set(*GPUS)
    seen, notes, _ = limit(standin, tmp_path, 100.0)
    assert seen[1] == [700_000, 700_000]
    assert notes[0] == "enforcement.power_limit_w: 100 is not accepted by GPU-a; give 200 to 700"


def test_without_permission_it_is_said_and_nothing_else_happens(standin, tmp_path):
    standin.set(*GPUS, "fault nvmlDeviceSetPowerManagementLimit 4")
    seen, notes, _ = limit(standin, tmp_path, 350.0)
    assert seen == [[700_000, 700_000]] * 3
    assert notes[0].startswith("power of GPU-a is not limited: nvmlDeviceSetPowerManagementLimit: ")


@pytest.mark.parametrize(
    "why", ["fault nvmlDeviceSetPowerManagementLimit 4", "hang nvmlDeviceSetPowerManagementLimit 0"]
)
def test_what_could_not_be_put_back_is_put_back_by_the_next_agent(standin, tmp_path, why):
    standin.set(*GPUS, why)
    _, _, left = limit(standin, tmp_path, 350.0, **{"GPU-a": 0.2})
    assert left == [str(tmp_path / RECORD)]
    standin.set(*(gpu.replace("limit=700000", "limit=350000") for gpu in GPUS))
    seen, notes, left = limit(standin, tmp_path, None)
    assert seen[1][0] == 700_000
    assert (notes, left) == ([], [])


def test_what_a_call_that_hung_may_still_change_stays_recorded(tmp_path, monkeypatch):
    """It was put back, and the call took effect afterwards: the next agent puts it back again."""
    limits, go_on = {"GPU-a": 700_000}, threading.Event()

    class Slow:
        def call(self, name: str, *args: Any) -> object:
            match name:
                case "nvmlDeviceGetPowerManagementLimitConstraints":
                    return 200_000, 700_000
                case "nvmlDeviceGetPowerManagementLimit":
                    return limits["GPU-a"]
                case "nvmlDeviceSetPowerManagementLimit":
                    if args[1] == 350_000:
                        go_on.wait(60.0)
                    limits["GPU-a"] = args[1]
            return None

        def close(self) -> None:
            pass

    monkeypatch.setattr(power, "Library", Slow)
    monkeypatch.setattr(power, "TIMEOUT_S", 0.2)
    PowerLimit(tmp_path, ["GPU-a"], 350.0).restore()
    assert limits == {"GPU-a": 700_000}
    assert runner.read_json(str(tmp_path / RECORD)) == {"GPU-a": 700_000}
    go_on.set()
    wait_until(lambda: limits == {"GPU-a": 350_000}, 10, "the call has come back")
    PowerLimit(tmp_path, ["GPU-a"], None).restore()
    assert limits == {"GPU-a": 700_000}
    assert not (tmp_path / RECORD).exists()


def test_a_gpu_that_hangs_holds_up_no_other(standin, tmp_path):
    standin.set(*GPUS, "hang nvmlDeviceSetPowerManagementLimit 0")
    seen, notes, _ = limit(standin, tmp_path, 350.0, **{"GPU-a": 0.2})
    assert seen == [[700_000, 700_000], [700_000, 350_000], [700_000, 700_000]]
    late = "a call did not return within 0.2 s"
    again = f"the power limit of GPU-a could not be put back: GPU-a: {late}"
    assert notes == [f"power of GPU-a is not limited: GPU-a: {late}", again], "each once, however often"


def test_a_record_that_cannot_be_written_is_said(standin, tmp_path):
    standin.set(*GPUS)
    (tmp_path / RECORD).mkdir()
    code = (
        "from pathlib import Path\nfrom cotenant.actors.enforcement.power import PowerLimit\n"
        f"power = PowerLimit(Path({str(tmp_path)!r}), ['GPU-a'], 300.0)\n"
        "power._calls.call(60.0, int)\nprint(json.dumps(power.notes))"
    )
    (note,) = standin.python(code)
    assert note.startswith("power is not limited as it should be: IsADirectoryError(")


def test_without_a_driver_it_is_said(standin, tmp_path):
    standin.set(*GPUS)
    code = (
        "from pathlib import Path\nfrom cotenant.actors.enforcement.power import PowerLimit\n"
        f"power = PowerLimit(Path({str(tmp_path)!r}), ['GPU-a'], 300.0)\n"
        "power._calls.call(60.0, int)\nprint(json.dumps(power.notes))"
    )
    standin.set("fault nvmlInit 9")
    (note,) = standin.python(code)
    assert note == "power is not limited: the NVIDIA kernel module is not loaded"


def test_a_call_that_comes_back_late_forgets_no_other_gpu(tmp_path):
    class Slow:
        def call(self, name: str, *_: object) -> object:
            match name:
                case "nvmlDeviceGetPowerManagementLimitConstraints":
                    return 200_000, 700_000
                case "nvmlDeviceGetPowerManagementLimit":
                    runner.write_json(str(tmp_path / RECORD), {"GPU-b": 650_000})  # the other one, meanwhile
                    return 700_000
            return None

    library: Any = Slow()
    PowerLimit(tmp_path, [], None)._limit(library, "GPU-a", 350_000)
    assert runner.read_json(str(tmp_path / RECORD)) == {"GPU-a": 700_000, "GPU-b": 650_000}


@pytest.mark.parametrize(
    "text", ["", '{"GPU-a": 70', "[1]", "3", '{"GPU-a": "x"}', '{"GPU-a": null}', '{"GPU-a": -5}', '{"GPU-a": 1e400}']
)
@pytest.mark.parametrize("watts", [350.0, None])
def test_a_damaged_record_keeps_nobody_from_limiting_power_nor_from_shutting_down(standin, tmp_path, text, watts):
    standin.set(*GPUS)
    (tmp_path / RECORD).write_text(text)
    seen, notes, left = limit(standin, tmp_path, watts)
    assert seen[1] == ([350_000] * 2 if watts else [700_000] * 2)
    assert seen[-1] == [700_000] * 2
    (note,) = notes
    assert note.startswith("power limits cannot be put back: power.json: ")
    assert left == [str(tmp_path / "power.unreadable")]
