"""The connections of each node to the server: one for batches, one for the stream of commands."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from urllib.parse import urlsplit

from benchmarks.fleet.nodes import Node, authorization
from benchmarks.fleet.plan import Planned
from paceline_wire.batch import CommandResult, Event
from paceline_wire.commands import Ping, decode_line

_AGAIN_SECONDS = 0.1


class _Requests(asyncio.Protocol):
    """HTTP requests, one at a time; the future holds the status, 0 without a response."""

    def __init__(self) -> None:
        self._buffer = b""
        self._status: asyncio.Future[int] | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes) -> asyncio.Future[int]:
        assert self._transport is not None
        self._status = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._status

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, ended, body = self._buffer.partition(b"\r\n\r\n")
        if not ended:
            return
        length = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
        if len(body) >= int(length):
            self._buffer = b""
            self._answer(int(head.split(b" ", 2)[1]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._answer(0)

    def _answer(self, status: int) -> None:
        if self._status is not None and not self._status.done():
            self._status.set_result(status)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _Commands(asyncio.Protocol):
    """A command stream.

    Each command completes immediately; the node's next batch reports it (`done`).
    """

    def __init__(self) -> None:
        self._buffer = b""
        self.done: list[Event] = []

    def data_received(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"{"):  # HTTP framing
                continue
            command = decode_line(line)
            if not isinstance(command, Ping):
                at, of = time.time_ns(), command.command_id
                self.done.append(CommandResult(time_ns=at, command_id=of, ok=True))


class Connections:
    """All connections. `acknowledged`: when the last batch of each step was acknowledged."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        self._open: dict[int, _Requests] = defaultdict(_Requests)
        self._streams: list[asyncio.BaseTransport] = []
        self._commands: dict[int, _Commands] = defaultdict(_Commands)
        self.acknowledged: dict[int, float] = defaultdict(float)
        self.seconds: list[float] = []  # per request
        self.refused = 0
        self.latest = 0.0  # largest delay of a batch behind its due time

    async def send(self, node: Node, request: bytes) -> None:
        """Send a batch until it is stored, as an agent does."""
        began = time.perf_counter()
        while (status := await self._try(node, request)) != 200:
            assert status in (0, 503), status
            self.refused += 1
            await asyncio.sleep(_AGAIN_SECONDS)
        self.seconds.append(time.perf_counter() - began)

    async def _try(self, node: Node, request: bytes) -> int:
        requests = self._open[node.number]
        if not requests.is_open:
            try:
                await asyncio.get_running_loop().create_connection(lambda: requests, *self._address)
            except OSError:
                return 0
        return await requests.send(request)

    async def listen(self, node: Node) -> None:
        """Keep a stream of commands open, as each agent does; the only commands start ranks."""
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: self._commands[node.number], *self._address
        )
        path = f"/api/v1/agents/{node.agent_id}/commands"
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{authorization()}\r\n"
        transport.write(head.encode())
        self._streams.append(transport)

    def take_results(self, node: Node) -> list[Event]:
        commands = self._commands[node.number]
        done, commands.done = commands.done, []
        return done

    async def follow(self, node: Node, plan: Iterable[Planned]) -> None:
        for planned in plan:
            await asyncio.sleep(planned.due - time.time())
            self.latest = max(self.latest, time.time() - planned.due)
            await self.send(node, planned.request)
            if planned.step is not None:
                known = self.acknowledged[planned.step]
                self.acknowledged[planned.step] = max(known, time.time())

    def close(self) -> None:
        for requests in self._open.values():
            requests.close()
        for transport in self._streams:
            transport.close()
