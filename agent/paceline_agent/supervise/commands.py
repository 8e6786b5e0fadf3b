"""The command stream from the server; each command is executed once per command id.

The server sends a ping every two seconds. A stream without a line for SILENCE_SECONDS is considered
dead, even if TCP still considers it open, and is opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec
import tenacity
from msgspec.structs import replace

from paceline_agent import daemon_thread
from paceline_agent.clock import timeline_ns
from paceline_agent.collect.nccl import flight_recorder
from paceline_agent.collect.nccl.process import NcclProcess, read_process
from paceline_agent.errors import LinkError
from paceline_agent.forward.outbox import Outbox
from paceline_agent.forward.server_clock import ServerClock
from paceline_agent.forward.server_link import ServerLink
from paceline_agent.rings import stacks
from paceline_agent.rings.reader import Rings
from paceline_agent.supervise.elastic import end_ranks, ranks_without_torchrun
from paceline_agent.supervise.supervisor import Supervisor
from paceline_wire import ring
from paceline_wire.batch import CommandResult, RankDump, RankProfile, RankStackTraces
from paceline_wire.commands import (
    Burst,
    Command,
    ControlRanks,
    EndRanks,
    Order,
    Ping,
    PreloadRanks,
    StartRanks,
    StopGeneration,
    TakeDumps,
    TakeProfiles,
    TakeStacks,
    decode_line,
)

log = logging.getLogger(__name__)

SILENCE_SECONDS = 5.0
RECONNECT_MAXIMUM_SECONDS = 2.0
REMEMBERED = 1024  # results of commands that are kept, because the server may send a command again
PROCESS_SECONDS = 5.0  # to read a process, whose directory may be on a network file system
RING_SECONDS = 5.0  # how long a control command waits for the rings of ranks that are just starting

_OfRanks = TypeVar("_OfRanks", TakeStacks, TakeProfiles, TakeDumps)


class CommandRunner:
    """Executes commands, each in its own task, so that a slow stop does not delay the others.

    Args:
        before_start: called before ranks are started.
        burst: runs collectors often for some seconds; returns the reason if it cannot.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        rings: Rings,
        outbox: Outbox,
        before_start: Callable[[StartRanks], None],
        burst: Callable[[Sequence[str], float], str | None],
        procfs_root: Path = Path("/proc"),
    ) -> None:
        self._supervisor = supervisor
        self._rings = rings
        self._outbox = outbox
        self._before_start = before_start
        self._burst = burst
        self._procfs_root = procfs_root
        self._results: OrderedDict[int, CommandResult | None] = OrderedDict()  # None: in progress
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, command: Order) -> None:
        """Execute a new command; send the stored result of one that was executed before."""
        command_id = command.command_id
        if command_id not in self._results:
            self._results[command_id] = None
            while len(self._results) > REMEMBERED:
                self._results.popitem(last=False)
            task = asyncio.create_task(self._run(command))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (result := self._results[command_id]) is not None:
            self._outbox.put_events([result])

    async def _run(self, command: Order) -> None:
        try:
            failure = await self._execute(command)
        except Exception as error:  # a failed command must not end the agent
            log.exception("command %d failed", command.command_id)
            failure = f"{type(error).__name__}: {error}"
        if failure:
            log.warning("command %d: %s", command.command_id, failure)
        result = CommandResult(
            time_ns=timeline_ns(),
            command_id=command.command_id,
            ok=failure is None,
            detail=failure or "",
        )
        if command.command_id in self._results:
            self._results[command.command_id] = result
        self._outbox.put_events([result])

    async def _execute(self, command: Order) -> str | None:
        """Execute a command. Return None, or the reason if it failed."""
        match command:
            case PreloadRanks():
                return await self._supervisor.preload(command)
            case StartRanks():
                self._before_start(command)
                return await self._supervisor.start(command)
            case StopGeneration():
                return await self._supervisor.stop(
                    command.job,
                    command.generation,
                    command.grace_seconds,
                    renew=command.renew,
                )
            case ControlRanks():
                return await self._control(command)
            case TakeStacks():
                return await self._send_each(command, self._send_stacks)
            case TakeProfiles():
                return await self._send_each(command, self._send_profile)
            case TakeDumps():
                return await self._send_each(command, self._send_dump)
            case EndRanks():
                return end_ranks(self._rings, command, self._procfs_root)
            case Burst():
                return self._burst(command.collectors, command.seconds)

    async def _control(self, command: ControlRanks) -> str | None:
        if command.kind not in ring.ControlKind.NAMES[1:]:
            return f"unknown control {command.kind!r}"
        job, generation = command.job, command.generation
        kind = ring.ControlKind.NAMES.index(command.kind)
        if kind == ring.ControlKind.CHECKPOINT_AND_STOP:
            orphans = ranks_without_torchrun(self._rings, job, generation, self._procfs_root)
            if orphans:
                return f"ranks {orphans} have no torchrun that would start them again"
        reached: set[int] = set()
        deadline = time.monotonic() + RING_SECONDS
        while True:
            self._supervisor.set_control(job, generation, command.kind)
            reached |= set(
                self._rings.control(job, generation, command.command_id, kind, command.target_step)
            )
            missing = self._supervisor.live_ranks(job, generation) - reached
            if reached and not missing:
                return None
            if time.monotonic() > deadline:
                if missing:
                    return f"ranks {sorted(missing)} have no ring yet"
                return f"no rank of {job} generation {generation} runs on this node"
            await asyncio.sleep(0.1)

    async def _send_each(
        self, command: _OfRanks, send: Callable[[_OfRanks, int], Awaitable[str | None]]
    ) -> str | None:
        """Read the ranks at the same time. Return the errors.

        Each rank's result is sent immediately, because the server may wait for the first.
        """
        results = (send(command, rank) for rank in sorted(set(command.ranks)))
        return "; ".join(filter(None, await asyncio.gather(*results))) or None

    async def _send_dump(self, command: TakeDumps, rank: int) -> str | None:
        event = RankDump(
            time_ns=timeline_ns(), job=command.job, generation=command.generation, rank=rank
        )
        try:
            pid = self._rings.pid(command.job, command.generation, rank)
            process = None if pid is None else await self._read_process(pid)
            if process is None:
                raise flight_recorder.DumpError(f"rank {rank} has no process on this node")
            dump = await flight_recorder.take(process, rank)
            event = replace(event, content=dump.content, written_ns=dump.written_ns)
        except flight_recorder.DumpError as failure:
            was_asked = isinstance(failure, flight_recorder.NoAnswerError)
            event = replace(event, error=str(failure), was_asked=was_asked)
        self._outbox.put_events([replace(event, time_ns=timeline_ns())])
        return event.error

    async def _read_process(self, pid: int) -> NcclProcess | None:
        """Return the process. Raises DumpError."""
        try:
            return await daemon_thread.call(PROCESS_SECONDS, read_process, self._procfs_root, pid)
        except TimeoutError:
            raise flight_recorder.DumpError(
                f"the file system of process {pid} does not respond"
            ) from None

    async def _send_profile(self, command: TakeProfiles, rank: int) -> str | None:
        place = command.job, command.generation, rank
        pid = self._rings.pid(*place)
        event = RankProfile(
            time_ns=timeline_ns(),
            job=command.job,
            generation=command.generation,
            rank=rank,
            begun_ns=timeline_ns(),
        )
        try:
            if pid is None:
                raise stacks.StacksError(f"rank {rank} has no process on this node")
            main, workers = await stacks.profile_of_rank(
                pid,
                command.seconds,
                self._procfs_root,
                thread=self._rings.native_thread_id(*place),
                workers=command.workers,
            )
            event = replace(event, main=main, workers=workers)
        except stacks.StacksError as failure:
            event = replace(event, error=str(failure))
        self._outbox.put_events([replace(event, time_ns=timeline_ns())])
        return event.error

    async def _send_stacks(self, command: TakeStacks, rank: int) -> str | None:
        place = command.job, command.generation, rank
        pid = self._rings.pid(*place)
        if pid is None:  # it has not begun to record
            pid = self._supervisor.pid(*place)
        threads, error = [], None
        try:
            if pid is None:
                raise stacks.StacksError(f"rank {rank} has no process on this node")
            thread = self._rings.native_thread_id(*place)
            threads = await stacks.take_of_rank(pid, self._procfs_root, thread)
        except stacks.StacksError as failure:
            error = str(failure)
        event = RankStackTraces(
            time_ns=timeline_ns(),
            job=command.job,
            generation=command.generation,
            rank=rank,
            pid=pid,
            threads=threads,
            error=error,
        )
        self._outbox.put_events([event])
        return error


