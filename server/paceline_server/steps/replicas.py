"""The pipeline phase of each replica."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline_server.steps.columns import Ints, Spans
from paceline_server.steps.line import Line
from paceline_wire.topology import Topology


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where each rank of some stands, as columns."""

    dp_rank: Ints
    pp_rank: Ints

    @staticmethod
    def of(ranks: Ints, topology: Topology) -> Coordinates:
        pp_rank, dp_rank = np.divmod(ranks // topology.tp, topology.dp)
        return Coordinates(dp_rank, pp_rank)


@dataclass(frozen=True, slots=True)
class Phases:
    """When each rank's pipeline was busy: from the first microbatch's start to the last one's end
    on any stage of its replica. Empty, at the end of its step, for a rank that has no pipeline.
    """

    begin_ns: Ints
    end_ns: Ints

    def of_rows(self, rows: slice) -> Phases:
        return Phases(self.begin_ns[rows], self.end_ns[rows])

    @staticmethod
    def of(
        spans: Spans, line: Line, compute: Ints, places: Coordinates, topology: Topology
    ) -> Phases:
        """`compute`: the rows of the microbatches."""
        if topology.pp == 1:
            return Phases(line.end_ns, line.end_ns)
        never, longest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        begin_ns = np.full(topology.dp, longest, dtype=np.int64)
        end_ns = np.full(topology.dp, never, dtype=np.int64)
        replica = places.dp_rank[line.owner[compute]]
        np.minimum.at(begin_ns, replica, spans.start_ns[compute])
        np.maximum.at(end_ns, replica, spans.end_ns[compute])
        known = (begin_ns != longest)[places.dp_rank]
        return Phases(
            np.where(known, begin_ns[places.dp_rank], line.end_ns),
            np.where(known, end_ns[places.dp_rank], line.end_ns),
        )
