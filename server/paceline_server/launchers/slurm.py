"""Slurm: drain the excluded nodes, requeue the job held, exclude the nodes, release it.

Slurm counts the requeues of a job (`Restarts`). The request has the count at the time of the
decision, which makes the requeue happen once: it is sent only while the count is unchanged. With
the next count the job is held, and is configured and released, each as often as it takes.

A requeue that is not held waits 121 s (BeginTime), the lifetime of a job credential: a node refuses
a credential that is not newer than the end of the job's previous run there. So the job is released
two seconds after that end, to start at once.

A rank can report any job and node. So a launch is recognized only if each node has the name of the
agent that found the ranks there, and a job is requeued only if it runs on exactly these nodes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from typing import ClassVar, Self

import msgspec
from msgspec.structs import replace

from paceline_server.decide.types import LaunchRequest
from paceline_server.engine.types import Launch
from paceline_server.launchers.contract import (
    LauncherError,
    LauncherParts,
    LauncherRefusedError,
    LauncherUnavailableError,
    ObservedState,
    ShownRequest,
)
from paceline_wire.metadata import SLURM_JOB, SLURM_NODE, SLURM_RESTARTS

_COMMAND_SECONDS = 10
_RELEASE_SECONDS = 2.0  # credentials have a resolution of one second, and clocks differ
_REASON_CHARACTERS = 200
_FIELDS = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "State",
    "Reason",
    "RestartCnt",
    "NodeList",
    "ReqNodes",
    "NumNodes",
    "Partition",
    "BatchFlag",
    "Requeue",
    "admin_comment",  # may contain the separator
)
_SEPARATOR = "|"
_ENDED = ("COMPLETED", "FAILED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY")
_ENDED_ON_PURPOSE = ("CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE", "REVOKED")
# How squeue shows the hold of `scontrol requeuehold`; holds of people are JobHeldUser and -Admin.
_REQUEUED_HELD = "requeued in held state"
_COMMENT, _EXCLUDE = "paceline:", "exclude="  # in the AdminComment
_NODE = re.compile(r"[\w-]+", re.ASCII)
_DENIED = ("invalid user id", "access/permission denied", "access denied")
_UNKNOWN_JOB = "invalid job id"


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as squeue shows it."""

    name: str  # in commands
    state: str
    reason: str
    restarts: int
    nodes: list[str]
    requested_nodes: list[str]
    node_count: int
    partition: str
    is_batch: bool
    may_requeue: bool
    admin_comment: str

    @property
    def excluded_before(self) -> set[str]:
        """The nodes that an earlier action excluded."""
        _, ours, rest = self.admin_comment.partition(f" {_EXCLUDE}")
        is_ours = self.admin_comment.startswith(_COMMENT) and ours
        return set(rest.split(",")) if is_ours else set()

    @property
    def is_held_for_us(self) -> bool:
        """Whether it is pending, held by a requeue and not by a person."""
        return self.state == "PENDING" and _REQUEUED_HELD in self.reason

    @property
    def awaits_begin_time(self) -> bool:
        """Whether it is pending because Slurm requeued it by itself, or it was released early."""
        return self.state == "PENDING" and self.reason == "BeginTime"


class _DeniedError(LauncherRefusedError):
    """The server's user may not do this."""


