"""Who calls, and what for.

While no token was ever made, everything is open: the server then listens on loopback only. A web
page from elsewhere could still reach it through the user's browser, so that an open server
answers only requests that name it by a loopback name and come from no foreign page.
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

_bearer = HTTPBearer(auto_error=False, description="A token of `paceline server token create`.")
_GRANTS: dict[Scope, frozenset[str]] = {
    "agent": frozenset({"agent"}),
    "viewer": frozenset({"viewer"}),
    "operator": frozenset({"viewer", "operator"}),
}
_REMEMBERED_SECONDS = 1.0


@dataclass(frozen=True)
class Caller:
    """`name` is the token's, as the audit log shows it."""

    name: str
    scope: Scope | None


class TokenVerifier:
    """Looks tokens up, remembering answers for a second; one per program."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str | None, tuple[float, Caller | None]] = {}
        self._asking = asyncio.Lock()

    async def caller(self, of: Parts, secret: str | None) -> Caller | None:
        """None: nobody we know. An open server knows everybody."""
        known = self._remembered(secret)
        if known is None:
            async with self._asking:  # of many who come at once, the first asks for all
                known = self._remembered(secret)
                if known is None:
                    known = self._clock(), await run_sync(_look_up, of, secret)
                    if len(self._known) >= 1000:
                        self._known.clear()
                    self._known[secret] = known
        return known[1]

    def _remembered(self, secret: str | None) -> tuple[float, Caller | None] | None:
        found = self._known.get(secret)
        fresh = found is not None and self._clock() - found[0] < _REMEMBERED_SECONDS
        return found if fresh else None


def _look_up(of: Parts, secret: str | None) -> Caller | None:
    with of.database.read() as session:
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
        of: PartsDep,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    ) -> Caller:
        secret = credentials.credentials if credentials else None
        return await authorized(request, of, scope, secret)

    return check


async def authorized(request: Request, of: Parts, scope: Scope, secret: str | None) -> Caller:
    """Raises Problem unless who calls with this token may do what `scope` allows."""
    guard: TokenVerifier = request.app.state.guard
    caller = await guard.caller(of, secret)
    if caller is None:
        raise ProblemError(
            401,
            "Expected `Authorization: Bearer TOKEN` with a token of this server.",
            {"WWW-Authenticate": 'Bearer realm="paceline"'},
        )
    if caller.scope is None:
        _refuse_foreign_pages(request)
    elif scope not in _GRANTS[caller.scope]:
        raise ProblemError(
            403, f"This needs a token of scope {scope}; {caller.name!r} is {caller.scope}."
        )
    return caller


async def still_authorized(request: Request, of: Parts, scope: Scope) -> bool:
    """Whether an open stream may go on. One outlives that the database is away."""
    try:
        await authorized(request, of, scope, bearer(request))
    except ProblemError:
        return False
    except UNAVAILABLE:
        return True
    return True


def bearer(request: Request) -> str | None:
    """The token that came with a request, as `HTTPBearer` finds it."""
    scheme, secret = get_authorization_scheme_param(request.headers.get("authorization"))
    return secret if secret and scheme.lower() == "bearer" else None


def _refuse_foreign_pages(request: Request) -> None:
    host = request.headers.get("host", "")
    if not _names_loopback(host):
        raise ProblemError(403, f"Without tokens, call this server as localhost, not {host!r}.")
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise ProblemError(403, f"Without tokens, no page of {origin} may call this server.")


@lru_cache(maxsize=64)
def _names_loopback(host: str) -> bool:
    """Of a `Host` header, which may hold a port."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # a bracket that is not closed
        return False


agent = Depends(_requires("agent"))
viewer = Depends(_requires("viewer"))
operator = Depends(_requires("operator"))
Operator = Annotated[Caller, operator]
Agent = Annotated[Caller, agent]
