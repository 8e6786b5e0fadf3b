"""torchrun: have the agents end the ranks, so that torchrun starts them again.

torchrun restarts its ranks when one of them ends, up to --max-restarts times, and has no command
for it. So the agents of all nodes kill the ranks, also hung ones, for which torchrun would wait
30 s. With --nnodes=LEAST:MOST, torchrun on an excluded node is ended, and the others meet without.

The commands are rows with the action's id, written once in one transaction; each names processes by
their start. A late or repeated command finds other processes, and has no effect. torchrun counts
its restarts on each node for itself.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import ClassVar, Self

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from paceline_server.decide.types import IssuedCommand, LaunchRequest
from paceline_server.detect.rank_exit.ending import signal_name
from paceline_server.engine.types import Launch
from paceline_server.launchers.contract import (
    LauncherParts,
    LauncherRefusedError,
    ObservedState,
    ShownRequest,
)
from paceline_server.store import attachments, commands, queries
from paceline_server.store.database import Database
from paceline_server.store.models import (
    ActionRow,
    AttachmentRow,
    CommandRow,
    GenerationRow,
    JobRow,
)
from paceline_wire.commands import EndRanks
from paceline_wire.metadata import (
    KUBERNETES_JOB,
    SLURM_JOB,
    TORCHRUN_LEAST_NODES,
    TORCHRUN_MAX_RESTARTS,
    TORCHRUN_RESTARTS,
    TORCHRUN_RUN,
    TORCHRUN_SHARES_STORE,
)

# Time after the end of all ranks; a rendezvous of several nodes takes up to half a minute.
_GONE_SECONDS = 120.0
_KIND = "end_ranks"


class _Process(msgspec.Struct, frozen=True):
    """A rank's process as its agent found it."""

    agent: str
    rank: int
    generation: int  # as the rank reports it
    started_ns: int  # CLOCK_MONOTONIC of its node
    has_exited: bool
    launcher_signal: int | None
    launcher_gone: bool
    metadata: dict[str, str]

    @property
    def restarts_left(self) -> int:
        most = int(self.metadata.get(TORCHRUN_MAX_RESTARTS, "0"))
        return most - int(self.metadata.get(TORCHRUN_RESTARTS, "0"))


class _KnownJob(msgspec.Struct, frozen=True, kw_only=True):
    """All that the server knows of one job."""

    id: str
    generation: int
    has_successors: bool  # ranks of a later run were found
    processes: list[_Process]  # those of the current generation that are known
    sent: list[tuple[bool | None, str]]  # results of the action's commands; None: not yet

    @property
    def living(self) -> list[_Process]:
        return [one for one in self.processes if not one.has_exited]


