"""Files of cotenant that hold something else: each is named in one line, and what was learnt can be learnt again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cotenant.actors.cluster import ensure_token
from cotenant.configs import yamlfile
from cotenant.configs.loader import SettingsError, load
from cotenant.forecasting.profiles import ProfileBook
from cotenant.forecasting.types import Signature
from cotenant.scheduler.errors import CotenantError
from cotenant.scheduler.names import ClusterRecord, home

SETTINGS = [
    "api: {port: 1, port: 2}",
    "api: {port: 1}\napi: {port: 2}",
    "api: {host: 2030-13-45}",
    "api: {host: 2030-01-01}",
    "api: {host: !!binary aGk=}",
    "api: &a {host: *a}",
    "api: {host: &l [*l]}",
    "api: {host: {[1, 2]: 3}}",
    f"api: {{port: {'9' * 5000}}}",
    f"api: {{port: 0x{'F' * 5000}}}",
    "api: {port: true}",
    "api: {port: '1'}",
    "api: {port: .nan}",
    "placement: {profile_s: .inf}",
    "resize: {enabled: 1}",
    "[" * 600,
    "- api",
    "api",
    "1: {2: 3}",
    "? [a]\n: b",
    "api: !!python/name:os.system",
]


@pytest.mark.parametrize("text", SETTINGS)
def test_settings_with_junk(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load(path, {})
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    "text", ["2030-13-45", "[" * 600, "9" * 5000, "0x" + "F" * 5000, "\x1b", "&a [*a]", "{", "", "٣"]
)
def test_variables_with_junk(text: str) -> None:
    with pytest.raises(SettingsError, match="environment variable COTENANT_API__PORT") as caught:
        load(None, {"COTENANT_API__PORT": text})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.write_bytes(b"\xff\xfe\x00"), lambda path: None])
def test_settings_files_that_cannot_be_read(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    path = tmp_path / "settings.yaml"
    make(path)
    for how in ((path, {}), (None, {"COTENANT_CONFIG": str(path)})):
        with pytest.raises(SettingsError, match=r"settings\.yaml: "):
            load(*how)


def test_merged_mappings_and_aliases_still_work() -> None:
    text = "base: &base {a: 1, b: 2}\nchild: {<<: *base, b: 3}\nagain: *base"
    assert yamlfile.read(text)["child"] == {"a": 1, "b": 3}


# -- what was learnt --------------------------------------------------------------------------------------------------


def learnt() -> dict[str, Any]:
    book = ProfileBook()
    for second in range(8):
        book.observe(Signature("a", "g", second, 1.0, 10, 0.4, 0.5, 1e9, 1e9, 10.0, 0.0, 0.1, 0, 1.0), "f")
    content: dict[str, Any] = json.loads(book.to_json())
    return content


def spoil(*where: Any) -> Callable[[dict[str, Any]], None]:
    *path, last, value = where

    def change(content: Any) -> None:
        for key in path:
            content = content[key]
        content[last] = value

    return change


RECORD = ("fingerprints", "f")
NUMBERS: tuple[Any, ...] = (float("nan"), float("inf"), -1.0, 10**400, "x", None, [])
BOOKS = [
    *(spoil(*RECORD, "memory_peak", value) for value in (*NUMBERS, 2.0**64)),
    *(spoil(*RECORD, "rates", [value]) for value in NUMBERS),
    *(spoil(*RECORD, "usages", "solo", "utils", [value]) for value in (*NUMBERS, 2.5)),
    *(spoil(*RECORD, "usages", "solo", "seconds", value) for value in NUMBERS),
    *(spoil(*RECORD, "block", value) for value in ([5.0, 0.0], [1.0], [], 3, [float("nan"), 1.0])),
    *(spoil("max_jobs", value) for value in (0, -1, float("inf"), float("nan"), "x", None)),
    *(spoil("jobs", value) for value in ([], 1, {"a": 1}, {"a": {}})),
    spoil("jobs", "a", "record", "memory_peak", float("nan")),
    spoil("format", "cotenant-profiles-2"),
    spoil("fingerprints", None),
]


@pytest.mark.parametrize("change", BOOKS)
def test_a_profile_book_that_is_none(change: Callable[[dict[str, Any]], None]) -> None:
    content = learnt()
    assert ProfileBook.from_json(json.dumps(content)).profile(None, "f").source == "history"
    change(content)
    with pytest.raises(ValueError, match=r"."):
        ProfileBook.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", '"x"', "[" * 100_000, "{}", "\0"])
def test_a_text_that_is_no_profile_book(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        ProfileBook.from_json(text)


# -- the state directory ----------------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTENANT_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "{}", '{"address": 1, "other": 2}', "[" * 100_000])
def test_a_record_of_a_cluster_that_is_none(state: Path, text: str) -> None:
    assert ClusterRecord.load() is None
    (state / "cluster.json").write_text(text)
    with pytest.raises(CotenantError, match=r"cluster\.json: is no record of this version of cotenant .*remove it"):
        ClusterRecord.load()


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff", b"a b", b"\x1b[31m"])
def test_a_token_that_is_none_is_not_taken(state: Path, content: bytes) -> None:
    (state / "token").write_bytes(content)
    with pytest.raises(CotenantError, match="token: holds no token"):
        ensure_token()
    (state / "token").unlink()
    assert ensure_token() == ensure_token() != ""


def test_the_state_directory_is_the_same_from_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for given, meant in (("state", tmp_path / "state"), ("~/state", Path.home() / "state"), ("/x", Path("/x"))):
        monkeypatch.setenv("COTENANT_HOME", given)
        assert home() == meant
