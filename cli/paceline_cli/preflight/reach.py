"""Can two nodes open a connection? Asked before a process group is made of them.

A backend that cannot connect tries for minutes and then speaks of sockets; this is over in its
patience and says which address did not answer.
"""

from __future__ import annotations

import socket
from typing import Protocol

_SEPARATOR = "|"


class Store(Protocol):
    """Of torch.distributed: what both nodes can write to and read from."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


class Unreachable(RuntimeError):  # noqa: N818 - a state of the network
    """One sentence says who did not reach whom."""


def listen(store: Store, key: str, address: str, seconds: float) -> None:
    """The side that is connected to. Its outcome is the other's, read with `outcome`."""
    with socket.create_server((address, 0)) as server:
        server.settimeout(seconds)
        store.set(f"{key}/listens", f"{address}{_SEPARATOR}{server.getsockname()[1]}")
        try:
            server.accept()[0].close()
        except TimeoutError:
            return  # the other one says why


def connect(store: Store, key: str, seconds: float) -> None:
    address, port = store.get(f"{key}/listens").decode().split(_SEPARATOR)
    said = ""
    try:
        socket.create_connection((address, int(port)), timeout=seconds).close()
    except OSError as error:
        said = f"no connection to {address}: {error.strerror or error}"
    store.set(f"{key}/outcome", said or "reached")


def outcome(store: Store, key: str) -> None:
    """For all ranks of both nodes. Raises Unreachable."""
    said = store.get(f"{key}/outcome").decode()
    if said != "reached":
        raise Unreachable(said)
