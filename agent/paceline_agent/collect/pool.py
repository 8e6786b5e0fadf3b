"""The threads and processes that run collectors, so that a blocked one does not delay the others.

A lane runs one call of one collector at a time. A thread that hangs in a system call cannot be
ended, so its lane stays busy until the call returns. A worker process can be killed and restarted.
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
from paceline_agent.collect.scheduling import Runnable, process_runnable, thread_runnable
from paceline_agent.collect.worker_process import (
    LENGTH,
    Answers,
    CallFailed,
    Unavailable,
    encode_call,
    encode_setup,
)

_READ_BYTES = 1 << 18
_PATIENCE_SECONDS = 0.5  # then the calls behind a long one continue in another thread
_LONG_SECONDS = 0.02  # the result of a longer call is delivered before the next call starts
_END_SECONDS = (
    5.0  # for a worker process that was killed; one that hangs in the driver stays longer
)

T = TypeVar("T")


class WorkerDied(Exception):  # noqa: N818 - what happened, in the error tree of the runner
    """The process of a collector ended during a call."""


class WorkerFailed(Exception):  # noqa: N818
    """A collector raised an exception in its process; the text is its type and message."""


class CollectorLane(Protocol):
    """Runs the calls of one collector."""

    opened: asyncio.Event  # set unless a call has to start a process first
    took_seconds: float | None  # duration of the last call without waiting; None: unknown

    def collect(self, now_ns: int) -> Awaitable[Collected]: ...

    def runnable(self) -> Runnable | None:
        """Return how long the call's thread has run or waited for a CPU; None: unknown.

        In a worker process it is the sum of all threads.
        """

    def abandon(self) -> None:
        """End the current call if possible; `collect` then raises."""

    async def close(self) -> None: ...


class CollectorPool:
    """One thread that runs the calls of many lanes, one after another.

    All calls that are due at the same time cost one wake-up of the thread and one of the event
    loop. A call that takes longer than `_PATIENCE_SECONDS` keeps its thread, and the calls behind
    it continue in a new one. There are never more hanging threads than hanging calls. All methods
    belong to one event loop.
    """

    def __init__(self) -> None:
        self._thread: _WorkerThread | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due: list[_Call] = []

    def call(self, work: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if not self._due:
            # After everything else that is ready in the loop: a thread that starts earlier would
            # take the interpreter lock from it at each system call.
            loop.call_soon(loop.call_soon, self._start_due)
        self._due.append(_Call(work, future))
        return future

    def _start_due(self) -> None:
        due, self._due = self._due, []
        try:
            if due:
                self._enqueue(due)
        except RuntimeError as error:  # no thread could be started
            for call in due:
                call.error = error
                call.deliver()

    def _enqueue(self, calls: Sequence[_Call]) -> None:
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = _WorkerThread(loop, self._on_delivered)
        self._thread.put(calls)
        if self._timer is None:
            self._timer = loop.call_later(_PATIENCE_SECONDS, self._check_patience)

    def _on_delivered(self, thread: _WorkerThread) -> None:
        if thread is self._thread and thread.is_idle and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_patience(self) -> None:
        self._timer = None
        thread = self._thread
        if thread is None:
            return
        thread.deliver()
        if thread.is_idle:
            return
        behind = thread.take_waiting_behind_late()
        if behind is not None:
            self._thread = None
        if behind is None or behind:
            self._enqueue(behind or ())

    def close(self) -> None:
        """End the thread after its calls; a thread that hangs ends with the process."""
        self._start_due()
        if self._thread is not None:
            self._thread.end()
        if self._timer is not None:
            self._timer.cancel()


@dataclass(slots=True)
class _Call:
    """One call: its work, and its result or error."""

    work: Callable[[], Any]
    future: asyncio.Future[Any]
    answer: Any = None
    error: Exception | None = None

    def make(self) -> None:
        try:
            self.answer = self.work()
        except Exception as error:
            self.error = error

    def deliver(self) -> None:
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.answer)
        else:
            self.future.set_exception(self.error)


class _WorkerThread:
    """One thread of a pool with its waiting and finished calls."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_delivered: Callable[[_WorkerThread], None]
    ) -> None:
        self._loop = loop
        self._on_delivered = on_delivered
        self._waiting: deque[_Call] = deque()
        self._done: deque[_Call] = deque()
        self._state = threading.Condition()
        self._began: float | None = None  # start of the current call; None: idle
        self._is_ending = False
        threading.Thread(target=self._serve, name="collectors", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        with self._state:
            return not self._waiting and self._began is None

    def put(self, calls: Sequence[_Call]) -> None:
        with self._state:
            self._waiting.extend(calls)
            self._state.notify()

    def take_waiting_behind_late(self) -> list[_Call] | None:
        """Return the calls that wait behind one that takes too long.

        This thread takes no further calls.

        None if the current call is within its time.
        """
        with self._state:
            if self._began is None or time.monotonic() - self._began < _PATIENCE_SECONDS:
                return None
            self._is_ending = True
            behind = list(self._waiting)
            self._waiting.clear()
            return behind

    def end(self) -> None:
        with self._state:
            self._is_ending = True
            self._state.notify()

    def deliver(self) -> None:
        while self._done:
            self._done.popleft().deliver()
        self._on_delivered(self)

    def _serve(self) -> None:
        while True:
            with self._state:
                while not self._waiting:
                    if self._is_ending:
                        return
                    self._state.wait()
                call = self._waiting.popleft()
                began = self._began = time.monotonic()
            call.make()
            self._done.append(call)
            with self._state:
                self._began = None
                delivers = not self._waiting or time.monotonic() - began > _LONG_SECONDS
            if delivers:
                with contextlib.suppress(RuntimeError):  # the loop has been closed
                    self._loop.call_soon_threadsafe(self.deliver)


class ThreadLane:
    """Creates a collector and calls it in the thread of a pool."""

    def __init__(
        self, collector_type: type[Collector], context: Context, pool: CollectorPool | None = None
    ) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self._type = collector_type
        self._context = context
        self._pool = pool or CollectorPool()
        self._is_shared = pool is not None
        self.took_seconds: float | None = None
        self._collector: Collector | None = None
        self._thread_id: int | None = None  # native id of the thread of the current call

    def collect(self, now_ns: int) -> asyncio.Future[Collected]:
        self.took_seconds = None
        return self._pool.call(partial(self._collect, now_ns))

    def _collect(self, now_ns: int) -> Collected:
        self._thread_id = threading.get_native_id()
        began = time.monotonic()
        try:
            self._collector = self._collector or self._type(self._context)
            return self._collector.collect(now_ns)
        finally:
            self.took_seconds = time.monotonic() - began
            self._thread_id = None

    def _close_collector(self) -> None:
        if self._collector is not None and self._thread_id is None:  # no call hangs in a thread
            self._collector.close()

    def runnable(self) -> Runnable | None:
        thread_id = self._thread_id  # the call may end meanwhile
        if thread_id is None:  # it waits for its turn, behind calls that are not stuck
            return Runnable(time.monotonic(), True)
        return thread_runnable(thread_id)

    def abandon(self) -> None:
        """Do nothing: a thread cannot be ended, so the lane is busy until the call returns."""

    async def close(self) -> None:
        self._pool.call(self._close_collector)
        if not self._is_shared:
            self._pool.close()


class ProcessLane:
    """Creates a collector and calls it in a worker process, which ends with the agent.

    The process is stopped while the collector is unavailable. A node without the device pays
    nothing for it, and a library that is installed later is loaded by a new process.
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
            raise WorkerDied(f"its process ended: {await self._end_worker(worker)}") from error
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
            raise WorkerDied(
                f"its process did not start: {await self._end_worker(worker)}"
            ) from error
        self.opened.set()
        return worker

    async def _end_worker(self, worker: _Worker) -> str:
        self._worker = None
        self.opened.clear()
        worker.end()
        status = await worker.process.wait()
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}"

    def runnable(self) -> Runnable | None:
        return None if self.pid is None else process_runnable(self.pid)

    def abandon(self) -> None:
        if self._worker is not None:
            self._worker.kill()

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        self.opened.clear()
        if worker is None:
            return
        worker.end()
        with contextlib.suppress(
            TimeoutError
        ):  # hanging in the driver: it ends when the call returns
            async with asyncio.timeout(_END_SECONDS):
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
                "-P",
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
        """Return one frame. Raises EOFError if the process has ended."""
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
        """Kill the process, without `process.kill()`: that polls and may steal asyncio's status."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self._socket.close()


def lane_of(
    collector_type: type[Collector], context: Context, pool: CollectorPool | None = None
) -> ThreadLane | ProcessLane:
    """Return the lane for a collector; lanes of one pool share a thread unless one hangs."""
    if collector_type.isolated:
        return ProcessLane(collector_type, context)
    return ThreadLane(collector_type, context, pool)
