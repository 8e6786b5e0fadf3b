"""One step of a pipelined job as a `StepTiming`, simulated from durations that a test sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline_server.steps.pipeline import Pipeline, PipelineAction
from paceline_server.steps.timing import (
    CollectiveTimes,
    ComputeTimes,
    Floats,
    RankTimes,
    StepTiming,
    TransferTimes,
)
from paceline_wire.spans import Op
from paceline_wire.topology import Topology

START_NS = 1_700_000_000_000_000_000


def gpipe(stages: int, microbatches: int) -> list[list[PipelineAction]]:
    both = (Op.FORWARD, Op.BACKWARD)
    return [
        [PipelineAction(op, at) for op in both for at in range(microbatches)] for _ in range(stages)
    ]


def one_forward_one_backward(stages: int, microbatches: int) -> list[list[PipelineAction]]:
    return interleaved(stages, microbatches, 1)


def interleaved(stages: int, microbatches: int, chunks: int) -> list[list[PipelineAction]]:
    """Return Megatron's interleaved schedule: groups of as many microbatches as stages."""
    group = stages * chunks

    def place(index: int, *, backward: bool) -> tuple[int, int]:
        if chunks == 1:
            return index, 0
        chunk = index % group // stages
        microbatch = index // group * stages + index % stages
        return microbatch, chunks - 1 - chunk if backward else chunk

    order = []
    total = microbatches * chunks
    for stage in range(stages):
        ahead = stages - stage - 1
        if chunks > 1:
            ahead = ahead * 2 + (chunks - 1) * stages
        ahead = min(ahead, total)
        forwards = [PipelineAction(Op.FORWARD, *place(at, backward=False)) for at in range(total)]
        backwards = [PipelineAction(Op.BACKWARD, *place(at, backward=True)) for at in range(total)]
        taken = forwards[:ahead]
        for at in range(total):
            taken += forwards[ahead + at : ahead + at + 1]
            taken.append(backwards[at])
        order.append(taken)
    return order


