"""Where a collector's calls run, so that one that blocks holds up nothing else.

A lane carries one call at a time. A thread that is stuck in a system call cannot be ended, so
its lane stays taken until the call comes back; a worker process can be killed and started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import struct
import sys
import threading
from dataclasses import dataclass
from typing import Protocol

import msgspec

from paceline_agent import collector_worker
from paceline_agent.collectors.contract import (
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
)

_LENGTH = struct.Struct("<I")


class WorkerDied(Exception):  # noqa: N818 - what happened, in the error tree of the runner
    """A collector's process ended in the middle of a call."""


class WorkerFailed(Exception):  # noqa: N818
    """A collector raised something in its process; the text is its type and message."""


class Lane(Protocol):
    opened: asyncio.Event  # set while a call need not start anything first

    async def collect(self, now_ns: int) -> Collected: ...

    def abandon(self) -> None:
        """End the call in progress if anything can. `collect` then raises."""

    async def close(self) -> None: ...


class ThreadLane:
    """A daemon thread that makes the collector and calls it."""

    def __init__(self, collector_type: type[Collector], context: Context) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self._type = collector_type
        self._context = context
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def collect(self, now_ns: int) -> Collected:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name=f"collector-{self._type.name}", daemon=True
            )
            self._thread.start()
        loop = asyncio.get_running_loop()
        call = _Call(now_ns, loop, loop.create_future())
        self._calls.put(call)
        return await call.future

    def _serve(self) -> None:
        collector: Collector | None = None
        while (call := self._calls.get()) is not None:
            try:
                collector = collector or self._type(self._context)
                call.answer(collector.collect(call.now_ns))
            except Exception as error:
                call.answer(error)
        if collector is not None:
            collector.close()

    def abandon(self) -> None:
        """Nothing ends a thread: the call comes back, or the lane stays taken."""

    async def close(self) -> None:
        self._calls.put(None)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call on its way to a thread and its answer's way back to the loop."""

    now_ns: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Collected]

    def answer(self, answer: Collected | Exception) -> None:
        def settle() -> None:
            if self.future.done():
                return
            if isinstance(answer, Collected):
                self.future.set_result(answer)
            else:
                self.future.set_exception(answer)

        with contextlib.suppress(RuntimeError):  # the loop closed while the call was stuck
            self.loop.call_soon_threadsafe(settle)


class ProcessLane:
    """A worker process that makes the collector and calls it. It dies with the agent.

    The process is let go while the collector is unavailable, so that a node without the device
    pays nothing for it, and a library that appears later is loaded by a fresh process.
    """

    def __init__(self, collector_type: type[Collector], context: Context) -> None:
        self._type = collector_type
        self._context = context
        self._process: asyncio.subprocess.Process | None = None
        self.opened = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def collect(self, now_ns: int) -> Collected:
        process = self._process or await self._start()
        try:
            self._send(process, collector_worker.encode_call(now_ns, self._context.local_ranks()))
            answer = collector_worker.decode_answer(await self._receive(process))
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError) as error:
            raise WorkerDied(f"its process ended: {await self._bury(process)}") from error
        if isinstance(answer, collector_worker.Unavailable):
            await self.close()
            raise CollectorUnavailable(answer.reason)
        if isinstance(answer, collector_worker.Failed):
            raise WorkerFailed(answer.error)
        return answer.collected

    async def _start(self) -> asyncio.subprocess.Process:
        module = collector_worker.__name__
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            f"from {module} import main; main()",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            self._send(process, collector_worker.encode_setup(self._type, self._context))
            await self._receive(process)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WorkerDied(f"its process did not start: {await self._bury(process)}") from error
        self.opened.set()
        return process

    @staticmethod
    def _send(process: asyncio.subprocess.Process, payload: bytes) -> None:
        assert process.stdin is not None
        process.stdin.write(_LENGTH.pack(len(payload)) + payload)

    @staticmethod
    async def _receive(process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
        return await process.stdout.readexactly(length)

    async def _bury(self, process: asyncio.subprocess.Process) -> str:
        self._process = None
        self.opened.clear()
        _kill(process)
        status = await process.wait()
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}"

    def abandon(self) -> None:
        if self._process is not None:
            _kill(self._process)

    async def close(self) -> None:
        process, self._process = self._process, None
        self.opened.clear()
        if process is None:
            return
        _kill(process)
        with contextlib.suppress(TimeoutError):  # stuck in the driver: it dies when that lets go
            await asyncio.wait_for(process.wait(), 1.0)


def _kill(process: asyncio.subprocess.Process) -> None:
    """Not `process.kill()`: that polls, and so may take the status from asyncio's own waiter."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def lane_of(collector_type: type[Collector], context: Context) -> ThreadLane | ProcessLane:
    lane_type = ProcessLane if collector_type.isolated else ThreadLane
    return lane_type(collector_type, context)
