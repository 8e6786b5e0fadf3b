"""The comparison of replicas: its share of the step time in the training loop.

One process compares a model of 64 MiB with itself in another process's place: its checksums are
taken in the loop, and a thread posts them to a real TCPStore, as in a job. The step is a sleep of
`STEP_SECONDS`, so that the processor is free for the checksum, as on a host that feeds a GPU. The
share is the time within `step_ended` over the wall time, after the interval has been chosen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.harness import Result
from paceline.checkpoints.replicas import PIECE_BYTES, Piece, ReplicaCheck, ReplicaSet

STEP_SECONDS = 0.02
WARMUP_CHECKS = 4  # until the interval is known
CHECKS = 8  # that are measured, with the steps up to each
MOST_SECONDS = 120.0
MODEL_BYTES = 64 << 20
GOAL = 0.001


def measure() -> Iterator[Result]:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    parameter = torch.randn(MODEL_BYTES // 4)
    pieces = [
        Piece("weight", parameter, begin, begin + PIECE_BYTES)
        for begin in range(0, MODEL_BYTES, PIECE_BYTES)
    ]
    check = ReplicaCheck([ReplicaSet((0, 1), pieces)], 1, store)
    spent, longest, checks, step = 0.0, 0.0, -WARMUP_CHECKS, 0
    begun = measured = time.perf_counter()
    while checks < CHECKS and time.perf_counter() - begun < MOST_SECONDS:
        step += 1
        time.sleep(STEP_SECONDS)
        is_check = step % check.every == 0
        before = time.perf_counter()
        check.step_ended(step)
        seconds = time.perf_counter() - before
        spent, longest = spent + seconds, max(longest, seconds)
        checks += is_check
        if is_check and checks == 0:
            spent, longest, measured = 0.0, 0.0, time.perf_counter()
    share = spent / (time.perf_counter() - measured)
    every = check.every
    check.close()
    name = "comparison of replicas, share of step time"
    yield Result(name, share, "ratio", goal=GOAL, resolved=checks >= CHECKS)
    yield Result("comparison of replicas, interval", every, "steps")
    yield Result("comparison of replicas, longest checksum", longest * 1e3, "ms")
    yield Result("comparison of replicas, checksums taken", checks, "checksums")
