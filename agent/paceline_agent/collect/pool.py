"""Where a collector's calls run, so that one that blocks holds up nothing else.

A lane carries one call at a time. A thread that is stuck in a system call cannot be ended, so
its lane stays taken until the call comes back; a worker process can be killed and started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from paceline_agent.collect import worker_process as collector_worker
from paceline_agent.collect.contract import Collected, Collector, CollectorUnavailable, Context
from paceline_agent.collect.worker_process import (
    LENGTH,
    Answers,
    CallFailed,
    Unavailable,
    encode_call,
    encode_setup,
)

_READ_BYTES = 1 << 18
_PATIENCE_SECONDS = 0.5  # before those behind a call that takes long go on without it
_LONG_SECONDS = 0.02  # a call that took so long is told of before the next one begins

T = TypeVar("T")


class WorkerDied(Exception):  # noqa: N818 - what happened, in the error tree of the runner
    """A collector's process ended in the middle of a call."""


class WorkerFailed(Exception):  # noqa: N818
    """A collector raised something in its process; the text is its type and message."""


class CollectorLane(Protocol):
    opened: asyncio.Event  # set while a call need not start anything first
    took_seconds: float | None  # by the last call, without what it had to wait for; None: not told

    def collect(self, now_ns: int) -> Awaitable[Collected]: ...

    def abandon(self) -> None:
        """End the call in progress if anything can. `collect` then raises."""

    async def close(self) -> None: ...


class Crew:
    """A thread that makes the calls of many lanes, one after another.

    All that is due at one moment costs one awakening of the thread and one of the loop. A call
    that takes longer than the patience keeps its thread, and those behind it go on in a new one:
    as many threads hang as calls, never more. All methods belong to one event loop.
    """

    def __init__(self) -> None:
        self._shift: _Shift | None = None
        self._look: asyncio.TimerHandle | None = None
        self._due: list[_Call] = []

    def call(self, work: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if not self._due:
            # After all else that the loop has to do now: a thread that begins meanwhile takes the
            # interpreter's lock from it at each system call, and gives it back at the next.
            loop.call_soon(loop.call_soon, self._hand_over)
        self._due.append(_Call(work, future))
        return future

    def _hand_over(self) -> None:
        due, self._due = self._due, []
        try:
            if due:
                self._put(due)
        except RuntimeError as error:  # no thread can be started
            for call in due:
                call.error = error
                call.settle()

    def _put(self, calls: Sequence[_Call]) -> None:
        loop = asyncio.get_running_loop()
        if self._shift is None:
            self._shift = _Shift(loop, self._settled)
        self._shift.put(calls)
        if self._look is None:
            self._look = loop.call_later(_PATIENCE_SECONDS, self._look_after)

    def _settled(self, shift: _Shift) -> None:
        if shift is self._shift and shift.is_idle and self._look is not None:
            self._look.cancel()
            self._look = None

    def _look_after(self) -> None:
        self._look = None
        shift = self._shift
        if shift is None:
            return
        shift.settle()
        if shift.is_idle:
            return
        behind = shift.leave_late()
        if behind is not None:
            self._shift = None
        if behind is None or behind:
            self._put(behind or ())

    def close(self) -> None:
        """Once the calls are made the thread ends; one that is stuck dies with the process."""
        self._hand_over()
        if self._shift is not None:
            self._shift.end()
        if self._look is not None:
            self._look.cancel()


@dataclass(slots=True)
class _Call:
    """One call on its way to a thread, and its answer on the way back."""

    work: Callable[[], Any]
    future: asyncio.Future[Any]
    answer: Any = None
    error: Exception | None = None

    def make(self) -> None:
        try:
            self.answer = self.work()
        except Exception as error:
            self.error = error

    def settle(self) -> None:
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.answer)
        else:
            self.future.set_exception(self.error)


