"""A simulated running job with injected slowdowns, in the form that the step model measures.

All steps, dp ranks and tp ranks are simulated at once, as arrays of that shape. Steps are
independent of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline_server.steps.grid import grid_of
from paceline_server.steps.timing import (
    CollectiveTimes,
    ComputeTimes,
    RankTimes,
    StepTiming,
    TransferTimes,
)
from paceline_server.whatif.schedules import ScheduledAction, actions, usual_part
from paceline_wire.spans import Op
from paceline_wire.topology import Topology

Times = npt.NDArray[np.float64]  # [step, dp rank, tp rank]

BEGIN_NS = 1_700_000_000_000_000_000
STEP_NS = 100_000_000_000
DATA_SECONDS, REDUCTION_SECONDS, EXCHANGE_SECONDS, OPTIMIZER_SECONDS = 0.001, 0.01, 0.002, 0.005
SEND = {Op.FORWARD: Op.FORWARD_SEND, Op.BACKWARD: Op.BACKWARD_SEND}
COST = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_WEIGHT: 1.0}


@dataclass
class PlayedRun:
    """A job to simulate.

    `slow` (by rank) and `stage_pace` (by stage) multiply compute times. `link_seconds`, by (dp
    rank, source stage), and `data_seconds`, by rank, replace the default times.
    """

    topology: Topology
    schedule: str = "1f1b"
    microbatches: int = 8
    chunks: int = 1
    steps: int = 4
    forward_seconds: float = 0.02
    jitter: float = 0.0
    spread: float = 1.0  # ratio of the longest to the shortest microbatch
    tensor_parallel_seconds: float = 0.002
    transfer_seconds: float = 0.0005
    pause_seconds: float = 0.0002  # pause of the host before each computation
    slow: dict[int, float] = field(default_factory=dict)
    stage_pace: dict[int, float] = field(default_factory=dict)
    link_seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    data_seconds: dict[int, float] = field(default_factory=dict)
    # by (rank, microbatch): additional seconds of its forward
    pauses: dict[tuple[int, int], float] = field(default_factory=dict)
    # sends block until received; only for GPipe, because other schedules deadlock
    blocking_sends: bool = False
    awaited_sends: bool = False  # asynchronous sends, awaited after the last compute operation
    skew_seconds: Callable[[int], float] = lambda rank: 0.0
    seed: int = 1

    def play(self) -> tuple[list[StepTiming], Times]:
        """Return the measured timings and the true seconds of each step."""
        self.random = np.random.default_rng(self.seed)
        topology = self.topology
        self.shape = (self.steps, topology.dp, topology.tp)
        self.ranks = grid_of(topology).ranks
        drawn = np.random.default_rng(self.seed + 1).uniform(
            1.0, self.spread, (self.microbatches, self.steps, topology.dp, 1)
        )
        self.length = drawn / ((1.0 + self.spread) / 2)
        self.computed: list[tuple[int, ScheduledAction, Times, Times, Times]] = []
        self.transferred: list[tuple[int, int, ScheduledAction, Times, Times, Times, Times]] = []
        data = [self._per_rank(self.data_seconds, stage, DATA_SECONDS) for stage in self._stages]
        self.free = [self._zeros() + seconds for seconds in data]
        self.done: dict[tuple[int, int, int], Times] = {}
        self.sending: set[int] = set()  # stages that are sending
        orders = actions(self.schedule, topology.pp, self.microbatches, self.chunks)
        position = [0] * topology.pp
        moved = True
        while moved:
            moved = False
            for stage, order in enumerate(orders):
                while position[stage] < len(order) and self._compute(stage, order[position[stage]]):
                    position[stage] += 1
                    moved = True
        assert position == [len(order) for order in orders], "the schedule is stuck"
        return self._finish(data)

    @property
    def _stages(self) -> range:
        return range(self.topology.pp)

    def _zeros(self) -> Times:
        return np.zeros(self.shape)

    def _per_rank(self, chosen: dict[int, float], stage: int, usual: float) -> Times:
        values = [chosen.get(rank, usual) for rank in self.ranks[stage].ravel().tolist()]
        return np.array(values).reshape(self.shape[1:])

    def _compute(self, stage: int, action: ScheduledAction) -> bool:
        stages = self.topology.pp
        part = usual_part(stage, action.chunk, stages)
        last = stages * self.chunks - 1
        source = {Op.FORWARD: part - 1, Op.BACKWARD: part + 1}.get(action.op, -1)
        if stage in self.sending:
            return False
        ready = self.free[stage]
        if 0 <= source <= last:
            if (action.op, source, action.microbatch) not in self.done:
                return False
            if source % stages != stage:
                ready = self._receive(source % stages, stage, source // stages, action)
        pace = COST[action.op] * self.forward_seconds / self.chunks
        pace *= self.stage_pace.get(stage, 1.0)
        own = pace * self._per_rank(self.slow, stage, 1.0) * np.ones(self.shape)
        own *= self.random.lognormal(0.0, self.jitter, self.shape) * self.length[action.microbatch]
        if action.op == Op.FORWARD:
            paused = {
                rank: seconds
                for (rank, at), seconds in self.pauses.items()
                if at == action.microbatch
            }
            own += self._per_rank(paused, stage, 0.0)
        start = ready + self.pause_seconds
        alone = start + own
        end = alone
        if self.topology.tp > 1:
            end = alone.max(axis=2, keepdims=True) + self.tensor_parallel_seconds + self._zeros()
        self.free[stage] = end
        self.done[action.op, part, action.microbatch] = end
        target = {Op.FORWARD: part + 1, Op.BACKWARD: part - 1}.get(action.op, -1)
        if self.blocking_sends and 0 <= target <= last:
            self.sending.add(stage)
        self.computed.append((stage, action, start, end, own))
        return True

    def _receive(self, source: int, target: int, chunk: int, action: ScheduledAction) -> Times:
        sent = self.done[action.op, chunk * self.topology.pp + source, action.microbatch]
        posted = self.free[target]
        seconds = self._zeros() + self.transfer_seconds
        for (dp_rank, stage), slow in self.link_seconds.items():
            if stage == min(source, target):
                seconds[:, dp_rank] = slow
        end = np.maximum(sent, posted) + seconds
        if self.blocking_sends:
            self.free[source] = end
            self.sending.remove(source)
        self.transferred.append(
            (source, target, action._replace(chunk=chunk), sent, posted, end, seconds)
        )
        return end

    def _finish(self, data: list[Times]) -> tuple[list[StepTiming], Times]:
        dp = self.topology.dp
        if self.awaited_sends:
            for source, _, _, _, _, end, _ in self.transferred:
                self.free[source] = np.maximum(self.free[source], end)
        reduced = [
            free.max(axis=1, keepdims=True) + REDUCTION_SECONDS + self._zeros() if dp > 1 else free
            for free in self.free
        ]
        together = np.max(reduced, axis=(0, 2, 3)) + EXCHANGE_SECONDS
        ends = np.broadcast_to((together + OPTIMIZER_SECONDS)[:, None, None], self.shape)
        return [self._timing(step, ends, data) for step in range(self.steps)], ends[:, 0, 0]

    def _timing(self, step: int, ends: Times, data: list[Times]) -> StepTiming:
        skew = np.array([self.skew_seconds(rank) for rank in self.ranks.ravel().tolist()])
        skew = skew.reshape(self.ranks.shape)
        base = BEGIN_NS + step * STEP_NS

        def moment(times: Times, stage: int) -> npt.NDArray[np.int64]:
            seconds = (np.broadcast_to(times, self.shape)[step] + skew[stage]).ravel()
            return base + np.round(seconds * 1e9).astype(np.int64)

        def constant(value: int) -> npt.NDArray[np.int64]:
            return np.full(self.ranks[0].size, value)

        columns: dict[str, list[npt.NDArray[np.int64]]] = {}
        own_seconds = []
        for stage, action, start, end, own in self.computed:
            for name, values in (
                ("rank", self.ranks[stage].ravel()),
                ("op", constant(action.op)),
                ("microbatch", constant(action.microbatch)),
                ("chunk", constant(action.chunk)),
                ("start_ns", moment(start, stage)),
                ("end_ns", moment(end, stage)),
                ("tokens", constant(0)),
                ("squared_tokens", constant(0)),
            ):
                columns.setdefault(name, []).append(values)
            own_seconds.append(own[step].ravel())
        compute = ComputeTimes(
            **{name: np.concatenate(values) for name, values in columns.items()},
            self_seconds=np.concatenate(own_seconds),
        )
        world = self.ranks.ravel()
        zeros = np.zeros(world.size)
        step_seconds = np.broadcast_to(ends[step], self.ranks.shape).ravel()
        ranks = RankTimes(
            rank=world,
            start_ns=base + np.round(skew.ravel() * 1e9).astype(np.int64),
            end_ns=base + np.round((step_seconds + skew.ravel()) * 1e9).astype(np.int64),
            step_seconds=step_seconds,
            self_seconds=zeros,
            compute_seconds=zeros,
            communication_seconds=zeros,
            wait_seconds=zeros,
            bubble_seconds=zeros,
            data_wait_seconds=np.stack(data).ravel(),
            optimizer_seconds=zeros + OPTIMIZER_SECONDS,
            checkpoint_seconds=zeros,
            evaluation_seconds=zeros,
            evaluation_wait_seconds=zeros,
            gc_seconds=zeros,
            host_seconds=zeros,
            overlapped_seconds=zeros,
            routed_bytes=np.zeros_like(world),
        )
        groups, collectives = self._collectives()
        return StepTiming(
            step, ranks, compute, self._transfers(step, moment, constant), collectives, groups
        )

    def _transfers(self, step, moment, constant) -> TransferTimes:  # type: ignore[no-untyped-def]
        names = ("source", "destination", "op", "microbatch", "chunk", "bytes")
        moments = ("send_start_ns", "send_end_ns", "receive_start_ns", "end_ns")
        columns: dict[str, list[npt.NDArray[np.int64]]] = {name: [] for name in (*names, *moments)}
        seconds = []
        for source, target, action, sent, posted, end, duration in self.transferred:
            for name, values in zip(
                columns,
                (
                    self.ranks[source].ravel(),
                    self.ranks[target].ravel(),
                    constant(SEND[action.op]),
                    constant(action.microbatch),
                    constant(action.chunk),
                    constant(1 << 20),
                    moment(sent, source),
                    moment(self._send_end(source, sent, end), source),
                    moment(posted, target),
                    moment(end, target),
                ),
                strict=True,
            ):
                columns[name].append(values)
            seconds.append(duration[step].ravel())
        joined = {
            name: np.concatenate(values) if values else np.empty(0, np.int64)
            for name, values in columns.items()
        }
        return TransferTimes(
            **joined, transfer_seconds=np.concatenate(seconds) if seconds else np.empty(0)
        )

    def _send_end(self, source: int, sent: Times, end: Times) -> Times:
        if self.awaited_sends:
            return self.free[source]
        return end if self.blocking_sends else sent

    def _collectives(self) -> tuple[dict[int, tuple[int, ...]], CollectiveTimes]:
        groups = {0: tuple(self.ranks.ravel().tolist())}
        seconds = [EXCHANGE_SECONDS]
        if self.topology.dp > 1:
            for stage in self._stages:
                for tp_rank in range(self.topology.tp):
                    groups[len(groups)] = tuple(self.ranks[stage, :, tp_rank].tolist())
                    seconds.append(REDUCTION_SECONDS)
        keys = np.arange(len(groups))
        ones = np.ones(len(groups), np.int64)
        return groups, CollectiveTimes(
            group=keys,
            op=ones * Op.ALL_REDUCE,
            sequence=ones,
            bytes=ones,
            participants=np.array([len(members) for members in groups.values()]),
            last_rank=ones * 0,
            transfer_seconds=np.array(seconds),
            spread_seconds=np.zeros(len(groups)),
        )
