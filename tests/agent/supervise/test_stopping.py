"""SIGTERM: within five seconds the ranks have ended and everything that could be sent was sent.

`benchmarks/agent_stop.py` measures how long that takes; here the agent must end by itself, while
its server would block it for much longer.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline_wire.batch import Batch, CommandResult, RankExited, RankStarted
from paceline_wire.commands import RankSpec, StartRanks
from paceline_wire.topology import Topology

Fixture = Callable[..., Any]
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def start_ranks(server: Any, wait_for: Fixture, program: str) -> None:
    command = StartRanks(
        command_id=1,
        job="j",
        generation=0,
        topology=Topology(dp=2),
        ranks=[RankSpec(rank, rank) for rank in range(2)],
        argv=[sys.executable, "-c", program],
        master_address="127.0.0.1",
        master_port=29500,
    )
    server.commands.append(command)
    wait_for(lambda: server.events(CommandResult))


def ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.split("SigIgn:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1)


def test_a_dead_server_does_not_delay_the_exit_and_all_batches_are_kept(
    start_agent: Fixture, server: Any, wait_for: Fixture, processes_with: Fixture
) -> None:
    agent = start_agent()
    wait_for(lambda: server.batches)
    start_ranks(server, wait_for, STUBBORN)
    wait_for(lambda: [ignores_sigterm(e.pid) for e in server.events(RankStarted)] == [True, True])
    server.stop()
    before = len(server.batches)
    assert agent.stop() == 0
    assert processes_with(f"PACELINE_NODE_DIRECTORY={agent.directory}") == []
    server.start()
    start_agent()
    wait_for(lambda: len(server.events(RankExited)) == 2)
    assert {event.signal for event in server.events(RankExited)} == {signal.SIGKILL}
    boot_id = server.batches[0].boot_id
    found = [batch.sequence for batch in server.batches if batch.boot_id == boot_id]
    assert found == list(range(len(found)))
    assert len(found) > before


def test_a_server_that_never_responds_does_not_delay_the_exit(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    agent = start_agent()
    wait_for(lambda: len(server.batches) >= 2)
    asked, released = threading.Event(), threading.Event()

    def hold(_: Batch) -> None:
        asked.set()
        released.wait(60)

    server.refuse = hold
    try:
        assert asked.wait(30)
        assert agent.stop() == 0
        assert not released.is_set(), "it ended by itself"
    finally:
        released.set()


def test_a_second_agent_stops_with_a_message_and_can_replace_a_killed_one(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    first = start_agent()
    wait_for(lambda: server.batches)
    second = start_agent()
    assert second.process.wait(60) == 1
    assert f"another agent uses {first.directory}; stop it, or give" in second.log_text()
    assert "Traceback" not in second.log_text()
    before = len(server.batches)
    wait_for(lambda: len(server.batches) > before + 2)
    assert len({batch.boot_id for batch in server.batches}) == 1, "the first continues undisturbed"
    first.stop(signal.SIGKILL)
    third = start_agent()
    wait_for(lambda: len({batch.boot_id for batch in server.batches}) == 2)
    assert third.stop() == 0
