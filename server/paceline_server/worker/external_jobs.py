"""Jobs that were started without Paceline; adopted once all ranks of a generation are found.

They are observed like all others, in mode `observe`: Paceline reports problems and repairs nothing.
Those of a launcher that Paceline can ask (`launchers/`) have the server's `launcher_mode` instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from msgspec.structs import replace
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from paceline_server.act.announce import IncidentReceiver
from paceline_server.decide.progress import progress_of
from paceline_server.decide.types import ActionView, AuditEntry, JobSpec, RankView, Restarted
from paceline_server.engine.reported_topology import topology_of
from paceline_server.engine.types import Launch, Placement
from paceline_server.launchers.registry import recognize
from paceline_server.policy import Mode, Policy
from paceline_server.steps.types import Ledger
from paceline_server.store import attachments, audit, policies, queries
from paceline_server.store.attachments import PendingRun
from paceline_server.store.changes import record_change, record_changes
from paceline_server.store.database import UNAVAILABLE, Database
from paceline_server.store.leases import lease_name, seize
from paceline_server.store.log import FINISHED, position_at
from paceline_server.store.models import (
    ActionRow,
    AttachmentRow,
    EngineMemoryRow,
    GenerationRow,
    JobRow,
    KeptLogRow,
    NodeRow,
    RankEvidenceRow,
    RankRow,
    StepRow,
    StepSharesRow,
)
from paceline_server.worker.commit import write_incidents
from paceline_server.worker.ranks import new_rank_rows
from paceline_server.worker.snapshot import load_incidents
from paceline_wire.topology import Topology

_log = logging.getLogger(__name__)
_MISSING_RANKS_NS = 60_000_000_000  # until ranks that were not found are logged
_NAME_LENGTH = 200
_MARGIN_NS = 1_000_000_000  # several servers may store batches, each with its own clock


class ExternalJobs:
    """Finds external jobs that are complete, and creates their rows."""

    def __init__(
        self,
        database: Database,
        policy: Policy,
        launcher_mode: Mode,
        receivers: tuple[IncidentReceiver, ...],
        now_ns: Callable[[], int],
    ) -> None:
        """`launcher_mode`: of jobs whose launcher is known. `receivers`: those of incidents."""
        self._database = database
        self._receivers = receivers
        self._policy = policy
        self._launcher_mode = launcher_mode
        self._now_ns = now_ns
        self._logged: set[tuple[str, int, int]] = set()
        self._refused: set[PendingRun] = set()

    def take_up(self) -> set[str]:
        """Create the jobs whose ranks were all found, and return their ids."""
        with self._database.read() as session:
            runs = attachments.pending_runs(session)
        taken_up = set()
        for run in runs:
            if not run.is_complete:
                self._log_missing_ranks(run)
            elif run not in self._refused and self._try_to_take_up(run):
                taken_up.add(run.job_id)
        return taken_up

    def _try_to_take_up(self, run: PendingRun) -> bool:
        try:
            return self._create(run)
        except UNAVAILABLE:
            raise
        except Exception:
            # Malformed reports from its ranks must not affect the other jobs.
            self._refused.add(run)
            _log.exception("external job %s cannot be watched", run.job_id)
            return False

    def _create(self, run: PendingRun) -> bool:
        with self._database.write() as session:
            job = session.get(JobRow, run.job_id)
            is_old = job is not None and (
                not job.watched or not attachments.is_newer_run(session, job, run)
            )
            if _refuse_earlier_runs(session, run, job, self._now_ns()):
                return False
            if attachments.is_loading(session, run):
                return False
            action = None
            if job is not None and job.state not in FINISHED and not is_old:
                action = _relaunching(session, job)
                if action is None:
                    return False  # the worker that owns the job ends it first
                if attachments.is_of_another_user(session, job, run):
                    return False
            ranks = attachments.claim(session, run)
            if is_old or len(ranks) != run.world_size:
                return False
            if job is not None and action is not None and not _is_relaunched(session, job, ranks):
                return False  # restarted in place, while its launcher is ending this run
            now_ns = self._now_ns()
            if job is not None and action is None:
                _resolve_incidents(session, job, self._receivers, now_ns)
            launch = _launch(ranks)
            mode = "observe" if launch is None else self._launcher_mode
            policy = replace(self._policy, mode=mode)
            generation = _begin(session, job, ranks, policy, launch, action, now_ns)
        _log.info("external job %s was found running in generation %d", run.job_id, generation)
        return True

    def _log_missing_ranks(self, run: PendingRun) -> None:
        key = run[:3]
        if key in self._logged or self._now_ns() - run.newest_ns < _MISSING_RANKS_NS:
            return
        self._logged.add(key)
        _log.warning(
            "external job %s generation %d is not watched: %d of its %d ranks were found; check "
            "that every node runs an agent that its ranks find (deploy/README.md)",
            run.job_id,
            run.generation,
            run.ranks,
            run.world_size,
        )


def _relaunching(session: Session, job: JobRow) -> ActionView | None:
    """Return the action that has the job restarted by its launcher, if one runs."""
    running = select(ActionRow.view).where(ActionRow.job_id == job.id, ActionRow.state == "running")
    actions = session.scalars(running)
    return next((one for one in actions if progress_of(one).phase == "launch"), None)


def _current_launch(session: Session, job: JobRow) -> Launch | None:
    generation = session.get(GenerationRow, (job.id, job.generation))
    return None if generation is None else generation.placement.launch


def _is_relaunched(session: Session, job: JobRow, ranks: Sequence[AttachmentRow]) -> bool:
    """Return whether the launcher has restarted the job since its current generation."""
    before, after = _current_launch(session, job), _launch(ranks)
    return before is None or after is None or before.is_before(after)


def _refuse_earlier_runs(
    session: Session, run: PendingRun, job: JobRow | None, now_ns: int
) -> bool:
    """Discard ranks of a run that the launcher has replaced; return whether there were any.

    They still run because the launcher lost their node, and must not be mixed with the new ones.
    """
    rows = attachments.ranks_of(session, run)
    # A launcher that counts on each node begins at 0 again when a person starts it again.
    found = [
        (row, launch)
        for row in rows
        if (launch := _launch([row])) is not None and not launch.counts
    ]
    is_over = job is None or job.state in FINISHED  # the launcher may use its id again
    current = None if job is None or is_over else _current_launch(session, job)
    seen = [launch for launch in (current, *(launch for _, launch in found)) if launch]
    earlier = [row for row, launch in found if any(launch.is_before(one) for one in seen)]
    for row in earlier:
        row.placed = True
        detail = (
            f"Rank {row.rank} of generation {row.generation} still runs on {row.agent_id}, "
            "although its launcher has restarted the job."
        )
        _log.warning("external job %s: %s", run.job_id, detail)
        if job is not None:
            entry = AuditEntry(actor="agents", verb="refused", subject=run.job_id, detail=detail)
            audit.record(session, run.job_id, entry, now_ns)
    return bool(earlier)


def _launch(ranks: Sequence[AttachmentRow]) -> Launch | None:
    """Return the launcher that owns the job, as its ranks report it."""
    return recognize({each.agent_id: each.identity.metadata for each in ranks})


def _begin(
    session: Session,
    job: JobRow | None,
    ranks: Sequence[AttachmentRow],
    policy: Policy,
    launch: Launch | None,
    action: ActionView | None,
    now_ns: int,
) -> int:
    """Write the job and its generation; return the generation's number.

    Args:
        session: of the transaction.
        job: its row; None for a job that is not stored yet.
        ranks: of the generation, in order.
        policy: of a new job.
        launch: the launcher that owns the job, if it is known.
        action: the running action that had the job restarted, if there is one.
        now_ns: CLOCK_REALTIME.
    """
    identity = ranks[0].identity
    generation = _generation_number(session, job, ranks)
    views = [_view(session, attachment) for attachment in ranks]
    placement = _placement_of(ranks, views, generation, launch)
    # Batches since the first rank started still have to be read, but not those of an earlier run
    # whose ranks reported the same generation.
    is_repeated = job is not None and job.generation >= generation
    margin_ns = 0 if is_repeated or placement.reported_generations else _MARGIN_NS
    cursor = position_at(session, placement.started_ns - margin_ns)
    script = "".join(filter(str.isprintable, identity.metadata.get("script", "")))
    name = script[:_NAME_LENGTH] or identity.job
    spec = JobSpec(name=name, argv=[], topology=placement.topology, metadata=identity.metadata)
    if job is None:
        job = JobRow(id=identity.job, watched=True, stop_requested=False)
        job.policy = policy
        _forget_progress(job, now_ns)
        verb = "found running"
    else:
        if is_repeated:
            _forget_progress(job, now_ns)
            for table in (EngineMemoryRow, KeptLogRow):
                session.execute(delete(table).where(table.job_id == job.id))
        _clear(session, job.id, generation)
        verb = f"found running in generation {generation}"
    if job.policy_version is None:
        policies.assign(session, job, "paceline server", now_ns)
    job.name, job.spec, job.topology, job.generation = name, spec, spec.topology, generation
    job.state = "running" if action is None else "recovering"
    job.finished_ns, job.ticked_ns, job.step, job.cursor = None, None, None, cursor
    session.add(job)
    session.flush()
    session.add(
        GenerationRow(
            job_id=job.id,
            generation=job.generation,
            cursor=cursor,
            placement=placement,
            restarted=None if action is None else _restarted(job, action, now_ns),
        )
    )
    session.add_all(new_rank_rows(job.id, job.generation, views))
    agents = sorted(set(placement.nodes.values()))
    if action is not None:
        seize(session, lease_name(job.id))  # its owner loads what is written here
    _assign_nodes(session, job.id, agents, leaves_others=action is not None)
    entry = AuditEntry(actor="agents", verb=verb, subject=job.id, detail=", ".join(agents))
    audit.record(session, job.id, entry, now_ns)
    record_change(session, job.id, "job", job.id)
    record_change(session, job.id, "ranks", job.id)
    return generation


def _placement_of(
    ranks: Sequence[AttachmentRow],
    views: Sequence[RankView],
    generation: int,
    launch: Launch | None,
) -> Placement:
    """Return where the ranks of a generation are, as they report it themselves."""
    identity = ranks[0].identity
    places = {attachment.rank: attachment.identity.coordinates for attachment in ranks}
    topology = topology_of(identity.topology, places) or identity.topology
    if topology.world_size != len(ranks):
        topology = Topology(dp=len(ranks))
    return Placement(
        generation=generation,
        topology=topology,
        nodes={view.rank: view.agent_id for view in views},
        gpus={view.rank: view.gpu for view in views},
        metadata=identity.metadata,
        started_ns=min(attachment.received_ns for attachment in ranks),
        was_found=True,
        launch=launch,
        users=sorted({each.identity.user for each in ranks if each.identity.user is not None}),
        reported_generations={
            attachment.rank: attachment.generation
            for attachment in ranks
            if attachment.generation != generation
        },
    )


def _assign_nodes(
    session: Session, job_id: str, agents: Sequence[str], *, leaves_others: bool
) -> None:
    """Assign nodes to a job, but those that also run another one. `leaves_others`: it moved."""
    if leaves_others:
        left = update(NodeRow).where(NodeRow.job_id == job_id, NodeRow.agent_id.not_in(agents))
        session.execute(left.values(job_id=None))
    free = update(NodeRow).where(NodeRow.agent_id.in_(agents), NodeRow.job_id.is_(None))
    session.execute(free.values(job_id=job_id))
    record_changes(session, None, "node", agents)


def _restarted(job: JobRow, action: ActionView, now_ns: int) -> Restarted:
    progress = progress_of(action)
    return Restarted(
        generation=job.generation,
        at_ns=now_ns,
        highest_step=job.highest_step,
        node=progress.node,
        has_saved=progress.has_saved,
        is_request=progress.is_request,
    )


def _resolve_incidents(
    session: Session, job: JobRow, receivers: tuple[IncidentReceiver, ...], now_ns: int
) -> None:
    """Resolve the incidents of the previous run: a failed run keeps them until a new run begins."""
    before = load_incidents(session, job.id)
    after = [replace(incident, state="resolved", resolved_ns=now_ns) for incident in before]
    write_incidents(session, job.id, job.name, before, after, receivers, now_ns)
    for incident in after:
        entry = AuditEntry(
            actor="agents",
            verb="resolved",
            subject=incident.incident_id,
            detail="The ranks were started again outside Paceline.",
        )
        audit.record(session, job.id, entry, now_ns)
        record_change(session, job.id, "incident", incident.incident_id)


def _generation_number(session: Session, job: JobRow | None, ranks: Sequence[AttachmentRow]) -> int:
    """Return the number of the generation that these ranks form.

    It is one more than the last generation if at least some launchers counted up; otherwise it is
    the number that the ranks report, because another run of the same name starts counting again.
    """
    reported = {attachment.agent_id: attachment.generation for attachment in ranks}
    highest = max(reported.values())
    if job is None:
        return highest
    reported_before = queries.reported_generations(session, job)
    rows = queries.ranks(session, job.id)
    before = {row.agent_id: reported_before.get(row.rank, row.generation) for row in rows}
    growth = [reported[agent] - before[agent] for agent in reported.keys() & before.keys()]
    if growth and min(growth) >= 0 and max(growth) > 0:
        return max(highest, job.generation + 1)
    return highest


def _forget_progress(job: JobRow, now_ns: int) -> None:
    job.created_ns = now_ns
    job.started_ns = job.step = job.highest_step = job.checkpoint_step = None
    job.can_checkpoint = job.experience = None
    job.step_seconds = job.loss = job.evaluation_loss = None
    job.ledger = Ledger()


def _clear(session: Session, job_id: str, generation: int) -> None:
    """Delete the rows of ranks that are gone and of an earlier run with the same generations."""
    for of_job in (RankRow, RankEvidenceRow):
        session.execute(delete(of_job).where(of_job.job_id == job_id))
    for of_run in (StepRow, StepSharesRow, GenerationRow):
        is_gone = of_run.job_id == job_id, of_run.generation >= generation
        session.execute(delete(of_run).where(*is_gone))


def _view(session: Session, attachment: AttachmentRow) -> RankView:
    identity = attachment.identity
    return RankView(
        rank=identity.rank,
        agent_id=attachment.agent_id,
        local_rank=identity.local_rank,
        gpu=_gpu(session, attachment),
        pid=identity.pid,
        state="attached",
    )


def _gpu(session: Session, attachment: AttachmentRow) -> int | None:
    """Return the GPU that the rank reported; otherwise the GPU whose index is its local rank."""
    node = session.get(NodeRow, attachment.agent_id)
    gpus = node.hello.gpus if node is not None and node.hello is not None else []
    identity = attachment.identity
    for gpu in gpus:
        if gpu.uuid == identity.gpu_uuid:
            return gpu.index
    return next((gpu.index for gpu in gpus if gpu.index == identity.local_rank), None)
