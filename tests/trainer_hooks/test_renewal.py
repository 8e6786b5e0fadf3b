"""`resilient` without an agent, and which errors it takes for the loss of a peer."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import renewal as module
from paceline.renewal import is_lost_peer
from paceline_wire.renewal import RENEWALS, Enter, Leave, encode
from tests.waiting import wait_for

GLOO = "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242"


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_was_entered", False)
    monkeypatch.setattr("paceline.session._logged", set())
    monkeypatch.delenv("PACELINE_NODE_DIRECTORY", raising=False)


def test_without_an_agent_the_function_is_only_called(caplog: pytest.LogCaptureFixture) -> None:
    @module.resilient
    def add(a: int, *, b: int) -> int:
        """Add."""
        return a + b

    with caplog.at_level(logging.INFO):
        assert (add(1, b=2), add(2, b=3)) == (3, 5)
    assert (add.__name__, add.__doc__) == ("add", "Add.")
    [message] = [record.message for record in caplog.records]
    assert message.startswith("paceline.resilient: not started by `paceline run`")


def test_with_an_agent_of_an_older_version_the_function_is_only_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PACELINE_NODE_DIRECTORY", str(tmp_path))

    @module.resilient
    def fail() -> None:
        raise RuntimeError(GLOO)

    with pytest.raises(RuntimeError, match="Connection closed"):
        fail()
    assert "no link to the agent" in caplog.text


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Return the listening socket of an agent that accepts no connection by itself."""
    monkeypatch.setenv("PACELINE_NODE_DIRECTORY", str(tmp_path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / RENEWALS))
        listener.listen(0)
        yield listener


def test_a_function_starts_although_the_agent_accepts_no_connection(
    agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process can have filled the queue of connections of an agent that is hung."""
    monkeypatch.setattr(module, "_SEND_SECONDS", 1)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(agent.getsockname())
        assert module.resilient(lambda: 3)() == 3


def _interrupt(link: module._AgentLink, agent: socket.socket) -> None:
    """Order the rank to leave, while it is in its function."""
    try:
        try:
            agent.sendall(encode(Leave()))
            while True:
                time.sleep(0.01)
        finally:
            link.leave_function()
    except module._Left:
        link.leave_function()  # it may have been raised before the one above had begun


def test_an_order_to_leave_that_follows_the_one_to_enter_is_not_lost(agent: socket.socket) -> None:
    """The rank trained in a generation that had ended."""
    link = module._AgentLink.open()
    assert link is not None
    connection, _ = agent.accept()
    with connection:
        link.enter()
        _interrupt(link, connection)
        connection.sendall(encode(Enter({})) + encode(Leave()))
        assert link.wait() is not None
        wait_for(lambda: link._is_ordered, "the second order")
        with pytest.raises(module._Left):
            link.enter()
        link.leave_function()
        connection.sendall(encode(Enter({})))
        assert link.wait() is not None
        link.enter()
        link.leave_function()
    wait_for(lambda: link._is_broken, "the end of the link")
    link._connection.close()


def test_a_function_that_does_not_train_when_it_is_called_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def losses() -> Iterator[float]:
        yield 1.0

    async def train() -> None:
        pass

    module.resilient(losses)
    module.resilient(train)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "losses only creates a generator" in caplog.text


def test_an_error_of_a_lost_peer_is_recognized_in_what_it_led_to() -> None:
    def save() -> None:
        try:
            raise RuntimeError(GLOO)
        except RuntimeError as error:
            raise ValueError("the checkpoint is incomplete") from error

    with pytest.raises(ValueError, match="incomplete") as raised:
        save()
    assert is_lost_peer(raised.value)
    assert is_lost_peer(RuntimeError(GLOO))
    assert not is_lost_peer(ValueError("batch is broken"))
    assert not is_lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_connection_of_the_script_that_is_reset_is_no_lost_peer() -> None:
    """It would wait for a generation that does not follow, and lose its error."""

    def read() -> None:
        try:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        except ConnectionResetError as error:
            raise ValueError(f"cannot read shard 3: {error}") from error

    with pytest.raises(ValueError, match="cannot read shard 3") as raised:
        read()
    assert not is_lost_peer(raised.value)
    assert not is_lost_peer(BrokenPipeError(errno.EPIPE, "Broken pipe"))
