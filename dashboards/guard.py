"""Who may talk to the API, and how much: checked before anything of a request is parsed."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cotenant.dashboards import problems

MAX_BODY = 8 << 20


class Guard:
    """ASGI middleware: bearer token (compared in constant time) and a limit on the size of bodies.

    ``scope["state"]["trusted"]`` says whether the caller showed the token, for handlers of open paths.
    """

    def __init__(self, app: ASGIApp, token: str | None, open_paths: Sequence[str]) -> None:
        self._app = app
        if token is not None and not token.strip():
            raise ValueError("token: it is empty; give a token, or None to ask nobody")
        self._expected = None if token is None else token.encode()
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        trusted = self._trusts(headers.get("authorization", ""))
        scope.setdefault("state", {})["trusted"] = trusted
        if not trusted and scope["path"] not in self._open_paths:
            await problems.unauthorised(scope["path"])(scope, receive, send)
            return
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > MAX_BODY:
                raise HTTPException(413, f"the body is larger than {MAX_BODY} bytes")
            return message

        await self._app(scope, limited, send)

    def _trusts(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        right = self._expected is None or hmac.compare_digest(given.strip(" ").encode("latin-1"), self._expected)
        return self._expected is None or (right and scheme.lower() == "bearer")  # RFC 9110: schemes have no case
