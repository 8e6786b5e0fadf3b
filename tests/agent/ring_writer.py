"""A rank that only writes spans: `python ring_writer.py SPANS_PER_SECOND [SPANS]`.

The agent starts it: the path of its ring and its identity come from the environment.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from paceline_wire import ring
from paceline_wire.ring import Identity
from paceline_wire.spans import NONE_16, NONE_32, RECORD, RECORD_BYTES, Op
from paceline_wire.topology import Coordinates, Topology

CAPACITY = 1 << 16
TICK_SECONDS = 0.01


def main(spans_per_second: int, spans: int | None) -> None:
    rank, generation = int(os.environ["RANK"]), int(os.environ["PACELINE_GENERATION"])
    job, size = os.environ["PACELINE_JOB"], int(os.environ["WORLD_SIZE"])
    identity = Identity(
        job=job,
        generation=generation,
        rank=rank,
        local_rank=rank,
        world_size=size,
        topology=Topology(dp=size),
        coordinates=Coordinates(dp_rank=rank),
        pid=os.getpid(),
        host="here",
        clock_offset_ns=time.time_ns() - time.monotonic_ns(),
        started_ns=time.time_ns(),
    )
    directory = Path(os.environ["PACELINE_RING_DIRECTORY"])
    file = ring.create(directory / f"{job}.g{generation}.r{rank}.ring", identity, CAPACITY)
    head, started = 0, time.monotonic()
    while spans is None or head < spans:
        due = int((time.monotonic() - started) * spans_per_second)
        for index in range(head, due if spans is None else min(due, spans)):
            place = (index & (CAPACITY - 1)) * RECORD_BYTES
            file.spans[place : place + RECORD_BYTES] = RECORD.pack(
                index, Op.FORWARD, 0, NONE_16, 0, 5, NONE_32, NONE_32, 0, 0, 0, index, 10
            )
            head = index + 1
            file.state[ring.STATE_HEAD] = head
        time.sleep(TICK_SECONDS)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
