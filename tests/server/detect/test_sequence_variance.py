"""The cost of different sequence lengths."""

import dataclasses

import numpy as np
import pytest
from simulated_step import SimulatedStep, gpipe, one_forward_one_backward
from watched import Watched

from paceline_server.detect.sequence_variance.detector import SequenceVarianceDetector
from paceline_wire.topology import Topology


def a_job(topology, schedule=one_forward_one_backward):
    return SimulatedStep(topology, schedule(topology.pp, 8), jitter=0.03)


def played(job, spread, steps=40, seed=0, microbatches=8):
    """Play a job in which each microbatch is one sequence.

    The longest is `spread` times the shortest.
    """
    random = np.random.default_rng(seed)
    timings = []
    for step in range(steps):
        lengths = 2048 * np.exp(random.uniform(-1, 1, microbatches) * np.log(spread) / 2)
        one = dataclasses.replace(job, lengths=[int(each) for each in lengths])
        timings.append(one.play(step, seed))
    return timings


@pytest.mark.parametrize("topology", [Topology(1, 4, 2), Topology(1, 2, 1)])
@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize("seed", range(2))
def test_lengths_that_spread_threefold_cost_what_a_replay_says(topology, schedule, seed):
    job = a_job(topology, schedule)
    watched = Watched(SequenceVarianceDetector, topology)
    timings = played(job, 3.0, seed=seed)
    watched.show(timings)
    [found] = watched.findings
    assert (found.kind, found.severity, found.rank) == ("sequence_variance", "info", None)
    judged = [timing for timing in timings if 3 <= timing.step <= found.step]
    recorded = np.mean([timing.ranks.step_seconds[0] for timing in judged])
    even = a_job(topology, schedule).play(0, seed).ranks.step_seconds[0]
    assert found.cost_ratio == pytest.approx(1 - even / recorded, abs=0.06)
    assert "squared sequence lengths" in found.advice


def test_without_a_pipeline_the_replicas_wait_for_each_other():
    """Two replicas with independently drawn lengths: distributing microbatches by cost helps."""
    topology = Topology(2, 1, 1)
    job = SimulatedStep(topology, gpipe(1, 4), jitter=0.02)
    watched = Watched(SequenceVarianceDetector, topology)
    random = np.random.default_rng(3)
    for step in range(20):
        parts = []
        for rank in range(2):
            lengths = (2048 * np.exp(random.uniform(-0.7, 0.7, 4))).astype(int)
            timing = dataclasses.replace(job, lengths=lengths.tolist()).play(step, rank)
            squares = np.mean(np.square(lengths / 2048.0))
            parts.append((timing, squares, rank))
        watched.show([_joined(parts)])
    [found] = watched.findings
    assert "dealing them to the data-parallel ranks" in found.advice


def _joined(parts):
    """Combine replicas from two timings; scale durations back to the cost of their lengths."""
    first = parts[0][0]
    columns = {}
    for name in first.compute.__slots__:
        columns[name] = np.concatenate(
            [
                getattr(timing.compute, name)[timing.compute.rank == rank]
                for timing, _, rank in parts
            ]
        )
    scale = np.concatenate(
        [np.full((timing.compute.rank == rank).sum(), squares) for timing, squares, rank in parts]
    )
    length = (columns["end_ns"] - columns["start_ns"]) * scale
    columns["end_ns"] = columns["start_ns"] + length.astype(np.int64)
    return dataclasses.replace(first, compute=type(first.compute)(**columns))


@pytest.mark.parametrize("seed", range(3))
def test_equal_lengths_are_no_finding(seed):
    job = a_job(Topology(2, 2, 1))
    watched = Watched(SequenceVarianceDetector, job.topology)
    watched.show(played(job, 1.05, seed=seed))
    assert watched.findings == []


def test_lengths_that_do_not_explain_the_times_are_no_finding():
    """Compute times vary independently of the lengths."""
    job = dataclasses.replace(a_job(Topology(2, 2, 1)), jitter=0.3)
    watched = Watched(SequenceVarianceDetector, job.topology)
    random = np.random.default_rng(0)
    for step in range(40):
        timing = job.play(step)
        tokens = random.integers(1000, 4000, timing.compute.rank.size)
        compute = dataclasses.replace(timing.compute, tokens=tokens, squared_tokens=tokens**2)
        watched.show([dataclasses.replace(timing, compute=compute)])
    assert watched.findings == []


def test_without_lengths_there_is_no_finding():
    job = dataclasses.replace(a_job(Topology(2, 2, 1)), jitter=0.3)
    watched = Watched(SequenceVarianceDetector, job.topology)
    watched.show([job.play(step) for step in range(40)])
    assert watched.findings == []


def test_too_few_microbatches_show_no_cost_of_lengths():
    """One microbatch per step: what a fit to so few samples explains is chance."""
    topology = Topology(2, 1, 1)
    job = SimulatedStep(topology, gpipe(1, 1), jitter=0.3)
    watched = Watched(SequenceVarianceDetector, topology)
    watched.show(played(job, 1.2, microbatches=1))
    assert watched.findings == []
