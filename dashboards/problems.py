"""Errors as ``application/problem+json`` (RFC 9457), the same shape for every cause.

``type`` is a URN that programs may compare; ``detail`` is for people. A value that is not accepted comes with
``field``, ``value`` and ``accepted``; a body of the wrong shape with ``errors``, a list of those.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from difflib import get_close_matches
from http import HTTPMethod, HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from starlette.exceptions import HTTPException
from starlette.routing import Match

from cotenant.scheduler.errors import (
    CotenantError,
    GoingDown,
    HintError,
    JobNotFound,
    NotAccepted,
    NotConnected,
    NotPermitted,
    NotPlaceable,
    OutputNotKept,
    TooManyRequests,
    shown,
)

MEDIA_TYPE = "application/problem+json"
_MAX_SHOWN = 200
# What is accepted, in place of what pydantic says, which is what was wrong; with what it knows of the limit.
_WORDS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "json_invalid": "JSON; this cannot be read: {error}",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number that is not so large",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a number that is not infinite",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "given_once": "one value",
}
_AS_JSON = "JSON, with the header Content-Type: application/json"

_STATUS: tuple[tuple[type[CotenantError], int, str], ...] = (
    (HintError, 422, "hint-not-accepted"),
    (NotAccepted, 422, "not-accepted"),
    (JobNotFound, 404, "job-not-found"),
    (OutputNotKept, 404, "output-not-kept"),
    (NotPlaceable, 409, "not-placeable"),
    (NotPermitted, 403, "not-permitted"),
    (TooManyRequests, 429, "too-many-requests"),
    (NotConnected, 503, "not-connected"),
    (GoingDown, 503, "going-down"),
    (CotenantError, 500, "failed"),
)


class Problem(BaseModel):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    field: str | None = None
    value: Any = None
    accepted: str | None = None
    errors: list[dict[str, Any]] | None = None


_HTTP_KINDS = {404: "not-found", 405: "method-not-allowed", 413: "too-large"}
_CONTENT = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is not accepted.", "content": _CONTENT},
    "5XX": {"description": "cotenant cannot answer.", "content": _CONTENT},
}


class _Ascii(JSONResponse):
    """JSON in ASCII: a text that is shown because it was refused need not be one that UTF-8 can hold."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def reply(status: int, kind: str, detail: str, instance: str, **more: Any) -> JSONResponse:
    """Build the response of a problem."""
    headers = more.pop("headers", None)
    content = {
        "type": f"urn:cotenant:problem:{kind}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": instance,
        **more,
    }
    return _Ascii(content, status, headers, MEDIA_TYPE)


def unauthorised(instance: str) -> JSONResponse:
    """The token is missing or wrong."""
    detail = "give the bearer token: Authorization: Bearer TOKEN ('cotenant up' says where the token is)"
    return reply(401, "unauthorised", detail, instance, headers={"WWW-Authenticate": "Bearer"})


def install(app: FastAPI) -> None:
    """Turn every error an application can raise into a problem."""
    app.add_exception_handler(CotenantError, _cotenant_error)
    app.add_exception_handler(RequestValidationError, _wrong_shape)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)


def known_parameters(request: Request) -> None:
    """Refuse query parameters that the path does not take, or once only: what is left out would be left out unsaid.

    Raises:
        RequestValidationError: There are some.
    """
    known = _parameters(request)
    given = request.query_params.multi_items()
    unknown = [("extra_forbidden", name, value) for name, value in given if name not in known]
    often = Counter(name for name, _ in given)
    again = [("given_once", name, request.query_params.getlist(name)) for name in known if often[name] > 1]
    if unknown or again:
        raise RequestValidationError(
            [{"type": kind, "loc": ("query", name), "input": value} for kind, name, value in (*unknown, *again)]
        )


