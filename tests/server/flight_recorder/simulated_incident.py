"""A simulated job with a fault, and the dumps that its ranks write.

Every rank has a program: collectives in its tensor, data, expert and world groups, messages to its
pipeline neighbors (1F1B), and points where the host waits for the device. Hosts launch ahead of
their devices; a device runs operations in launch order, except sends. The job runs until no rank
makes progress, in a random order of ranks, so the launched operations differ between seeds. The
simulation is independent of the analysis.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Shape:
    dp: int
    pp: int
    tp: int
    microbatches: int = 4
    layers: int = 2

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.tp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return (dp, pp, tp) of a rank: tensor ranks are neighbors, stages are blocks."""
        return rank // self.tp % self.dp, rank // (self.tp * self.dp), rank % self.tp

    def groups(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return (description, ranks) by name; names are a job-wide count."""
        made: list[tuple[str, tuple[int, ...]]] = [("default_pg", tuple(range(self.world_size)))]
        for description, axes in (("TENSOR", 2), ("DATA", 0), ("PIPELINE", 1), ("EXPERT", 3)):
            seen: dict[tuple[int, ...], list[int]] = {}
            for rank in range(self.world_size):
                own = self.coordinates(rank)
                key = (own[1],) if axes == 3 else tuple(c for i, c in enumerate(own) if i != axes)
                seen.setdefault(key, []).append(rank)
            made += [(description, tuple(ranks)) for ranks in seen.values()]
        return {str(number): group for number, group in enumerate(made)}


@dataclass
class Instruction:
    kind: str  # collective, send, recv, sync
    group: str = ""
    op: str = ""
    elements: int = 1024
    peer: int = -1
    tag: int = -1  # number of a message between the two ranks


@dataclass
class Launched:
    instruction: Instruction
    sequence: int
    time_ns: int
    started: bool = False
    completed: bool = False


@dataclass
class Rank:
    number: int
    program: list[Instruction]
    position: int = 0
    launched: list[Launched] = field(default_factory=list)
    counts: dict[tuple[str, bool], int] = field(default_factory=dict)
    stalls_at: int | None = None  # the host never gets past this instruction
    device_stalls_at: int | None = None  # the device never starts this launch

    def ready(self, launch: Launched) -> bool:
        """Return whether the device has reached this launch."""
        for index, earlier in enumerate(self.launched):
            if index == self.device_stalls_at:
                return False
            if earlier is launch:
                return True
            if not earlier.completed and earlier.instruction.kind != "send":
                return False
        raise AssertionError("not launched here")

    def idle(self) -> bool:
        return all(e.completed for e in self.launched if e.instruction.kind != "send")


class Job:
    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.random = random.Random(seed)
        self.groups = shape.groups()
        self.ranks = [Rank(r, self._program(r)) for r in range(shape.world_size)]
        self.clock_ns = 1_758_000_000_000_000_000

    def group_of(self, rank: int, description: str) -> str:
        return next(
            n for n, (d, ranks) in self.groups.items() if d == description and rank in ranks
        )

    def _program(self, rank: int) -> list[Instruction]:
        shape, program = self.shape, list[Instruction]()
        _, stage, _ = shape.coordinates(rank)
        step = shape.dp * shape.tp
        names = {d: self.group_of(rank, d) for d in ("TENSOR", "DATA", "PIPELINE", "EXPERT")}

        def message(kind: str, peer: int, tag: int) -> None:
            program.append(Instruction(kind, names["PIPELINE"], peer=peer, tag=tag))

        def compute(backward: bool) -> None:
            for layer in range(shape.layers):
                first, second = ("_all_gather_base", "_reduce_scatter_base")
                program.append(Instruction("collective", names["TENSOR"], first, 2048))
                program.append(Instruction("collective", names["EXPERT"], "all_to_all", 512))
                if layer % 2 == 0 and not backward:
                    program.append(Instruction("sync"))  # exchanges the sizes of the splits
                program.append(Instruction("collective", names["TENSOR"], second, 4096))

        def forward(microbatch: int) -> None:
            if stage > 0:
                message("recv", rank - step, microbatch)
            compute(False)
            if stage < shape.pp - 1:
                message("send", rank + step, microbatch)

        def backward(microbatch: int) -> None:
            if stage < shape.pp - 1:
                message("recv", rank + step, 1000 + microbatch)
            compute(True)
            if stage > 0:
                message("send", rank - step, 1000 + microbatch)

        warmup = min(shape.pp - 1 - stage, shape.microbatches)
        for microbatch in range(warmup):
            forward(microbatch)
        for microbatch in range(shape.microbatches - warmup):
            forward(warmup + microbatch)
            backward(microbatch)
        for microbatch in range(shape.microbatches - warmup, shape.microbatches):
            backward(microbatch)
        program.append(Instruction("collective", names["DATA"], "all_reduce", 1 << 16))
        program.append(Instruction("collective", "0", "all_reduce", 1))
        program.append(Instruction("sync"))
        return program

    def run(self) -> None:
        while True:
            moved = False
            for rank in self.random.sample(self.ranks, len(self.ranks)):
                for _ in range(self.random.randint(1, 6)):
                    moved |= self._step_host(rank)
            moved |= self._step_devices()
            if not moved:
                return

    def _step_host(self, rank: Rank) -> bool:
        if rank.position == len(rank.program) or rank.position == rank.stalls_at:
            return False
        instruction = rank.program[rank.position]
        if instruction.kind == "sync" and not rank.idle():
            return False
        rank.position += 1
        if instruction.kind != "sync":
            key = (instruction.group, instruction.kind != "collective")
            rank.counts[key] = rank.counts.get(key, 0) + 1
            self.clock_ns += self.random.randint(1_000, 100_000)
            rank.launched.append(Launched(instruction, rank.counts[key], self.clock_ns))
        return True

    def _step_devices(self) -> bool:
        moved = False
        for rank in self.ranks:
            for launch in rank.launched:
                if not launch.completed and rank.ready(launch):
                    launch.started = True
                    moved |= self._try_complete(rank, launch)
        return moved

    def _try_complete(self, rank: Rank, launch: Launched) -> bool:
        parts = self._participants(rank, launch)
        if parts is None or not all(owner.ready(part) for owner, part in parts):
            return False
        if len({(p.instruction.op, p.instruction.elements) for _, p in parts}) > 1:
            return False
        for _, part in parts:
            part.started = part.completed = True
        return True

    def _participants(self, rank: Rank, launch: Launched) -> list[tuple[Rank, Launched]] | None:
        instruction = launch.instruction
        if instruction.kind == "collective":
            owners = [self.ranks[r] for r in self.groups[instruction.group][1]]
            found = [(o, _find(o, instruction.group, launch.sequence)) for o in owners]
        else:
            other = self.ranks[instruction.peer]
            found = [(rank, launch), (other, _find_message(other, rank.number, instruction))]
        parts = [(owner, part) for owner, part in found if part is not None]
        return parts if len(parts) == len(found) else None

    def reached_stall(self) -> set[int]:
        return {r.number for r in self.ranks if r.position == r.stalls_at}

    def document(
        self, rank: int, *, active_only: bool = False, timed: bool = False
    ) -> dict[str, Any]:
        """Return the dump as NCCL's recorder writes it."""
        own = [name for name, (_, ranks) in self.groups.items() if rank in ranks]
        entries = [
            self._entry(rank, index, launch, own, timed)
            for index, launch in enumerate(self.ranks[rank].launched)
            if not (active_only and launch.completed)
        ]
        status = {}
        for local, name in enumerate(own):
            launched = [e for e in self.ranks[rank].launched if e.instruction.group == name]
            if launched:
                done = [e for e in launched if e.completed]
                status[str(local)] = {
                    "last_enqueued_collective": launched[-1].sequence,
                    "last_started_collective": -1,
                    "last_completed_collective": done[-1].sequence if done else -1,
                }
            else:
                status[str(local)] = dict.fromkeys(
                    (f"last_{w}_collective" for w in ("enqueued", "started", "completed")), -1
                )
        config = {
            name: {
                "name": name,
                "desc": self.groups[name][0],
                "ranks": str(list(self.groups[name][1])),
            }
            for name in own
        }
        return {"version": "2.9", "pg_config": config, "pg_status": status, "entries": entries}

    def _entry(
        self, rank: int, index: int, launch: Launched, own: list[str], timed: bool
    ) -> dict[str, Any]:
        instruction = launch.instruction
        name, is_p2p = instruction.group, instruction.kind != "collective"
        description, ranks = self.groups[name]
        op = instruction.op
        if is_p2p:
            arrow = "->" if instruction.kind == "send" else "<-"
            op = f"{instruction.kind} {ranks.index(rank)}{arrow}{ranks.index(instruction.peer)}"
        started = timed and launch.started
        return {
            "record_id": 100_000 + index,
            "pg_id": own.index(name),
            "process_group": (name, description),
            "collective_seq_id": 0 if is_p2p else launch.sequence,
            "p2p_seq_id": launch.sequence if is_p2p else 0,
            "op_id": index,
            "is_p2p": is_p2p,
            "profiling_name": f"nccl:{op}",
            "input_sizes": [[instruction.elements]],
            "output_sizes": [[instruction.elements]],
            "input_dtypes": ["BFloat16"],
            "output_dtypes": ["BFloat16"],
            "time_created_ns": launch.time_ns,
            "time_discovered_started_ns": launch.time_ns + 10 if started else None,
            "time_discovered_completed_ns": None,
            "state": "completed" if launch.completed else "started" if started else "scheduled",
            "retired": launch.completed,
            "timeout_ms": 180_000,
        }


def _find(rank: Rank, group: str, sequence: int) -> Launched | None:
    for launch in rank.launched:
        if launch.instruction.kind == "collective" and (
            launch.instruction.group,
            launch.sequence,
        ) == (group, sequence):
            return launch
    return None


def _find_message(rank: Rank, peer: int, instruction: Instruction) -> Launched | None:
    kind = "recv" if instruction.kind == "send" else "send"
    for launch in rank.launched:
        own = launch.instruction
        if (own.kind, own.peer, own.tag) == (kind, peer, instruction.tag):
            return launch
    return None
