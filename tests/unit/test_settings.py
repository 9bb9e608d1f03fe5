"""Settings: the three layers, and errors that name file, key, value and what is accepted."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.configs.loader import DEFAULTS, SettingsError, accepted, load
from cotenant.configs.settings import Settings

KEYS = [(section, key) for section, keys in Settings().model_dump().items() for key in keys]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_packaged_defaults_are_the_declared_defaults() -> None:
    assert load(None, {}) == Settings()


def test_packaged_file_explains_every_setting() -> None:
    assert list(yaml.safe_load(DEFAULTS.read_text(encoding="utf-8"))) == list(Settings.model_fields)
    lines = DEFAULTS.read_text(encoding="utf-8").splitlines()
    said = {line.strip().split(":")[0]: above for above, line in itertools.pairwise(lines)}
    silent = [key for _, key in KEYS if key != "enabled" and not said[key].strip().startswith("#")]
    assert not silent
    assert all(key in said for _, key in KEYS)


def test_file_overrides_defaults_and_environment_overrides_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.yaml", "placement: {packing_bias: 0.2, policy: static}\nresize:\nlease: {ttl_s: 20}\n"
    )
    got = load(path, {"COTENANT_PLACEMENT__PACKING_BIAS": "0.7", "COTENANT_DEVICE__COUNT": "2", "COTENANT_JOB_ID": "j"})
    assert (got.placement.packing_bias, got.placement.policy, got.lease.ttl_s, got.device.count) == (
        0.7,
        "static",
        20.0,
        2,
    )
    assert got.resize == Settings().resize


def test_file_named_by_the_environment(tmp_path: Path) -> None:
    mine, other = write(tmp_path / "a.yaml", "api: {port: 1}"), write(tmp_path / "b.yaml", "api: {port: 2}")
    assert load(None, {"COTENANT_CONFIG": str(mine)}).api.port == 1
    assert load(other, {"COTENANT_CONFIG": str(mine)}).api.port == 2
    assert load(None, {"COTENANT_CONFIG": ""}).api.port == Settings().api.port


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load(write(tmp_path / "a.yaml", "# nothing\n"), {}) == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("placement: {packing_bias: 1.5}", "placement.packing_bias: 1.5 is not accepted; give a number >= 0 and <= 1"),
        ("placement: {packing_bias: .nan}", "placement.packing_bias: nan is not accepted"),
        (
            "placement: {speeds: {A100: 0.0000001}}",
            "placement.speeds: {'A100': 1e-07} is not accepted; give names, each with a number >= 1e-06 and <= 1e+06",
        ),
        ("lease: {ttl_s: .inf}", "lease.ttl_s: inf is not accepted; give a number > 0"),
        ("lease: {ttl_s: 0}", "lease.ttl_s: 0 is not accepted; give a number > 0"),
        ("lease: {max_restarts: 1.5}", "lease.max_restarts: 1.5 is not accepted; give a whole number >= 0"),
        ("device: {count: true}", "device.count: True is not accepted; give a whole number >= 1 or null"),
        ("resize: {enabled: 1}", "resize.enabled: 1 is not accepted; give true or false"),
        ("placement: {policy: fifo}", "placement.policy: 'fifo' is not accepted; give cotenant or exclusive or static"),
        ("api: {port: {2030-01-01: 1}}", "api.port: {datetime.date(2030, 1, 1): 1} is not accepted"),
        ("api: {host: null}", "api.host: None is not accepted; give a text"),
        ("api: {port: 2030-01-01}", "api.port: datetime.date(2030, 1, 1) is not accepted"),
        (
            "placement: {packing_bais: 0.5}",
            "placement.packing_bais is not a setting; did you mean placement.packing_bias?",
        ),
        ("profiler: {zzz: 0.5}", "profiler.zzz is not a setting; give one of profiler.sample_hz, profiler.window_s"),
        (
            "placment: {packing_bias: 0.5}",
            "placment.packing_bias is not a setting; did you mean placement.packing_bias",
        ),
        (
            "scheduling: {queues: {ml: {weight: 0}}}",
            "scheduling.queues: {'ml': {'weight': 0}} is not accepted; give names, each with {weight: a number > 0 and "
            "<= 1e+06, most_gpus: a number > 0 or null, most_jobs: a whole number >= 0 or null}",
        ),
        ("scheduling: {tenants: {a b: {}}}", "scheduling.tenants: {'a b': {}} is not accepted; give names, each with"),
        (
            "scheduling: {tenants: {a b: {}}}",
            "scheduling.tenants: {'a b': {}} is not accepted; give names, each with {weight: a number > 0 and <= "
            "1e+06, most_gpus: a number > 0 or null, most_jobs: a whole number >= 0 or null}; give names that "
            "begin with a letter or a digit, of letters, digits, '.', '_' and '-', at most 63: 'a b' is none",
        ),
        (
            "placement: {speeds: {'': 1.0}}",
            "placement.speeds: {'': 1.0} is not accepted; give names, each with a number >= 1e-06 and <= 1e+06; give "
            "names of 1 to 128 characters: '' is none",
        ),
        ("scheduling: {other_queues: {most_jobs: 1.5}}", "scheduling.other_queues: {'most_jobs': 1.5} is not accepted"),
        ("placement: 3", "placement: 3 is not accepted; give its keys"),
        ("zzz: 3", "zzz is not a setting; give one of placement, resize"),
        ("- 1", "holds [1]; give sections: placement, "),
        ("a: [", "is not YAML: line 1, column 5: expected the node content"),
    ],
)
def test_file_errors_name_file_key_value_and_what_is_accepted(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "mine.yaml", text)
    with pytest.raises(SettingsError, match=re.escape(f"{path}: {message}")):
        load(path, {})


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"gone\.yaml: cannot be read \(No such file"):
        load(tmp_path / "gone.yaml", {})
    with pytest.raises(SettingsError, match="cannot be read"):
        load(tmp_path, {})
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not text in UTF-8"):
        load(tmp_path / "b.yaml", {})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("COTENANT_PLACEMENT__PACKING_BIAS", "2", "placement.packing_bias: 2 is not accepted; give a number"),
        ("COTENANT_PLACEMENT__PACKING_BAIS", "0.2", "placement.packing_bais is not a setting; did you mean"),
        ("COTENANT_PLACEMENT__PACKING_BIAS__X", "0.2", "placement.packing_bias.x is not a setting"),
        ("COTENANT_API__HOST", "[", "'[' is not a YAML value"),
    ],
)
def test_environment_errors_name_the_variable(name: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"environment variable {name}: {message}")):
        load(None, {name: value})


@pytest.mark.parametrize("key", KEYS, ids=".".join)
def test_every_setting_can_say_what_it_accepts(key: tuple[str, str]) -> None:
    assert accepted(key)


_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.lists(st.integers(), max_size=2)
)


@settings(max_examples=40)  # a sixteenth of a second each
@given(st.sampled_from(KEYS), _scalars)
def test_any_value_loads_or_is_refused(key: tuple[str, str], value: object) -> None:
    name = f"COTENANT_{key[0]}__{key[1]}".upper()
    try:
        load(None, {name: yaml.safe_dump(value)})
    except SettingsError as error:
        assert name in str(error)
