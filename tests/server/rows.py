"""Rows that tests insert directly."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from paceline_server.decide.types import ActionView, JobSpec, LaunchRequest
from paceline_server.policy import Policy
from paceline_server.steps.types import Ledger
from paceline_server.store import launches
from paceline_server.store.models import ActionRow, JobRow, RankRow
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


def toy_rank(job_id: str, rank: int, agent_id: str, generation: int = 1) -> RankRow:
    """Return an attached rank."""
    return RankRow(
        job_id=job_id,
        rank=rank,
        generation=generation,
        agent_id=agent_id,
        local_rank=0,
        state="attached",
        commanded=False,
    )


def request_restart(
    session: Session, job_id: str, intent: LaunchRequest, now_ns: int, generation: int = 1
) -> None:
    """Add a running restart and its request to the launcher, as a tick does.

    `generation`: of the job at the time of the decision.
    """
    view = ActionView(
        action_id=intent.action_id,
        kind="restart",
        state="running",
        reason=intent.reason,
        generation=generation,
        created_ns=now_ns,
    )
    row = ActionRow(
        id=intent.action_id,
        job_id=job_id,
        kind="restart",
        state="running",
        created_ns=now_ns,
        version=1,
        noticed=True,
        view=view,
    )
    session.add(row)
    session.flush()
    launches.request(session, job_id, intent, now_ns)
