"""HTTP to the server: one persistent connection for batches, one for the command stream.

It uses the standard library's client in threads: every HTTP library for event loops costs more
memory than all collectors together, and per batch several times the CPU of a whole sweep. The
threads are daemons, so that one that waits for a dead server does not delay the exit.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import queue
import socket
import ssl
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from paceline_agent.errors import LinkError
from paceline_agent.printable import printable
from paceline_wire.node_key import HEADER as NODE_KEY_HEADER

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 10.0  # limit without a received byte
EXCHANGE_SECONDS = 30.0  # limit for a complete response, even if bytes keep arriving
MAXIMUM_ANSWER_BYTES = 1 << 20
MAXIMUM_LINE_BYTES = 8 << 20

_FAILURES = (OSError, HTTPException, ValueError)  # ValueError: an invalid host name


class HttpAnswer(NamedTuple):
    """The response to a request."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    content: bytes

    @property
    def is_problem(self) -> bool:
        """Return whether the response is from the Paceline server, not from a proxy in front of
        it."""
        return "application/problem+json" in self.headers.get("content-type", "")

    def describe(self) -> str:
        """Describe an unexpected response on one line."""
        if not self.is_problem:
            kind = printable(self.headers.get("content-type", "no content"))
            return f"{self.status} with {kind}, probably from a proxy in front of the server"
        with contextlib.suppress(msgspec.MsgspecError):
            problem = _problems.decode(self.content)
            return printable(f"{self.status} {problem.detail or problem.title}")
        return f"{self.status}"


class _Problem(msgspec.Struct):
    title: str = ""
    detail: str = ""


_problems = msgspec.json.Decoder(_Problem)


@dataclass(frozen=True)
class Target:
    """The server's address and how to reach it."""

    url: str
    credential: Callable[[HTTPConnection], str | None] = lambda connection: None
    may_use_proxy: bool = True
    tls: ssl.SSLContext | None = None  # for https; default: the system's certificates
    node_key: str | None = None

    def connect(self) -> HTTPConnection:
        """Open a connection, through a proxy if one is configured.

        Raises:
            OSError: the server or the proxy cannot be reached.
        """
        parts = urlsplit(self.url)
        connection = self._connection(parts)
        connection.timeout = CONNECT_SECONDS
        connection.connect()
        self._socket(connection).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def get(self, path: str) -> HttpAnswer:
        """Return the response to a GET on a new connection; blocks the caller.

        Raises:
            LinkError: the server cannot be reached or does not speak HTTP.
        """
        try:
            with contextlib.closing(self.connect()) as connection:
                self.request(connection, "GET", path)
                return _read(connection.getresponse())
        except _FAILURES as error:
            raise _link_error(error) from error

    def request(self, connection: HTTPConnection, method: str, path: str, **more: object) -> None:
        """Send a request.

        Args:
            connection: from `connect`.
            method: GET or POST.
            path: below the server's URL.
            more: `body` (bytes), and headers with `_` for `-`.
        """
        parts = urlsplit(self.url)
        target = parts.path.rstrip("/") + path
        token = self.credential(connection)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        if self.node_key is not None:
            headers[NODE_KEY_HEADER] = self.node_key
        proxy = self._proxy
        if proxy is not None and parts.scheme == "http":
            target = f"http://{parts.netloc}{target}"
            headers |= {"host": parts.netloc, **_credentials(proxy)}
        body = more.pop("body", None)
        assert body is None or isinstance(body, bytes)
        headers |= {name.replace("_", "-"): str(value) for name, value in more.items()}
        connection.request(method, target, body=body, headers=headers)

    @cached_property
    def _proxy(self) -> SplitResult | None:
        """The proxy from HTTP_PROXY, HTTPS_PROXY and NO_PROXY. Cached: reading them takes 70 µs."""
        parts = urlsplit(self.url)
        if not self.may_use_proxy or proxy_bypass(parts.netloc):
            return None
        url = getproxies().get(parts.scheme)
        return urlsplit(url if "//" in url else f"http://{url}") if url else None

    def _connection(self, parts: SplitResult) -> HTTPConnection:
        host, proxy = parts.hostname or "", self._proxy
        if parts.scheme == "http":
            peer = proxy or parts
            return HTTPConnection(peer.hostname or "", peer.port or 80)
        context = self.tls or ssl.create_default_context()
        if proxy is None:
            return HTTPSConnection(host, parts.port, context=context)
        connection = HTTPSConnection(proxy.hostname or "", proxy.port or 80, context=context)
        connection.set_tunnel(host, parts.port or 443, _credentials(proxy))
        return connection

    @staticmethod
    def _socket(connection: HTTPConnection) -> socket.socket:
        assert isinstance(connection.sock, socket.socket)
        return connection.sock


