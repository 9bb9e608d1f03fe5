"""The virtual GPU interface, end to end: a job asks for more of its own lease, and for another's in vain."""

from __future__ import annotations

import json

import pytest
from support import wait_until

from cotenant.scheduler.core.model import Hints
from cotenant.scheduler.errors import NotPermitted, TooManyRequests

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

MIB = 1 << 20
JOB = """
import json, os, time
import cotenant
from cotenant.actors.shim.resources import RateLimited, ResourceError

say = lambda *words: print(json.dumps(words), flush=True)
say("has", cotenant.get_available_resources()["memory"]["share"])
say("asked", *cotenant.request_resource_allocation("memory", "100MiB"))
say("gave", *cotenant.release_resources("memory", "50MiB"))
say("limited", *cotenant.set_resource_limits("compute", 0.5))
say("power", *cotenant.request_resource_allocation("power", 50))
own, os.environ["COTENANT_JOB_ID"] = os.environ["COTENANT_JOB_ID"], "other"
try:
    cotenant.request_resource_allocation("memory", 1)
except ResourceError as error:
    say("other", str(error))
os.environ["COTENANT_JOB_ID"] = own
try:
    cotenant.set_resource_limits("compute", 7)
except ResourceError as error:
    say("wrong", str(error))
try:
    for _ in range(20):
        cotenant.get_available_resources()
except RateLimited as error:
    say("limit", error.retry_after_s)
time.sleep(600)
"""


def test_a_job_manages_its_own_lease_and_no_other(single):
    hints = Hints(gpu_memory=200 * MIB, compute=0.3)
    other = single.reach(single.run("import time; time.sleep(600)", hints=hints, job_id="other"), "RUNNING")
    view = single.run(JOB, hints=hints)
    said: dict[str, list] = {}

    def look() -> bool:
        text = single.client.logs(view.job_id).data.decode()
        assert "Traceback" not in text, text
        for line in text.splitlines():
            what, *words = json.loads(line)
            said[what] = words
        return "limit" in said

    wait_until(look, 60, "the job has asked for everything")
    assert said["has"] == [200 * MIB]
    assert said["asked"] == ["granted", "memory", 100 * MIB, 100 * MIB, 300 * MIB, "there is room for it"]
    status, _, _, granted, share, _ = said["gave"]
    assert status in ("granted", "partly")
    assert share == 300 * MIB - granted
    assert said["limited"][:4] == ["granted", "compute", 0.5, 0.5]
    assert said["power"][0] == "refused"
    assert "not the token of a lease" in said["other"][0]
    assert "limit: 7 is not accepted; give a fraction" in said["wrong"][0]
    assert 0.0 < said["limit"][0] <= 0.5

    now = single.client.job(view.job_id)
    assert now.state == "RUNNING", now
    (granted_share,) = now.shares
    assert granted_share.compute <= 0.5
    assert single.client.job(other.job_id).shares[0].memory_bytes <= 200 * MIB, "nobody asked for more of it"

    asked = [single.client.request_resource_allocation(other.job_id, "memory", "10MiB", "once") for _ in range(2)]
    assert asked[0].status == "granted"
    assert asked[1].granted == asked[0].granted, "the same request twice is one"
    assert single.client.job(other.job_id).shares[0].memory_bytes <= 210 * MIB
    with pytest.raises(TooManyRequests):
        for _ in range(30):
            single.client.get_available_resources(other.job_id)
    for job in (view, other):
        single.client.stop(job.job_id)
        single.finish(job)
    wait_until(lambda: single.client.job(view.job_id).state.terminal, 20, "it has ended")
    with pytest.raises(NotPermitted, match="holds no lease any more"):
        single.client.release_resources(view.job_id, "memory", 1)
