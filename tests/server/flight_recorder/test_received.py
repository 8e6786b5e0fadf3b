"""Dumps that agents sent: there is a verdict only if no dump is missing for another reason."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from paceline_server.flight_recorder.received import Received, conclude, read
from paceline_wire import dumps
from paceline_wire.batch import RankDump

OFFERS_NONE = "its environment offers none"


def event(rank: int, content: bytes = b"", error: str | None = None) -> RankDump:
    return RankDump(time_ns=1, job="j", generation=1, rank=rank, content=content, error=error)


@pytest.fixture
def received(recorded: Path) -> dict[int, Received]:
    return {
        rank: read(event(rank, dumps.pack((recorded / f"_dump_{rank}").read_bytes())))
        for rank in range(16)
    }


def test_the_recorded_incident_is_concluded_from_what_was_sent(received):
    report, text = conclude(received, range(16))
    assert report is not None
    assert report.culprits == (9, 14)
    assert text.startswith("Flight Recorder, 16 dumps: Ranks 9, 14 stopped on the host before")


def test_a_rank_that_did_not_write_its_requested_dump_is_hung(received):
    for rank in (9, 14):
        received[rank] = Received(None, f"rank {rank} did not write its dump", was_asked=True)
    report, _ = conclude(received, range(16))
    assert report is not None
    assert set(report.culprits) == {9, 14}


@pytest.mark.parametrize("missing", [Received(None, OFFERS_NONE), None])
def test_nothing_is_concluded_where_a_rank_is_missing_for_another_reason(received, missing):
    del received[3]
    if missing is not None:
        received[3] = missing
    report, text = conclude(received, range(16))
    assert report is None
    assert text.startswith("Flight Recorder dumps of 15 of 16 ranks, too few to conclude from: ")


def test_the_reason_for_no_dump_at_all_is_reported():
    offers_none = {rank: read(event(rank, error=OFFERS_NONE)) for rank in range(4)}
    assert conclude(offers_none, range(4)) == (None, f"No Flight Recorder dump: {OFFERS_NONE}.")
    assert conclude({}, range(4)) == (None, "No Flight Recorder dump: no rank has responded.")


@pytest.mark.parametrize("content", [b"", b"torn", dumps.pack(pickle.dumps(Path("/")))])
def test_a_file_that_is_not_a_dump_is_reported_and_never_loaded(content):
    found = read(event(2, content))
    assert found.dump is None
    assert found.error is not None
    assert found.error.startswith("the dump of rank 2 ")
