"""Tables as spreadsheets, other countries, broken disks and tired people leave them: read, or refused by name."""

from __future__ import annotations

import gzip
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.forecasting.datasets.pair_sources import read_pair_data
from cotenant.forecasting.datasets.runs import read_pairs, read_runs
from cotenant.forecasting.datasets.schema import DataError
from cotenant.forecasting.datasets.series_sources import read_series_data

TABLES = {
    "runs": "family,batch,util_max,memory_max,power\n"
    + "".join(f"f{i % 5},{2 ** (i % 6)},{30 + i},{10 + i},{100 + i}\n" for i in range(30)),
    "times": "a,b,solo_a_s,solo_b_s,packed_a_s,packed_b_s\n" + "f1 batch 1,f2 batch 2,10.5,20.5,15.5,25.5\n" * 4,
    "smi": "timestamp, utilization.gpu [%], memory.used [MiB], power.draw [W]\n"
    + "".join(
        f"2026/01/02 03:{i // 60:02d}:{i % 60:02d}.000, {i % 100} %, {1000 + i} MiB, {100 + i}.5 W\n"
        for i in range(150)
    ),
    "pods": "container_ip,timestamp_anon,value\n"
    + "".join(f"10.0.0.{pod},{i * 15},{i * 7 % 100}.5\n" for pod in range(2) for i in range(210)),
    "matrix": "job,batch,gpu_util_pct,solo_us_per_10steps,peer,peer_batch,peer_gpu_util_pct,peer_solo_us_per_10steps,"
    + "slowdown_ratio\nnet,1,40,100000.5,rnn,8,80,200000.5,1.25\nrnn,8,80,200000.5,net,1,40,100000.5,1.05\n",
}
WORDS = (
    *(
        "",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "-5",
        "word",
        "18446744073707737660",
        "250 %",
        "0",
        "1e-300",
        "1e300",
        "9" * 400,
    ),
    *("'", '"', '"3"', "\x00", "2026-13-45", "1,5", "true", "None", "\N{GREEK SMALL LETTER MU}", " "),
)
HARMS: Mapping[str, Callable[[str, int], bytes]] = {
    "byte order mark": lambda text, _: ("\ufeff" + text).encode(),
    "line ends of Windows": lambda text, _: text.replace("\n", "\r\n").encode(),
    "semicolons": lambda text, _: text.replace(",", ";").encode(),
    "decimal commas": lambda text, _: text.replace(",", ";").replace(".", ",").encode(),
    "two columns of one name": lambda text, at: doubled(text, at, "").encode(),
    "two columns of nearly one name": lambda text, at: doubled(text, at, " ").encode(),
    "a column less": lambda text, at: without(text, at).encode(),
    "nothing": lambda _text, _: b"",
    "a head alone": lambda text, _: text.partition("\n")[0].encode(),
    "two bytes a letter": lambda text, _: text.encode("utf-16"),
    "cut off": lambda text, at: text.encode()[: at % len(text)],
    "a quote that stays open": lambda text, _: (text + '"open\n').encode(),
    "no text": lambda _text, at: bytes((at * place) % 251 for place in range(400)),
    "packed": lambda text, _: gzip.compress(text.encode()),
    "packed and cut off": lambda text, at: gzip.compress(text.encode())[: 20 + at % 60],
    "packed and damaged": lambda text, at: overwritten(gzip.compress(text.encode()), at),
}


def doubled(text: str, at: int, before: str) -> str:
    lines = [line.split(",") for line in text.splitlines()]
    column = at % len(lines[0])
    heads = [before, *[""] * len(lines)]
    return "".join(",".join([*line, head + line[column]]) + "\n" for line, head in zip(lines, heads, strict=False))


def without(text: str, at: int) -> str:
    lines = [line.split(",") for line in text.splitlines()]
    column = at % len(lines[0])
    return "".join(",".join(line[:column] + line[column + 1 :]) + "\n" for line in lines)


def overwritten(data: bytes, at: int) -> bytes:
    content = bytearray(data)
    content[10 + at % (len(content) - 20)] ^= 0x55
    return bytes(content)


def series(path: Path, form: str) -> None:
    read = read_series_data(path, form, "mine")  # type: ignore[arg-type]
    for each in read.util:
        known = each.values[np.isfinite(each.values)]
        assert ((known >= 0.0) & (known <= 1.0)).all()
    for each in read.memory:
        assert not (each.values < 0.0).any()


READERS: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "runs": ("runs.csv", lambda path: read_runs(path, {})),
    "times": ("times.csv", read_pairs),
    "smi": ("gpu.csv", lambda path: series(path, "nvidia-smi")),
    "pods": ("duty_cycle.csv", lambda path: series(path, "genai")),
    "matrix": ("matrix.csv", lambda path: read_pair_data(path, "alnair-mps", licence="mine")),
}


def read(table: str, content: bytes) -> bool:
    """Read a table; False when it was refused by name."""
    name, reader = READERS[table]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / (name + ".gz" * content.startswith(b"\x1f\x8b"))
        path.write_bytes(content)
        try:
            reader(path)
        except DataError as error:
            assert path.name.removesuffix(".gz") in str(error)
            return False
    return True


@pytest.mark.parametrize("table", TABLES)
def test_as_they_should_be(table: str) -> None:
    assert read(table, TABLES[table].encode())


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("harm", HARMS)
def test_a_harmed_table_is_read_or_refused_by_name(table: str, harm: str) -> None:
    for at in range(7):
        read(table, HARMS[harm](TABLES[table], at * 13))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("harm", ["byte order mark", "line ends of Windows", "packed"])
def test_what_still_says_the_same_is_read(table: str, harm: str) -> None:
    assert read(table, HARMS[harm](TABLES[table], 0))


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(TABLES)), st.data())
def test_words_for_numbers_and_numbers_without_measure_are_refused_by_name(table: str, data: st.DataObject) -> None:
    lines = [line.split(",") for line in TABLES[table].splitlines()]
    for _ in range(data.draw(st.integers(1, 4))):
        line = data.draw(st.integers(1, len(lines) - 1))
        column = data.draw(st.integers(0, len(lines[0]) - 1))
        lines[line][min(column, len(lines[line]) - 1)] = data.draw(st.sampled_from(WORDS))
    read(table, "".join(",".join(line) + "\n" for line in lines).encode("utf-8", "surrogatepass"))


def test_names_that_two_columns_would_have(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("family,batch,util_max,memory_max,load\nf,1,90,10,30\n")
    assert read_runs(path, {"util_max": "load"}).table["util_max"].tolist() == [30.0]
    assert read_runs(path, {"util_max": "memory_max", "memory_max": "util_max"}).table["util_max"].tolist() == [10.0]
    with pytest.raises(DataError, match="'load' is not accepted for both 'util_max' and 'memory_max'"):
        read_runs(path, {"util_max": "load", "memory_max": "load"})
