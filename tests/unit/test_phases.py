"""Programs that are found to go through phases: what was measured of their speed beside others counts no more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from ray.exceptions import ActorUnavailableError

from cotenant.actors import learning
from cotenant.actors.learning import TELL_EVERY_S, Evidence
from cotenant.actors.messages import WindowBatch
from cotenant.actors.prm_actor import Prm
from cotenant.configs.settings import Settings
from cotenant.forecasting.datasets.observation_file import load_observations, save_observations
from cotenant.forecasting.interference.evidence import EvidenceBook
from cotenant.forecasting.interference.learned import LearnedInterference
from cotenant.forecasting.interference.observations import Observation, Program, SetKey
from cotenant.forecasting.types import DemandProfile, Signature
from cotenant.scheduler.core.engine import EVIDENCE_EVERY_S, EVIDENCE_LATEST_S, Core
from cotenant.scheduler.core.events import Event, EvidenceGathered, Tick
from cotenant.scheduler.core.models import only
from cotenant.scheduler.core.state import State
from cotenant.scheduler.journal.ledger import Ledger
from cotenant.scheduler.journal.store import Journal

START = 1_900_000_000.0
TYPE = "cpu-core"
NAMES = ("a", "b", "c")
FAST = 100.0


def job(name: str, rate: float | None = 10.0) -> DemandProfile:
    return DemandProfile(0.6, 0.7, 1 << 30, rate, 30.0, "history", fingerprint=name)


def measured(focal: str, other: str, n: float = 0.8, seconds: float = 60.0) -> Observation:
    return Observation(TYPE, job(focal), (job(other),), n, n - 0.02, n + 0.02, seconds)


def program(name: str) -> Program:
    return Program(TYPE, name)


def by_key(observations: Sequence[Observation]) -> dict[SetKey | None, Observation]:
    return {each.key: each for each in observations}


def new_core() -> Core:
    return Core(Settings(), only(LearnedInterference({})))


def answers(core: Core) -> list[object]:
    return [core.predictor.predict([job(one), job(two)], TYPE) for one in NAMES for two in NAMES]


# ---------------------------------------- the core


def test_what_is_withdrawn_changes_predictions_at_once_and_leaves_the_neighbours_measurement() -> None:
    core, never = new_core(), new_core()
    core.handle([EvidenceGathered((measured("a", "b", 0.03), measured("b", "a", 0.9)))], 1.0)
    core.handle([EvidenceGathered((measured("a", "c", 0.03),))], 2.0)  # waits for more
    assert core.predictor.predict([job("a"), job("b")], TYPE)[0].mid < 0.1
    core.handle([EvidenceGathered((), withdrawn=(program("a"),))], 3.0)
    never.handle([EvidenceGathered((measured("b", "a", 0.9),))], 1.0)
    assert answers(core) == answers(never)
    core.handle([Tick()], 3.0 + EVIDENCE_LATEST_S)
    assert answers(core) == answers(never)


def test_what_was_found_on_one_type_of_gpus_says_nothing_of_another() -> None:
    core = new_core()
    core.handle([EvidenceGathered((measured("a", "b", 0.3),))], 1.0)
    core.handle([EvidenceGathered((), withdrawn=(Program("another", "a"),))], 2.0)
    assert len(core.state.evidence) == 1


told = st.builds(
    lambda names, n, seconds, complete: EvidenceGathered((measured(*names, n, seconds),), complete=complete),
    st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.floats(0.1, 1.2),
    st.floats(1.0, 900.0),
    st.booleans(),
)
withdrawn = st.builds(lambda name: EvidenceGathered((), withdrawn=(program(name),)), st.sampled_from(NAMES))
lives = st.lists(st.tuples(told | withdrawn, st.sampled_from([0.0, 1.0, EVIDENCE_EVERY_S])), min_size=1, max_size=12)


@given(lives)
def test_a_core_knows_what_it_was_told_after_the_last_withdrawal_and_a_snapshot_goes_on_alike(
    life: list[tuple[EvidenceGathered, float]],
) -> None:
    core, again, expected = new_core(), new_core(), EvidenceBook()
    now = 1.0
    for place, (event, wait_s) in enumerate(life):
        now += wait_s
        core.handle([event], now)
        again = Core.from_state(State.from_json(again.state.to_json()), only(LearnedInterference({})))
        again.handle([event], now)
        assert again.state.to_json() == core.state.to_json()
        assert answers(again) == answers(core)
        for each in event.observations:
            later = [gone for after, _ in life[place + 1 :] for gone in after.withdrawn]
            if each.program not in later:
                (expected.take if event.complete else expected.add)(each)
    core.handle([Tick()], now + EVIDENCE_LATEST_S)
    assert core.state.evidence.observations() == expected.observations()
    reference = new_core()
    reference.handle([EvidenceGathered(expected.observations())], 1.0)
    assert answers(core) == answers(reference)


def test_an_event_of_an_older_journal_withdraws_nothing() -> None:
    adapter: TypeAdapter[EvidenceGathered] = TypeAdapter(EvidenceGathered)
    event = EvidenceGathered((measured("a", "b"),), complete=True)
    older = adapter.dump_python(event, mode="json")
    del older["withdrawn"]
    assert adapter.validate_python(older) == event


def test_a_replay_of_the_journal_forgets_the_same(tmp_path: Path) -> None:
    def ledger() -> Ledger:
        return Ledger(Journal(f"sqlite:///{tmp_path / 'j.sqlite'}"), Settings(), only(LearnedInterference({})))

    first = ledger()
    events: list[Event] = [EvidenceGathered((measured("a", "b"), measured("b", "a")))]
    first.take_in(events, 1.0)
    first.take_in([EvidenceGathered((), withdrawn=(program("a"),))], 2.0)
    again = ledger()
    assert again.core.state.to_json() == first.core.state.to_json()
    assert [each.focal.fingerprint for each in again.core.state.evidence.observations()] == ["b"]


# ---------------------------------------- the file


def test_a_withdrawal_in_the_file_hides_what_came_before_it_from_whoever_reads(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    save_observations(path, [measured("a", "b", 0.1), measured("b", "a"), program("a"), measured("a", "c")])
    loaded = load_observations(path)
    assert loaded.observations == (measured("b", "a"), measured("a", "c"))
    assert loaded.withdrawn == (program("a"),)
    assert not loaded.problems


@pytest.mark.parametrize("bad", [None, 3, "a", [], {}, {"gpu_type": TYPE}, {"gpu_type": 1, "fingerprint": "a"}])
def test_a_withdrawal_that_makes_no_sense_is_skipped_and_told(tmp_path: Path, bad: object) -> None:
    path = tmp_path / "evidence.jsonl"
    save_observations(path, [measured("a", "b")])
    with path.open("a") as file:
        file.write(json.dumps({"schema_version": 1, "withdrawn": bad}) + "\n")
    loaded = load_observations(path)
    assert loaded.observations == (measured("a", "b"),)
    assert len(loaded.problems) == 1


# ---------------------------------------- what the PRM keeps


class Life:
    """Jobs a and b share a GPU; a scheduler hears of it, or does not."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "evidence.jsonl"
        self.evidence = Evidence(self.path, print)
        self.scheduler = EvidenceBook()
        self.second = 0
        self.phased: set[str] = set()
        self.rate = 8.0

    def share(self) -> None:
        for _ in range(14):
            windows = [
                Signature(name, "g", float(self.second), 1.0, 10, 0.5, 0.6, 1e9, 1e9, self.rate, 0.0, 0.0, 1, 0.5)
                for name in ("a", "b")
            ]
            batch = WindowBatch("h", self.second + 1.0, windows, {}, (), {"g": TYPE})
            for name in ("a", "b"):
                self.evidence.see(name, program(name), name in self.phased)
            profiles = {name: job(name, None if name in self.phased else 10.0) for name in ("a", "b")}
            self.evidence.observe(batch, windows, profiles, self.phased)
            self.second += 1

    def tell(self, arrives: bool, answered: bool) -> None:
        self.second += int(TELL_EVERY_S)
        event = self.evidence.due(float(self.second))
        if event is None:
            return
        if arrives:
            self.scheduler.withdraw(event.withdrawn)
            for each in event.observations:
                self.scheduler.take(each)
        if arrives and answered:
            self.evidence.told(event)

    def restart(self) -> None:
        self.evidence.save()
        self.evidence = Evidence(self.path, print)

    def do(self, step: str) -> None:
        if step == "share":
            self.share()
        elif step.startswith("phases"):
            self.phased ^= {step[-1]}
            self.evidence.see(step[-1], program(step[-1]), step[-1] in self.phased)
        elif step == "restart":
            self.restart()
        else:
            self.tell(arrives="lost" not in step, answered=step == "told")


