"""A rank waits until rank 0 listens, before it calls torch, which reports what is wrong."""

from __future__ import annotations

import inspect
import socket
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from paceline import rendezvous

ADDRESS = "127.0.0.1"


class Master:
    """The store of rank 0, which listens some time after the other ranks have come."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind((ADDRESS, 0))
        self.port: int = self._socket.getsockname()[1]
        self.is_listening = False

    def listen(self) -> None:
        self.is_listening = True  # before it does: a rank may be faster than this line
        self._socket.listen()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def master() -> Iterator[Master]:
    created = Master()
    yield created
    created.close()


@pytest.fixture
def torch_module(master: Master, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for torch's module; notes of each call whether rank 0 listened."""
    module: Any = ModuleType("torch.distributed.rendezvous")
    module.calls = []

    def create(*args: Any, **kwargs: Any) -> str:
        module.calls.append((args, kwargs, master.is_listening))
        return "store"

    module._create_c10d_store = create
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rendezvous.wait_in_torch()
    return module


@pytest.fixture
def is_late(monkeypatch: pytest.MonkeyPatch, master: Master) -> threading.Thread:
    """A thread that listens once a rank has tried to connect."""
    tried = threading.Event()
    connect = socket.create_connection

    def connecting(*args: Any, **kwargs: Any) -> socket.socket:
        try:
            return connect(*args, **kwargs)
        finally:
            tried.set()

    def listen() -> None:
        tried.wait()
        master.listen()

    monkeypatch.setattr(socket, "create_connection", connecting)
    thread = threading.Thread(target=listen)
    thread.start()
    return thread


def test_a_rank_waits_until_rank_0_listens(
    master: Master, torch_module: Any, is_late: threading.Thread
) -> None:
    created = torch_module._create_c10d_store(ADDRESS, master.port, 3, 8, "timeout", use_libuv=True)
    is_late.join()
    arguments = (ADDRESS, master.port, 3, 8, "timeout")
    assert torch_module.calls == [(arguments, {"use_libuv": True}, True)]
    assert created == "store"


def test_rank_0_does_not_wait_for_itself(master: Master, torch_module: Any) -> None:
    torch_module._create_c10d_store(ADDRESS, master.port, 0, 8, "timeout")
    assert [listened for _, _, listened in torch_module.calls] == [False]


def test_a_store_that_never_listens_is_left_to_torch(
    master: Master, torch_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "STORE_SECONDS", 0.05)
    torch_module._create_c10d_store(ADDRESS, master.port, 3, 8, "timeout")
    assert [listened for _, _, listened in torch_module.calls] == [False]


@pytest.mark.parametrize(
    ("address", "port"),
    [(None, 1), (7, 1), ("no.such.host.invalid", 1), ("x" * 70, 1), (ADDRESS, 70_000)],
)
def test_an_address_that_is_wrong_is_left_to_torch(
    torch_module: Any, monkeypatch: pytest.MonkeyPatch, address: Any, port: int
) -> None:
    monkeypatch.setattr(rendezvous, "STORE_SECONDS", 0.05)
    torch_module._create_c10d_store(address, port, 3, 8, "timeout")
    assert len(torch_module.calls) == 1


def test_each_torch_is_changed_once(torch_module: Any) -> None:
    before = torch_module._create_c10d_store
    rendezvous.wait_in_torch()
    assert torch_module._create_c10d_store is before


def test_the_installed_torch_has_the_function() -> None:
    """Otherwise a restart would be slower, without an error."""
    import torch.distributed  # noqa: F401, PLC0415 - the other tests do not need it

    create = vars(sys.modules["torch.distributed.rendezvous"])["_create_c10d_store"]
    assert list(inspect.signature(create).parameters)[:3] == ["hostname", "port", "rank"]
