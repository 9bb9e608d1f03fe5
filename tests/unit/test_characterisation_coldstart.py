"""Cold-start classes: what a job gets before it was ever measured."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import PchipInterpolator

from cotenant.forecasting.characterisation.coldstart import (
    LEVELS,
    ColdStartClasses,
    ColdStartError,
    Descriptors,
    monotone_cubic,
)
from cotenant.forecasting.datasets.runs import make_runs
from cotenant.forecasting.training.coldstart import fit, unseen_batches, unseen_families

MEMORY_BYTES = 16 * 2.0**30


def table(families: int = 6) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        [
            {
                "family": f"net{number}",
                "architecture": f"net{number} v{version}",
                "batch": batch,
                "parameters": 2.0 ** (14 + 2 * number + version),
                "util_max": min(100.0, 5.0 + 8 * number + 4 * math.log2(batch) + rng.normal(0, 1.0)) % 100.0,
                "memory_max": min(100.0, 4.0 + 6 * number + batch / 20),
            }
            for number in range(families)
            for version in (1, 2)
            for batch in (4, 16, 64, 256)
        ]
    )


@pytest.fixture(scope="module")
def model() -> ColdStartClasses:
    return fit(make_runs(table(), "made up", MEMORY_BYTES))


@pytest.mark.parametrize(
    ("job", "level"),
    [
        (Descriptors("net2", "net2 v1", "training", 32), "architecture"),
        (Descriptors("net2", "NET2-V1", None, 32), "architecture"),
        (Descriptors("net2", "net2 v1", None, 512), "beyond"),
        (Descriptors("net2", "net2 v1", None, 2), "beyond"),
        (Descriptors("net2", "net2 v1", None, 514), "family"),
        (Descriptors("net2", "net2 v1", None, 4096), "family"),
        (Descriptors(None, "net2 v1", None, 4096), "family"),
        (Descriptors("net2", "net2 v1", "inference", 32, 1e6), "family"),
        (Descriptors("net2", "net2 v9", None, 32, 1e6), "family"),
        (Descriptors("net2", "net2 v9", None, 32), "family"),
        (Descriptors("net2", "net2 v1"), "family"),
        (Descriptors("new", "new", None, 32, 1e6), "general"),
        (Descriptors("new", "new", None, 32), "population"),
        (Descriptors(), "population"),
    ],
)
def test_a_job_is_judged_by_the_nearest_that_was_measured(
    model: ColdStartClasses, job: Descriptors, level: str
) -> None:
    assert model.describe(job).level == level


def test_the_less_is_known_the_wider_the_interval(model: ColdStartClasses) -> None:
    jobs = (
        Descriptors("net2", "net2 v1", None, 32),
        Descriptors("new", "new", None, 32, 2.0**19),
        Descriptors("new", "new", None, 32),
    )
    widths = [found.util_p95[3] - found.util_p95[1] for found in map(model.describe, jobs)]
    assert widths == sorted(widths)
    assert widths[2] > 2 * widths[0]


def test_a_profile_is_cautious_and_is_not_given_out_of_nothing(model: ColdStartClasses) -> None:
    profile = model.prior(Descriptors("net2", "net2 v1", None, 64))
    assert profile is not None
    assert (profile.source, profile.family, profile.observed_s) == ("class", "net2", 0.0)
    assert profile.util_mean <= profile.util_p95 <= 1.0
    truth = (4.0 + 12 + 64 / 20) / 100 * MEMORY_BYTES
    assert profile.memory_bytes is not None
    assert profile.memory_bytes >= 0.95 * truth
    assert model.prior(Descriptors("new", batch=64)) is None


@given(
    batch=st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)),
    parameters=st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)),
    family=st.one_of(st.none(), st.sampled_from(["net1", "", "ü", "net1 v1"])),
)
def test_whatever_is_said_the_numbers_stay_in_bounds(
    model: ColdStartClasses, batch: float | None, parameters: float | None, family: str | None
) -> None:
    found = model.describe(Descriptors(family, family, None, batch, parameters))
    for values in (found.util_mean, found.util_p95, [value / MEMORY_BYTES for value in found.memory_bytes]):
        assert list(values) == sorted(values)
        assert all(0.0 <= value <= 1.0 for value in values)
    assert found.level in LEVELS
    assert found.class_id in range(3)


def test_without_the_size_of_the_model_nothing_is_said_about_memory(model: ColdStartClasses) -> None:
    sized = model.prior(Descriptors("net2", "net2 v9", None, 32, 1e6))
    unsized = model.prior(Descriptors("net2", "net2 v9", None, 32))
    assert sized is not None
    assert unsized is not None
    assert sized.memory_bytes is not None
    assert unsized.memory_bytes is None


def test_a_profile_takes_the_upper_end_of_the_mean_too(model: ColdStartClasses) -> None:
    job = Descriptors("net2", "net2 v1", None, 32)
    profile = model.prior(job)
    assert profile is not None
    assert (profile.util_mean, profile.util_p95) == (
        model.describe(job).util_mean[-1],
        model.describe(job).util_p95[-1],
    )


def test_of_several_kinds_the_heaviest_counts_while_none_is_said() -> None:
    rows = table(4)
    serving = rows.assign(kind="inference", util_max=1.0, memory_max=99.0)
    both = fit(make_runs(pd.concat([rows.assign(kind="training"), serving]), "x", MEMORY_BYTES))
    light, heavy, unsaid = (
        both.describe(Descriptors("net2", "net2 v1", kind, 32)) for kind in ("inference", "training", None)
    )
    assert unsaid.util_p95[2] == max(light.util_p95[2], heavy.util_p95[2])
    assert unsaid.memory_bytes[2] == max(light.memory_bytes[2], heavy.memory_bytes[2])
    assert unsaid.reason == "net2 v1 at batch 32: measured at 4, 16, 64 and 256 or 4, 16, 64 and 256"


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        ((8,), "measured at 8"),
        ((6, 12), "measured at 6 and 12"),
        ((4, 8, 16, 32, 64), "measured at 5 batch sizes from 4 to 64"),
    ],
)
def test_the_reason_names_what_was_measured(batches: tuple[int, ...], text: str) -> None:
    rows = pd.DataFrame(
        [
            {"family": "nlp", "architecture": "bert", "batch": b, "util_max": 20.0 + b, "memory_max": 9.0}
            for b in batches
        ]
    )
    found = fit(make_runs(rows, "x", MEMORY_BYTES), classes=1).describe(Descriptors(None, "bert", None, 8))
    assert found.reason == f"bert at batch 8: {text}"


def test_the_family_of_an_architecture(model: ColdStartClasses) -> None:
    assert [model.family_of(name) for name in ("net2 v1", "NET2-v1", "net2", "")] == ["net2", "net2", "", ""]
    shared = pd.concat([table(3).assign(kind="training"), table(3).assign(family="served", kind="inference")])
    assert fit(make_runs(shared, "x", MEMORY_BYTES)).family_of("net2 v1") == "", "two families claim it"


def test_a_level_that_could_not_be_tested_borrows_the_interval_of_the_next_wider_one(model: ColdStartClasses) -> None:
    assert model.tested == {level: level for level in LEVELS}
    once = table(9).query("batch == 16 and architecture.str.endswith('v1')").drop(columns="parameters")
    assert fit(make_runs(once, "x", MEMORY_BYTES)).tested == dict.fromkeys(LEVELS, "population")


def test_what_could_not_be_tested_at_all_gives_no_profile() -> None:
    model = fit(make_runs(table(2), "x", MEMORY_BYTES))
    job = Descriptors("net1", "net1 v1", None, 32)
    assert model.describe(job).level == "architecture"
    assert model.prior(job) is None


def test_classes_are_ordered_from_light_to_heavy(model: ColdStartClasses) -> None:
    assert [util for util, _ in model.centres] == sorted(util for util, _ in model.centres)


def test_a_model_survives_json(model: ColdStartClasses) -> None:
    again = ColdStartClasses.from_dict(json.loads(json.dumps(model.as_dict(), allow_nan=False)))
    assert again.as_dict() == model.as_dict()
    job = Descriptors("net2", "net2 v1", None, 32)
    assert again.describe(job) == model.describe(job)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version 1 is not accepted; this program reads version 2: fit again"),
        ({"version": None}, "version None"),
        ({"centres": []}, "no class"),
        ({"centres": [[0.1]]}, "cannot be read"),
        ({"scale": [0.0, 1.0]}, "scale is not positive"),
        ({"device_memory_bytes": float("nan")}, "not finite"),
        ({"errors": {}}, "KeyError"),
        ({"tested": {"family": "hearsay"}}, "tested must name levels"),
        ({"tested": None}, "AttributeError"),
        ({"gpu_types": None}, "TypeError"),
        ({"lines": None}, "TypeError"),
        ({"architectures": {"a:": {"family": "a", "kind": "", "log2_batch": [], "values": {}}}}, "KeyError"),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(model: ColdStartClasses, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ColdStartError, match=message):
        ColdStartClasses.from_dict(model.as_dict() | change)


def test_unordered_batch_sizes_are_refused(model: ColdStartClasses) -> None:
    record = json.loads(json.dumps(model.as_dict()))
    next(iter(record["architectures"].values()))["log2_batch"].reverse()
    with pytest.raises(ColdStartError, match="do not ascend"):
        ColdStartClasses.from_dict(record)


def test_one_family_gives_the_widest_interval() -> None:
    model = fit(make_runs(table(1), "x", MEMORY_BYTES), classes=2)
    found = model.describe(Descriptors("new", "new", None, 32, 1e6))
    assert (found.util_p95[0], found.util_p95[-1]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("memory", "classes", "message"), [(None, 3, "device_memory_bytes is not known"), (1e9, 100, "48 different runs")]
)
def test_what_cannot_be_fitted_is_refused(memory: float | None, classes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(make_runs(table(), "x", memory), classes)


def test_scores_of_unseen_runs() -> None:
    runs = make_runs(table(4).query("architecture.str.endswith('v1')"), "x", MEMORY_BYTES)
    family, batch = unseen_families(runs), unseen_batches(runs)
    assert (family.runs, batch.runs) == (16, 8)
    assert batch.mae["util_p95"] < family.mae["util_p95"]
    assert batch.coverage["memory"] >= 0.7
    with pytest.raises(ValueError, match="more than 3 are needed"):
        unseen_families(make_runs(table(3), "x", MEMORY_BYTES))


def test_the_monotone_cubic_is_pchip_inside() -> None:
    x, y = np.array([0.0, 1.0, 3.0, 4.0, 6.0, 7.0]), np.array([0.0, 2.0, 3.0, 3.0, 7.0, 1.0])
    for at in (1.5, 3.2, 4.9):
        assert monotone_cubic(x, y, at) == pytest.approx(float(PchipInterpolator(x, y)(at)))
    assert monotone_cubic(x[:2], y[:2], 0.5) == 1.0


def test_serving_needs_neither_pandas_nor_scikit_learn() -> None:
    program = (
        "import sys, cotenant.forecasting.characterisation.coldstart\n"
        "heavy = {'pandas', 'sklearn', 'scipy', 'plotly', 'torch'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0
