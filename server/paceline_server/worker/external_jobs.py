"""Jobs that others start and end: taken up once every rank of a generation was found running.

From then on they are looked at like all others, in mode `observe`: what is wrong is named, what to
do about it is for whoever started them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sqlalchemy import delete, update
from sqlalchemy.orm import Session

from paceline_server.decide.types import AuditEntry, JobSpec, RankView
from paceline_server.engine.types import Placement
from paceline_server.policy import Policy
from paceline_server.steps.types import Ledger
from paceline_server.store import attachments, audit, queries
from paceline_server.store.attachments import Gathering
from paceline_server.store.changes import record_change
from paceline_server.store.database import UNAVAILABLE, Database
from paceline_server.store.log import FINISHED, position_at
from paceline_server.store.models import (
    Attachment,
    EngineMemory,
    Generation,
    Job,
    Node,
    Rank,
    RankEvidence,
    Step,
    StepShares,
)
from paceline_server.worker.ranks import placed
from paceline_wire.topology import Topology

_log = logging.getLogger(__name__)
_LATE_NS = 60_000_000_000  # for ranks of a job whose others were found
_NAME_LENGTH = 200
_MARGIN_NS = 1_000_000_000  # several servers may store at once, each with a clock of its own


class Elsewhere:
    def __init__(self, database: Database, now_ns: Callable[[], int]) -> None:
        self._database = database
        self._now_ns = now_ns
        self._told: set[tuple[str, int, int]] = set()
        self._refused: set[Gathering] = set()

    def look(self) -> bool:
        """Take up what is whole; whether there was any."""
        with self._database.read() as session:
            found = attachments.gathering(session)
        took = False
        for each in found:
            if not each.is_whole:
                self._tell_of_missing(each)
            elif each not in self._refused:
                took |= self._try_to_take_up(each)
        return took

    def _try_to_take_up(self, gathering: Gathering) -> bool:
        try:
            return self._take_up(gathering)
        except UNAVAILABLE:
            raise
        except Exception:
            # What ranks say of themselves must not keep other jobs from being looked at.
            self._refused.add(gathering)
            _log.exception("%s cannot be taken up", gathering.job_id)
            return False

    def _take_up(self, gathering: Gathering) -> bool:
        with self._database.write() as session:
            job = session.get(Job, gathering.job_id)
            is_old = job is not None and (
                not job.watched or not attachments.follows(session, job, gathering)
            )
            if job is not None and job.state not in FINISHED and not is_old:
                return False  # whoever works on it ends it first
            ranks = attachments.take(session, gathering)
            if is_old or len(ranks) != gathering.world_size:
                return False
            generation = _begin(session, job, ranks, self._now_ns())
        _log.info("%s generation %d was found running", gathering.job_id, generation)
        return True

    def _tell_of_missing(self, gathering: Gathering) -> None:
        name = gathering[:3]
        if name in self._told or self._now_ns() - gathering.newest_ns < _LATE_NS:
            return
        self._told.add(name)
        _log.warning(
            "%s generation %d is not looked at: %d of its %d ranks were found; does an agent "
            "that its ranks find (deploy/README.md) run on every node?",
            gathering.job_id,
            gathering.generation,
            gathering.ranks,
            gathering.world_size,
        )


def _begin(session: Session, job: Job | None, ranks: Sequence[Attachment], now_ns: int) -> int:
    """The number of the generation."""
    identity = ranks[0].identity
    topology = identity.topology
    if topology.world_size != len(ranks):
        topology = Topology(dp=len(ranks))
    views = [_view(session, each) for each in ranks]
    generation = _number(session, job, ranks)
    placement = Placement(
        generation=generation,
        topology=topology,
        nodes={view.rank: view.agent_id for view in views},
        gpus={view.rank: view.gpu for view in views},
        metadata=identity.metadata,
        started_ns=min(each.received_ns for each in ranks),
        was_found=True,
        said={each.rank: each.generation for each in ranks if each.generation != generation},
    )
    # All that the ranks said since the first of them began is still to be read.
    # That of a run before, whose ranks said the same generation, is not.
    is_again = job is not None and job.generation >= generation
    margin_ns = 0 if is_again or placement.said else _MARGIN_NS
    cursor = position_at(session, placement.started_ns - margin_ns)
    script = "".join(filter(str.isprintable, identity.metadata.get("script", "")))
    name = script[:_NAME_LENGTH] or identity.job
    spec = JobSpec(name=name, argv=[], topology=topology, metadata=identity.metadata)
    if job is None:
        job = Job(id=identity.job, watched=True, stop_requested=False)
        job.policy = Policy(mode="observe")
        _forget_progress(job, now_ns)
        verb = "found running"
    else:
        if is_again:
            _forget_progress(job, now_ns)
            session.execute(delete(EngineMemory).where(EngineMemory.job_id == job.id))
        _clear(session, job.id, generation)
        verb = f"found running in generation {generation}"
    job.name, job.spec, job.topology, job.generation = name, spec, topology, generation
    job.state, job.finished_ns, job.ticked_ns, job.cursor = "running", None, None, cursor
    session.add(job)
    session.flush()
    session.add(
        Generation(
            job_id=job.id,
            generation=job.generation,
            cursor=cursor,
            placement=placement,
            restarted=None,
        )
    )
    session.add_all(placed(job.id, job.generation, views))
    agents = sorted(set(placement.nodes.values()))
    # Who holds ranks of another job as well stays with that one.
    free = update(Node).where(Node.agent_id.in_(agents), Node.job_id.is_(None))
    session.execute(free.values(job_id=job.id))
    entry = AuditEntry(actor="agents", verb=verb, subject=job.id, detail=", ".join(agents))
    audit.record(session, job.id, entry, now_ns)
    record_change(session, job.id, "job", job.id)
    record_change(session, job.id, "ranks", job.id)
    for agent_id in agents:
        record_change(session, None, "node", agent_id)
    return generation


def _number(session: Session, job: Job | None, ranks: Sequence[Attachment]) -> int:
    """Of the generation that these ranks are.

    It goes on from the last one if launchers counted on, some of them at least, and else is what
    they say: another run of the same name counts anew.
    """
    said = {each.agent_id: each.generation for each in ranks}
    highest = max(said.values())
    if job is None:
        return highest
    known = queries.said(session, job)
    rows = queries.ranks(session, job.id)
    before = {row.agent_id: known.get(row.rank, row.generation) for row in rows}
    growth = [said[agent_id] - before[agent_id] for agent_id in said.keys() & before.keys()]
    if growth and min(growth) >= 0 and max(growth) > 0:
        return max(highest, job.generation + 1)
    return highest


def _forget_progress(job: Job, now_ns: int) -> None:
    job.created_ns = now_ns
    job.started_ns = job.step = job.highest_step = job.checkpoint_step = None
    job.step_seconds = job.loss = job.evaluation_loss = None
    job.ledger = Ledger()


def _clear(session: Session, job_id: str, generation: int) -> None:
    """What is kept of ranks that are gone, and of a run that had the same name and generations."""
    for of_job in (Rank, RankEvidence):
        session.execute(delete(of_job).where(of_job.job_id == job_id))
    for of_run in (Step, StepShares, Generation):
        is_gone = of_run.job_id == job_id, of_run.generation >= generation
        session.execute(delete(of_run).where(*is_gone))


def _view(session: Session, attachment: Attachment) -> RankView:
    identity = attachment.identity
    return RankView(
        rank=identity.rank,
        agent_id=attachment.agent_id,
        local_rank=identity.local_rank,
        gpu=_gpu(session, attachment),
        pid=identity.pid,
        state="attached",
    )


def _gpu(session: Session, attachment: Attachment) -> int | None:
    """By what the rank says itself, else as launchers hand GPUs out: by the local rank."""
    node = session.get(Node, attachment.agent_id)
    gpus = node.hello.gpus if node is not None and node.hello is not None else []
    identity = attachment.identity
    for gpu in gpus:
        if gpu.uuid == identity.gpu_uuid:
            return gpu.index
    return next((gpu.index for gpu in gpus if gpu.index == identity.local_rank), None)
