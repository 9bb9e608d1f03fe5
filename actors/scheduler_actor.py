"""The scheduler actor: a shell around the pure core. It owns the clock, the journal and the host agents' actors."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from pathlib import Path

from ray.exceptions import RayError

from cotenant.actors.clock import SteadyClock
from cotenant.actors.contacts import HostContact, Request, answer, log
from cotenant.actors.fleet import Fleet
from cotenant.actors.leaving import Leaving, kept_off, to_end
from cotenant.actors.messages import HostReport
from cotenant.actors.models import ModelShelf
from cotenant.actors.ratelimit import RateLimiter
from cotenant.actors.scaling import Scaler
from cotenant.actors.vital import start_vital_thread
from cotenant.configs.settings import Settings
from cotenant.scheduler import resources
from cotenant.scheduler.core import queries, whatif
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import (
    ClientLost,
    Event,
    EvidenceGathered,
    HostJoined,
    HostLost,
    HostUnreachable,
    JobSubmitted,
    LeaseReturned,
    MeasurementsReported,
    ModelsChanged,
    SettingsChanged,
    StopRequested,
    Tick,
)
from cotenant.scheduler.core.model import Job, JobSpec, Wish
from cotenant.scheduler.core.reconcile import reconcile
from cotenant.scheduler.errors import CotenantError, GoingDown, JobNotFound, NotConnected, NotHandled
from cotenant.scheduler.journal.ledger import Ledger, Taken
from cotenant.scheduler.journal.store import Journal, JournalError, JournalTaken, NotRecordable
from cotenant.scheduler.specs import check_queue, check_reason, check_spec
from cotenant.scheduler.steering import Steering, check_moved, order
from cotenant.scheduler.tuning import Changes, changed, tuning_of, with_tuning
from cotenant.scheduler.views import (
    AccountView,
    AllocationView,
    Explanation,
    GpuView,
    Health,
    HostView,
    JobView,
    PlanView,
    ResourcesView,
    ServingView,
    TuningView,
)

TICK_S = 0.5
REQUEST_RATE, REQUEST_BURST = 2.0, 10  # what one job may ask of its lease: a second in the long run, and at once
SILENT_S = 3.0  # an agent that has not reported for this long gets no new jobs


class Scheduler:
    """Methods of the scheduler actor. All state that matters is in the core and its journal.

    Requests are committed in groups: whatever arrived while the last group was being written is journaled in one
    transaction, handled in one cycle, acknowledged, and only then are the commands sent out.
    """

    def __init__(
        self,
        settings_json: str,
        journal_url: str,
        state_dir: str,
        fleet: Fleet | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.settings = Settings.model_validate_json(settings_json)
        self._shelf = ModelShelf(self.settings.prediction, Path(state_dir))
        self._ledger = Ledger(journal or Journal(journal_url), self.settings, self._shelf.load)
        self._clock = SteadyClock(self._core.state.now)
        self._lock = threading.RLock()
        self._inbox: queue.Queue[Request] = queue.Queue()
        hosts = list(self._core.state.hosts)
        self._contacts = {host_id: HostContact(time.monotonic()) for host_id in hosts}
        self._clients: dict[str, float] = {}
        self._clients_watched_at = time.monotonic()
        self._limiter = RateLimiter(REQUEST_RATE, REQUEST_BURST)
        self._fleet = fleet or Fleet(self.settings)
        self._scaler = Scaler(self._fleet.resize)
        self._leaving = Leaving(Path(state_dir), self._fleet.identity())
        self._stopping = threading.Event()
        self._ended = threading.Event()  # the commit loop has
        if hosts:  # whether they still exist shows when they report; until then nothing is placed there
            self._take_in([HostUnreachable(host_id, "not heard of since the restart") for host_id in hosts])
        self._follow_models(self._take_in)
        gc.freeze()  # what was restored stays: with 100,000 jobs looking through it for garbage stops all else
        start_vital_thread("commit", self._commit_loop)
        start_vital_thread("watch", self._watch_loop)

    # -- what clients call ------------------------------------------------------------------------------------------

    def ping(self) -> int:
        """Return the process id; used by health checks."""
        return os.getpid()

    def submit(self, specs: list[JobSpec]) -> list[JobView]:
        """Accept jobs; durable on return. A job id that is known already is the same job, also while going down."""
        with self._lock:
            if self._leaving.on and any(spec.job_id not in self._core.state.jobs for spec in specs):
                raise GoingDown
        for spec in specs:
            check_spec(spec)
            check_queue(spec, self._core.state.settings)
        self._commit([JobSubmitted(spec) for spec in specs])
        with self._lock:
            self._clients.update({spec.job_id: time.monotonic() for spec in specs if spec.attached})
            return [self._view(spec.job_id) for spec in specs]

    def stop(self, job_ids: list[str], reason: str) -> list[JobView]:
        """Ask for the end of jobs, all in one transaction; none is stopped when one of them is not known."""
        check_reason(reason)
        with self._lock:
            for job_id in job_ids:
                self._known(job_id)
        self._commit([StopRequested(job_id, reason) for job_id in job_ids])
        return [self.job(job_id) for job_id in job_ids]

    def return_lease(self, job_id: str, epoch: int) -> JobView:
        """The program of a lease gives it back, as it was asked to."""
        self._commit([LeaseReturned(job_id, epoch)])
        return self.job(job_id)

    def steer(self, job_id: str, what: Steering, to: str | None, reason: str) -> JobView:
        """Suspend, resume or move a job; what makes no sense is refused and changes nothing."""
        check_reason(reason)
        with self._lock:
            event = order(self._core.state, job_id, what, to, reason)
        self._commit([event])
        with self._lock:
            check_moved(self._core, event, to)
            return self._view(job_id)

    def renew(self, job_ids: list[str]) -> list[JobView]:
        """The clients of these attached jobs are alive. Returns the jobs."""
        with self._lock:
            for job_id in job_ids:
                self._known(job_id)
                if job_id in self._clients:
                    self._clients[job_id] = time.monotonic()
            return [self._view(job_id) for job_id in job_ids]

    def job(self, job_id: str) -> JobView:
        """Return one job."""
        with self._lock:
            self._known(job_id)
            return self._view(job_id)

    def jobs(self, active_only: bool, limit: int | None) -> list[JobView]:
        """Return jobs, newest first."""
        with self._lock:
            return queries.jobs(self._core.state, active_only=active_only, limit=limit, controls=self._controls())

    def allocate(self, job_id: str, wish: Wish) -> AllocationView:
        """Answer what a job, or somebody for it, asks of its lease."""
        with self._lock:
            event = resources.asked(self._known(job_id), wish)
        self._limiter.take(job_id)
        self._commit([event])
        with self._lock:
            return resources.answer_view(self._core.state, self._known(job_id), wish.request_id)

    def resources(self, job_id: str) -> ResourcesView:
        """Return what a job has and could have of each of its GPUs."""
        self._limiter.take(job_id)
        with self._lock:
            return resources.resources_view(self._core.state, self._known(job_id))

    def gpus(self) -> list[GpuView]:
        """Return all GPUs."""
        with self._lock:
            return queries.gpus(self._core.state)

    def hosts(self) -> list[HostView]:
        """Return all hosts."""
        with self._lock:
            views, offset = [], time.time() - time.monotonic()
            for view in queries.hosts(self._core.state):
                contact = self._contacts.setdefault(view.host_id, HostContact(time.monotonic()))
                views.append(view.model_copy(update={"last_report_at": contact.seen + offset, **contact.told()}))
            return views

    def explain(self, job_id: str) -> Explanation:
        """Say why a job is where it is."""
        with self._lock:
            self._known(job_id)
            core, now, held = self._core, self._clock.now(), self._controls().get(job_id, "")
            return queries.explain(core.state, job_id, now, held, predictor=core.predictor, policy=core.policy)

    def accounts(self) -> list[AccountView]:
        """Return what tenants and queues may have, hold and have used."""
        with self._lock:
            return queries.accounts(self._core.state, self._clock.now())

    def plan(self, specs: list[JobSpec], changes: Changes) -> PlanView:
        """Say what would happen to these jobs, and to all others under changed settings; nothing is changed."""
        for spec in specs:
            check_queue(spec, self._core.state.settings)
        with self._lock:
            settings = self._core.state.settings
            tried = with_tuning(settings, changed(tuning_of(settings), changes)) if changes else None
            return whatif.plan(self._core, specs, self._clock.now(), tried)

    def tuning(self) -> TuningView:
        """Return the settings that can change while everything runs."""
        with self._lock:
            return tuning_of(self._core.state.settings)

    def set_tuning(self, tuning: TuningView) -> TuningView:
        """Change them, from the next cycle on."""
        self._commit([SettingsChanged(tuning.placement, tuning.resize, tuning.scheduling, tuning.rebalance)])
        return self.tuning()

    def change_tuning(self, changes: Changes) -> TuningView:
        """Change some of them, from the next cycle on."""
        return self.set_tuning(changed(self.tuning(), changes))

    def models(self) -> ServingView:
        """Say which models serve here."""
        with self._lock:
            state, warnings = self._core.state, self._core.warnings
            models, gpu_types = state.models, {gpu.gpu_type for gpu in state.gpus.values()}
            evidence = len(state.evidence)
        told = [*self._shelf.warnings(models.serving), *warnings]
        return ServingView(serving=self._shelf.serving(models, gpu_types), warnings=told, evidence=evidence)

    def health(self) -> Health:
        """Say whether all parts answer."""
        with self._lock:
            silence = {host_id: time.monotonic() - contact.seen for host_id, contact in self._contacts.items()}
            note = self._ledger.note()
        serves = self.models()
        said = serves.warnings or [f"{kind}: {version}" for kind, version in sorted(serves.serving.items())]
        return self._fleet.health(silence, note, "; ".join(said))

    def location(self, job_id: str) -> list[tuple[str, int]]:
        """Return (host id, epoch) of every host that holds the job or held it last, then of its earlier runs."""
        with self._lock:
            self._known(job_id)
            return queries.location(self._core.state, job_id)

    # -- what host agents and the PRM call --------------------------------------------------------------------------

    def report(self, report: HostReport) -> bool:
        """Take in a host agent's report. Returning is the answer that renews the host's leases.

        Returns:
            Whether its events are recorded. If not, they have to come again; the leases hold all the same: whoever
            cannot write for a while must not lose the jobs that run.
        """
        host_id = report.host.host_id
        with self._lock:
            contact = self._contacts.setdefault(host_id, HostContact(time.monotonic()))
            if report.number < contact.number:
                return False  # its agent has given it up and sent a newer one
            contact.number = report.number
            contact.seen = time.monotonic()
            contact.heard(report)
            known = self._core.state.hosts.get(host_id)
            joined = not self._leaving.on and (known is None or not known.reachable or known.gpus != report.host.gpus)
        events: list[Event] = [HostJoined(report.host)] if joined else []
        recorded = self._record([*events, *report.events])
        with self._lock:
            if contact.number != report.number:
                return recorded  # a newer report has come meanwhile: this inventory is old
            contact.seen = time.monotonic()
            missing, commands = reconcile(self._core.state, host_id, report.inventory, self._clock.now())
        self._record(missing)
        self._fleet.dispatch(commands)
        return recorded

    def measurements(self, event: MeasurementsReported) -> None:
        """Take in one host's measurements and forecasts."""
        self._commit([event])

    def evidence(self, event: EvidenceGathered) -> None:
        """Take in how fast jobs were that share GPUs."""
        self._commit([event])

    # -- lifecycle --------------------------------------------------------------------------------------------------

    def shut_down(self) -> int:
        """Take no jobs and start none from now on, and stop those that hold something; returns how many those were.

        Jobs that wait stay in the journal. That nothing starts is recorded before it is looked what runs: a job that
        was taken until then is stopped or waits, and none is left running.
        """
        with self._lock:
            self._leaving.begin()
            hosts = list(self._core.state.hosts)
        self._commit([HostUnreachable(host_id, str(GoingDown())) for host_id in hosts])
        with self._lock:
            active = to_end(self._core.state)
        self._commit([StopRequested(job_id, "cotenant down") for job_id in active])
        return len(active)

    def close(self) -> None:
        """Stop the background threads, write a snapshot and close the journal.

        The next scheduler, perhaps of another version, then starts from the state as it is instead of deciding anew.
        """
        self._stopping.set()
        self._inbox.put(Request([]))
        with self._lock:
            self._ledger.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _core(self) -> Core:
        return self._ledger.core

    def _known(self, job_id: str) -> Job:
        job = self._core.state.jobs.get(job_id)
        if job is None:
            raise JobNotFound(job_id)
        return job

    def _view(self, job_id: str) -> JobView:
        return queries.job(self._core.state, job_id, controls=self._controls())

    def _controls(self) -> dict[str, str]:
        return {job_id: text for contact in self._contacts.values() for job_id, text in contact.controls.items()}

    def _commit(self, events: Sequence[Event]) -> None:
        """Have events recorded and handled.

        Raises:
            JournalError: They could not be recorded.
            NotRecordable: One of them can never be.
            NotHandled: One of them could not be handled and was set aside; the others count.
        """
        self._enqueue(events).done.result()

    def _enqueue(self, events: Sequence[Event]) -> Request:
        request = Request(events)
        self._inbox.put(request)
        if self._ended.is_set():
            self._turn_away()
        return request

    def _turn_away(self) -> None:
        """Nobody handles requests any more: nobody must wait for it."""
        while not self._inbox.empty():
            with contextlib.suppress(queue.Empty, InvalidStateError):
                self._inbox.get_nowait().done.set_exception(NotConnected("the scheduler is being shut down"))

    def _record(self, events: Sequence[Event]) -> bool:
        """Have a host's events recorded; False when they have to come again. What was set aside need not."""
        try:
            if events:
                self._commit(events)
        except NotHandled as error:
            log(f"report: {error}")
        except NotRecordable as error:
            if len(events) > 1:  # the others are not to blame
                return all(self._record([event]) for event in events)
            log(f"report: {error}")
        except JournalError as error:
            log(f"report: {error}")
            return False
        return True

    def _commit_loop(self) -> None:
        try:
            while not self._stopping.is_set():
                group = [self._inbox.get()]
                while not self._inbox.empty():
                    group.append(self._inbox.get_nowait())
                self._settle(group)
        finally:
            self._ended.set()
            self._turn_away()

    def _settle(self, group: Sequence[Request]) -> None:
        """Record and handle these requests together, answer each, and send the commands."""
        events = [event for request in group for event in request.events]
        try:
            taken = self._take_in(events) if events else Taken()
        except NotRecordable as error:
            if len(group) > 1:  # the others are not to blame
                for request in group:
                    self._settle([request])
            else:
                group[0].done.set_exception(error)
            return
        except JournalError as error:
            for request in group:
                request.done.set_exception(error)
            if isinstance(error, JournalTaken):
                raise  # another scheduler is in charge: this one must end
            return
        answer(group, taken)
        self._fleet.dispatch(taken.commands)

    def _take_in(self, events: Sequence[Event]) -> Taken:
        with self._lock:
            events = kept_off(events) if self._leaving.on else events
            taken = self._ledger.take_in(events, self._clock.now())
            try:
                self._ledger.snapshot_if_due()
            except JournalTaken:
                raise
            except JournalError as error:  # the events are recorded: only the next recovery takes longer
                log(f"snapshot: {error}")
            return taken

    def _watch_loop(self) -> None:
        while not self._stopping.wait(TICK_S):
            self._guarded("hosts", self._watch_hosts)
            self._guarded("clients", self._watch_clients)
            self._guarded("models", lambda: self._follow_models(self._commit))
            self._guarded("tick", lambda: self._commit([Tick()]))
            if not self._leaving.on:
                self._guarded("size", lambda: self._scaler.look(self._lock, self._core, self._clock.now()))

    def _guarded(self, what: str, step: Callable[[], None]) -> None:
        """Run one step of the watch loop; Ray or the journal being unavailable for a while must not end the loop."""
        try:
            step()
        except JournalTaken:
            raise
        except (CotenantError, RayError, ConnectionError, TimeoutError) as error:
            log(f"watching {what}: {error}")

    def _follow_models(self, take_in: Callable[[Sequence[Event]], object]) -> None:
        """Have the models predict that are active in the registry."""
        versions = self._shelf.wanted()
        versions.pop("demand", None)  # serves in the PRM
        with self._lock:
            known = self._core.state.model_versions
        if versions != known:
            take_in([ModelsChanged(versions)])

    def _excuse_clients(self, now: float) -> None:
        """While the scheduler itself was held up it heard nobody: no client is to blame for that time."""
        stalled_s, self._clients_watched_at = now - self._clients_watched_at - TICK_S, now
        if stalled_s >= TICK_S:
            for job_id, seen in self._clients.items():
                self._clients[job_id] = min(now, seen + stalled_s)

    def _watch_hosts(self) -> None:
        alive = self._fleet.ensure_agents()
        silent_for = self.settings.lease.ttl_s + 2.0  # the runner looks every second, plus its own grace
        events: list[Event] = []
        lost: list[str] = []
        with self._lock:
            now = time.monotonic()
            for host_id, host in self._core.state.hosts.items():
                silence = now - self._contacts.setdefault(host_id, HostContact(now)).seen
                dead = host_id not in alive
                if host.reachable and (dead or silence > SILENT_S):
                    events.append(HostUnreachable(host_id, self._fleet.why_gone(host_id) if dead else "no report"))
                if silence > silent_for:
                    lost.append(host_id)
                    events.append(HostLost(host_id, f"no report for {silence:.0f} s; its leases have expired"))
            # Under the lock: a report that comes now is handled after these, so its host joins anew.
            request = self._enqueue(events) if events else None
        if request is not None:
            request.done.result()
        for host_id in lost:
            self._fleet.forget(host_id)
        with self._lock:
            for host_id in self._contacts.keys() - self._core.state.hosts.keys() - alive:
                del self._contacts[host_id]

    def _watch_clients(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._excuse_clients(now)  # at one moment with the look at them: it may be held up between any two others
            active = set(queries.attached(self._core.state))
            for job_id in active:
                self._clients.setdefault(job_id, now)  # after a restart every client gets a fresh term
            for job_id in self._clients.keys() - active:
                del self._clients[job_id]
            gone = [j for j, seen in self._clients.items() if now - seen > self.settings.lease.client_ttl_s]
        if gone:
            self._commit([ClientLost(job_id) for job_id in gone])
            with self._lock:
                self._clients.update(dict.fromkeys(gone, now))  # told once a term, while they are being stopped
