"""The background in a process of its own, started and ended by the process that serves.

Threads of one Python process take turns on one processor: a server under a large job would answer
late because it diagnoses, and diagnose late because it answers. A pair of sockets connects the two
processes. Each tells the other what it has committed and that it lives. While the one that serves
is stopped nobody can be heard, so the worker rests, or it would take all for silent; and the end of
either ends the pair, so that none outlives the other.

    python -m paceline_server.background_process FD
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from paceline_server.background import Background, database_of
from paceline_server.interpreter import tune_interpreter
from paceline_server.settings import Settings
from paceline_server.store.wake import Wake, Wakes

_log = logging.getLogger(__name__)
_REPORT_SECONDS = 1.0
_BEAT_SECONDS = 0.25
_DEAF_SECONDS = 1.0
_SILENT_SECONDS = 15.0
_HUNG_SECONDS = 60.0  # so long silent, a process will not speak again
_STOP_SECONDS = 10.0  # a pass over a large job, and an alert's delivery
_AGAIN_SECONDS = 1.0
_LONGEST_MESSAGE = 1 << 17


class Woken(msgspec.Struct, tag="woken"):
    """Something was committed that others wait for."""

    kind: Literal["work", "commands", "changes"]


class Beat(msgspec.Struct, tag="beat"):
    """The process that serves lives."""


class WorkerReport(msgspec.Struct, tag="report"):
    unready: list[str]
    metrics: str  # OpenMetrics text


Message = Woken | Beat | WorkerReport
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class BackgroundProcess(Collector):
    """Runs it, and runs it again if it dies or hangs. As a collector it gives what it counts."""

    def __init__(self, settings: Settings, wakes: Wakes) -> None:
        self._settings = settings
        # Of ours, so that a halt of our own is not held against it. None: it is still loading,
        # which takes as long as it does on a busy machine.
        self._silent_beats: int | None = None
        self._wakes = wakes
        self._stopping = threading.Event()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._report = WorkerReport(["worker: starting"], "# EOF\n")
        self._reported = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)
        self._beating = threading.Thread(target=self._beat, name="beat", daemon=True)
        wakes.work.tell(lambda: _tell(self._socket, Woken("work")))

    def start(self) -> None:
        self._reported = time.monotonic()
        self._thread.start()
        self._beating.start()

    def stop(self) -> None:
        """What is under way there is finished first, unless it takes too long."""
        self._stopping.set()
        _end(self._socket)
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()

    def unready(self) -> list[str]:
        if time.monotonic() - self._reported > _SILENT_SECONDS:
            return ["worker: does not answer"]
        return list(self._report.unready)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from text_string_to_metric_families(self._report.metrics)  # type: ignore[no-untyped-call]

    def _beat(self) -> None:
        while not self._stopping.wait(_BEAT_SECONDS):
            _tell(self._socket, Beat())
            silent_beats = self._silent_beats
            if silent_beats is None or self._process is None:
                continue
            self._silent_beats = silent_beats + 1
            if silent_beats * _BEAT_SECONDS >= _HUNG_SECONDS:
                _log.error("the worker's process says nothing: it is killed")
                self._silent_beats = None
                self._process.kill()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                why = f"ended with {self._run_once()}"
            except OSError as error:  # no memory, or no descriptors, for another process
                why = f"cannot be started: {error}"
            if not self._stopping.is_set():
                _log.error("the worker's process %s; starting it again", why)
                self._report = WorkerReport(["worker: not running"], "# EOF\n")
            self._stopping.wait(_AGAIN_SECONDS)

    def _run_once(self) -> int:
        """From its start to its end, whose exit status it returns."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                command = [sys.executable, "-m", __spec__.name, str(theirs.fileno())]
                # In a session of its own: signals to a group are for the process that serves.
                # Threads for linear algebra wait busily, and what there is of it is small.
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={"OPENBLAS_NUM_THREADS": "1", **os.environ},
                )
            with contextlib.suppress(OSError):
                ours.send(self._settings.model_dump_json().encode())
            self._silent_beats = None
            self._socket = ours
            if self._stopping.is_set():
                _end(ours)
            for message in _messages(ours):
                self._hear(message)
            self._socket = None
        return self._process.wait()

    def _hear(self, message: Message) -> None:
        if isinstance(message, Woken):
            _wake(self._wakes, message.kind).notify()
        elif isinstance(message, WorkerReport):
            self._report = message
            self._reported = time.monotonic()
            self._silent_beats = 0


def main() -> None:
    """The process itself: works until the socket it was given says that the other has ended."""
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        settings = Settings.model_validate_json(connection.recv(_LONGEST_MESSAGE))
        wakes, registry = Wakes(), CollectorRegistry()
        wakes.commands.tell(lambda: _tell(connection, Woken("commands")))
        wakes.changes.tell(lambda: _tell(connection, Woken("changes")))
        database = database_of(settings)
        hearing = _Hearing(connection, wakes)
        background = Background(settings, database, wakes, registry, hearing.is_deaf)
        tune_interpreter()
        hearing.start()
        background.start()
        while True:
            counted = generate_latest(registry)  # type: ignore[no-untyped-call]
            _tell(connection, WorkerReport(background.unready(), counted.decode()))
            if hearing.ended.wait(_REPORT_SECONDS):
                break
        wakes.close()
        background.stop()
        database.close()


class _Hearing(threading.Thread):
    """What the process that serves says; its end is ours."""

    def __init__(self, connection: socket.socket, wakes: Wakes) -> None:
        super().__init__(name="hearing", daemon=True)
        self.ended = threading.Event()
        self._connection = connection
        self._wakes = wakes
        self._heard = time.monotonic()

    def is_deaf(self) -> bool:
        return time.monotonic() - self._heard > _DEAF_SECONDS

    def run(self) -> None:
        for message in _messages(self._connection):
            self._heard = time.monotonic()
            if isinstance(message, Woken):
                _wake(self._wakes, message.kind).notify()
        self.ended.set()
        # Nobody else would end a process that does not come to its own end.
        time.sleep(_STOP_SECONDS)
        os._exit(1)


def _messages(connection: socket.socket) -> Iterator[Message]:
    """Until the other has ended, or is about to."""
    while True:
        try:
            message = connection.recv(_LONGEST_MESSAGE)
        except OSError:
            return
        if not message:
            return
        yield _decoder.decode(message)


def _tell(connection: socket.socket | None, message: Message) -> None:
    """Never waits: who does not listen will look by itself."""
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.send(msgspec.json.encode(message), socket.MSG_DONTWAIT)


def _end(connection: socket.socket | None) -> None:
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)


def _wake(wakes: Wakes, kind: Literal["work", "commands", "changes"]) -> Wake:
    found: Wake = getattr(wakes, kind)
    return found


if __name__ == "__main__":
    main()
