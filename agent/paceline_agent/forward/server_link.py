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
from functools import cached_property
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import NamedTuple, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from paceline_agent.errors import LinkError
from paceline_agent.printable import printable

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 10.0  # without a byte
EXCHANGE_SECONDS = 30.0  # for a whole answer, however many bytes trickle in
MAXIMUM_ANSWER_BYTES = 1 << 20
MAXIMUM_LINE_BYTES = 8 << 20

_FAILURES = (OSError, HTTPException, ValueError)  # the last: a host's name that is none

T = TypeVar("T")


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in small letters
    content: bytes

    @property
    def is_problem(self) -> bool:
        """Our server's own words, rather than those of a proxy in front of it."""
        return "application/problem+json" in self.headers.get("content-type", "")

    def in_words(self) -> str:
        """Why it is not what was asked for."""
        if not self.is_problem:
            kind = printable(self.headers.get("content-type", "no content"))
            return f"{self.status} with {kind}, as from something in front of the server"
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
    """Where the server is and how it is reached."""

    url: str
    token: str | None = None
    may_use_proxy: bool = True

    def connect(self) -> HTTPConnection:
        """Raises OSError."""
        parts = urlsplit(self.url)
        connection = self._connection(parts)
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
        except _FAILURES as error:
            raise _link_error(error) from error

    def request(self, connection: HTTPConnection, method: str, path: str, **more: object) -> None:
        parts = urlsplit(self.url)
        whole = parts.path.rstrip("/") + path
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        proxy = self._proxy
        if proxy is not None and parts.scheme == "http":
            whole = f"http://{parts.netloc}{whole}"
            headers |= {"host": parts.netloc, **_credentials(proxy)}
        body = more.pop("body", None)
        assert body is None or isinstance(body, bytes)
        headers |= {name.replace("_", "-"): str(value) for name, value in more.items()}
        connection.request(method, whole, body=body, headers=headers)

    @cached_property
    def _proxy(self) -> SplitResult | None:
        """As HTTP_PROXY, HTTPS_PROXY and NO_PROXY have it, which to read takes 70 us."""
        parts = urlsplit(self.url)
        if not self.may_use_proxy or proxy_bypass(parts.netloc):
            return None
        url = getproxies().get(parts.scheme)
        return urlsplit(url if "//" in url else f"http://{url}") if url else None

    def _connection(self, parts: SplitResult) -> HTTPConnection:
        host, proxy = parts.hostname or "", self._proxy
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
        """One at a time. Raises LinkError."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="batches", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def exchange() -> None:
            if future.done():
                return
            try:
                answer = self._exchange(path, content, content_type, future.done)
            except _FAILURES as error:
                _hand_over(loop, _fail, future, _link_error(error))
            else:
                _hand_over(loop, _settle, future, answer)

        self._calls.put(exchange)
        try:
            async with asyncio.timeout(EXCHANGE_SECONDS):
                return await future
        except TimeoutError:
            self._hang_up()
            raise LinkError(f"no whole answer within {EXCHANGE_SECONDS:g} s") from None

    async def lines(self, path: str, silence_seconds: float) -> AsyncGenerator[bytes, None]:
        """The lines of a GET that does not end; the first item, empty, says that it is open.

        Raises LinkError for an answer other than 200, and after so long without a whole line.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[bytes | LinkError | None] = asyncio.Queue()
        sockets: list[socket.socket] = []

        def read() -> None:
            last: LinkError | None = None
            try:
                for line in self._stream(path, silence_seconds, sockets):
                    _hand_over(loop, arrived.put_nowait, line)
            except _FAILURES as error:
                last = _link_error(error)
            except LinkError as error:
                last = error
            _hand_over(loop, arrived.put_nowait, last)

        threading.Thread(target=read, name="commands", daemon=True).start()
        try:
            patience = CONNECT_SECONDS + silence_seconds
            while (line := await _next_line(arrived, patience)) is not None:
                yield line
        finally:
            for opened in sockets:  # wakes the thread
                _shut(opened)

    def close(self) -> None:
        """Without waiting: an exchange under way ends as a failure that nobody awaits."""
        self._calls.put(None)
        self._hang_up()

    def _hang_up(self) -> None:
        connection = self._connection
        if connection is not None and isinstance(connection.sock, socket.socket):
            _shut(connection.sock)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
        if self._connection is not None:
            self._connection.close()

    def _exchange(
        self, path: str, content: bytes, content_type: str, given_up: Callable[[], bool]
    ) -> Answer:
        kept = self._connection is not None
        try:
            return self._try_exchange(path, content, content_type)
        except _FAILURES:
            if not kept or given_up():
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
                    raise LinkError(_read(response).in_words())
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


def _link_error(error: OSError | HTTPException | ValueError) -> LinkError:
    return LinkError(printable(f"{type(error).__name__} {error}".strip()[:200]))


async def _next_line(
    arrived: asyncio.Queue[bytes | LinkError | None], patience_seconds: float
) -> bytes | None:
    """Not `asyncio.wait_for`: in Python 3.11 it forgets a cancellation that meets a line."""
    try:
        async with asyncio.timeout(patience_seconds):
            line = await arrived.get()
    except TimeoutError:
        raise LinkError(f"no whole line within {patience_seconds:g} s") from None
    if isinstance(line, LinkError):
        raise line
    return line


def _shut(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)


def _read(response: HTTPResponse) -> Answer:
    headers = {name.lower(): value for name, value in response.getheaders()}
    answer = Answer(response.status, headers, response.read(MAXIMUM_ANSWER_BYTES))
    if not response.isclosed():
        raise HTTPException("the answer is longer than any of ours")
    return answer


def _credentials(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"proxy-authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
