"""Alerts do not reach the server's own machine, no matter what a receiver's name resolves to."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from paceline_server.alerts.transport import LocalReceiverError, receiver_client

Resolve = Callable[..., None]


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Replace the name server: each lookup of a name returns the next list of addresses."""

    def be(*answers: list[str]) -> None:
        left = list(answers)
        real = socket.getaddrinfo

        def getaddrinfo(host: Any, port: Any, *options: Any, **more: Any) -> Any:
            name = host.decode() if isinstance(host, bytes) else host
            if name != "receiver.example":
                return real(host, port, *options, **more)
            kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
            return [(*kind, (address, port)) for address in left.pop(0)]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    return be


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("", 0)) as opened:
        opened.setblocking(False)
        yield opened


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with receiver_client(allow_local=False) as opened:
        yield opened


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["0.0.0.0"], ["127.9.9.9"], ["192.0.2.1", "127.0.0.1"], ["169.254.169.254"]],
)
def test_a_name_at_a_local_address_is_refused_before_any_connection(
    client: httpx.Client, listener: socket.socket, resolve: Resolve, addresses: list[str]
) -> None:
    resolve(addresses)
    with pytest.raises(LocalReceiverError, match="--allow-local-receivers"):
        client.post(f"http://receiver.example:{listener.getsockname()[1]}/", timeout=5.0)
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_the_connection_goes_to_the_address_that_was_checked(
    client: httpx.Client, listener: socket.socket, resolve: Resolve
) -> None:
    own = own_address()
    resolve([own], ["127.0.0.1"])  # a second lookup would lead to this machine
    port = listener.getsockname()[1]
    with pytest.raises(httpx.ReadTimeout):
        client.post(f"http://receiver.example:{port}/hook", timeout=1.0)
    connection, _ = listener.accept()
    with connection:
        assert connection.getsockname()[0] == own
        head = connection.recv(65536).decode()
    assert head.startswith("POST /hook HTTP/1.1\r\n")
    assert f"host: receiver.example:{port}" in head.lower()


def test_the_next_address_is_tried_if_one_does_not_answer(
    client: httpx.Client, listener: socket.socket, resolve: Resolve
) -> None:
    resolve(["255.255.255.255", own_address()])
    with pytest.raises(httpx.ReadTimeout):
        client.post(f"http://receiver.example:{listener.getsockname()[1]}/", timeout=1.0)
    listener.accept()[0].close()


def own_address() -> str:
    """Return an address of this machine that is not a loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("no address but loopback")
        address: str = probe.getsockname()[0]
    return address
