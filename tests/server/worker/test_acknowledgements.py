"""Answers of ranks to commands."""

from __future__ import annotations

import pytest

from paceline_server.decide.types import IssuedCommand
from paceline_server.store.commands import issue
from paceline_server.store.database import Database
from paceline_server.worker.acknowledgements import checkpoint_step, genuine_acknowledgements
from paceline_wire.batch import RankAcknowledged
from paceline_wire.commands import ControlRanks
from tests.server.rows import toy_job


@pytest.mark.any_database
@pytest.mark.parametrize(
    ("kind", "status", "saved"),
    [("checkpoint_and_stop", "done", 40), ("cancel", "withdrawn", None)],
)
def test_a_command_that_ranks_withdraw_at_one_step_is_no_checkpoint(
    database: Database, kind: str, status: str, saved: int | None
) -> None:
    command = ControlRanks(command_id=7, job="job", generation=1, kind=kind, target_step=0)
    with database.write() as session:
        session.add(toy_job("job"))
        session.flush()
        issue(session, "job", IssuedCommand(agent_id="n0", action_id="act", command=command), 1)
    answers = [
        RankAcknowledged(
            time_ns=1, job="job", generation=1, rank=rank, command_id=7, status="done", step=40
        )
        for rank in (0, 1)
    ]
    with database.read() as session:
        known = genuine_acknowledgements(session, "job", 1, answers)
    assert [one.status for one in known] == [status, status]
    assert checkpoint_step(known, world_size=2) == saved
