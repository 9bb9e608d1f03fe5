"""The scheduler actor: a shell around the pure core. It owns the clock, the journal and the host agents' actors."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import ray
from ray.exceptions import RayActorError

from cotenant.actors.fleet import Fleet
from cotenant.actors.messages import HostReport
from cotenant.configs.settings import Settings
from cotenant.scheduler.core import queries
from cotenant.scheduler.core.commands import Command
from cotenant.scheduler.core.events import (
    ClientLost,
    Event,
    HostJoined,
    HostLost,
    HostUnreachable,
    JobSubmitted,
    MeasurementsReported,
    SettingsChanged,
    StopRequested,
    Tick,
)
from cotenant.scheduler.core.model import JobSpec
from cotenant.scheduler.core.reconcile import reconcile
from cotenant.scheduler.errors import JobNotFound
from cotenant.scheduler.journal.recovery import recover
from cotenant.scheduler.journal.store import Journal, NotRecordable
from cotenant.scheduler.specs import check_reason, check_spec
from cotenant.scheduler.views import Explanation, GpuView, Health, HostView, JobView, PlanView, TuningView

TICK_S = 0.5
SILENT_S = 3.0  # an agent that has not reported for this long gets no new jobs


@dataclass(slots=True)
class _Request:
    events: Sequence[Event]
    done: Future[None] = field(default_factory=Future)


@dataclass(slots=True)
class _HostContact:
    """What the shell (not the core) remembers of a host. ``seen`` is monotonic: the wall clock may jump."""

    seen: float
    claim: str = ""
    note: str = ""
    controls: Mapping[str, str] = field(default_factory=dict)
    unreachable: bool = False
    lost: bool = False


class Scheduler:
    """Methods of the scheduler actor. All state that matters is in the core and its journal.

    Requests are committed in groups: whatever arrived while the last group was being written is journaled in one
    transaction, handled in one cycle, acknowledged, and only then are the commands sent out.
    """

    def __init__(self, settings_json: str, journal_url: str) -> None:
        self.settings = Settings.model_validate_json(settings_json)
        self._journal = Journal(journal_url)
        self._core = recover(self._journal, self.settings)
        self._lock = threading.RLock()
        self._inbox: queue.Queue[_Request] = queue.Queue()
        self._entries_since_snapshot = 0
        hosts = list(self._core.state.hosts)
        self._contacts = {host_id: _HostContact(time.monotonic(), unreachable=True) for host_id in hosts}
        self._clients: dict[str, float] = {}
        self._fleet = Fleet(self.settings)
        self._stopping = threading.Event()
        if hosts:  # whether they still exist shows when they report; until then nothing is placed there
            self._handle([HostUnreachable(host_id, "not heard of since the restart") for host_id in hosts])
        threading.Thread(target=self._commit_loop, name="commit", daemon=True).start()
        threading.Thread(target=self._watch_loop, name="watch", daemon=True).start()

    # -- what clients call ------------------------------------------------------------------------------------------

    def ping(self) -> int:
        """Return the process id; used by health checks."""
        return os.getpid()

    def submit(self, specs: list[JobSpec]) -> list[JobView]:
        """Accept jobs; durable on return. A job id that is known already is the same job."""
        for spec in specs:
            check_spec(spec)
        self._commit([JobSubmitted(spec) for spec in specs])
        now = time.monotonic()
        with self._lock:
            for spec in specs:
                if spec.attached:
                    self._clients[spec.job_id] = now
            return [self._view(spec.job_id) for spec in specs]

    def stop(self, job_ids: list[str], reason: str) -> list[JobView]:
        """Ask for the end of jobs, all in one transaction; none is stopped when one of them is not known."""
        check_reason(reason)
        with self._lock:
            for job_id in job_ids:
                self._known(job_id)
        self._commit([StopRequested(job_id, reason) for job_id in job_ids])
        with self._lock:
            return [self._view(job_id) for job_id in job_ids]

    def renew(self, job_ids: list[str]) -> None:
        """The clients of these attached jobs are alive."""
        now = time.monotonic()
        with self._lock:
            for job_id in job_ids:
                if job_id in self._clients:
                    self._clients[job_id] = now

    def job(self, job_id: str) -> JobView:
        """Return one job."""
        with self._lock:
            self._known(job_id)
            return self._view(job_id)

    def jobs(self, active_only: bool, limit: int | None) -> list[JobView]:
        """Return jobs, newest first."""
        with self._lock:
            return queries.jobs(self._core.state, active_only=active_only, limit=limit, controls=self._controls())

    def gpus(self) -> list[GpuView]:
        """Return all GPUs."""
        with self._lock:
            return queries.gpus(self._core.state)

    def hosts(self) -> list[HostView]:
        """Return all hosts."""
        with self._lock:
            offset = time.time() - time.monotonic()
            views = []
            for view in queries.hosts(self._core.state):
                contact = self._contacts[view.host_id]
                seen = {"last_report_at": contact.seen + offset, "claim": contact.claim, "note": contact.note}
                views.append(view.model_copy(update=seen))
            return views

    def explain(self, job_id: str) -> Explanation:
        """Say why a job is where it is."""
        with self._lock:
            self._known(job_id)
            return queries.explain(self._core.state, job_id, time.time(), self._controls().get(job_id, ""))

    def plan(self, specs: list[JobSpec], packing_bias: float | None) -> PlanView:
        """Say what would happen to these jobs; nothing is changed."""
        with self._lock:
            return queries.plan(self._core, specs, packing_bias=packing_bias, now=time.time())

    def tuning(self) -> TuningView:
        """Return the settings that can change while everything runs."""
        with self._lock:
            settings = self._core.state.settings
            return TuningView(placement=settings.placement, resize=settings.resize)

    def set_tuning(self, tuning: TuningView) -> TuningView:
        """Change them, from the next cycle on."""
        self._commit([SettingsChanged(tuning.placement, tuning.resize)])
        return self.tuning()

    def health(self) -> Health:
        """Say whether all parts answer."""
        with self._lock:
            silence = {host_id: time.monotonic() - contact.seen for host_id, contact in self._contacts.items()}
        return self._fleet.health(silence)

    def location(self, job_id: str) -> list[tuple[str, int]]:
        """Return (host id, epoch) of every host that holds the job or held it last."""
        with self._lock:
            self._known(job_id)
            return queries.location(self._core.state, job_id)

    # -- what host agents and the PRM call --------------------------------------------------------------------------

    def report(self, report: HostReport) -> None:
        """Take in a host agent's report. Returning is the acknowledgement that renews the host's leases."""
        host_id = report.host.host_id
        with self._lock:
            known = self._core.state.hosts.get(host_id)
            joined = known is None or not known.reachable or known.gpus != report.host.gpus
            contact = self._contacts.setdefault(host_id, _HostContact(time.monotonic()))
        events: list[Event] = [HostJoined(report.host)] if joined else []
        events.extend(report.events)
        if events:
            self._commit(events)
        with self._lock:
            contact.seen = time.monotonic()
            contact.claim, contact.note, contact.controls = report.claim, report.note, report.controls
            contact.unreachable = contact.lost = False
            missing, commands = reconcile(self._core.state, host_id, report.inventory, time.time())
        if missing:
            self._commit(missing)
        self._fleet.dispatch(commands)

    def measurements(self, event: MeasurementsReported) -> None:
        """Take in one host's measurements and forecasts."""
        self._commit([event])

    # -- lifecycle --------------------------------------------------------------------------------------------------

    def shut_down(self) -> int:
        """Stop every job, then the background threads; returns how many jobs were still active."""
        with self._lock:
            active = [job.job_id for job in queries.jobs(self._core.state, active_only=True, limit=None)]
        if active:
            self._commit([StopRequested(job_id, "cotenant down") for job_id in active])
        return len(active)

    def close(self) -> None:
        """Stop the background threads, write a snapshot and close the journal.

        The next scheduler, perhaps of another version, then starts from the state as it is instead of deciding anew.
        """
        self._stopping.set()
        self._inbox.put(_Request([]))
        with self._lock:
            self._journal.snapshot(self._core.state, self._journal.seq)
            self._journal.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _known(self, job_id: str) -> None:
        if job_id not in self._core.state.jobs:
            raise JobNotFound(job_id)

    def _view(self, job_id: str) -> JobView:
        return queries.job(self._core.state, job_id, controls=self._controls())

    def _controls(self) -> dict[str, str]:
        return {job_id: text for contact in self._contacts.values() for job_id, text in contact.controls.items()}

    def _commit(self, events: Sequence[Event]) -> None:
        request = _Request(events)
        self._inbox.put(request)
        request.done.result()

    def _commit_loop(self) -> None:
        while not self._stopping.is_set():
            group = [self._inbox.get()]
            while not self._inbox.empty():
                group.append(self._inbox.get_nowait())
            self._commit_group(group)

    def _commit_group(self, group: Sequence[_Request]) -> None:
        events = [event for request in group for event in request.events]
        try:
            commands = self._handle(events) if events else []
        except NotRecordable as error:  # nothing has happened yet: the others must not pay for one bad request
            if len(group) > 1:
                for request in group:
                    self._commit_group([request])
            else:
                group[0].done.set_exception(error)
            return
        except Exception as error:  # noqa: BLE001 - whatever went wrong belongs to every waiting caller
            for request in group:
                request.done.set_exception(error)
            return
        for request in group:
            request.done.set_result(None)
        self._fleet.dispatch(commands)

    def _handle(self, events: Sequence[Event]) -> Sequence[Command]:
        with self._lock:
            now = time.time()
            self._journal.append(events, now)
            commands = self._core.handle(events, now)
            self._entries_since_snapshot += 1
            if self._entries_since_snapshot >= self.settings.journal.snapshot_every:
                self._journal.snapshot(self._core.state, self._journal.seq)
                self._entries_since_snapshot = 0
            return commands

    def _watch_loop(self) -> None:
        while not self._stopping.wait(TICK_S):
            self._guarded("hosts", self._watch_hosts)
            self._guarded("clients", self._watch_clients)
            self._guarded("tick", lambda: self._commit([Tick()]))

    def _guarded(self, what: str, step: Callable[[], None]) -> None:
        """Run one step of the watch loop; Ray being briefly unavailable must not end the loop."""
        try:
            step()
        except (RayActorError, ray.exceptions.RaySystemError, ConnectionError, TimeoutError) as error:
            print(f"cotenant scheduler: watching {what}: {error}", flush=True)  # noqa: T201 - the actor's log

    def _watch_hosts(self) -> None:
        now = time.monotonic()
        alive = self._fleet.ensure_agents()
        silent_for = self.settings.lease.ttl_s + 2.0  # the runner looks every second, plus its own grace
        events: list[Event] = []
        with self._lock:
            for host_id, contact in self._contacts.items():
                silence = now - contact.seen
                dead = host_id not in alive
                if not contact.unreachable and (dead or silence > SILENT_S):
                    contact.unreachable = True
                    events.append(HostUnreachable(host_id, "Ray says the node is dead" if dead else "no report"))
                if not contact.lost and silence > silent_for:
                    contact.lost = True
                    events.append(HostLost(host_id, f"no report for {silence:.0f} s; its leases have expired"))
        if events:
            self._commit(events)

    def _watch_clients(self) -> None:
        now = time.monotonic()
        with self._lock:
            for job in queries.attached(self._core.state):
                self._clients.setdefault(job, now)  # after a restart every client gets a fresh term
            gone = [j for j, seen in self._clients.items() if now - seen > self.settings.lease.client_ttl_s]
            for job_id in gone:
                del self._clients[job_id]
            active = set(queries.attached(self._core.state))
        events: list[Event] = [ClientLost(job_id) for job_id in gone if job_id in active]
        if events:
            self._commit(events)
