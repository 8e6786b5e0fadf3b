"""Old alerts and commands, and the steps of ended jobs, are deleted by any running server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import func, select

from paceline_server.decide.types import ActionView
from paceline_server.steps.types import StepSummary
from paceline_server.store.database import Database
from paceline_server.store.models import (
    AcknowledgementRow,
    ActionRow,
    CommandRow,
    EngineMemoryRow,
    JobRow,
    OutboxRow,
    StepRow,
    StepSharesRow,
)
from paceline_server.store.shares import insert_steps
from paceline_server.worker import worker
from tests.server.rows import toy_job

_NOW_NS = time.time_ns()
_OLD_NS = _NOW_NS - 8 * 86_400 * 1_000_000_000


def alert(created_ns: int, finished_ns: int | None) -> OutboxRow:
    return OutboxRow(
        receiver="removed",
        subject="inc-1",
        event="opened",
        body="{}",
        created_ns=created_ns,
        attempts=0,
        next_attempt_ns=created_ns,
        finished_ns=finished_ns,
    )


def command(command_id: int, finished_ns: int | None, action_id: str = "") -> CommandRow:
    return CommandRow(
        id=command_id,
        job_id="job-1",
        agent_id="node-1",
        action_id=action_id,
        kind="stop_generation",
        generation=1,
        created_ns=_OLD_NS,
        body="{}",
        finished_ns=finished_ns,
    )


def running_action() -> ActionRow:
    view = ActionView(
        action_id="act-1", kind="checkpoint", state="running", reason="", generation=1, created_ns=1
    )
    return ActionRow(
        id="act-1",
        job_id="job-1",
        kind="checkpoint",
        state="running",
        created_ns=1,
        version=1,
        noticed=True,
        view=view,
    )


def finished_step(step: int) -> StepSummary:
    return StepSummary(
        generation=1, step=step, started_ns=1, duration_seconds=1.0, ranks=[], slowest_rank=0
    )


def ids(database: Database, table: Any) -> list[int]:
    with database.read() as session:
        return list(session.scalars(select(table.id).order_by(table.id)))


def test_alerts_are_deleted_after_a_week_even_if_never_delivered(
    database: Database, run_server: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    with database.write() as session:
        for created_ns, finished_ns in [(_OLD_NS, None), (_OLD_NS, _OLD_NS), (_NOW_NS, None)]:
            session.add(alert(created_ns, finished_ns))
            session.flush()
    run_server()
    wait_for(lambda: ids(database, OutboxRow) == [3], "the old ones to go")


def test_finished_commands_are_deleted_after_a_week_unless_their_action_runs(
    database: Database, run_server: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    with database.write() as session:
        session.add(toy_job("job-1"))
        session.flush()
        session.add_all(
            [
                command(1, _OLD_NS),
                command(2, _OLD_NS, "act-1"),
                command(3, None),
                command(4, _NOW_NS),
                running_action(),
            ]
        )
        session.flush()
        answer = {"job_id": "job-1", "generation": 1, "status": "done", "step": 7}
        session.add_all(AcknowledgementRow(command_id=id, rank=0, **answer) for id in (1, 2))
    run_server()
    wait_for(lambda: ids(database, CommandRow) == [2, 3, 4], "the old one to go")
    with database.read() as session:
        assert session.scalars(select(AcknowledgementRow.command_id)).all() == [2]


def test_the_steps_of_a_job_are_deleted_long_after_its_end(
    database: Database,
    run_server: Callable[..., Any],
    wait_for: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "_DROPPED_AT_ONCE", 10)
    monkeypatch.setattr(worker, "_PRUNE_NS", 0)
    ends = {"old": _OLD_NS, "recent": _NOW_NS, "failed": _OLD_NS, "stored before": None}
    with database.write() as session:
        for job_id, finished_ns in ends.items():
            state = "failed" if job_id == "failed" else "finished"
            session.add(toy_job(job_id, state=state, finished_ns=finished_ns, step=24))
            session.flush()
            insert_steps(session, job_id, [finished_step(number) for number in range(25)])
            session.add(EngineMemoryRow(job_id=job_id, memory=b"", cursor=0))

    def kept(table: Any) -> dict[str, int]:
        with database.read() as session:
            by_job = select(table.job_id, func.count()).group_by(table.job_id)
            return dict(session.execute(by_job).all())

    run_server(step_retention_seconds=7 * 86_400.0)
    wait_for(lambda: kept(EngineMemoryRow).keys() == {"recent", "stored before"}, "the old ones")
    assert kept(StepRow) == kept(StepSharesRow) == {"recent": 25, "stored before": 25}
    with database.read() as session:
        assert session.get(JobRow, "old") is not None
