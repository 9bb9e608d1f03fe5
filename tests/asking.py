"""Requests to the admin API without a socket, for its tests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partialmethod
from typing import Any

import httpx
from fake_client import FakeClient

from cotenant.dashboards.api import create_app

TOKEN = "s3cret"
AUTH = {"Authorization": f"Bearer {TOKEN}"}


class Http:
    """Requests straight into the application, no socket."""

    def __init__(self, client: FakeClient, token: str | None) -> None:
        app = create_app(lambda: client, token)  # type: ignore[arg-type,return-value]
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    def request(self, method: str, path: str, headers: Mapping[str, Any] | None = None, **how: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://api") as session:
                return await session.request(method, path, headers={**AUTH, **(headers or {})}, **how)

        return asyncio.run(send())

    get = partialmethod(request, "GET")
    post = partialmethod(request, "POST")
    put = partialmethod(request, "PUT")
    patch = partialmethod(request, "PATCH")
    delete = partialmethod(request, "DELETE")


def problem(response: Any, status: int, kind: str) -> dict[str, Any]:
    """Return the body of a problem after checking what all problems have."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["type"] == f"urn:cotenant:problem:{kind}"
    assert body["status"] == status
    assert body["title"]
    assert body["detail"]
    assert body["instance"].startswith("/")
    assert "Input should" not in response.text, "what a library says, not what would be accepted"
    return body
