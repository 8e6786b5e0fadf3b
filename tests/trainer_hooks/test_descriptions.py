"""Descriptions that a session adds to its rank after `init`."""

from __future__ import annotations

import pytest

from paceline import hooks
from paceline.session import Session
from paceline_wire.ring import RingReader
from paceline_wire.topology import Coordinates, Topology


@pytest.fixture
def session(reader: RingReader) -> Session:
    """The session; what `init` itself added to its rank is read."""
    reader.new_descriptions()
    assert hooks._session is not None
    return hooks._session


def test_what_is_new_is_reported_once(reader: RingReader, session: Session) -> None:
    session.update(metadata={"steps": "optimizer"})
    session.update(metadata={"steps": "optimizer"})
    session.update(source="DeviceMesh", topology=Topology(2), coordinates=Coordinates(1))
    session.update(source="DeviceMesh", topology=Topology(2), coordinates=Coordinates(1))
    first, second = reader.new_descriptions()
    assert (first.metadata, first.topology) == ({"steps": "optimizer"}, None)
    assert (second.metadata, second.coordinates) == ({}, Coordinates(1))


def test_what_the_script_passed_stays(reader: RingReader, session: Session) -> None:
    session.given = frozenset({"schedule"})
    session.update(metadata={"schedule": "gpipe", "microbatches": "4"})
    assert [each.metadata for each in reader.new_descriptions()] == [{"microbatches": "4"}]


def test_a_full_area_is_no_error(reader: RingReader, session: Session) -> None:
    for number in range(20):
        session.update(metadata={"long": f"{number}" * 1000})
    assert 0 < len(reader.new_descriptions()) < 20
    assert not session.recorder.failures
