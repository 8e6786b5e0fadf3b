"""Measure how long each stage idles in the pipeline phase, and explain it.

The recorded phase is rebuilt in steps. Each step adds one deviation from the ideal; the additional
idle time of a stage is the share of that deviation:

    all stages equally fast, nothing in between    theory
    + stages as fast as they are                   imbalance
    + replicas as fast as they are                 straggler
    + microbatches as long as they were            variation
    + transfers                                    transfer
    + late data                                    data
    + late starts with all inputs ready            launch
    the recorded phase                             other

So the shares sum to the measured idle time. An action's delay is the time from when it could have
started (the previous action has ended, its input is computed) until it started.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from paceline_server.steps.grid import grid_of
from paceline_server.steps.phase import PipelinePhase, PipelinePhaseReader
from paceline_server.steps.pipeline import Pipeline
from paceline_server.steps.schedule import bubble_theory
from paceline_server.steps.timing import StepTiming
from paceline_server.steps.types import StageBubble
from paceline_wire.topology import Topology

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# A transfer or a launch of up to this share of a typical action counts as work, since the theory
# includes neither; a longer one leaves the stage idle.
DELAY_ALLOWANCE = 0.05
# If two replicas differ by this factor, the slower one has a straggler.
SLOW_REPLICA = 1.1


class BubbleModel:
    """Measures and explains the bubbles of a job's steps."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._reader = PipelinePhaseReader(topology)

    def measure(self, timing: StepTiming, metadata: Mapping[str, str]) -> list[StageBubble]:
        """Return the bubbles by stage, means over the replicas; empty without a pipeline."""
        phase = self._reader.read(timing)
        if phase is not None:
            return explain(phase)
        return _unexplained(timing, self.topology, bubble_theory(metadata, self.topology.pp))


def explain(phase: PipelinePhase) -> list[StageBubble]:
    pipeline, seconds = phase.pipeline, phase.seconds
    typical, by_replica = typical_seconds(pipeline, seconds)
    same = equal_seconds(pipeline, typical)
    transfers, late_data, launches = _delays(phase)
    allowance = DELAY_ALLOWANCE * float(same.mean())
    lanes = [
        (by_replica, None),
        (seconds, None),
        (seconds, transfers),
        (seconds, transfers + late_data),
        (seconds, transfers + late_data + launches),
    ]
    ideal = pipeline.idle_ratios(np.stack([same, typical], axis=1))
    rebuilt = _idle_ratios(pipeline, lanes, allowance)
    measured = _measured(phase, transfers + late_data + launches, allowance)
    ladder = np.vstack([ideal.T, rebuilt, measured[None]])  # [rung, stage]
    shares = np.diff(ladder, axis=0)
    return [
        StageBubble(
            stage,
            float(measured[stage]),
            float(ladder[0, stage]),
            float(measured[stage] - ladder[0, stage]),
            *shares[:, stage].tolist(),
        )
        for stage in range(pipeline.stages)
    ]


def typical_seconds(pipeline: Pipeline, seconds: Floats) -> tuple[Floats, Floats]:
    """Return each action's duration if all microbatches were equal: [action], [action, replica].

    The first is the median over the replicas (the faster one if two differ much), so that a slow
    rank does not make its stage slow. Means of a few noisy microbatches differ by chance, so each
    is shrunk towards the value it is compared with, by the share of the differences that noise
    explains (James-Stein).
    """
    cell = cells(pipeline)
    order = np.argsort(cell, kind="stable")
    edges = np.flatnonzero(np.r_[True, np.diff(cell[order]) > 0])
    sizes = np.diff(np.r_[edges, cell.size])
    means = np.add.reduceat(seconds[order], edges, axis=0) / sizes[:, None]
    lower, middle = np.quantile(means, 0.5, axis=1, method="lower"), np.median(means, axis=1)
    middle = np.where(middle > SLOW_REPLICA * lower, lower, middle)
    op = pipeline.op[order][edges]
    even = (np.bincount(op, weights=middle) / np.maximum(np.bincount(op), 1))[op]
    noise = _noise(pipeline, seconds) / sizes  # squared relative error of one mean
    replicas = seconds.shape[1]
    between = np.mean((middle / even - 1.0) ** 2)
    middle = even + (middle - even) * _kept(float(noise.mean()) / replicas, float(between))
    among = np.mean((means / middle[:, None] - 1.0) ** 2)
    means = middle[:, None] + (means - middle[:, None]) * _kept(float(noise.mean()), float(among))
    by_replica = np.empty_like(seconds)
    by_replica[order] = np.repeat(means, sizes, axis=0)
    typical = np.empty(cell.size)
    typical[order] = np.repeat(middle, sizes)
    return typical, by_replica