class TorchrunLauncher:
    """The backend; it sends commands to agents."""

    name: ClassVar[str] = "torchrun"

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: this process's own time."""
        self._database = database
        self._clock = clock
        # By action: only a limit for waiting; after a restart of this process it begins again.
        self._gone_since: dict[str, float] = {}

    @classmethod
    def create(cls, parts: LauncherParts) -> Self:
        """Return the backend."""
        return cls(parts.database)

    def close(self) -> None:
        """Do nothing: its commands are rows of the database."""

    @classmethod
    def recognize(cls, metadata: Mapping[str, Mapping[str, str]]) -> Launch | None:
        """Return the launch of ranks of one torchrun that may restart them (--max-restarts).

        Not if Slurm or Kubernetes owns the job: then it is for them to restart torchrun.
        """
        if any(SLURM_JOB in one or KUBERNETES_JOB in one for one in metadata.values()):
            return None
        runs = {one.get(TORCHRUN_RUN) for one in metadata.values()}
        counts = {agent: one.get(TORCHRUN_RESTARTS, "") for agent, one in metadata.items()}
        limits = [one.get(TORCHRUN_MAX_RESTARTS, "") for one in metadata.values()]
        if len(runs) != 1 or not all(text.isdecimal() for text in (*counts.values(), *limits)):
            return None
        run = runs.pop()
        if not run or not all(map(int, limits)):
            return None
        return Launch(
            launcher=cls.name,
            job=run,
            restarts=sum(map(int, counts.values())),
            nodes={agent: agent for agent in metadata},
            counts={agent: int(text) for agent, text in counts.items()},
        )

    # --- observe ---------------------------------------------------------------------------

    def observe(self, request: LaunchRequest) -> ShownRequest:
        """Return how far the request is. Raises LauncherError."""
        with self._database.read() as session:
            job, decided = _load(session, request)
        name = request.launch.job
        if job.generation > decided:
            if request.kind == "check":
                return _seen("refused", f"torchrun has restarted {name} meanwhile.", job)
            return _seen("done", f"torchrun has started generation {job.generation}.", job)
        if job.has_successors:
            self._gone_since.pop(request.action_id, None)
            state: ObservedState = "refused" if request.kind == "check" else "begun"
            return _seen(state, f"torchrun has started ranks of {name} again.", job)
        if not job.living:
            return self._observe_ended(request, job)
        if job.sent:
            return _observe_sent(request, job)
        if (obstacle := _obstacle(request, job) or _shared_store(request, job)) is not None:
            return _seen("refused", obstacle, job)
        return _seen("ready", f"torchrun can start the ranks of {name} again.", job)

    def _observe_ended(self, request: LaunchRequest, job: _KnownJob) -> ShownRequest:
        """Return the observation of a job whose ranks have all ended."""
        signals = [one.launcher_signal for one in job.processes if one.launcher_signal is not None]
        if signals and len(signals) == len(job.processes):
            names = " and ".join(sorted({signal_name(number) for number in signals}))
            return _seen("over", f"torchrun received {names}, which ended the job.", job)
        if (too_few := _too_few_torchruns(request, job)) is not None:
            return _seen("refused", too_few, job)
        now = self._clock()
        since = self._gone_since.setdefault(request.action_id, now)
        if (used_up := _used_up(job)) is not None and not job.sent:
            return _seen("refused", used_up, job)
        if now - since > _GONE_SECONDS:
            detail = (
                f"All ranks of {request.launch.job} have ended, and torchrun has started none for "
                f"{_GONE_SECONDS:.0f} s: it has given up."
            )
            return _seen("refused", detail, job)
        return _seen("begun", "All ranks have ended; torchrun starts them again.", job)

    # --- begin -----------------------------------------------------------------------------

    def begin(self, request: LaunchRequest, seen: ShownRequest) -> None:
        """Send the commands, once. Raises LauncherError."""
        if seen.state != "ready":
            return
        with self._database.write() as session:
            job, decided = _load(session, request)
            is_due = job.generation == decided and not job.sent and not job.has_successors
            if is_due and _obstacle(request, job) is None:
                _send(session, request, job)


def _load(session: Session, request: LaunchRequest) -> tuple[_KnownJob, int]:
    """Return the job and the generation at the time of the decision. Raises LauncherError."""
    action = session.get(ActionRow, request.action_id)
    row = None if action is None else session.get(JobRow, action.job_id)
    placed = None if row is None else session.get(GenerationRow, (row.id, row.generation))
    if action is None or row is None or placed is None:
        raise LauncherRefusedError(f"The server has no job {request.launch.job} any longer.")
    processes, has_successors = [], bool(attachments.pending_runs(session, row.id))
    for rank in queries.ranks(session, row.id):
        generation = placed.placement.reported_generation(rank.rank)
        found = session.get(AttachmentRow, (row.id, generation, rank.rank))
        if found is None or found.agent_id != rank.agent_id:
            continue
        if not found.placed:  # another process took the row
            has_successors = True
            continue
        processes.append(
            _Process(
                agent=rank.agent_id,
                rank=rank.rank,
                generation=generation,
                started_ns=found.started_ns,
                has_exited=rank.state == "exited",
                launcher_signal=rank.launcher_signal,
                launcher_gone=rank.launcher_gone,
                metadata=found.identity.metadata,
            )
        )
    sent = session.scalars(
        select(CommandRow)
        .where(CommandRow.action_id == request.action_id, CommandRow.kind == _KIND)
        .order_by(CommandRow.id)
    )
    job = _KnownJob(
        id=row.id,
        generation=row.generation,
        has_successors=has_successors,
        processes=processes,
        sent=[(one.ok, one.detail or "") for one in sent],
    )
    return job, action.view.generation


