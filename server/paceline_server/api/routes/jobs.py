"""Jobs: create, list, stop; and their ranks, steps and grid."""

from __future__ import annotations

import hashlib
import logging
import secrets
from typing import Annotated

from fastapi import APIRouter, Header, Query
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from paceline_server.api import problems, resources, schemas
from paceline_server.api.auth import Operator, check_approver, viewer
from paceline_server.api.dependencies import (
    AfterDep,
    Bounds,
    BoundsDep,
    Parts,
    PartsDep,
    ReadDep,
)
from paceline_server.api.paging import number, position, time_cursor
from paceline_server.api.problems import ProblemError, not_found
from paceline_server.decide.request import requested_restart
from paceline_server.decide.types import AuditEntry, JobSpec
from paceline_server.policy import Policy, PolicyError, parse_policy
from paceline_server.steps.types import Ledger
from paceline_server.store import audit, models, policies, queries
from paceline_server.store.actions import action_columns
from paceline_server.store.changes import record_change
from paceline_server.store.log import FINISHED, newest_log_id
from paceline_wire.topology import RANKS_AT_MOST, Topology

_log = logging.getLogger(__name__)
_HOSTS_LOGGED = 8
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        description="Unique to one request, such as a UUID; retries repeat it.",
    ),
]

router = APIRouter(prefix="/jobs", tags=["jobs"])
_READ = problems.responses(401, 403, 422, 503)
_ONE = problems.responses(401, 403, 404, 422, 503)


@router.post("", status_code=201, response_model=schemas.Job, responses=_READ)
def create_job(
    body: schemas.JobCreate,
    parts: PartsDep,
    caller: Operator,
    idempotency_key: IdempotencyKey = None,
) -> schemas.Job:
    """Create a job. It starts as soon as ready nodes have enough free slots for its ranks.

    A second request with the same `Idempotency-Key` creates no second job: it returns the first.
    """
    try:
        created = _create_job(body, parts, caller.name, idempotency_key)
    except IntegrityError:  # another request with this key has just created it
        created = _create_job(body, parts, caller.name, idempotency_key)
    parts.signals.work.notify()
    parts.signals.changes.notify()
    return created


def _create_job(
    body: schemas.JobCreate, parts: Parts, caller: str, idempotency_key: str | None
) -> schemas.Job:
    now_ns = parts.now_ns()
    with parts.database.write() as session:
        row = _new_job(session, _job_id(idempotency_key), body, parts.policy, now_ns)
        existing = session.get(models.JobRow, row.id)
        if existing is not None:
            if existing.spec != row.spec:
                raise ProblemError(
                    422,
                    "Idempotency-Key: expected a new key for a job that differs from the first.",
                )
            return resources.job(session, existing, parts.as_of())
        _warn_of_short_agent_leases(session, row.policy)
        policies.assign(session, row, caller, now_ns)
        session.add(row)
        session.flush()
        entry = AuditEntry(actor=caller, verb="created", subject=row.id, detail=row.name)
        audit.record(session, row.id, entry, now_ns)
        record_change(session, row.id, "job", row.id)
        return resources.job(session, row, parts.as_of())


def _job_id(key: str | None) -> str:
    if key is None:
        return f"job-{secrets.token_hex(4)}"
    return f"job-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _new_job(
    session: Session, job_id: str, body: schemas.JobCreate, default: Policy, now_ns: int
) -> models.JobRow:
    for name, text in _texts(body):
        if "\0" in text:
            raise ProblemError(422, f"{name}: expected text without NUL characters.")
    topology = Topology(**body.topology.model_dump())
    if topology.world_size > RANKS_AT_MOST:
        raise ProblemError(
            422, f"topology: expected at most {RANKS_AT_MOST} ranks, got {topology.world_size}."
        )
    spec = JobSpec(
        name=body.name,
        argv=body.argv,
        topology=topology,
        environment=body.environment,
        directory=body.directory,
        checkpoint_directory=body.checkpoint_directory,
        metadata=body.metadata,
    )
    return models.JobRow(
        id=job_id,
        name=body.name,
        spec=spec,
        policy=_policy(body, default),
        state="pending",
        generation=0,
        topology=topology,
        created_ns=now_ns,
        stop_requested=False,
        cursor=newest_log_id(session),
        ledger=Ledger(),
    )


