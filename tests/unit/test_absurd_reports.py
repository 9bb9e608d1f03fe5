"""Reports no working host would send: they are counted and ignored, and stop neither the core nor its recovery."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scheduling import GIB, Driver, half, host, measurement, report, settings, spec

from cotenant.configs.settings import Settings
from cotenant.forecasting.types import JobMeasurement, Quantiles
from cotenant.placement.engine import PlacementPolicy
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import Event, HostJoined, HostLost, JobSubmitted, MemoryOverrun, Tick
from cotenant.scheduler.core.model import Gpu, Host
from cotenant.scheduler.core.state import State
from cotenant.scheduler.journal.recovery import recover
from cotenant.scheduler.journal.store import Journal, NotRecordable

NO_SUCH = 2**64 - 1  # what drivers say when they do not know
HUGE = 10**400  # an integer that no float can hold
NEVER: tuple[Any, ...] = (math.nan, math.inf, -math.inf, -1.0, NO_SUCH, HUGE)


def driver() -> Driver:
    made = Driver(host())
    made.run(half("a"))
    return made


def looks(one: Driver) -> None:
    """Everything people and programs can ask for can be written as JSON, and the state can be read back."""
    state = one.core.state
    for view in [*queries.jobs(state, active_only=False, limit=None), *queries.gpus(state), *queries.hosts(state)]:
        json.dumps(view.model_dump(mode="json"), allow_nan=False)
    for job_id in state.jobs:
        queries.explain(state, job_id, one.now)
    assert State.from_json(state.to_json()).to_json() == state.to_json()


WINDOW = [
    *((name, value) for name in ("util_mean", "util_peak", "throttled_fraction", "compute_share") for value in NEVER),
    *((name, value) for name in ("memory_bytes", "memory_peak_bytes", "step_rate", "host_cores") for value in NEVER),
    *((name, value) for name in ("start_s", "window_s") for value in NEVER),
    *((name, 2.5) for name in ("util_mean", "util_peak", "throttled_fraction", "compute_share")),
    ("step_rate", 1e-320),
]
PROFILE = [
    *((name, value) for name in ("util_mean", "util_p95", "memory_bytes", "solo_step_rate") for value in NEVER),
    *((name, 2.5) for name in ("util_mean", "util_p95")),
    ("solo_step_rate", 1e-320),
    ("observed_s", math.nan),
    ("observed_s", HUGE),
]


def with_window(name: str, value: Any) -> JobMeasurement:
    return measurement("a", "h1-0", **{name: value})


def with_profile(name: str, value: Any) -> JobMeasurement:
    good = measurement("a", "h1-0")
    return replace(good, profile=replace(good.profile, **{name: value}))


def with_forecast(name: str, value: Any) -> JobMeasurement:
    good = measurement("a", "h1-0")
    wrong = {5 if name == "util" else 60: Quantiles(0.0, 0.1, 0.2, value, value)}
    return replace(good, forecast=replace(good.forecast, **{name: wrong}))


@pytest.mark.parametrize(
    ("made", "name", "value"),
    [
        *((with_window, *wrong) for wrong in WINDOW),
        *((with_profile, *wrong) for wrong in PROFILE),
        *((with_forecast, name, value) for name in ("util", "memory") for value in NEVER),
    ],
)
def test_an_absurd_number_is_counted_and_changes_nothing(
    made: Callable[[str, Any], JobMeasurement], name: str, value: Any
) -> None:
    one = driver()
    before = one.job("a")
    assert one.do(report("h1", made(name, value))) == []
    assert (one.job("a"), one.core.state.usage, one.core.state.profiles) == (before, {}, {})
    assert one.core.state.ignored == {"absurd measurement": 1}
    looks(one)
    one.submit(replace(spec("b", gpu_memory=GIB, compute=0.2), fingerprint="fp-a"))
    assert one.state("b") in {"STARTING", "QUEUED"}


@pytest.mark.parametrize("used", NEVER)
def test_an_absurd_overrun_stops_nobody(used: Any) -> None:
    one = driver()
    assert one.do(MemoryOverrun("a", 1, "h1", used)) == []
    assert (one.state("a"), one.job("a").memory_hint_corrected) == ("RUNNING", None)


@pytest.mark.parametrize("memory", [0, -1, NO_SUCH, HUGE])
def test_a_gpu_without_a_possible_amount_of_memory_gets_no_jobs(memory: Any) -> None:
    one = Driver(host(memory=memory))
    one.submit(spec("a"), half("b"))
    assert (one.state("a"), one.state("b")) == ("QUEUED", "QUEUED")
    looks(one)
    one.do(HostJoined(host()))
    assert one.state("a") == "STARTING"


def test_a_gpu_that_loses_its_memory_gives_its_jobs_another_try() -> None:
    one = driver()
    one.do(HostJoined(host(memory=-5)))
    assert one.kinds() == [("stop", "a")]
    looks(one)


def test_a_host_without_gpus_is_no_place() -> None:
    one = Driver(host(gpus=0))
    one.submit(spec("a"))
    assert one.state("a") == "QUEUED"
    looks(one)


def test_hosts_that_claim_the_same_gpu() -> None:
    gpu = Gpu("g", "h1", "cpu-1", 0, 8 * GIB)
    first, second = Host("h1", "n1", (gpu, gpu), 0.0), Host("h2", "n2", (replace(gpu, host_id="h1"),), 0.0)
    one = Driver(first)
    one.run(half("a"))
    one.do(HostJoined(second))
    assert one.kinds() == [("stop", "a")]
    one.do(report("h1", measurement("a", "g")), HostLost("h2", "gone"), HostJoined(first), HostLost("h1", "gone"))
    looks(one)


def test_measurements_of_what_is_not_there() -> None:
    one = driver()
    one.do(report("nowhere", measurement("a", "other")), report("nowhere", measurement("gone", "h1-0")))
    assert one.core.state.usage == {}
    assert "nowhere" not in one.core.state.reported_at


@pytest.mark.parametrize("now", [math.nan, -5.0, 0.0])
def test_a_clock_that_is_wrong_does_not_turn_time_back(now: float) -> None:
    one = driver()
    one.core.handle([Tick()], now)
    assert one.core.state.now == one.now
    looks(one)


# -- journal ----------------------------------------------------------------------------------------------------------


def journal(tmp_path: Path) -> Journal:
    return Journal(f"sqlite:///{tmp_path / 'journal.db'}")


@pytest.mark.parametrize(
    "event",
    [
        JobSubmitted(replace(spec("a"), command=("\udcff",))),
        JobSubmitted(replace(spec("a"), env={"A": "\udcff"})),
        JobSubmitted(spec("a", gpus=1.5)),
        JobSubmitted(spec("a", priority="x")),
        MemoryOverrun("a", 1, "h1", 0.5),  # type: ignore[arg-type]
    ],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, event: Event) -> None:
    kept = journal(tmp_path)
    with pytest.raises(NotRecordable):
        kept.append([event], 1.0)
    assert kept.append([Tick()], 1.0) == 1
    assert [entry.events for entry in kept.load().entries] == [(Tick(),)]
    kept.close()


def test_a_failure_that_does_not_come_again_costs_nothing(tmp_path: Path) -> None:
    """What fails again and again is set aside, see ``test_scheduler_faults.py``."""
    kept, live = journal(tmp_path), Core(settings())
    batches: list[list[Event]] = [[HostJoined(host())], [JobSubmitted(half("a"))], [JobSubmitted(half("b"))]]
    for number, events in enumerate(batches):
        kept.append(events, float(number))
        live.handle(events, float(number))
    calls = iter([False, True])

    def once(name: str) -> PlacementPolicy:
        if next(calls, False):
            raise ZeroDivisionError(name)
        return live.policies(name)

    assert recover(kept, settings(), policies=once).state.to_json() == live.state.to_json()
    assert kept.count_set_aside() == 0
    kept.close()


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, b"not a database, but long enough to be one" * 100])
def test_a_journal_that_is_something_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(content)
    if content:
        with pytest.raises(Exception, match=r"cannot open the journal .*nothing was changed"):
            journal(tmp_path)
        assert path.read_bytes() == content
    else:
        recover(journal(tmp_path), Settings())
