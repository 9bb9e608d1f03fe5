"""Which GPUs a host has: whole ones and existing MIG instances, by UUID. Nothing is ever re-partitioned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cotenant.actors.devices.base import GpuInfo
from cotenant.actors.devices.nvml.board import Part
from cotenant.actors.devices.nvml.library import NOT_FOUND, Asker, Library, NvmlFailure
from cotenant.actors.devices.nvml.links import islands, linked_to
from cotenant.actors.devices.nvml.visible import Board as VisibleBoard
from cotenant.actors.devices.nvml.visible import Instance, visible_devices
from cotenant.actors.devices.nvml.watchdog import Watchdog

TIMEOUT_S = 10.0  # for one GPU, and for counting them
COUNT = "nvmlDeviceGetCount"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Description:
    """A GPU or MIG instance: product name, memory (None = not told) and what of it the driver keeps for itself."""

    uuid: str
    name: str
    total_bytes: int | None
    reserved_bytes: int = 0
    instance: Instance | None = None


@dataclass(frozen=True, slots=True)
class FoundBoard:
    """A GPU with the devices that are to be managed, and the library that knows it."""

    library: Library
    uuid: str
    parts: tuple[Part, ...]
    gpus: tuple[GpuInfo, ...]


@dataclass(frozen=True, slots=True)
class Silence:
    """A driver that does not answer.

    Attributes:
        reason: That it does not, in words.
        call: The call that has not come back: no other is made until it does.
        library: NVML, which is counting its GPUs; None = it is starting.
    """

    reason: str
    call: Future[Any] | None
    library: Library | None


@dataclass(slots=True)
class _Candidate:
    """A GPU in NVML's order. ``whole`` None: it does not answer, ``note`` says why."""

    whole: Description | None
    instances: list[Description]
    mig: bool
    note: str = ""


class Finder:
    """Finds the GPUs that are to be managed, again and again: one that does not answer may do so later.

    Args:
        library: NVML.
        visible: Value of ``CUDA_VISIBLE_DEVICES``; None = not set.
        count: Most GPUs (boards, not instances) to take, in the order of ``visible``; None = all.
        memory_bytes: Memory that jobs may use of each device; None = all that the driver leaves.
        counting: An earlier call that counts the GPUs, when it has not come back.

    Attributes:
        library: NVML.
        visible: As given.
        silent: Whether a GPU, or the whole driver, did not answer at the last look.
        may_find_more: Whether another look may: none has been completed, a GPU did not answer, or one has MIG on.
    """

    def __init__(
        self,
        library: Library,
        visible: str | None,
        count: int | None,
        memory_bytes: int | None,
        counting: Future[Any] | None = None,
    ) -> None:
        self.silent, self.may_find_more = False, True
        self.library = library
        self.visible, self._count, self._memory_bytes = visible, count, memory_bytes
        # Calls that have not come back, by what they are about.
        self._stuck: dict[str, Future[Any]] = {} if counting is None else {COUNT: counting}

    def find(self) -> tuple[list[FoundBoard], list[str]]:
        """Look at all of them.

        Returns:
            The GPUs in order, and what is worth knowing of those that are left out.

        Raises:
            NvmlFailure: The driver cannot even count its GPUs.
            ValueError: A device has less memory than ``memory_bytes``.
        """
        try:
            indices = range(self._ask(COUNT, self.library.call, COUNT))
        except TimeoutError as error:
            self.silent = self.may_find_more = True
            return [], [f"no GPU can be used: {COUNT}: {error}"]
        with ThreadPoolExecutor(max_workers=max(1, len(indices))) as pool:  # one that hangs holds up no other
            candidates = list(pool.map(self._look, indices))
        self.silent = any(each.whole is None for each in candidates)
        self.may_find_more = self.silent or any(each.mig for each in candidates)
        notes = [each.note for each in candidates if each.note]
        island = self._islands(candidates)
        found: list[FoundBoard] = []
        position = 0
        for index, devices in _chosen(candidates, self.visible, self._count).items():
            candidate = candidates[index]
            gpus = []
            for device in devices:
                info = _gpu_info(device, position, self._memory_bytes, notes)
                if info is not None:
                    gpus.append(replace(info, island=island.get(index, "")))
                    position += 1
            if gpus and candidate.whole is not None:
                known = {gpu.gpu_id for gpu in gpus}
                parts = tuple(_part(device) for device in devices if device.uuid in known)
                found.append(FoundBoard(self.library, candidate.whole.uuid, parts, tuple(gpus)))
            elif candidate.mig and not devices:
                notes.append(f"GPU {index}: MIG is on, but it has no instance")
        if not found and not notes:
            notes.append(f"CUDA_VISIBLE_DEVICES is {self.visible!r}: no GPU can be used")
        return found, notes

    def _look(self, index: int) -> _Candidate:
        try:
            return _Candidate(*self._ask(f"GPU {index}", _describe, self.library, index))
        except (NvmlFailure, TimeoutError) as error:
            return _Candidate(None, [], False, f"GPU {index} is left out: {error}")

    def _islands(self, candidates: Sequence[_Candidate]) -> dict[int, str]:
        """Return the group of linked GPUs that each GPU is in; nothing when one of them does not say."""
        whole = [index for index, each in enumerate(candidates) if each.whole is not None and not each.mig]
        linked: dict[int, set[int]] = {}
        for at, index in enumerate(whole):
            try:
                found = self._ask(f"links of GPU {index}", linked_to, self.library, index, whole[:at])
            except (NvmlFailure, TimeoutError):
                return {}
            if found is None:
                return {}
            linked[index] = found
        return islands(linked)

    def _ask(self, what: str, function: Callable[..., T], *args: Any) -> T:
        """Call into the driver; while an earlier call about the same has not come back, no other is made.

        Raises:
            TimeoutError: It did not come back in time; the message says so.
        """
        stuck = self._stuck.get(what)
        if stuck is not None and not stuck.done():  # another thread would only get stuck as well
            raise TimeoutError("the driver still does not answer")
        watchdog = Watchdog(what)
        self._stuck[what] = answer = watchdog.start(function, *args)
        watchdog.close()
        try:
            return answer.result(TIMEOUT_S)
        except TimeoutError:
            raise TimeoutError(f"a call did not return within {TIMEOUT_S:g} s") from None


