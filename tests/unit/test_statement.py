"""The what-if overlay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing import GIB, gpu, request, resident

from cotenant.placement.statement import Statement
from cotenant.placement.types import GpuView, Placement, Share


def placement(job_id: str, *gpu_ids: str, squeezed: tuple[tuple[str, Share], ...] = ()) -> Placement:
    return Placement(job_id, tuple(Share(g, GIB, 0.25) for g in gpu_ids), {}, 0.0, 0.0, "", squeezed)


def jobs_on(view: tuple[GpuView, ...]) -> dict[str, list[str]]:
    return {each.gpu_id: [r.job_id for r in each.residents] for each in view}


def snapshot() -> list[GpuView]:
    return [gpu("g0", resident("a", compute=1.0)), gpu("g1")]


def test_placing_adds_the_job_and_squeezes_its_neighbours() -> None:
    statement = Statement(snapshot())
    asked = request("new", gpus=2, compute=0.3, memory=GIB, weight=2.0)
    statement.place(asked, placement("new", "g0", "g1", squeezed=(("a", Share("g0", GIB, 0.75)),)))
    assert jobs_on(statement.view()) == {"g0": ["a", "new"], "g1": ["new"]}
    old, new = statement.view()[0].residents
    assert old.share.compute == 0.75
    assert (new.share, new.min_compute, new.weight, new.profile) == (Share("g0", GIB, 0.25), 0.3, 2.0, asked.profile)


def test_evicting_returns_what_was_freed() -> None:
    statement = Statement(snapshot())
    assert statement.evict("a") == (Share("g0", GIB, 1.0),)
    assert statement.evict("a") == ()
    assert jobs_on(statement.view()) == {"g0": [], "g1": []}


def test_rolling_back_to_marks() -> None:
    before = snapshot()
    statement = Statement(before)
    statement.place(request("x"), placement("x", "g1"))
    mark = statement.checkpoint()
    at_mark = statement.view()
    statement.evict("a")
    statement.place(request("y"), placement("y", "g0", "g1"))
    statement.rollback(mark)
    assert statement.view() == at_mark
    statement.rollback()
    assert statement.view() == tuple(before)
    with pytest.raises(ValueError, match=r"mark: 1 is not accepted"):
        statement.rollback(mark)


def test_the_snapshot_is_never_touched() -> None:
    before = snapshot()
    Statement(before).evict("a")
    assert before == snapshot()


def test_a_job_cannot_be_placed_twice_on_a_gpu() -> None:
    statement = Statement(snapshot())
    with pytest.raises(ValueError, match=r"job 'a' already holds a share of GPU 'g0'"):
        statement.place(request("a"), placement("a", "g1", "g0"))
    assert statement.view() == tuple(snapshot())  # nothing was half done


def test_an_unknown_gpu_is_an_error() -> None:
    with pytest.raises(KeyError, match="g9"):
        Statement(snapshot()).place(request(), placement("new", "g9"))


steps = st.lists(st.tuples(st.sampled_from(["place", "evict", "mark", "back"]), st.integers(0, 5)), max_size=25)


@given(steps)
def test_rollback_always_restores_exactly_what_was_marked(program: list[tuple[str, int]]) -> None:
    statement = Statement(snapshot())
    marks: list[tuple[int, tuple[GpuView, ...]]] = [(0, statement.view())]
    for word, number in program:
        job_id, gpu_id = f"j{number}", f"g{number % 2}"
        if word == "place" and job_id not in jobs_on(statement.view())[gpu_id]:
            statement.place(request(job_id), placement(job_id, gpu_id))
        elif word == "evict":
            statement.evict(job_id)
        elif word == "mark":
            marks.append((statement.checkpoint(), statement.view()))
        elif word == "back":
            del marks[1 + number :]
            mark, view = marks[-1]
            statement.rollback(mark)
            assert statement.view() == view
