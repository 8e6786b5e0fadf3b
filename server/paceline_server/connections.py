"""Limits on connections, so that one client cannot block others.

uvicorn ends idle connections only. Here a request must also be complete in time, one peer has few
incomplete requests, and the number of all connections is limited. Beyond a limit the connection
that has waited longest for its client is closed, not the new one: otherwise an attacker who shares
an address with others, as on loopback, would lock them out.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
from dataclasses import dataclass, field
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

_RESERVED_FILES = 256  # for the database, logs and files of the dashboard
_LATE_SECONDS = 1.0  # a timer this late shows that this process was stopped or starved


class WaitingConnections:
    """Connections that wait for their client, by peer, longest wait first."""

    def __init__(self) -> None:
        self._by_peer: dict[str, dict[LimitedProtocol, None]] = {}

    def add(self, connection: LimitedProtocol) -> int:
        """Add a connection; return how many its peer has."""
        of_peer = self._by_peer.setdefault(connection.peer, {})
        of_peer[connection] = None
        return len(of_peer)

    def remove(self, connection: LimitedProtocol) -> None:
        of_peer = self._by_peer.get(connection.peer, {})
        of_peer.pop(connection, None)
        if not of_peer:
            self._by_peer.pop(connection.peer, None)

    def oldest(self, peer: str) -> LimitedProtocol:
        return next(iter(self._by_peer[peer]))

    def oldest_of_busiest(self) -> LimitedProtocol | None:
        """Return the longest-waiting connection of the peer that has most.

        None if there are none.
        """
        if not self._by_peer:
            return None
        return self.oldest(max(self._by_peer, key=lambda peer: len(self._by_peer[peer])))


@dataclass
class ConnectionLimits:
    """The limits of one server, and the connections that wait for their clients."""

    request_seconds: float = 20.0  # until a request with its body is complete
    head_bytes: int = 64 << 10  # limit of request line and headers
    incomplete_per_peer: int = 128
    total: int = 16_384
    incomplete: WaitingConnections = field(default_factory=WaitingConnections)
    idle: WaitingConnections = field(default_factory=WaitingConnections)

    def protocol(self) -> type[asyncio.Protocol]:
        """Return the protocol that applies these limits, for `uvicorn.Config(http=...)`."""
        return type("Limited", (LimitedProtocol,), {"limits": self})


def limits_of_process() -> ConnectionLimits:
    """Raise the limit of open files as far as allowed; return limits that stay below it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limits = ConnectionLimits()
    if most != resource.RLIM_INFINITY:
        limits.total = max(min(limits.total, most - _RESERVED_FILES), most // 2)
    return limits


class LimitedProtocol(HttpToolsProtocol):
    """One connection.

    It is incomplete until a whole request has arrived, and idle after the response.
    """

    limits: ClassVar[ConnectionLimits]
    peer: str = ""
    _timer: asyncio.TimerHandle | None = None
    _due: float = 0.0
    _head_bytes: int = 0
    _in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.peer = _peer(self.client[0] if self.client else "")
        self._begin()
        if len(self.connections) > self.limits.total:
            oldest = self.limits.idle.oldest_of_busiest()
            (oldest or self.limits.incomplete.oldest_of_busiest() or self).end(503)

    def connection_lost(self, exc: Exception | None) -> None:
        self._complete()
        self.limits.idle.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.head_bytes:
                self.end(431)

    def on_message_begin(self) -> None:
        self.limits.idle.remove(self)
        if self._timer is None:
            self._begin()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._complete()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._timer is None and not self.transport.is_closing():
            self.limits.idle.add(self)

    def end(self, status: int) -> None:
        """Close the connection; respond with a status if a response may still begin."""
        is_free = self.cycle is None or self.cycle.response_complete
        if is_free or not self.cycle.response_started:
            self.transport.write(
                STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n"
            )
        self.transport.close()
        self._complete()
        self.limits.idle.remove(self)

    def _begin(self) -> None:
        """Wait for a request of this connection."""
        self._in_head, self._head_bytes = True, 0
        self._set_timer()
        if self.limits.incomplete.add(self) > self.limits.incomplete_per_peer:
            self.limits.incomplete.oldest(self.peer).end(408)

    def _complete(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.limits.incomplete.remove(self)

    def _set_timer(self) -> None:
        self._due = self.loop.time() + self.limits.request_seconds
        self._timer = self.loop.call_at(self._due, self._expire)

    def _expire(self) -> None:
        if self.loop.time() - self._due > _LATE_SECONDS:  # the request may be waiting to be read
            self._set_timer()
        else:
            self.end(408)


def _peer(address: str) -> str:
    """Return the key of a peer: its IPv4 address, or its IPv6 network."""
    if ":" not in address:
        return address
    return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