def _policy(body: schemas.JobCreate, default: Policy) -> Policy:
    values = dict(body.policy)
    for name in ("mode", "start_timeout_seconds"):
        value = getattr(body, name)
        if value is not None and values.setdefault(name, value) != value:
            raise ProblemError(422, f"{name}: expected one value, got {value} and {values[name]}.")
    try:
        return parse_policy(values, default)
    except PolicyError as error:
        raise ProblemError(422, f"policy: {error}.") from error


def _warn_of_short_agent_leases(session: Session, policy: Policy) -> None:
    """Warn of agents whose lease is too short: an agent kills its ranks after its own lease without
    the server (docs/adr/0003).

    If that is not longer than the node lease, a server that restarts ends the training.
    """
    hellos = session.scalars(select(models.NodeRow.hello).where(models.NodeRow.hello.is_not(None)))
    leases = {hello.hostname: hello.labels.get("lease_seconds", "0") for hello in hellos if hello}
    short = sorted(
        host for host, lease in leases.items() if 0 < _number(lease) <= policy.node_lease_seconds
    )
    if short:
        _log.warning(
            "agents kill their ranks after no more than the node lease of %g s without the server: "
            "start them with a longer --lease-seconds: %s",
            policy.node_lease_seconds,
            ", ".join(short[:_HOSTS_LOGGED]),
        )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _texts(body: schemas.JobCreate) -> list[tuple[str, str]]:
    found = [("name", body.name), *(("argv", each) for each in body.argv)]
    found += [("environment", f"{key}={value}") for key, value in body.environment.items()]
    found += [("metadata", f"{key}={value}") for key, value in body.metadata.items()]
    for name in ("directory", "checkpoint_directory"):
        found.append((name, getattr(body, name) or ""))
    return found


@router.get("", dependencies=[viewer], response_model=schemas.JobPage, responses=_READ)
def list_jobs(session: ReadDep, parts: PartsDep, bounds: BoundsDep) -> schemas.JobPage:
    """List jobs, newest first."""
    rows = queries.jobs(session, bounds.limit, position(bounds))
    more = len(rows) == bounds.limit
    return schemas.JobPage(
        items=[resources.job(session, row, parts.as_of()) for row in rows],
        next_cursor=time_cursor(rows[-1].created_ns, rows[-1].id) if more else None,
    )


@router.get("/{job_id}", dependencies=[viewer], response_model=schemas.Job, responses=_ONE)
def get_job(job_id: str, session: ReadDep, parts: PartsDep) -> schemas.Job:
    return resources.job(session, find(session, job_id), parts.as_of())


@router.post(
    "/{job_id}/stop",
    response_model=schemas.Job,
    responses={**_ONE, **problems.responses(409)},
)
def stop_job(job_id: str, parts: PartsDep, caller: Operator) -> schemas.Job:
    """Stop the job. Repeating the request has no effect."""
    now_ns = parts.now_ns()
    with parts.database.write() as session:
        row = find(session, job_id)
        if row.state in FINISHED:
            raise ProblemError(409, f"The job is already {row.state}.")
        if row.watched:
            raise ProblemError(
                409, "This is an external job: stop it where it was started (scancel, Ctrl-C)."
            )
        if not row.stop_requested:
            row.stop_requested = True
            entry = AuditEntry(actor=caller.name, verb="asked to stop", subject=job_id)
            audit.record(session, job_id, entry, now_ns)
        stopped = resources.job(session, row, parts.as_of())
    parts.signals.work.notify()
    parts.signals.changes.notify()
    return stopped


