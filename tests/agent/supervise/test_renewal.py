"""Ranks that leave a generation and enter the next one in their process, with a real agent."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline_wire.batch import RankExited, RankStarted
from paceline_wire.commands import ControlRanks, StartRanks
from tests.agent.command_factory import guard_pids, start_ranks, stop
from tests.ports import free_port

Fixture = Callable[..., Any]

# Each entry of the function is a line: process, generation and rank.
SCRIPT = """
import json, os, sys, time
import paceline
from paceline_wire.ring import AckStatus

def note():
    entry = {name: os.environ[name] for name in ("PACELINE_GENERATION", "RANK", "MASTER_PORT")}
    with open(sys.argv[1], "a") as file:
        print(json.dumps(entry | {"pid": os.getpid()}), file=file, flush=True)

@paceline.resilient
def train():
    note()
    BODY

train()
open(sys.argv[1] + ".after", "a").write("x")
"""
LOOP = "while True: time.sleep(0.005)"
ALL_REDUCE = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    open(sys.argv[1] + ".ready", "a").write("x")
    while True:
        dist.all_reduce(value)
        time.sleep(0.005)
"""
# Rank 0 waits for rank 1, and rank 1 waits for no other rank: no connection to rank 2 breaks there.
WITHOUT_A_COLLECTIVE = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    open(sys.argv[1] + ".ready", "a").write("x")
    if dist.get_rank() == 0: dist.recv(torch.ones(1), src=1)
    while True: time.sleep(0.005)
"""
# Follows a command as a framework with an agreement of its own would.
UNTIL_STOPPED = """
    paceline.init()
    while (command := paceline.pending()) is None: time.sleep(0.005)
    paceline.acknowledge(command.command_id, AckStatus.DONE, 1)
    open(sys.argv[1] + ".ended", "a").write("x")
