"""Whatever a user hands in: the same refusal on every way in, and nothing gets as far as the journal."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from command_line import COMMAND, RUNNER
from fake_client import FakeClient, job_view
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduling import GIB, spec

from cotenant import _preflight, _render, cli
from cotenant.dashboards.api import create_app
from cotenant.scheduler.client import Client
from cotenant.scheduler.core.model import Hints, JobState
from cotenant.scheduler.errors import HintError, NotAccepted, shown
from cotenant.scheduler.hints import HINT_NAMES, check_hints, from_metadata, parse_hints
from cotenant.scheduler.specs import MAX_WORD_BYTES, check_spec
from cotenant.scheduler.transport import Link
from cotenant.scheduler.views import Explanation, JobView

NOW = 1_800_000_000.0
JSON = {"Content-Type": "application/json"}
HUGE = 10**3000
DEEP: list[Any] = [[[[[[[1]]]]]]]
NOT_TEXT: list[object] = [True, math.nan, math.inf, -math.inf, [], {}, [1], {"a": [1]}, DEEP, -1, HUGE]
NOT_A_HINT = ["", " ", "-1", "nan", "inf", "٣", "1 parsec", "1e3", "\x1b[31m", "a\0b", "x" * 100_000, "\udcff"]
NAMES_TOO = ("nan", "inf", "1e3")
NAMES = {"framework", "model", "model_family", "queue", "tenant", "group"}


class NoCluster:
    """The link of a client without a cluster: keeps what would be sent and answers with ``known``."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.known: dict[str, JobView] = {}

    def origin(self) -> tuple[None, None]:
        return None, None

    def scheduler(self, method: str, *args: Any) -> Any:
        self.sent.append((method, *args))
        if method == "submit":
            return [
                self.known.setdefault(
                    one.job_id, job_view(one.job_id, command=list(one.command), hints=asdict(one.hints))
                )
                for one in args[0]
            ]
        return job_view()


@pytest.fixture
def link() -> NoCluster:
    return NoCluster()


@pytest.fixture
def client(link: NoCluster) -> Client:
    return Client(cast(Link, link))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeClient:
    fake = FakeClient(job_view())
    monkeypatch.setattr(cli, "_client", lambda address: fake)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(_preflight.RAY_JOB_CONFIG, raising=False)
    return fake


_serving: list[FakeClient] = []
_APP = create_app(cast(Callable[[], Client], lambda: _serving[-1]), None)  # building it takes longer than a request


