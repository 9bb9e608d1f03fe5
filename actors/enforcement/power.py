"""A power limit on whole GPUs for as long as cotenant runs, and what was there before put back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from cotenant.actors import runner
from cotenant.actors.devices.nvml.library import Library, NvmlFailure, NvmlUnavailable
from cotenant.actors.devices.nvml.watchdog import Hung, Watchdog, call_within

RECORD = "power.json"
_NOT_LIMITED = "power of {} is not limited: {}"
TIMEOUT_S = 2.0  # for one GPU: one that hangs must not hold up the others


class PowerLimit:
    """Limits the power of GPUs; a GPU that does not take it is left as it is, and ``notes`` say so.

    All of it is done one after the other in a thread of its own: who asks for it has other GPUs to see to, and only
    ``restore`` waits. What was there before is written down first: an agent that is killed is followed by one that
    still knows it. So is one that could not put it back, or that left a call behind which may still take effect.

    Args:
        run_dir: The host's run directory.
        gpu_ids: UUIDs of the GPUs.
        watts: The limit; None = none, and what an earlier agent could not put back is put back now.
    """

    def __init__(self, run_dir: Path, gpu_ids: Sequence[str], watts: float | None) -> None:
        self._notes: dict[tuple[str, str], str] = {}  # by what did not work and GPU, "" = of all
        self._record = run_dir / RECORD
        self._watts = watts
        self._hung: set[str] = set()  # a call to these has not come back in time, and may do so later
        self._calls = Watchdog("power limits")
        if watts is None:
            self._calls.post(self._restore, self._done)
        self.add(gpu_ids)

    @property
    def notes(self) -> list[str]:
        """What did not work, the last time that it was tried."""
        return list(self._notes.values())

    def add(self, gpu_ids: Sequence[str]) -> None:
        """Limit these GPUs too, or anew, soon."""
        if self._watts is not None:
            milliwatts = dict.fromkeys(gpu_ids, round(self._watts * 1000))
            self._calls.post(partial(self._limit_all, milliwatts), self._done)

    def restore(self) -> None:
        """Put back what was there before. Idempotent; what a GPU does not take is in ``notes``, and stays recorded."""
        self._calls.start(self._restore).result()

    def _done(self, _: None, error: BaseException | None) -> None:
        if error is not None:
            self._notes["", ""] = f"power is not limited as it should be: {error!r}"

    def _limit_all(self, milliwatts: Mapping[str, int]) -> None:
        try:
            library = Library()
        except NvmlUnavailable as error:
            self._notes["", ""] = f"power is not limited: {error}"
            return
        self._each(library, milliwatts, self._limit, _NOT_LIMITED)

    def _restore(self) -> None:
        before = self._before()
        if not before:
            return
        try:
            library = Library()
        except NvmlUnavailable as error:
            self._notes["", ""] = f"power limits could not be put back: {error}"
            return
        failed = self._each(library, before, _set, "the power limit of {} could not be put back: {}")
        left = {gpu_id: limit for gpu_id, limit in before.items() if gpu_id in failed | self._hung}
        if left:
            runner.write_json(str(self._record), left)
        else:
            self._record.unlink()

    def _before(self) -> dict[str, int]:
        """Return what was there before, in milliwatts. A record that says nothing usable is kept apart, and told."""
        try:
            before = runner.read_json(str(self._record)) or {}
            if not all(type(limit) is int and limit > 0 for limit in before.values()):
                raise ValueError(f"{before!r} is not accepted")
        except (ValueError, AttributeError) as error:
            kept = self._record.with_suffix(".unreadable")
            self._record.replace(kept)
            self._notes["unreadable", ""] = f"power limits cannot be put back: {RECORD}: {error}; kept as {kept}"
            return {}
        return before

    def _each(
        self, library: Library, milliwatts: Mapping[str, int], act: Callable[[Library, str, int], None], failed: str
    ) -> set[str]:
        """Do this to every GPU, and note what failed; returns the GPUs for which it did."""
        self._notes.pop(("", ""), None)
        failures: set[str] = set()
        for gpu_id, limit in milliwatts.items():
            self._notes.pop((failed, gpu_id), None)
            try:
                call_within(TIMEOUT_S, gpu_id, act, library, gpu_id, limit)
            except (NvmlFailure, Hung) as error:
                failures.add(gpu_id)
                if isinstance(error, Hung):
                    self._hung.add(gpu_id)
                self._notes[failed, gpu_id] = failed.format(gpu_id, error)
        if not self._hung:  # else a call may still be under way
            library.close()
        return failures

    def _limit(self, library: Library, gpu_id: str, milliwatts: int) -> None:
        handle = library.call("nvmlDeviceGetHandleByUUID", gpu_id)
        least, most = library.call("nvmlDeviceGetPowerManagementLimitConstraints", handle)
        if not least <= milliwatts <= most:
            self._notes[_NOT_LIMITED, gpu_id] = (
                f"enforcement.power_limit_w: {milliwatts / 1000:g} is not accepted by {gpu_id}; "
                f"give {least / 1000:g} to {most / 1000:g}"
            )
            return
        now = library.call("nvmlDeviceGetPowerManagementLimit", handle)
        before = self._before()  # last: a call that hung must not forget what came meanwhile
        if gpu_id not in before:
            before[gpu_id] = now
            runner.write_json(str(self._record), before)
        _set(library, gpu_id, milliwatts)


def _set(library: Library, gpu_id: str, milliwatts: int) -> None:
    handle = library.call("nvmlDeviceGetHandleByUUID", gpu_id)
    library.call("nvmlDeviceSetPowerManagementLimit", handle, milliwatts)
