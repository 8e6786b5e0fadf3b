"""A real agent on a node where another user attacks its ring directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline_wire import ring
from paceline_wire.batch import RankAttached
from paceline_wire.ring import Identity
from paceline_wire.topology import Coordinates, Topology

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")

Fixture = Callable[..., Any]
MALLORY = 60_002
FILES, RINGS, SPANS = 3_000, 40, 5_000


def attack(rings: Path) -> None:
    """Attack as another user: thousands of files, busy rings, sparse rings and forged
    identities."""
    os.setgid(MALLORY)
    os.setuid(MALLORY)
    for number in range(FILES):
        (rings / f"junk-{number}.ring").touch()
    for number in range(RINGS):
        made = ring.create(rings / f"mine-{number}.ring", identity(f"mine-{number}", 0))
        made.state[ring.STATE_HEAD] = 1 << 40
    for number in range(4):
        made = ring.create(rings / f"sparse-{number}.ring", identity(f"sparse-{number}", 0))
        with made.path.open("r+b") as file:
            file.seek(16)
            file.write((1 << 22).to_bytes(8, "little"))
            file.truncate(ring.SPANS_OFFSET + (64 << 22))
    for rank in range(8):
        ring.create(rings / f"forged-{rank}.ring", identity("j", rank))
    (rings / "j.g0.r1.ring").symlink_to("/etc/passwd")


def identity(job: str, rank: int) -> Identity:
    return Identity(
        job=job,
        generation=0,
        rank=rank,
        local_rank=rank,
        world_size=8,
        topology=Topology(dp=8),
        coordinates=Coordinates(dp_rank=rank),
        pid=os.getpid(),
        host="here",
        clock_offset_ns=0,
        started_ns=time.monotonic_ns(),
    )


def test_the_spans_of_a_rank_arrive_while_another_user_attacks(
    open_directory: Path, start_agent: Fixture, server: Any, make_rank: Fixture, wait_for: Fixture
) -> None:
    directory = open_directory / "node"
    start_agent("--node-directory", str(directory))
    wait_for(lambda: server.batches)
    rank = make_rank(directory, 0)
    wait_for(lambda: server.events(RankAttached))
    child = os.fork()
    if not child:
        try:
            attack(directory / "rings")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for _ in range(3):
        rank.write(SPANS)
        written = rank.written
        wait_for(lambda written=written: received(server) == written)
    jobs = {event.identity.job for event in server.events(RankAttached)}
    assert not {job for job in jobs if job.startswith("sparse")}
    assert {
        event.identity.rank for event in server.events(RankAttached) if event.identity.job == "j"
    } == {0}


def received(server: Any) -> int:
    blocks = [block for batch in list(server.batches) for block in batch.spans if block.job == "j"]
    assert not any(block.lost for block in blocks)
    return sum(block.count for block in blocks)
