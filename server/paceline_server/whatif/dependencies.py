"""The dependencies of each operation of a step, derived from one recorded pipeline.

No schedule is assumed: compute operations have the recorded order. So GPipe, 1F1B, interleaved,
zero-bubble (with split backward operations) and other schedules are handled the same way. An
operation waits for operations of its own stage (`predecessors`) and for the partners that it starts
together with (`groups`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from paceline_server.whatif import operations as ops
from paceline_server.whatif.errors import TraceError
from paceline_server.whatif.trace import Operations

# Tolerance between the host and device clocks that time the same worker.
CLOCK_TOLERANCE_SECONDS = 5e-5

# By direction: compute, send and receive types, and the stage offset of a send.
DIRECTIONS = (
    (ops.FORWARD_COMPUTE, ops.FORWARD_SEND, ops.FORWARD_RECV, 1),
    (ops.BACKWARD_COMPUTE, ops.BACKWARD_SEND, ops.BACKWARD_RECV, -1),
)


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Dependencies by operation number.

    `groups` contains each operation once. The operations of a group start together, when the
    predecessors of all of them have ended.
    """

    predecessors: list[list[int]]
    groups: list[list[int]]


def find(operations: Operations) -> Dependencies:
    """Return the dependencies of the operations of one pipeline and step.

    Raises:
        TraceError: the transfers do not match the compute operations or each other.
    """
    return _Finder(operations).find()


