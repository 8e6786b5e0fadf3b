"""Dumps that take long to read occupy few threads of the server, and are read once."""

from __future__ import annotations

import threading
import time

import pytest

from paceline_server.api import dump_analyses
from paceline_server.api.dump_analyses import DumpAnalyses, DumpAnalysis
from paceline_server.api.problems import ProblemError
from paceline_server.flight_recorder.received import Received
from paceline_server.store.rank_evidence import ReceivedEvidence
from paceline_wire.batch import RankDump


def dump(received_ns: int) -> ReceivedEvidence[RankDump]:
    return ReceivedEvidence(RankDump(time_ns=1, job="j", generation=0, rank=0), received_ns)


def test_dumps_that_take_long_to_read_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    is_reading, may_end = threading.Event(), threading.Event()
    read: list[RankDump] = []

    def slow(event: RankDump) -> Received:
        read.append(event)
        is_reading.set()
        assert may_end.wait(60)
        return Received(None, "it is hostile")

    monkeypatch.setattr(dump_analyses, "read", slow)
    analyses = DumpAnalyses()

    def analyze(received_ns: int) -> DumpAnalysis:
        return analyses.analyze("j", [dump(received_ns)], range(1))

    threads = [threading.Thread(target=analyze, args=(1,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert is_reading.wait(60)
    while analyses._places._value:  # until all of them wait
        time.sleep(0.01)
    with pytest.raises(ProblemError, match="try again"):
        analyze(1)
    may_end.set()
    for thread in threads:
        thread.join()
    assert analyze(1).text == "No Flight Recorder dump: it is hostile."
    assert len(read) == 1
    analyze(2)
    assert len(read) == 2, "a newer dump"
