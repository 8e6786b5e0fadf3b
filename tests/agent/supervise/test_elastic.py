"""Ranks of a real parent process named torchrun are ended, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline_agent.forward.outbox import Outbox
from paceline_agent.rings.reader import RankKey, Rings
from paceline_agent.supervise.elastic import end_ranks, ranks_without_torchrun
from paceline_wire import ring
from paceline_wire.commands import EndRanks
from paceline_wire.ring import Identity
from paceline_wire.topology import Coordinates, Topology

STARTED_NS = time.monotonic_ns() + 3_600_000_000_000  # later than the processes
# Starts two processes that never end by themselves, and one again for each that ends.
LAUNCHER = """
import subprocess, sys, time
run = lambda: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
ranks = [run(), run()]
print(*(one.pid for one in ranks), flush=True)
while True:
    for one in ranks:
        if one.poll() is not None:
            print("ended", one.pid, one.returncode, flush=True)
            ranks.remove(one)
    time.sleep(0.05)
"""


class Launched:
    """A launcher with two ranks, whose rings a reader has attached."""

    def __init__(self, directory: Path, name: str) -> None:
        script = directory / name
        script.write_text(LAUNCHER)
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.lines = self.process.stdout
        self.pids = [int(word) for word in self.lines.readline().split()]
        self._files = []
        for rank, pid in enumerate(self.pids):
            identity = Identity(
                job="job",
                generation=3,
                rank=rank,
                local_rank=rank,
                world_size=2,
                topology=Topology(dp=2),
                coordinates=Coordinates(dp_rank=rank),
                pid=pid,
                host="here",
                clock_offset_ns=0,
                started_ns=STARTED_NS + rank,
                metadata={"launcher": "torchrun"},
            )
            path = directory / f"job.g3.r{rank}.ring"
            self._files.append(ring.create(path, identity, capacity=64))
        self.rings = Rings(directory, Outbox())
        self.rings.poll()

    def is_alive(self, rank: int) -> bool:
        state = Path(f"/proc/{self.pids[rank]}/stat")
        return state.exists() and ") Z" not in state.read_text()

    def close(self) -> None:
        self.rings.close()
        self.process.kill()
        self.process.wait()
        self.lines.close()
        for rank, pid in enumerate(self.pids):
            if self.is_alive(rank):
                os.kill(pid, 9)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[str], Launched]]:
    started: list[Launched] = []

    def start(name: str) -> Launched:
        started.append(Launched(tmp_path, name))
        return started[-1]

    yield start
    for one in started:
        one.close()


def command(**more: Any) -> EndRanks:
    given = {"generation": 3, "started_ns": {1: STARTED_NS + 1}, **more}
    return EndRanks(command_id=1, job="job", **given)


def test_exactly_the_named_rank_is_killed(launch: Callable[[str], Launched]) -> None:
    torchrun = launch("torchrun")
    assert end_ranks(torchrun.rings, command()) is None
    assert torchrun.lines.readline() == f"ended {torchrun.pids[1]} -9\n"
    assert (torchrun.is_alive(0), torchrun.process.poll()) == (True, None)


@pytest.mark.parametrize(
    "late", [{"started_ns": {1: 99}}, {"generation": 2}, {"started_ns": {2: STARTED_NS + 1}}]
)
def test_a_command_for_another_process_ends_nothing(
    launch: Callable[[str], Launched], late: dict[str, Any]
) -> None:
    torchrun = launch("torchrun")
    failure = end_ranks(torchrun.rings, command(**late))
    assert failure is not None
    assert "runs on this node" in failure
    assert (torchrun.is_alive(0), torchrun.is_alive(1)) == (True, True)


def test_a_rank_that_the_agent_started_or_that_has_no_torchrun_is_left_alone(
    launch: Callable[[str], Launched],
) -> None:
    other = launch("srun")
    assert end_ranks(other.rings, command()) == "rank 1 is no child of torchrun"
    other.rings.supervised[RankKey("job", 3, 1)] = os.getuid()
    assert "runs on this node" in str(end_ranks(other.rings, command()))
    assert (other.is_alive(0), other.is_alive(1)) == (True, True)


def test_to_leave_torchrun_itself_is_ended(launch: Callable[[str], Launched]) -> None:
    torchrun = launch("torchrun")
    assert end_ranks(torchrun.rings, command(leave=True)) is None
    assert torchrun.process.wait(30) == -15


def test_ranks_whose_torchrun_was_killed_are_not_stopped_for_a_restart(
    launch: Callable[[str], Launched],
) -> None:
    torchrun = launch("torchrun")
    assert ranks_without_torchrun(torchrun.rings, "job", 3) == []
    torchrun.process.kill()
    torchrun.process.wait()
    assert ranks_without_torchrun(torchrun.rings, "job", 3) == [0, 1]
    torchrun.rings.supervised[RankKey("job", 3, 1)] = os.getuid()
    assert ranks_without_torchrun(torchrun.rings, "job", 3) == [0]
