"""A simulated 3D-parallel job: seeded batches of spans, states, samples and exits.

Each step is simulated as a dependency graph (pipeline transfers, blocking tensor-parallel
collectives, the data-parallel reduction), so waits occur in the same places as in a real job.
Faults are attributes that a test sets between steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from paceline_server.detect.finding import Finding
from paceline_server.engine.engine import Engine
from paceline_server.engine.types import Outcome, Placement
from paceline_server.policy import Policy
from paceline_wire.batch import (
    Batch,
    DeviceEvent,
    Event,
    RankDefined,
    RankExited,
    RankState,
    Sample,
    SpanBlock,
)
from paceline_wire.ring import Frame, GroupDefinition, GroupProgress, StateView
from paceline_wire.spans import NONE_16, NONE_32, Flag, Op
from paceline_wire.topology import Topology

START_NS = 1_700_000_000_000_000_000
BOOT_OFFSET_NS = START_NS - 5_000_000_000_000  # CLOCK_REALTIME - CLOCK_MONOTONIC
TP, DP, WORLD = 1, 2, 3  # local ids of a rank's groups
JOB = "job-simulated"
HEALTHY_CLOCK_MHZ = 1980.0


@dataclass
class Faults:
    slow: dict[int, float] = field(default_factory=dict)  # by rank: multiple of self time
    slow_data: dict[int, float] = field(default_factory=dict)  # by rank: seconds
    clock_mhz: dict[int, float] = field(default_factory=dict)  # by rank: SM clock
    throttle: dict[int, str] = field(default_factory=dict)  # by rank: reason
    skew_ns: dict[str, int] = field(default_factory=dict)  # by node: clock error
    stage_cost: dict[int, float] = field(default_factory=dict)  # by stage: multiple of self time


class SimulatedJob:
    """A simulated job.

    `advance` feeds steps to `engine`; `outcomes` has the result of each tick.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        *,
        microbatches: int = 8,
        forward_seconds: float = 0.020,
        backward_seconds: float = 0.040,
        jitter: float = 0.01,
        seed: int = 0,
        ranks_per_node: int = 2,
        generation: int = 0,
        engine: Engine | None = None,
    ) -> None:
        self.topology = topology or Topology(2, 2, 2)
        self.microbatches = microbatches
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds
        self.jitter = jitter
        self.chance = random.Random(seed)
        self.ranks_per_node = ranks_per_node
        self.generation = generation
        self.engine = engine or Engine(JOB, Policy(start_timeout_seconds=120.0))
        self.faults = Faults()
        self.now_ns = START_NS
        self.step = 0
        self.host_factor = 1.0  # multiplies every rank's times: the whole host is slow
        self.spike_probability = 0.0
        self.muted_nodes: set[str] = set()
        self.others_respond = False  # nodes without ranks of this job
        self.outcomes: list[Outcome] = []
        self._rows: dict[int, list[tuple[int, ...]]] = {}
        self._heads: dict[int, int] = {}
        self._sequences: dict[tuple[object, ...], int] = {}
        self._batch_numbers: dict[str, int] = {}
        self._defined = False
        # by (rank, microbatch, send): when it is ready
        self._ends: dict[tuple[int, int, int], int] = {}
        self.place()

    # Layout

    @property
    def ranks(self) -> range:
        return range(self.topology.world_size)

    def node(self, rank: int) -> str:
        return f"node-{rank // self.ranks_per_node}"

    @property
    def nodes(self) -> list[str]:
        return sorted({self.node(rank) for rank in self.ranks})

    def on_node(self, node: str) -> list[int]:
        return [rank for rank in self.ranks if self.node(rank) == node]

    def placement(self, resume_step: int | None = None) -> Placement:
        return Placement(
            generation=self.generation,
            topology=self.topology,
            nodes={rank: self.node(rank) for rank in self.ranks},
            gpus={rank: rank % self.ranks_per_node for rank in self.ranks},
            metadata={"schedule": "gpipe", "microbatches": str(self.microbatches)},
            started_ns=self.now_ns,
            resume_step=resume_step,
        )

    def place(self, resume_step: int | None = None) -> None:
        self.engine.place(self.placement(resume_step))
        self._defined = False
        self._heads.clear()
        self._sequences.clear()

    def members(self, rank: int, group: int) -> list[int]:
        own = self.topology.coordinates(rank)
        if group == WORLD:
            return list(self.ranks)
        return [
            other
            for other in self.ranks
            if (place := self.topology.coordinates(other)).pp_rank == own.pp_rank
            and (place.dp_rank == own.dp_rank if group == TP else place.tp_rank == own.tp_rank)
        ]

    def definitions(self, rank: int) -> list[GroupDefinition]:
        return [
            GroupDefinition(group, name, self.members(rank, group), axis=name)
            for group, name in ((TP, "tp"), (DP, "dp"), (WORLD, "world"))
        ]

    # One step

    def advance(self, steps: int = 1) -> list[Outcome]:
        """Simulate whole steps; deliver each one and tick."""
        return [self.deliver(self.play()) for _ in range(steps)]

    def play(self) -> dict[int, list[tuple[int, ...]]]:
        """Return the rows of every rank for the next step, and move the time to its end."""
        self._rows = {rank: [] for rank in self.ranks}
        begin = dict.fromkeys(self.ranks, self.now_ns)
        free = dict(begin)
        for rank in self.ranks:
            seconds = 0.0005 + self.faults.slow_data.get(rank, 0.0)
            free[rank] = self._span(rank, Op.DATA_WAIT, free[rank], self._noisy(seconds))
        for replica in range(self.topology.dp):
            self._pipeline(replica, free)
        for rank in self.ranks:
            if self.topology.coordinates(rank).dp_rank == 0:
                self._collective(self.members(rank, DP), DP, free, 0.002)
        for rank in self.ranks:
            free[rank] = self._span(rank, Op.OPTIMIZER, free[rank], self._noisy(0.003))
        self._collective(list(self.ranks), WORLD, free, 0.0005)
        for rank in self.ranks:
            self._span(rank, Op.STEP, begin[rank], (free[rank] - begin[rank]) / 1e9)
        self.now_ns = max(free.values())
        self.step += 1
        return self._rows

    def _pipeline(self, replica: int, free: dict[int, int]) -> None:
        stages = range(self.topology.pp)
        for ops, order, work, name in (
            ((Op.FORWARD_RECV, Op.FORWARD_SEND), list(stages), self.forward_seconds, Op.FORWARD),
            (
                (Op.BACKWARD_RECV, Op.BACKWARD_SEND),
                list(reversed(stages)),
                self.backward_seconds,
                Op.BACKWARD,
            ),
        ):
            for microbatch in range(self.microbatches):
                for position, stage in enumerate(order):
                    ranks = [
                        self.topology.rank(replica, stage, tp) for tp in range(self.topology.tp)
                    ]
                    if position:
                        self._transfer(replica, order[position - 1], stage, ops, microbatch, free)
                    self._compute(ranks, stage, name, work, microbatch, free)

    def _compute(
        self,
        ranks: list[int],
        stage: int,
        op: Op,
        seconds: float,
        microbatch: int,
        free: dict[int, int],
    ) -> None:
        """Add self time and a blocking collective among the TP peers in one span."""
        begin = dict(free)
        for rank in ranks:
            slow = self.faults.slow.get(rank, 1.0) * self.faults.stage_cost.get(stage, 1.0)
            free[rank] += int(self._noisy(seconds * slow) * 1e9)
        if len(ranks) > 1:
            self._collective(ranks, TP, free, 0.0005, microbatch)
        for rank in ranks:
            self._span(rank, op, begin[rank], (free[rank] - begin[rank]) / 1e9, microbatch)

    def _transfer(
        self,
        replica: int,
        source_stage: int,
        stage: int,
        ops: tuple[Op, Op],
        microbatch: int,
        free: dict[int, int],
    ) -> None:
        receive, send = ops
        for tp in range(self.topology.tp):
            source = self.topology.rank(replica, source_stage, tp)
            target = self.topology.rank(replica, stage, tp)
            sequence = self._next(("p2p", source, target))
            sent_ns = self._ends[source, microbatch, send]
            self._span(
                source, send, sent_ns, 0.0005, microbatch, peer=target, sequence=sequence, flags=1
            )
            pending = max(free[target], sent_ns) + 400_000
            self._span(
                target,
                receive,
                free[target],
                (pending - free[target]) / 1e9,
                microbatch,
                peer=source,
                sequence=sequence,
            )
            free[target] = pending

    def _collective(
        self,
        ranks: list[int],
        group: int,
        free: dict[int, int],
        seconds: float,
        microbatch: int | None = None,
    ) -> None:
        done = max(free[rank] for rank in ranks) + int(seconds * 1e9)
        for rank in ranks:
            sequence = self._next((rank, group))
            self._span(
                rank,
                Op.ALL_REDUCE,
                free[rank],
                (done - free[rank]) / 1e9,
                microbatch,
                group=group,
                sequence=sequence,
            )
            free[rank] = done

    def _span(
        self,
        rank: int,
        op: int,
        start_ns: int,
        seconds: float,
        microbatch: int | None = None,
        *,
        group: int = 0,
        peer: int | None = None,
        sequence: int = 0,
        flags: int = Flag.NONE,
    ) -> int:
        """Record one span and return its end."""
        length = max(int(seconds * 1e9), 0)
        if microbatch is not None and op in (Op.FORWARD, Op.BACKWARD):
            send = Op.FORWARD_SEND if op == Op.FORWARD else Op.BACKWARD_SEND
            self._ends[rank, microbatch, send] = start_ns + length
        index = self._heads.get(rank, 0)
        self._heads[rank] = index + 1
        self._rows[rank].append(
            (
                index,
                op | group << 16 | NONE_16 << 32 | flags << 48,
                self.step | (NONE_32 if microbatch is None else microbatch) << 32,
                NONE_32 if peer is None else peer,
                0,
                sequence,
                start_ns - BOOT_OFFSET_NS,
                length,
            )
        )
        return start_ns + length

    def _next(self, key: tuple[object, ...]) -> int:
        self._sequences[key] = self._sequences.get(key, 0) + 1
        return self._sequences[key]

    def _noisy(self, seconds: float) -> float:
        noise = self.chance.lognormvariate(0.0, self.jitter) if self.jitter else 1.0
        if self.spike_probability and self.chance.random() < self.spike_probability:
            noise *= 2.0
        return seconds * noise * self.host_factor

    # Delivery

    def deliver(self, rows: dict[int, list[tuple[int, ...]]]) -> Outcome:
        """Deliver one batch per node 100 ms later, then run a tick."""
        received_ns = self.now_ns + 100_000_000
        for batch in self.batches(rows):
            self.engine.feed(batch, received_ns)
        return self.tick(received_ns)

    def tick(self, now_ns: int) -> Outcome:
        outcome = self.engine.tick(now_ns, now_ns if self.others_respond else 0)
        self.outcomes.append(outcome)
        return outcome

    def batches(self, rows: dict[int, list[tuple[int, ...]]]) -> Iterator[Batch]:
        for node in self.nodes:
            if node in self.muted_nodes:
                continue
            ranks = self.on_node(node)
            events: list[Event] = [] if self._defined else [self._define(rank) for rank in ranks]
            events += [self.state(rank) for rank in ranks]
            yield self.batch(
                node,
                events=events,
                spans=[self.block(rank, rows[rank]) for rank in ranks if rows.get(rank)],
                samples=[sample for rank in ranks for sample in self.samples(rank)],
            )
        self._defined = True

    def batch(
        self,
        node: str,
        *,
        events: list[Event] | None = None,
        spans: list[SpanBlock] | None = None,
        samples: list[Sample] | None = None,
    ) -> Batch:
        number = self._batch_numbers.get(node, 0)
        self._batch_numbers[node] = number + 1
        return Batch(
            agent_id=node,
            boot_id="boot",
            sequence=number,
            packed_ns=self.now_ns + self.faults.skew_ns.get(node, 0),
            events=events or [],
            spans=spans or [],
            samples=samples or [],
        )

    def block(self, rank: int, rows: list[tuple[int, ...]]) -> SpanBlock:
        columns = np.array(rows, dtype=np.uint64).T.tobytes()
        return SpanBlock(JOB, self.generation, rank, columns, self.offset_ns(rank))

    def offset_ns(self, rank: int) -> int:
        return BOOT_OFFSET_NS + self.faults.skew_ns.get(self.node(rank), 0)

    def _define(self, rank: int) -> RankDefined:
        return RankDefined(
            time_ns=self.now_ns,
            job=JOB,
            generation=self.generation,
            rank=rank,
            definitions=self.definitions(rank),
        )

    def samples(self, rank: int) -> list[Sample]:
        gpu = {"gpu": str(rank % self.ranks_per_node)}
        time_ns = self.now_ns + self.faults.skew_ns.get(self.node(rank), 0)
        throttled = self.faults.throttle.get(rank)
        clock = self.faults.clock_mhz.get(rank, HEALTHY_CLOCK_MHZ)
        found = [
            Sample("DCGM_FI_DEV_SM_CLOCK", gpu, clock, time_ns),
            Sample("DCGM_FI_DEV_GPU_TEMP", gpu, 92.0 if throttled else 61.0, time_ns),
        ]
        reasons = ("sw_thermal_slowdown", "hw_thermal_slowdown", "sw_power_cap", "hw_slowdown")
        found += [
            Sample(
                "paceline_gpu_throttle_reason",
                {**gpu, "reason": reason},
                float(throttled == reason),
                time_ns,
            )
            for reason in reasons
        ]
        return found

    def state(
        self,
        rank: int,
        *,
        frames: list[Frame] | None = None,
        groups: list[GroupProgress] | None = None,
        process_state: str | None = "S",
        status: str = "running",
        loss: float | None = 2.0,
        head: int | None = None,
    ) -> RankState:
        """Return a rank's state; times of frames and groups are converted to CLOCK_MONOTONIC."""
        return RankState(
            time_ns=self.now_ns + self.faults.skew_ns.get(self.node(rank), 0),
            job=JOB,
            generation=self.generation,
            rank=rank,
            clock_offset_ns=self.offset_ns(rank),
            process_state=process_state,
            cpu_seconds=1.0,
            view=StateView(
                head=self._heads.get(rank, 0) if head is None else head,
                step=self.step,
                step_started_ns=0,
                microbatch=None,
                status=status,
                loss_step=self.step - 1 if self.step and loss is not None else None,
                loss=loss,
                gradient_norm=None,
                evaluation_step=None,
                evaluation_loss=None,
                frames=frames or [],
                groups=groups or [],
                peers=[],
            ),
        )

    def exit(
        self,
        rank: int,
        *,
        exit_code: int | None = None,
        signal: int | None = None,
        commanded: bool = False,
        log_tail: str = "",
        at_ns: int | None = None,
        received_ns: int | None = None,
        renewable: bool = False,
        since_error_ns: int = 0,
    ) -> None:
        skew_ns = self.faults.skew_ns.get(self.node(rank), 0)
        event = RankExited(
            renewable=renewable,
            since_error_ns=since_error_ns,
            time_ns=self.now_ns + skew_ns if at_ns is None else at_ns,
            job=JOB,
            generation=self.generation,
            rank=rank,
            pid=4000 + rank,
            exit_code=exit_code,
            signal=signal,
            commanded=commanded,
            log_tail=log_tail,
        )
        batch = self.batch(self.node(rank), events=[event])
        self.engine.feed(batch, self.now_ns if received_ns is None else received_ns)

    def device_event(self, node: str, kind: str, device: str, detail: str = "") -> None:
        event = DeviceEvent(time_ns=self.now_ns, kind=kind, device=device, detail=detail)
        self.engine.feed(self.batch(node, events=[event]), self.now_ns)

    def wait(self, seconds: float, states: dict[int, RankState] | None = None) -> list[Outcome]:
        """Let time pass without steps; each node reports its (given) states every half second."""
        outcomes = []
        for _ in range(round(seconds / 0.5)):
            self.now_ns += 500_000_000
            for node in self.nodes:
                if node not in self.muted_nodes:
                    events: list[Event] = [
                        self._restamped(states[rank])
                        for rank in self.on_node(node)
                        if states and rank in states
                    ]
                    self.engine.feed(self.batch(node, events=events), self.now_ns)
            outcomes.append(self.tick(self.now_ns))
        return outcomes

    def _restamped(self, state: RankState) -> RankState:
        return RankState(
            **{
                **{name: getattr(state, name) for name in state.__struct_fields__},
                "time_ns": self.now_ns + self.faults.skew_ns.get(self.node(state.rank), 0),
            }
        )

    @property
    def findings(self) -> list[Finding]:
        return [finding for outcome in self.outcomes for finding in outcome.findings]
