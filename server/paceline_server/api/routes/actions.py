"""Actions, and their approval or rejection."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query

from paceline_server.api import problems, resources, schemas
from paceline_server.api.auth import Caller, Operator, check_approver, viewer
from paceline_server.api.dependencies import BoundsDep, Parts, PartsDep, ReadDep
from paceline_server.api.paging import position, time_cursor
from paceline_server.api.problems import ProblemError, not_found
from paceline_server.decide.types import ActionState, AuditEntry
from paceline_server.store import audit, models, queries
from paceline_server.store.changes import record_change

router = APIRouter(prefix="/actions", tags=["actions"])
_DECIDED = problems.responses(401, 403, 404, 409, 422, 503)


@router.get(
    "",
    dependencies=[viewer],
    response_model=schemas.ActionPage,
    responses=problems.responses(401, 403, 422, 503),
)
def list_actions(
    session: ReadDep,
    bounds: BoundsDep,
    job: Annotated[
        str | None, Query(description="Only actions of this job.", pattern="^[^\0]*$")
    ] = None,
    state: ActionState | None = None,
) -> schemas.ActionPage:
    """List actions, newest first."""
    rows = queries.actions(session, bounds.limit, position(bounds), job, state)
    more = len(rows) == bounds.limit
    return schemas.ActionPage(
        items=[resources.action(row) for row in rows],
        next_cursor=time_cursor(rows[-1].created_ns, rows[-1].id) if more else None,
    )


@router.get(
    "/{action_id}",
    dependencies=[viewer],
    response_model=schemas.Action,
    responses=problems.responses(401, 403, 404, 503),
)
def get_action(action_id: str, session: ReadDep) -> schemas.Action:
    row = session.get(models.ActionRow, action_id) if "\0" not in action_id else None
    if row is None:
        raise not_found("action", action_id)
    return resources.action(row)


@router.post("/{action_id}/approve", response_model=schemas.Action, responses=_DECIDED)
def approve_action(
    action_id: str, parts: PartsDep, caller: Operator, body: schemas.ActionDecision | None = None
) -> schemas.Action:
    """Approve a proposed action, which then runs."""
    return _decide(parts, caller, action_id, "approved", body)


@router.post("/{action_id}/reject", response_model=schemas.Action, responses=_DECIDED)
def reject_action(
    action_id: str, parts: PartsDep, caller: Operator, body: schemas.ActionDecision | None = None
) -> schemas.Action:
    """Reject an action that is proposed or waits for the script's own checkpoint."""
    return _decide(parts, caller, action_id, "rejected", body)


def _decide(
    parts: Parts,
    caller: Caller,
    action_id: str,
    state: Literal["approved", "rejected"],
    body: schemas.ActionDecision | None,
) -> schemas.Action:
    now_ns = parts.now_ns()
    with parts.database.write() as session:
        row = session.get(models.ActionRow, action_id.replace("\0", ""))
        if row is None:
            raise not_found("action", action_id)
        check_approver(caller, session.get_one(models.JobRow, row.job_id).policy)
        if not (row.view.can_be_rejected if state == "rejected" else row.state == "proposed"):
            raise ProblemError(
                409,
                f"The action is {row.state}; only a proposed action can be approved or rejected.",
            )
        row.restart_of = None  # a rejected one that was waiting no longer restarts
        finished_ns = now_ns if state == "rejected" else None
        row.view = msgspec.structs.replace(
            row.view, state=state, finished_ns=finished_ns, decided_by=caller.name
        )
        row.state, row.noticed, row.version = state, False, row.version + 1
        entry = AuditEntry(
            actor=caller.name, verb=state, subject=action_id, detail=body.comment if body else ""
        )
        audit.record(session, row.job_id, entry, now_ns)
        session.flush()
        record_change(session, row.job_id, "action", action_id)
        decided = resources.action(row)
    parts.signals.work.notify()
    parts.signals.changes.notify()
    return decided
