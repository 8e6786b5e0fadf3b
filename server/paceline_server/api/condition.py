"""The condition of a job and its ranks at one moment: training, blocked, hung, dead or unknown.

A job's `state` is what Paceline does with it; its condition is what its processes do. The condition
is `unknown` without recent data: the analysis is behind, or a node is silent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from sqlalchemy.orm import Session

from paceline_server import lag
from paceline_server.detect.kinds import HANG, kind_of
from paceline_server.store import models, queries

RankCondition = Literal[
    "starting", "running", "blocked", "hung", "dead", "finished", "stopped", "unknown"
]
JobCondition = Literal[
    "waiting", "starting", "training", "unobserved", "hung", "dead", "ended", "unknown"
]

_FIRST_STEP_NS = 120_000_000_000  # ranks that report no step may load a model or data until then
_COMPILATION_NS = 1_800_000_000_000  # those whose first step has begun may compile the model


class AsOf(NamedTuple):
    """The time at which a resource is built, and the allowed silence of a node."""

    now_ns: int  # server's CLOCK_REALTIME
    node_lease_seconds: float


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition of a job at one moment, and the facts that determine the conditions of its
    ranks."""

    job: JobCondition
    # data up to this time is analyzed; None: nothing yet, or the job has ended
    as_of_ns: int | None
    lag_seconds: float | None
    dead: models.RankRow | None = None  # the lowest rank that failed
    hung: frozenset[int] = frozenset()  # culprits of a hang
    silent: frozenset[str] = frozenset()  # nodes that have sent nothing for their lease
    is_stopped: bool = False  # whether a hang or a failure stopped the job

    @property
    def is_outdated(self) -> bool:
        return self.lag_seconds is not None and self.lag_seconds > lag.OUTDATED_SECONDS

    def of_rank(self, row: models.RankRow) -> RankCondition:
        """Return the condition of one rank."""
        if row.state == "exited":
            if row.commanded:
                return "stopped"
            return "finished" if row.exit_code == 0 else "dead"
        if self.is_outdated or row.agent_id in self.silent or self.job == "ended":
            return "unknown"
        if row.rank in self.hung:
            return "hung"
        if row.state != "attached":
            return "starting"
        return "blocked" if self.is_stopped else "running"


def condition(session: Session, job: models.JobRow, as_of: AsOf) -> Condition:
    """Return the condition of a job."""
    if job.finished_ns is not None:
        return Condition("ended", None, None)
    lag_seconds = None
    if job.ticked_ns is not None:
        lag_seconds = lag.lag_seconds(job.ticked_ns, as_of.now_ns)
    since_ns = as_of.now_ns - int(as_of.node_lease_seconds * 1e9)
    nodes, silent = queries.nodes_of(session, job.id, since_ns)
    stopping = [
        incident.view.finding
        for incident in queries.open_incidents(session, job.id)
        if incident.severity == "critical"
        and kind_of(incident.kind).effect == "stopped"
        and incident.view.finding.generation == job.generation
    ]
    hung: set[int] = set()
    for finding in stopping:
        if finding.kind == HANG.name:
            hung |= set(finding.ranks) | ({finding.rank} - {None})  # type: ignore[operator]
    dead = queries.first_dead_rank(session, job.id)
    if job.state == "pending":
        kind: JobCondition = "waiting"
    elif (lag_seconds or 0.0) > lag.OUTDATED_SECONDS or (nodes and nodes == silent):
        kind = "unknown"
    elif dead is not None:
        kind = "dead"
    elif stopping:
        kind = "hung"
    else:
        kind = "starting" if job.state != "running" else "training"
        if kind == "training" and job.step is None:
            kind = "starting" if _may_be_starting(session, job, as_of) else "unobserved"
    return Condition(
        job=kind,
        as_of_ns=job.ticked_ns,
        lag_seconds=lag_seconds,
        dead=dead,
        hung=frozenset(hung),
        silent=frozenset(silent),
        is_stopped=bool(stopping or dead),
    )


def _may_be_starting(session: Session, job: models.JobRow, as_of: AsOf) -> bool:
    """Return whether a job without a step may not train yet."""
    statuses = queries.rank_statuses(session, job.id).keys()
    if statuses & {"loading", "joining"}:
        return True
    limit_ns = _COMPILATION_NS if "running" in statuses else _FIRST_STEP_NS
    generation = session.get(models.GenerationRow, (job.id, job.generation))
    started_ns = job.created_ns if generation is None else generation.placement.started_ns
    return as_of.now_ns - started_ns < limit_ns