def _cotenant_error(request: Request, error: Exception) -> JSONResponse:
    status, kind = next((status, kind) for cause, status, kind in _STATUS if isinstance(error, cause))
    more: dict[str, Any] = {}
    if isinstance(error, NotAccepted):
        more = {"field": error.field, "value": _shown(error.value), "accepted": error.accepted}
    if isinstance(error, TooManyRequests):
        more["headers"] = {"Retry-After": str(math.ceil(error.retry_after_s))}
    return reply(status, kind, str(error), request.scope["path"], **more)


def _wrong_shape(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = [
        {
            "field": ".".join(map(str, _place(found)))[:_MAX_SHOWN],
            "value": _shown(error.body if found["type"] == "json_invalid" else found.get("input")),
            "accepted": _AS_JSON if _unread(found) else _accepted(found, request),
        }
        for found in error.errors()
    ]
    detail = "; ".join(f"{found['field']}: {found['accepted']}" for found in errors[:5])
    return reply(422, "not-accepted", detail, request.scope["path"], errors=errors[:50])


def _place(found: dict[str, Any]) -> tuple[str | int, ...]:
    """Return where it is; of a body that cannot be read pydantic names a position in it."""
    return tuple(found["loc"][:1] if found["type"] == "json_invalid" else found["loc"])


def _fields(request: Request) -> dict[str, FieldInfo]:
    """Return the fields of the body that the path asked for takes."""
    body = getattr(request.scope.get("route"), "body_field", None)
    fields: dict[str, FieldInfo] = getattr(body.field_info.annotation, "model_fields", {}) if body is not None else {}
    return fields


def _parameters(request: Request) -> dict[str, FieldInfo]:
    """Return what the path asked for takes in its query."""
    return {each.alias: each.field_info for each in request.scope["route"].dependant.query_params}


def _accepted(found: dict[str, Any], request: Request) -> str:
    """Say what is accepted: pydantic says only that a field is one too many, or is missing."""
    place, name = found["loc"][:-1], str(found["loc"][-1])
    fields = {("body",): _fields, ("query",): _parameters}.get(place, lambda _: {})(request)
    if found["type"] == "extra_forbidden":
        what = "parameter" if place == ("query",) else "field"
        close = get_close_matches(name, fields, n=1)
        return f"no {what} of that name; did you mean {close[0]}?" if close else f"no {what} of that name"
    if found["type"] == "missing":
        field = fields.get(name)
        return (
            f"a value, which is missing: {field.description}"
            if field and field.description
            else "a value, which is missing"
        )
    if found["type"] in _WORDS:
        return _WORDS[found["type"]].format(**found.get("ctx", {}))
    return str(found["msg"])


def _unread(found: dict[str, Any]) -> bool:
    """Whether this is about a body that was left as it came, since its header does not say that it is JSON."""
    return tuple(found["loc"]) == ("body",) and isinstance(found.get("input"), bytes)


def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path, detail, headers = request.scope["path"], str(error.detail), error.headers
    if error.status_code == HTTPStatus.NOT_FOUND:
        detail = f"there is no {path}; GET {request.app.openapi_url} lists what there is"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {"Allow": _methods(request)}
        detail = f"{path} does not take {request.method}; it takes {headers['Allow']}"
    return reply(error.status_code, _HTTP_KINDS.get(error.status_code, "http"), detail, path, headers=headers)


def _methods(request: Request) -> str:
    """Return what the path can be asked for with: each of its routes knows its own methods only."""
    return ", ".join(
        method
        for method in sorted(HTTPMethod)
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    )


def _bug(request: Request, _error: Exception) -> JSONResponse:
    """Answer; the server logs the traceback, which is nobody else's business."""
    return reply(500, "failed", "an error inside the API; its log says more", request.scope["path"])


def _shown(value: object) -> Any:
    """Return a value as JSON can carry it; what it cannot carry (NaN) or what is long becomes a text."""
    if isinstance(value, bytes):  # a body that was left as it came
        value = value.decode("utf-8", "backslashreplace")
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        text = ""
    return value if text and len(text) <= _MAX_SHOWN else shown(value)[:_MAX_SHOWN]
