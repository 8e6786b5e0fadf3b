"""Copies on their way to and from another node, over TCP connections of their own.

The ranks of a job share a secret, which they exchange over their process group. Client and server
prove to each other that they know it, and every message is authenticated (HMAC-SHA-256); what
follows a message is covered by the SHA-256 in it. Content is encrypted only with
`PACELINE_PEER_TLS`. All of it runs in threads, with limits: of message size, of time without
progress, of connections, and of the bytes that a holder takes.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic
from typing import Self, TypeAlias

import msgspec

from paceline.checkpoints.errors import CheckpointError

_log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
PROGRESS_SECONDS = 30.0  # without a byte, a connection is dead
CHUNK_BYTES = 1 << 20
BURST_BYTES = 4 * CHUNK_BYTES
MOST_CONNECTIONS = 32
_MOST_MESSAGE_BYTES = 64 * 1024
_NONCE_BYTES = 32
_PAUSE_SECONDS = 0.5  # after a connection could not be accepted
_LENGTH = struct.Struct("<I")
# "Lower effort" (RFC 8622): routers that know it forward everything else first.
_LOWER_EFFORT = 1 << 2


class SendCopy(msgspec.Struct, frozen=True, tag=True):
    """A rank sends a copy: the file's first block; the rest of the file follows."""

    block: bytes


