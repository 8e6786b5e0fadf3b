"""HTTP to the server: one kept connection for batches, one for the stream of commands.

The standard library's client in threads of our own: of the libraries that speak HTTP from an
event loop, each costs more memory than all collectors, and several times the CPU of a whole sweep
for each batch. The threads are daemons: one that waits for a dead server holds up no exit.
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
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import NamedTuple, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from paceline_agent.errors import LinkError

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 10.0
MAXIMUM_ANSWER_BYTES = 1 << 20
MAXIMUM_LINE_BYTES = 8 << 20

T = TypeVar("T")


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in small letters
    content: bytes


@dataclass(frozen=True, slots=True)
class Target:
    """Where the server is and how it is reached."""

    url: str
    token: str | None = None
    may_use_proxy: bool = True

    def connect(self) -> HTTPConnection:
        """Raises OSError."""
        parts = urlsplit(self.url)
        connection = self._connection(parts, self._proxy(parts))
        connection.timeout = CONNECT_SECONDS
        connection.connect()
        self._socket(connection).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def get(self, path: str) -> Answer:
        """On a connection of its own, while the caller waits. Raises LinkError."""
        try:
            with contextlib.closing(self.connect()) as connection:
                self.request(connection, "GET", path)
                return _read(connection.getresponse())
        except (OSError, HTTPException) as error:
            raise _link_error(error) from error

    def request(self, connection: HTTPConnection, method: str, path: str, **more: object) -> None:
        parts = urlsplit(self.url)
        whole = parts.path.rstrip("/") + path
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        proxy = self._proxy(parts)
        if proxy is not None and parts.scheme == "http":
            whole = f"http://{parts.netloc}{whole}"
            headers |= {"host": parts.netloc, **_credentials(proxy)}
        body = more.pop("body", None)
        assert body is None or isinstance(body, bytes)
        headers |= {name.replace("_", "-"): str(value) for name, value in more.items()}
        connection.request(method, whole, body=body, headers=headers)

    def _proxy(self, parts: SplitResult) -> SplitResult | None:
        """As HTTP_PROXY, HTTPS_PROXY and NO_PROXY have it."""
        if not self.may_use_proxy or proxy_bypass(parts.netloc):
            return None
        url = getproxies().get(parts.scheme)
        return urlsplit(url if "//" in url else f"http://{url}") if url else None

    def _connection(self, parts: SplitResult, proxy: SplitResult | None) -> HTTPConnection:
        host = parts.hostname or ""
        if parts.scheme == "http":
            place = proxy or parts
            return HTTPConnection(place.hostname or "", place.port or 80)
        context = ssl.create_default_context()
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
    """All methods belong to one event loop. Whatever fails on the way is a LinkError."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._connection: HTTPConnection | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def post(self, path: str, content: bytes, content_type: str) -> Answer:
        """One at a time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="batches", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def exchange() -> None:
            try:
                answer = self._exchange(path, content, content_type)
            except (OSError, HTTPException) as error:
                _hand_over(loop, _fail, future, _link_error(error))
            else:
                _hand_over(loop, _settle, future, answer)

        self._calls.put(exchange)
        return await future

    async def lines(self, path: str, silence_seconds: float) -> AsyncGenerator[bytes, None]:
        """The lines of a GET that does not end; the first item, empty, says that it is open.

        Raises LinkError for an answer other than 200, and after so long without a line.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[bytes | LinkError | None] = asyncio.Queue()
        sockets: list[socket.socket] = []

        def read() -> None:
            last: LinkError | None = None
            try:
                for line in self._stream(path, silence_seconds, sockets):
                    _hand_over(loop, arrived.put_nowait, line)
            except (OSError, HTTPException) as error:
                last = _link_error(error)
            except LinkError as error:
                last = error
            _hand_over(loop, arrived.put_nowait, last)

        threading.Thread(target=read, name="commands", daemon=True).start()
        try:
            while (line := await arrived.get()) is not None:
                if isinstance(line, LinkError):
                    raise line
                yield line
        finally:
            for opened in sockets:  # wakes the thread
                _shut(opened)

    def close(self) -> None:
        """Without waiting: an exchange under way ends as a failure that nobody awaits."""
        self._calls.put(None)
        connection = self._connection
        if connection is not None and isinstance(connection.sock, socket.socket):
            _shut(connection.sock)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
        if self._connection is not None:
            self._connection.close()

    def _exchange(self, path: str, content: bytes, content_type: str) -> Answer:
        kept = self._connection is not None
        try:
            return self._try_exchange(path, content, content_type)
        except (OSError, HTTPException):
            if not kept:
                raise
        # The server may close a kept connection at any time; what it had stored, it knows again.
        return self._try_exchange(path, content, content_type)

    def _try_exchange(self, path: str, content: bytes, content_type: str) -> Answer:
        try:
            if self._connection is None:
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
                    raise LinkError(f"{response.status} {_text(response)}")
                yield b""
                while line := response.readline(MAXIMUM_LINE_BYTES):
                    yield line
        finally:
            connection.close()


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _hand_over(loop: asyncio.AbstractEventLoop, take: Callable[..., object], *what: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop closed meanwhile
        loop.call_soon_threadsafe(take, *what)


def _link_error(error: OSError | HTTPException) -> LinkError:
    return LinkError(f"{type(error).__name__} {error}".rstrip())


def _shut(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)


def _read(response: HTTPResponse) -> Answer:
    headers = {name.lower(): value for name, value in response.getheaders()}
    answer = Answer(response.status, headers, response.read(MAXIMUM_ANSWER_BYTES))
    if not response.isclosed():
        raise HTTPException("the answer is longer than any of ours")
    return answer


def _text(response: HTTPResponse) -> str:
    return response.read(200).decode(errors="replace")


def _credentials(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"proxy-authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
