"""The hardware of a dry run: the stand-in for NVML is told what the jobs' programs claim to use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

CLAIM = "dry-claim"  # in a job's directory: bytes its program would have on the GPU, per cent of its time
STATE = "NVML_STANDIN_STATE"


class Dry:
    """The stand-in's state file, with a line per job on top of what was there.

    Args:
        gpu_ids: The GPUs in NVML's order.
    """

    def __init__(self, gpu_ids: Sequence[str]) -> None:
        self._state = Path(os.environ[STATE])
        self._hardware = self._state.read_text(encoding="utf-8")
        self._index = {gpu_id: index for index, gpu_id in enumerate(gpu_ids)}

    def show(self, places: Mapping[Path, Sequence[str]]) -> None:
        """Tell the stand-in what the jobs with these directories use of their GPUs."""
        lines = []
        for job_dir, gpu_ids in places.items():
            claim = job_dir / CLAIM
            for report in job_dir.glob("report-*") if claim.exists() else ():
                pid, said = report.name.removeprefix("report-"), claim.read_text(encoding="utf-8").split()
                if len(said) == 2:  # not half written
                    uses = f"pid={pid} memory={said[0]} sm={said[1]}"
                    lines += [f"process {self._index[gpu_id]} {uses}\n" for gpu_id in gpu_ids]
        fresh = self._state.with_suffix(".dry")
        fresh.write_text(self._hardware + "".join(lines), encoding="utf-8")
        fresh.replace(self._state)