steps = st.sampled_from(["share", "phases a", "phases b", "restart", "told", "lost", "unanswered"])


@given(st.lists(steps, max_size=12))
def test_whatever_is_lost_the_scheduler_ends_up_with_what_the_prm_keeps_and_nothing_of_phases(life: list[str]) -> None:
    with TemporaryDirectory() as folder:
        run = Life(Path(folder))
        for step in life:
            run.do(step)
            assert not {each.focal.fingerprint for each in run.evidence.book.observations()} & run.phased
        run.tell(arrives=True, answered=True)
        run.tell(arrives=True, answered=True)
        assert by_key(run.scheduler.observations()) == by_key(run.evidence.book.observations())
        assert run.evidence.due(1e6) is None
        run.restart()
        assert by_key(run.evidence.book.observations()).keys() == by_key(run.scheduler.observations()).keys()
        saved = load_observations(run.path).observations if run.path.exists() else ()
        assert not {each.focal.fingerprint for each in saved} & run.phased


def test_a_long_file_stays_without_what_was_withdrawn_and_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Life(tmp_path)
    for step in ("share", "share", "phases a", "restart"):
        run.do(step)
    monkeypatch.setattr(learning, "LONGEST_FILE", 1)
    for _ in range(2):
        run.restart()
        event = run.evidence.due(1e6)
        assert event is not None
        assert event.withdrawn == (program("a"),)
        assert [each.focal.fingerprint for each in event.observations] == ["b"]


