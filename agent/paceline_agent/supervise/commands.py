"""The command stream: what the server asks of this node, carried out once per command id.

A stream that says nothing for some seconds (the server pings every other one) is dead, whatever TCP
thinks of it, and opened anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec
import tenacity
from msgspec.structs import replace

from paceline_agent.clock import timeline_ns
from paceline_agent.collect.nccl import flight_recorder
from paceline_agent.collect.nccl.process import read_process
from paceline_agent.errors import LinkError
from paceline_agent.forward.outbox import Outbox
from paceline_agent.forward.server_clock import ServerClock
from paceline_agent.forward.server_link import ServerLink
from paceline_agent.rings import stacks
from paceline_agent.rings.reader import Rings
from paceline_agent.supervise.supervisor import Supervisor
from paceline_wire import ring
from paceline_wire.batch import CommandResult, RankDump, RankStackTraces
from paceline_wire.commands import (
    Burst,
    Command,
    ControlRanks,
    Order,
    Ping,
    PreloadRanks,
    StartRanks,
    StopGeneration,
    TakeDumps,
    TakeStacks,
    decode_line,
)

log = logging.getLogger(__name__)

SILENCE_SECONDS = 5.0
RECONNECT_MAXIMUM_SECONDS = 2.0
REMEMBERED = 1024  # results of commands, for those that are asked again
RING_SECONDS = 5.0  # a control waits so long for the rings of ranks that are just starting


class Commands:
    """Carries out commands, each in its own task, so that a slow stop holds up nothing."""

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
        self._results: OrderedDict[int, CommandResult | None] = OrderedDict()  # None: under way
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, command: Order) -> None:
        """Carry out a new command; answer a known one as before."""
        command_id = command.command_id
        if command_id not in self._results:
            self._results[command_id] = None
            while len(self._results) > REMEMBERED:
                self._results.popitem(last=False)
            task = asyncio.create_task(self._carry_out(command))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (result := self._results[command_id]) is not None:
            self._outbox.put_events([result])

    async def _carry_out(self, command: Order) -> None:
        try:
            failure = await self._act(command)
        except Exception as error:  # a command's tick: the agent goes on, the server is told
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

    async def _act(self, command: Order) -> str | None:
        """None, or why it could not be done."""
        match command:
            case PreloadRanks():
                return await self._supervisor.preload(command)
            case StartRanks():
                self._before_start(command)
                return await self._supervisor.start(command)
            case StopGeneration():
                return await self._supervisor.stop(
                    command.job, command.generation, command.grace_seconds
                )
            case ControlRanks():
                return await self._control(command)
            case TakeStacks():
                return await self._take_stacks(command)
            case TakeDumps():
                return await self._take_dumps(command)
            case Burst():
                return self._burst(command.collectors, command.seconds)

    async def _control(self, command: ControlRanks) -> str | None:
        if command.kind not in ring.ControlKind.NAMES[1:]:
            return f"unknown control {command.kind!r}"
        job, generation = command.job, command.generation
        kind = ring.ControlKind.NAMES.index(command.kind)
        reached: set[int] = set()
        deadline = time.monotonic() + RING_SECONDS
        while True:
            self._supervisor.controlled(job, generation, command.kind)
            reached |= set(
                self._rings.control(job, generation, command.command_id, kind, command.target_step)
            )
            missing = self._supervisor.live_ranks(job, generation) - reached
            if reached and not missing:
                return None
            if time.monotonic() > deadline:
                return f"no ring of ranks {sorted(missing)}" if missing else "no rank of it is here"
            await asyncio.sleep(0.1)

    async def _take_stacks(self, command: TakeStacks) -> str | None:
        """Each rank is told of as soon as it was read: the server may be waiting for the first."""
        taken = [self._tell_stacks(command, rank) for rank in sorted(set(command.ranks))]
        errors = [error for error in await asyncio.gather(*taken) if error is not None]
        return "; ".join(errors) or None

    async def _take_dumps(self, command: TakeDumps) -> str | None:
        """Each rank is told of as soon as it was read, as with stacks."""
        taken = [self._tell_dump(command, rank) for rank in sorted(set(command.ranks))]
        errors = [error for error in await asyncio.gather(*taken) if error is not None]
        return "; ".join(errors) or None

    async def _tell_dump(self, command: TakeDumps, rank: int) -> str | None:
        told = RankDump(
            time_ns=timeline_ns(), job=command.job, generation=command.generation, rank=rank
        )
        try:
            pid = self._rings.pid(command.job, command.generation, rank)
            process = None if pid is None else read_process(self._procfs_root, pid)
            if process is None:
                raise flight_recorder.DumpError(f"rank {rank} has no process on this node")
            dump = await flight_recorder.take(process, rank)
            told = replace(told, content=dump.content, written_ns=dump.written_ns)
        except flight_recorder.DumpError as failure:
            silent = isinstance(failure, flight_recorder.NoAnswerError)
            told = replace(told, error=str(failure), was_asked=silent)
        self._outbox.put_events([replace(told, time_ns=timeline_ns())])
        return told.error

    async def _tell_stacks(self, command: TakeStacks, rank: int) -> str | None:
        pid = self._rings.pid(command.job, command.generation, rank)
        threads, error = [], None
        try:
            if pid is None:
                raise stacks.StacksError(f"rank {rank} has no ring on this node")
            threads = await stacks.take(pid)
        except stacks.StacksError as failure:
            error = str(failure)
        told = RankStackTraces(
            time_ns=timeline_ns(),
            job=command.job,
            generation=command.generation,
            rank=rank,
            pid=pid,
            threads=threads,
            error=error,
        )
        self._outbox.put_events([told])
        return error


class CommandStream:
    """Holds the stream open and hands on what comes."""

    def __init__(
        self,
        link: ServerLink,
        agent_id: str,
        take: Callable[[Order], None],
        pace: Callable[[float], None],
    ) -> None:
        self.connected = False
        self.reconnects = 0
        self.refused_lines = 0
        self.server_clock = ServerClock()
        self._link = link
        self._path = f"/api/v1/agents/{quote(agent_id, safe='')}/commands"
        self._take = take
        self._pace = pace

    async def run(self) -> None:
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
        """Until the stream ends. An end after it had begun is no failure: the back-off is new."""
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
            log.warning("a line of the command stream is no command: %s", error)
            return
        if isinstance(command, Ping):
            self.server_clock.see(command.server_ns)
            self._pace(command.flush_seconds)
        else:
            self._take(command)
