"""A walk along the line decides what it would decide if it offered everybody every GPU that has changed to the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import GIB, Driver, gone, half, host, on, profile, spec

from cotenant.configs.settings import AccountSettings, SchedulingSettings, Settings
from cotenant.forecasting.types import DemandProfile
from cotenant.placement import constraints
from cotenant.placement.engine import Cotenant
from cotenant.placement.types import NoFit, Placement, Request
from cotenant.scheduler.core import waiting, walk
from cotenant.scheduler.core.commands import StartJob
from cotenant.scheduler.core.events import Event, HostJoined, JobExited, JobStarted, JobSubmitted, Tick

LIMITED = SchedulingSettings(tenants={"ml": AccountSettings(most_gpus=2.5, most_jobs=4)})
QUIET = 8  # shared GPUs that are looked at closely for a gang of two where the limit for all is lower

Asked = dict[str, Any]

_any = {
    "priority": st.sampled_from(["low", "normal", "high"]),
    "max_slowdown": st.sampled_from([1.5, 9.0, 9.0]),
    "cpus": st.sampled_from([None, None, None, None, 1.0, 2.0]),
    "expected_duration_s": st.sampled_from([None, None, 100.0, 5000.0]),
    "tenant": st.sampled_from(["a", "a", "a", "a", "a", "ml"]),
}
singles = st.fixed_dictionaries(
    {**_any, "gpu_memory": st.sampled_from([2, 6, 6, 6]).map(GIB.__mul__), "compute": st.sampled_from([0.1, 0.4, None])}
)
gangs = st.fixed_dictionaries(
    {
        **_any,
        "gpus": st.sampled_from([2, 2, 2, 3]),
        "gang": st.sampled_from(["host", "host", "host", "cluster"]),
        "gpu_memory": st.sampled_from([2, 3, 3]).map(GIB.__mul__),
        "compute": st.sampled_from([0.1, 0.4]),
    }
)
hosts = st.sampled_from([(6, 3, 3), (6, 3, 3), (6, 6, 3), (3, 3, 3)])  # GiB of the jobs on their GPUs
steps = st.tuples(
    st.lists(singles | gangs, max_size=1),  # who comes
    st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 3, 3, 4, 5]), min_size=1, max_size=2),  # which of those that run end
    st.sampled_from([1.0, 1.0, 1.0, 700.0]),  # when, after the last step
)


@pytest.fixture
def _many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few GPUs are as many: not all of them are looked at for everybody, and not all closely."""
    monkeypatch.setattr(walk, "FEW_GPUS", 0)
    monkeypatch.setattr(constraints, "MOST_PREDICTED", 1)


@pytest.mark.usefixtures("_many_gpus")
def test_a_gang_gets_the_other_gpus_of_a_host_whose_changed_one_was_filled() -> None:
    driver = Driver(host("big", gpus=3))
    driver.run(spec("large", gpu_memory=6 * GIB, compute=0.4), half("r1"), half("r2"))
    driver.do(*(HostJoined(host(f"quiet-{number}")) for number in range(QUIET)))
    driver.run(*(spec(f"q{number}", gpu_memory=3 * GIB, compute=0.1) for number in range(QUIET)))
    after = spec("after", gpu_memory=6 * GIB, compute=0.4, priority="high")
    driver.submit(after, half("gang", gpus=2, max_slowdown=9.0))
    assert "not_tried" in {error.kind for error in driver.core.state.line.why("gang")}, "there is something to find"
    driver.do(gone(driver, "large", 0, stopped=False))
    assert on(driver, "after") == ["big-0"], "the gang comes when the GPU that has changed lets it in no more"
    assert on(driver, "gang") == ["big-1", "big-2"]


@pytest.mark.parametrize("asks", [walk.FEW_ASKS, walk.FEW_ASKS + 1])
def test_few_gpus_are_looked_at_for_everybody_only_while_few_asks_wait(
    monkeypatch: pytest.MonkeyPatch, asks: int
) -> None:
    """Each look takes a millisecond or two: with a long queue every decision would take seconds."""
    looked_at = list[str]()

    def place(self: Cotenant, request: Request, *more: Any) -> Placement | NoFit:
        looked_at.append(request.job_id)
        return placed(self, request, *more)

    placed = Cotenant.place
    driver = Driver(host(gpus=2, memory=20 * GIB))
    driver.run(spec("a", gpu_memory=16 * GIB, compute=0.4), spec("b", gpu_memory=18 * GIB, compute=0.4))
    driver.submit(*(spec(f"w{number}", gpu_memory=19 * GIB + number, compute=0.1) for number in range(asks)))
    monkeypatch.setattr(Cotenant, "place", place)
    driver.submit(spec("c", gpu_memory=GIB, compute=0.1))
    looked_at.clear()
    driver.start_all(driver.do(gone(driver, "c", 0, stopped=False)))
    assert len(looked_at) == (asks if asks <= walk.FEW_ASKS else 0)
    driver.start_all(driver.do(gone(driver, "b", 0, stopped=False)))
    assert on(driver, "w0"), "whoever fits is found"


