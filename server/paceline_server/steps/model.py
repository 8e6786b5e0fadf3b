"""The step model: turns the spans of all ranks into `StepSummary` and `StepTiming`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from paceline_server.steps.assembly import Assembler
from paceline_server.steps.breakdown import break_down, compute_rows, rank_times
from paceline_server.steps.bubbles import BubbleModel
from paceline_server.steps.columns import CHUNK, Block, Ints, Spans, block, decode
from paceline_server.steps.grid import grid_of
from paceline_server.steps.groups import Groups
from paceline_server.steps.metadata import merged
from paceline_server.steps.peers import medians_of_others, peer_groups
from paceline_server.steps.replicas import ReplicaPhases
from paceline_server.steps.sampling import StepSampler
from paceline_server.steps.timeline import StepTimeline
from paceline_server.steps.timing import ComputeTimes, Floats, RankTimes, StepTiming
from paceline_server.steps.types import RankStep, StepSummary
from paceline_server.steps.waits import communication
from paceline_server.steps.work import RankValues, count_work
from paceline_wire.batch import RankDefined, SpanBlock
from paceline_wire.ring import GroupDefinition
from paceline_wire.spans import Op
from paceline_wire.topology import Topology

# Blocks are decoded together, which saves most of the work; at most this many spans at a time.
MAXIMUM_UNDECODED_SPANS = 1 << 19


class FinishedStep(NamedTuple):
    """The summary for users and the ledger, the timing for detectors."""

    summary: StepSummary
    timing: StepTiming


class StepModel:
    """The steps of one generation. Add blocks with `add`, collect steps with `take_finished`."""

    def __init__(self, generation: int, topology: Topology, metadata: Mapping[str, str]) -> None:
        self.generation = generation
        self.topology = topology
        self.groups = Groups(topology.world_size)
        self.metadata: Mapping[str, str] = dict(metadata)
        self._assembler = Assembler(topology.world_size)
        self._sampler = StepSampler()
        self._bubbles = BubbleModel(topology)
        self.values = RankValues(topology.world_size)
        self._blocks: list[Block] = []
        self._undecoded_spans = 0
        self.lost_spans = 0  # overwritten in a ring before its agent read them

    def describe(self, metadata: Mapping[str, str]) -> None:
        """Add metadata that the ranks reported.

        It does not replace values given when the job was created.
        """
        self.metadata = {**metadata, **self.metadata}

    def define(self, event: RankDefined) -> None:
        """Add the process groups of a rank, and the metadata that it found out later, which takes
        precedence."""
        for definition in event.definitions:
            if isinstance(definition, GroupDefinition):
                self.add_group(event.rank, definition)
        for description in event.descriptions:
            self.metadata = merged(self.metadata, description.metadata)

    def relocate(self, topology: Topology) -> None:
        """Use another topology for the steps from now on."""
        self.topology = topology
        self._bubbles = BubbleModel(topology)

    def add_group(self, rank: int, definition: GroupDefinition) -> None:
        self.groups.add(rank, definition)

    def add(self, sent: SpanBlock, clock_shift_ns: int = 0) -> None:
        """`clock_shift_ns` is added to the node's CLOCK_REALTIME to get the server's.

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
        self._assembler.add(self.values.extract(decode(blocks)))

    def newest_step(self, rank: int) -> int | None:
        """Return the newest step that this rank had finished at the last `take_finished`."""
        return self._assembler.newest_step(rank)

    def has_no_steps(self, rank: int) -> bool:
        """Return whether the steps of the job are those of other ranks."""
        return self._assembler.has_no_steps(rank)

    def take_moved(self) -> list[int]:
        """Return the ranks that have finished a step since the last call."""
        return self._assembler.take_moved()

    def take_finished(self) -> list[FinishedStep]:
        """Return the finished steps that are analyzed: see `sampling`."""
        self._decode()
        found = []
        for step, spans in self._assembler.take_finished():
            if not self._sampler.takes(step, _seconds(spans)):
                continue
            finished = self._finish(step, spans)
            if finished is not None:
                found.append(finished)
        return found

    def _finish(self, step: int, spans: Spans) -> FinishedStep | None:
        """Finish a step.

        Return None if so few of the ranks that have steps are left that their sum would be
        misleading.
        """
        timeline = StepTimeline(spans)
        if 2 * len(timeline) < self._assembler.ranks_with_steps:
            return None
        grid = grid_of(self.topology)
        compute = compute_rows(spans, timeline)
        phases = ReplicaPhases.of(spans, timeline, compute, grid)
        met = communication(spans, self.groups)
        painted = break_down(spans, met.wait_ns, timeline, phases, compute)
        times = rank_times(spans, met.wait_ns, timeline, painted, met.routed)
        group = peer_groups(timeline.ranks, grid, spans.rank[compute], spans.bytes[compute])
        slowdown = slowdowns(times.self_seconds, group)
        started_ns, ended_ns = _extent(timeline)
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
        samples, tokens = count_work(spans, grid)
        skipped, skipped_seconds = self._sampler.take_skipped()
        summary = StepSummary(
            generation=self.generation,
            step=step,
            started_ns=started_ns,
            duration_seconds=(ended_ns - started_ns) / 1e9,
            mean_started_ns=_mean(timeline.begin_ns),
            ranks=_rank_steps(times, slowdown),
            bubbles=self._bubbles.measure(timing, self.metadata),
            slowest_rank=_slowest(timeline.ranks, slowdown),
            samples=samples,
            tokens=tokens,
            skipped=skipped,
            skipped_seconds=skipped_seconds,
        )
        return FinishedStep(summary, timing)


