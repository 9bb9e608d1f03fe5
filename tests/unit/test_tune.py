"""Studies: the default comes first, what is done stays done, other data are refused, and nothing is seen too early."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from interference_tables import FAMILIES, measured
from studying import Murderous, Toy

from cotenant.forecasting.datasets.series import ValueSeries
from cotenant.forecasting.demand.engine import MixtureSettings
from cotenant.forecasting.training import crews, studies
from cotenant.forecasting.training.crews import Alone, Crew, Processes, run
from cotenant.forecasting.training.demand_fit import TrainingOptions
from cotenant.forecasting.training.interference import InterferenceOptions
from cotenant.forecasting.training.problems import (
    AUTO,
    Options,
    PairProblem,
    SeriesProblem,
    demand_options,
    interference_options,
    joint_fingerprint,
    parted,
)
from cotenant.forecasting.training.scores import FoldScore, combined
from cotenant.forecasting.training.studies import Plan, Progress, StudyError, located, opened, outcome, progress


def plan(tmp_path: Path, problem: Any = None, where: str = "", at_once: int = 1, study: str = "s") -> Plan:
    return Plan(problem or Toy(), located(where or str(tmp_path / "studies"), study), study, 0, at_once)


def tell_nobody(_: Progress) -> None: ...


def tuned(plan: Plan, trials: int, timeout_s: float | None = None) -> studies.Outcome:
    with opened(plan) as study:
        run(study, crew(plan, study), trials, timeout_s, tell_nobody)
        return outcome(plan, study)


def crew(plan: Plan, study: optuna.Study) -> Crew:
    return Alone(plan, study) if plan.at_once == 1 else Processes(plan, study)


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    studies.quiet()
    yield
    optuna.logging.set_verbosity(before)


class TestStudies:
    @pytest.mark.parametrize("where", ["", "file.journal"])
    def test_the_default_comes_first_and_the_best_is_never_worse(self, tmp_path: Path, where: str) -> None:
        problem = Toy()
        found = tuned(plan(tmp_path, problem, where and str(tmp_path / where)), 20)
        assert problem.seen[0] == 1.0
        assert found.progress.done == len(problem.seen) == 20
        assert found.default == {"x": 1.0}
        assert found.default_score.metrics["error"] == 4.0
        assert found.best_score.metrics["error"] < 4.0
        assert found.best_unseen.metrics["error"] == pytest.approx((float(found.best["x"]) - 2.5) ** 2)
        assert found.default_unseen.metrics["error"] == pytest.approx(2.25)
        assert found.best_score.group == "all 4 groups"

    def test_hopeless_trials_are_pruned_and_the_default_never_is(self, tmp_path: Path) -> None:
        with opened(plan(tmp_path)) as study:
            run(study, Alone(plan(tmp_path), study), 25, None, tell_nobody)
            states = [trial.state.name for trial in study.trials]
            steps = {len(t.intermediate_values) for t in study.trials if t.state is optuna.trial.TrialState.PRUNED}
        assert states[0] == "COMPLETE"
        assert "PRUNED" in states
        assert steps == {2}  # after two of four groups

    def test_a_study_goes_on_where_it_ended(self, tmp_path: Path) -> None:
        first, second = Toy(), Toy()
        tuned(plan(tmp_path, first), 5)
        found = tuned(plan(tmp_path, second), 12)
        assert len(first.seen) == 5
        assert len(second.seen) == 7
        assert found.progress.done == 12
        assert not set(first.seen) & set(second.seen)  # not the same draws once more
        third = Toy()
        assert tuned(plan(tmp_path, third), 12).best == found.best
        assert third.seen == []

    def test_the_same_seed_finds_the_same(self, tmp_path: Path) -> None:
        a, b = tuned(plan(tmp_path / "a"), 12), tuned(plan(tmp_path / "b"), 12)
        assert a.best == b.best

    def test_an_interrupted_study_keeps_what_is_done_and_repeats_what_is_not(self, tmp_path: Path) -> None:
        class Interrupted(Toy):
            def folds(self, options: Options) -> Iterator[FoldScore]:
                if len(self.seen) == 3:
                    raise KeyboardInterrupt
                return super().folds(options)

        with pytest.raises(KeyboardInterrupt):
            tuned(plan(tmp_path, Interrupted()), 10)
        with opened(plan(tmp_path)) as study:
            assert progress(study).done == 3
        second = Toy()
        assert tuned(plan(tmp_path, second), 10).progress.done == 10
        assert len(second.seen) == 7

    def test_a_default_that_was_interrupted_is_asked_for_again(self, tmp_path: Path) -> None:
        class Interrupted(Toy):
            def folds(self, options: Options) -> Iterator[FoldScore]:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tuned(plan(tmp_path, Interrupted()), 10)
        second = Toy()
        assert tuned(plan(tmp_path, second), 3).default_score.metrics["error"] == 4.0
        assert second.seen[0] == 1.0

    def test_options_that_cannot_be_trained_with_count_and_do_not_win(self, tmp_path: Path) -> None:
        found = tuned(plan(tmp_path, Toy(cliff=2.0)), 20)
        assert found.progress.unfit > 0
        assert found.progress.done == 20
        assert float(found.best["x"]) <= 2.0

    def test_a_default_that_cannot_be_scored_says_why(self, tmp_path: Path) -> None:
        with pytest.raises(StudyError, match=r"default options could not be scored: ValueError: x: 1\.0 cannot be"):
            tuned(plan(tmp_path, Toy(cliff=0.0)), 2)

    def test_a_gain_that_does_not_hold_is_not_chosen(self, tmp_path: Path) -> None:
        class Lucky(Toy):
            def unseen(self, options: Options) -> FoldScore:
                return FoldScore("e", 1, {"error": abs(float(options["x"]) - 1.0)}, {"simple": 5.0})

        found = tuned(plan(tmp_path, Lucky()), 15)
        assert found.best_score.metrics["error"] < found.default_score.metrics["error"]
        assert not found.holds
        assert found.chosen == {"x": 1.0}

    def test_no_trial_begins_after_the_time_is_over(self, tmp_path: Path) -> None:
        with opened(plan(tmp_path)) as study:
            run(study, Alone(plan(tmp_path), study), 10, 0.0, tell_nobody)
            assert progress(study).done == 0
        with pytest.raises(StudyError, match="could not be scored yet; give the study more time or trials"):
            tuned(plan(tmp_path), 10, 0.0)

    def test_progress_is_told(self, tmp_path: Path) -> None:
        told: list[Progress] = []
        with opened(plan(tmp_path)) as study:
            run(study, Alone(plan(tmp_path), study), 3, None, told.append)
        assert [each.done for each in told] == [0, 1, 2, 3]
        assert [each.default for each in told] == [None, 4.0, 4.0, 4.0]

    @pytest.mark.parametrize("where", ["", "file.journal"])
    @pytest.mark.parametrize("moment", ["found", "told"])
    @pytest.mark.filterwarnings("ignore:Heartbeat of storage")  # none is needed here
    def test_a_trial_that_ends_while_it_is_buried_is_not_done_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, moment: str
    ) -> None:
        there = plan(tmp_path, where=where and str(tmp_path / where))
        with opened(there) as study, opened(there) as worker:
            trial = worker.ask()
            trial.set_user_attr("worker", "w")
            find, tell = study.get_trials, study.sampler.after_trial

            def ends(*_: object) -> None:
                monkeypatch.undo()
                worker.tell(trial, 1.0)

            def found(**options: Any) -> list[optuna.trial.FrozenTrial]:
                trials = find(**options)
                ends()
                return trials

            def told(*what: Any) -> None:
                ends()
                tell(*what)

            if moment == "found":
                monkeypatch.setattr(study, "get_trials", found)
            else:
                monkeypatch.setattr(study.sampler, "after_trial", told)
            assert studies.bury(study, {"w"}) == 0
            assert [each.state.name for each in study.trials] == ["COMPLETE"]


class TestRefused:
    def test_other_data_are_refused_and_both_are_named(self, tmp_path: Path) -> None:
        tuned(plan(tmp_path), 1)
        with pytest.raises(StudyError, match=r"study: 's' in .*s\.db belongs to another data: 'd1', not 'd2'"):
            tuned(plan(tmp_path, Toy(data="d2")), 2)
        with pytest.raises(StudyError, match="belongs to another kind: 'interference', not 'demand'"):
            tuned(plan(tmp_path, Toy(kind="demand", data="d2")), 2)

    def test_what_the_user_said_is_named_before_what_follows_from_it(self, tmp_path: Path) -> None:
        known = {"kind": "k", "data": "d", "never seen": "a", "objective": "MAE", "quantity": "util", "seed": 1}
        for said in ("seed", "quantity", "data", "kind"):
            with pytest.raises(StudyError, match=f"belongs to another {said}: "):
                studies._check_identity(plan(tmp_path), known, known | {"never seen": "b", said: "other"})

    def test_a_study_of_somebody_else_is_refused(self, tmp_path: Path) -> None:
        there = plan(tmp_path)
        study = optuna.create_study(study_name="s", storage=there.location)
        study.add_trial(optuna.create_trial(value=1.0))
        with pytest.raises(StudyError, match="was not made by 'cotenant tune'"):
            tuned(there, 2)

    @pytest.mark.parametrize("content", ["this is no database\n" * 100, "SQLite format 3\0 cut short"])
    def test_a_file_that_is_no_database_is_refused(self, tmp_path: Path, content: str) -> None:
        there = plan(tmp_path)
        (tmp_path / "studies" / "s.db").write_text(content)
        with pytest.raises(StudyError, match=r"storage: .*s\.db cannot be used .*; give another --storage"):
            tuned(there, 2)
        assert (tmp_path / "studies" / "s.db").read_text() == content

    @pytest.mark.parametrize("content", ["no journal\nat all\n", '{"op": 99}\n{"half', "[1, 2]\n[3]\n"])
    def test_a_file_that_is_no_journal_is_refused(self, tmp_path: Path, content: str) -> None:
        file = tmp_path / "x.journal"
        file.write_text(content)
        with pytest.raises(StudyError, match=r"storage: .*x\.journal cannot be used"):
            tuned(plan(tmp_path, where=str(file)), 2)

    @pytest.mark.parametrize(
        "url", ["nosuchdb://host/x", "sqlite:////proc/nowhere/x.db", "postgresql://nobody@127.0.0.1:1/x"]
    )
    def test_a_database_that_is_not_there_is_refused(self, tmp_path: Path, url: str) -> None:
        with pytest.raises(StudyError, match="cannot be used"):
            tuned(plan(tmp_path, where=url), 2)

    def test_a_folder_that_cannot_be_made_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StudyError, match=r"storage: .* is not accepted"):
            located(str(tmp_path / "file" / "below"), "s")

    def test_too_few_groups_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"data: 2 families \(a, b\) are not enough; at least 3"):
            parted(["a", "b"], 0, "families")
        with pytest.raises(ValueError, match="data: 0 families are not enough"):
            parted([], 0, "families")


class TestProcesses:
    def test_several_processes_share_one_study(self, tmp_path: Path) -> None:
        found = tuned(plan(tmp_path, at_once=2), 6)
        assert found.progress.done == 6
        assert found.default_score.metrics["error"] == 4.0

    def test_a_killed_worker_costs_no_trial(self, tmp_path: Path) -> None:
        deadly = tmp_path / "deadly"
        deadly.touch()
        there = plan(tmp_path, Toy(deadly=str(deadly)), at_once=2)
        with opened(there) as study:
            run(study, Processes(there, study), 5, None, tell_nobody)
            found = outcome(there, study)
            died = [trial for trial in study.trials if trial.state is optuna.trial.TrialState.FAIL]
            again = [trial for trial in study.trials if trial.system_attrs.get("failed_trial") == died[0].number]
        assert not deadly.exists()
        assert found.progress.done == 5
        assert len(died) == 1
        assert [trial.params for trial in again] == [died[0].params]

    @pytest.mark.parametrize("left", [True, False])
    def test_what_was_begun_without_leaving_a_name_is_put_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bool
    ) -> None:
        """A worker may be killed there; one that lives, of another run, leaves its name in a moment."""
        monkeypatch.setattr(crews, "NAMELESS_S", 0.5)
        there = plan(tmp_path)
        with opened(there) as study:
            study.enqueue_trial({"x": 0.5})
            with pytest.warns(UserWarning, match="Heartbeat"):
                begun = study.ask()
            timer = threading.Timer(0.2, begun.set_user_attr, ("worker", "another"))
            if left:
                timer.start()
            run(study, Alone(there, study), 2, None, tell_nobody)
            timer.cancel()
            waits = [trial for trial in study.trials if trial.state is optuna.trial.TrialState.WAITING]
            state = study.trials[begun.number].state
        assert state is (optuna.trial.TrialState.RUNNING if left else optuna.trial.TrialState.FAIL)
        assert len(waits) == (0 if left else 1)

    @pytest.mark.parametrize("where", ["folder", "file.journal"])
    def test_a_trial_that_waits_is_done_by_one_worker_only(self, tmp_path: Path, where: str) -> None:
        there = plan(tmp_path, where=str(tmp_path / where))
        with opened(there) as study:
            for x in range(39):
                study.enqueue_trial({"x": float(x)})

        taken: list[int] = []

        def work(_: int) -> None:
            with opened(there) as mine:
                mine.optimize(lambda trial: taken.append(trial.number) or 0.0, n_trials=10)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert sorted(taken) == list(range(40))

    def test_workers_that_keep_dying_end_the_study(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(crews, "MOST_DEATHS", 1)
        there = plan(tmp_path, Murderous(), at_once=2)
        with opened(there) as study, pytest.raises(StudyError, match="workers: a process ended with exit code -9"):
            run(study, Processes(there, study), 4, None, tell_nobody)


class TestPairs:
    def problem(self, mode: str = "timeslice", seed: int = 0) -> PairProblem:
        return PairProblem(measured(), mode, "f", seed)

    def test_families_are_parted_by_the_seed(self) -> None:
        parts = {(self.problem(seed=seed).inner, self.problem(seed=seed).outer) for seed in range(8)}
        assert all(set(inner) | set(outer) == set(FAMILIES) and len(outer) == 1 for inner, outer in parts)
        assert len(parts) > 1

    def test_the_study_never_sees_the_outer_family(self) -> None:
        problem = self.problem()
        folds = list(problem.folds(problem.default()))
        assert {fold.group for fold in folds} == set(problem.inner)
        assert {fold.rows for fold in folds} == {81 - 36}  # 9 jobs left; 6 without the family held out
        unseen = problem.unseen(problem.default())
        assert (unseen.group, unseen.rows) == (problem.outer[0], 63)

    def test_the_default_is_the_default(self) -> None:
        assert interference_options(self.problem("mps").default()) == InterferenceOptions()
        assert self.problem().default() == {"near": 1.0, "far": 2.0, "noise": 0.03, "tails": 4.0, "mix": AUTO}

    @pytest.mark.parametrize("mode", ["timeslice", "mps"])
    def test_what_is_drawn_can_be_fitted_with(self, mode: str) -> None:
        problem, study = self.problem(mode), optuna.create_study()
        for _ in range(20):
            options = problem.suggest(study.ask())
            assert ("prior_pull" in options) == (mode == "mps")
            interference_options(options)
        assert set(options) == set(problem.default())

    def test_a_real_study_of_pairs(self, tmp_path: Path) -> None:
        there = plan(tmp_path, self.problem())
        found = tuned(there, 6)
        assert found.best_score.metrics["MAE"] <= found.default_score.metrics["MAE"]
        assert found.default_score == combined(list(there.problem.folds(there.problem.default())))
        assert found.best_unseen.group == there.problem.outer[0]

    def test_two_families_are_too_few(self) -> None:
        two = [each for each in measured() if {each.focal.family, each.others[0].family} <= {"conv", "gan"}]
        with pytest.raises(ValueError, match=r"data: 2 families of jobs \(conv, gan\) are not enough"):
            PairProblem(two, None, "f")


class TestSeries:
    SETTINGS = MixtureSettings(horizons=(1, 3), last=20, gains=(0.3,))

    def series(self) -> list[ValueSeries]:
        rng = np.random.default_rng(0)
        wave = 0.5 + 0.4 * np.sign(np.sin(np.arange(90) * 0.7))
        return [ValueSeries(name, "0", np.clip(wave + rng.normal(0.0, 0.02, 90), 0.0, 1.0)) for name in "abcd"]

    def problem(self, **more: Any) -> SeriesProblem:
        return SeriesProblem(self.series(), "util", "f", settings=self.SETTINGS, **more)

    def test_the_default_is_the_default(self) -> None:
        kinds, options = demand_options(self.problem().default(), 0)
        assert (kinds, options) == (("gru", "tcn", "trees"), TrainingOptions())

    def test_only_what_matters_is_drawn(self) -> None:
        problem, study = self.problem(), optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        drawn = [problem.suggest(study.ask()) for _ in range(40)]
        for options in drawn:
            assert ("trees" in options) == ("trees" in str(options["experts"]))
            assert ("updates" in options) == bool({"gru", "tcn"} & set(str(options["experts"]).split("+")))
            demand_options(options, 0)
        assert len({options["experts"] for options in drawn}) == 7

    def test_a_real_study_of_series(self, tmp_path: Path) -> None:
        there = plan(tmp_path, self.problem(kinds=("trees",)))
        assert (len(there.problem.inner), len(there.problem.outer)) == (3, 1)
        found = tuned(there, 3)
        assert found.best_score.metrics[found.objective] <= found.default_score.metrics[found.objective]
        assert found.best_unseen.group == there.problem.outer[0]
        assert found.best_unseen.baselines["EWMA, MAE / persistence"] > 0.0

    def test_many_recordings_are_dealt_into_few_parts(self) -> None:
        many = [
            ValueSeries(f"{name}{n}", "0", each.values)
            for n in range(3)
            for each in self.series()
            for name in each.source
        ]
        problem = SeriesProblem(many, "util", "f", settings=self.SETTINGS, kinds=("trees",))
        assert (len(problem.inner), len(problem.outer), problem.steps) == (10, 2, 5)
        folds = list(problem.folds({"experts": "trees", "trees": 3}))
        assert sorted(name for fold in folds for name in fold.group.split(", ")) == list(problem.inner)
        assert problem.unseen({"experts": "trees", "trees": 3}).group == ", ".join(problem.outer)

    def test_two_recordings_are_too_few(self) -> None:
        with pytest.raises(ValueError, match="data: 2 sources with series long enough"):
            SeriesProblem(self.series()[:2], "util", "f", settings=self.SETTINGS)


def test_one_fingerprint_for_several_data() -> None:
    assert joint_fingerprint(["a"]) == "a"
    assert joint_fingerprint(["a", "b"]) == joint_fingerprint(["b", "a"]) != joint_fingerprint(["a", "c"])
