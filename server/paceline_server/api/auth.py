"""Authentication and authorization of requests.

Until the first token is created the API is open, and the server listens on loopback only. A foreign
web page could still reach it through the user's browser. An open server therefore rejects requests
whose `Host` is not a loopback name or whose `Origin` is another site.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated
from urllib.parse import urlsplit

from anyio.to_thread import run_sync
from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param

from paceline_server.api.dependencies import Parts, PartsDep
from paceline_server.api.problems import ProblemError
from paceline_server.settings import is_loopback
from paceline_server.store.database import UNAVAILABLE
from paceline_server.store.tokens import Scope, any_token, find_token

_bearer = HTTPBearer(auto_error=False, description="A token from `paceline server token create`.")
_GRANTS: dict[Scope, frozenset[str]] = {
    "agent": frozenset({"agent"}),
    "viewer": frozenset({"viewer"}),
    "operator": frozenset({"viewer", "operator"}),
}
_CACHE_SECONDS = 1.0


@dataclass(frozen=True)
class Caller:
    """The caller of a request. `name` is the token's name, as shown in the audit log."""

    name: str
    scope: Scope | None


class TokenVerifier:
    """Look tokens up and cache the result for one second. One instance per application."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cache: dict[str | None, tuple[float, Caller | None]] = {}
        self._lookup_lock = asyncio.Lock()

    async def caller(self, parts: Parts, secret: str | None) -> Caller | None:
        """Return the caller; None for an unknown token. An open server accepts everyone."""
        entry = self._cached(secret)
        if entry is None:
            async with self._lookup_lock:  # one lookup serves all concurrent requests
                entry = self._cached(secret)
                if entry is None:
                    entry = self._clock(), await run_sync(_look_up, parts, secret)
                    if len(self._cache) >= 1000:
                        self._cache.clear()
                    self._cache[secret] = entry
        return entry[1]

    def _cached(self, secret: str | None) -> tuple[float, Caller | None] | None:
        found = self._cache.get(secret)
        fresh = found is not None and self._clock() - found[0] < _CACHE_SECONDS
        return found if fresh else None


def _look_up(parts: Parts, secret: str | None) -> Caller | None:
    with parts.database.read() as session:
        if not any_token(session):
            return Caller("anyone on this machine", None)
        token = find_token(session, secret) if secret else None
        return None if token is None else Caller(token.name, _scope(token.scope))


def _scope(word: str) -> Scope:
    for scope in _GRANTS:
        if scope == word:
            return scope
    raise ValueError(f"a token with the unknown scope {word!r}")


def _requires(scope: Scope) -> Callable[..., Awaitable[Caller]]:
    async def check(
        request: Request,
        parts: PartsDep,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    ) -> Caller:
        secret = credentials.credentials if credentials else None
        return await authorized(request, parts, scope, secret)

    return check


async def authorized(request: Request, parts: Parts, scope: Scope, secret: str | None) -> Caller:
    """Return the caller. Raises ProblemError if the token does not grant `scope`."""
    verifier: TokenVerifier = request.app.state.token_verifier
    caller = await verifier.caller(parts, secret)
    if caller is None:
        raise ProblemError(
            401,
            "Expected `Authorization: Bearer TOKEN` with a valid token of this server.",
            {"WWW-Authenticate": 'Bearer realm="paceline"'},
        )
    if caller.scope is None:
        _refuse_foreign_pages(request)
    elif scope not in _GRANTS[caller.scope]:
        raise ProblemError(
            403,
            f"This request needs a token with scope {scope}; token {caller.name!r} has scope"
            f" {caller.scope}.",
        )
    return caller


async def still_authorized(request: Request, parts: Parts, scope: Scope) -> bool:
    """Return whether an open stream may continue. Streams survive an unavailable database."""
    try:
        await authorized(request, parts, scope, bearer(request))
    except ProblemError:
        return False
    except UNAVAILABLE:
        return True
    return True


def bearer(request: Request) -> str | None:
    """Return the bearer token of a request, as `HTTPBearer` does."""
    scheme, secret = get_authorization_scheme_param(request.headers.get("authorization"))
    return secret if secret and scheme.lower() == "bearer" else None


def _refuse_foreign_pages(request: Request) -> None:
    host = request.headers.get("host", "")
    if not _names_loopback(host):
        raise ProblemError(
            403, f"Without tokens, use localhost to reach this server, not {host!r}."
        )
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise ProblemError(403, f"Without tokens, pages of {origin} may not call this server.")


@lru_cache(maxsize=64)
def _names_loopback(host: str) -> bool:
    """Return whether a `Host` header, with or without port, names a loopback address."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # a bracket that is not closed
        return False


agent = Depends(_requires("agent"))
viewer = Depends(_requires("viewer"))
operator = Depends(_requires("operator"))
Operator = Annotated[Caller, operator]
Agent = Annotated[Caller, agent]