def request(fake: FakeClient, method: str, path: str, **how: Any) -> httpx.Response:
    _serving[:] = [fake]

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(_APP, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as session:
            return await session.request(method, path, **how)

    return asyncio.run(send())


def submit_json(fake: FakeClient, body: object) -> httpx.Response:
    return request(fake, "POST", "/api/v1/jobs", content=json.dumps(body), headers=JSON)


# -- hints: four ways in ----------------------------------------------------------------------------------------------


def refusal(read: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(HintError) as caught:
        read()
    assert len(str(caught.value)) < 1000
    return caught.value.field, caught.value.accepted


@pytest.mark.parametrize("hint", HINT_NAMES)
def test_the_same_refusal_on_all_four_ways(fake: FakeClient, hint: str) -> None:
    accepted = refusal(lambda: parse_hints({hint: "\x1b"}, NOW))[1]
    for number, value in enumerate(NOT_A_HINT, HINT_NAMES.index(hint)):
        if value in NAMES_TOO and hint in NAMES:
            continue
        assert refusal(lambda value=value: parse_hints({hint: value}, NOW)) == (hint, accepted)  # type: ignore[misc]
        assert refusal(lambda value=value: from_metadata({f"cotenant.{hint}": value}, NOW)) == (hint, accepted)  # type: ignore[misc]
        if number % 4:  # the two long ways share the reading above: every hint, and every value, but not each with each
            continue
        result = RUNNER.invoke(COMMAND, ["submit", f"--{hint.replace('_', '-')}", value, "--", "true"])
        assert result.exit_code == 1
        assert result.stderr.startswith(f"error: {hint}: ")
        assert " ".join(accepted.split()) in result.stderr
        assert "\x1b" not in result.stderr
        response = submit_json(fake, {"command": ["true"], "hints": {hint: value}})
        body = response.json()
        assert (response.status_code, body["field"], body["accepted"]) == (422, hint, accepted)
    assert fake.submitted == []


@pytest.mark.parametrize("hint", HINT_NAMES)
def test_values_that_are_no_texts_are_refused_by_name(fake: FakeClient, hint: str) -> None:
    accepted = refusal(lambda: parse_hints({hint: "\x1b"}, NOW))[1]
    for value in NOT_TEXT:
        if hint == "operator_mix" and isinstance(value, bool):
            continue
        assert refusal(lambda value=value: parse_hints({hint: value}, NOW)) == (hint, accepted)  # type: ignore[misc]
        response = submit_json(fake, {"command": ["true"], "hints": {hint: value}})
        assert (response.status_code, response.json()["field"]) == (422, hint), value
    assert fake.submitted == []


@pytest.mark.parametrize("name", [1, None, True, ("a",), b"gpus", "", "gpu_mem", "GPUS", "\udcff", "x" * 10_000])
def test_names_that_are_no_hints(name: Any) -> None:
    refusal(lambda: parse_hints({name: 1}, NOW))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("gpus", value) for value in (0, -1, 1.0, 1.5, "2", True, None, 10**9, [])),
        *(("compute", value) for value in (0, -0.1, 1.1, math.nan, math.inf, "0.5", True)),
        *(("gpu_memory", value) for value in (0, -1, 1.5, math.nan, "2GiB", HUGE)),
        *(("max_slowdown", value) for value in (0.0, -1.0, math.nan)),
        *(("deadline", value) for value in (math.nan, -math.inf, "2h", -1.0)),
        *(("criticality", value) for value in (math.nan, 2.0, -0.1)),
        *(("expected_duration", value) for value in (math.nan, 0.0)),
        *(("parameters", value) for value in (0, 2.0, "1B", True, 10**16)),
        *(("operator_mix", value) for value in (1, 0, "true", [])),
        *(("model", value) for value in ("", "a b", 1)),
        *(("priority", value) for value in ("x", None, 1, " low", "LOW")),
        *(("isolation", 3), ("gang", []), ("restart", None), ("queue", "\udcff"), ("tenant", ""), ("batch_size", 0)),
    ],
)
def test_hints_made_by_hand_are_checked_before_they_are_sent(
    client: Client, link: NoCluster, field: str, value: Any
) -> None:
    name = {"deadline": "deadline_s", "expected_duration": "expected_duration_s"}.get(field, field)
    hints = replace(Hints(), **{name: value})
    with pytest.raises(HintError) as caught:
        client.submit(["true"], hints)
    assert caught.value.field == field
    assert link.sent == []


def test_hints_that_were_parsed_pass(client: Client) -> None:
    every = {"gpus": 2, "gpu_memory": "2GiB", "compute": 1, "deadline": 90, "max_slowdown": "20%", "batch_size": 8}
    every |= {"model": "resnet50", "model_family": "cnn", "parameters": "25.6M", "operator_mix": "off"}
    for hints in (Hints(), parse_hints(every, NOW), Hints(compute=1, deadline_s=5)):
        check_hints(hints)
    with pytest.raises(HintError, match="hints: "):
        client.submit(["true"], cast(Hints, {"gpus": 1}))


# -- everything else about a job --------------------------------------------------------------------------------------