class _Finder:
    def __init__(self, operations: Operations) -> None:
        self.optype = operations.optype
        self.sequence: list[int] = operations.sequence.tolist()
        self.chunk: list[int] = operations.chunk.tolist()
        self.start: list[float] = operations.start_seconds.tolist()
        self.end: list[float] = operations.end_seconds.tolist()
        stage: list[int] = operations.stage.tolist()
        self.stage = stage
        self.stages = max(stage) + 1
        chunks = max(self.chunk[op] for op in range(len(stage)) if self.optype[op] in ops.COMPUTE)
        self.last_global_chunk = self.stages * (chunks + 1) - 1
        self.global_chunk = [
            recorded if recorded >= 0 else chunk * self.stages + at
            for recorded, chunk, at in zip(
                operations.global_chunk.tolist(), self.chunk, stage, strict=True
            )
        ]
        # Operations come sorted by their start, so each list is in recorded order.
        self.recorded: dict[tuple[str, int], list[int]] = defaultdict(list)
        for op, key in enumerate(zip(self.optype, stage, strict=True)):
            self.recorded[key].append(op)
        self.overlapped = ops.SEPARATE_ALL_REDUCE in self.optype
        self.predecessors: list[list[int]] = [[] for _ in stage]

    def find(self) -> Dependencies:
        partners: dict[tuple[str, int], list[int]] = {}
        for stage in range(self.stages):
            self._compute(stage)
            for direction in DIRECTIONS:
                self._transfers(stage, direction, partners)
            self._first_backward(stage)
            self._data_parallel(stage)
            self._after_compute(stage)
        groups = self._pairs(partners)
        groups += self._groups_across(ops.CLIP, range(self.stages))
        groups += self._groups_across(ops.EMBEDDING_ALL_REDUCE, sorted({0, self.stages - 1}))
        grouped = {op for group in groups for op in group}
        groups += [[op] for op in range(len(self.optype)) if op not in grouped]
        return Dependencies(self.predecessors, groups)

    def _groups_across(self, optype: str, stages: Iterable[int]) -> list[list[int]]:
        """Return groups of the n-th operation of this type on each of these stages."""
        by_stage = (self._numbered(optype, stage) for stage in stages)
        return [[op for op in group if op is not None] for group in zip_longest(*by_stage)]

    def _of(self, optype: str, stage: int) -> list[int]:
        """Return the operations of a type and stage in recorded order."""
        return self.recorded.get((optype, stage), [])

    def _numbered(self, optype: str, stage: int) -> list[int]:
        """Return the operations of a type and stage by sequence number."""
        return sorted(self._of(optype, stage), key=self.sequence.__getitem__)

    def _chain(self, chain: Sequence[int], after: Sequence[int] = ()) -> None:
        for op in chain:
            self.predecessors[op].extend(after)
            after = (op,)

    def _computes(self, stage: int) -> list[int]:
        found = [op for optype in ops.COMPUTE for op in self._of(optype, stage)]
        return sorted(found)

    def _compute(self, stage: int) -> None:
        self._chain([*self._of(ops.DATA_WAIT, stage), *self._computes(stage)])

    def _transfers(
        self,
        stage: int,
        direction: tuple[str, str, str, int],
        partners: dict[tuple[str, int], list[int]],
    ) -> None:
        """Connect the transfers of one direction with their compute operations."""
        compute, send, receive, offset = direction
        computes = self._numbered(compute, stage)
        if not computes:
            raise TraceError(f"stage {stage} has no {compute} operation")
        last_start = max(self.start[op] for op in computes) + CLOCK_TOLERANCE_SECONDS
        first_end = min(self.end[op] for op in computes) - CLOCK_TOLERANCE_SECONDS
        sends = [op for op in self._of(send, stage) if self.end[op] >= first_end]
        receives = [op for op in self._of(receive, stage) if self.start[op] <= last_start]
        for name in (send, receive):
            self._chain(self._of(name, stage))
        has_peer = [
            0 <= self.global_chunk[op] + offset <= self.last_global_chunk for op in computes
        ]
        partners[send, stage] = []
        for index, op in self._owners(computes, sends, has_peer, -1):
            self.predecessors[op].append(computes[index])
            if has_peer[index]:
                partners[send, stage].append(op)
        has_peer = [
            0 <= self.global_chunk[op] - offset <= self.last_global_chunk for op in computes
        ]
        partners[receive, stage] = []
        for index, op in self._owners(computes, receives, has_peer, 0):
            self.predecessors[computes[index]].append(op)
            if index:
                self.predecessors[op].append(computes[index - 1])
            if has_peer[index]:
                partners[receive, stage].append(op)

    def _owners(
        self, computes: list[int], transfers: list[int], has_peer: list[bool], end: int
    ) -> list[tuple[int, int]]:
        """Return each transfer with the index of its compute operation.

        Transfers without a peer may all be missing, or only the one at index `end`.
        """
        every = list(range(len(computes)))
        for indexes in (
            every,
            [index for index in every if has_peer[index]],
            [index for index in every if index != every[end]],
            [],
        ):
            if len(indexes) == len(transfers):
                return list(zip(indexes, transfers, strict=True))
        op = transfers[0]
        raise TraceError(
            f"stage {self.stage[op]} has {len(transfers)} {self.optype[op]} operations for "
            f"{len(computes)} {self.optype[computes[0]]}, of which {sum(has_peer)} have a peer"
        )

    def _pairs(self, partners: dict[tuple[str, int], list[int]]) -> list[list[int]]:
        """Pair the n-th send to a peer with the n-th receive of that peer, for each stage."""
        pairs = []
        for _, send, receive, offset in DIRECTIONS:
            for stage in range(self.stages):
                peer = (stage + offset) % self.stages
                sends, receives = partners[send, stage], partners[receive, peer]
                if len(sends) != len(receives):
                    raise TraceError(
                        f"stage {stage} has {len(sends)} {send} operations to stage {peer}, which "
                        f"has {len(receives)} {receive} operations"
                    )
                pairs += [list(pair) for pair in zip(sends, receives, strict=True)]
        return pairs

    def _first_backward(self, stage: int) -> None:
        """Let the first backward transfers follow the operation two before the first backward.

        They are posted before the last forward of the warm-up.
        """
        computes = self._computes(stage)
        first = next(
            index for index, op in enumerate(computes) if self.optype[op] == ops.BACKWARD_COMPUTE
        )
        if first < 2:
            return
        for optype in (ops.BACKWARD_RECV, ops.BACKWARD_SEND):
            for op in self._numbered(optype, stage)[:1]:
                self.predecessors[op].append(computes[first - 2])

    def _data_parallel(self, stage: int) -> None:
        gathers = self._numbered(ops.PARAMS_ALL_GATHER, stage)
        scatters = self._numbered(ops.GRADS_REDUCE_SCATTER, stage)
        self._chain(sorted(gathers + scatters))
        last_gather = {self.chunk[op]: op for op in gathers}
        for chunk, gather in last_gather.items():
            for op in self._chunk_computes(ops.FORWARD_COMPUTE, stage, chunk)[:1]:
                self.predecessors[op].append(gather)
        if self.overlapped:
            first_scatter = {self.chunk[op]: op for op in reversed(scatters)}
            for chunk, scatter in first_scatter.items():
                backwards = [
                    op
                    for optype in (ops.BACKWARD_COMPUTE, ops.BACKWARD_WEIGHT_COMPUTE)
                    for op in self._chunk_computes(optype, stage, chunk)
                ]
                if backwards:
                    last = max(backwards, key=self.end.__getitem__)
                    self.predecessors[scatter].append(last)

    def _chunk_computes(self, optype: str, stage: int, chunk: int) -> list[int]:
        return [op for op in self._of(optype, stage) if self.chunk[op] == chunk]

    def _after_compute(self, stage: int) -> None:
        last_compute = max(self._computes(stage), key=self.end.__getitem__)
        collections = self._numbered(ops.GC, stage)
        scatters = self._numbered(ops.GRADS_REDUCE_SCATTER, stage)
        self._chain(collections, [last_compute])
        after = collections[-1:] or [last_compute]
        if self.overlapped:
            after = after + scatters[-1:]
        embedding = []
        if stage in (0, self.stages - 1):
            embedding = self._numbered(ops.EMBEDDING_ALL_REDUCE, stage)
        self._chain(
            [
                *self._numbered(ops.LAYERNORM_ALL_REDUCE, stage),
                *embedding,
                *([] if self.overlapped else scatters),
                *self._numbered(ops.SEPARATE_ALL_REDUCE, stage),
                *self._numbered(ops.CLIP, stage),
                *self._numbered(ops.OPTIMIZER, stage),
            ],
            after,
        )
