"""Spans per second through the agent: from the rings of a node's ranks to batches in the spool.

On one core: read, convert to columns, pack and write, for eight ranks at a time, and for ranks that
live a fraction of a second, whose ring is attached, read and removed. Then a real agent, with all
its other work, for some seconds of ranks that write faster than the goal.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.harness import Result
from benchmarks.node import FakeNode, Sink
from paceline_agent.forward.forwarder import Packer
from paceline_agent.forward.outbox import Outbox
from paceline_agent.forward.spool import Spool
from paceline_agent.rings.reader import Rings
from paceline_wire import ring
from paceline_wire.ring import Identity, RingFile
from paceline_wire.spans import NONE_16, NONE_32, RECORD, RECORD_BYTES, Op
from paceline_wire.topology import Coordinates, Topology

RANKS = 8
CAPACITY = 1 << 16
ROUNDS = 40  # each a quarter of a second at the goal's rate
GOAL = 200_000
SHORT_LIVES, SHORT_SPANS = 200, 2_000
LIVE_SECONDS, LIVE_RATE = 8, 220_000
LONGEST_SECONDS = 60


def measure() -> Iterator[Result]:
    with tempfile.TemporaryDirectory(dir=_memory()) as scratch:
        node = _Node(Path(scratch))
        rate = _steady(node)
        lost = node.rings.counts.lost_spans
        yield Result("agent: spans of 8 ranks", rate, "/CPU s", None, GOAL, more_is_better=True)
        yield Result("agent: spans lost", lost, "", None, 0)
    with tempfile.TemporaryDirectory(dir=_memory()) as scratch:
        node = _Node(Path(scratch))
        rate, missing = _short_lived(node)
        name = f"agent: spans of {SHORT_LIVES} short-lived ranks"
        yield Result(name, rate, "/CPU s", None, GOAL, more_is_better=True)
        yield Result("agent: spans of short-lived ranks lost", missing, "", None, 0)
    yield from _live()


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class _Node:
    """The agent's parts between rings and spool; packed batches count as sent."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "rings"
        self.directory.mkdir()
        self._outbox = Outbox()
        self.rings = Rings(self.directory, self._outbox)
        self._spool = Spool(directory / "spool", 1 << 30)
        self._packer = Packer(
            "bench", self._outbox, self._spool, flush_seconds=0.5, heartbeat_seconds=1e9
        )

    def turn(self) -> None:
        self.rings.poll()
        self._packer.flush()


def _steady(node: _Node) -> float:
    files = [_ring(node.directory, rank, os.getpid()) for rank in range(RANKS)]
    node.turn()
    spans_each, spent_ns, head = GOAL // 4 // RANKS, 0, 0
    for _ in range(ROUNDS):
        for file in files:
            _write(file, head, spans_each)
        head += spans_each
        started = time.process_time_ns()
        node.turn()
        spent_ns += time.process_time_ns() - started
    assert node.rings.counts.spans == head * RANKS
    return head * RANKS / spent_ns * 1e9


# Maps its ring, which identifies it as the writer.
_RANK = """
import mmap
with open(input(), "r+b") as file:
    ring = mmap.mmap(file.fileno(), 0)
print(flush=True)
input()
"""


def _short_lived(node: _Node) -> tuple[float, int]:
    """Measure ranks whose processes end before or soon after the agent finds their rings."""
    spent_ns = 0
    for number in range(SHORT_LIVES):
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        file = _ring(node.directory, number, process.pid)
        process.stdin.write(b"%s\n" % bytes(file.path))
        process.stdin.flush()
        process.stdout.readline()
        _write(file, 0, SHORT_SPANS // 2)
        spent_ns += _timed(node)
        _write(file, SHORT_SPANS // 2, SHORT_SPANS // 2)
        process.kill()
        process.communicate()
        file.close()
    deadline = time.monotonic() + 10
    while len(node.rings) and time.monotonic() < deadline:
        spent_ns += _timed(node)
        time.sleep(0.1)
    found = node.rings.counts.spans
    return found / spent_ns * 1e9, SHORT_LIVES * SHORT_SPANS - found


def _live() -> Iterator[Result]:
    """Measure a real agent. The rings are filled in advance; only their heads move."""
    with FakeNode() as node, Sink() as sink, node.agent(sink.url) as agent:
        directory = node.directory / "node" / "rings"
        _await(lambda: sink.batches > 0)
        files = [_ring(directory, rank, os.getpid()) for rank in range(RANKS)]
        for file in files:
            _write(file, 0, CAPACITY)
            file.state[ring.STATE_HEAD] = 0
        started, before_ms, head = time.monotonic(), agent.cpu_ms, 0
        while (passed := time.monotonic() - started) < LIVE_SECONDS:
            head = int(passed * LIVE_RATE / RANKS)
            for file in files:
                file.state[ring.STATE_HEAD] = head
            time.sleep(0.01)
        written = head * RANKS
        _await(lambda: sink.spans + sink.lost_spans >= written)
        cpu_ms = agent.cpu_ms - before_ms
        for file in files:
            file.close()
    yield Result("agent: spans of 8 ranks, live", written / LIVE_SECONDS, "/s")
    yield Result("agent: spans lost, live", written - sink.spans, "", None, 0)
    yield Result("agent: its CPU meanwhile, all it does", cpu_ms / 10 / LIVE_SECONDS, "% of a core")


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {LONGEST_SECONDS} s in vain")
        time.sleep(0.05)


def _timed(node: _Node) -> int:
    started = time.process_time_ns()
    node.turn()
    return time.process_time_ns() - started


def _ring(directory: Path, rank: int, pid: int) -> RingFile:
    identity = Identity(
        job="bench",
        generation=0,
        rank=rank,
        local_rank=rank,
        world_size=RANKS,
        topology=Topology(dp=RANKS),
        coordinates=Coordinates(dp_rank=rank),
        pid=pid,
        host="here",
        clock_offset_ns=0,
        started_ns=1,
    )
    return ring.create(directory / f"bench.g0.r{rank}.ring", identity, CAPACITY)


def _write(file: RingFile, head: int, count: int) -> None:
    for index in range(head, head + count):
        place = (index & (CAPACITY - 1)) * RECORD_BYTES
        file.spans[place : place + RECORD_BYTES] = RECORD.pack(
            index, Op.FORWARD, index & 7, NONE_16, 0, index >> 6, NONE_32, NONE_32,
            0, 0, index & 0xFFFF, index * 1000, 10_000 + index % 997,
        )  # fmt: skip
    file.state[ring.STATE_HEAD] = head + count