class ServerLink:
    """The connections to the server, for one event loop. Every failure is a LinkError."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._connection: HTTPConnection | None = None
        self._exchanges: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def post(self, path: str, content: bytes, content_type: str) -> HttpAnswer:
        """POST and return the response; one request at a time.

        Raises:
            LinkError: no connection, or no complete response within EXCHANGE_SECONDS.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="batches", daemon=True)
            self._thread.start()
        future: Future[HttpAnswer] = Future()
        answer = asyncio.wrap_future(future)

        def exchange() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(self._exchange(path, content, content_type, answer.done))
            except _FAILURES as error:
                future.set_exception(_link_error(error))

        self._exchanges.put(exchange)
        try:
            async with asyncio.timeout(EXCHANGE_SECONDS):
                return await answer
        except TimeoutError:
            self._hang_up()
            raise LinkError(f"no complete answer within {EXCHANGE_SECONDS:g} s") from None

    async def lines(self, path: str, silence_seconds: float) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a GET that does not end; a first empty item means that it is open.

        Raises:
            LinkError: a response other than 200, or no complete line for `silence_seconds`.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[bytes | LinkError | None] = asyncio.Queue()
        sockets: list[socket.socket] = []

        def read() -> None:
            failure: LinkError | None = None
            try:
                for line in self._stream(path, silence_seconds, sockets):
                    _call_in_loop(loop, arrived.put_nowait, line)
            except _FAILURES as error:
                failure = _link_error(error)
            except LinkError as error:
                failure = error
            _call_in_loop(loop, arrived.put_nowait, failure)

        threading.Thread(target=read, name="commands", daemon=True).start()
        try:
            timeout_seconds = CONNECT_SECONDS + silence_seconds
            while (line := await _next_line(arrived, timeout_seconds)) is not None:
                yield line
        finally:
            for opened in sockets:  # wakes the thread
                _shut(opened)

    def close(self) -> None:
        """Close without waiting; an exchange in flight fails, and its result is ignored."""
        self._exchanges.put(None)
        self._hang_up()

    def _hang_up(self) -> None:
        connection = self._connection
        if connection is not None and isinstance(connection.sock, socket.socket):
            _shut(connection.sock)

    def _serve(self) -> None:
        while (exchange := self._exchanges.get()) is not None:
            exchange()
        if self._connection is not None:
            self._connection.close()

    def _exchange(
        self, path: str, content: bytes, content_type: str, is_abandoned: Callable[[], bool]
    ) -> HttpAnswer:
        was_connected = self._connection is not None
        try:
            return self._try_exchange(path, content, content_type)
        except _FAILURES:
            if not was_connected or is_abandoned():
                raise
        # The server may close an idle connection at any time; it recognizes a duplicate batch.
        return self._try_exchange(path, content, content_type)

    def _try_exchange(self, path: str, content: bytes, content_type: str) -> HttpAnswer:
        try:
            # Without a socket, the server has closed it: http.client would open another one by
            # itself, which waits for an answer no longer than for a connection.
            if self._connection is None or self._connection.sock is None:
                self._connection = self._target.connect()
                self._connection.sock.settimeout(ANSWER_SECONDS)
            self._target.request(
                self._connection, "POST", path, body=content, content_type=content_type
            )
            return _read(self._connection.getresponse())
        except BaseException:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()
            raise

    def _stream(
        self, path: str, silence_seconds: float, sockets: list[socket.socket]
    ) -> Iterator[bytes]:
        connection = self._target.connect()
        try:
            sockets.append(connection.sock)
            connection.sock.settimeout(silence_seconds)
            self._target.request(connection, "GET", path)
            with connection.getresponse() as response:
                if response.status != 200:
                    raise LinkError(_read(response).describe())
                yield b""
                while line := response.readline(MAXIMUM_LINE_BYTES):
                    yield line
        finally:
            connection.close()


def _call_in_loop(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
        loop.call_soon_threadsafe(callback, *arguments)


def _link_error(error: OSError | HTTPException | ValueError) -> LinkError:
    return LinkError(printable(f"{type(error).__name__} {error}".strip()[:200]))


async def _next_line(
    arrived: asyncio.Queue[bytes | LinkError | None], timeout_seconds: float
) -> bytes | None:
    """Return the next line. Not `asyncio.wait_for`: in Python 3.11 it can lose a cancellation."""
    try:
        async with asyncio.timeout(timeout_seconds):
            line = await arrived.get()
    except TimeoutError:
        raise LinkError(f"no complete line within {timeout_seconds:g} s") from None
    if isinstance(line, LinkError):
        raise line
    return line


def _shut(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)


def _read(response: HTTPResponse) -> HttpAnswer:
    headers = {name.lower(): value for name, value in response.getheaders()}
    answer = HttpAnswer(response.status, headers, response.read(MAXIMUM_ANSWER_BYTES))
    if not response.isclosed():
        raise HTTPException(f"the answer is longer than {MAXIMUM_ANSWER_BYTES} bytes")
    return answer


def _credentials(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"proxy-authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
