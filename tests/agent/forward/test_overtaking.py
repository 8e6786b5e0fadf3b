"""After an outage: current data of the node overtakes the backlog, data of its ranks does not."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline_agent.forward.spool import Spool
from paceline_wire.batch import AgentHello, Batch, RankState, Sample

Fixture = Callable[..., Any]
WAITING = 150


def fill(directory: Path) -> list[tuple[str, int]]:
    """Fill the spool as an earlier agent left it. Return its batches in order."""
    spool = Spool(directory / "spool", 8 << 20)
    boot_id = spool.begin_boot()
    for sequence in range(WAITING):
        name = {"agent_id": directory.name, "boot_id": boot_id, "sequence": sequence}
        spool.append(Batch(packed_ns=1, samples=[Sample("paceline_test", {}, 1.0, 1)], **name))
    return [(boot_id, sequence) for sequence in range(WAITING)]


def names(batches: list[Batch]) -> list[tuple[str, int]]:
    return [(batch.boot_id, batch.sequence) for batch in batches]


def has_caught_up(server: Any) -> bool:
    """Return whether the overtaking boot has taken over everything."""
    newest = max(batch.boot_id for batch in server.batches)
    return any(batch.boot_id == newest and not batch.overtakes for batch in list(server.batches))


def test_current_data_overtakes_a_backlog_and_data_of_ranks_stays_in_order(
    start_agent: Fixture,
    server: Any,
    wait_for: Fixture,
    tmp_path: Path,
    make_rank: Fixture,
    spans_of: Fixture,
) -> None:
    backlog = fill(tmp_path / "node-0")
    server.refuse = lambda _: time.sleep(0.02)  # so that the backlog lasts
    agent = start_agent()
    wait_for(lambda: server.batches)
    rank = make_rank(agent.directory)

    def all_sent() -> bool:
        rank.write(10)
        return len(server.batches) > WAITING and has_caught_up(server)

    wait_for(all_sent, seconds=60)
    wait_for(lambda: rank.written == len(spans_of(server)))
    assert agent.stop() == 0

    received = server.batches
    old = [index for index, batch in enumerate(received) if batch.packed_ns == 1]
    assert names([received[index] for index in old]) == backlog
    overtaking = [index for index, batch in enumerate(received) if batch.overtakes]
    assert overtaking[0] < 10, "the first live news follow the first answer"
    assert isinstance(received[overtaking[0]].events[0], AgentHello)
    during = [received[index] for index in overtaking if index < old[-1]]
    assert sum(len(batch.samples) for batch in during) > 100
    assert not any(batch.spans for batch in received if batch.overtakes)
    states = [
        index
        for index, batch in enumerate(received)
        if batch.spans or any(isinstance(event, RankState) for event in batch.events)
    ]
    assert min(states) > old[-1], "a step means nothing without those before it"
    assert spans_of(server) == list(range(rank.written))
    assert server.duplicates == 0
    for boot_id in {batch.boot_id for batch in received}:
        of_boot = [batch.sequence for batch in received if batch.boot_id == boot_id]
        assert of_boot == list(range(len(of_boot)))


def test_an_agent_killed_while_data_overtakes_leaves_nothing_unsent_or_sent_twice(
    start_agent: Fixture,
    server: Any,
    wait_for: Fixture,
    tmp_path: Path,
    make_rank: Fixture,
    spans_of: Fixture,
) -> None:
    backlog = fill(tmp_path / "node-0")
    server.refuse = lambda _: time.sleep(0.02)
    first = start_agent()
    wait_for(lambda: server.batches)
    rank = make_rank(first.directory)
    wait_for(lambda: rank.write(10) or any(batch.overtakes for batch in server.batches))
    wait_for(lambda: rank.write(10) or rank.written > 300)
    first.stop(signal.SIGKILL)
    assert len(server.batches) < WAITING, "too late to be of interest"
    rank.write(50)
    second = start_agent()
    wait_for(lambda: len(spans_of(server)) >= rank.written, seconds=60)
    wait_for(lambda: has_caught_up(server), seconds=60)
    assert second.stop() == 0
    assert spans_of(server) == list(range(rank.written))
    assert [name for name in names(server.batches) if name[0] == backlog[0][0]] == backlog
