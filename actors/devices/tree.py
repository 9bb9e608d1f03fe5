"""Which processes belong to which job, and what each job has used: the bookkeeping of the ``cpu`` backend.

A process belongs to a job when it is a root, when its parent belongs to the job, or when it is in the session that a
root leads (a child whose parent has ended). Once found, it stays the job's until it ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cotenant.actors.devices.procfs import Process, ProcessStat, ProcessTable

SCAN_BUDGET = 0.003  # of one core: on a host with very many processes new ones are looked for less often
SCAN_MAX_S = 1.0


@dataclass(slots=True)
class Member:
    """A process of a job, from its discovery until it is reaped.

    Attributes:
        process: The process, held open.
        parent_pid: Its parent at the last scan.
        cpu_ns: Its clock when last read; what came before is counted or is not the job's.
        reaped_ns: CPU time of its ended children that has been counted: while they lived, or from its stat line.
        reaped_seen_ns: The same as its stat line said at the last scan; None once that has been dealt with.
        gpu_id: The device it is on; None = host.
        rss_bytes: Its resident memory.
    """

    process: Process
    parent_pid: int
    cpu_ns: int = 0
    reaped_ns: int = 0
    reaped_seen_ns: int | None = None
    gpu_id: str | None = None
    rss_bytes: int = 0


@dataclass(slots=True)
class JobTree:
    """A watched job: its processes and its counters, which only ever grow.

    Attributes:
        job_id: The job.
        slices: Cores of each of its devices, by GPU id, in the order given.
        device_ns: CPU time used on each device.
        host_ns: CPU time used by its processes that are on none of its devices.
        members: Its processes by number.
        roots: Those roots that live, as far as is known.
        unopened: Processes that could not be held open for lack of file descriptors.
        io_bytes: Bytes read and written by its processes, as of the last look; None when there was none, or was not
            allowed.
        ended: Parents of the members that ended since the last look at the stat lines; ``_ended_before``: of those
            that ended before it.
    """

    job_id: str
    slices: dict[str, frozenset[int]] = field(default_factory=dict)
    device_ns: dict[str, int] = field(default_factory=dict)
    host_ns: int = 0
    members: dict[int, Member] = field(default_factory=dict)
    roots: set[int] = field(default_factory=set)
    sessions: set[int] = field(default_factory=set)
    unopened: set[int] = field(default_factory=set)
    io_bytes: tuple[int, int] | None = None
    ended: dict[int, int] = field(default_factory=dict)
    _io_counted: tuple[int, int] = (0, 0)
    _io_sum: tuple[int, int] | None = None  # over its living processes
    _ended_before: dict[int, int] = field(default_factory=dict)

    @property
    def readable(self) -> bool:
        """Whether the counters mean anything: a root lives and no process is left out."""
        return bool(self.roots) and not self.unopened

    def memory_bytes(self, gpu_id: str) -> int:
        """Resident memory of the processes that are on the device."""
        return sum(member.rss_bytes for member in self.members.values() if member.gpu_id == gpu_id)

    def owns(self, stat: ProcessStat) -> bool:
        """Whether a new process is one of the job's."""
        return stat.parent_pid in self.members or stat.session in self.sessions

    def read(self) -> list[int]:
        """Bring the counters up to date; returns the processes that are gone."""
        gone = []
        for pid, member in list(self.members.items()):
            try:
                cpu_ns, cores, rss_bytes = member.process.read()
            except ProcessLookupError:
                self._end(pid, member)
                gone.append(pid)
                continue
            member.gpu_id = next((gpu_id for gpu_id, slice_ in self.slices.items() if cores <= slice_), None)
            member.rss_bytes = rss_bytes or 0
            self._count(member, cpu_ns - member.cpu_ns)
            member.cpu_ns = cpu_ns
            if rss_bytes is None:
                self._end_root(pid)
        # Only now, when every child that ended before the stat lines were read is known to have ended: what a process
        # has reaped beyond that are children too short-lived to be found, and the last moments of those that were.
        for member in self.members.values():
            if member.reaped_seen_ns is not None:
                self._count(member, max(0, member.reaped_seen_ns - member.reaped_ns))
                member.reaped_ns = max(member.reaped_ns, member.reaped_seen_ns)
                member.reaped_seen_ns = None
        return gone

    def _count(self, member: Member, ns: int) -> None:
        if member.gpu_id is None:
            self.host_ns += ns
        else:
            self.device_ns[member.gpu_id] += ns

    def _end(self, pid: int, member: Member) -> None:
        member.process.close()
        del self.members[pid]
        self._end_root(pid)
        self.ended[pid] = member.parent_pid
        reaper = self._nearest_living(member.parent_pid)
        if reaper is not None:
            reaper.reaped_ns += member.cpu_ns + member.reaped_ns

    def _end_root(self, pid: int) -> None:
        # Its number, and with it that of its session, may now be given to a stranger.
        self.roots.discard(pid)
        self.sessions.discard(pid)

    def _nearest_living(self, pid: int) -> Member | None:
        """Who waited for a process whose parent was ``pid``: an orphan goes to the nearest ancestor that adopts."""
        parents = self._ended_before | self.ended
        while pid not in self.members and pid in parents:
            pid = parents.pop(pid)
        return self.members.get(pid)

    def see_io(self) -> None:
        """Bring ``io_bytes`` up to date.

        A process takes over what its ended children had once it has waited for them, so the sum over the living is
        the job's, except for children that nobody of the job waited for: they make it fall, which counts as nothing.
        """
        seen = [0, 0]
        for member in self.members.values():
            try:
                io_bytes = member.process.io_bytes()
            except ProcessLookupError:
                continue  # the next read finds out
            if io_bytes is None:
                self.io_bytes = self._io_sum = None
                return
            seen[0] += io_bytes[0]
            seen[1] += io_bytes[1]
        before, self._io_sum = self._io_sum or (seen[0], seen[1]), (seen[0], seen[1])
        self.io_bytes = self._io_counted = (
            self._io_counted[0] + max(0, seen[0] - before[0]),
            self._io_counted[1] + max(0, seen[1] - before[1]),
        )

    def forget_io(self) -> None:
        """What the processes read and wrote up to now is not the job's."""
        self._io_sum = None

    def see(self) -> None:
        """Read what changes seldom: parents, and the time of children that have ended."""
        self._ended_before, self.ended = self.ended, {}
        for member in self.members.values():
            try:
                stat = member.process.stat()
            except ProcessLookupError:
                continue  # the next read finds out
            member.parent_pid = stat.parent_pid
            member.reaped_seen_ns = stat.reaped_ns


