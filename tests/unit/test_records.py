"""Records of the core are changed as those of ``dataclasses`` are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from scheduling import host, spec

from cotenant.scheduler.core.model import Hints, Job, JobState, Progress
from cotenant.scheduler.core.records import replace

JOB = Job(spec("j"), JobState.QUEUED, queued_at=1.0, epoch=2)


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        (JOB, {}),
        (JOB, {"state": JobState.STARTING, "predicted": 0.5, "epoch": 3}),
        (JOB.spec, {"hints": Hints(gpus=2)}),
        (host("a"), {"reachable": False}),
        (Progress(1.0, 2.0, 0.5), {"at": 3.0}),
    ],
)
def test_a_changed_record_is_that_of_dataclasses(record: Any, changes: dict[str, Any]) -> None:
    found, want = replace(record, **changes), dataclasses.replace(record, **changes)
    assert found == want
    assert found is not record
    for each in dataclasses.fields(record):
        if each.name not in changes:
            assert getattr(found, each.name) is getattr(record, each.name)


def test_what_is_no_field_cannot_be_changed() -> None:
    with pytest.raises(KeyError, match="bogus"):
        replace(JOB, **{"bogus": 1})
