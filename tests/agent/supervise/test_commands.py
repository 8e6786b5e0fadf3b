"""Commands to ranks: from the stream to the control page, and the responses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline_wire.batch import CommandResult, RankAcknowledged, RankExited, RankState
from paceline_wire.commands import Burst, ControlRanks, RankSpec, StartRanks
from paceline_wire.topology import Topology

Fixture = Callable[..., Any]

# A minimal trainer: once it may, it creates a ring; it obeys one command and exits.
TRAINER = """
import os, time
from pathlib import Path
from paceline_wire import ring
from paceline_wire.ring import Identity
from paceline_wire.topology import Coordinates, Topology
rank, job = int(os.environ["RANK"]), os.environ["PACELINE_JOB"]
work = Path(os.environ["WORK"])
(work / f"{rank}.imported").touch()
while not (work / "go").exists():
    time.sleep(0.01)
time.sleep(0.3 * rank)
identity = Identity(
    job=job, generation=0, rank=rank, local_rank=rank, world_size=2, topology=Topology(dp=2),
    coordinates=Coordinates(dp_rank=rank), pid=os.getpid(), host="here", clock_offset_ns=0,
    started_ns=1)
path = Path(os.environ["PACELINE_RING_DIRECTORY"]) / f"{job}.g0.r{rank}.ring"
ring_file = ring.create(path, identity, 64)
while not ring_file.control[ring.CONTROL_COMMAND]:
    time.sleep(0.01)
step = ring_file.control[ring.CONTROL_TARGET_STEP] + 2
ring_file.state[ring.STATE_STEP] = step
ring_file.state[ring.STATE_STATUS] = ring.Status.FINISHED
ring_file.control[ring.ACK_STATUS] = ring.AckStatus.DONE
ring_file.control[ring.ACK_STEP] = step
ring_file.control[ring.ACK_COMMAND] = ring_file.control[ring.CONTROL_COMMAND]
"""


def test_checkpoint_and_stop_is_acknowledged_before_the_ranks_exit(
    start_agent: Fixture, server: Any, wait_for: Fixture, tmp_path: Path
) -> None:
    agent = start_agent()
    server.commands.append(
        StartRanks(
            command_id=1,
            job="job-a",
            generation=0,
            topology=Topology(dp=2),
            ranks=[RankSpec(0, 0), RankSpec(1, 1)],
            argv=[sys.executable, "-c", TRAINER],
            environment={"WORK": str(tmp_path)},
            master_address="127.0.0.1",
            master_port=1,
        )
    )
    wait_for(lambda: len(list(tmp_path.glob("*.imported"))) == 2)
    # Sent before the rings exist; the agent waits five seconds for them.
    server.commands.append(
        ControlRanks(
            command_id=2, job="job-a", generation=0, kind="checkpoint_and_stop", target_step=40
        )
    )
    (tmp_path / "go").touch()
    wait_for(lambda: len(server.events(RankExited)) == 2)
    wait_for(lambda: len(server.events(CommandResult)) == 2)
    assert all(event.ok for event in server.events(CommandResult))
    for rank in (0, 1):
        events = [event for event in server.events() if getattr(event, "rank", None) == rank]
        state, exited = events[-2:]
        (acknowledged,) = (event for event in events if isinstance(event, RankAcknowledged))
        assert (acknowledged.command_id, acknowledged.status) == (2, "done")
        assert acknowledged.step == 42
        assert isinstance(state, RankState)
        assert (state.view.status, state.view.step) == ("finished", 42)
        assert isinstance(exited, RankExited)
        assert (exited.exit_code, exited.commanded) == (0, True), exited.log_tail
    assert not list((agent.directory / "rings").iterdir())


def test_a_control_that_reaches_no_rank_fails(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    start_agent()
    for number, (job, kind) in enumerate([("job-x", "checkpoint"), ("job-x", "dance")], 1):
        server.commands.append(
            ControlRanks(command_id=number, job=job, generation=0, kind=kind, target_step=1)
        )
    wait_for(lambda: len(server.events(CommandResult)) == 2)
    results = {event.command_id: event for event in server.events(CommandResult)}
    assert not results[1].ok
    assert "runs on this node" in results[1].detail
    assert results[2].detail == "unknown control 'dance'"


def test_invalid_lines_of_the_stream_are_ignored(
    start_agent: Fixture, server: Any, wait_for: Fixture, tmp_path: Path
) -> None:
    server.raw_lines = [b"\n", b"malformed\n", b'{"type":"unheard_of"}\n', b"[" * 5000 + b"\n"]
    start_agent()
    server.commands.append(
        ControlRanks(command_id=7, job="job-x", generation=0, kind="dance", target_step=1)
    )
    wait_for(lambda: server.events(CommandResult))
    assert server.streams_opened == 1


def test_a_burst_runs_the_named_collectors_ten_times_a_second(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    start_agent()
    wait_for(lambda: _times(server, "host"))
    server.commands.append(Burst(command_id=1, collectors=["host"], seconds=30.0))
    wait_for(lambda: _shortest_seconds(server, "host") < 0.5)
    assert [event.ok for event in server.events(CommandResult)] == [True]
    assert _shortest_seconds(server, "numa") > 5, "nobody asked it to hurry"

    server.commands.append(Burst(command_id=2, collectors=["hosts"]))
    server.commands.append(Burst(command_id=3, seconds=3600.0))
    wait_for(lambda: len(server.events(CommandResult)) == 3)
    details = {event.command_id: event.detail for event in server.events(CommandResult)}
    assert "no collector is named hosts; there are" in details[2]
    assert details[3] == "a burst lasts up to 30 s, not 3600"


def _times(server: Any, collector: str) -> list[int]:
    return [
        sample.time_ns
        for batch in list(server.batches)
        for sample in batch.samples
        if sample.name == "paceline_collector_success" and sample.labels["collector"] == collector
    ]


def _shortest_seconds(server: Any, collector: str) -> float:
    times = sorted(_times(server, collector))
    return min((later - time) / 1e9 for time, later in pairwise(times)) if times[1:] else 1e9