class SlurmLauncher:
    """The backend; it runs Slurm's commands as the user of the server."""

    name: ClassVar[str] = "slurm"

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        run: Callable[..., str] | None = None,
    ) -> None:
        """`clock`: this process's own time. `run`: runs a command and returns its output."""
        self._clock = clock
        self._run = run or _run
        # Only shortcuts, by action: after a restart of this process the steps are repeated.
        self._pending_since: dict[str, float] = {}
        self._configured: set[str] = set()
        self._denied: set[str] = set()  # nodes that this user may not drain

    @classmethod
    def create(cls, _surroundings: LauncherParts) -> Self:
        """Return the backend."""
        return cls()

    def close(self) -> None:
        """Do nothing: each command has its own connection."""

    @classmethod
    def recognize(cls, metadata: Mapping[str, Mapping[str, str]]) -> Launch | None:
        """Return the launch of ranks that all report the same job and number of requeues."""
        runs = {(one.get(SLURM_JOB), one.get(SLURM_RESTARTS)) for one in metadata.values()}
        nodes = {agent: one.get(SLURM_NODE, "") for agent, one in metadata.items()}
        if len(runs) != 1 or not all(_is_same_node(*pair) for pair in nodes.items()):
            return None
        job, restarts = runs.pop()
        if not (job and job.isdecimal() and restarts and restarts.isdecimal()):
            return None
        return Launch(launcher=cls.name, job=job, restarts=int(restarts), nodes=nodes)

    # --- observe ---------------------------------------------------------------------------

    def observe(self, request: LaunchRequest) -> ShownRequest:
        """Return how far the request is. Raises LauncherError."""
        job = self._job(request.launch.job)
        if job is None:
            return ShownRequest(
                state="refused",
                detail=f"Slurm no longer has job {request.launch.job} (MinJobAge in slurm.conf).",
            )
        count = job.restarts - request.launch.restarts
        if count == 0:
            return self._observe_before(request, job)
        if count > 1 or count < 0 or request.kind == "check":
            detail = (
                f"Expected job {request.launch.job} with Restarts={request.launch.restarts}, "
                f"found {job.restarts}: it was restarted meanwhile."
            )
            return ShownRequest(state="refused", detail=detail)
        return replace(self._observe_after(request, job), has_effect=True)

    def _observe_before(self, request: LaunchRequest, job: SlurmJob) -> ShownRequest:
        """Return the observation of a job that was not requeued since the decision."""
        name = request.launch.job
        if job.state == "COMPLETING":
            return _seen("begun", f"Slurm ends the run of job {name}.", job)
        if job.state in _ENDED_ON_PURPOSE:
            return _seen("over", f"Slurm's job {name} is {job.state}: it was not restarted.", job)
        if job.state not in ("RUNNING", *_ENDED):
            return _seen("refused", f"Slurm's job {name} is {job.state}, expected RUNNING.", job)
        obstacle = self._obstacle(request, job)
        if obstacle is None and request.kind == "check" and request.is_training:
            obstacle = self._shortage(request, job)
        if obstacle is not None:
            return _seen("refused", obstacle, job)
        return _seen("ready", f"Slurm can requeue job {name}.", job)

    def _obstacle(self, request: LaunchRequest, job: SlurmJob) -> str | None:
        """Return why the job cannot be requeued; None: it can."""
        name, claimed = request.launch.job, set(request.launch.nodes.values())
        if not job.is_batch:
            return f"Slurm's job {name} has no batch script, so it cannot requeue it: use sbatch."
        if not job.may_requeue:
            return f"Slurm's job {name} was submitted with --no-requeue (or JobRequeue=0)."
        if claimed != set(job.nodes):
            return (
                f"The ranks report that they run on {_names(claimed)} in job {name}, but Slurm "
                f"shows {_names(job.nodes)}: it is not restarted for them."
            )
        if pinned := set(job.requested_nodes) & set(request.exclude):
            return f"Job {name} asks for {_names(pinned)} by name (--nodelist)."
        return None

    def _shortage(self, request: LaunchRequest, job: SlurmJob) -> str | None:
        """Return why a job that trains might wait for nodes if it were restarted now."""
        waiting = self._run("squeue", "-h", "-t", "PD", "-p", job.partition, "-o", "%r")
        if any(reason in ("Resources", "Priority") for reason in waiting.splitlines()):
            return (
                f"Other jobs wait for nodes of partition {job.partition}, and could get those of "
                f"job {request.launch.job} while it is requeued."
            )
        idle = self._run("sinfo", "-h", "-N", "-p", job.partition, "-t", "idle", "-o", "%N").split()
        free = {*idle, *job.nodes} - set(request.exclude)
        if len(free) < job.node_count:
            return (
                f"Partition {job.partition} has no idle node to replace {_names(request.exclude)}."
            )
        return None

    def _observe_after(self, request: LaunchRequest, job: SlurmJob) -> ShownRequest:
        """Return the observation of a job that was requeued once since the decision."""
        name = request.launch.job
        if job.state == "RUNNING":
            wrong = set(job.nodes) & set(request.exclude)
            if wrong:
                return _seen("refused", f"Slurm runs job {name} on {_names(wrong)} again.", job)
            return _seen("done", f"Slurm runs job {name} again, on {_names(job.nodes)}.", job)
        if job.state in _ENDED_ON_PURPOSE:
            return _seen("over", f"Slurm's job {name} is {job.state} after its requeue.", job)
        if job.state in _ENDED:
            return _seen("refused", f"Slurm's job {name} is {job.state} after its requeue.", job)
        if job.state == "PENDING":
            return _seen("begun", f"Slurm has requeued job {name}: {job.reason}.", job)
        return _seen("begun", f"Slurm's job {name} is {job.state}.", job)

    def _job(self, name: str) -> SlurmJob | None:
        fields = ",".join(f"{field}:{_SEPARATOR}" for field in _FIELDS)
        try:
            output = self._run("squeue", "-h", "-t", "all", "-j", name, "-O", fields)
        except LauncherError as error:
            if _UNKNOWN_JOB in str(error).lower():
                return None
            raise
        for line in output.splitlines():
            values = [value.strip() for value in line.split(_SEPARATOR, len(_FIELDS) - 1)]
            if len(values) == len(_FIELDS) and values[0] == name:
                return self._parsed(dict(zip(_FIELDS, values, strict=True)))
        return None

    def _parsed(self, values: Mapping[str, str]) -> SlurmJob:
        # The id of one task of an array may be that of the array, which names all of its tasks.
        task = values["ArrayTaskID"]
        name = f"{values['ArrayJobID']}_{task}" if task.isdecimal() else values["JobID"]
        return SlurmJob(
            name=name,
            state=values["State"],
            reason=values["Reason"],
            restarts=int(values["RestartCnt"]),
            nodes=self._hostnames(values["NodeList"]),
            requested_nodes=self._hostnames(values["ReqNodes"]),
            node_count=int(values["NumNodes"].partition("-")[0]),
            partition=values["Partition"],
            is_batch=values["BatchFlag"] == "1",
            may_requeue=values["Requeue"] == "1",
            admin_comment=values["admin_comment"].rstrip(_SEPARATOR),
        )

    def _hostnames(self, expression: str) -> list[str]:
        """Return the nodes of an expression such as n[0-3]."""
        if not expression or expression == "(null)":
            return []
        if "[" not in expression:
            return expression.split(",")
        return self._run("scontrol", "show", "hostnames", expression).split()

    # --- begin -----------------------------------------------------------------------------

    def begin(self, request: LaunchRequest, seen: ShownRequest) -> None:
        """Do the next external action, if one is due. Raises LauncherError."""
        job = seen.content
        assert isinstance(job, SlurmJob)
        if request.action_id not in self._configured and self._drain_next(request):
            return
        if job.restarts == request.launch.restarts:
            if seen.state == "ready":
                self._run("scontrol", "requeuehold", job.name)
        elif job.is_held_for_us or job.awaits_begin_time:
            since = self._pending_since.setdefault(request.action_id, self._clock())
            if request.action_id not in self._configured:
                self._configure(request, job)
                self._configured.add(request.action_id)
            elif self._clock() - since >= _RELEASE_SECONDS:
                if job.is_held_for_us:
                    self._run("scontrol", "release", job.name)
                else:
                    self._update(job.name, "StartTime=now")

    def _drain_next(self, request: LaunchRequest) -> bool:
        """Drain one of the excluded nodes; return whether there was one to drain."""
        for node in request.exclude:
            if node in self._denied or self._is_drained(node):
                continue
            reason = f"Paceline {request.action_id}: {request.reason}"
            reason = "".join(filter(str.isprintable, reason))[:_REASON_CHARACTERS]
            try:
                self._run(
                    "scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"
                )
            except _DeniedError:  # the job can still exclude it for itself
                self._denied.add(node)
                continue
            return True
        return False

    def _is_drained(self, node: str) -> bool:
        states = self._run("sinfo", "-h", "-N", "-n", node, "-o", "%T").split()
        return any(state.startswith("drain") for state in states)

    def _configure(self, request: LaunchRequest, job: SlurmJob) -> None:
        """Exclude the nodes, also if they could not be drained, and name the action.

        The comment also has the nodes, because Slurm keeps the list over requeues: those of an
        earlier action may be used again once a person has returned them to service.
        """
        name, ours = job.name, ",".join(request.exclude)
        before = set(self._hostnames(self._run("squeue", "-h", "-j", name, "-o", "%x").strip()))
        excluded = before - job.excluded_before | set(request.exclude)
        changes = [] if excluded == before else [f"ExcNodeList={','.join(sorted(excluded))}"]
        if job.is_held_for_us:
            changes.append("StartTime=now")
        comment = f"{_COMMENT}{request.action_id}{ours and f' {_EXCLUDE}{ours}'}"
        try:
            self._update(name, *changes, f"AdminComment={comment}")
        except _DeniedError:  # only an operator may set the comment
            if changes:
                self._update(name, *changes)

    def _update(self, name: str, *changes: str) -> None:
        self._run("scontrol", "update", f"JobId={name}", *changes)


