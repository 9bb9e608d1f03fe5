"""How much memory a process may still take, by the machine and by its memory groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.actors.hostmemory import room_bytes

MIB = 1 << 20
FILES = {2: ("memory.max", "memory.current", "inactive_file"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}


class Machine:
    """A ``/proc`` and a hierarchy of groups, as far as they are looked at. Amounts are MiB."""

    def __init__(self, folder: Path, version: int) -> None:
        self.proc, self.groups, self.version = folder / "proc", folder / "groups", version
        (self.proc / "7").mkdir(parents=True)
        (self.proc / "self").mkdir()
        self.groups.mkdir()
        (self.proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {800 * 1024} kB\n")
        kind = "cgroup2 cgroup rw" if version == 2 else "cgroup cgroup rw,memory"
        (self.proc / "self" / "mountinfo").write_text(f"30 24 0:26 / {self.groups} rw shared:9 - {kind}\n")
        (self.proc / "7" / "cgroup").write_text(f"{'0:' if version == 2 else '4:memory'}:/a/b\n")

    def group(self, name: str, limit: int | None, used: int, inactive: int = 0) -> None:
        group = self.groups / name
        group.mkdir(parents=True, exist_ok=True)
        most, current = FILES[self.version][:2]
        (group / most).write_text("max" if limit is None else str(limit * MIB))
        (group / current).write_text(str(used * MIB))
        line = "inactive_file" if self.version == 2 else "total_inactive_file"
        (group / "memory.stat").write_text(f"anon 5\n{line} {inactive * MIB}\n")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("groups", "room"),
    [
        ({}, 800),
        ({"a": (None, 10), "a/b": (None, 10)}, 800),
        ({"a": (None, 10), "a/b": (300, 100)}, 200),
        ({"a": (150, 100), "a/b": (300, 100)}, 50),
        ({"a/b": (300, 250, 40)}, 90),
        ({"": (120, 100), "a/b": (300, 250)}, 20),
        ({"a/b": (300, 400)}, 0),
        ({"a/b": (5000, 0)}, 800),
    ],
)
def test_the_least_of_what_machine_and_groups_leave(tmp_path, version, groups, room):
    machine = Machine(tmp_path, version)
    for name, figures in groups.items():
        machine.group(name, *figures)
    assert room_bytes(7, machine.proc) == room * MIB


def test_a_process_that_has_ended_is_in_no_group(tmp_path):
    assert room_bytes(8, Machine(tmp_path, 2).proc) == 800 * MIB
