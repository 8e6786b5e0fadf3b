"""Authentication and authorization of requests.

Every request that changes something needs a credential: a bearer token or a browser session. Until
someone creates a token the server listens on loopback only, accepts the tokens of its own user and
lets everyone on this machine read.

A session's secret has two halves. The browser keeps one in a cookie, which a page cannot read, and
sends the other in a header, from storage that belongs to this origin alone. The cookie by itself
is worthless: browsers send it to every port of a host, and with requests that other pages make.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param

from paceline_server.api.dependencies import Parts, PartsDep
from paceline_server.api.problems import ProblemError
from paceline_server.policy import Policy
from paceline_server.store.database import UNAVAILABLE
from paceline_server.store.tokens import Scope, find_token, has_configured_tokens

_bearer = HTTPBearer(auto_error=False, description="A token from `paceline server token create`.")
_GRANTS: dict[Scope, frozenset[str]] = {
    "agent": frozenset({"agent"}),
    "viewer": frozenset({"viewer"}),
    "operator": frozenset({"viewer", "operator"}),
}
_READER: frozenset[str] = frozenset({"viewer"})  # rights of everyone without configured tokens
_CACHE_SECONDS = 1.0
SESSION_HEADER = "x-paceline-session"


@dataclass(frozen=True)
class Caller:
    """The caller of a request. `name` is the token's name, as shown in the audit log.

    `scope` is None for someone without a credential, who may only read. `owner` is the name of the
    token that a browser's session came from, else the same as `name`.
    """

    name: str
    scope: Scope | None
    owner: str = ""

    @property
    def grants(self) -> frozenset[str]:
        """The scopes of the routes that the caller may use."""
        return _READER if self.scope is None else _GRANTS[self.scope]


def check_approver(caller: Caller, policy: Policy) -> None:
    """Raise ProblemError if the policy does not let the caller decide on actions of its job."""
    if policy.approvers and caller.owner not in policy.approvers:
        raise ProblemError(
            403,
            f"Only {', '.join(policy.approvers)} may decide on this job (policy `approvers`), not "
            f"{caller.owner}: use the token of one of them.",
        )


class TokenVerifier:
    """Look tokens up and cache the result for one second. One instance per application."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cache: dict[str | None, tuple[float, Caller | None]] = {}
        self._lookup_lock = asyncio.Lock()

    async def caller(self, parts: Parts, secret: str | None) -> Caller | None:
        """Return the caller; None for an unknown token, or for no token where one is needed."""
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
        if secret is None:
            needs_token = has_configured_tokens(session)
            return None if needs_token else Caller("anyone on this machine", None)
        token = find_token(session, secret, parts.now_ns())
        return (
            None
            if token is None
            else Caller(token.name, _scope(token.scope), token.parent or token.name)
        )


def _scope(word: str) -> Scope:
    for scope in _GRANTS:
        if scope == word:
            return scope
    raise ValueError(f"a token with the unknown scope {word!r}")


def _requires(scope: Scope) -> Callable[..., Awaitable[Caller]]:
    async def check(
        request: Request,
        parts: PartsDep,
        _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],  # for OpenAPI
    ) -> Caller:
        return await authorized(request, parts, scope)

    return check


async def authorized(request: Request, parts: Parts, scope: Scope) -> Caller:
    """Return the caller. Raises ProblemError if the credential does not grant `scope`."""
    caller = await identified(request, parts)
    if caller is None:
        raise _unauthenticated("Expected `Authorization: Bearer TOKEN` with a valid token.")
    if caller.scope is None and scope not in caller.grants:
        raise _unauthenticated(
            "Without a credential this server can only be read: expected `Authorization: Bearer"
            " TOKEN`, or a browser signed in with the link that `paceline login` prints."
        )
    if scope not in caller.grants:
        raise ProblemError(
            403,
            f"This request needs a token with scope {scope}; token {caller.name!r} has scope"
            f" {caller.scope}.",
        )
    return caller


async def identified(request: Request, parts: Parts) -> Caller | None:
    """Return the caller; None for an unknown token, or for no token where one is needed."""
    verifier: TokenVerifier = request.app.state.token_verifier
    secret = bearer(request)
    if secret is None and (session := session_secret(request)) is not None:
        caller = await verifier.caller(parts, session)
        # otherwise the session has ended, and the browser may read what everyone may read
        if caller is not None:
            return caller
    return await verifier.caller(parts, secret)


def _unauthenticated(detail: str) -> ProblemError:
    return ProblemError(401, detail, {"WWW-Authenticate": 'Bearer realm="paceline"'})


async def still_authorized(request: Request, parts: Parts, scope: Scope) -> bool:
    """Return whether an open stream may continue. Streams survive an unavailable database."""
    try:
        await authorized(request, parts, scope)
    except ProblemError:
        return False
    except UNAVAILABLE:
        return True
    return True


def bearer(request: Request) -> str | None:
    """Return the bearer token of a request, as `HTTPBearer` does."""
    scheme, secret = get_authorization_scheme_param(request.headers.get("authorization"))
    return secret if secret and scheme.lower() == "bearer" else None


def session_cookie(request: Request) -> str:
    """Return the name of the cookie: a host's cookies are shared by the servers on its ports."""
    return f"paceline_session_{request.url.port or 0}"


def session_secret(request: Request) -> str | None:
    """Return the secret of a browser's session, put together from its two halves."""
    kept, sent = request.cookies.get(session_cookie(request)), request.headers.get(SESSION_HEADER)
    return f"{kept}.{sent}" if kept and sent else None


agent = Depends(_requires("agent"))
viewer = Depends(_requires("viewer"))
operator = Depends(_requires("operator"))
Viewer = Annotated[Caller, viewer]
Operator = Annotated[Caller, operator]
Agent = Annotated[Caller, agent]
