"""When batches are packed: at the end of a sweep, and as heartbeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline_agent.forward.forwarder import Packer
from paceline_agent.forward.outbox import Outbox
from paceline_agent.forward.spool import Spool


class At:
    """A packer with its outbox, its spool and a fake clock."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.seconds)
        self.outbox = Outbox()
        self.spool = Spool(directory, 1 << 20)
        self.packer = Packer("a", self.outbox, self.spool, flush_seconds=0.5, heartbeat_seconds=1.0)
        self.packer.flush()

    def is_packed(self, seconds: float) -> bool:
        """Return whether a sweep that completes after `seconds` is packed immediately."""
        self.seconds += seconds
        self.packer.on_collected()
        is_urgent = self.outbox.urgent.is_set()
        if is_urgent:
            self.packer.flush()
        return is_urgent


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> At:
    return At(tmp_path, monkeypatch)


def test_each_sweep_is_packed_as_soon_as_it_is_complete(at: At) -> None:
    assert [at.is_packed(1.0) for _ in range(3)] == [True, True, True]


def test_a_burst_does_not_create_a_batch_per_call(at: At) -> None:
    assert sum(at.is_packed(0.1) for _ in range(30)) <= 6


async def test_an_idle_packer_packs_a_heartbeat_every_second(at: At) -> None:
    heartbeats = []
    for _ in range(10):
        at.seconds += 0.5
        at.packer.flush()
        heartbeats.append(len(at.spool))
        while len(at.spool):  # as if the server had stored it
            at.spool.remove(await at.spool.head())
    assert heartbeats == [0, 1] * 5


def test_a_node_that_the_server_throttles_keeps_its_own_phase(at: At) -> None:
    at.packer.pace(3.0)
    assert not at.is_packed(10.0)
    at.packer.pace(0.0)
    assert at.is_packed(0.0)
