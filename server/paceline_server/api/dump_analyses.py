"""Analyses of the Flight Recorder dumps that agents sent.

Ranks decide what is in a dump: one of 500 bytes, compressed, can take a minute and a GiB to read.
So one job is analyzed at a time, the newest result is kept, and few requests wait for another one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from paceline_server.api.problems import unavailable
from paceline_server.flight_recorder import HangReport
from paceline_server.flight_recorder.received import Received, conclude, read
from paceline_server.store.rank_evidence import ReceivedEvidence
from paceline_wire.batch import RankDump

_REQUESTS_AT_MOST = 4


class DumpAnalysis(NamedTuple):
    """The dumps of a job, the report on all of them, and a sentence about it."""

    dumps: Mapping[int, Received]
    report: HangReport | None
    text: str


class DumpAnalyses:
    """The analyses of one serving process."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(_REQUESTS_AT_MOST)
        self._lock = threading.Lock()
        self._newest: tuple[object, DumpAnalysis] | None = None

    def analyze(
        self, job_id: str, dumps: Sequence[ReceivedEvidence[RankDump]], expected: Collection[int]
    ) -> DumpAnalysis:
        """Return the analysis of dumps of one generation. Raises ProblemError if others wait."""
        which = [(each.event.generation, each.event.rank, each.received_ns) for each in dumps]
        key = job_id, which, expected
        if (newest := self._newest) is not None and newest[0] == key:
            return newest[1]
        if not self._places.acquire(blocking=False):
            raise unavailable("The dumps of other jobs are being analyzed; try again.")
        try:
            with self._lock:
                if self._newest is None or self._newest[0] != key:
                    received = {each.event.rank: read(each.event) for each in dumps}
                    self._newest = key, DumpAnalysis(received, *conclude(received, expected))
                return self._newest[1]
        finally:
            self._places.release()