class CommandStream:
    """Keeps the command stream open and passes its commands on.

    Args:
        accept: called with each command.
        pace: called with the seconds between batches that each ping requests.
    """

    def __init__(
        self,
        link: ServerLink,
        agent_id: str,
        accept: Callable[[Order], None],
        pace: Callable[[float], None],
    ) -> None:
        self.connected = False
        self.reconnects = 0
        self.refused_lines = 0
        self.server_clock = ServerClock()
        self._link = link
        self._path = f"/api/v1/agents/{quote(agent_id, safe='')}/commands"
        self._accept = accept
        self._pace = pace

    async def run(self) -> None:
        """Listen until cancelled; reconnect with back-off."""
        while True:
            async for attempt in tenacity.AsyncRetrying(
                retry=tenacity.retry_if_exception_type(LinkError),
                wait=tenacity.wait_random_exponential(
                    multiplier=0.1, max=RECONNECT_MAXIMUM_SECONDS
                ),
            ):
                with attempt:
                    await self._listen()
            self.reconnects += 1
            await asyncio.sleep(0.1)

    async def _listen(self) -> None:
        """Read the stream to its end. Raises LinkError only if it could not be opened."""
        lines = self._link.lines(self._path, SILENCE_SECONDS)
        try:
            async with contextlib.aclosing(lines):
                async for line in lines:
                    if not self.connected:
                        self.connected = True
                        log.info("the command stream is open")
                    self._handle(line)
        except LinkError as error:
            if not self.connected:
                raise
            log.warning("the command stream broke: %s", error)
        finally:
            self.connected = False

    def _handle(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            command: Command = decode_line(line)
        except msgspec.MsgspecError as error:
            self.refused_lines += 1
            log.warning("an invalid line in the command stream is ignored: %s", error)
            return
        if isinstance(command, Ping):
            self.server_clock.add_ping(command.server_ns)
            self._pace(command.flush_seconds)
        else:
            self._accept(command)