class _Shift:
    """One thread of a crew, what it has still to do and what it has done."""

    def __init__(self, loop: asyncio.AbstractEventLoop, settled: Callable[[_Shift], None]) -> None:
        self._loop = loop
        self._settled = settled
        self._waiting: deque[_Call] = deque()
        self._done: deque[_Call] = deque()
        self._state = threading.Condition()
        self._began: float | None = None  # the call under way; None: there is none
        self._ends = False
        threading.Thread(target=self._serve, name="collectors", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        with self._state:
            return not self._waiting and self._began is None

    def put(self, calls: Sequence[_Call]) -> None:
        with self._state:
            self._waiting.extend(calls)
            self._state.notify()

    def leave_late(self) -> list[_Call] | None:
        """The calls behind one that takes too long, which is then the last; None: none does."""
        with self._state:
            if self._began is None or time.monotonic() - self._began < _PATIENCE_SECONDS:
                return None
            self._ends = True
            behind = list(self._waiting)
            self._waiting.clear()
            return behind

    def end(self) -> None:
        with self._state:
            self._ends = True
            self._state.notify()

    def settle(self) -> None:
        while self._done:
            self._done.popleft().settle()
        self._settled(self)

    def _serve(self) -> None:
        while True:
            with self._state:
                while not self._waiting:
                    if self._ends:
                        return
                    self._state.wait()
                call = self._waiting.popleft()
                began = self._began = time.monotonic()
            call.make()
            self._done.append(call)
            with self._state:
                self._began = None
                tells = not self._waiting or time.monotonic() - began > _LONG_SECONDS
            if tells:
                with contextlib.suppress(RuntimeError):  # the loop closed meanwhile
                    self._loop.call_soon_threadsafe(self.settle)


class ThreadLane:
    """Has a crew make the collector and call it."""

    def __init__(
        self, collector_type: type[Collector], context: Context, crew: Crew | None = None
    ) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self._type = collector_type
        self._context = context
        self._crew = crew or Crew()
        self._is_shared = crew is not None
        self.took_seconds: float | None = None
        self._collector: Collector | None = None
        self._is_busy = False

    def collect(self, now_ns: int) -> asyncio.Future[Collected]:
        self.took_seconds = None
        return self._crew.call(partial(self._collect, now_ns))

    def _collect(self, now_ns: int) -> Collected:
        self._is_busy = True
        began = time.monotonic()
        try:
            self._collector = self._collector or self._type(self._context)
            return self._collector.collect(now_ns)
        finally:
            self.took_seconds = time.monotonic() - began
            self._is_busy = False

    def _let_go(self) -> None:
        if self._collector is not None and not self._is_busy:  # stuck in another thread
            self._collector.close()

    def abandon(self) -> None:
        """Nothing ends a thread: the call comes back, or the lane stays taken."""

    async def close(self) -> None:
        self._crew.call(self._let_go)
        if not self._is_shared:
            self._crew.close()


class ProcessLane:
    """A worker process that makes the collector and calls it. It dies with the agent.

    The process is let go while the collector is unavailable, so that a node without the device
    pays nothing for it, and a library that appears later is loaded by a fresh process.
    """

    def __init__(self, collector_type: type[Collector], context: Context) -> None:
        self._type = collector_type
        self._context = context
        self._worker: _Worker | None = None
        self.opened = asyncio.Event()
        self.took_seconds: float | None = None

    @property
    def pid(self) -> int | None:
        return self._worker.process.pid if self._worker else None

    async def collect(self, now_ns: int) -> Collected:
        self.took_seconds = None
        worker = self._worker or await self._start()
        began = time.monotonic()
        try:
            await worker.send(encode_call(now_ns, self._context.local_ranks()))
            answer = worker.answers.decode(await worker.receive())
        except (EOFError, OSError, msgspec.DecodeError) as error:
            raise WorkerDied(f"its process ended: {await self._bury(worker)}") from error
        self.took_seconds = time.monotonic() - began
        if isinstance(answer, Unavailable):
            await self.close()
            raise CollectorUnavailable(answer.reason)
        if isinstance(answer, CallFailed):
            raise WorkerFailed(answer.error)
        return answer

    async def _start(self) -> _Worker:
        self._worker = worker = await _Worker.start()
        try:
            await worker.send(encode_setup(self._type, self._context))
            await worker.receive()
        except (EOFError, OSError) as error:
            raise WorkerDied(f"its process did not start: {await self._bury(worker)}") from error
        self.opened.set()
        return worker

    async def _bury(self, worker: _Worker) -> str:
        self._worker = None
        self.opened.clear()
        worker.end()
        status = await worker.process.wait()
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}"

    def abandon(self) -> None:
        if self._worker is not None:
            self._worker.kill()

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        self.opened.clear()
        if worker is None:
            return
        worker.end()
        with contextlib.suppress(TimeoutError):  # stuck in the driver: it dies when that lets go
            async with asyncio.timeout(1.0):
                await worker.process.wait()


class _Worker:
    """The agent's end of a worker process."""

    def __init__(self, process: asyncio.subprocess.Process, ours: socket.socket) -> None:
        self.process = process
        self.answers = Answers()
        self._socket = ours

    @classmethod
    async def start(cls) -> _Worker:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                f"from {collector_worker.__name__} import main; main()",
                str(os.getpid()),
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        return cls(process, ours)

    async def send(self, payload: bytes) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> memoryview:
        """One frame. Raises EOFError if the process has ended."""
        loop = asyncio.get_running_loop()
        received = b""
        while True:
            more = await loop.sock_recv(self._socket, _READ_BYTES)
            if not more:
                raise EOFError
            received = received + more if received else more
            if len(received) >= LENGTH.size:
                (length,) = LENGTH.unpack_from(received)
                if len(received) >= LENGTH.size + length:
                    return memoryview(received)[LENGTH.size :]

    def kill(self) -> None:
        """Not `process.kill()`: that polls, and may take the status from asyncio's own waiter."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self._socket.close()


def lane_of(
    collector_type: type[Collector], context: Context, crew: Crew | None = None
) -> ThreadLane | ProcessLane:
    """Lanes of one crew share a thread while none of them is stuck."""
    if collector_type.isolated:
        return ProcessLane(collector_type, context)
    return ThreadLane(collector_type, context, crew)
