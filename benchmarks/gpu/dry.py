"""The hardware of a dry run: the stand-in for NVML is told what the jobs' programs claim to use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

CLAIM = "dry-claim"  # in a job's directory: bytes its program would have on the GPU, per cent of its time
STATE = "NVML_STANDIN_STATE"


class Dry:
    """The stand-in's state file, with a line per job on top of what was there."""

    def __init__(self) -> None:
        self._state = Path(os.environ[STATE])
        self._hardware = self._state.read_text(encoding="utf-8")
        self._places = dict(filter(None, map(_place, self._hardware.splitlines())))

    def show(self, places: Mapping[Path, Sequence[str]]) -> None:
        """Tell the stand-in what the jobs with these directories use of their GPUs."""
        lines = []
        for job_dir, gpu_ids in places.items():
            claim = job_dir / CLAIM
            for report in job_dir.glob("report-*") if claim.exists() else ():
                pid, said = report.name.removeprefix("report-"), claim.read_text(encoding="utf-8").split()
                if len(said) == 2:  # not half written
                    uses = f"pid={pid} memory={said[0]} sm={said[1]}"
                    for index, instance in map(self._places.__getitem__, gpu_ids):
                        lines.append(f"process {index} {uses}{instance}\n")
        fresh = self._state.with_suffix(".dry")
        fresh.write_text(self._hardware + "".join(lines), encoding="utf-8")
        fresh.replace(self._state)


def _place(line: str) -> tuple[str, tuple[str, str]] | None:
    """Return of the device that a line tells of its UUID, its GPU's number, and what names an instance."""
    words = line.split()
    if words[:1] == ["instance"]:
        return words[3], (words[1], f" instance={words[2]}")
    if words[:1] == ["gpu"]:
        uuid = next(word.removeprefix("uuid=") for word in words if word.startswith("uuid="))
        return uuid, (words[1], "")
    return None
