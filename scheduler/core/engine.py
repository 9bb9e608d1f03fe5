"""The core: events in, commands out. No I/O, no clock, no randomness: the same events give the same decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cotenant.configs.settings import Settings
from cotenant.forecasting.types import InterferencePredictor
from cotenant.placement.engine import PlacementPolicy, policy
from cotenant.placement.resize import ResizeMemory, resize_gpu
from cotenant.scheduler.core.colocation import refresh
from cotenant.scheduler.core.commands import Command
from cotenant.scheduler.core.cycle import run_cycle
from cotenant.scheduler.core.deadlines import running_outlook
from cotenant.scheduler.core.events import Event
from cotenant.scheduler.core.handlers import HANDLERS
from cotenant.scheduler.core.memoryguard import foresee, hand_on
from cotenant.scheduler.core.models import (
    GuardedInterference,
    Informable,
    ModelSource,
    ProfileNumbers,
    first_models,
    informed,
)
from cotenant.scheduler.core.priority import held_urgency
from cotenant.scheduler.core.rebalancing import rebalance
from cotenant.scheduler.core.records import replace
from cotenant.scheduler.core.state import State
from cotenant.scheduler.core.turn import Turn

DEADLINES_EVERY_S = 1.0
EVIDENCE_EVERY_S = 60.0
EVIDENCE_LATEST_S = 600.0
NEWS = 0.05  # of what was measured before: less of it waits for more, since taking it in has everything predicted anew


class Core:
    """Decides everything about jobs, shares and hosts. Not thread-safe: its shell calls it from one thread.

    Args:
        settings: The settings to start with.
        models: Finds the models of given versions.
        policies: Finds a placement policy by name.
    """

    def __init__(
        self,
        settings: Settings,
        models: ModelSource = first_models,
        policies: Callable[[str], PlacementPolicy] = policy,
    ) -> None:
        self.state = State(settings=settings, configured=settings)
        self.policies = policies
        self._models = models
        self._numbers = ProfileNumbers()
        self._predictor: GuardedInterference
        self._load_models()

    @classmethod
    def from_state(
        cls,
        state: State,
        models: ModelSource = first_models,
        policies: Callable[[str], PlacementPolicy] = policy,
    ) -> Core:
        """Return a core that continues from this state."""
        core = cls(state.settings, models, policies)
        core.state = state
        core._load_models()
        return core

    @property
    def predictor(self) -> InterferencePredictor:
        """Predicts how jobs on one GPU slow each other down."""
        return self._predictor

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the models, in words; empty when nothing is."""
        fault = self._predictor.fault
        model = f"interference model {self._predictor.name}: {fault}; the utilisation rule answers instead"
        return (*self.state.models.warnings, *((model,) if fault else ()))

    @property
    def policy(self) -> PlacementPolicy:
        """The placement policy in force."""
        return self.policies(self.state.settings.placement.policy)

    def handle(self, events: Sequence[Event], now: float) -> list[Command]:
        """Take in what happened and return what is to be done, in the order in which it is to be done.

        Args:
            events: What happened, in order.
            now: Unix seconds; a time before that of the last call counts as that time.
        """
        state = self.state
        state.now = max(state.now, now)
        turn = Turn(state, state.now)
        for event in events:
            HANDLERS[type(event)](turn, event)
        if turn.models_changed:
            self._load_models()
            state.line.unsettle()
        if turn.evidence_withdrawn or self._has_news(turn):
            self._take_evidence_in(turn)
        self._look_at_deadlines(turn)
        hand_on(turn, turn.members_changed)
        # Shares first follow what was measured: that frees memory for those who wait.
        if state.settings.resize.enabled:
            self._resize(turn, turn.measured, memory_wanted=bool(state.queued))
            foresee(turn, turn.measured)
        self._let_go(turn)
        if self._back_off_over(turn) or turn.dirty:
            run_cycle(turn, self.policy, self.predictor)
            state.moves.look(turn.now)
        rebalance(turn, self.policy, self.predictor)
        self._resize(turn, turn.members_changed, memory_wanted=False)
        refresh(state, turn.members_changed | turn.measured, self.predictor, turn.now)
        return turn.commands()

    def _load_models(self) -> None:
        self.state.models = self._models(self.state.model_versions)
        self._predictor = informed(self.state.models.interference, self.state.evidence.observations(), self._numbers)

    def _has_news(self, turn: Turn) -> bool:
        """Whether what was measured of jobs that share GPUs is to change predictions now."""
        state = self.state
        much = len(state.gathered) >= NEWS * len(state.evidence)
        since_s = turn.now - state.evidence_at
        return bool(state.gathered) and since_s >= (EVIDENCE_EVERY_S if much else EVIDENCE_LATEST_S)

    def _take_evidence_in(self, turn: Turn) -> None:
        """Have what was measured of jobs that share GPUs change predictions, in lots: everything is looked at anew."""
        state = self.state
        for observation, complete in state.gathered:
            (state.evidence.take if complete else state.evidence.add)(observation)
        state.gathered.clear()
        state.evidence_at = turn.now
        if isinstance(state.models.interference, Informable):
            self._predictor = informed(state.models.interference, state.evidence.observations(), self._numbers)
            state.line.unsettle()
            turn.dirty = True

    def _let_go(self, turn: Turn) -> None:
        """Offer GPUs that were kept for somebody for long enough to everybody, even if nothing else has changed."""
        if over := self.state.moves.expire(turn.now):
            self.state.floor.changed.update(self.state.gpus.keys() & set(over))
            turn.dirty = True

    def _back_off_over(self, turn: Turn) -> bool:
        """Let jobs whose back-off is over into the queue again; whether there were any."""
        due = [job for job in self.state.in_order(self.state.delayed) if job.not_before <= turn.now]
        for job in due:
            self.state.put(replace(job, not_before=0.0))
        return bool(due)

    def _look_at_deadlines(self, turn: Turn) -> None:
        """Have the shares of running jobs weigh as urgently as their deadlines are; at most once a second."""
        state = self.state
        if not len(state.dated) or turn.now - state.deadlines_seen_at < DEADLINES_EVERY_S:
            return
        state.deadlines_seen_at = turn.now
        for job in map(state.jobs.__getitem__, state.dated.stirred(turn.now, state.settings.scheduling)):
            outlook = running_outlook(job, state.progress.get(job.spec.job_id), turn.now)
            if outlook is None:
                continue
            risk_changed = outlook.at_risk != job.at_risk
            urgency = held_urgency(job.urgency, outlook, state.settings.scheduling, risk_changed=risk_changed)
            if risk_changed or urgency != job.urgency:
                state.put(replace(job, urgency=urgency, at_risk=outlook.at_risk))
                turn.measured.update(dict.fromkeys(share.gpu_id for share in job.lease.shares) if job.lease else {})

    def _resize(self, turn: Turn, gpu_ids: Iterable[str], *, memory_wanted: bool) -> None:
        """Divide these GPUs anew among their residents, by what they are seen to use.

        With resizing off, by what is known of their demand; slots of the static policy stay as they are.
        """
        state = self.state
        if state.settings.placement.policy == "static":
            return
        by_usage = state.settings.resize.enabled
        for gpu_id in gpu_ids:
            if gpu_id not in state.gpus:
                continue
            resized = resize_gpu(
                state.view(gpu_id),
                state.signals(gpu_id) if by_usage else {},
                state.resize_memory.get(gpu_id, ResizeMemory()),
                turn.now,
                settings=state.settings.resize,
                memory_margin=state.settings.placement.memory_margin,
                memory_wanted=memory_wanted,
            )
            state.resize_memory[gpu_id] = resized.memory
            for job_id, share in resized.shares.items():
                turn.resize(state.jobs[job_id], {gpu_id: share}, resized.reasons[job_id])
