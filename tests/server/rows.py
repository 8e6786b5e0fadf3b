"""Rows that tests insert directly."""

from __future__ import annotations

from typing import Any

from paceline_server.decide.types import JobSpec
from paceline_server.policy import Policy
from paceline_server.steps.types import Ledger
from paceline_server.store.models import JobRow
from paceline_wire.topology import Topology

ONE_RANK = Topology(1, 1, 1)


def toy_job(job_id: str, *, topology: Topology = ONE_RANK, **changes: Any) -> JobRow:
    """Return a finished job with the given columns changed."""
    fields: dict[str, Any] = {
        "name": "toy",
        "spec": JobSpec(name="toy", argv=["true"], topology=topology),
        "policy": Policy(),
        "state": "finished",
        "generation": 1,
        "created_ns": 1,
        "stop_requested": False,
        "cursor": 0,
        "ledger": Ledger(),
    }
    return JobRow(id=job_id, topology=topology, **(fields | changes))