SPECS: list[tuple[str, dict[str, Any]]] = [
    ("command", {"command": ()}),
    ("command", {"command": ("",)}),
    ("command", {"command": (" ",)}),
    ("command", {"command": "true"}),
    ("command", {"command": (1,)}),
    ("command[1]", {"command": ("true", 1)}),
    ("command[1]", {"command": ("true", "a\0b")}),
    ("command[1]", {"command": ("true", "\udcff")}),
    ("command[1]", {"command": ("true", "x" * 200_000)}),
    ("command[1]", {"command": ("true", "é" * (MAX_WORD_BYTES // 2 + 1))}),
    ("cwd", {"cwd": "relative"}),
    ("cwd", {"cwd": ""}),
    ("cwd", {"cwd": "~"}),
    ("cwd", {"cwd": "/a\0"}),
    ("cwd", {"cwd": "/\udcff"}),
    ("cwd", {"cwd": "/" + "x" * 5000}),
    ("env", {"env": {"": "1"}}),
    ("env", {"env": {"A=B": "1"}}),
    ("env", {"env": {"A\0": "1"}}),
    ("env", {"env": {"\udcff": "1"}}),
    ("env.A", {"env": {"A": 1}}),
    ("env.A", {"env": {"A": "\udcff"}}),
    ("env.A", {"env": {"A": "x" * MAX_WORD_BYTES}}),
    ("name", {"name": ""}),
    ("name", {"name": "x" * 1000}),
    ("name", {"name": "a\nb"}),
    ("name", {"name": "\x1b[31m"}),
    ("name", {"name": "\x9b31m"}),
    ("name", {"name": "\u202egnp.exe"}),
    ("name", {"name": "\udcff"}),
    ("name", {"name": 1}),
    *(("job_id", {"job_id": value}) for value in ("", "a/b", "..", ".a", "a\n", "x" * 300, "é", 5, None, "a b", "\0")),
]


@pytest.mark.parametrize(("field", "wrong"), SPECS)
def test_what_no_host_could_run_or_no_journal_keep_is_refused_by_name(field: str, wrong: dict[str, Any]) -> None:
    good = replace(spec("a"), name="é ✓", command=("true", "x" * MAX_WORD_BYTES), env={"A": "", "BASH_FUNC_f%%": "()"})
    check_spec(good)
    with pytest.raises(NotAccepted) as caught:
        check_spec(replace(good, **wrong))
    assert caught.value.field == field
    assert len(str(caught.value)) < 1000


def test_a_client_sends_nothing_that_is_refused(client: Client, link: NoCluster) -> None:
    for how in ({"cwd": "relative"}, {"env": {"A": "\udcff"}}, {"name": "\x1b"}, {"job_id": "a/b"}):
        with pytest.raises(NotAccepted):
            client.submit(["true"], Hints(), **cast(Any, how))
    for stop in ("\udcff", "a\0", "x" * 2000):
        with pytest.raises(NotAccepted, match="reason"):
            client.stop("a", stop)
    for offset, limit in ((-1, 1), (0, 0), (0, -1), (2**60, 1), (True, 1), (0.5, 1)):
        with pytest.raises(NotAccepted, match=r"offset|limit"):
            client.logs("a", cast(int, offset), limit)
    assert link.sent == []


def test_a_name_made_from_a_file_name_is_made_acceptable(client: Client) -> None:
    for script in ("a\x1b[31m.py", "x" * 250 + ".py", "/tmp/\n.py"):
        check_spec(client.spec(["python", script], Hints()))
        assert _preflight.default_name(["python", script]).isprintable()


def test_the_same_id_with_another_command_is_a_mistake(client: Client, link: NoCluster) -> None:
    first = client.submit(["python", "a.py"], Hints(), job_id="mine")
    assert client.submit(["python", "a.py"], Hints(), job_id="mine") == first
    with pytest.raises(HintError, match=r"with this id and other hints is known \(gpus: 1 there, 2 here\)"):
        client.submit(["python", "a.py"], Hints(gpus=2), job_id="mine")
    with pytest.raises(HintError, match="job_id: 'mine' is not accepted; give another one") as caught:
        client.submit(["python", "b.py"], Hints(), job_id="mine")
    assert caught.value.field == "job_id"


# -- command line -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cwd", "~nobody-of-that-name", "--", "true"], "is not a directory"),
        (["--cwd", "x" * 300, "--", "true"], "is not a directory"),
        (["--cwd", "a\0b", "--", "true"], "is not a directory"),
        (["--cwd", "", "--", "nothing-here/true"], "does not exist"),
        (["--", "python", "x" * 300 + ".py"], "does not exist"),
        (["--", "./" + "x" * 300], "does not exist"),
        (["--", "./a\0b"], "command[0]"),
        (["--", "true", "\udcff"], "command[1]"),
        (["--", "true", "x" * 200_000], "command[1]"),
        (["--env", "A\0=1", "--", "true"], "env: "),
        (["--env", "A=\udcff", "--", "true"], "env.A: "),
        (["--env", "\x1b[31m", "--", "true"], "env: "),
        (["--name", "a\x1b[31mb", "--", "true"], "name: "),
        (["--name", "x" * 1000, "--", "true"], "name: "),
        (["--name", "", "--", "true"], "name: "),
        (["--no-such-\x1b[31m", "--", "true"], "No such option"),
    ],
)
@pytest.mark.parametrize("command", ["submit", "run"])
def test_odd_command_lines_are_one_short_line(fake: FakeClient, command: str, args: list[str], message: str) -> None:
    result = RUNNER.invoke(COMMAND, [command, *args], catch_exceptions=False)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "\x1b" not in result.stderr
    assert len(result.stderr) < 1000
    assert fake.submitted == []


@pytest.mark.parametrize("value", [5, [], {"a": 1}, "a/b", ""])
def test_a_ray_job_without_a_usable_id(fake: FakeClient, monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    config = {"metadata": {_preflight.SUBMISSION_ID: value}}
    monkeypatch.setenv(_preflight.RAY_JOB_CONFIG, json.dumps(config))
    result = RUNNER.invoke(COMMAND, ["run", "--", "true"], catch_exceptions=False)
    assert (result.exit_code, fake.submitted) == (1, [])
    assert result.stderr.startswith("error: job_id: ")


PLANS = [
    ("jobs: [{hints: {deadline: 2030-13-45}}]", "month must be in 1..12"),
    (f"jobs: [{{hints: {{gpus: {'9' * 5000}}}}}]", "digits"),
    (f"jobs: [{{hints: {{gpus: 0x{'F' * 5000}}}}}]", "too long"),
    ("[" * 600, "nests too deeply"),
    ("jobs: [{hints: {1: 2}}]", "hints: 1"),
    ("jobs: [{hints: {true: 1}}]", "hints: True"),
    ("jobs: [{hints: &h {gpus: *h}}]", "gpus: "),
    ("jobs: &a [*a]", "jobs[0]"),
    ("jobs: [{name: [1]}]", "name: [1]"),
    ('jobs: [{name: "a\\e[31m"}]', "name: "),
    ("jobs: [{command: {a: b}}]", "command: {'a': 'b'}"),
    ("jobs: [{command: [{a: b}, null]}]", "command: "),
    ("jobs: [{command: [true]}]", "command: "),
    ('jobs: [{command: "a \'"}]', "No closing quotation"),
    ('jobs: [{command: ["a", "\\0"]}]', "command[1]"),
    ("jobs: [{count: 1000}, {count: 1}]", "1001 jobs"),
    ("jobs: [{count: true}]", "count: True"),
    ("jobs: [{count: 1, count: 2}]", "given twice"),
    ("\0", "no readable YAML"),
    ("jobs: [{hints: {queue: !!binary aGk=}}]", "queue: b'hi'"),
    ("jobs: [{hints: {gpus: !!python/object:os.system 1}}]", "no readable YAML"),
]


@pytest.mark.parametrize(("text", "message"), PLANS)
def test_plan_files_with_junk(fake: FakeClient, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    result = RUNNER.invoke(COMMAND, ["plan", "--file", str(path)], catch_exceptions=False)
    assert (result.exit_code, fake.planned) == (1, ())
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


STEERING = "\x1b]0;gone\x07\x9b31m\u202e\r\n\udcff" + "n" * 1000


def test_nothing_stored_steers_a_terminal(fake: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    """Jobs of an older version, or of a host that lies, may hold anything."""
    fake.known["job-1"] = job_view(name=STEERING, reason=STEERING)
    job = fake.known["job-1"]
    gpu = fake.gpus()[0].model_copy(update={"gpu_id": STEERING, "gpu_type": STEERING, "host_id": STEERING})
    host = fake.hosts()[0].model_copy(update={"name": STEERING, "note": STEERING, "claim": STEERING})
    explanation = Explanation(
        job_id=STEERING, state=JobState.QUEUED, summary=STEERING, details=[STEERING], would_help=[STEERING]
    )
    for shown_to_people in (
        _render.jobs([job]),
        _render.gpus([gpu]),
        _render.hosts([host]),
        _render.top([job], [gpu]),
        _render.explanation(explanation),
    ):
        _render.out().print(shown_to_people)
    _render.print_json(job)
    _render.problem(STEERING)
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    assert [char for char in printed if not char.isprintable() and char != "\n"] == []
    assert "gone" in printed


# -- REST -------------------------------------------------------------------------------------------------------------

LONE = "\\ud800"


@pytest.mark.parametrize(
    "text",
    [
        f'{{"command": ["{LONE}"]}}',
        f'{{"command": ["a"], "hints": {{"queue": "{LONE}"}}}}',
        f'{{"command": ["a"], "hints": {{"{LONE}": 1}}}}',
        f'{{"command": ["a"], "env": {{"{LONE}": "1"}}}}',
        f'{{"command": ["a"], "env": {{"A": "{LONE}"}}}}',
        f'{{"command": ["a"], "name": "{LONE}"}}',
        f'{{"command": ["a"], "cwd": "/{LONE}"}}',
        f'{{"command": ["a"], "{LONE}": 1}}',
        '{"command": ["a"], "name": "\\u009b31m"}',
        '{"command": ["a"], "name": "\\u202e"}',
        '{"command": ["a"], "hints": {"gpus": %s}}' % ("[" * 300 + "]" * 300),
        '{"command": ["a"], "hints": {"gpus": %s}}' % ("[" * 100_000 + "]" * 100_000),
        '{"command": ["a"], "hints": {"gpus": %s}}' % ("9" * 4000),
        '{"command": ["a"], "hints": {"gpus": %s}}' % ("9" * 5000),
        '{"command": ["a"], "hints": {"gpus": "%s"}}' % ("9" * 500_000),
        '{"command": ["%s"]}' % ("é" * 100_000),
        '{"jobs": [{"count": 1000}, {"count": 1000}]}',
        '{"jobs": [{"name": "\\u202e"}]}',
        '{"placement": {"max_jobs_per_gpu": true}, "resize": {}}',
        '{"placement": {"packing_bias": "0.5"}, "resize": {}}',
        '{"placement": {}, "resize": {"enabled": "yes"}}',
        '{"placement": {"profile_s": 1e999}, "resize": {"min_compute": NaN}}',
        "[]",
        "null",
        "",
        "{",
        "\x00",
    ],
)
def test_bodies_with_junk_are_problems_and_never_bugs(fake: FakeClient, text: str) -> None:
    before = fake.current
    for method, path in (
        ("POST", "/api/v1/jobs"),
        ("POST", "/api/v1/plan"),
        ("PUT", "/api/v1/tuning"),
        ("PATCH", "/api/v1/tuning"),
    ):
        response = request(fake, method, path, content=text, headers=JSON)
        assert response.status_code in {400, 422}, response.text
        assert response.headers["content-type"] == "application/problem+json"
        assert len(response.content) < 20_000
        assert response.json()["detail"]
    assert (fake.submitted, fake.planned, fake.current) == ([], (), before)


def test_the_host_header_leads_nowhere(fake: FakeClient) -> None:
    for host in ("[", "evil.example", "a b", ""):
        for path, status in (("/api/v1/jobs/", 404), ("/api/v1/jobs/none", 404), ("/api/v1/jobs", 200)):
            response = request(fake, "GET", path, headers={"Host": host})
            assert (response.status_code, "location" in response.headers) == (status, False)


def test_the_scheme_of_the_token_has_no_case(fake: FakeClient) -> None:
    app = create_app(cast(Callable[[], Client], lambda: fake), "s3cret")

    async def send(header: str) -> int:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as session:
            return (await session.get("/api/v1/gpus", headers={"Authorization": header})).status_code

    statuses = {
        header: asyncio.run(send(header))
        for header in (
            "Bearer s3cret",
            "bearer s3cret",
            "BEARER  s3cret",
            "Bearer S3CRET",
            "Bearer s3cret x",
            "Bearer ",
        )
    }
    assert list(statuses.values()) == [200, 200, 200, 401, 401, 401]
    with pytest.raises(ValueError, match="token: it is empty"):
        asyncio.run(httpx.AsyncClient(transport=httpx.ASGITransport(create_app(lambda: fake, " "))).get("http://a/"))  # type: ignore[arg-type,return-value]


# -- fuzz -------------------------------------------------------------------------------------------------------------

BOUNDED = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
OPTIONS = [f"--{name.replace('_', '-')}" for name in HINT_NAMES] + ["--env", "--cwd", "--name", "--job-id", "--", "-"]
WORDS = st.one_of(st.sampled_from(OPTIONS), st.text(max_size=12), st.sampled_from(["true", "1", "1GiB", "A=1", "/"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "command": VALUES | st.lists(st.text(max_size=4), min_size=1, max_size=3),
        "hints": VALUES | st.dictionaries(st.sampled_from(HINT_NAMES), VALUES, max_size=3),
        "name": VALUES,
        "cwd": VALUES,
        "env": VALUES | st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2),
        "other": VALUES,
    },
)


@BOUNDED
@given(words=st.lists(WORDS, max_size=6))
def test_no_command_line_is_a_bug(fake: FakeClient, words: Sequence[str]) -> None:
    result = RUNNER.invoke(COMMAND, ["submit", *words], catch_exceptions=False)
    assert result.exit_code in {0, 1}
    assert "\x1b" not in result.stderr


@BOUNDED
@given(body=FIELDS)
def test_no_body_is_a_bug(fake: FakeClient, body: dict[str, Any]) -> None:
    response = submit_json(fake, body)
    assert response.status_code in {201, 422}, response.text
    if response.status_code == 201:
        sent = fake.submitted[-1]
        how = {"command": tuple(sent["command"]), "hints": sent["hints"], "env": body.get("env", {})}
        check_spec(replace(spec("a"), **how))


def test_values_are_shown_short() -> None:
    for value in (HUGE, "x" * 10**6, DEEP * 1000, {str(n): n for n in range(1000)}, b"x" * 10**6, 4 * GIB, "é"):
        assert len(shown(value)) < 600
    assert shown("2Gib/s") == "'2Gib/s'"
