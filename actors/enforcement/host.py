"""The enforcement of one host: for each job the way that its GPUs and its hints call for."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from cotenant.actors import runner
from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.devices.nvml.watchdog import begin
from cotenant.actors.enforcement.base import Ceiling, EnforcementBackend
from cotenant.actors.enforcement.cgroup import find_groups
from cotenant.actors.enforcement.choice import NO_WHOLE_GPUS, GpuKind, GpuTraits, Method, choose, choose_pause
from cotenant.actors.enforcement.cpu import CpuEnforcement
from cotenant.actors.enforcement.cuda import MigEnforcement, MpsEnforcement, TimeSliceEnforcement
from cotenant.actors.enforcement.mps import MpsService, service_folder
from cotenant.actors.enforcement.pausing import PAUSES, CheckpointPause, Pause, PauseName
from cotenant.actors.enforcement.power import RECORD as POWER
from cotenant.actors.enforcement.power import PowerLimit
from cotenant.actors.enforcement.sharefile import ShareFile
from cotenant.actors.reports import JobReport
from cotenant.configs.settings import EnforcementSettings
from cotenant.placement.types import Share
from cotenant.scheduler.core.model import Isolation

RECORD = "enforcement.json"
CHECKPOINTS = "checkpoints.json"
PROBE_S = 30.0  # for what is wanted to be known of checkpoints before a job starts, in a thread of its own


class HostEnforcement(ShareFile):
    """See ``JobEnforcement``. What was decided for a job stays: it is written down in the job's directory.

    Args:
        run_dir: The host's run directory; daemons are told apart by it.
        gpus: The GPUs of this host.
        settings: What may be used.
    """

    name = "host"

    def __init__(self, run_dir: Path, gpus: Sequence[GpuInfo], settings: EnforcementSettings) -> None:
        self._run_dir = run_dir
        self._gpus = {gpu.gpu_id: gpu for gpu in gpus}
        self._settings = settings
        self._services = self._services_of(gpus)
        self._probing = threading.Lock()
        self._could_freeze = _could_freeze(run_dir / CHECKPOINTS)
        self._probe: Future[str] | None = None  # says what is missing for checkpoints
        self._records: dict[Path, dict[str, Any]] = {}
        self._power: PowerLimit | None = None
        self._limit_power(self._services)
        self._ways: Mapping[Method, EnforcementBackend] = {
            "cpu": CpuEnforcement(groups=None if self._services else find_groups(_group_name(run_dir))),
            "timeslice": TimeSliceEnforcement(),
            "mig": MigEnforcement(),
            "mps": MpsEnforcement(self._services.__getitem__),
        }

    def add_gpus(self, gpus: Sequence[GpuInfo]) -> None:
        """Hold shares of these GPUs too, which have come later."""
        services = self._services_of(gpus)
        self._services |= services
        self._gpus |= {gpu.gpu_id: gpu for gpu in gpus}
        self._limit_power(services)

    def hold_again(self, gpu_ids: Collection[str]) -> None:
        """These GPUs were lost and are back: whoever reset them has taken their limits away."""
        self._limit_power([gpu_id for gpu_id in gpu_ids if gpu_id in self._services])

    def _limit_power(self, gpu_ids: Collection[str]) -> None:
        """Limit the power of these GPUs as the settings say, and put back what an earlier agent has left."""
        if not gpu_ids:
            return
        if self._power is not None:
            self._power.add(list(gpu_ids))
        elif self._settings.power_limit_w is not None or (self._run_dir / POWER).exists():
            self._power = PowerLimit(self._run_dir, list(gpu_ids), self._settings.power_limit_w)

    def _services_of(self, gpus: Sequence[GpuInfo]) -> dict[str, MpsService]:
        return {gpu_id: MpsService(gpu_id, service_folder(self._run_dir, gpu_id)) for gpu_id in whole(gpus)}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth knowing of the host as a whole."""
        return () if self._power is None else tuple(self._power.notes)

    def may_take_long(self, gpu_ids: Iterable[str]) -> bool:
        """Whether ``admit`` may take long for a job on these GPUs: a daemon may have to start for it, and may hang."""
        return self._settings.mps != "off" and not self._services.keys().isdisjoint(gpu_ids)

    def admit(
        self,
        job_dir: Path,
        gpus: Sequence[GpuInfo],
        shares: Sequence[Share],
        isolation: Isolation,
        *,
        freezes: bool = False,
    ) -> None:
        """See ``JobEnforcement.admit``."""
        try:
            choice = choose([self._traits(gpu, checkpoints=freezes) for gpu in gpus], isolation, freezes=freezes)
        except ValueError as error:
            raise OSError(f"shares: {error}") from error
        self._ways[choice.method].admit(job_dir, gpus, shares, isolation)
        record = {"method": choice.method, "reason": choice.reason, "gpu_ids": [gpu.gpu_id for gpu in gpus]}
        runner.write_json(str(job_dir / RECORD), record)

    def apply(self, job_dir: Path, shares: Sequence[Share], epoch: int, revision: int) -> None:
        """See ``EnforcementBackend.apply``."""
        self._way(job_dir).apply(job_dir, shares, epoch, revision)

    def check(self, job_dir: Path) -> None:
        """See ``EnforcementBackend.check``."""
        self._way(job_dir).check(job_dir)

    def environment(self, job_dir: Path, gpus: Sequence[GpuInfo], env: Mapping[str, str]) -> dict[str, str]:
        """See ``EnforcementBackend.environment``."""
        return self._way(job_dir).environment(job_dir, gpus, env)

    def ceilings(self, job_dir: Path) -> tuple[Ceiling, ...]:
        """See ``EnforcementBackend.ceilings``."""
        return self._way(job_dir).ceilings(job_dir)

    def report(self, job_dir: Path, monotonic_s: float) -> JobReport:
        """See ``EnforcementBackend.report``."""
        return self._way(job_dir).report(job_dir, monotonic_s)

    def guarantees(self, job_dir: Path, report: JobReport) -> str:
        """See ``EnforcementBackend.guarantees``."""
        way, said = self._way(job_dir), self._record(job_dir).get("reason", "")
        text = way.guarantees(job_dir, report)
        return text if way.name == "cpu" or not said else f"{text} ({said})"

    def lost(self, job_dir: Path) -> str:
        """See ``EnforcementBackend.lost``."""
        return self._way(job_dir).lost(job_dir)

    def detach(self, job_dir: Path, pids: Collection[int]) -> Future[Any] | None:
        """See ``EnforcementBackend.detach``."""
        return self._way(job_dir).detach(job_dir, pids)

    def pause(self, job_dir: Path) -> Pause:
        """See ``EnforcementBackend.pause``."""
        return PAUSES[self._choose_pause(job_dir)[0]]()

    def unfreezable(self, job_dir: Path) -> str:
        """See ``EnforcementBackend.unfreezable``."""
        return self._choose_pause(job_dir)[1]

    def move(self, job_dir: Path, gpu_ids: Sequence[str]) -> None:
        """See ``EnforcementBackend.move``."""
        record = {**self._record(job_dir), "gpu_ids": list(gpu_ids)}
        runner.write_json(str(job_dir / RECORD), record)
        self._records[job_dir] = record

    def no_checkpoints(self, wait_s: float = 0.0) -> str | None:
        """Say why the driver cannot freeze processes on this host's whole GPUs, empty = it can; None = not known yet.

        Args:
            wait_s: How long to wait for that, which is found out once.
        """
        with self._probing:
            if self._probe is None:
                self._probe = begin("checkpoints", self._look_for_checkpoints)
        with suppress(TimeoutError):
            return self._probe.result(wait_s)
        return None

    def no_freezing(self) -> str | None:
        """Say why the driver can freeze no job on this host, empty = it can; None = not known yet. Does not wait."""
        return self.no_checkpoints() if self._services else NO_WHOLE_GPUS

    def can_freeze(self, gpu_id: str) -> bool:
        """Whether the driver can freeze processes on this GPU, as far as is known; waits for nothing.

        Until it is known anew, what an earlier agent has found out holds: whoever has frozen jobs here must not take
        their GPUs for others.
        """
        if gpu_id not in self._services:
            return False
        missing = self.no_checkpoints()
        return missing == "" if missing is not None else self._could_freeze

    def _look_for_checkpoints(self) -> str:
        missing = CheckpointPause().missing()
        with suppress(OSError):  # the next agent says a little later what it can do
            runner.write_json(str(self._run_dir / CHECKPOINTS), {"missing": missing})
        return missing

    def _choose_pause(self, job_dir: Path) -> tuple[PauseName, str]:
        gpus = [self._gpus[gpu_id] for gpu_id in self._record(job_dir).get("gpu_ids", ()) if gpu_id in self._gpus]
        return choose_pause([self._traits(gpu, checkpoints=True) for gpu in gpus], self._method(job_dir))

    def tend(self, job_dirs: Sequence[Path]) -> None:
        """See ``EnforcementBackend.tend``."""
        kept = set(job_dirs)
        for known in list(self._records):  # another thread may add one meanwhile
            if known not in kept:
                self._records.pop(known, None)
        by_method: dict[Method, list[Path]] = {}
        for job_dir in job_dirs:
            with suppress(OSError, ValueError, KeyError):  # it has ended, or its record is damaged
                by_method.setdefault(self._method(job_dir), []).append(job_dir)
        for method, way in self._ways.items():
            way.tend(by_method.get(method, []))

    def close(self, running: Sequence[Path] = ()) -> tuple[str, ...]:
        """See ``EnforcementBackend.close``: ends the daemons, and puts power limits back, all of it at once: each may
        hang for nearly as long as there is.
        """
        clients: dict[str, list[str]] = {}
        for job_dir in running:
            with suppress(OSError, ValueError):  # its record is damaged: it is being killed
                if self._method(job_dir) == "mps":
                    for gpu_id in self._record(job_dir)["gpu_ids"]:
                        clients.setdefault(gpu_id, []).append(job_dir.name)
        calls = [] if self._power is None else [begin("power limits", self._power.restore)]
        idle = self._services.keys() - clients.keys()
        calls += [begin(f"MPS on {gpu_id}", self._services[gpu_id].stop) for gpu_id in idle]
        for way in self._ways.values():
            way.close(running)
        wait(calls)
        for call in calls:
            call.result()
        return tuple(
            f"the MPS daemon of {gpu_id} goes on in {self._services[gpu_id].folder}: {', '.join(jobs)} has not ended"
            for gpu_id, jobs in clients.items()
        )

    def _traits(self, gpu: GpuInfo, *, checkpoints: bool = False) -> GpuTraits:
        kind = kind_of(gpu)
        if kind != "gpu":
            return GpuTraits(gpu.gpu_id, kind)
        missing = "switched off (enforcement.mps)" if self._settings.mps == "off" else ""
        no_checkpoints = self.no_checkpoints(PROBE_S) if checkpoints else ""
        if no_checkpoints is None:
            no_checkpoints = f"the driver has not said within {PROBE_S:g} s whether it can"
        return GpuTraits(gpu.gpu_id, kind, missing or self._services[gpu.gpu_id].missing(), no_checkpoints)

    def _method(self, job_dir: Path) -> Method:
        method: Method = self._record(job_dir).get("method", "cpu")
        return method

    def _record(self, job_dir: Path) -> dict[str, Any]:
        """Return what was decided for a job: asked several times a second, and never changed."""
        record = self._records.get(job_dir)
        if record is None:
            record = runner.read_json(str(job_dir / RECORD))
            if record is None:
                return {}  # a job of a version that knew no other way
            self._records[job_dir] = _sound(record)
        return record

    def _way(self, job_dir: Path) -> EnforcementBackend:
        return self._ways[self._method(job_dir)]