class RequestCopy(msgspec.Struct, frozen=True, tag=True):
    """A rank wants a copy."""

    generation: int
    step: int
    rank: int


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer; to a request with the first block, and the rest of the file follows."""

    refusal: str | None = None
    block: bytes = b""


Message: TypeAlias = SendCopy | RequestCopy | Reply
_MESSAGES: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class TokenBucket:
    """A limit of bytes per second."""

    def __init__(self, bytes_per_second: float, burst_bytes: int = BURST_BYTES) -> None:
        self._rate = bytes_per_second
        self._burst = burst_bytes
        self._tokens = float(burst_bytes)
        self._filled_at: float | None = None

    def take(self, count: int, now: float) -> float:
        """Take tokens. Return the seconds to wait before sending."""
        if self._filled_at is not None:
            gained = (now - self._filled_at) * self._rate
            self._tokens = min(self._burst, self._tokens + gained)
        self._filled_at = now
        self._tokens -= count
        return max(0.0, -self._tokens / self._rate)


class PeerConnection:
    """An authenticated connection. All methods raise OSError or CheckpointError if it fails."""

    def __init__(self, connected: socket.socket, secret: bytes, *, is_client: bool) -> None:
        self._socket = connected
        connected.settimeout(PROGRESS_SECONDS)
        own = secrets.token_bytes(_NONCE_BYTES)
        connected.sendall(own)
        other = self._receive_exactly(_NONCE_BYTES)
        nonces = own + other if is_client else other + own
        keys = {
            role: hmac.digest(secret, role + nonces, "sha256")
            for role in (b"client", b"server", b"client messages", b"server messages")
        }
        own_role, other_role = (b"client", b"server") if is_client else (b"server", b"client")
        # The client proves itself first, so that a server answers no one else.
        if is_client:
            connected.sendall(keys[own_role])
        proof = self._receive_exactly(len(keys[other_role]))
        if not hmac.compare_digest(proof, keys[other_role]):
            raise CheckpointError("the other end of a connection does not know the job's secret")
        if not is_client:
            connected.sendall(keys[own_role])
        self._send_key, self._receive_key = (
            keys[own_role + b" messages"],
            keys[other_role + b" messages"],
        )
        self._sent = self._received = 0

    @classmethod
    def open(cls, address: tuple[str, int], secret: bytes, tls: Path | None) -> Self:
        """Connect to a server."""
        connected = socket.create_connection(address, timeout=CONNECT_SECONDS)
        try:
            _mark_lower_effort(connected)
            if tls is not None:
                connected = _tls_context(tls, ssl.PROTOCOL_TLS_CLIENT).wrap_socket(connected)
            return cls(connected, secret, is_client=True)
        except BaseException:
            connected.close()
            raise

    def send(self, message: Message) -> None:
        content = msgspec.msgpack.encode(message)
        code = _code(self._send_key, self._sent, content)
        self._sent += 1
        self._socket.sendall(_LENGTH.pack(len(content)) + code + content)

    def receive(self) -> Message:
        (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if length > _MOST_MESSAGE_BYTES:
            raise CheckpointError(f"a message of {length} bytes is too long")
        code = self._receive_exactly(hashlib.sha256().digest_size)
        content = self._receive_exactly(length)
        if not hmac.compare_digest(code, _code(self._receive_key, self._received, content)):
            raise CheckpointError("a message is not of this job")
        self._received += 1
        try:
            return _MESSAGES.decode(content)
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"a message is not valid: {error}") from error

    def send_content(
        self, content: memoryview, bucket: TokenBucket | None, closed: threading.Event
    ) -> None:
        for begin in range(0, len(content), CHUNK_BYTES):
            chunk = content[begin : begin + CHUNK_BYTES]
            if bucket is not None:
                closed.wait(bucket.take(len(chunk), monotonic()))
            if closed.is_set():
                raise CheckpointError("the training ends")
            self._socket.sendall(chunk)

    def receive_content(
        self, into: memoryview, update: Callable[[memoryview], object] | None = None
    ) -> None:
        """Receive as many bytes. `update`: called with each part of them, such as to hash it."""
        received = passed = 0
        while received < len(into):
            count = self._socket.recv_into(into[received : received + CHUNK_BYTES])
            if count == 0:
                raise CheckpointError("the connection was closed by the other end")
            received += count
            is_part = received - passed >= CHUNK_BYTES or received == len(into)
            if update is not None and is_part:
                update(into[passed:received])
                passed = received

    def close(self) -> None:
        self._socket.close()

    def _receive_exactly(self, count: int) -> bytes:
        content = bytearray(count)
        self.receive_content(memoryview(content))
        return bytes(content)


class CopyServer:
    """Takes copies of other ranks, and gives them back, in threads."""

    def __init__(
        self,
        host: str,
        secret: bytes,
        tls: Path | None,
        serve: Callable[[PeerConnection, Message], None],
    ) -> None:
        """Listen at a free port. Raises OSError.

        `serve`: answers one message of a connection; called in the thread of the connection.
        """
        family = socket.getaddrinfo(host, None)[0][0]
        self._listener = socket.create_server((host, 0), family=family, backlog=MOST_CONNECTIONS)
        self._secret = secret
        self._tls = None if tls is None else _tls_context(tls, ssl.PROTOCOL_TLS_SERVER)
        self._serve = serve
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._closed = threading.Event()
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="paceline-copies", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept` in the thread
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:  # closed, or out of file descriptors for a while
                if self._closed.wait(_PAUSE_SECONDS):
                    return
                continue
            if not self._free.acquire(blocking=False):
                connected.close()
                continue
            threading.Thread(
                target=self._answer, args=(connected,), name="paceline-copies", daemon=True
            ).start()

    def _answer(self, connected: socket.socket) -> None:
        try:
            with closing(connected):
                connected.settimeout(CONNECT_SECONDS)
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if self._tls is not None:
                    connected = self._tls.wrap_socket(connected, server_side=True)
                with closing(connected):
                    connection = PeerConnection(connected, self._secret, is_client=False)
                    # A sender is silent between two copies.
                    connected.settimeout(None)
                    while True:
                        message = connection.receive()
                        connected.settimeout(PROGRESS_SECONDS)
                        self._serve(connection, message)
                        connected.settimeout(None)
        except (OSError, CheckpointError) as error:
            _log.debug("a connection for copies ended: %s", error)
        finally:
            self._free.release()


def address_towards(host: str | None) -> str:
    """Return this node's address on the way to `host`."""
    if host is not None:
        with suppress(OSError):
            found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, address = found[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def _code(key: bytes, number: int, content: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "little") + content, "sha256")


def _mark_lower_effort(connected: socket.socket) -> None:
    with suppress(OSError):  # the mark is a courtesy
        if connected.family == socket.AF_INET6:
            connected.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _LOWER_EFFORT)
        else:
            connected.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _LOWER_EFFORT)


def _tls_context(file: Path, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    """Return a context in which both ends show the certificate of the file, and expect it."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False  # one certificate for all nodes
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(file)
    context.load_verify_locations(file)
    return context
