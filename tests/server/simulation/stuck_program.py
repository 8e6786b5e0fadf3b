"""A training program that is simulated until it deadlocks because of one faulty rank.

Every rank runs a list of instructions per step (GPipe, tensor-parallel collectives, overlapped or
blocking data-parallel ones). Communications match by count, as in any backend, so a fault of one
rank blocks the same ranks as in reality. The results are the spans of the complete steps and the
final state pages.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from paceline_wire.batch import Batch, RankDefined, RankState, SpanBlock
from paceline_wire.ring import Frame, GroupDefinition, GroupProgress, PeerProgress, StateView
from paceline_wire.spans import NONE_16, NONE_32, Flag, Op
from paceline_wire.topology import Topology

START_NS = 1_700_000_000_000_000_000
OFFSET_NS = START_NS - 5_000_000_000_000  # CLOCK_REALTIME - CLOCK_MONOTONIC
JOB = "job-stuck"
WORLD, TP, DP, PP = 0, 1, 2, 3  # local ids of groups
_NAMES = {WORLD: "world", TP: "tp", DP: "dp", PP: "pp"}

Kind = Literal["host", "collective", "launch", "wait", "send", "receive"]


@dataclass(frozen=True)
class Instruction:
    kind: Kind
    op: int = 0
    seconds: float = 0.0
    group: int = 0
    bytes: int = 0
    peer: int = 0
    inside: int | None = None  # the enclosing compute operation


@dataclass(frozen=True)
class Fault:
    """A fault at one instruction (an index) of one rank, in the last step.

    `miss`: the last step ends with a barrier of all replicas, as before an evaluation, which only
    this rank does not enter.
    """

    kind: Literal[
        "none", "stop", "skip", "another_op", "another_size", "swap", "stray", "miss", "stall"
    ]
    rank: int = 0
    index: int = 0


@dataclass(frozen=True)
class Shape:
    topology: Topology
    microbatches: int = 2
    overlapped: bool = False  # data-parallel buckets are launched during the backwards
    sequence_parallel: bool = False  # reduce-scatter and all-gather instead of all-reduce
    ends_with_world: bool = True  # the loss is reduced over all ranks
    rendezvous: bool = False  # a send ends only when its receive has begun
    varying: bool = False  # microbatches have different lengths in each step
    on_device: bool = False  # communications take no host time; the host waits at the step's end


@dataclass
class _Rank:
    """The position of one rank in its program."""

    clock_ns: int = START_NS
    step: int = 0
    index: int = 0
    entered: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    left: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    since: dict[tuple[str, int], int] = field(default_factory=dict)
    latest: dict[int, tuple[int, int]] = field(default_factory=dict)  # by group: (op, bytes)
    step_started_ns: int = START_NS
    blocked: Instruction | None = None
    blocked_since_ns: int = 0
    rows: list[tuple[int, ...]] = field(default_factory=list)


class StuckProgram:
    """A simulated program: `play` runs complete steps and then the faulty one, to its end."""

    def __init__(self, shape: Shape, fault: Fault, *, whole_steps: int = 4, seed: int = 0) -> None:
        self.shape, self.fault = shape, fault
        self.topology = shape.topology
        self.whole_steps = whole_steps
        self.chance = random.Random(seed)
        self._members: dict[tuple[int, int], list[int]] = {}
        self.ranks = {rank: _Rank() for rank in range(self.topology.world_size)}
        self._programs = {rank: self.program(rank) for rank in self.ranks}
        self._last_programs = {rank: self._last_program(rank) for rank in self.ranks}
        self._arrived: dict[tuple[int, ...], dict[int, tuple[int, object]]] = defaultdict(dict)
        self.stalled: tuple[int, ...] | None = None  # the communication that never ends
        self.also_stopped: set[int] = set()  # at the start of the faulty step
        self.slow: dict[int, float] = {}  # by rank: multiple of its compute time
        self._until_ns: int | None = None

    # --- the program ----------------------------------------------------------------------

    def members(self, rank: int, group: int) -> list[int]:
        members = self._members.get((rank, group))
        if members is None:
            members = self._members[rank, group] = self._find_members(rank, group)
        return members

    def _find_members(self, rank: int, group: int) -> list[int]:
        own = self.topology.coordinates(rank)
        place = [(own.dp_rank, own.pp_rank, own.tp_rank)]
        free = {TP: {2}, DP: {0}, PP: {1}, WORLD: {0, 1, 2}}[group]
        found = []
        for other in self.ranks:
            theirs = self.topology.coordinates(other)
            key = (theirs.dp_rank, theirs.pp_rank, theirs.tp_rank)
            if all(axis in free or key[axis] == place[0][axis] for axis in range(3)):
                found.append(other)
        return found

    def program(self, rank: int) -> list[Instruction]:
        shape, topology = self.shape, self.topology
        place = topology.coordinates(rank)

        def neighbor(stage: int) -> int:
            return topology.rank(place.dp_rank, stage, place.tp_rank)

        first, last = place.pp_rank == 0, place.pp_rank == topology.pp - 1
        steps = [Instruction("host", Op.DATA_WAIT, 0.002)]
        launched = 0
        for _ in range(shape.microbatches):
            if not first:
                steps.append(Instruction("receive", Op.RECV, peer=neighbor(place.pp_rank - 1)))
            steps += self._compute(Op.FORWARD, 0.010)
            if not last:
                steps.append(Instruction("send", Op.SEND, peer=neighbor(place.pp_rank + 1)))
        for microbatch in range(shape.microbatches):
            if not last:
                steps.append(Instruction("receive", Op.RECV, peer=neighbor(place.pp_rank + 1)))
            steps += self._compute(Op.BACKWARD, 0.020)
            if not first:
                steps.append(Instruction("send", Op.SEND, peer=neighbor(place.pp_rank - 1)))
            if shape.overlapped and topology.dp > 1 and microbatch == shape.microbatches - 1:
                for size in (4096, 8192):
                    steps.append(Instruction("launch", Op.ALL_REDUCE, group=DP, bytes=size))
                    steps.append(Instruction("host", Op.BACKWARD, 0.004))
                    launched += 1
        if topology.pp > 1:
            steps.append(Instruction("wait", Op.SEND))
        steps += [Instruction("wait", Op.ALL_REDUCE, group=DP)] * bool(launched)
        if topology.dp > 1 and not shape.overlapped:
            steps.append(Instruction("collective", Op.REDUCE_SCATTER, group=DP, bytes=16384))
            steps.append(Instruction("collective", Op.ALL_GATHER, group=DP, bytes=16384))
        steps.append(Instruction("host", Op.STEP, 0.001))
        steps.append(Instruction("host", Op.OPTIMIZER, 0.003))
        if shape.ends_with_world and topology.world_size > 1:
            steps.append(Instruction("collective", Op.ALL_REDUCE, group=WORLD, bytes=8))
        return steps

    def _compute(self, op: int, seconds: float) -> list[Instruction]:
        half = Instruction("host", op, seconds / 2)
        if self.topology.tp == 1:
            return [half, half]
        ops = [Op.ALL_REDUCE, Op.ALL_REDUCE]
        if self.shape.sequence_parallel:
            ops = [Op.ALL_GATHER, Op.REDUCE_SCATTER]
        before, after = (
            Instruction("collective", each, group=TP, bytes=2048, inside=op) for each in ops
        )
        return [half, before, half, after]

    def _last_program(self, rank: int) -> list[Instruction]:
        """Return what the rank runs in the step with the fault."""
        program = self._programs[rank]
        if self.fault.kind == "miss":
            barrier = Instruction("collective", Op.BARRIER, group=DP)
            return program if rank == self.fault.rank else [*program, barrier]
        return self._with_fault(program) if rank == self.fault.rank else program

    def _with_fault(self, program: list[Instruction]) -> list[Instruction]:
        fault, faulty = self.fault, list(program)
        at = fault.index % len(faulty)
        chosen = faulty[at]
        if fault.kind == "skip":
            del faulty[at]
        elif fault.kind == "stray":  # one more, which no other rank enters there
            faulty.insert(at, Instruction("collective", Op.ALL_GATHER, group=WORLD, bytes=64))
        elif fault.kind == "another_op":
            other = Op.BROADCAST if chosen.op == Op.ALL_REDUCE else Op.ALL_REDUCE
            faulty[at] = replace(chosen, op=other)
        elif fault.kind == "another_size":
            faulty[at] = replace(chosen, bytes=chosen.bytes * 2)
        elif fault.kind == "swap":
            with_next = self.next_communication(program, at)
            if with_next is not None:
                faulty[at], faulty[with_next] = faulty[with_next], faulty[at]
        return faulty

    @staticmethod
    def next_communication(program: list[Instruction], at: int) -> int | None:
        """Return the index of the next communication on another channel."""
        chosen = program[at]
        for index in range(at + 1, len(program)):
            other = program[index]
            if other.kind in ("collective", "send", "receive"):
                same = (other.kind, other.group, other.peer) == (
                    chosen.kind,
                    chosen.group,
                    chosen.peer,
                )
                return None if same else index
        return None

    # --- playing --------------------------------------------------------------------------

    def play(self, further_steps: int = 3) -> bool:
        """Return whether all ranks were blocked within this many steps after the fault."""
        end = self.whole_steps + 1 + further_steps
        moved = True
        while moved:
            moved = False
            for rank, state in self.ranks.items():
                while state.step < end and self._advance(rank, state):
                    moved = True
        return all(state.step < end for state in self.ranks.values())

    def play_until(self, now_ns: int) -> bool:
        """Play until this moment; return False if all steps are done.

        Only for a job without a fault.
        """
        self._until_ns = now_ns
        self.play(further_steps=0)
        return any(state.step <= self.whole_steps for state in self.ranks.values())

    def _advance(self, rank: int, state: _Rank) -> bool:
        if self._until_ns is not None and state.clock_ns > self._until_ns:
            return False
        is_last = state.step == self.whole_steps
        hit = is_last and rank == self.fault.rank
        program = self._last_programs[rank] if is_last else self._programs[rank]
        if state.index == 0 and state.blocked is None:
            state.step_started_ns = state.clock_ns
        if state.index == len(program):
            if self.shape.on_device and not self._all_done(rank, state):
                return self._block(state, Instruction("host", Op.STEP))
            self._record(rank, Op.STEP, state.step_started_ns, state.clock_ns)
            state.step, state.index, state.blocked = state.step + 1, 0, None
            return True
        instruction = program[state.index]
        if rank in self.also_stopped and state.step == self.whole_steps and state.index == 1:
            return self._block(state, instruction)
        stops = hit and self.fault.kind == "stop" and state.index == self.fault.index % len(program)
        stalls = hit and self.fault.kind == "stall" and state.index == self.fault.index
        if stops or not self._do(rank, state, instruction, stalls):
            return self._block(state, instruction)
        state.index, state.blocked = state.index + 1, None
        return True

    def _block(self, state: _Rank, instruction: Instruction) -> bool:
        if state.blocked is None:
            state.blocked, state.blocked_since_ns = instruction, state.clock_ns
        return False

    def _do(self, rank: int, state: _Rank, what: Instruction, stalls: bool) -> bool:
        if what.kind == "host":
            seconds = what.seconds * self.chance.lognormvariate(0.0, 0.1) * self.slow.get(rank, 1.0)
            began, state.clock_ns = state.clock_ns, state.clock_ns + int(seconds * 1e9)
            if what.op != Op.STEP:
                self._record(rank, what.op, began, state.clock_ns)
            return True
        if what.kind == "wait":
            return self._wait(rank, state, what)
        name, channel = self._enter(rank, state, what)
        if stalls:
            self.stalled = name
        asynchronous = what.kind in ("launch", "send") or self.shape.on_device
        if asynchronous:
            if self.shape.on_device:
                state.left[channel] = state.entered[channel]
            self._record(rank, what.op, state.clock_ns, state.clock_ns + 1000, what, name[-1])
            return True
        done_ns = self._done_ns(name)
        if done_ns is None:
            return False
        began = state.blocked_since_ns if state.blocked is not None else state.clock_ns
        state.clock_ns = max(state.clock_ns, done_ns)
        state.left[channel] = name[-1]
        self._record(rank, what.op, began, state.clock_ns, what, name[-1])
        return True

    def _enter(
        self, rank: int, state: _Rank, what: Instruction
    ) -> tuple[tuple[int, ...], tuple[str, int]]:
        """Enter a communication, once per instruction.

        Its name is the same for all participants.
        """
        channel = (what.kind if what.kind in ("send", "receive") else "group", what.group)
        if channel[0] != "group":
            channel = (channel[0], what.peer)
        if state.blocked is not what:
            state.clock_ns += 1000  # no two calls of a host happen at the same time
            state.entered[channel] += 1
            state.since[channel] = state.clock_ns
        number = state.entered[channel]
        if channel[0] == "group":
            what = self.sized(rank, state, what)
            state.latest[what.group] = (what.op, what.bytes)
            name = (0, *self.members(rank, what.group), what.group, number)
            self._arrived[name].setdefault(rank, (state.clock_ns, (what.op, what.bytes)))
        else:
            ends = (rank, what.peer) if channel[0] == "send" else (what.peer, rank)
            name = (1, *ends, number)
            self._arrived[name].setdefault(rank, (state.clock_ns, None))
        return name, channel

    def sized(self, rank: int, state: _Rank, what: Instruction) -> Instruction:
        """Return the payload size: activations have the length of the sequences, equal for tensor
        peers."""
        if not self.shape.varying or what.group != TP:
            return what
        replica = self.topology.coordinates(rank).dp_rank
        return replace(what, bytes=what.bytes * (1 + (state.step * 7 + replica * 3) % 5))

    def _done_ns(self, name: tuple[int, ...]) -> int | None:
        """Return when the communication ended; None if it has not."""
        arrived = self._arrived[name]
        if name == self.stalled:
            return None
        if name[0] == 0 and set(arrived) != set(name[1:-2]):
            return None
        if name[0] == 1 and name[1] not in arrived:
            return None
        if len({claim for _, claim in arrived.values()}) > 1:
            return None
        return max(at for at, _ in arrived.values()) + 300_000

    def _wait(self, rank: int, state: _Rank, what: Instruction) -> bool:
        """Wait for all launched buckets or all sends."""
        for channel, number in state.entered.items():
            if what.op == Op.SEND and channel[0] == "send" and self.shape.rendezvous:
                name = (1, rank, channel[1], number)
                if channel[1] not in self._arrived[name]:
                    return False
            elif what.op != Op.SEND and channel == ("group", what.group):
                name = (0, *self.members(rank, what.group), what.group, number)
                done_ns = self._done_ns(name)
                if done_ns is None:
                    return False
                state.clock_ns = max(state.clock_ns, done_ns)
            else:
                continue
            state.left[channel] = number
        return True

    def _all_done(self, rank: int, state: _Rank) -> bool:
        for channel, number in state.entered.items():
            for earlier in range(max(1, number - 40), number + 1):
                if channel[0] == "group":
                    name = (0, *self.members(rank, channel[1]), channel[1], earlier)
                else:
                    ends = (rank, channel[1]) if channel[0] == "send" else (channel[1], rank)
                    name = (1, *ends, earlier)
                done_ns = self._done_ns(name)
                if done_ns is None:
                    return False
                state.clock_ns = max(state.clock_ns, done_ns)
        return True

    # --- reported events ---------------------------------------------------------------------

    def _record(
        self,
        rank: int,
        op: int,
        began_ns: int,
        ended_ns: int,
        what: Instruction | None = None,
        sequence: int = 0,
    ) -> None:
        state = self.ranks[rank]
        communicates = what is not None and what.kind != "host"
        what = what if what is None else self.sized(rank, state, what)
        peer = what.peer if communicates and what and what.kind in ("send", "receive") else NONE_32
        group = what.group if what is not None else 0
        flag = Flag.ASYNC if what is not None and what.kind in ("launch", "send") else Flag.NONE
        state.rows.append(
            (
                len(state.rows),
                op | group << 16 | NONE_16 << 32 | flag << 48,
                state.step | NONE_32 << 32,
                peer,
                what.bytes if what is not None else 0,
                sequence,
                began_ns - OFFSET_NS,
                ended_ns - began_ns,
            )
        )

    def definitions(self, rank: int) -> RankDefined:
        return RankDefined(
            time_ns=START_NS,
            job=JOB,
            generation=0,
            rank=rank,
            definitions=[
                GroupDefinition(group, name, self.members(rank, group), axis=name)
                for group, name in _NAMES.items()
            ],
        )

    def spans(self, rank: int) -> SpanBlock:
        columns = np.array(self.ranks[rank].rows, dtype=np.uint64).T.tobytes()
        return SpanBlock(JOB, 0, rank, columns, OFFSET_NS)

    @property
    def now_ns(self) -> int:
        return max(state.clock_ns for state in self.ranks.values())

    def page(self, rank: int, at_ns: int, process_state: str = "S") -> RankState:
        state = self.ranks[rank]
        return RankState(
            time_ns=at_ns,
            job=JOB,
            generation=0,
            rank=rank,
            clock_offset_ns=OFFSET_NS,
            process_state=process_state,
            cpu_seconds=1.0,
            view=StateView(
                head=len(state.rows),
                step=state.step,
                step_started_ns=state.step_started_ns - OFFSET_NS,
                microbatch=None,
                status="running",
                loss_step=None,
                loss=None,
                gradient_norm=None,
                evaluation_step=None,
                evaluation_loss=None,
                frames=self._frames(rank),
                groups=[
                    GroupProgress(
                        group,
                        state.entered["group", group],
                        state.left["group", group],
                        state.since["group", group] - OFFSET_NS,
                        *state.latest[group],
                    )
                    for group in state.latest
                ],
                peers=self._peers(state),
            ),
        )

    def _peers(self, state: _Rank) -> list[PeerProgress]:
        peers = sorted({peer for kind, peer in state.entered if kind != "group"})
        return [
            PeerProgress(
                peer,
                state.entered.get(("send", peer), 0),
                state.left.get(("send", peer), 0),
                state.entered.get(("receive", peer), 0),
                state.left.get(("receive", peer), 0),
                max(state.since.get((kind, peer), 0) for kind in ("send", "receive")) - OFFSET_NS,
            )
            for peer in peers
        ]

    def _frames(self, rank: int) -> list[Frame]:
        state = self.ranks[rank]
        since_ns = state.blocked_since_ns - OFFSET_NS
        frames = [Frame(Op.STEP, state.step_started_ns - OFFSET_NS, 0, None, 0)]
        what = state.blocked
        if what is None or what.op == Op.STEP:
            return frames
        if what.inside is not None:
            frames.append(Frame(what.inside, since_ns, 0, None, 0))
        stopped = (
            self.fault.kind == "stop"
            and rank == self.fault.rank
            and state.step == self.whole_steps
            and state.index == self.fault.index % len(self._last_programs[rank])
        )
        if what.kind == "host":
            frames.append(Frame(what.op, since_ns, 0, None, 0))
        elif not stopped:
            frames += self._held_in(rank, state, what, since_ns)
        return frames

    def _held_in(self, rank: int, state: _Rank, what: Instruction, since_ns: int) -> list[Frame]:
        if what.kind == "receive":
            number = state.entered["receive", what.peer]
            return [Frame(what.op, since_ns, 0, what.peer, number)]
        if what.kind == "wait" and what.op == Op.SEND:
            for (kind, peer), number in state.entered.items():
                if kind == "send" and peer not in self._arrived[1, rank, peer, number]:
                    return [Frame(Op.SEND, since_ns, 0, peer, number)]
            return []
        number = state.entered["group", what.group]
        return [Frame(what.op, since_ns, what.group, None, number)]

    def batch(self, sequence: int, at_ns: int, events: list[object], *, spans: bool) -> Batch:
        return Batch(
            agent_id="node-0",
            boot_id="boot",
            sequence=sequence,
            packed_ns=at_ns,
            events=events,  # type: ignore[arg-type]
            spans=[self.spans(rank) for rank in self.ranks] if spans else [],
        )
