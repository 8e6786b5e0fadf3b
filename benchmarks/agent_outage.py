"""An hour without a server: what waits on disk, and how quickly it is sent once there is one.

The hour's batches are made as the agent makes them, at one sweep a second of a node of 8 GPUs and
9 HCAs and a few hundred spans of 8 ranks; then a real agent finds them and sends them to a sink.
How soon a batch that is packed meanwhile arrives is the delay of live data.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Result
from benchmarks.node import FakeNode, Sink
from paceline_agent.spool import Spool
from paceline_wire.batch import Batch, Sample, SpanBlock
from paceline_wire.spans import NONE_16, NONE_32, RECORD, Op, to_columns

SECONDS = 3600
SERIES = 850
SPANS = 40  # of each of 8 ranks, each second
GOAL_MIB, GOAL_SPEED = 64.0, 20.0
LONGEST_SECONDS = 200


def measure() -> Iterator[Result]:
    with FakeNode() as node:
        directory = node.directory / "node" / "spool"
        spool = Spool(directory, 64 << 20)
        _fill(spool)
        waiting, mebibytes = len(spool), spool.size_bytes / (1 << 20)
        yield Result("outage: an hour in the spool", mebibytes, "MiB", None, GOAL_MIB)
        yield Result("outage: batches that lost something", spool.counts.dropped, "", None, 0)
        with Sink() as sink, node.agent(sink.url) as agent:
            started, before_ms = time.monotonic(), agent.cpu_ms
            while _left(directory) and time.monotonic() - started < LONGEST_SECONDS:
                time.sleep(0.05)
            seconds = time.monotonic() - started
            cpu_seconds = (agent.cpu_ms - before_ms) / 1000
            sent = sink.batches
    if sent < waiting:
        raise RuntimeError(f"{sent} of {waiting} batches came within {LONGEST_SECONDS} s")
    speed = SECONDS / seconds
    yield Result("outage: drained", speed, "x real time", None, GOAL_SPEED, more_is_better=True)
    yield Result("outage: longest delay of live data", seconds, "s")
    yield Result("outage: cost of sending the hour", cpu_seconds, "CPU s")


def _left(directory: Path) -> bool:
    """Whether any of the hour still waits; those packed now sort behind."""
    return any(path.name.startswith("0" * 19) for path in directory.glob("*.batch"))


def _fill(spool: Spool) -> None:
    chance = random.Random(1)
    labels = [{"gpu": str(number % 8), "UUID": f"GPU-{number % 8}"} for number in range(SERIES)]
    names = [f"DCGM_FI_DEV_{number // 8}" for number in range(SERIES)]
    now_ns = time.time_ns() - SECONDS * 10**9
    for second in range(SECONDS):
        time_ns = now_ns + second * 10**9
        samples = [
            Sample(name, label, float(chance.randrange(100)) if n % 4 == 0 else 1.0, time_ns)
            for n, (name, label) in enumerate(zip(names, labels, strict=True))
        ]
        batch = Batch(
            agent_id="bench",
            boot_id="hour",
            sequence=second,
            packed_ns=time_ns,
            samples=samples,
            spans=[_spans(rank, second, chance) for rank in range(8)],
        )
        spool.append(batch, boot_ns=1)


def _spans(rank: int, second: int, chance: random.Random) -> SpanBlock:
    records = b"".join(
        RECORD.pack(
            second * SPANS + n, Op.FORWARD, n & 7, NONE_16, 0, second, NONE_32, NONE_32, 0, 0, 0,
            second * 10**9 + n * 10**7, 10**7 + chance.randrange(10**6),
        )
        for n in range(SPANS)
    )  # fmt: skip
    columns = to_columns(records)
    return SpanBlock(job="bench", generation=0, rank=rank, columns=columns, clock_offset_ns=0)
