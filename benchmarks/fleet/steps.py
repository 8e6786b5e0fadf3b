"""The training steps of thousands of ranks, as the words in their rings.

A GPipe schedule over (dp, pp, tp), computed as a dependency graph for all replicas at once: tensor
parallel collectives nested in each microbatch, asynchronous sends, blocking receives, a gradient
reduction and an all-reduce of all ranks. Durations have log-normal noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline_wire.spans import NONE_16, NONE_32, WORDS, Flag, Op
from paceline_wire.topology import Topology

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

WORLD, TP, DP = 0, 1, 2  # ids of the process groups
MS = 1_000_000
_NOISE = 0.01  # sigma per microbatch, as measured on a stable machine


class _Span(NamedTuple):
    """One span of all ranks of a stage; arrays are [dp, tp]."""

    place: int  # op | group << 16 | chunk << 32 | flags << 48
    microbatch: int
    peer: Ints | int
    sequence: int
    start_ns: Ints
    end_ns: Ints


class PlayedJob:
    """The simulated job. Times count from its start; without slow ranks a step takes `step_ns`."""

    def __init__(self, topology: Topology, microbatches: int, step_ns: int, seed: int) -> None:
        self.topology = topology
        self.microbatches = microbatches
        self.step = 0
        self.now_ns = 1_000_000_000
        self._forward_ns = 0.9 * step_ns / (microbatches + topology.pp - 1) / 3
        self._chance = np.random.default_rng(seed)
        self._index = np.zeros(topology.pp, dtype=np.int64)
        shape = (topology.pp, topology.dp, topology.tp)
        self._ranks = np.arange(topology.world_size).reshape(shape)
        self._free = np.full(shape, self.now_ns, dtype=np.int64)
        self._slow = np.ones(shape)
        self._spans: list[list[_Span]] = [[] for _ in range(topology.pp)]

    def play(self, slow: Mapping[int, float]) -> list[Words]:
        """Return the next step by stage: [word, span, dp, tp]. `slow`: work factors by rank."""
        self._slow[:] = 1.0
        for rank, multiple in slow.items():
            self._slow.flat[rank] = multiple
        self._spans = [[] for _ in range(self.topology.pp)]
        begun = self._free.copy()
        self._everywhere(Op.DATA_WAIT, 0.5 * MS)
        self._pipeline(range(self.topology.pp), Op.FORWARD, Op.FORWARD_SEND, Op.FORWARD_RECV, 1)
        backwards = range(self.topology.pp - 1, -1, -1)
        self._pipeline(backwards, Op.BACKWARD, Op.BACKWARD_SEND, Op.BACKWARD_RECV, 2)
        for stage in range(self.topology.pp):
            self._meet(stage, DP, 2 * MS, self.step + 1, axis=0)
        self._everywhere(Op.OPTIMIZER, 3 * MS)
        end = self._free.max() + int(0.5 * MS)
        for stage in range(self.topology.pp):
            self._record(stage, Op.ALL_REDUCE | WORLD << 16, self._free[stage], end, self.step + 1)
        self._free[:] = end
        for stage in range(self.topology.pp):
            self._record(stage, Op.STEP, begun[stage], self._free[stage])
        self.now_ns = int(end)
        words = [self._words(stage) for stage in range(self.topology.pp)]
        self.step += 1
        return words

    def _everywhere(self, op: Op, typical_ns: float) -> None:
        for stage in range(self.topology.pp):
            start = self._free[stage].copy()
            self._free[stage] += self._noisy(typical_ns)
            self._record(stage, op, start, self._free[stage])

    def _pipeline(self, order: range, op: Op, send: Op, receive: Op, times: int) -> None:
        typical_ns = self._forward_ns * times
        for microbatch in range(self.microbatches):
            number = self.step * self.microbatches + microbatch + 1
            for place, stage in enumerate(order):
                if place:
                    self._transfer(order[place - 1], stage, (send, receive), microbatch, number)
                start = self._free[stage].copy()
                self._free[stage] += self._noisy(typical_ns * self._slow[stage])
                calls = 2 * number - (op == Op.FORWARD)
                self._meet(stage, TP, 0.5 * MS, calls, axis=1, microbatch=microbatch)
                self._record(stage, op, start, self._free[stage], microbatch=microbatch)

    def _transfer(
        self, source: int, stage: int, ops: tuple[Op, Op], microbatch: int, number: int
    ) -> None:
        """Add a send, which starts when its microbatch has been computed."""
        sent, posted = self._free[source].copy(), self._free[stage].copy()
        arrived = np.maximum(sent, posted) + self._noisy(np.full(sent.shape, 0.4 * MS))
        launched = ops[0] | Flag.ASYNC << 48
        there, here = self._ranks[stage], self._ranks[source]
        self._record(source, launched, sent, arrived, number, microbatch, there)
        self._record(stage, ops[1], posted, arrived, number, microbatch, here)
        self._free[stage] = arrived

    def _meet(
        self,
        stage: int,
        group: int,
        typical_ns: float,
        number: int,
        *,
        axis: int,
        microbatch: int = NONE_32,
    ) -> None:
        start = self._free[stage].copy()
        end = np.broadcast_to(start.max(axis=axis, keepdims=True), start.shape) + int(typical_ns)
        self._record(stage, Op.ALL_REDUCE | group << 16, start, end, number, microbatch)
        self._free[stage] = end

    def _record(
        self,
        stage: int,
        place: int,
        start_ns: Ints,
        end_ns: Ints | int,
        number: int = 0,
        microbatch: int = NONE_32,
        peer: Ints | int = NONE_32,
    ) -> None:
        end = np.broadcast_to(np.asarray(end_ns), start_ns.shape)
        word = int(place) | NONE_16 << 32
        self._spans[stage].append(
            _Span(word, microbatch, peer, number, start_ns.copy(), end.copy())
        )

    def _noisy(self, typical_ns: float | npt.NDArray[np.float64]) -> Ints:
        shape = self._ranks.shape[1:]
        return (typical_ns * self._chance.lognormal(0.0, _NOISE, shape)).astype(np.int64)

    def _words(self, stage: int) -> Words:
        spans = self._spans[stage]
        words = np.zeros((WORDS, len(spans), *self._ranks.shape[1:]), dtype=np.uint64)
        for at, span in enumerate(spans):
            words[0, at] = self._index[stage] + at
            words[1, at] = span.place
            words[2, at] = self.step | span.microbatch << 32
            words[3, at] = span.peer
            words[5, at] = span.sequence
            words[6, at] = span.start_ns
            words[7, at] = span.end_ns - span.start_ns
        self._index[stage] += len(spans)
        return words
