"""The virtual GPU interface in a job: it asks for more of its own lease, gives back, looks, and limits itself.

The host agent answers at a Unix socket; the job shows the token of its lease, which is in its environment. Standard
library only: a job's interpreter need not have cotenant installed.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from typing import Any, Dict, NamedTuple, Optional, Union  # noqa: UP035 - Python 3.9 reads this

AGENT = "COTENANT_AGENT"
TOKEN = "COTENANT_LEASE_TOKEN"
ANSWER_S = 15.0
PATIENCE_S = 10.0  # an agent that starts anew is back within this time
MOST_BYTES = 1 << 16
_RETRY_S = 0.1


class ResourceError(RuntimeError):
    """The request could not be made or is not accepted; says why.

    Nothing was changed, unless no answer came in time.
    """


class RateLimited(ResourceError):
    """Too many requests.

    Attributes:
        retry_after_s: Seconds after which the next one is answered.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Allocation(NamedTuple):
    """The answer to a request.

    Attributes:
        status: "granted", "partly" or "refused".
        resource_type: "memory", "compute" or "power".
        requested: What was asked for, per GPU: bytes, a fraction, watts.
        granted: How much of it was granted, or given back; the limit that was set.
        share: What the job has now, per GPU.
        reason: Why, for people.
    """

    status: str
    resource_type: str
    requested: Optional[float]  # noqa: UP045
    granted: float
    share: Optional[float]  # noqa: UP045
    reason: str


def request_resource_allocation(resource_type: str, amount: Union[float, str]) -> Allocation:  # noqa: UP007
    """Ask for more of each of the job's GPUs: memory to reserve, or compute to guarantee.

    The new share is in force with the next optimizer step.

    Args:
        resource_type: "memory" or "compute" ("power" is always refused: it belongs to whole GPUs).
        amount: How much more than the share now: bytes or a size such as "2GiB"; a fraction such as 0.2 or "20%".

    Raises:
        ResourceError: This process is under no lease, the agent does not answer, or a value is not accepted.
        RateLimited: Too many requests; says when the next one is answered.
    """
    return _allocate("request", resource_type, amount)


def release_resources(resource_type: str, amount: Union[float, str]) -> Allocation:  # noqa: UP007
    """Give back some of each of the job's GPUs: only what is free of memory, or some of its guaranteed compute.

    Args and errors are those of ``request_resource_allocation``.
    """
    return _allocate("release", resource_type, amount)


def set_resource_limits(resource_type: str, limit: Union[float, str, None]) -> Allocation:  # noqa: UP007
    """Never let the job have more of each of its GPUs than this, however idle they are; None takes the limit away.

    Args and errors are those of ``request_resource_allocation``.
    """
    return _allocate("limit", resource_type, limit)


def get_available_resources() -> Dict[str, Dict[str, Any]]:  # noqa: UP006
    """Return what the job has and could have of each of its GPUs.

    Returns:
        By resource type: ``share`` (what it has), ``available`` (how much more a request would get now),
        ``guaranteed``, ``used`` (as last measured), ``limit`` and ``note``. Bytes of memory, fractions of compute,
        None = nobody says.

    Raises:
        ResourceError, RateLimited: As for ``request_resource_allocation``.
    """
    answer = _ask({"method": "get_available_resources"})
    return {name: answer[name] for name in ("memory", "compute", "power")}


def _allocate(action: str, resource_type: str, amount: Any) -> Allocation:
    asked = {"method": "allocate", "action": action, "resource_type": resource_type, "amount": amount}
    # A request that has to be sent again is still one request.
    answer = _ask({**asked, "request_id": uuid.uuid4().hex})
    return Allocation(*(answer[name] for name in Allocation._fields))


def _ask(question: Dict[str, Any]) -> Dict[str, Any]:  # noqa: UP006
    environ = os.environ
    if AGENT not in environ or TOKEN not in environ:
        raise ResourceError("this process is under no lease: run it with 'cotenant submit' or take a cotenant.lease()")
    lease = {"job_id": environ.get("COTENANT_JOB_ID", ""), "epoch": environ.get("COTENANT_EPOCH", "")}
    try:
        text = json.dumps({**question, **lease, "token": environ[TOKEN]}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ResourceError(f"amount: {question.get('amount')!r} is not accepted; give a number or a text") from error
    try:
        answer = json.loads(_exchange(environ[AGENT], text))
    except (OSError, ValueError) as error:
        raise ResourceError(f"the host agent does not answer: {error}") from error
    if "error" in answer:
        if answer.get("retry_after_s") is not None:
            raise RateLimited(answer["error"], float(answer["retry_after_s"]))
        raise ResourceError(answer["error"])
    return dict(answer)


def _exchange(path: str, text: bytes) -> bytes:
    """Send one line and return the line that comes back; waits for an agent that is just starting anew."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(ANSWER_S)
            try:
                link.connect(path)
                link.sendall(text + b"\n")
                with link.makefile("rb") as answers:
                    line = answers.readline(MOST_BYTES)
                if line:
                    return line
                error = OSError("it hung up")
            except (ConnectionError, FileNotFoundError, BlockingIOError) as failure:  # the last: too many ask at once
                error = failure
        if time.monotonic() > deadline:
            raise error
        time.sleep(_RETRY_S)