class Trees:
    """All watched jobs of a host. One thread only."""

    def __init__(self, processes: ProcessTable) -> None:
        self.jobs: dict[str, JobTree] = {}
        self._processes = processes
        self.version = 0  # changes whenever a job, or a process of a job, comes or goes
        self._links: dict[int, ProcessStat] = {}  # every process of the host, as it was when it was first seen
        self._unwatched_ns: Counter[str] = Counter()
        self._newest = -1  # the number given last, before the last scan
        self._told = True  # that number changes with every new process; what some containers show does not

    def watch(self, job_id: str, slices: Mapping[str, frozenset[int]], root_pid: int) -> None:
        """Begin a job, or add a root and devices to it. What its processes used before does not count."""
        self.version += 1
        tree = self.jobs.setdefault(job_id, JobTree(job_id))
        for gpu_id, cores in slices.items():
            tree.slices.setdefault(gpu_id, cores)
            tree.device_ns.setdefault(gpu_id, 0)
        self._links.pop(root_pid, None)  # its number may have been another's when it was first seen
        self._adopt_new()
        self._adopt(tree, root_pid, from_now=True)
        root = self._links.get(root_pid)
        if root is not None and (root_pid in tree.members or root_pid in tree.unopened):
            tree.roots.add(root_pid)
            if root.session == root_pid:
                tree.sessions.add(root_pid)
        self._adopt_owned(tree, self._links, from_now=True)
        tree.forget_io()

    def unwatch(self, job_id: str) -> None:
        """Forget a job; unknown ids are ignored."""
        tree = self.jobs.pop(job_id, None)
        if tree is not None:
            self.version += 1
            self._unwatched_ns.update(tree.device_ns)
            for member in tree.members.values():
                member.process.close()

    def used_ns(self, gpu_id: str) -> int:
        """CPU time used on a device by all jobs, those of the past included: a counter."""
        return self._unwatched_ns[gpu_id] + sum(tree.device_ns.get(gpu_id, 0) for tree in self.jobs.values())

    def quiet(self) -> bool:
        """Whether a scan would find nothing: since the last no process of the host has come, and none of a job gone."""
        if not self._told or any(tree.ended or tree.unopened for tree in self.jobs.values()):
            return False
        return self._processes.newest() == self._newest

    def scan(self) -> float:
        """Find new processes of the jobs; returns after how many seconds to look again."""
        begin = time.thread_time()
        before, self._newest = self._newest, self._processes.newest()
        if self._adopt_new() and self._processes.newest() == before:
            self._told = False
        for tree in self.jobs.values():
            tree.see()
        return min(SCAN_MAX_S, (time.thread_time() - begin) / SCAN_BUDGET)

    def see_io(self) -> None:
        """Bring what the jobs have read and written up to date."""
        for tree in self.jobs.values():
            tree.see_io()

    def read(self) -> None:
        """Bring the counters of all jobs up to date."""
        for tree in self.jobs.values():
            roots = len(tree.roots)
            for pid in tree.read():
                self.version += 1
                self._links.pop(pid, None)  # whoever has the number next is new
            self.version += roots != len(tree.roots)

    def _adopt_new(self) -> bool:
        """Give every job its new processes, and those that could not be opened before; returns whether any has come."""
        fresh = self._find_new()
        for tree in self.jobs.values():
            again, tree.unopened = tree.unopened, set()
            for pid in again:
                self._adopt(tree, pid, from_now=False)
            self._adopt_owned(tree, self._links if again else fresh, from_now=False)
        return bool(fresh)

    def _find_new(self) -> list[int]:
        """Return the processes that were not there at the last look."""
        pids = self._processes.pids()
        for pid in self._links.keys() - pids:
            del self._links[pid]
        fresh = []
        for pid in pids - self._links.keys():
            try:
                self._links[pid] = self._processes.stat(pid)
            except ProcessLookupError:
                continue
            fresh.append(pid)
        return fresh

    def _adopt_owned(self, tree: JobTree, pids: Iterable[int], from_now: bool) -> None:
        """Adopt those that are the job's, and their children, and theirs."""
        candidates = {pid for pid in pids if pid not in tree.members}
        while found := {pid for pid in candidates if tree.owns(self._links[pid])}:
            candidates -= found
            for pid in found:
                self._adopt(tree, pid, from_now)

    def _adopt(self, tree: JobTree, pid: int, from_now: bool) -> None:
        if pid in tree.members:
            return
        try:
            process = self._processes.open(pid)
        except ProcessLookupError:
            tree.roots.discard(pid)
            return
        except OSError:  # out of file descriptors
            tree.unopened.add(pid)
            return
        try:
            stat = process.stat()
            member = Member(process, stat.parent_pid)
            if from_now:
                member.cpu_ns, member.reaped_ns = process.read().cpu_ns, stat.reaped_ns
        except ProcessLookupError:
            process.close()
            tree.roots.discard(pid)
            return
        tree.members[pid] = member
        self.version += 1