def _is_same_node(agent: str, node: str) -> bool:
    """Return whether the agent has the node's name, which must not be an expression of several."""
    return agent.split(".")[0] == node and _NODE.fullmatch(node) is not None


def _seen(state: ObservedState, detail: str, job: SlurmJob) -> ShownRequest:
    return ShownRequest(state=state, detail=detail, content=job)


def _names(nodes: Collection[str]) -> str:
    return ", ".join(sorted(nodes)) or "no node"


def _run(program: str, *arguments: str) -> str:
    """Run one of Slurm's commands and return its output. Raises LauncherError."""
    path = shutil.which(program)
    if path is None:
        raise LauncherRefusedError(
            f"The server's host has no {program}: install Slurm's client commands, its "
            "configuration and the munge key there, or repair the job by hand."
        )
    # `timeout` ends the command also if this process is killed meanwhile.
    command = ["timeout", str(_COMMAND_SECONDS), path, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    if done.returncode == 0:
        return done.stdout
    message = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
    shown = f"{program} {' '.join(arguments)}"[:200]
    if done.returncode == 124:
        raise LauncherUnavailableError(f"Slurm did not answer within {_COMMAND_SECONDS} s: {shown}")
    if any(denied in message.lower() for denied in _DENIED):
        raise _DeniedError(
            f"The server's user may not run {shown}: {message}. Make it an operator of Slurm, or "
            "run the server as the user of the job."
        )
    raise LauncherError(f"{shown} failed: {message}")


LAUNCHER = SlurmLauncher