def _noise(pipeline: Pipeline, seconds: Floats) -> float:
    """Return the squared relative spread of an action's duration within its microbatch.

    The stages of a replica work on the same microbatches, so long sequences are not noise.
    """
    order = np.lexsort((pipeline.stage, pipeline.microbatch, pipeline.chunk, pipeline.op))
    if pipeline.nodes % pipeline.stages:
        return 0.0
    table = seconds[order].reshape(-1, pipeline.stages, seconds.shape[1])
    relative = table / np.maximum(table.mean(axis=1, keepdims=True), 1e-12)
    kind = (pipeline.op * 65536 + pipeline.chunk)[order][:: pipeline.stages]
    edges = np.flatnonzero(np.r_[True, np.diff(kind) > 0])
    sizes = np.diff(np.r_[edges, kind.size])
    means = np.add.reduceat(relative, edges, axis=0) / sizes[:, None, None]
    residuals = relative - np.repeat(means, sizes, axis=0)
    freedom = max(kind.size - edges.size, 1) / kind.size
    return float(np.mean(residuals**2)) / freedom


def _kept(noise: float, observed: float) -> float:
    return max(0.0, 1.0 - noise / observed) if observed > 0 else 0.0


def cells(pipeline: Pipeline) -> Ints:
    """Return a number for the (stage, chunk, op) of each action."""
    cell: Ints = (pipeline.chunk * pipeline.stages + pipeline.stage) * 4 + pipeline.op
    return cell


def equal_seconds(pipeline: Pipeline, typical: Floats) -> Floats:
    """Return the durations if the work were spread evenly: the mean of each op. [action]"""
    sums = np.bincount(pipeline.op, weights=typical)
    counts = np.maximum(np.bincount(pipeline.op), 1)
    even: Floats = (sums / counts)[pipeline.op]
    return even


def delays(phase: PipelinePhase) -> Floats:
    """Return the time from when each action could have started until it did. [action, replica]"""
    ended = np.vstack([phase.ends, np.zeros((1, phase.ends.shape[1]))])
    ready = np.maximum(ended[phase.pipeline.previous], ended[phase.pipeline.needs])
    late: Floats = np.maximum(phase.starts - ready, 0.0)
    return late


def _delays(phase: PipelinePhase) -> tuple[Floats, Floats, Floats]:
    """Return the delays due to transfers, late data and the host. They sum to `delays`."""
    pipeline = phase.pipeline
    late = delays(phase)
    data = np.zeros_like(late)
    first = pipeline.first
    could = phase.starts - late
    data[first] = np.clip(phase.data_ready - could[first], 0.0, late[first])
    rest = late - data
    # Without a recorded receive, the delay after another stage's result counts as transfer.
    arrived = np.where(np.isnan(phase.arrived), phase.starts, phase.arrived)
    crossing = (pipeline.needs < pipeline.nodes)[:, None]
    # The input may have been there before a host that was busy otherwise received it.
    began = np.fmax(phase.receiving, could)
    transfers = np.where(crossing, np.clip(arrived - began, 0.0, rest), 0.0)
    launches = rest - transfers
    # Waits for data between two microbatches are subtracted from the launch delays of that rank.
    within = phase.data_seconds
    paused = np.maximum(pipeline.by_stage(launches), 1e-12)
    share = np.minimum(within / paused, 1.0)[pipeline.stage]
    return transfers, data + launches * share, launches * (1.0 - share)


def _idle_ratios(
    pipeline: Pipeline, lanes: list[tuple[Floats, Floats | None]], allowance: float
) -> Floats:
    """Return the idle ratios, means over the replicas. [lane, stage]"""
    replicas = lanes[0][0].shape[1]
    seconds = np.concatenate([lane for lane, _ in lanes], axis=1)
    late = np.concatenate(
        [np.zeros_like(lanes[0][0]) if delay is None else delay for _, delay in lanes], axis=1
    )
    phase = np.maximum(pipeline.phase_seconds(seconds, late), 1e-12)
    busy = pipeline.by_stage(seconds + np.minimum(late, allowance))
    idle = (1.0 - busy / phase).reshape(pipeline.stages, len(lanes), replicas)
    ratios: Floats = idle.mean(axis=2).T
    return ratios


def _measured(phase: PipelinePhase, late: Floats, allowance: float) -> Floats:
    busy = phase.pipeline.by_stage(phase.seconds + np.minimum(late, allowance))
    idle = 1.0 - busy / np.maximum(phase.total_seconds, 1e-12)
    measured: Floats = idle.mean(axis=1)
    return measured


def _unexplained(timing: StepTiming, topology: Topology, theory: float | None) -> list[StageBubble]:
    """Return the share of the phase without compute, if no microbatches are recorded."""
    compute = timing.compute
    if topology.pp < 2 or not compute.rank.size:
        return []
    grid = grid_of(topology)
    ranks, row = np.unique(compute.rank, return_inverse=True)
    replica = grid.replica[ranks]
    begin = np.full(grid.replicas, np.iinfo(np.int64).max)
    end = np.zeros(grid.replicas, dtype=np.int64)
    np.minimum.at(begin, replica[row], compute.start_ns)
    np.maximum.at(end, replica[row], compute.end_ns)
    total = (end - begin)[replica] / 1e9
    seconds = np.bincount(row, weights=(compute.end_ns - compute.start_ns) / 1e9)
    idle = np.clip(1.0 - seconds / np.maximum(total, 1e-12), 0.0, 1.0)
    stage = grid.stage[ranks]
    return [
        StageBubble(number, float(idle[stage == number].mean()), theory)
        for number in np.unique(stage).tolist()
    ]
