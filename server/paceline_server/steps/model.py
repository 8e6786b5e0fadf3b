"""The step model: from the spans of all ranks to `StepSummary` and `StepTiming`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from paceline_server.steps.assembly import Assembler
from paceline_server.steps.breakdown import break_down, compute_rows, rank_times
from paceline_server.steps.bubbles import BubbleModel
from paceline_server.steps.columns import CHUNK, Block, Ints, Spans, block, decode
from paceline_server.steps.groups import Groups
from paceline_server.steps.line import Line
from paceline_server.steps.peers import medians_of_others
from paceline_server.steps.replicas import Coordinates, Phases
from paceline_server.steps.timing import ComputeTimes, Floats, RankTimes, StepTiming
from paceline_server.steps.types import RankStep, StepSummary
from paceline_server.steps.waits import communication
from paceline_wire.batch import SpanBlock
from paceline_wire.ring import GroupDefinition
from paceline_wire.topology import Topology

# Blocks are decoded together, for most of the work is then done once; but no more than these.
MAXIMUM_UNDECODED_SPANS = 1 << 19


class FinishedStep(NamedTuple):
    """For people and the books, and for detectors."""

    summary: StepSummary
    timing: StepTiming


class StepModel:
    """One generation's steps. Feed blocks with `add`, collect with `take_finished`."""

    def __init__(self, generation: int, topology: Topology, metadata: Mapping[str, str]) -> None:
        self.generation = generation
        self.topology = topology
        self.groups = Groups(topology.world_size)
        self.metadata: Mapping[str, str] = dict(metadata)
        self._assembler = Assembler(topology.world_size)
        self._bubbles = BubbleModel(topology)
        self._blocks: list[Block] = []
        self._undecoded_spans = 0
        self.lost_spans = 0  # overwritten in a ring before its agent read them

    def describe(self, metadata: Mapping[str, str]) -> None:
        """What the ranks say of themselves; what the job was created with stays."""
        self.metadata = {**metadata, **self.metadata}

    def add_group(self, rank: int, definition: GroupDefinition) -> None:
        self.groups.add(rank, definition)

    def add(self, sent: SpanBlock, clock_shift_ns: int = 0) -> None:
        """`clock_shift_ns` is added to the node's CLOCK_REALTIME, to make it the server's.

        Raises ValueError for a fragment of a record.
        """
        self.lost_spans += max(sent.lost, 0)
        added = block(sent, clock_shift_ns)
        if added is not None:
            self._blocks.append(added)
            self._undecoded_spans += added.words.shape[1]
        if self._undecoded_spans > MAXIMUM_UNDECODED_SPANS:
            self._decode()

    def _decode(self) -> None:
        blocks, self._blocks, self._undecoded_spans = self._blocks, [], 0
        self._assembler.add(decode(blocks))

    def newest_step(self, rank: int) -> int | None:
        """The newest step this rank had finished when steps were last taken."""
        return self._assembler.newest_step(rank)

    def take_moved(self) -> list[int]:
        """Ranks that have finished a step since this was last asked for."""
        return self._assembler.take_moved()

    def take_finished(self) -> list[FinishedStep]:
        self._decode()
        found = []
        for step, spans in self._assembler.take_finished():
            finished = self._finish(step, spans)
            if finished is not None:
                found.append(finished)
        return found

    def _finish(self, step: int, spans: Spans) -> FinishedStep | None:
        """None when so few ranks are left that their sum would mislead."""
        line = Line(spans)
        if 2 * len(line) < self.topology.world_size:
            return None
        places = Coordinates.of(line.ranks, self.topology)
        compute = compute_rows(spans, line)
        phases = Phases.of(spans, line, compute, places, self.topology)
        met = communication(spans, self.groups)
        painted = break_down(spans, met.wait_ns, line, phases, compute)
        times = rank_times(spans, line, painted)
        slowdown = slowdowns(times.self_seconds, places.pp_rank)
        started_ns, ended_ns = _extent(line)
        timing = StepTiming(
            step=step,
            ranks=times,
            compute=_compute_times(spans, compute, painted.self_ns),
            transfers=met.transfers,
            collectives=met.collectives,
            groups={
                key: self.groups.members(key) for key in np.unique(met.collectives.group).tolist()
            },
        )
        summary = StepSummary(
            generation=self.generation,
            step=step,
            started_ns=started_ns,
            duration_seconds=(ended_ns - started_ns) / 1e9,
            ranks=_rank_steps(times, slowdown),
            bubbles=self._bubbles.measure(timing, self.metadata),
            slowest_rank=_slowest(line.ranks, slowdown),
        )
        return FinishedStep(summary, timing)


def _compute_times(spans: Spans, rows: Ints, self_ns: Ints) -> ComputeTimes:
    return ComputeTimes(
        rank=spans.rank[rows],
        op=spans.op[rows],
        microbatch=spans.microbatch[rows],
        chunk=spans.row(CHUNK)[rows],
        start_ns=spans.start_ns[rows],
        end_ns=spans.end_ns[rows],
        self_seconds=self_ns / 1e9,
        tokens=spans.bytes[rows],
        squared_tokens=spans.sequence[rows],
    )


def slowdowns(self_seconds: Floats, stage: Ints) -> Floats:
    """Each rank's self time over the median of the other ranks of its stage; NaN: no peers."""
    typical = np.full(self_seconds.size, np.nan)
    for number in np.unique(stage).tolist():
        peers = stage == number
        typical[peers] = medians_of_others(self_seconds[peers])
    answer = np.full(self_seconds.size, np.nan)
    np.divide(self_seconds, typical, out=answer, where=typical > 0)
    return answer


def _rank_steps(times: RankTimes, slowdown: Floats) -> list[RankStep]:
    columns = [
        getattr(times, name).tolist() for name in RankStep.__struct_fields__ if name != "slowdown"
    ]
    known = [None if value != value else value for value in slowdown.tolist()]
    return [RankStep(*row) for row in zip(*columns, known, strict=True)]


def _extent(line: Line) -> tuple[int, int]:
    """From the earliest start to the latest end, where the nodes' clocks agree.

    All ranks meet in each step, so a step as a whole takes hardly longer than for its slowest
    rank. If it seems to, clocks disagree, and that rank's own interval is the best there is.
    """
    begin, end = int(line.begin_ns.min()), int(line.end_ns.max())
    longest = int((line.end_ns - line.begin_ns).argmax())
    own = int(line.begin_ns[longest]), int(line.end_ns[longest])
    return (begin, end) if end - begin <= 2 * (own[1] - own[0]) else own


def _slowest(ranks: Ints, slowdown: Floats) -> int | None:
    """Of several the lowest."""
    if np.isnan(slowdown).all():
        return None
    return int(ranks[np.nanargmax(slowdown)])
