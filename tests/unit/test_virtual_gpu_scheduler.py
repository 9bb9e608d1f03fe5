"""The virtual GPU interface through the real client, the real API and the real scheduler, without Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from fake_hosts import FakeHost
from local_client import LocalCotenant

from cotenant.actors import scheduler_actor
from cotenant.scheduler.core.model import Hints, Wish
from cotenant.scheduler.errors import JobNotFound, NotAccepted, NotPermitted, TooManyRequests
from cotenant.scheduler.journal.store import JournalTaken

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture
def local(tmp_path, monkeypatch) -> Iterator[LocalCotenant]:
    """A cotenant whose job ``a`` has 2 of a GPU's 8 GiB."""
    monkeypatch.setattr(scheduler_actor, "REQUEST_RATE", 0.5)
    local = LocalCotenant(tmp_path, FakeHost())
    local.client.submit(["true"], Hints(gpu_memory=2 * GIB, compute=0.4), job_id="a", cwd="/", env={})
    local.report()
    yield local
    with contextlib.suppress(JournalTaken):  # another one goes on
        local.close()


def test_a_request_is_answered_at_once_and_sent_to_the_host(local):
    revision = local.hosts[0].held["a", 1].revision
    answer = local.client.request_resource_allocation("a", "memory", "1GiB")
    assert (answer.status, answer.granted, answer.share) == ("granted", GIB, 3 * GIB)
    assert local.client.job("a").shares[0].memory_bytes == 3 * GIB
    assert local.hosts[0].held["a", 1].revision == revision + 1
    assert local.client.get_available_resources("a").memory.available == 5 * GIB
    assert local.client.release_resources("a", "memory", GIB).share == 2 * GIB
    assert local.client.set_resource_limits("a", "memory", GIB * 4).reason == "the limit is set"
    assert local.client.set_resource_limits("a", "memory", None).reason == "there is no limit of its own any more"


def test_the_same_key_twice_is_one_request(local):
    path, body = "/jobs/a/request_resource_allocation", {"resource_type": "memory", "amount": MIB}
    assert local.http("POST", path, body).json()["granted"] == MIB
    answers = [local.client.request_resource_allocation("a", "memory", MIB, "key") for _ in range(2)]
    assert answers[0] == answers[1]
    assert local.client.job("a").shares[0].memory_bytes == 2 * GIB + 2 * MIB


def test_errors_are_those_of_the_caller(local):
    with pytest.raises(JobNotFound):
        local.client.get_available_resources("nobody")
    with pytest.raises(NotAccepted, match="amount: 'lots' is not accepted"):
        local.client.request_resource_allocation("a", "memory", "lots")
    stale = local.scheduler.allocate("a", Wish("request", "memory", 1, "stale", epoch=0))
    assert (stale.status, stale.reason) == ("refused", "the lease of epoch 0 is not held any more")
    local.client.stop("a")
    local.report()
    with pytest.raises(NotPermitted, match="CANCELLED"):
        local.client.request_resource_allocation("a", "memory", 1)


def test_one_job_cannot_keep_the_scheduler_busy(local):
    local.client.submit(["true"], Hints(gpu_memory=GIB, compute=0.1), job_id="b", cwd="/", env={})
    with pytest.raises(TooManyRequests, match=r"a asks too often: at most 0\.5 requests a second") as caught:
        for _ in range(scheduler_actor.REQUEST_BURST + 1):
            local.client.get_available_resources("a")
    assert 0.0 < caught.value.retry_after_s <= 2.0
    reply = local.http("GET", "/jobs/a/get_available_resources")
    assert reply.status_code == 429
    assert reply.headers["retry-after"] in ("1", "2")
    assert local.client.get_available_resources("b").memory is not None, "others are not concerned"


def test_what_was_granted_is_in_the_journal(local, tmp_path):
    local.client.request_resource_allocation("a", "memory", GIB)
    local.close()
    again = LocalCotenant(tmp_path, *local.hosts)
    assert again.client.job("a").shares[0].memory_bytes == 3 * GIB
    assert again.client.get_available_resources("a").memory.guaranteed == 3 * GIB
    again.close()
