"""The supervisor: starts, watches and kills the ranks of this node, through the guard.

The end of a rank is reported immediately, after the rest of its ring and its last state page. The
server decides what happens to the other ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline_agent.clock import timeline_ns
from paceline_agent.collect.contract import Inventory
from paceline_agent.errors import GuardLostError
from paceline_agent.forward.outbox import Outbox
from paceline_agent.rings.reader import RankKey, Rings
from paceline_agent.supervise import guard
from paceline_agent.supervise.guard_link import GuardLink
from paceline_agent.supervise.logs import LogFile, prune_logs
from paceline_agent.supervise.rank_user import RankUser
from paceline_agent.supervise.renewal import Renewals
from paceline_wire.batch import RankExited, RankStarted
from paceline_wire.commands import PreloadRanks, Ranks, RankSpec, StartRanks
from paceline_wire.node_directory import RINGS
from paceline_wire.topology import Topology

log = logging.getLogger(__name__)

START_SECONDS = 10.0  # how long the guard may take to execute a rank
# how long killed ranks may take; beyond that they are in an uninterruptible wait
DEATH_SECONDS = 10.0
# Variables of a rank that differ in the next generation.
_PER_GENERATION = (
    *("PACELINE_GENERATION", "MASTER_ADDR", "MASTER_PORT", "PACELINE_SAVED_STEP"),
    "PACELINE_CHECKPOINT_DIRECTORY",
)
_STOPPING_CONTROLS = frozenset({"checkpoint_and_stop", "stop"})
OWN_VARIABLES = "PACELINE_AGENT_"  # prefix of the agent's own settings, such as its token


class _Place(NamedTuple):
    """Where a rank runs, and what."""

    spec: RankSpec
    topology: Topology
    argv: list[str]
    environment: dict[str, str]
    directory: str | None


@dataclass(slots=True, eq=False)
class _SupervisedRank:
    """A rank of this node, from its start until none of its processes is left."""

    key: RankKey
    log: LogFile
    marks: list[str]  # NAME=value variables that identify its processes
    # Its process is kept only for the same place in the next generation; None: never.
    place: _Place | None = None
    pid: int | None = None
    error: str | None = None
    stopping: bool = False  # a command is stopping it
    has_left: bool = False  # its process waits for the next generation
    draining: bool = False
    control: str | None = None  # the newest command on its control page
    started: asyncio.Event = field(default_factory=asyncio.Event)  # set also when the start failed
    exited: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """The ranks of one node. All methods belong to one event loop."""

    def __init__(
        self,
        directory: Path,
        outbox: Outbox,
        rings: Rings,
        *,
        environment: Mapping[str, str],
        inventory: Inventory,
        rank_user: RankUser | None,
        orphan_grace_seconds: float = 0.0,
        killed: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            rank_user: the user that ranks run as; None: this node runs no ranks.
            killed: called when a rank ends by a SIGKILL that the agent did not send.
        """
        self._directory = directory
        self._outbox = outbox
        self._rings = rings
        self._environment = {
            name: value
            for name, value in environment.items()
            if not name.startswith(OWN_VARIABLES) and name != "PACELINE_TOKEN"
        }
        self._inventory = inventory
        self._rank_user = rank_user
        self._killed = killed
        self._grace_seconds = orphan_grace_seconds
        self._ranks: dict[RankKey, _SupervisedRank] = {}
        self._newest: dict[str, int] = {}  # by job: newest generation started here
        self._stopped: dict[str, int] = {}  # by job: generations up to this one were stopped
        user = None if rank_user is None else rank_user.uid
        self._renewals = Renewals(directory, self._is_rank, user)
        self._link: GuardLink | None = None
        self._adopted: GuardLink | None = None  # None once `run` has taken it over
        self._link_ready = asyncio.Event()
        self.failed_ticks = 0

    @property
    def has_ranks(self) -> bool:
        """Return whether any rank of this node may still have a process."""
        return bool(self._ranks)

    async def adopt(self) -> None:
        """Take over the ranks that an earlier agent left running. Call it before `run`.

        The guard is the parent of these processes, so a reused pid cannot be mistaken for one.
        """
        link = self._new_link()
        ranks = await link.adopt()
        if ranks is None:
            return
        self._adopted = link
        for entry in ranks:
            key, log_file = RankKey(*entry["key"]), LogFile(Path(entry["log"]))
            rank = _SupervisedRank(key, log_file, entry["marks"], pid=entry["pid"])
            rank.started.set()
            self._ranks[key] = rank
            user = entry["user"]
            self._rings.supervise(key, os.geteuid() if user is None else user[0])
            self._newest[key.job] = max(key.generation, self._newest.get(key.job, -1))
        log.warning("adopted %d ranks of an earlier agent", len(ranks))

    def _new_link(self) -> GuardLink:
        return GuardLink(self._on_message, self._directory / "guard.sock", self._grace_seconds)

    async def run(self) -> None:
        """Keep a guard running until cancelled."""
        await self._renewals.start()
        while True:
            adopted, self._adopted = self._adopted, None
            link = adopted or self._new_link()
            try:
                if adopted is None:
                    await link.start()
                self._link = link
                self._link_ready.set()
                await link.listen()
            except OSError as error:
                log.error("the guard cannot be started, so no rank can be started: %s", error)
                await asyncio.sleep(1.0)
            finally:
                self._link = None
                self._link_ready.clear()
                await link.close()
            log.error("the guard is gone, and its ranks with it; starting another one")
            await self._clean_up_after_guard(link.session, adopted=adopted is not None)

    async def start(self, command: StartRanks) -> str | None:
        """Start the ranks of a command. Return None, or the reason if they cannot be started."""
        job, generation = command.job, command.generation
        if self._rank_user is None:
            return "this node runs no ranks: its agent was started with --slots 0"
        if refusal := self._refusal(job, generation):
            return refusal
        self._newest[job] = generation
        await self._kill_older(command)
        await self._await_guard()
        if refusal := self._refusal(job, generation):  # stopped or superseded meanwhile
            return refusal
        prune_logs(self._directory / "logs")
        waiting = {rank.key.rank: rank for rank in self._kept(command)}
        ranks = [
            self._renew_rank(command, spec, waiting[spec.rank])
            if spec.rank in waiting
            else self._start_rank(command, spec)
            for spec in command.ranks
            if RankKey(job, generation, spec.rank) not in self._ranks
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS + guard.STARVED_SECONDS * len(ranks)):
                for rank in ranks:
                    await rank.started.wait()
        failed = [
            f"rank {rank.key.rank}: {rank.error or 'not started in time'}"
            for rank in ranks
            if rank.pid is None
        ]
        if failed:
            await self.stop(job, generation, 0.0)
            return "; ".join(failed)
        return None

    async def preload(self, command: PreloadRanks) -> str | None:
        """Have the modules of these ranks imported. Return None, or the reason if that fails."""
        if self._rank_user is None:
            return "this node runs no ranks: its agent was started with --slots 0"
        spec = command.ranks[0]
        key = RankKey(command.job, command.generation, spec.rank)
        await self._await_guard()
        try:
            self._send(do="preload", **self._start_message(command, spec, key))
        except GuardLostError as error:
            return str(error)
        return None

    async def _await_guard(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                await self._link_ready.wait()

    def _refusal(self, job: str, generation: int) -> str | None:
        newest = max(self._newest.get(job, -1), self._stopped.get(job, -1) + 1)
        if generation >= newest:
            return None
        return f"generation {generation} of {job} is refused: this node accepts {newest} and later"

    async def stop(
        self, job: str, generation: int, grace_seconds: float, *, renew: bool = False
    ) -> str | None:
        """Kill all ranks of `job` up to `generation`. Return None, or which ranks are not dead.

        `renew`: keep those that leave their generation, for the next one.
        """
        self._stopped[job] = max(generation, self._stopped.get(job, -1))
        ranks = self._ranks_up_to(job, generation)
        if renew:
            left = await self._renewals.leave([rank.pid for rank in ranks if rank.pid is not None])
            for rank in ranks:
                if rank.pid in left and not rank.exited:
                    rank.has_left = rank.stopping = True
                    self._finish_ring(rank.key)
            ranks = [rank for rank in ranks if not rank.has_left]
        return await self._kill(ranks, grace_seconds, commanded=True)

    async def drain(self, grace_seconds: float) -> str | None:
        """Kill all ranks without a command: the node is drained."""
        ranks = list(self._ranks.values())
        for rank in ranks:
            rank.draining = True
        return await self._kill(ranks, grace_seconds, commanded=False)

    async def expire(self, job: str, generation: int) -> str | None:
        """Kill the ranks of a generation without a command: their lease has lapsed."""
        ranks = [rank for key, rank in self._ranks.items() if key[:2] == (job, generation)]
        return await self._kill(ranks, 0.0, commanded=False)

    def set_control(self, job: str, generation: int, kind: str) -> None:
        """Store the command that was written to the ranks' control pages."""
        for key, rank in self._ranks.items():
            if key[:2] == (job, generation):
                rank.control = kind

    def generations(self) -> set[tuple[str, int]]:
        """Return job and generation of all ranks that have not exited."""
        return {(key.job, key.generation) for key, rank in self._ranks.items() if not rank.exited}

    def live_ranks(self, job: str, generation: int) -> set[int]:
        """Return the ranks of a generation that have not exited."""
        return {
            key.rank
            for key, rank in self._ranks.items()
            if key[:2] == (job, generation) and not rank.exited
        }

    def pid(self, job: str, generation: int, rank: int) -> int | None:
        """Return the pid of a rank that runs; None if the agent has not started it."""
        running = self._ranks.get(RankKey(job, generation, rank))
        return None if running is None or running.exited else running.pid

    def truncate_logs(self) -> None:
        """Limit the size of the logs, which are on tmpfs, in the node's memory."""
        for rank in self._ranks.values():
            rank.log.truncate()

    async def close(self) -> None:
        """End the guard, which kills the remaining ranks."""
        await self._renewals.close()
        for link in (self._link, self._adopted):
            if link is not None:
                await link.close()

    def _ranks_up_to(self, job: str, generation: int) -> list[_SupervisedRank]:
        return [
            rank
            for key, rank in self._ranks.items()
            if key.job == job and key.generation <= generation
        ]

    async def _kill_older(self, command: StartRanks) -> None:
        """Kill the ranks of older generations, which must not communicate with the new one.

        Those that have left theirs, and have a place in the new one, stay.
        """
        kept = self._kept(command)
        older = self._ranks_up_to(command.job, command.generation - 1)
        older = [rank for rank in older if rank not in kept]
        if older:
            await self._kill(older, 0.0, commanded=True)
        self._rings.remove_before(command.job, command.generation)

    def _kept(self, command: StartRanks) -> list[_SupervisedRank]:
        """Return the ranks that wait for the next generation, and have the same place in it."""
        places = {spec.rank: _place(command, spec) for spec in command.ranks}
        return [
            rank
            for rank in self._ranks_up_to(command.job, command.generation - 1)
            if rank.has_left
            and not rank.exited
            and rank.place is not None
            and rank.place == places.get(rank.key.rank)
            and rank.pid is not None
            and self._renewals.has_left(rank.pid)
        ]

    def _renew_rank(
        self, command: StartRanks, spec: RankSpec, old: _SupervisedRank
    ) -> _SupervisedRank:
        """Make a rank that has left its generation one of the new generation."""
        key = RankKey(command.job, command.generation, spec.rank)
        message = self._start_message(command, spec, key)
        rank = _SupervisedRank(key, old.log, old.marks, old.place, pid=old.pid)
        del self._ranks[old.key]
        self._ranks[key] = rank
        user, pid = message["user"], old.pid
        self._rings.supervise(key, os.geteuid() if user is None else user[0])
        try:
            self._send(do="rename", key=list(old.key), new=list(key))
        except GuardLostError as error:
            self._on_failed(rank, str(error))
            return rank
        assert pid is not None, "it was started"
        environment = message["environment"]
        changed = {name: environment[name] for name in _PER_GENERATION if name in environment}
        self._renewals.enter(pid, changed)
        self._on_started(rank, pid)
        return rank

    def _is_rank(self, pid: int) -> bool:
        return any(rank.pid == pid for rank in self._ranks.values())

    def _start_rank(self, command: StartRanks, spec: RankSpec) -> _SupervisedRank:
        key = RankKey(command.job, command.generation, spec.rank)
        message = self._start_message(command, spec, key)
        log_file = LogFile(Path(message["log"]))
        rank = _SupervisedRank(key, log_file, message["marks"], _place(command, spec))
        self._ranks[key] = rank
        user = message["user"]
        self._rings.supervise(key, os.geteuid() if user is None else user[0])
        try:
            self._send(do="start", **message)
        except GuardLostError as error:
            self._on_failed(rank, str(error))
        return rank

    def _start_message(self, command: Ranks, spec: RankSpec, key: RankKey) -> dict[str, Any]:
        """Return the guard's message that starts or preloads a rank, without its kind."""
        environment = self._rank_environment(command, spec)
        name = f"{key.job}.g{key.generation}.r{key.rank}.log"
        return {
            "key": list(key),
            "argv": command.argv,
            "environment": environment,
            "directory": command.directory,
            "user": self._guard_user(),
            "log": str(self._directory / "logs" / name),
            "marks": [f"{name}={environment[name]}" for name in _MARKS],
        }

    def _guard_user(self) -> list[Any] | None:
        """Return the ranks' user as guard.py takes it."""
        user = self._rank_user
        if user is None or user.is_own:
            return None
        return [user.uid, user.gid, list(user.groups)]

    def _rank_environment(self, command: Ranks, spec: RankSpec) -> dict[str, str]:
        """Return a rank's environment, on top of the agent's and the command's.

        docs/architecture.md lists the variables.
        """
        topology = command.topology
        own = {
            "RANK": spec.rank,
            "LOCAL_RANK": spec.local_rank,
            "WORLD_SIZE": topology.world_size,
            "LOCAL_WORLD_SIZE": len(command.ranks),
            "MASTER_ADDR": command.master_address,
            "MASTER_PORT": command.master_port,
            "PACELINE_RING_DIRECTORY": self._directory / RINGS,
            "PACELINE_NODE_DIRECTORY": self._directory,
            "PACELINE_JOB": command.job,
            "PACELINE_GENERATION": command.generation,
            "PACELINE_DP": topology.dp,
            "PACELINE_PP": topology.pp,
            "PACELINE_TP": topology.tp,
            "PACELINE_CP": topology.cp,
            "PACELINE_EP": topology.ep,
            "PACELINE_CHECKPOINT_DIRECTORY": command.checkpoint_directory,
            "PACELINE_SAVED_STEP": command.saved_step,
            "PACELINE_GPU_INDEX": spec.gpu,
            "PACELINE_GPU_UUID": self._gpu_uuid(spec.gpu),
        }
        # Unbuffered: the last output of a rank that dies must not be lost.
        # PACELINE: a script without a line of Paceline is recorded as well.
        defaults = {"PYTHONUNBUFFERED": "1", "PACELINE": "1", **self._visible_gpus(command)}
        inherited = {**defaults, **self._environment, **self._account(), "PATH": self._path()}
        inherited |= command.environment
        return inherited | {name: str(value) for name, value in own.items() if value is not None}

    def _account(self) -> dict[str, str]:
        """Return the variables of the ranks' user, who cannot write another user's caches."""
        user = self._rank_user
        if user is None or user.is_own:
            return {}
        return {"HOME": user.home, "USER": user.name, "LOGNAME": user.name}

    def _path(self) -> str:
        """Return a PATH where `python` is this agent's, even if its environment is not active."""
        own = os.path.dirname(sys.executable)
        return os.pathsep.join((own, self._environment.get("PATH", os.defpath)))

    def _visible_gpus(self, command: Ranks) -> dict[str, str]:
        """Return CUDA_VISIBLE_DEVICES, so that `cuda:LOCAL_RANK` is the GPU assigned to a rank.

        That holds also if a GPU with a lower index is lost. It lists the GPUs of all ranks on this
        node, because peers on one node access each other's memory.
        """
        specs = sorted(command.ranks, key=lambda spec: spec.local_rank)
        uuids = [self._gpu_uuid(spec.gpu) for spec in specs]
        if None in uuids or [spec.local_rank for spec in specs] != list(range(len(specs))):
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, uuids))}

    def _gpu_uuid(self, index: int | None) -> str | None:
        return next((gpu.uuid for gpu in self._inventory.gpus if gpu.index == index), None)

    async def _kill(
        self, ranks: Sequence[_SupervisedRank], grace_seconds: float, *, commanded: bool
    ) -> str | None:
        for rank in ranks:
            rank.stopping = rank.stopping or commanded
        if grace_seconds > 0:
            self._signal(ranks, signal.SIGTERM)
            await _all_gone(ranks, grace_seconds)
        deadline = time.monotonic() + DEATH_SECONDS
        while not all(rank.gone.is_set() for rank in ranks):
            if time.monotonic() > deadline:
                left = [rank.key.rank for rank in ranks if not rank.gone.is_set()]
                return f"ranks {left} are not dead {DEATH_SECONDS:.0f} s after SIGKILL"
            self._signal(ranks, signal.SIGKILL)
            await _all_gone(ranks, 1.0)
        return None

    def _signal(self, ranks: Sequence[_SupervisedRank], number: int) -> None:
        for rank in ranks:
            if not rank.gone.is_set():
                with contextlib.suppress(GuardLostError):  # the ranks die with the guard
                    self._send(do="signal", key=list(rank.key), signal=int(number))

    def _send(self, **message: Any) -> None:
        if self._link is None:
            raise GuardLostError("the guard process is gone; it is being restarted")
        self._link.send(**message)

    def _on_message(self, message: dict[str, Any]) -> None:
        rank = self._ranks.get(RankKey(*message["key"]))
        if rank is None:
            return
        match message["event"]:
            case "started":
                self._on_started(rank, message["pid"])
            case "failed":
                self._on_failed(rank, message["error"] + self._whose())
            case "exited":
                self._on_exited(rank, message["exit_code"], message["signal"])
            case "gone":
                self._on_gone(rank)

    def _whose(self) -> str:
        """Return a note for a start error that the ranks' user may have caused."""
        user = self._rank_user
        return "" if user is None or user.is_own else f" (ranks run as {user.name}, see --run-as)"

    def _on_started(self, rank: _SupervisedRank, pid: int) -> None:
        rank.pid = pid
        rank.started.set()
        log.info("started rank %d of %s, pid %d", rank.key.rank, rank.key.job, pid)
        self._outbox.put_events([RankStarted(time_ns=timeline_ns(), pid=pid, **rank.key._asdict())])

    def _on_failed(self, rank: _SupervisedRank, error: str) -> None:
        rank.error = error
        rank.started.set()
        self._finish_ring(rank.key)
        self._on_gone(rank)

    def _on_exited(self, rank: _SupervisedRank, exit_code: int | None, number: int | None) -> None:
        if rank.exited or rank.pid is None:
            return
        rank.exited = True
        log_tail = self._rings.with_fatal_stack(rank.key, rank.log.tail(), number)
        self._finish_ring(rank.key)
        finished_by_command = exit_code == 0 and rank.control in _STOPPING_CONTROLS
        others = [
            other.pid
            for key, other in self._ranks.items()
            if key[:2] == rank.key[:2] and other.pid is not None and not other.exited
        ]
        exited = RankExited(
            time_ns=timeline_ns(),
            pid=rank.pid,
            exit_code=exit_code,
            signal=number,
            commanded=rank.stopping or finished_by_command,
            drained=rank.draining,
            log_tail=log_tail,
            renewable=self._renewals.are_resilient([rank.pid, *others]),
            **rank.key._asdict(),
        )
        log.info("rank %d of %s exited: %s/%s", rank.key.rank, rank.key.job, exit_code, number)
        self._outbox.put_events([exited])
        if not exited.commanded and exit_code != 0:
            # The others cannot continue without it: those that can leave need not wait for that.
            self._renewals.order_to_leave(others)
        if number == signal.SIGKILL and not exited.commanded and self._killed is not None:
            self._killed()

    def _finish_ring(self, key: RankKey) -> None:
        """Read the rest of a ring. An error must not suppress the report of the rank's end."""
        try:
            self._rings.finish(key)
        except Exception:
            self.failed_ticks += 1
            log.exception("the ring of rank %d could not be finished", key.rank)

    def _on_gone(self, rank: _SupervisedRank) -> None:
        rank.gone.set()
        self._ranks.pop(rank.key, None)
        if rank.pid is not None:
            self._renewals.forget(rank.pid)

    async def _clean_up_after_guard(self, guard_session: int | None, *, adopted: bool) -> None:
        """Kill the children of the ranks that died with the guard, and report the ranks as exited.

        With this agent's own guard, these are now children of this process. With an adopted guard
        they belong to another process, so all processes are searched.
        """
        pids = {guard_session, *(rank.pid for rank in self._ranks.values())}
        marks = [[os.fsencode(mark) for mark in rank.marks] for rank in self._ranks.values()]
        deadline = time.monotonic() + DEATH_SECONDS
        while time.monotonic() < deadline:
            strays = [
                process
                for process in (
                    guard.all_processes() if adopted else guard.descendants(os.getpid())
                )
                if process.state != "Z" or not adopted
                if process.session in pids
                or any(guard.has_marks(process.pid, mark) for mark in marks)
            ]
            if not strays:
                break
            for process in strays:
                guard.send_signal(process, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
            await asyncio.sleep(0.02)
        for rank in list(self._ranks.values()):
            if rank.pid is None:
                self._on_failed(rank, "the guard died before it was started")
            else:
                self._on_exited(rank, None, signal.SIGKILL)
                self._on_gone(rank)


_MARKS = ("PACELINE_JOB", "PACELINE_GENERATION", "RANK", "PACELINE_NODE_DIRECTORY")


def _place(command: StartRanks, spec: RankSpec) -> _Place:
    return _Place(spec, command.topology, command.argv, command.environment, command.directory)


async def _all_gone(ranks: Sequence[_SupervisedRank], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for rank in ranks:
                await rank.gone.wait()
