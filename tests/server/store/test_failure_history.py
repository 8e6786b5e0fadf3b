"""The failures of the fleet and the time of its nodes."""

from __future__ import annotations

from msgspec.structs import replace

from paceline_server.decide.types import FailureHistory, IncidentView
from paceline_server.detect.causes.catalog import STOPPED_ON_REQUEST
from paceline_server.detect.finding import Finding
from paceline_server.store.database import Database
from paceline_server.store.models import IncidentRow
from paceline_server.store.queries import failure_history
from tests.server.rows import toy_job, toy_rank

SECOND = 1_000_000_000


def incident(
    name: str,
    job_id: str,
    kind: str,
    severity: str,
    opened_seconds: int,
    cause: str = "unknown",
) -> IncidentRow:
    finding = Finding(
        kind=kind, cause=cause, fingerprint=name, summary=".", detected_ns=1, generation=1
    )
    opened_ns = opened_seconds * SECOND
    return IncidentRow(
        id=name,
        job_id=job_id,
        kind=kind,
        severity=severity,
        state="resolved",
        opened_ns=opened_ns,
        view=IncidentView(incident_id=name, finding=finding, opened_ns=opened_ns),
    )


def test_failures_and_the_time_of_nodes_are_counted_since_a_time(database: Database) -> None:
    with database.write() as session:
        session.add_all(
            [
                toy_job("ended", started_ns=0, finished_ns=100 * SECOND),
                toy_job(
                    "running", state="running", started_ns=150 * SECOND, ticked_ns=250 * SECOND
                ),
                toy_job("begins", state="running", ticked_ns=250 * SECOND),
                toy_job("long ago", started_ns=0, finished_ns=20 * SECOND),
            ]
        )
        session.flush()
        # The node of two ranks counts once.
        session.add_all(toy_rank("ended", number, f"node-{number // 2}") for number in range(4))
        session.add_all(toy_rank("running", number, f"node-{number}") for number in range(3))
        session.add(toy_rank("begins", 0, "node-9"))
        session.add(toy_rank("long ago", 0, "node-9"))
        session.add_all(
            [
                incident("crash", "ended", "failure", "critical", 60),
                incident("hang", "running", "hang", "critical", 200),
                incident("mild", "running", "failure", "warning", 200),
                incident("slow", "running", "straggler", "critical", 200),
                incident("before", "ended", "failure", "critical", 20),
            ]
        )
    with database.read() as session:
        found = failure_history(session, 50 * SECOND)
    assert found == FailureHistory(2, 2 * 50.0 + 3 * 100.0)


def test_ranks_that_a_person_ended_are_no_failure(database: Database) -> None:
    ended = incident("scancel", "ended", "failure", "critical", 60, STOPPED_ON_REQUEST)
    hung = incident("hang", "ended", "hang", "critical", 61)
    crashed = incident("crash", "ended", "failure", "critical", 62)
    for each in (hung, crashed):
        each.view = replace(each.view, symptoms=[ended.view.finding])
    with database.write() as session:
        session.add(toy_job("ended", started_ns=0, finished_ns=100 * SECOND))
        session.flush()
        session.add_all([ended, hung, crashed])
    with database.read() as session:
        assert failure_history(session, 50 * SECOND).failures == 2
