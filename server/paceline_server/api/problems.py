"""Errors as RFC 9457 problem details: what was expected, what was found, where.

Routes raise ProblemError. All other errors that can reach a client are mapped here too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from paceline_server.api import schemas
from paceline_server.store.database import UNAVAILABLE

_log = logging.getLogger(__name__)
MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_SECONDS = 1
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
# Headers of every response: pages load nothing from other sites, and other sites cannot embed them.
_SECURITY = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self';"
    " frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
SECURITY_HEADERS = [(name.lower().encode(), text.encode()) for name, text in _SECURITY.items()]


class ProblemError(HTTPException):
    """An HTTP error; `detail` is one sentence that includes the fix."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, detail, dict(headers or {}))


def not_found(kind: str, identifier: str) -> ProblemError:
    """Return a 404 for a resource."""
    return ProblemError(404, f"There is no {kind} {identifier!r}.")


def unavailable(detail: str) -> ProblemError:
    """Return a 503 that asks the client to retry."""
    return ProblemError(503, detail, {"Retry-After": str(RETRY_AFTER_SECONDS)})


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return a route's OpenAPI responses with a problem as body, for these statuses."""
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in statuses
    }


def install(app: FastAPI) -> None:
    """Map all errors of an application to problems."""
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unexpected)
    for error in UNAVAILABLE:
        app.add_exception_handler(error, _database)


def answer(request: Request, status: int, detail: str, headers: Mapping[str, str] = {}) -> Response:
    """Return the response for a problem."""
    body = schemas.Problem(
        type="about:blank",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        instance=request.url.path,
    )
    return JSONResponse(body.model_dump(), status, headers=dict(headers), media_type=MEDIA_TYPE)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers, detail = dict(error.headers or {}), str(error.detail)
    if error.status_code == 405:
        allowed = ", ".join(_allowed_methods(request))
        headers["Allow"] = allowed
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
        detail = f"Expected one of {allowed} at this address, got {request.method}."
    return answer(request, error.status_code, detail, headers)


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes of a path; the framework names those of the first only."""
    allowed = [
        method
        for method in _METHODS
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in request.app.routes
        )
    ]
    return [*(allowed or ["GET", "HEAD"]), "OPTIONS"]  # no route: the dashboard's files


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if isinstance(error.body, bytes):  # not parsed as JSON
        content_type = request.headers.get("content-type", "no Content-Type")
        return answer(request, 422, f"body: expected application/json, got {content_type}.")
    where = ".".join(str(part) for part in first["loc"])
    return answer(request, 422, f"{where}: {first['msg']}.")


async def answer_to(request: Request, error: Exception) -> Response:
    """Return the response for a `ProblemError` or an unavailable database."""
    handle = _http if isinstance(error, HTTPException) else _database
    return await handle(request, error)


async def _database(request: Request, error: Exception) -> Response:
    _log.warning("database unavailable: %s", error)
    return answer(
        request,
        503,
        "The database is unavailable; try again.",
        {"Retry-After": str(RETRY_AFTER_SECONDS)},
    )


async def _unexpected(request: Request, error: Exception) -> Response:
    # Sent outside of all middleware.
    return answer(request, 500, "Internal server error; see the server log.", _SECURITY)
