"""The published traces themselves, where they lie beside the checkout: every file of a form we list is read whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest

from cotenant.scheduler.simulation.errors import TraceError
from cotenant.scheduler.simulation.traces import FORMATS, OWN_FORMAT, load, recognise

_BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"
TRACES = Path(os.environ.get("COTENANT_DATA", _BESIDE)) / "traces"
FORMS: Mapping[str, tuple[str, ...]] = {
    "philly-week": ("peer_runs/philly_week.csv.gz",),
    "philly-sia": ("philly_sia.csv.gz",),
    "muri": ("muri/trace*.csv.gz", "muri/cluster_trace.csv"),
    "muri-testbed": ("muri/testbed_*_job.csv.gz",),
    "tiresias": ("tiresias/60_job.csv",),
    "gavel": ("gavel/*.trace",),
    "openb": ("alibaba/openb_pod_list_*.csv.gz",),
    "dlrm": ("alibaba/v2025_disaggregated_DLRM_trace.csv.gz",),
}
WITHOUT_TIMES = "alibaba/openb_pod_list_multigpu50.csv.gz"  # of its form, but it does not say when pods come and go


@pytest.fixture(scope="module")
def traces() -> Path:
    """The folder with the traces."""
    if not TRACES.is_dir():
        pytest.skip(f"there is no {TRACES}; set COTENANT_DATA to the folder with traces/")
    return TRACES


def files(traces: Path, form: str) -> list[Path]:
    """All files of a form that can be jobs."""
    found = sorted(path for pattern in FORMS[form] for path in traces.glob(pattern))
    return [path for path in found if not fnmatch(str(path), f"*/{WITHOUT_TIMES}")]


def test_every_form_is_listed() -> None:
    assert {*FORMS, OWN_FORMAT} == set(FORMATS)


@pytest.mark.parametrize("form", FORMS)
def test_every_shared_trace_of_a_listed_form_is_read(traces: Path, form: str) -> None:
    paths = files(traces, form)
    assert paths
    for path in paths:
        assert recognise(path) == form
        trace = load(path)
        assert all(job.duration_s > 0.0 and job.submit_s >= 0.0 and job.gpus >= 1 for job in trace.jobs)


def test_pods_that_never_ran_are_few_among_those_that_did(traces: Path) -> None:
    counts = {path.name: (len(trace.jobs), trace.left_out) for path in files(traces, "openb") for trace in [load(path)]}
    assert counts["openb_pod_list_default.csv.gz"] == (6203, {"pods that never ran": 861})
    assert {ran + left["pods that never ran"] for ran, left in counts.values()} == {7064}


def test_other_files_are_refused_and_not_misread(traces: Path) -> None:
    readable = {path for form in FORMS for path in files(traces, form)}
    others = [path for path in sorted(traces.rglob("*")) if path.is_file() and path not in readable]
    assert others
    for path in others:
        with pytest.raises(TraceError):
            load(path)