def _seconds(spans: Spans) -> float:
    """Return the longest time that a rank needed for the step."""
    return int(spans.duration_ns[spans.op == Op.STEP].max(initial=0)) / 1e9


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


def slowdowns(self_seconds: Floats, group: Ints) -> Floats:
    """Return each rank's self time over the median of its group's others; NaN: no peers."""
    typical = np.full(self_seconds.size, np.nan)
    for number in np.unique(group).tolist():
        peers = group == number
        typical[peers] = medians_of_others(self_seconds[peers])
    answer = np.full(self_seconds.size, np.nan)
    np.divide(self_seconds, typical, out=answer, where=typical > 0)
    return answer


def _rank_steps(times: RankTimes, slowdown: Floats) -> list[RankStep]:
    known = [None if value != value else value for value in slowdown.tolist()]
    columns = [
        known if name == "slowdown" else getattr(times, name).tolist()
        for name in RankStep.__struct_fields__
    ]
    return [RankStep(*row) for row in zip(*columns, strict=True)]


def _extent(timeline: StepTimeline) -> tuple[int, int]:
    """Return the earliest start and the latest end, if the nodes' clocks agree.

    All ranks synchronize in each step, so a step is hardly longer than that of its slowest rank. If
    it seems longer, the clocks disagree, and the interval of the slowest rank is the best estimate.
    """
    begin, end = int(timeline.begin_ns.min()), int(timeline.end_ns.max())
    longest = int((timeline.end_ns - timeline.begin_ns).argmax())
    own = int(timeline.begin_ns[longest]), int(timeline.end_ns[longest])
    return (begin, end) if end - begin <= 2 * (own[1] - own[0]) else own


def _mean(times_ns: Ints) -> int:
    """Return the mean of times that are too large for a sum."""
    first = int(times_ns.min())
    return first + int((times_ns - first).mean())


def _slowest(ranks: Ints, slowdown: Floats) -> int | None:
    """Return the slowest rank, the lowest of several; None: no rank has peers."""
    if np.isnan(slowdown).all():
        return None
    return int(ranks[np.nanargmax(slowdown)])