def test_a_steady_run_does_not_bring_back_what_another_run_goes_on_to_refute(tmp_path: Path) -> None:
    evidence = Evidence(tmp_path / "evidence.jsonl", print)
    assert evidence.see("run 1", program("a"), phased=True)
    for _ in range(5):
        assert not evidence.see("run 2", program("a"), phased=False)
        assert not evidence.see("run 1", program("a"), phased=True)
    evidence.forget("run 1")
    assert not evidence.see("run 2", program("a"), phased=False)
    assert evidence.see("run 3", program("a"), phased=True)


def test_what_is_found_anew_while_the_scheduler_answers_is_told_as_well(tmp_path: Path) -> None:
    evidence, again = Evidence(tmp_path / "evidence.jsonl", print), program("a")
    evidence.see("a.1", again, phased=True)
    event = evidence.due(100.0)
    assert event is not None
    evidence.see("a.1", again, phased=False)
    evidence.see("a.1", again, phased=True)
    evidence.told(event)
    more = evidence.due(100.0 + TELL_EVERY_S)
    assert more is not None
    assert more.withdrawn == (again,)
    evidence.told(more)
    assert evidence.due(100.0 + 3 * TELL_EVERY_S) is None


def test_what_was_measured_during_phases_is_not_held_against_a_rate_that_comes_later(tmp_path: Path) -> None:
    run = Life(tmp_path)
    for step in ("phases a", "share", "share", "phases a"):
        run.do(step)
    assert not [each for each in run.evidence.book.observations() if each.focal.fingerprint == "a"]
    run.rate = 4.0
    for _ in range(4):
        run.share()
    (found,) = [each for each in run.evidence.book.observations() if each.focal.fingerprint == "a"]
    assert found.throughput == pytest.approx(0.4, abs=0.01)


# ---------------------------------------- from windows to predictions