"""


class Job:
    """A script, and its generations on one agent."""

    def __init__(self, directory: Path, order: Fixture, server: Any, wait_for: Fixture) -> None:
        self.path = directory / "entries"
        self._order = order
        self._server = server
        self.wait_for = wait_for
        self.command = start_ranks("", 1)

    def start(self, body: str, ranks: int) -> None:
        argv = [sys.executable, "-c", SCRIPT.replace("BODY", body), str(self.path)]
        self.command = start_ranks("", ranks, 1, argv=argv, master_port=free_port())
        assert self._order(self.command).ok
        self.wait_for(lambda: len(self.entries(1)) == ranks)

    def next(self, generation: int, **changes: Any) -> None:
        command: StartRanks = msgspec.structs.replace(
            self.command,
            command_id=start_ranks("").command_id,
            generation=generation,
            master_port=free_port(),
            **changes,
        )
        assert self._order(command).ok

    def renew(self, generation: int) -> None:
        """Stop a generation as for a restart, and start the next one."""
        command = msgspec.structs.replace(stop(generation), renew=True)
        result = self._order(command)
        assert result.ok, result.detail
        self.next(generation + 1)

    def save_and_stop(self, generation: int, ranks: int) -> None:
        """Command it, and wait until the ranks have returned from their function."""
        assert self._order(
            ControlRanks(
                command_id=start_ranks("").command_id,
                job=self.command.job,
                generation=generation,
                kind="checkpoint_and_stop",
                target_step=0,
            )
        ).ok
        ended = Path(f"{self.path}.ended")
        self.wait_for(lambda: ended.exists() and len(ended.read_text()) == ranks)

    def entries(self, generation: int) -> dict[int, dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        entries = [json.loads(line) for line in lines]
        return {
            int(entry["RANK"]): entry
            for entry in entries
            if int(entry["PACELINE_GENERATION"]) == generation
        }

    def pids(self, generation: int) -> dict[int, int]:
        return {rank: entry["pid"] for rank, entry in self.entries(generation).items()}

    def kill(self, generation: int, rank: int) -> None:
        os.kill(self.pids(generation)[rank], signal.SIGKILL)
        self.wait_for(lambda: rank in [exited.rank for exited in self.exits(generation)])

    def exits(self, generation: int) -> list[RankExited]:
        return [e for e in self._server.events(RankExited) if e.generation == generation]

    def entered(self, generation: int, ranks: int) -> dict[int, int]:
        """Wait until all ranks have entered a generation. Return their pids."""
        self.wait_for(lambda: len(self.entries(generation)) == ranks)
        return self.pids(generation)


@pytest.fixture
def job(
    tmp_path: Path, start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture
) -> Job:
    job = Job(tmp_path, order, server, wait_for)
    job.agent = start_agent()  # type: ignore[attr-defined]
    return job


def test_only_the_dead_rank_gets_a_new_process(job: Job, server: Any) -> None:
    job.start(LOOP, 3)
    before = job.pids(1)
    job.kill(1, 1)
    assert job.exits(1)[0].renewable
    job.renew(1)
    after = job.entered(2, 3)
    assert after[0] == before[0]
    assert after[2] == before[2]
    assert after[1] != before[1]
    ports = {entry["MASTER_PORT"] for entry in job.entries(2).values()}
    assert len(ports) == 1
    assert ports != {entry["MASTER_PORT"] for entry in job.entries(1).values()}
    started = {e.rank: e.pid for e in server.events(RankStarted) if e.generation == 2}
    assert started == after
    assert [exited.rank for exited in job.exits(1)] == [1]
    job.kill(2, 0)  # the guard reports the end under the new generation
    assert [(exited.pid, exited.signal) for exited in job.exits(2)] == [(before[0], 9)]


def test_a_rank_that_cannot_leave_is_killed_and_replaced(job: Job) -> None:
    job.start("time.sleep(600) if os.environ['RANK'] == '0' else None\n    " + LOOP, 3)
    before = job.pids(1)
    job.kill(1, 1)
    job.renew(1)
    after = job.entered(2, 3)
    assert after[0] != before[0]
    assert after[2] == before[2]
    assert [(exited.rank, exited.commanded) for exited in job.exits(1)] == [(1, False), (0, True)]


@pytest.mark.campaign
def test_a_script_that_catches_everything_is_interrupted_again(job: Job) -> None:
    job.start(
        "try:\n        while True: time.sleep(0.005)\n    except BaseException: pass\n    " + LOOP,
        2,
    )
    before = job.pids(1)
    job.kill(1, 1)
    job.renew(1)
    assert job.entered(2, 2)[0] == before[0]


@pytest.mark.campaign
def test_a_rank_beyond_its_function_is_replaced_at_once(job: Job) -> None:
    job.start(LOOP.replace("True", "os.environ['RANK'] == '1'"), 2)
    job.wait_for(lambda: any(e.rank == 0 and e.exit_code == 0 for e in job.exits(1)))
    before = job.pids(1)
    job.kill(1, 1)
    job.renew(1)
    after = job.entered(2, 2)
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())


def test_an_error_of_the_script_ends_its_rank_and_not_the_others(job: Job) -> None:
    body = "if os.environ['RANK'] == '1': time.sleep(0.5); raise ValueError('mine')\n    " + LOOP
    job.start(body, 2)
    before = job.pids(1)
    exited = job.wait_for(lambda: job.exits(1))[0]
    assert exited.exit_code == 1
    assert exited.log_tail.endswith("ValueError: mine")
    job.renew(1)
    after = job.entered(2, 2)
    assert after[0] == before[0]
    assert after[1] != before[1]


@pytest.mark.campaign
def test_a_rank_stays_only_for_the_same_place(job: Job) -> None:
    job.start(LOOP, 2)
    before = job.pids(1)
    job.kill(1, 1)
    assert job._order(msgspec.structs.replace(stop(1), renew=True)).ok
    job.next(2, environment={"OTHER": "1"})
    assert not set(job.entered(2, 2).values()) & set(before.values())


@pytest.mark.campaign
def test_a_stop_that_is_final_kills_ranks_that_wait(
    job: Job, is_alive: Callable[[int], bool]
) -> None:
    job.start(LOOP, 2)
    before = job.pids(1)
    job.kill(1, 1)
    assert job._order(msgspec.structs.replace(stop(1), renew=True)).ok
    assert is_alive(before[0])
    assert job._order(stop(1)).ok
    assert not is_alive(before[0])


@pytest.mark.campaign
def test_ranks_end_with_a_guard_that_dies_while_they_wait(
    job: Job, is_alive: Callable[[int], bool]
) -> None:
    job.start(LOOP, 2)
    before = job.pids(1)
    job.kill(1, 1)
    assert job._order(msgspec.structs.replace(stop(1), renew=True)).ok
    os.kill(guard_pids(job.agent.pid)[1], signal.SIGKILL)  # type: ignore[attr-defined]
    job.wait_for(lambda: not is_alive(before[0]))
    job.next(2)
    assert len(job.entered(2, 2)) == 2


@pytest.mark.parametrize(
    "body", [ALL_REDUCE, pytest.param(WITHOUT_A_COLLECTIVE, marks=pytest.mark.campaign)]
)
def test_ranks_that_are_blocked_in_communication_leave_it(job: Job, body: str) -> None:
    job.start(body, 3)
    before = job.pids(1)
    ready = Path(f"{job.path}.ready")
    job.wait_for(lambda: ready.exists() and len(ready.read_text()) == 3)
    job.kill(1, 2)
    job.renew(1)
    after = job.entered(2, 3)
    assert (after[0], after[1]) == (before[0], before[1])
    job.wait_for(lambda: len(ready.read_text()) == 6, what="the new process groups to work")


def test_ranks_that_saved_and_stopped_on_command_stay_for_the_next_generation(job: Job) -> None:
    job.start(UNTIL_STOPPED, 2)
    before = job.pids(1)
    job.save_and_stop(1, 2)
    job.renew(1)
    assert job.entered(2, 2) == before
    assert not job.exits(1)
    assert not Path(f"{job.path}.after").exists()
    job.save_and_stop(2, 4)
    assert job._order(stop(2)).ok
    job.wait_for(lambda: len(job.exits(2)) == 2)


@pytest.mark.campaign
def test_a_rank_that_stopped_on_command_ends_as_usual_if_no_generation_follows(job: Job) -> None:
    job.start(UNTIL_STOPPED, 1)
    job.save_and_stop(1, 1)
    [exited] = job.wait_for(lambda: job.exits(1), seconds=60)
    assert (exited.exit_code, exited.commanded) == (0, True)
    assert Path(f"{job.path}.after").exists()
