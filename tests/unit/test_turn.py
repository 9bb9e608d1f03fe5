"""The order of resizes: at no moment do the shares of one GPU add up to more than there is, of any resource."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from scheduling import GIB, half, host, settings

from cotenant.placement.types import Share
from cotenant.scheduler.core.commands import ResizeShares, StartJob
from cotenant.scheduler.core.engine import Core
from cotenant.scheduler.core.events import HostJoined, JobStarted, JobSubmitted
from cotenant.scheduler.core.turn import Turn

TOTAL_BYTES = 8 * GIB
parts = st.tuples(st.integers(1, 9), st.integers(1, 9))


def running() -> Core:
    """Two jobs that share one GPU."""
    core = Core(settings())
    core.handle([HostJoined(host("h1", gpus=1)), *(JobSubmitted(half(name)) for name in "ab")], 1.0)
    started = [JobStarted(name, core.state.jobs[name].epoch, "h1") for name in "ab"]
    core.handle(started, 2.0)
    assert all(core.state.jobs[name].lease for name in "ab")
    return core


def divided(gpu_id: str, compute: int, memory: int) -> tuple[Share, Share]:
    return (
        Share(gpu_id, TOTAL_BYTES * memory // 10, compute / 10),
        Share(gpu_id, TOTAL_BYTES * (10 - memory) // 10, (10 - compute) / 10),
    )


@given(st.lists(parts, min_size=2, max_size=5))
def test_no_resource_is_ever_given_twice_and_revisions_grow(divisions: list[tuple[int, int]]) -> None:
    core = running()
    (gpu_id,) = core.state.gpus
    begin = divided(gpu_id, *divisions[0])
    for name, share in zip("ab", begin, strict=True):
        job = core.state.jobs[name]
        assert job.lease is not None
        core.state.put(replace(job, lease=replace(job.lease, shares=(share,))))
    held = dict(zip("ab", begin, strict=True))
    revisions = {name: core.state.jobs[name].lease.revision for name in "ab"}  # type: ignore[union-attr]
    turn = Turn(core.state, 3.0)
    for division in divisions[1:]:  # several changes in one turn are one
        for name, share in zip("ab", divided(gpu_id, *division), strict=True):
            turn.resize(core.state.jobs[name], {gpu_id: share}, "test")
    for command in turn.commands():
        assert isinstance(command, ResizeShares) and not isinstance(command, StartJob)
        assert command.revision > revisions[command.job_id]
        revisions[command.job_id] = command.revision
        (held[command.job_id],) = command.shares
        assert sum(share.compute for share in held.values()) <= 1.0 + 1e-9
        assert sum(share.memory_bytes for share in held.values()) <= TOTAL_BYTES
    for name in "ab":
        lease = core.state.jobs[name].lease
        assert lease is not None
        assert lease.shares == (held[name],)
        assert lease.revision == revisions[name]