class Cluster:
    """A PRM, and a core that hears what it tells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.core = new_core()
        self.away = False
        self.second = 0
        self.prm = self.start()

    def start(self) -> Prm:
        return Prm(str(self.folder), Settings().model_dump_json())

    def restart(self) -> None:
        self.prm.close()
        self.prm = self.start()

    # what the PRM sees of the scheduler
    @property
    def evidence(self) -> Cluster:
        return self

    @property
    def measurements(self) -> Cluster:
        return self

    def remote(self, event: Event) -> bool:
        if not self.away:
            self.core.handle([event], START + self.second)
        return not self.away

    def answer(self, taken_in: bool) -> None:
        if not taken_in:
            raise ActorUnavailableError("it is restarting", None)

    def second_of(self, gpus: dict[str, dict[str, float]]) -> None:
        """Let a second pass in which jobs step so fast on each GPU; a job's program is what stands before the dot."""
        for gpu, rates in gpus.items():
            windows = [
                Signature(
                    *(name, gpu, START + self.second, 1.0, 10, 0.5, 0.5, 1e9, 1e9),
                    *(rate, 0.0, 0.0, len(rates) - 1, 1.0),
                )
                for name, rate in rates.items()
            ]
            names = {name: name.split(".")[0] for name in rates}
            self.prm.observe(WindowBatch(f"host of {gpu}", START + self.second + 1.0, windows, names, (), {gpu: TYPE}))
        self.second += 1

    def measure(self, slow: float, beside: str) -> None:
        """Let a.1 run alone in its fast phase, then beside another in its slow one."""
        for _ in range(12):
            self.second_of({"g": {"a.1": FAST}, "other": {beside: 10.0 if beside != "a.2" else FAST}})
        for _ in range(30):
            self.second_of({"g": {"a.1": slow, beside: 8.0 if beside != "a.2" else slow}})

    def show_phases(self, name: str, slow: float) -> None:
        for k in range(60):
            self.second_of({"h": {name: slow if k // 12 % 2 else FAST}})

    def known(self) -> set[str]:
        state = self.core.state
        found = (*state.evidence.observations(), *(each for each, _ in state.gathered))
        return {each.focal.fingerprint for each in found}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    one = Cluster(tmp_path)
    monkeypatch.setattr(ray, "get_actor", lambda *_names: one)
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: (calls, []))
    monkeypatch.setattr(ray, "get", one.answer)
    yield one
    one.prm.close()


@pytest.mark.parametrize(("slow", "between"), [(FAST / 20.0, "nothing"), (FAST / 2.0, "restart"), (FAST * 1.9, "away")])
@pytest.mark.parametrize("beside", ["b.1", "a.2"])
@pytest.mark.parametrize("shows", ["a.1", "a.9"])
def test_a_program_that_is_found_to_go_through_phases_is_predicted_as_if_never_measured(
    cluster: Cluster, slow: float, beside: str, shows: str, between: str
) -> None:
    cluster.measure(slow, beside)
    others = {"b"} if beside == "b.1" else set()
    assert cluster.known() == others | {"a"}
    if between == "restart":
        cluster.restart()
    cluster.away = between == "away"
    cluster.show_phases(shows, slow)
    cluster.away = False
    for _ in range(int(TELL_EVERY_S) + 3):
        cluster.second_of({"h": {shows: FAST}})
    assert cluster.known() == others
    cluster.core.handle([Tick()], START + cluster.second + EVIDENCE_LATEST_S)
    unmeasured = new_core()
    kept = tuple(each for each in cluster.core.state.evidence.observations() if each.focal.fingerprint != "a")
    unmeasured.handle([EvidenceGathered(kept)], 1.0)
    for members in ([job("a"), job("b")], [job("a", None), job("a", None)]):
        assert cluster.core.predictor.predict(members, TYPE) == unmeasured.predictor.predict(members, TYPE)
    for _ in range(2):
        for book in (cluster.prm._evidence.book, cluster.prm._watch._book):
            assert {each.focal.fingerprint for each in book.observations()} == others
        cluster.restart()
    saved = load_observations(cluster.folder / "evidence.jsonl").observations
    assert {each.focal.fingerprint for each in saved} == others


def test_what_an_older_version_has_kept_of_such_a_program_is_withdrawn_when_the_prm_starts(cluster: Cluster) -> None:
    cluster.show_phases("a.1", FAST / 100.0)
    cluster.prm.close()
    save_observations(cluster.folder / "evidence.jsonl", [measured("a", "b", 0.01 + 0.02), measured("b", "a", 0.9)])
    cluster.core.handle([EvidenceGathered((measured("a", "b", 0.01 + 0.02),))], START + cluster.second)
    cluster.prm = cluster.start()
    for _ in range(3):
        cluster.second_of({"elsewhere": {"c.1": 10.0}})
    assert cluster.known() <= {"b"}
    assert {each.focal.fingerprint for each in cluster.prm._evidence.book.observations()} == {"b"}


def test_a_program_without_a_rate_alone_and_a_young_one_withdraw_nothing(cluster: Cluster) -> None:
    cluster.measure(FAST / 2.0, "b.1")
    known = cluster.core.state.evidence.observations()
    for _ in range(20):
        cluster.second_of({"h": {"a.9": FAST}, "i": {"b.9": 10.0}})
    offline = replace(measured("a", "c"), focal=job("a", None))
    cluster.core.handle([EvidenceGathered((offline,))], START + cluster.second)
    cluster.core.handle([Tick()], START + cluster.second + EVIDENCE_LATEST_S)
    assert set(by_key(known)) < set(by_key(cluster.core.state.evidence.observations()))
