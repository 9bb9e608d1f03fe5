"""The admin API with a client that has no cluster: routes, token, problems, and the published document."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from asking import TOKEN, Http, problem
from fake_client import GIB, FakeClient, job_view

from cotenant.dashboards import guard, openapi
from cotenant.scheduler.core.model import Hints, JobState
from cotenant.scheduler.errors import (
    CotenantError,
    GoingDown,
    NotConnected,
    NotPermitted,
    NotPlaceable,
    OutputNotKept,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "openapi.json"
JOB = {"command": ["python", "train.py"]}


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(job_view(), job_view("job-9", JobState.SUCCEEDED))


@pytest.fixture
def http(client: FakeClient) -> Http:
    return Http(client, TOKEN)


# -- token ------------------------------------------------------------------------------------------------------------


ROUTES = [
    ("GET", "/api/v1/jobs"),
    ("POST", "/api/v1/jobs"),
    ("GET", "/api/v1/jobs/job-1"),
    ("DELETE", "/api/v1/jobs/job-1"),
    ("POST", "/api/v1/jobs/job-1/suspend"),
    ("POST", "/api/v1/jobs/job-1/resume"),
    ("POST", "/api/v1/jobs/job-1/move"),
    ("GET", "/api/v1/jobs/job-1/explanation"),
    ("GET", "/api/v1/jobs/job-1/logs"),
    ("GET", "/api/v1/jobs/job-1/forecast"),
    ("GET", "/api/v1/jobs/job-1/forecast-scores"),
    ("POST", "/api/v1/jobs/job-1/request_resource_allocation"),
    ("POST", "/api/v1/jobs/job-1/release_resources"),
    ("POST", "/api/v1/jobs/job-1/set_resource_limits"),
    ("GET", "/api/v1/jobs/job-1/get_available_resources"),
    ("GET", "/api/v1/predictions"),
    ("GET", "/api/v1/accounts"),
    ("PATCH", "/api/v1/tuning"),
    ("GET", "/api/v1/gpus"),
    ("GET", "/api/v1/hosts"),
    ("POST", "/api/v1/plan"),
    ("GET", "/api/v1/tuning"),
    ("PUT", "/api/v1/tuning"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", "Basic s3cret", "bearer wrong", "Bearers3cret", "Bearer s3crét", TOKEN]
)
def test_nothing_without_the_token(http: Http, client: FakeClient, method: str, path: str, header: str) -> None:
    response = http.request(method, path, headers={"Authorization": header.encode("latin-1")}, content=b"{not json")
    problem(response, 401, "unauthorised")
    assert response.headers["www-authenticate"] == "Bearer"
    assert not client.submitted
    assert not client.stopped


def test_all_routes_of_the_document_are_guarded(http: Http) -> None:
    paths = http.get("/api/v1/openapi.json", headers={"Authorization": ""}).json()["paths"]
    documented = {(method.upper(), path.replace("{job_id}", "job-1")) for path in paths for method in paths[path]}
    assert documented == {*ROUTES, ("GET", "/api/v1/health")} - {("GET", "/nowhere")}


def test_without_a_token_nobody_is_asked(client: FakeClient) -> None:
    assert Http(client, None).get("/api/v1/jobs", headers={"Authorization": ""}).status_code == 200


def test_health_needs_no_token_but_says_little_without(http: Http, client: FakeClient) -> None:
    stranger = {"Authorization": ""}
    assert http.get("/api/v1/health", headers=stranger).json() == {"ok": True, "details": None}
    assert http.get("/api/v1/health").json()["details"]["components"][0]["name"] == "prm"
    client.well = False
    response = http.get("/api/v1/health", headers=stranger)
    assert (response.status_code, response.json()["ok"]) == (503, False)
    client.error = NotConnected("gone: secret address")
    response = http.get("/api/v1/health", headers=stranger)
    assert (response.status_code, response.json()) == (503, {"ok": False, "details": None})


# -- jobs -------------------------------------------------------------------------------------------------------------


def test_jobs_in_pages(http: Http, client: FakeClient) -> None:
    client.known = {name: job_view(name) for name in "abcde"}
    got, offset = [], 0
    while offset is not None:
        page = http.get("/api/v1/jobs", params={"limit": 2, "offset": offset}).json()
        got += [job["job_id"] for job in page["items"]]
        offset = page["next_offset"]
    assert got == list("abcde")
    assert http.get("/api/v1/jobs", params={"limit": 5}).json()["next_offset"] is None


def test_active_jobs_only(http: Http) -> None:
    assert [job["job_id"] for job in http.get("/api/v1/jobs?active_only=true").json()["items"]] == ["job-1"]
    assert len(http.get("/api/v1/jobs").json()["items"]) == 2


def test_submit(http: Http, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "1")
    body = JOB | {
        "hints": {"gpu_memory": "2GiB", "gpus": 2, "compute": 0.4},
        "name": "n",
        "cwd": "/tmp",
        "env": {"A": "1"},
    }
    response = http.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": "mine"})
    assert response.status_code == 201
    assert response.headers["location"] == "/api/v1/jobs/mine"
    assert response.json()["job_id"] == "mine"
    [got] = client.submitted
    assert got["command"] == JOB["command"]
    assert (got["job_id"], got["name"], got["cwd"]) == ("mine", "n", "/tmp")
    assert got["hints"] == Hints(gpu_memory=2 * GIB, gpus=2, compute=0.4)
    assert (got["env"]["A"], got["env"]["INHERITED"]) == ("1", "1")


def test_submit_with_only_a_command(http: Http, client: FakeClient) -> None:
    assert http.post("/api/v1/jobs", json=JOB).status_code == 201
    assert (client.submitted[0]["job_id"], client.submitted[0]["hints"], client.submitted[0]["cwd"]) == (
        None,
        Hints(),
        None,
    )


@pytest.mark.parametrize(
    ("hint", "value"),
    [("compute", 1.4), ("compute", True), ("gpus", 0), ("gpu_memory", "2 parsecs"), ("queue", [1]), ("gpus", {})],
)
def test_hints_that_are_not_accepted(http: Http, client: FakeClient, hint: str, value: object) -> None:
    body = problem(http.post("/api/v1/jobs", json=JOB | {"hints": {hint: value}}), 422, "hint-not-accepted")
    assert (body["field"], body["value"]) == (hint, value)
    assert body["accepted"] in body["detail"]
    assert not client.submitted


def test_nan_and_unknown_hints(http: Http) -> None:
    text = '{"command": ["a"], "hints": {"compute": NaN}}'
    json_type = {"Content-Type": "application/json"}
    body = problem(http.post("/api/v1/jobs", content=text, headers=json_type), 422, "hint-not-accepted")
    assert (body["field"], body["value"]) == ("compute", "nan")
    body = problem(http.post("/api/v1/jobs", json=JOB | {"hints": {"gpu_mem": 1}}), 422, "hint-not-accepted")
    assert "did you mean gpu_memory" in body["accepted"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "body.command"),
        ({"command": []}, "body.command"),
        ({"command": "python train.py"}, "body.command"),
        ({"command": ["a\0b"]}, "body.command.0"),
        ({"command": [3]}, "body.command.0"),
        (JOB | {"nam": "x"}, "body.nam"),
        (JOB | {"cwd": "relative"}, "body.cwd"),
        (JOB | {"env": {"A=B": "1"}}, "body.env.A=B.[key]"),
        (JOB | {"name": "a\nb"}, "body.name"),
        (JOB | {"hints": [1]}, "body.hints"),
        ([], "body"),
    ],
)
def test_bodies_of_the_wrong_shape(http: Http, client: FakeClient, body: object, field: str) -> None:
    got = problem(http.post("/api/v1/jobs", json=body), 422, "not-accepted")
    assert got["errors"][0]["field"] == field
    assert field in got["detail"]
    assert not client.submitted


def test_blank_program(http: Http) -> None:
    assert problem(http.post("/api/v1/jobs", json={"command": [" "]}), 422, "not-accepted")["field"] == "command"


@pytest.mark.parametrize("key", ["../x", "a b", "a" * 129, "-a", "a:b", ""])
def test_idempotency_key_must_be_an_id(http: Http, key: str) -> None:
    amount = {"resource_type": "memory", "amount": "1GiB"}
    asked = {
        "jobs": JOB,
        "jobs/job-1/request_resource_allocation": amount,
        "jobs/job-1/release_resources": amount,
        "jobs/job-1/set_resource_limits": {"resource_type": "memory", "limit": None},
    }
    for path, json in asked.items():
        reply = http.post(f"/api/v1/{path}", json=json, headers={"Idempotency-Key": key})
        body = problem(reply, 422, "hint-not-accepted")
        assert (body["field"], body["value"]) == ("Idempotency-Key", key)


def test_broken_json_and_huge_bodies(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    json_type = {"Content-Type": "application/json"}
    problem(http.post("/api/v1/jobs", content="{", headers=json_type), 422, "not-accepted")
    monkeypatch.setattr(guard, "MAX_BODY", 1000)
    problem(http.post("/api/v1/jobs", json={"command": ["a" * 2000]}), 413, "too-large")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 600

    problem(http.post("/api/v1/jobs", content=chunks(), headers=json_type), 413, "too-large")


def test_not_placeable(http: Http, client: FakeClient) -> None:
    client.final = job_view("job-new", JobState.FAILED, not_placeable=True, reason="more than any GPU has")
    assert "more than any GPU has" in problem(http.post("/api/v1/jobs", json=JOB), 409, "not-placeable")["detail"]


def test_predictions_and_the_forecast_scores_of_a_job(http: Http) -> None:
    assert http.get("/api/v1/predictions").json()["serving"]["interference"] == "shipped"
    assert http.get("/api/v1/jobs/job-1/forecast-scores").json()[0]["horizon_s"] == 5
    problem(http.get("/api/v1/jobs/nope/forecast-scores"), 404, "job-not-found")


def test_the_forecast_of_a_job(http: Http) -> None:
    forecast = http.get("/api/v1/jobs/job-1/forecast").json()
    assert [each["horizon_s"] for each in forecast["util"]] == [1, 2, 5, 60, 300, 900]
    assert forecast["memory"][3]["p99"] == 1.5 * GIB
    assert (forecast["peak_memory_bytes"], forecast["served_by"][:7]) == (1.6 * GIB, "mixture")
    ended = http.get("/api/v1/jobs/job-9/forecast")
    assert (ended.status_code, ended.json()) == (200, None)
    problem(http.get("/api/v1/jobs/nope/forecast"), 404, "job-not-found")


def test_one_job(http: Http, client: FakeClient) -> None:
    assert http.get("/api/v1/jobs/job-1").json() == client.known["job-1"].model_dump(mode="json")
    assert http.get("/api/v1/jobs/job-1/explanation").json()["summary"] == "waits for memory"


def test_stop(http: Http, client: FakeClient) -> None:
    response = http.delete("/api/v1/jobs/job-1")
    assert (response.status_code, response.json()["state"]) == (202, "STOPPING")
    assert client.stopped == [("job-1", "stopped through the API")]


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("DELETE", ""), ("GET", "/explanation"), ("GET", "/logs")])
def test_unknown_job(http: Http, method: str, path: str) -> None:
    problem(http.request(method, f"/api/v1/jobs/nope{path}"), 404, "job-not-found")


def test_logs_are_bytes_in_pieces(http: Http) -> None:
    got, offset, eof = b"", "0", "false"
    while eof == "false":
        response = http.get("/api/v1/jobs/job-9/logs", params={"offset": offset, "limit": 5})
        assert response.headers["content-type"] == "application/octet-stream"
        got += response.content
        offset, eof = response.headers["x-next-offset"], response.headers["x-eof"]
    assert got == b"step 1\n\xff\x00step 2\n"
    assert http.get("/api/v1/jobs/job-1/logs").headers["x-eof"] == "false"


def test_logs_are_of_one_run(http: Http, client: FakeClient) -> None:
    client.known["job-1"] = job_view(epoch=2)
    assert http.get("/api/v1/jobs/job-1/logs").headers["x-epoch"] == "2"
    earlier = http.get("/api/v1/jobs/job-1/logs", params={"epoch": 1})
    assert (earlier.content, earlier.headers["x-epoch"], earlier.headers["x-eof"]) == (b"run 1\n", "1", "true")


def test_logs_that_are_not_kept(http: Http, client: FakeClient) -> None:
    client.error = OutputNotKept("job-1", 1, 1, "host-0")
    problem(http.get("/api/v1/jobs/job-1/logs"), 404, "output-not-kept")


@pytest.mark.parametrize(
    "path",
    [
        "/jobs?limit=0",
        "/jobs?limit=501",
        "/jobs?offset=-1",
        "/jobs?limit=x",
        "/jobs/job-1/logs?offset=-1",
        "/jobs/job-1/logs?limit=0",
        "/jobs/job-1/logs?epoch=0",
        f"/jobs/{'x' * 201}",
    ],
)
def test_parameters_out_of_range(http: Http, path: str) -> None:
    problem(http.get(f"/api/v1{path}"), 422, "not-accepted")


# -- cluster ----------------------------------------------------------------------------------------------------------


def test_gpus_and_hosts(http: Http) -> None:
    assert [gpu["gpu_id"] for gpu in http.get("/api/v1/gpus").json()] == ["gpu-0", "gpu-1"]
    assert [host["host_id"] for host in http.get("/api/v1/hosts").json()] == ["host-0"]


def test_plan(http: Http, client: FakeClient) -> None:
    body = {
        "jobs": [{"name": "a", "count": 2, "hints": {"gpu_memory": "2GiB"}}, {"command": ["x"]}],
        "settings": {"placement": {"packing_bias": 0.7}},
    }
    response = http.post("/api/v1/plan", json=body)
    assert [job["name"] for job in response.json()["jobs"]] == ["a-1", "a-2", "job"]
    hints = Hints(gpu_memory=2 * GIB)
    assert client.planned == ([("a-1", hints, []), ("a-2", hints, []), ("job", Hints(), ["x"])], body["settings"])


@pytest.mark.parametrize(
    "body",
    [
        {"jobs": [{"count": 0}]},
        {"jobs": [{"count": True}]},
        {"jobs": [{"count": 600}, {"count": 600}]},
        {"jobs": [{}], "settings": {"placement": {"packing_bias": 2}}},
        {"settings": {"placement": {"pack": 0.2}}},
        {"settings": {"lease": {"ttl_s": 2}}},
        {"settings": {"placement": 3}},
        {"jobs": [{}], "packing": 1},
    ],
)
def test_bad_plans(http: Http, body: object) -> None:
    problem(http.post("/api/v1/plan", json=body), 422, "not-accepted")


def test_tuning(http: Http, client: FakeClient) -> None:
    body = http.get("/api/v1/tuning").json()
    body["placement"]["packing_bias"] = 0.9
    assert http.put("/api/v1/tuning", json=body).json() == body
    assert client.current.placement.packing_bias == 0.9
    body["placement"]["packing_bias"] = 1.9
    assert problem(http.put("/api/v1/tuning", json=body), 422, "not-accepted")["errors"][0]["value"] == 1.9
    problem(http.put("/api/v1/tuning", json={"placement": {}}), 422, "not-accepted")
    assert client.current.placement.packing_bias == 0.9


def test_changing_some_settings(http: Http, client: FakeClient) -> None:
    change = {"placement": {"confidence": 0.9}, "scheduling": {"tenants": {"ml": {"most_gpus": 2}}}}
    body = http.patch("/api/v1/tuning", json=change).json()
    assert (body["placement"]["confidence"], body["placement"]["packing_bias"]) == (0.9, 0.5)
    assert client.current.scheduling.tenants["ml"].most_gpus == 2
    assert http.patch("/api/v1/tuning", json={}).json() == http.get("/api/v1/tuning").json() == body
    found = problem(http.patch("/api/v1/tuning", json={"scheduling": {"size_weight": -1}}), 422, "not-accepted")
    assert (found["field"], found["value"], found["accepted"]) == (
        "scheduling.size_weight",
        -1,
        "a number >= 0 and <= 100",
    )
    assert http.get("/api/v1/tuning").json() == body


def test_accounts(http: Http) -> None:
    assert [(each["kind"], each["name"]) for each in http.get("/api/v1/accounts").json()] == [
        ("tenant", "ml"),
        ("queue", "default"),
    ]


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (NotConnected("no cluster"), 503, "not-connected"),
        (GoingDown(), 503, "going-down"),
        (NotPermitted("not yours"), 403, "not-permitted"),
        (NotPlaceable("too large"), 409, "not-placeable"),
        (CotenantError("broken"), 500, "failed"),
    ],
)
def test_errors_of_the_client(http: Http, client: FakeClient, error: CotenantError, status: int, kind: str) -> None:
    client.error = error
    assert problem(http.get("/api/v1/gpus"), status, kind)["detail"] == str(error)


def test_bugs_say_nothing_about_the_inside(http: Http, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "gpus", lambda: 1 / 0)
    assert "division" not in problem(http.get("/api/v1/gpus"), 500, "failed")["detail"]


def test_unknown_paths_and_methods(http: Http) -> None:
    problem(http.get("/api/v1/nowhere"), 404, "not-found")
    response = http.patch("/api/v1/jobs", json={})
    problem(response, 405, "method-not-allowed")
    assert response.headers["allow"] == "GET, POST"
    assert http.post("/api/v1/tuning", json={}).headers["allow"] == "GET, PATCH, PUT"
    assert http.put("/api/v1/jobs/j", json={}).headers["allow"] == "DELETE, GET"


def test_published_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == openapi.document(), "run: python -m cotenant.dashboards.openapi"


def test_suspend_resume_and_move(http: Http, client: FakeClient) -> None:
    for path, body, asked in (
        ("suspend", None, ("job-1", "suspend", "suspended through the API")),
        ("resume", None, ("job-1", "resume", "resumed through the API")),
        ("move", None, ("job-1", "move", "", "moved through the API")),
        ("move", {"to": "gpu-1"}, ("job-1", "move", "gpu-1", "moved through the API")),
    ):
        response = http.post(f"/api/v1/jobs/job-1/{path}", json=body)
        assert (response.status_code, response.json()["job_id"]) == (202, "job-1"), response.text
        assert client.steered[-1] == asked
    problem(http.post("/api/v1/jobs/nobody/suspend"), 404, "job-not-found")
    problem(http.post("/api/v1/jobs/job-1/move", json={"to": "nowhere"}), 422, "not-accepted")
    problem(http.post("/api/v1/jobs/job-1/move", json={"where": "gpu-1"}), 422, "not-accepted")


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "jobs"), ("POST", "plan"), ("PUT", "tuning"), ("PATCH", "tuning")]
)
def test_a_body_that_does_not_say_it_is_json_is_told_how_to(http: Http, method: str, path: str) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    body = problem(http.request(method, f"/api/v1/{path}", content=b"{}", headers=headers), 422, "not-accepted")
    assert "Content-Type: application/json" in body["detail"]
    assert [found["value"] for found in body["errors"]] == ["{}"], "text, not how Python writes bytes"


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("jobs", {"command": ["a"], "comand": ["a"]}, {"body.comand": "no field of that name; did you mean command?"}),
        ("jobs", {"command": ["a"], "zzz": 1}, {"body.zzz": "no field of that name"}),
        ("jobs", {"command": []}, {"body.command": "at least 1 of them"}),
        ("jobs", {"command": "a"}, {"body.command": "a list"}),
        ("jobs", {"command": [1]}, {"body.command.0": "text"}),
        ("jobs", [], {"body": "an object"}),
        ("jobs", {}, {"body.command": "a value, which is missing: Program and arguments."}),
        ("plan", {"jobs": [{"zzz": 1}]}, {"body.jobs.0.zzz": "no field of that name"}),
        ("jobs/job-1/move", {"tu": "gpu-1"}, {"body.tu": "no field of that name"}),
    ],
)
def test_fields_that_are_not_accepted(http: Http, path: str, body: object, told: dict[str, str]) -> None:
    found = problem(http.post(f"/api/v1/{path}", json=body), 422, "not-accepted")
    said = {error["field"]: error["accepted"] for error in found["errors"]}
    assert said | told == said


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("GET", "jobs?limt=1", {"query.limt": "no parameter of that name; did you mean limit?"}),
        ("GET", "jobs/job-1/logs?epcoh=2&x=1", {"query.x": "no parameter of that name"}),
        ("GET", "jobs/job-1?epoch=1", {"query.epoch": "no parameter of that name"}),
        ("POST", "jobs/job-1/suspend?grace=1", {"query.grace": "no parameter of that name"}),
        ("GET", "jobs?limit=1&limit=2", {"query.limit": "one value"}),
        ("GET", "jobs?limit=501", {"query.limit": "at most 500"}),
        ("GET", "jobs?limit=0", {"query.limit": "at least 1"}),
        ("GET", "jobs?limit=x", {"query.limit": "a whole number"}),
        ("GET", "jobs?active_only=maybe", {"query.active_only": "true or false"}),
    ],
)
def test_parameters_that_are_not_accepted(http: Http, method: str, path: str, told: dict[str, str]) -> None:
    """One that is misspelt would count for nothing."""
    found = problem(http.request(method, f"/api/v1/{path}"), 422, "not-accepted")
    said = {error["field"]: error["accepted"] for error in found["errors"]}
    assert said | told == said


def test_a_body_that_is_no_json_is_shown(http: Http) -> None:
    headers = {"Content-Type": "application/json"}
    (found,) = problem(http.post("/api/v1/jobs", content=b"{bad", headers=headers), 422, "not-accepted")["errors"]
    assert (found["field"], found["value"]) == ("body", "{bad")
    assert found["accepted"].startswith("JSON; this cannot be read: ")


def test_paths_and_methods_that_there_are_not(http: Http) -> None:
    assert "openapi.json" in problem(http.get("/api/v1/nowhere"), 404, "not-found")["detail"]
    told = problem(http.delete("/api/v1/jobs"), 405, "method-not-allowed")["detail"]
    assert told == "/api/v1/jobs does not take DELETE; it takes GET, POST"
