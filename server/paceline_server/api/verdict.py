"""The verdict of a job: its state in one sentence, at the top of its page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sqlalchemy.orm import Session

from paceline_server.api import schemas
from paceline_server.api.condition import Condition
from paceline_server.api.coverage import unrecorded_communication
from paceline_server.api.standstill import standstill
from paceline_server.api.times import time_of
from paceline_server.detect.kinds import kind_of
from paceline_server.lag import outdated_sentence
from paceline_server.percent import percent
from paceline_server.store import models, queries
from paceline_server.store.shares import medians, newest_shares

# Kinds of a verdict without an open incident; with one it is the kind of its finding.
JobVerdict = Literal[
    "healthy",
    "starting",
    "recovering",
    "finished",
    "stopped",
    "failed",
    "failure",
    "outdated",
    "unobserved",
    "standstill",
]
_WINDOW_STEPS = 10
_UNOBSERVED = (
    "The ranks have reported no step since they started. If they train, a slow or hung rank is not "
    "found: call paceline.init() and loop over paceline.steps(loader)."
)
_EVEN_RATIO = 0.15  # a wider spread would look like a problem, and the detectors would report it


def verdict(session: Session, job: models.JobRow, known: Condition) -> schemas.Verdict:
    """Return the verdict of a job, with the time of the data it is based on."""
    found = _current(session, job, known)
    if known.as_of_ns is None or known.lag_seconds is None:
        return found
    found.as_of, found.lag_seconds = time_of(known.as_of_ns), round(known.lag_seconds, 1)
    found.is_outdated = known.is_outdated
    if not known.is_outdated:
        return found
    since = outdated_sentence(known.as_of_ns, known.lag_seconds)
    if found.incident_id is None:
        found.kind = "outdated"
    found.text = f"{since} {found.text}"
    return found


def _current(session: Session, job: models.JobRow, known: Condition) -> schemas.Verdict:
    """Return the verdict based on the data analyzed so far."""
    match job.state:
        case "finished":
            return _ended(session, job, "finished", "Finished")
        case "stopped":
            return _ended(session, job, "stopped", "Stopped")
        case "pending":
            return _verdict("starting", _waiting(job))
    worst = queries.worst_open_incident(session, job.id)
    if job.state == "failed":
        return _verdict("failed", _failed(session, job, worst), worst)
    dead = known.dead if job.state == "running" else None
    if dead is not None and (worst is None or kind_of(worst.kind).effect != "stopped"):
        return _verdict("failure", _exited(dead))
    is_minor = worst is None or worst.severity == "info"
    if is_minor and job.state == "running" and (still := standstill(session, job)):
        return _standstill(worst, still)
    if worst is not None:
        finding = worst.view.finding
        restarting = "Restarting. " if job.state == "recovering" else ""
        return schemas.Verdict(
            kind=finding.kind, text=restarting + finding.summary, incident_id=worst.id
        )
    if job.state == "recovering":
        return _verdict("recovering", f"Restarting after generation {job.generation}.")
    if known.job == "unobserved":
        return _verdict("unobserved", _UNOBSERVED)
    if job.state == "starting" or job.step is None:
        return _verdict("starting", _starting(session, job))
    if finished := queries.finished_ranks(session, job.id):
        return _verdict("healthy", _finishing(job, finished))
    unrecorded = unrecorded_communication(job)
    if unrecorded is not None:
        return _verdict("unobserved", f"{unrecorded} A slow rank may not be found{_pace(job)}.")
    return _verdict("healthy", _healthy(session, job))


def _verdict(
    kind: JobVerdict, text: str, worst: models.IncidentRow | None = None
) -> schemas.Verdict:
    incident_id = None if worst is None else worst.id
    return schemas.Verdict(kind=kind, text=text, incident_id=incident_id)


def _ended(session: Session, job: models.JobRow, kind: JobVerdict, how: str) -> schemas.Verdict:
    """Return the verdict of a job that is over, with the worst of the problems that lasted."""
    problems = queries.problems_at_end(session, job)
    parts = [f"{how}{_at_step(job)}.", *(finding.summary for _, finding in problems[:1])]
    if len(problems) > 1:
        others = "1 other problem" if len(problems) == 2 else f"{len(problems) - 1} other problems"
        parts.append(f"{others} lasted to the end, too.")
    return _verdict(kind, " ".join(parts), problems[0][0] if problems else None)


def _standstill(worst: models.IncidentRow | None, still: str) -> schemas.Verdict:
    """Return the verdict of a job without progress, with the rank that the others wait for if it
    is known: of information, an incident about that is the worst."""
    if worst is None or kind_of(worst.kind).effect != "stopped":
        return _verdict("standstill", still)
    return _verdict("standstill", f"{still} {worst.view.finding.summary}", worst)


def _waiting(job: models.JobRow) -> str:
    slots = "1 free rank slot on a ready node"
    if job.topology.world_size > 1:
        slots = f"{job.topology.world_size} free rank slots on ready nodes"
    return f"Waiting for {slots}: start `paceline agent` on more nodes, or stop another job."


def _failed(session: Session, job: models.JobRow, worst: models.IncidentRow | None) -> str:
    """Return the verdict of a failed job, with the reason why it was not restarted."""
    stop = queries.newest_action(session, job.id, "stop")
    if stop is not None:
        reason = stop.view.reason
    elif worst is not None:
        reason = worst.view.finding.summary
    else:
        reason = "All ranks have exited and no restart is planned."
    return f"Failed{_at_step(job)}. {reason}"


def _exited(row: models.RankRow) -> str:
    """Return the verdict of a job with a dead rank whose cause is not known yet."""
    how = "an unknown exit code" if row.exit_code is None else f"exit code {row.exit_code}"
    how = how if row.signal is None else f"signal {row.signal}"
    return (
        f"Rank {row.rank} ({row.agent_id}) has ended with {how}; training has stopped. "
        "The cause is being determined."
    )


def _finishing(job: models.JobRow, finished: Sequence[models.RankRow]) -> str:
    """Return the verdict of a job of which some ranks have ended and nothing waits for them."""
    count, world_size = len(finished), job.topology.world_size
    if count == world_size:
        return f"All {world_size} ranks have ended with exit code 0."
    if count == 1:
        rank = f"Rank {finished[0].rank} ({finished[0].agent_id})"
        return f"{rank} has ended with exit code 0; the other ranks still run."
    return f"{count} of {world_size} ranks have ended with exit code 0; the others still run."


def _at_step(job: models.JobRow) -> str:
    return "" if job.step is None else f" at step {job.step}"


def _starting(session: Session, job: models.JobRow) -> str:
    statuses = queries.rank_statuses(session, job.id)
    if joining := statuses.get("joining", 0):
        ranks = f"{joining} of {job.topology.world_size} ranks"
        return f"Generation {job.generation} is starting: {ranks} are in init_process_group."
    states = queries.rank_states(session, job.id)
    ready, count = states.get("attached", 0), sum(states.values())
    if running := statuses.get("running", 0):
        ranks = f"{running} of {count} ranks have" if count > 1 else "rank 0 has"
        begun = f"{ranks} begun the first step, in which a model may be compiled"
        return f"Generation {job.generation} is starting: {begun}."
    if ready == count and count > 1:
        all_run = f"all {count} ranks run, and none has finished a step"
        return f"Generation {job.generation} is starting: {all_run}."
    return f"Generation {job.generation} is starting: {ready} of {count} ranks have attached."


def _pace(job: models.JobRow) -> str:
    if (seconds := job.step_seconds) is None:
        return ""
    if seconds >= 0.1:
        return f"; {seconds:.2f} s per step"
    return f"; {seconds * 1e3:.{0 if seconds >= 0.01 else 1}f} ms per step"


def _healthy(session: Session, job: models.JobRow) -> str:
    pace = _pace(job)
    world_size = job.topology.world_size
    shares = newest_shares(session, job.id, job.generation, world_size, _WINDOW_STEPS)
    slowdowns = [value for value in medians(shares.slowdown) if value is not None]
    spread = max((abs(slowdown - 1.0) for slowdown in slowdowns), default=None)
    if spread is None or world_size == 1:
        return f"No problem found{pace}."
    if spread > _EVEN_RATIO:
        return f"No slow rank found{pace}."
    uneven = job.ledger.imbalance_seconds / max(job.ledger.wall_seconds, 1e-9)
    if uneven > _EVEN_RATIO:
        some = f"ranks that took longer in some cost {percent(uneven)} of the time (imbalance)"
        return f"No rank is slow in most steps, but {some}{pace}."
    count = len(slowdowns)
    within = f"within {percent(max(spread, 0.01))} of their peers{pace}."
    if count < world_size:  # the others have no steps, or no peers
        return f"{count} of {world_size} ranks were compared and are {within}"
    return f"All {world_size} ranks {within}"
