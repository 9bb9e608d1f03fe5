"""The virtual GPU interface over REST, with a client that has no cluster."""

from __future__ import annotations

import pytest
from asking import TOKEN, Http, problem
from fake_client import GIB, FakeClient, job_view

from cotenant.scheduler.errors import NotPermitted, TooManyRequests

JOB = "/api/v1/jobs/job-1"


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(job_view())


@pytest.fixture
def http(client: FakeClient) -> Http:
    return Http(client, TOKEN)


@pytest.mark.parametrize(
    ("path", "body", "action", "amount"),
    [
        ("request_resource_allocation", {"resource_type": "memory", "amount": "2GiB"}, "request", 2 * GIB),
        ("request_resource_allocation", {"resource_type": "memory", "amount": 2 * GIB}, "request", 2 * GIB),
        ("release_resources", {"resource_type": "compute", "amount": 0.25}, "release", 0.25),
        ("set_resource_limits", {"resource_type": "compute", "limit": "40%"}, "limit", 0.4),
        ("set_resource_limits", {"resource_type": "memory", "limit": None}, "limit", None),
    ],
)
def test_amounts_go_to_the_client_as_they_were_meant(http, path, body, action, amount):
    reply = http.post(f"{JOB}/{path}", json=body, headers={"Idempotency-Key": "once"})
    assert reply.status_code == 200
    answer = reply.json()
    assert (answer["action"], answer["requested"], answer["status"]) == (action, amount, "granted")
    assert answer["reason"] == "once"


def test_what_could_be_had(http):
    reply = http.get(f"{JOB}/get_available_resources")
    assert reply.status_code == 200
    assert reply.json()["memory"]["available"] == 2.0


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("request_resource_allocation", {"resource_type": "bandwidth", "amount": 1}, "resource_type"),
        ("request_resource_allocation", {"resource_type": "memory"}, "amount"),
        ("request_resource_allocation", {"resource_type": "memory", "amount": None}, "amount"),
        ("request_resource_allocation", {"resource_type": "memory", "amount": True}, "amount"),
        ("request_resource_allocation", {"resource_type": "memory", "amount": 1, "job_id": "job-9"}, "job_id"),
        ("set_resource_limits", {"resource_type": "memory"}, "limit"),
    ],
)
def test_bodies_of_the_wrong_shape(http, path, body, field):
    told = problem(http.post(f"{JOB}/{path}", json=body), 422, "not-accepted")
    assert any(field in error["field"] for error in told["errors"])


def test_values_that_are_not_accepted(http):
    told = problem(
        http.post(f"{JOB}/request_resource_allocation", json={"resource_type": "memory", "amount": "lots"}),
        422,
        "not-accepted",
    )
    assert (told["field"], told["value"]) == ("amount", "lots")


def test_who_asks_too_often_is_told_when_to_come_again(http, client):
    client.error = TooManyRequests("job-1 asks too often: at most 2 requests a second", 1.2)
    reply = http.get(f"{JOB}/get_available_resources")
    told = problem(reply, 429, "too-many-requests")
    assert reply.headers["retry-after"] == "2"
    assert told["detail"] == "job-1 asks too often: at most 2 requests a second; again in 1.2 s"


def test_unknown_and_ended_jobs(http, client):
    problem(http.get("/api/v1/jobs/nobody/get_available_resources"), 404, "job-not-found")
    client.error = NotPermitted("job job-1 holds no lease any more: it is FAILED")
    body = {"resource_type": "memory", "amount": 1}
    problem(http.post(f"{JOB}/release_resources", json=body), 403, "not-permitted")