def _chosen(candidates: Sequence[_Candidate], visible: str | None, count: int | None) -> dict[int, list[Description]]:
    """The devices that are to be managed, by the index of their GPU, in order."""
    boards = [
        VisibleBoard(each.whole.uuid if each.whole else "", tuple(i.instance for i in each.instances if i.instance))
        for each in candidates
    ]
    chosen: dict[int, list[Description]] = {}
    for named in visible_devices(visible, boards):
        candidate = candidates[named.index]
        if count is not None and len(chosen) == count and named.index not in chosen:
            break
        devices = candidate.instances if candidate.mig else [candidate.whole] if candidate.whole else []
        mine = chosen.setdefault(named.index, [])
        mine += [each for each in devices if named.instance in (None, each.uuid) and each not in mine]
    return chosen


def _part(device: Description) -> Part:
    instance = device.instance
    return Part(device.uuid, instance is not None, None if instance is None else instance.gpu_instance)


def _describe(library: Library, index: int) -> tuple[Description, list[Description], bool]:
    asker = Asker(library)
    handle = library.call("nvmlDeviceGetHandleByIndex", index)
    mode = asker.ask("nvmlDeviceGetMigMode", handle)
    mig = mode is not None and bool(mode[0])
    instances = []
    if mig:
        for slot in range(asker.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            part = asker.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot, usual=(NOT_FOUND,))
            if part is not None:  # the list has holes
                gpu_instance = asker.ask("nvmlDeviceGetGpuInstanceId", part)
                compute_instance = asker.ask("nvmlDeviceGetComputeInstanceId", part)
                instance = Instance(_uuid(library, part), gpu_instance, compute_instance)
                instances.append(_described(library, asker, part, instance))
    return _described(library, asker, handle, None), instances, mig


def _uuid(library: Library, handle: Any) -> str:
    return str(library.call("nvmlDeviceGetUUID", handle))


def _described(library: Library, asker: Asker, handle: Any, instance: Instance | None) -> Description:
    memory = asker.ask("nvmlDeviceGetMemoryInfo", handle, library.module.nvmlMemory_v2)
    if memory is None:  # older drivers do not tell what they keep for themselves
        memory = Asker(library).ask("nvmlDeviceGetMemoryInfo", handle)
    return Description(
        uuid=_uuid(library, handle),
        name=str(library.call("nvmlDeviceGetName", handle)),
        total_bytes=None if memory is None else int(memory.total),
        reserved_bytes=int(getattr(memory, "reserved", 0)),
        instance=instance,
    )


def _gpu_info(device: Description, index: int, memory_bytes: int | None, notes: list[str]) -> GpuInfo | None:
    """What the rest of cotenant sees of a device; None when its memory is not known."""
    usable = None if device.total_bytes is None else device.total_bytes - device.reserved_bytes
    if usable is None:
        if memory_bytes is None:
            notes.append(f"{device.uuid} is left out: it does not tell its memory; set device.memory_bytes")
            return None
        usable = memory_bytes
    if memory_bytes is not None and memory_bytes > usable:
        raise ValueError(
            f"device.memory_bytes: {memory_bytes} is not accepted; give 1 to {usable}, the memory of {device.uuid}"
        )
    return GpuInfo(
        gpu_id=device.uuid,
        gpu_type=device.name,
        index=index,
        memory_bytes=memory_bytes or usable,
        visible_env={"CUDA_VISIBLE_DEVICES": device.uuid},
        physical_memory_bytes=device.total_bytes or usable,
    )
