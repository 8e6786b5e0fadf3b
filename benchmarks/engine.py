"""Spans per CPU second through the engine: step model, all detectors, ledger.

A healthy run of the simulated job, with one batch per node and step and a tick per step, at the
demo's size and with 64 ranks. With 1,024 ranks only the step model, from encoded batches. Two ranks
with short steps have a tick each quarter of a second; the baseline analyzes all of their steps. The
baseline of a job with a slow rank, which is reported soon, is the same job without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from time import process_time_ns
from unittest.mock import patch

from benchmarks.fleet.nodes import RANKS_PER_NODE, Node, Rank
from benchmarks.fleet.steps import PlayedJob
from benchmarks.harness import Result
from paceline_server.engine.engine import Engine
from paceline_server.steps import sampling
from paceline_server.steps.model import StepModel
from paceline_wire.batch import RankDefined, decode, encode
from paceline_wire.topology import Topology

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "server" / "simulation"))

from simulated_job import JOB, SimulatedJob

STEPS = 40
SLOW_STEPS = 300
REPEATS = 5
# The demo has about 1,000 spans per step of 0.6 s: at this rate they take 2% of a core.
GOAL = 100_000
SHORT_STEPS = 2000
TICK_NS = 250_000_000
LARGE = Topology(32, 4, 8)
LARGE_STEPS = 6
LARGE_GOAL = 1_000_000


def measure() -> Iterator[Result]:
    for topology in (Topology(2, 2, 2), Topology(4, 4, 4)):
        rates = [_rate(topology, seed) for seed in range(REPEATS)]
        yield Result(
            f"engine ({topology.world_size} ranks)",
            median(rates),
            "spans/CPU s",
            goal=GOAL,
            more_is_better=True,
        )
    healthy, slow = (
        median(_rate(Topology(2, 1, 1), seed, SLOW_STEPS, slow) for seed in range(REPEATS))
        for slow in ({}, {1: 1.8})
    )
    yield Result("engine, a slow rank (2 ranks)", slow, "spans/CPU s", healthy, more_is_better=True)
    with patch.object(sampling, "ANALYZED_SECONDS", 0.0):
        baseline = _share_of_a_core()
    yield Result(
        "engine, short steps (2 ranks)", _share_of_a_core(), "CPU s per s of training", baseline
    )
    yield Result(
        f"decode and step model ({LARGE.world_size} ranks)",
        median(_large_rates()),
        "spans/CPU s",
        goal=LARGE_GOAL,
        more_is_better=True,
    )


def _large_rates() -> Iterator[float]:
    nodes = [Node(number) for number in range(LARGE.world_size // RANKS_PER_NODE)]
    ranks = [Rank(JOB, 0, number, LARGE, 0) for number in range(LARGE.world_size)]
    played = PlayedJob(LARGE, 12, 1_000_000_000, seed=0)
    model = StepModel(0, LARGE, {"schedule": "gpipe", "microbatches": "12"})
    for rank in ranks:
        for event in rank.beginning():
            if isinstance(event, RankDefined):
                for definition in event.definitions:
                    model.add_group(rank.number, definition)
    for _ in range(LARGE_STEPS):
        words = played.play({})
        payloads = [
            encode(node.content(0, 0.0, spans=[ranks[one].block(words) for one in node.ranks]))
            for node in nodes
        ]
        started = process_time_ns()
        for payload in payloads:
            for block in decode(payload).spans:
                model.add(block)
        (finished,) = model.take_finished()
        seconds = (process_time_ns() - started) / 1e9
        assert len(finished.summary.ranks) == LARGE.world_size
        yield sum(stage[0].size for stage in words) / seconds


def _rate(
    topology: Topology, seed: int, steps: int = STEPS, slow: Mapping[int, float] | None = None
) -> float:
    """Return the spans per CPU second of a job, of which ranks are slow from step `STEPS` on."""
    job = SimulatedJob(topology, seed=seed)
    played = []
    spans = 0
    for step in range(steps):
        if step == STEPS:
            job.faults.slow.update(slow or {})
        batches = list(job.batches(job.play()))
        spans += sum(block.count for batch in batches for block in batch.spans)
        played.append((job.now_ns, batches))
    engine = Engine(JOB)
    engine.place(job.placement())
    started = process_time_ns()
    for now_ns, batches in played:
        for batch in batches:
            engine.feed(batch, now_ns)
        engine.tick(now_ns)
    return spans / (process_time_ns() - started) * 1e9


def _share_of_a_core() -> float:
    """Return the CPU time per time of a training of two ranks with steps of a few milliseconds."""
    job = SimulatedJob(
        Topology(2, 1, 1), microbatches=1, forward_seconds=0.001, backward_seconds=0.002
    )
    job.host_factor = 0.5
    began_ns = ticked_ns = job.now_ns
    used_ns = 0
    for _ in range(SHORT_STEPS):
        batches = list(job.batches(job.play()))
        started = process_time_ns()
        for batch in batches:
            job.engine.feed(batch, job.now_ns)
        if job.now_ns - ticked_ns >= TICK_NS:
            ticked_ns = job.now_ns
            job.engine.tick(ticked_ns)
        used_ns += process_time_ns() - started
    return used_ns / (job.now_ns - began_ns)
