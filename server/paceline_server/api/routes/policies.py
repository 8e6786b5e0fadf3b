"""Policies: the default for new jobs, those of jobs, and their versions."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from sqlalchemy.orm import Session

from paceline_server.api import problems, resources, schemas
from paceline_server.api.auth import Operator, check_approver, viewer
from paceline_server.api.dependencies import Bounds, BoundsDep, PartsDep, ReadDep
from paceline_server.api.paging import number
from paceline_server.api.problems import ProblemError
from paceline_server.api.routes.jobs import find
from paceline_server.api.times import time_of
from paceline_server.policy import Policy, PolicyError, parse_policy, policy_changes
from paceline_server.store import models, policies
from paceline_server.store.log import FINISHED

router = APIRouter(tags=["policies"])


@router.get(
    "/policies",
    dependencies=[viewer],
    response_model=schemas.PolicyPage,
    responses=problems.responses(401, 403, 404, 422, 503),
)
def list_policies(
    session: ReadDep,
    bounds: BoundsDep,
    job: Annotated[
        str | None,
        Query(
            description="Versions of this job's own policy; by default of that for new jobs.",
            pattern="^[^\0]*$",
        ),
    ] = None,
) -> schemas.PolicyPage:
    """List the versions of a policy, newest first. A job without its own has that for new jobs."""
    if job is not None:
        find(session, job)
    before = None if bounds.after is None else number(bounds.after)
    rows = policies.versions(session, bounds.limit, before, job)
    more = len(rows) == bounds.limit
    return schemas.PolicyPage(
        items=[_version(session, row) for row in rows],
        next_cursor=Bounds.encode(str(rows[-1].id)) if more else None,
    )


@router.get(
    "/policies/{version}",
    dependencies=[viewer],
    response_model=schemas.PolicyVersion,
    responses=problems.responses(401, 403, 404, 422, 503),
)
def get_policy(version: int, session: ReadDep) -> schemas.PolicyVersion:
    """Return one version of a policy, such as the one that decided an action."""
    is_possible = 0 < version < 1 << 62
    row = session.get(models.PolicyVersionRow, version) if is_possible else None
    if row is None:
        raise problems.not_found("policy version", str(version))
    return _version(session, row)


@router.patch(
    "/jobs/{job_id}/policy",
    response_model=schemas.Job,
    responses=problems.responses(401, 403, 404, 409, 422, 503),
)
def change_policy(
    job_id: str, body: schemas.PolicyUpdate, parts: PartsDep, caller: Operator
) -> schemas.Job:
    """Change fields of a job's policy.

    Decisions follow it at once, and detection from the job's next generation on.
    """
    now_ns = parts.now_ns()
    with parts.database.write() as session:
        row = find(session, job_id)
        check_approver(caller, row.policy)
        if row.state in FINISHED:
            raise ProblemError(409, f"The job is already {row.state}.")
        try:
            policy = parse_policy(body.values, row.policy)
        except PolicyError as error:
            raise ProblemError(422, f"policy: {error}.") from error
        policies.change(session, row, policy, caller.name, body.comment, now_ns)
        changed = resources.job(session, row, parts.as_of())
    parts.signals.work.notify()
    parts.signals.changes.notify()
    return changed


def _version(session: Session, row: models.PolicyVersionRow) -> schemas.PolicyVersion:
    before = policies.version_before(session, row)
    changes = policy_changes(Policy() if before is None else before.policy, row.policy)
    return schemas.PolicyVersion(
        version=row.id,
        hash=row.hash,
        job_id=row.job_id,
        at=time_of(row.at_ns),
        actor=row.actor,
        comment=row.comment,
        values=msgspec.to_builtins(row.policy),
        changes=[
            schemas.PolicyChangeModel(
                field=one.field,
                before=policies.value_text(one.before),
                after=policies.value_text(one.after),
            )
            for one in changes
        ],
    )