@pytest.mark.parametrize(
    ("shortcut", "changed"),
    [("_Walk._note_filled", lambda walk, placement: None), ("REFUSED_IN_A_ROW", 1), ("REFUSED_IN_A_ROW", 2)],
    ids=["filled GPUs are offered again", "all are weighed at once", "all are weighed soon"],
)
@pytest.mark.parametrize("most", [1, constraints.MOST_PREDICTED])
@settings(max_examples=50)
@given(
    one=hosts,
    other=hosts,
    wait=st.tuples(st.lists(singles, min_size=1, max_size=3), st.lists(gangs, min_size=1, max_size=2)),
    more=st.lists(steps, min_size=1, max_size=4),
)
def test_shortcuts_change_no_decision(
    *,
    most: int,
    shortcut: str,
    changed: object,
    one: Sequence[int],
    other: Sequence[int],
    wait: tuple[list[Asked], list[Asked]],
    more: list[tuple[list[Asked], list[int], float]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "FEW_GPUS", 0)
        patch.setattr(constraints, "MOST_PREDICTED", most)
        both = _Both(shortcut, changed)
        both.do(HostJoined(host("one", gpus=3, cpus=8.0)), HostJoined(host("other", gpus=3)))
        both.do(*_submitted("r", [{"gpu_memory": size * GIB, "compute": 0.4} for size in (*one, *other)]))
        both.do(*(HostJoined(host(f"quiet-{number}")) for number in range(QUIET)))
        both.do(*_submitted("q", [{"gpu_memory": 3 * GIB, "compute": 0.1}] * QUIET))
        both.do(*_submitted("w", [*wait[0], *wait[1]]))
        for number, (come, end, after_s) in enumerate(more):
            both.do(*both.ended(end), *_submitted(f"s{number}", come), after_s=after_s)


known = st.lists(
    st.tuples(st.sampled_from([0.1, 0.3, 0.5, 0.8]), st.sampled_from([1.05, 1.2, 1.5, 3.0])), min_size=6, max_size=14
)  # how much of a GPU jobs use, and how much slower they may become


@settings(max_examples=150)
@given(
    jobs=known,
    held=st.sampled_from([True, True, False]),
    ends=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=2), min_size=1, max_size=6),
)
def test_weighing_all_at_once_changes_no_decision(
    jobs: list[tuple[float, float]], held: bool, ends: list[list[int]]
) -> None:
    """With GPUs that are held for somebody, and without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "FEW_GPUS", 0)
        both = _Both("REFUSED_IN_A_ROW", 1)
        both.do(HostJoined(host("one", gpus=2)), HostJoined(host("other")))
        for number, (util, _) in enumerate(jobs):
            both.know(f"fp-j-{number}", profile(util, memory=GIB))
        both.do(*_submitted("j", [{"max_slowdown": limit} for _, limit in jobs]))
        if held:
            both.do(*_submitted("large", [{"gpus": 3, "gang": "cluster", "isolation": "hard"}]))
            both.do(Tick(), after_s=waiting.RESERVE_AFTER_S)
        for end in ends:
            both.do(*both.ended(end))


def _submitted(name: str, asked: Sequence[Asked]) -> list[JobSubmitted]:
    return [JobSubmitted(spec(f"{name}-{number}", **hints)) for number, hints in enumerate(asked)]


class _Both:
    """The same life twice: as it is, and with a shortcut of the walk changed."""

    def __init__(self, shortcut: str, changed: object) -> None:
        configured = Settings(scheduling=LIMITED)
        self._as_it_is, self._otherwise = Driver(configured=configured), Driver(configured=configured)
        self._shortcut, self._changed = f"cotenant.scheduler.core.walk.{shortcut}", changed

    def do(self, *events: Event, after_s: float = 1.0) -> None:
        """Have the same happen in both, and every start succeed; both decide the same."""
        commands = self._as_it_is.do(*events, after_s=after_s)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._shortcut, self._changed)
            assert self._otherwise.do(*events, after_s=after_s) == commands
        assert self._as_it_is.core.state.to_json() == self._otherwise.core.state.to_json()
        started = [JobStarted(each.job_id, each.epoch, each.host_id) for each in commands if isinstance(each, StartJob)]
        if started:
            self.do(*started)

    def know(self, fingerprint: str, found: DemandProfile) -> None:
        """Have a program be known in both."""
        for driver in (self._as_it_is, self._otherwise):
            driver.core.state.learn(fingerprint, found, "cpu-1")

    def ended(self, which: Sequence[int]) -> list[Event]:
        """Return that some of those that run have ended."""
        state = self._as_it_is.core.state
        running = state.in_order(state.leased)
        ending = [running[each] for each in dict.fromkeys(which) if each < len(running)]
        return [JobExited(job.spec.job_id, job.epoch, host_id, 0) for job in ending for host_id in job.hosts]
