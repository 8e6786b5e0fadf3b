"""One step's pipeline as a graph: the inputs of each forward and backward, and their end times.

It does not depend on a schedule. The order of actions on each stage is given, recorded or
generated, so GPipe, 1F1B, interleaved and zero-bubble are handled alike: an action starts when the
previous action of its stage has ended and its input from another stage has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline_wire.spans import Op

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class PipelineAction(NamedTuple):
    """An action of a stage. `op`: FORWARD, BACKWARD or BACKWARD_WEIGHT.

    `part_of` says which part of the model its chunk is.
    """

    op: int
    microbatch: int
    chunk: int = 0


def part_of(chunk: Ints, stage: Ints, stages: int, *, is_v: bool) -> Ints:
    """Return the number of a stage's chunk among the parts of the model.

    Chunks go round: chunk c of stage s is part c * stages + s. In a V every second chunk goes back:
    the last stage has two parts in a row, and so has the first.
    """
    part: Ints = chunk * stages + np.where(is_v & (chunk % 2 == 1), stages - 1 - stage, stage)
    return part


Order = tuple[tuple[PipelineAction, ...], ...]  # by stage


class Pipeline:
    """The actions of all stages, numbered stage by stage in execution order.

    Raises ValueError if an action needs one that does not exist, or if actions wait for each other
    in a cycle.
    """

    def __init__(self, order: Sequence[Sequence[PipelineAction]], *, is_v: bool = False) -> None:
        """`is_v`: every second chunk goes back from the last stage to the first."""
        actions = [(stage, *action) for stage, taken in enumerate(order) for action in taken]
        number = {action: at for at, action in enumerate(actions)}
        self.stages = len(order)
        self.nodes = len(actions)
        table = np.array(actions, dtype=np.int64).reshape(-1, 4)
        self.stage, self.op, self.microbatch, self.chunk = table.T.copy()
        self.is_v = is_v
        self.part = part_of(self.chunk, self.stage, self.stages, is_v=is_v)
        # Number `nodes` means "no action": it has ended when the phase begins.
        self.previous = np.arange(self.nodes) - 1
        self.first = np.searchsorted(self.stage, np.arange(self.stages))
        self.previous[self.first] = self.nodes
        self.needs = np.array(
            [
                number[source] if source is not None else self.nodes
                for source in self._needs(actions)
            ],
            dtype=np.int64,
        )
        self._levels = self._found_levels()

    def _needs(
        self, actions: Sequence[tuple[int, int, int, int]]
    ) -> list[tuple[int, int, int, int] | None]:
        """Return for each action the action whose result it needs; None: none."""
        present = set(actions)
        parts: list[int] = self.part.tolist()
        last_part = max(parts)
        found = []
        for part, (stage, op, microbatch, _) in zip(parts, actions, strict=True):
            source: tuple[int, int, int, int] | None = None
            if op == Op.FORWARD and part > 0:
                source = (*self._place(part - 1, op, microbatch),)
            elif op == Op.BACKWARD and part < last_part:
                source = (*self._place(part + 1, op, microbatch),)
            if source is not None and source not in present:
                raise ValueError(f"stage {stage} needs {source}, which does not exist")
            found.append(source)
        return found

    def _place(self, part: int, op: int, microbatch: int) -> tuple[int, int, int, int]:
        chunk, stage = divmod(part, self.stages)
        if self.is_v and chunk % 2:
            stage = self.stages - 1 - stage
        return stage, op, microbatch, chunk

    def _found_levels(self) -> list[tuple[Ints, Ints, Ints]]:
        """Return levels of (actions, previous action, needed action) without mutual dependencies.

        Processes the stages in turn, each as far as possible.
        """
        level = [0] * self.nodes + [-1]
        done = [False] * self.nodes + [True]
        needs: list[int] = self.needs.tolist()
        previous: list[int] = self.previous.tolist()
        ends = [*self.first.tolist()[1:], self.nodes]
        at: list[int] = self.first.tolist()
        moved = True
        while moved:
            moved = False
            for stage in range(self.stages):
                node = at[stage]
                while node < ends[stage] and done[needs[node]]:
                    level[node] = max(level[previous[node]], level[needs[node]]) + 1
                    done[node] = moved = True
                    node += 1
                at[stage] = node
        if not all(done):
            raise ValueError("the actions of the pipeline wait for each other in a circle")
        levels = np.array(level[:-1], dtype=np.int64)
        order = np.argsort(levels, kind="stable")
        cuts = np.flatnonzero(np.diff(levels[order])) + 1
        return [(nodes, self.previous[nodes], self.needs[nodes]) for nodes in np.split(order, cuts)]

    def ends(self, seconds: Floats, delays: Floats | None = None) -> Floats:
        """Return when each action ends. All arrays are [action, lane]; lanes are independent.

        `delays`: time from when an action could start until it starts.
        """
        ends = np.zeros((self.nodes + 1, seconds.shape[1]))
        for nodes, previous, needs in self._levels:
            latest = np.maximum(ends[previous], ends[needs])
            latest += seconds[nodes]
            if delays is not None:
                latest += delays[nodes]
            ends[nodes] = latest
        return ends[:-1]

    def phase_seconds(self, seconds: Floats, delays: Floats | None = None) -> Floats:
        """Return the time from the start of the first action to the end of the last. [lane]"""
        phase: Floats = self.ends(seconds, delays).max(axis=0)
        return phase

    def by_stage(self, values: Floats) -> Floats:
        """Return the sums over each stage's actions. [stage, lane]"""
        sums: Floats = np.add.reduceat(values, self.first, axis=0)
        return sums

    def idle_ratios(self, seconds: Floats) -> Floats:
        """Return the share of the phase in which each stage is idle. [stage, lane]"""
        phase = np.maximum(self.phase_seconds(seconds), 1e-12)
        ratios: Floats = 1.0 - self.by_stage(seconds) / phase
        return ratios
