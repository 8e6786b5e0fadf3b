"""Tests whether two nodes can connect, before a process group is created.

A backend that cannot connect retries for minutes and then reports a socket error. This test has a
timeout and reports which address did not respond.
"""

from __future__ import annotations

import socket
from typing import Protocol

_SEPARATOR = "|"


class Store(Protocol):
    """The part of torch.distributed's store used here; both nodes read and write it."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


class Unreachable(RuntimeError):  # noqa: N818 - a state of the network
    """Two nodes cannot connect; the message is one sentence."""


def listen(store: Store, key: str, address: str, seconds: float) -> None:
    """Accept the connection; the other node stores the outcome, see `outcome`."""
    with socket.create_server((address, 0)) as server:
        server.settimeout(seconds)
        store.set(f"{key}/listens", f"{address}{_SEPARATOR}{server.getsockname()[1]}")
        try:
            server.accept()[0].close()
        except TimeoutError:
            return  # the other node reports why


def connect(store: Store, key: str, seconds: float) -> None:
    address, port = store.get(f"{key}/listens").decode().split(_SEPARATOR)
    message = ""
    try:
        socket.create_connection((address, int(port)), timeout=seconds).close()
    except OSError as error:
        message = f"no connection to {address}: {error.strerror or error}"
    store.set(f"{key}/outcome", message or "reached")


def outcome(store: Store, key: str) -> None:
    """Read the outcome, on all ranks of both nodes. Raises Unreachable."""
    message = store.get(f"{key}/outcome").decode()
    if message != "reached":
        raise Unreachable(message)
