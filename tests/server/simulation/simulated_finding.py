"""A finding about a slow rank, and the row of its incident."""

from __future__ import annotations

from typing import Any

from simulated_job import JOB

from paceline_server.decide.types import IncidentView
from paceline_server.detect.finding import Cause, Finding
from paceline_server.store.models import IncidentRow

SUMMARY = "Rank 5 (node-2) is 1.6x slower than its peers."


def straggler(likelihood: float = 0.9, **evidence: Any) -> Finding:
    return Finding(
        kind="straggler",
        cause="thermal throttle",
        fingerprint="straggler:5",
        summary=SUMMARY,
        detected_ns=1,
        generation=1,
        causes=[Cause("thermal throttle", likelihood)],
        **evidence,
    )


def open_incident(*action_ids: str) -> IncidentRow:
    """Return `inc-1`, an incident of `straggler` with these actions."""
    view = IncidentView(
        incident_id="inc-1", finding=straggler(), opened_ns=1, action_ids=[*action_ids]
    )
    return IncidentRow(
        id="inc-1",
        job_id=JOB,
        kind="straggler",
        severity="warning",
        state="open",
        opened_ns=1,
        view=view,
    )
