"""Shipped models with one value changed and the checksum made right again: refused, or they say what can be."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.forecasting.characterisation.coldstart import ColdStartClasses, ColdStartError, Descriptors
from cotenant.forecasting.datasets import interference_models
from cotenant.forecasting.datasets.interference_models import load_models
from cotenant.forecasting.datasets.model_card import ModelFileError
from cotenant.forecasting.datasets.registry import SHIPPED_MODELS
from cotenant.forecasting.types import DemandProfile
from cotenant.forecasting.windows import MOST_BYTES

WORDS: tuple[Any, ...] = (
    *(None, True, "word", "1", "", [], {}, [1, 2], {"a": 1}),
    *(-1, 0, 2.5, 1e300, -1e300, 1e-300, 10**400, math.nan, math.inf, -math.inf),
)
Place = tuple[str | int, ...]


@cache
def shipped(kind: str) -> str:
    name = {"coldstart": "classes.json", "interference": "interference.json"}[kind]
    return (SHIPPED_MODELS / kind / name).read_text(encoding="utf-8")


@cache
def places(kind: str) -> list[Place]:
    return list(places_of(json.loads(shipped(kind)), ()))


def places_of(content: Any, here: Place) -> Iterator[Place]:
    """Everywhere in a document; of a long list its ends."""
    if here:
        yield here
    if isinstance(content, dict):
        for name, value in content.items():
            yield from places_of(value, (*here, name))
    elif isinstance(content, list):
        for at in sorted({*range(min(3, len(content))), *([len(content) - 1] if content else [])}):
            yield from places_of(content[at], (*here, at))


def changes(kind: str) -> st.SearchStrategy[tuple[Place, str, Any]]:
    """Where, how, and what comes there."""
    where = st.deferred(lambda: st.sampled_from(places(kind)))
    return st.tuples(where, st.sampled_from(("gone", "twice", "another", "another", "another")), st.sampled_from(WORDS))


def changed(kind: str, change: tuple[Place, str, Any]) -> dict[str, Any]:
    place, how, word = change
    content: dict[str, Any] = json.loads(shipped(kind))
    holder: Any = content
    for step in place[:-1]:
        holder = holder[step]
    if how == "gone":
        del holder[place[-1]]
    elif how == "twice" and isinstance(holder, list):
        holder.append(holder[place[-1]])
    else:
        holder[place[-1]] = word
    return content


JOBS = [
    Descriptors(family, architecture, kind, batch, parameters)
    for family in (None, "bert", "never seen")
    for architecture in (None, "never seen", "bert:training")
    for kind in (None, "training")
    for batch in (None, 1.0, 1e9)
    for parameters in (None, 1e6)
]


@settings(deadline=None, max_examples=300)
@given(changes("coldstart"))
def test_changed_classes_are_refused_or_expect_what_can_be(change: tuple[Place, str, Any]) -> None:
    try:
        classes = ColdStartClasses.from_dict(changed("coldstart", change))
    except ColdStartError:
        return
    for job in JOBS:
        prior = classes.prior(job)
        if prior is not None:
            assert 0.0 <= prior.util_mean <= 1.0
            assert 0.0 <= prior.util_p95 <= 1.0
            assert prior.memory_bytes is None or 0 <= prior.memory_bytes <= MOST_BYTES


MEMBERS = [
    DemandProfile(util, util, 1 << 30, rate, 60.0, "history", False, bandwidth, fingerprint, family)
    for util in (0.0, 0.5, 1.0)
    for rate, bandwidth, fingerprint, family in ((None, None, "", ""), (10.0, 0.3, "program", "resnet"))
]


@settings(deadline=None, max_examples=120)
@given(changes("interference"))
def test_a_changed_model_of_interference_is_refused_or_predicts_what_can_be(change: tuple[Place, str, Any]) -> None:
    content = changed("interference", change)
    body = {name: content.get(name) for name in ("card", "models", "pooled")}
    content["sha256"] = interference_models._digest(body)
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        path = Path(folder) / "interference.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        try:
            loaded = load_models(path)
        except ModelFileError as error:
            assert "interference.json" in str(error)
            return
        predictor = loaded.predictor()
        for gpu_type in (*loaded.models, "never seen"):
            for members in (MEMBERS[:2], MEMBERS[3:6], MEMBERS):
                for each in predictor.predict(members, gpu_type):
                    assert 0.0 < each.low <= each.mid <= each.high <= 1.0