@router.post(
    "/{job_id}/restart",
    status_code=202,
    response_model=schemas.Action,
    responses={**_ONE, **problems.responses(409)},
)
def restart_job(
    job_id: str, parts: PartsDep, caller: Operator, body: schemas.RestartRequest | None = None
) -> schemas.Action:
    """Restart the job from a checkpoint, through the launcher that owns it.

    Returns the action, whose state and phases show how far it is.
    """
    body = body or schemas.RestartRequest()
    now_ns = parts.now_ns()
    with parts.database.write() as session:
        job = find(session, job_id)
        check_approver(caller, job.policy)
        _check_can_restart(session, job, body)
        view = requested_restart(
            f"act-{secrets.token_hex(4)}",
            generation=job.generation,
            created_ns=now_ns,
            by=caller.name,
            comment=body.comment.replace("\0", ""),
            exclude=body.exclude_nodes,
            saves=body.checkpoint,
        )
        row = models.ActionRow(**action_columns(job_id, view), version=1)
        session.add(row)
        entry = AuditEntry(
            actor=caller.name, verb="requested", subject=view.action_id, detail=view.reason
        )
        audit.record(session, job_id, entry, now_ns)
        session.flush()
        record_change(session, job_id, "action", view.action_id)
        requested = resources.action(row)
    parts.signals.work.notify()
    parts.signals.changes.notify()
    return requested


def _check_can_restart(session: Session, job: models.JobRow, body: schemas.RestartRequest) -> None:
    """Raise ProblemError if the job cannot be restarted now, or does not use one of the nodes."""
    if job.state in FINISHED or job.stop_requested:
        state = job.state if job.state in FINISHED else "being stopped"
        raise ProblemError(409, f"The job is {state}: a new one can be started with its command.")
    if job.state == "pending":
        raise ProblemError(409, "The job has not started: it waits for nodes with free slots.")
    if job.watched and queries.usable_launch(session, job) is None:
        raise ProblemError(
            409,
            "This is an external job that Paceline only observes: restart it where it was started, "
            "or let Paceline repair it through its launcher (docs/repair.md).",
        )
    used = set(
        session.scalars(
            select(models.RankRow.agent_id).where(
                models.RankRow.job_id == job.id, models.RankRow.generation == job.generation
            )
        )
    )
    if others := sorted(set(body.exclude_nodes) - used):
        raise ProblemError(422, f"exclude_nodes: the job has no rank on {', '.join(others)}.")
    under_way = session.scalar(
        select(models.ActionRow)
        .where(models.ActionRow.job_id == job.id)
        .where(models.ActionRow.state.in_(("approved", "running")))
        .limit(1)
    )
    if under_way is not None:
        raise ProblemError(
            409,
            f"Another action is {under_way.state}: {under_way.id} ({under_way.kind}). Wait until "
            "it is done" + (", or reject it." if under_way.view.can_be_rejected else "."),
        )


@router.get(
    "/{job_id}/ranks", dependencies=[viewer], response_model=schemas.RankPage, responses=_ONE
)
def list_ranks(job_id: str, session: ReadDep, parts: PartsDep) -> schemas.RankPage:
    """List all ranks of the current generation."""
    return resources.ranks(session, find(session, job_id), parts.as_of())


@router.get(
    "/{job_id}/steps", dependencies=[viewer], response_model=schemas.StepPage, responses=_ONE
)
def list_steps(
    job_id: str,
    session: ReadDep,
    page_after: AfterDep,
    after: Annotated[int | None, Query(ge=-1, lt=1 << 62, description="Only later steps.")] = None,
    limit: Annotated[int, Query(ge=1, le=2000)] = 200,
) -> schemas.StepPage:
    """List finished steps in ascending order: those after a step, by default the newest."""
    find(session, job_id)
    if page_after is not None:
        after = number(page_after)
    rows = queries.steps(session, job_id, after, limit)
    more = after is not None and len(rows) == limit
    return schemas.StepPage(
        items=[resources.step(row.summary) for row in rows],
        next_cursor=Bounds.encode(str(rows[-1].step)) if more else None,
    )


@router.get("/{job_id}/grid", dependencies=[viewer], response_model=schemas.Grid, responses=_ONE)
def get_grid(
    job_id: str, session: ReadDep, parts: PartsDep, steps: Annotated[int, Query(ge=1, le=500)] = 20
) -> schemas.Grid:
    """Return each rank's slowdown over the last steps of the current generation."""
    return resources.grid(session, find(session, job_id), steps, parts.as_of())


def find(session: Session, job_id: str) -> models.JobRow:
    """Return a job's row. Raises ProblemError if there is none."""
    row = session.get(models.JobRow, job_id) if "\0" not in job_id else None
    if row is None:
        raise not_found("job", job_id)
    return row
