"""A what-if overlay over a snapshot of GPUs: place, evict, look, and take it back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cotenant.placement.fleet import Fleet
from cotenant.placement.types import GpuView, Placement, Request, Resident, Share


class Statement:
    """Applies placements and evictions to a private copy of a snapshot; every step can be taken back.

    Not thread-safe; the snapshot it was made from never changes. A fleet it is made from is not copied: it changes with
    the statement, and holds what it held again after ``rollback()``.
    """

    def __init__(self, gpus: Iterable[GpuView]) -> None:
        self._fleet = gpus if isinstance(gpus, Fleet) else None
        self._views = gpus.views if isinstance(gpus, Fleet) else list(gpus)
        places = {} if self._fleet is not None else {gpu.gpu_id: place for place, gpu in enumerate(self._views)}
        self._position = places.__getitem__ if self._fleet is None else self._fleet.position
        self._undo: list[list[GpuView]] = []

    @property
    def fleet(self) -> Fleet:
        """All GPUs as they are now; changes with every further step. Only to be read."""
        if self._fleet is None:
            self._fleet = Fleet(self._views)
            self._views = self._fleet.views
        return self._fleet

    def view(self) -> tuple[GpuView, ...]:
        """Return all GPUs as they would be now, in the order of the snapshot."""
        return tuple(self._views)

    def gpu(self, gpu_id: str) -> GpuView:
        """Return one GPU as it would be now.

        Raises:
            KeyError: There is no such GPU in the snapshot.
        """
        return self._views[self._position(gpu_id)]

    def place(self, request: Request, placement: Placement) -> None:
        """Add the job to the GPUs of the placement and apply what its neighbours give up.

        Raises:
            KeyError: The placement names a GPU that is not in the snapshot.
            ValueError: The job already holds a share of one of the GPUs.
        """
        changed: list[GpuView] = []
        for share in placement.shares:
            gpu = self._views[self._position(share.gpu_id)]
            if any(resident.job_id == request.job_id for resident in gpu.residents):
                raise ValueError(f"job {request.job_id!r} already holds a share of GPU {share.gpu_id!r}")
            squeezed = {job_id: new for job_id, new in placement.squeezed if new.gpu_id == share.gpu_id}
            residents = tuple(
                replace(r, share=squeezed[r.job_id]) if r.job_id in squeezed else r for r in gpu.residents
            )
            changed.append(gpu.carrying((*residents, resident_of(request, share, gpu.gpu_type))))
        self._apply(changed)

    def evict(self, job_id: str, gpu_ids: Iterable[str] | None = None) -> tuple[Share, ...]:
        """Take the job off its GPUs and return the shares it held (empty when it held none).

        Args:
            job_id: The job.
            gpu_ids: The GPUs to look at; None = all.
        """
        changed: list[GpuView] = []
        freed: list[Share] = []
        for gpu in self._views if gpu_ids is None else [self.gpu(gpu_id) for gpu_id in gpu_ids]:
            kept = tuple(resident for resident in gpu.residents if resident.job_id != job_id)
            if len(kept) < len(gpu.residents):
                freed.extend(resident.share for resident in gpu.residents if resident.job_id == job_id)
                changed.append(gpu.carrying(kept))
        self._apply(changed)
        return tuple(freed)

    def checkpoint(self) -> int:
        """Return a mark to roll back to. Marks taken later become invalid when an earlier one is rolled back to."""
        return len(self._undo)

    def rollback(self, mark: int = 0) -> None:
        """Undo everything done since ``checkpoint`` returned ``mark`` (0 = everything).

        Raises:
            ValueError: The mark lies in the future: it was already rolled back past.
        """
        if not 0 <= mark <= len(self._undo):
            raise ValueError(f"mark: {mark} is not accepted; give a mark from checkpoint(), 0 to {len(self._undo)}")
        while len(self._undo) > mark:
            self._put(self._undo.pop())

    def _apply(self, changed: list[GpuView]) -> None:
        self._undo.append([self._views[self._position(view.gpu_id)] for view in changed])
        self._put(changed)

    def _put(self, changed: list[GpuView]) -> None:
        for view in changed:
            if self._fleet is None:
                self._views[self._position(view.gpu_id)] = view
            else:
                self._fleet.put(view)


def resident_of(request: Request, share: Share, gpu_type: str) -> Resident:
    """Return what a request becomes once it holds ``share`` of such a GPU; its compute hint becomes its guarantee."""
    return Resident(
        job_id=request.job_id,
        share=share,
        profile=request.on(gpu_type),
        max_slowdown=request.max_slowdown,
        exclusive=request.exclusive,
        min_compute=request.compute or 0.0,
        weight=request.weight,
        labels=request.labels,
        anti_affinity=request.anti_affinity,
        least_memory=request.least_memory,
        most_memory=request.most_memory,
        most_compute=request.most_compute,
        shares_instance=request.shares_instance,
        cpus=request.cpus,
    )