def _sound(record: object) -> dict[str, Any]:
    """Return the record of a job; ValueError when it says something else than this version writes."""
    if isinstance(record, dict) and record.get("method") in get_args(Method):
        gpu_ids, reason = record.get("gpu_ids", []), record.get("reason", "")
        if isinstance(reason, str) and isinstance(gpu_ids, list) and all(isinstance(each, str) for each in gpu_ids):
            return record
    raise ValueError(f"{RECORD}: {record!r} is not accepted")


def _could_freeze(found: Path) -> bool:
    """Whether an earlier agent of this host has found that processes can be frozen."""
    try:
        return (runner.read_json(str(found)) or {}).get("missing") == ""
    except (OSError, ValueError, AttributeError):
        return False


def _group_name(run_dir: Path) -> str:
    return f"cotenant-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:12]}"


def whole(gpus: Iterable[GpuInfo]) -> list[str]:
    """Return the ids of those that are whole NVIDIA GPUs."""
    return [gpu.gpu_id for gpu in gpus if kind_of(gpu) == "gpu"]


def kind_of(gpu: GpuInfo) -> GpuKind:
    """Return what a GPU is: devices made of cores name them, instances have ids of their own kind."""
    if gpu.cores or not gpu.visible_env.get("CUDA_VISIBLE_DEVICES"):
        return "cpu"
    return "mig" if gpu.gpu_id.startswith("MIG-") else "gpu"
