"""Protects a browser's user from other pages: host names, origins, and headers of responses."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from functools import lru_cache
from urllib.parse import urlsplit

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline_server.api import problems
from paceline_server.api.problems import ProblemError
from paceline_wire.address import is_loopback

ANY_HOST = "*"
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_PAGE = frozenset({"same-origin", "none"})


class BrowserGuard:
    """ASGI middleware that rejects requests only a hostile page would send, and adds security
    headers.

    A page whose name was rebound to this server's address sends its own name as `Host`. Loopback
    names, `host_names` and addresses are allowed: nobody can rebind an address.
    """

    def __init__(self, app: ASGIApp, host_names: Collection[str], own_site: str) -> None:
        """`own_site`: HOST or HOST:PORT in the address bar, if a proxy changes `Host`."""
        self._app = app
        self._own_site = own_site
        self._host_names = frozenset(name.lower() for name in host_names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *problems.SECURITY_HEADERS]
            await send(message)

        try:
            self._check(scope)
        except ProblemError as error:
            response = await problems.answer_to(Request(scope), error)
            await response(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> None:
        """Raise ProblemError for a foreign host name, or a change requested by another page."""
        names = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
        for name in names:
            if not (ANY_HOST in self._host_names or _is_address(name) or self._knows(name)):
                raise ProblemError(
                    421,
                    f"This server does not go by the name {name!r}. If it should, start it with"
                    f" --allowed-host {_hostname(name) or 'NAME'}.",
                )
        if scope["method"] in _READING:
            return
        headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
        origin = headers.get(b"origin")
        site = None if origin is None else origin.partition("://")[2]
        if site is not None and site not in (*names, self._own_site or None):
            raise ProblemError(403, f"Pages of {origin} may not change anything on this server.")
        if headers.get(b"sec-fetch-site", "none") not in _OWN_PAGE:
            raise ProblemError(403, "Pages of other sites may not change anything on this server.")

    def _knows(self, netloc: str) -> bool:
        return _hostname(netloc) in self._host_names


def _hostname(netloc: str) -> str:
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:  # a bracket is not closed
        return ""


@lru_cache(maxsize=64)
def _is_address(netloc: str) -> bool:
    """Return whether a `Host` is a loopback name or an IP address."""
    name = _hostname(netloc)
    try:
        return is_loopback(name) or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
