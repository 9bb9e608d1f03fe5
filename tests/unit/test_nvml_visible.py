"""What CUDA_VISIBLE_DEVICES names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.actors.devices.nvml.visible import Board, Instance, Named, visible_devices

EIGHT = tuple(Board(f"GPU-{n}{n}{n}{n}-0000") for n in range(8))
TWINS = (Board("GPU-8932f937-d72c"), Board("GPU-8932aaaa-d72c"), Board("GPU-3333f937-d72c"))
MIG = (
    Board("GPU-aaaa", (Instance("MIG-1111", 9, 1), Instance("MIG-1222", 10, 0))),
    Board("GPU-bbbb", (Instance("MIG-2222", 9, 1), Instance("MIG-2333"))),
    Board("GPU-cccc"),
)


@pytest.mark.parametrize(
    ("value", "boards", "expected"),
    [
        (None, EIGHT, list(range(8))),
        ("", EIGHT, []),
        (" ", EIGHT, []),
        ("NoDevFiles", EIGHT, []),
        ("-1", EIGHT, []),
        ("0", EIGHT, [0]),
        ("7", EIGHT, [7]),
        ("8", EIGHT, []),
        ("2,1", EIGHT, [2, 1]),
        (" 2, 1 ", EIGHT, [2, 1]),
        ("0,2,-1,1", EIGHT, [0, 2]),
        ("0,1,8,2,3", EIGHT, [0, 1]),
        ("0,1,2,3,0", EIGHT, []),
        ("0,0", EIGHT, []),
        ("0,8,0", EIGHT, [0]),
        ("0,,1", EIGHT, [0]),
        ("x", EIGHT, []),
        ("0,x,1", EIGHT, [0]),
        ("GPU-3333-0000,GPU-1111-0000", EIGHT, [3, 1]),
        ("GPU-3,GPU-1", EIGHT, [3, 1]),
        ("GPU-3,GPU-33", EIGHT, []),
        ("GPU-9", EIGHT, []),
        ("GPU-3,1", EIGHT, [3]),
        ("1,GPU-3", EIGHT, [1]),
        ("3333", EIGHT, []),
        ("GPU-8932f", TWINS, [0]),
        ("GPU-8932", TWINS, []),
        ("GPU-3,GPU-8932,GPU-8932f", TWINS, [2]),
        ("0", (), []),
        (None, (), []),
    ],
)
def test_whole_gpus(value: str | None, boards: tuple[Board, ...], expected: list[int]) -> None:
    assert visible_devices(value, boards) == [Named(index) for index in expected]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("MIG-1111", [(0, "MIG-1111")]),
        ("MIG-1", []),
        ("MIG-12", [(0, "MIG-1222")]),
        ("MIG-2222,MIG-1111", [(1, "MIG-2222"), (0, "MIG-1111")]),
        ("MIG-1111,MIG-1111", []),
        ("MIG-GPU-aaaa/9/1", [(0, "MIG-1111")]),
        ("MIG-GPU-b/9/1", [(1, "MIG-2222")]),
        ("MIG-GPU-aaaa/9/1,MIG-1111", []),
        ("MIG-GPU-aaaa/9/2", []),
        ("MIG-GPU-aaaa/9", []),
        ("MIG-GPU-/9/1", []),
        ("MIG-1111,GPU-cccc", [(0, "MIG-1111"), (2, None)]),
        ("GPU-aaaa", [(0, None)]),
        (None, [(0, None), (1, None), (2, None)]),
    ],
)
def test_instances(value: str | None, expected: list[tuple[int, str | None]]) -> None:
    assert visible_devices(value, MIG) == [Named(*each) for each in expected]


@given(st.lists(st.sampled_from([*"0123456789x", "-1", "", "GPU-3", "GPU-", "MIG-1"]), max_size=6))
def test_whatever_is_written_names_each_device_of_the_host_once_at_most(entries: list[str]) -> None:
    named = visible_devices(",".join(entries), EIGHT)
    assert len(set(named)) == len(named) <= len(entries)
    assert all(0 <= each.index < len(EIGHT) for each in named)


@given(st.permutations(range(8)), st.integers(0, 8))
def test_numbers_and_uuids_mean_the_same(order: list[int], count: int) -> None:
    chosen = order[:count]
    numbers, uuids = ",".join(map(str, chosen)), ",".join(EIGHT[index].uuid for index in chosen)
    assert visible_devices(numbers, EIGHT) == visible_devices(uuids, EIGHT) == [Named(index) for index in chosen]