@dataclass
class SimulatedStep:
    """The deviations of one step; all other durations are equal, without gaps between actions."""

    topology: Topology
    order: Sequence[Sequence[PipelineAction]]
    forward_seconds: float = 0.020
    backward_seconds: float = 0.040
    transfer_seconds: float = 0.0
    jitter: float = 0.0
    stage_cost: dict[int, float] = field(default_factory=dict)
    slow: dict[int, float] = field(default_factory=dict)  # by rank: multiple
    links: dict[tuple[int, int], float] = field(default_factory=dict)  # by stages: seconds
    late_data: dict[int, float] = field(default_factory=dict)  # by rank: seconds
    pauses: dict[int, float] = field(default_factory=dict)  # by rank: seconds before each action
    receives_late: bool = False  # a pause is before the action's receive, not after it
    lengths: Sequence[int] | None = None  # length of each microbatch, which has one sequence
    skew_ns: dict[int, int] = field(default_factory=dict)  # by stage: error of its clock
    after_seconds: float = 0.010  # optimizer and reduction
    gc: dict[int, float] = field(default_factory=dict)
    checkpoint: dict[int, float] = field(default_factory=dict)
    evaluation: dict[int, float] = field(default_factory=dict)

    def play(self, step: int = 0, seed: int = 0) -> StepTiming:
        random = np.random.default_rng((seed, step))
        topology, pipeline = self.topology, Pipeline(self.order)
        replicas = topology.dp * topology.tp  # lanes, as if tensor peers were replicas
        ranks = np.arange(topology.world_size).reshape(topology.pp, replicas)
        seconds = self._seconds(pipeline, ranks, random)
        links = self._links(pipeline, ranks)
        delays = links + self._delays(pipeline, ranks)
        ends = pipeline.ends(seconds, delays)
        received = ends - seconds - (0.0 if self.receives_late else delays - links)
        receives = received - links, received
        return self._timing(step, pipeline, ranks, ends - seconds, ends, receives)

    def _seconds(
        self, pipeline: Pipeline, ranks: np.ndarray, random: np.random.Generator
    ) -> Floats:
        base = np.where(pipeline.op == Op.FORWARD, self.forward_seconds, self.backward_seconds)
        base = base * np.array([self.stage_cost.get(one, 1.0) for one in pipeline.stage])
        if self.lengths is not None:
            squares = np.square(np.array(self.lengths, dtype=np.float64))
            base = base * (squares / squares.mean())[pipeline.microbatch]
        slow = np.vectorize(lambda rank: self.slow.get(rank, 1.0))(ranks)
        noise = random.lognormal(0.0, self.jitter, (pipeline.nodes, ranks.shape[1]))
        found: Floats = base[:, None] * slow[pipeline.stage] * noise
        return found

    def _links(self, pipeline: Pipeline, ranks: np.ndarray) -> Floats:
        found = np.zeros((pipeline.nodes, ranks.shape[1]))
        for node in np.flatnonzero(pipeline.needs < pipeline.nodes):
            link = int(pipeline.stage[pipeline.needs[node]]), int(pipeline.stage[node])
            found[node] += self.links.get(link, self.transfer_seconds)
        return found

    def _delays(self, pipeline: Pipeline, ranks: np.ndarray) -> Floats:
        found = np.zeros((pipeline.nodes, ranks.shape[1]))
        for rank, late in self.late_data.items():
            stage, lane = np.argwhere(ranks == rank)[0]
            found[pipeline.first[stage], lane] += late
        for rank, pause in self.pauses.items():
            stage, lane = np.argwhere(ranks == rank)[0]
            found[pipeline.stage == stage, lane] += pause
        return found

    def _timing(
        self,
        step: int,
        pipeline: Pipeline,
        ranks: np.ndarray,
        starts: Floats,
        ends: Floats,
        receives: tuple[Floats, Floats],
    ) -> StepTiming:
        who = ranks[pipeline.stage].T.ravel()
        skew = np.array([self.skew_ns.get(stage, 0) for stage in pipeline.stage])

        def moments(values: Floats) -> np.ndarray:
            found = (values * 1e9).astype(np.int64) + skew[:, None]
            return (found + START_NS + step * 10_000_000_000).T.ravel()

        count = ranks.shape[1]
        length = np.zeros(pipeline.nodes, dtype=np.int64)
        if self.lengths is not None:
            length = np.array(self.lengths)[pipeline.microbatch]
        order = np.argsort(who, kind="stable")
        compute = ComputeTimes(
            rank=who[order],
            op=np.tile(pipeline.op, count)[order],
            microbatch=np.tile(pipeline.microbatch, count)[order],
            chunk=np.tile(pipeline.chunk, count)[order],
            start_ns=moments(starts)[order],
            end_ns=moments(ends)[order],
            self_seconds=(ends - starts).T.ravel()[order],
            tokens=np.tile(length, count)[order],
            squared_tokens=np.tile(length**2, count)[order],
        )
        crossing = np.flatnonzero(pipeline.needs < pipeline.nodes)
        sources = pipeline.needs[crossing]
        forward = pipeline.op[crossing] == Op.FORWARD
        nowhere, nothing = np.empty(0, np.int64), np.empty(0)
        began, arrived = (
            moments(each).reshape(count, -1)[:, crossing].ravel() for each in receives
        )
        transfers = TransferTimes(
            source=ranks[pipeline.stage[sources]].T.ravel(),
            destination=ranks[pipeline.stage[crossing]].T.ravel(),
            op=np.tile(np.where(forward, Op.FORWARD_SEND, Op.BACKWARD_SEND), count),
            microbatch=np.tile(pipeline.microbatch[crossing], count),
            chunk=np.tile(pipeline.chunk[sources], count),
            bytes=np.zeros_like(arrived),
            send_start_ns=arrived,
            send_end_ns=arrived,
            receive_start_ns=began,
            end_ns=arrived,
            transfer_seconds=np.zeros(arrived.size),
        )
        return StepTiming(
            step=step,
            ranks=self._rank_times(step, ranks, pipeline.by_stage(ends - starts), ends),
            compute=compute,
            transfers=transfers,
            collectives=CollectiveTimes(*[nowhere] * 6, nothing, nothing),
            groups={},
        )

    def _rank_times(self, step: int, ranks: np.ndarray, busy: Floats, ends: Floats) -> RankTimes:
        everyone = ranks.ravel()
        zero = np.zeros(everyone.size)

        def given(values: dict[int, float]) -> Floats:
            return np.array([values.get(rank, 0.0) for rank in everyone.tolist()])

        data, gc, checkpoint, evaluation = map(
            given, (self.late_data, self.gc, self.checkpoint, self.evaluation)
        )
        begin = START_NS + step * 10_000_000_000
        total = float(ends.max()) + self.after_seconds + max(gc.max(), 0)
        total += checkpoint.max() + evaluation.max()
        skew = np.array([self.skew_ns.get(stage, 0) for stage in range(len(ranks))])
        start = begin + np.repeat(skew, ranks.shape[1])
        return RankTimes(
            rank=everyone,
            start_ns=start,
            end_ns=start + int(total * 1e9),
            step_seconds=np.full(everyone.size, total),
            self_seconds=busy.ravel(),
            compute_seconds=busy.ravel(),
            communication_seconds=zero,
            wait_seconds=zero,
            bubble_seconds=zero,
            data_wait_seconds=data,
            optimizer_seconds=zero,
            checkpoint_seconds=checkpoint,
            evaluation_seconds=evaluation,
            evaluation_wait_seconds=zero,
            gc_seconds=gc,
            host_seconds=zero,
            overlapped_seconds=zero,
            routed_bytes=np.zeros_like(everyone),
        )