def _observe_sent(request: LaunchRequest, job: _KnownJob) -> ShownRequest:
    """Return the observation of a job whose ranks have to end."""
    failed = [detail for ok, detail in job.sent if ok is False]
    if len(failed) == len(job.sent) and len(job.living) == len(job.processes):
        return _seen("refused", f"No agent could end its ranks: {failed[0]}.", job)
    ended = len(job.processes) - len(job.living)
    detail = f"{ended} of {len(job.processes)} ranks of {request.launch.job} have ended"
    return _seen("begun", f"{detail}; {failed[0]}." if failed else f"{detail}.", job)


def _obstacle(request: LaunchRequest, job: _KnownJob) -> str | None:
    """Return why torchrun cannot restart the job; None: it can."""
    if (obstacle := _used_up(job) or _too_few_torchruns(request, job)) is not None:
        return obstacle
    if not request.exclude:
        return None
    least, names = _least_nodes(job), _names(request.exclude)
    if least is None:
        return f"torchrun was started without --nnodes=LEAST:MOST: it cannot leave out {names}."
    left = request.launch.nodes.keys() - set(request.exclude)
    if len(left) < least:
        return f"torchrun needs {least} nodes (--nnodes), and {len(left)} remain without {names}."
    if any(one.rank == 0 and one.agent in request.exclude for one in job.processes):
        return f"torchrun's nodes meet at that of rank 0, so it cannot leave out {names}."
    return None


def _least_nodes(job: _KnownJob) -> int | None:
    """Return how many nodes torchrun needs at least; None: all of them, or it is not known."""
    least = {one.metadata.get(TORCHRUN_LEAST_NODES, "") for one in job.processes}
    text = least.pop() if len(least) == 1 else ""
    return int(text) if text.isdecimal() else None


def _too_few_torchruns(request: LaunchRequest, job: _KnownJob) -> str | None:
    """Return the sentence about nodes whose torchrun has ended; None: the others can do without."""
    gone = {one.agent for one in job.processes if one.launcher_gone}
    left, least = request.launch.nodes.keys() - gone - set(request.exclude), _least_nodes(job)
    if not gone or (least is not None and len(left) >= least):
        return None
    return f"torchrun has ended on {_names(gone)}, too: nothing starts the ranks there again."


def _used_up(job: _KnownJob) -> str | None:
    """Return the sentence about nodes whose torchrun would end the job instead; None: no such."""
    over = sorted({one.agent for one in job.processes if one.restarts_left <= 0})
    if not over:
        return None
    most = next(one for one in job.processes if one.agent == over[0])
    limit = most.metadata.get(TORCHRUN_MAX_RESTARTS)
    return (
        f"torchrun's --max-restarts={limit} is used up on {_names(over)}: it would end the job "
        "instead of restarting it. Nothing was done."
    )


def _shared_store(request: LaunchRequest, job: _KnownJob) -> str | None:
    """Return why a job that trains is not restarted: the store has the addresses of its old ranks.

    A race of torch: https://github.com/pytorch/pytorch/issues/135712.
    """
    if request.kind != "check" or not request.is_training:
        return None
    if not any(TORCHRUN_SHARES_STORE in one.metadata for one in job.processes):
        return None
    return (
        "torchrun shares its store with the ranks, so that those it starts again may connect to "
        "addresses of dead ones and end the job: start torchrun with "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend=c10d or --standalone."
    )


def _send(session: Session, request: LaunchRequest, job: _KnownJob) -> None:
    """Issue one command to each node with living ranks."""
    by_node: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for one in job.living:
        by_node[one.agent, one.generation][one.rank] = one.started_ns
    now_ns = time.time_ns()
    ids = commands.reserve_command_ids(session, len(by_node))
    for command_id, ((agent, generation), started_ns) in zip(ids, by_node.items(), strict=True):
        command = EndRanks(
            command_id=command_id,
            job=job.id,
            generation=generation,
            started_ns=started_ns,
            leave=agent in request.exclude,
        )
        issued = IssuedCommand(agent_id=agent, action_id=request.action_id, command=command)
        commands.issue(session, job.id, issued, now_ns)


def _seen(state: ObservedState, detail: str, job: _KnownJob) -> ShownRequest:
    return ShownRequest(state=state, detail=detail, content=job)


def _names(nodes: Collection[str]) -> str:
    return ", ".join(sorted(nodes)) or "no node"


LAUNCHER = TorchrunLauncher
