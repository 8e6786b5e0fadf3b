"""The one sentence on top of a job's page."""

from __future__ import annotations

from sqlalchemy.orm import Session

from paceline_server.api import schemas
from paceline_server.store import models, queries
from paceline_server.store.shares import medians, newest_shares

_WINDOW_STEPS = 10
_EVEN_RATIO = 0.15  # a wider spread reads like trouble, which the detectors would have named


def verdict(session: Session, job: models.Job) -> schemas.Verdict:
    match job.state:
        case "finished":
            return _plain("finished", f"Finished{_at_step(job)}.")
        case "stopped":
            return _plain("stopped", f"Stopped{_at_step(job)}.")
        case "pending":
            text = f"Waiting for {job.topology.world_size} free rank slots on ready nodes."
            return _plain("starting", text)
    worst = queries.newest_open_incident(session, job.id)
    if worst is not None:
        finding = worst.view.finding
        return schemas.Verdict(kind=finding.kind, text=finding.summary, incident_id=worst.id)
    if job.state == "failed":
        return _plain("failed", f"Failed{_at_step(job)}; the audit log says why.")
    if job.state == "recovering":
        return _plain("recovering", f"Restarting as generation {job.generation}.")
    if job.state == "starting" or job.step is None:
        return _plain("starting", _starting(session, job))
    return _plain("healthy", _healthy(session, job))


def _plain(kind: str, text: str) -> schemas.Verdict:
    return schemas.Verdict(kind=kind, text=text)


def _at_step(job: models.Job) -> str:
    return "" if job.step is None else f" at step {job.step}"


def _starting(session: Session, job: models.Job) -> str:
    ranks = queries.ranks(session, job.id)
    ready = sum(rank.state == "attached" for rank in ranks)
    return f"Generation {job.generation} is starting: {ready} of {len(ranks)} ranks are up."


def _healthy(session: Session, job: models.Job) -> str:
    pace = "" if job.step_seconds is None else f"; {job.step_seconds:.2f} s per step"
    world_size = job.topology.world_size
    shares = newest_shares(session, job.id, job.generation, world_size, _WINDOW_STEPS)
    slowdowns = [value for value in medians(shares.slowdown) if value is not None]
    spread = max(slowdowns) - 1.0 if slowdowns else None
    if spread is None:
        return f"No trouble found{pace}."
    if spread > _EVEN_RATIO:
        return f"No rank is slow for long{pace}."
    spread = max(spread, 0.0)
    count = job.topology.world_size
    return f"All {count} ranks within {max(1, round(spread * 100))} % of their peers{pace}."
