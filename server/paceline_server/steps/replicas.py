"""The pipeline phase of each data-parallel replica."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline_server.steps.columns import Ints, Spans
from paceline_server.steps.grid import RankGrid
from paceline_server.steps.timeline import StepTimeline


@dataclass(frozen=True, slots=True)
class ReplicaPhases:
    """The pipeline phase of each rank's replica.

    It lasts from the first microbatch's start to the last one's end on any stage. Without a
    pipeline it is empty, at the end of the rank's step.
    """

    begin_ns: Ints
    end_ns: Ints

    def of_rows(self, rows: slice) -> ReplicaPhases:
        return ReplicaPhases(self.begin_ns[rows], self.end_ns[rows])

    @staticmethod
    def of(
        spans: Spans,
        timeline: StepTimeline,
        compute: Ints,
        grid: RankGrid,
    ) -> ReplicaPhases:
        """Return the phases. `compute`: the rows of the microbatches."""
        if grid.stages == 1:
            return ReplicaPhases(timeline.end_ns, timeline.end_ns)
        never, longest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        begin_ns = np.full(grid.replicas, longest, dtype=np.int64)
        end_ns = np.full(grid.replicas, never, dtype=np.int64)
        replica_of = grid.replica[timeline.ranks]
        replica = replica_of[timeline.owner[compute]]
        np.minimum.at(begin_ns, replica, spans.start_ns[compute])
        np.maximum.at(end_ns, replica, spans.end_ns[compute])
        known = (begin_ns != longest)[replica_of]
        return ReplicaPhases(
            np.where(known, begin_ns[replica_of], timeline.end_ns),
            np.where(known, end_ns[replica_of], timeline.end_ns),
        )
