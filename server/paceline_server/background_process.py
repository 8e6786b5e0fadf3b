"""The background work in a separate process, started and ended by the serving process.

Python threads of one process share one core (the GIL): under a large job, diagnosis would delay
requests and requests would delay diagnosis. A socket pair connects the two processes. Each signals
its commits and that it is alive. While the serving process is stopped, no batches are received, so
the worker pauses; otherwise it would declare all nodes lost. When one process ends, the other one
notices through the socket: the worker exits, and the serving process starts a new worker.

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
from paceline_server.store.signals import CommitSignal, CommitSignals

_log = logging.getLogger(__name__)
_REPORT_SECONDS = 1.0
_HEARTBEAT_SECONDS = 0.25
_PAUSED_SECONDS = 1.0
_SILENT_SECONDS = 15.0
_HUNG_SECONDS = 60.0  # a worker process silent for longer is killed
_STOP_SECONDS = 10.0  # enough for a tick of a large job and the delivery of an alert
_RESTART_SECONDS = 1.0
_MAXIMUM_MESSAGE_BYTES = 1 << 17


NoticeKind = Literal["work", "urgent", "commands", "changes"]


class CommitNotice(msgspec.Struct, tag="woken"):
    """A commit that waiters of this kind need to see."""

    kind: NoticeKind


class ServerHeartbeat(msgspec.Struct, tag="beat"):
    """The serving process is alive."""


class WorkerReport(msgspec.Struct, tag="report"):
    """State of the worker process, sent every second."""

    unready: list[str]
    metrics: str  # OpenMetrics text


Message = CommitNotice | ServerHeartbeat | WorkerReport
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class BackgroundProcess(Collector):
    """Runs the worker process and restarts it if it dies or hangs.

    As a Prometheus collector it returns the worker's metrics.
    """

    def __init__(self, settings: Settings, signals: CommitSignals) -> None:
        self._settings = settings
        # Counted in the serving process's heartbeats, so that a pause of this process does not
        # count as the worker's silence. None: the worker is still starting, which may take long on
        # a busy machine.
        self._silent_heartbeats: int | None = None
        self._signals = signals
        self._stopping = threading.Event()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._report = WorkerReport(["worker: starting"], "# EOF\n")
        self._last_report = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)
        self._heartbeat_thread = threading.Thread(
            target=self._send_heartbeats, name="heartbeat", daemon=True
        )
        signals.work.add_listener(lambda: _send(self._socket, CommitNotice("work")))
        signals.urgent.add_listener(lambda: _send(self._socket, CommitNotice("urgent")))

    def start(self) -> None:
        """Start the worker process and its supervision."""
        self._last_report = time.monotonic()
        self._thread.start()
        self._heartbeat_thread.start()

    def stop(self) -> None:
        """End the worker process; kill it if its current work takes too long."""
        self._stopping.set()
        _close(self._socket)
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()

    def unready(self) -> list[str]:
        """Return why the server is not ready, an empty list if it is."""
        if time.monotonic() - self._last_report > _SILENT_SECONDS:
            return ["worker: not responding"]
        return list(self._report.unready)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the metrics are not known before the worker runs."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the worker's newest report."""
        yield from text_string_to_metric_families(self._report.metrics)  # type: ignore[no-untyped-call]

    def _send_heartbeats(self) -> None:
        while not self._stopping.wait(_HEARTBEAT_SECONDS):
            _send(self._socket, ServerHeartbeat())
            silent_heartbeats = self._silent_heartbeats
            if silent_heartbeats is None or self._process is None:
                continue
            self._silent_heartbeats = silent_heartbeats + 1
            if silent_heartbeats * _HEARTBEAT_SECONDS >= _HUNG_SECONDS:
                _log.error("worker process silent for %g s: killed", _HUNG_SECONDS)
                self._silent_heartbeats = None
                self._process.kill()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                outcome = f"exited with status {self._run_once()}"
            except OSError as error:  # out of memory or file descriptors
                outcome = f"cannot be started: {error}"
            if not self._stopping.is_set():
                _log.error("worker process %s; restarting it", outcome)
                self._report = WorkerReport(["worker: not running"], "# EOF\n")
            self._stopping.wait(_RESTART_SECONDS)

    def _run_once(self) -> int:
        """Run the worker process until it ends; return its exit status."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                command = [sys.executable, "-P", "-m", __spec__.name, str(theirs.fileno())]
                # Its own session, because a signal to the process group is for the serving process.
                # One thread for linear algebra, because more would spin and the matrices are small.
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={"OPENBLAS_NUM_THREADS": "1", **os.environ},
                )
            with contextlib.suppress(OSError):
                ours.send(self._settings.model_dump_json().encode())
            self._silent_heartbeats = None
            self._socket = ours
            if self._stopping.is_set():
                _close(ours)
            for message in _messages(ours):
                self._handle(message)
            self._socket = None
        return self._process.wait()

    def _handle(self, message: Message) -> None:
        if isinstance(message, CommitNotice):
            _signal(self._signals, message.kind).notify()
        elif isinstance(message, WorkerReport):
            self._report = message
            self._last_report = time.monotonic()
            self._silent_heartbeats = 0


def main() -> None:
    """Entry point of the worker process: run until the serving process closes the socket."""
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        settings = Settings.model_validate_json(connection.recv(_MAXIMUM_MESSAGE_BYTES))
        signals, registry = CommitSignals(), CollectorRegistry()
        signals.commands.add_listener(lambda: _send(connection, CommitNotice("commands")))
        signals.changes.add_listener(lambda: _send(connection, CommitNotice("changes")))
        database = database_of(settings)
        listener = _SocketListener(connection, signals)
        background = Background(settings, database, signals, registry, listener.is_ingest_paused)
        tune_interpreter()
        listener.start()
        background.start()
        while True:
            metrics = generate_latest(registry)  # type: ignore[no-untyped-call]
            _send(connection, WorkerReport(background.unready(), metrics.decode()))
            if listener.ended.wait(_REPORT_SECONDS):
                break
        signals.close()
        background.stop()
        database.close()


class _SocketListener(threading.Thread):
    """Receives messages of the serving process and ends this process when it ends."""

    def __init__(self, connection: socket.socket, signals: CommitSignals) -> None:
        super().__init__(name="socket-listener", daemon=True)
        self.ended = threading.Event()
        self._connection = connection
        self._signals = signals
        self._last_message = time.monotonic()

    def is_ingest_paused(self) -> bool:
        """Return whether the serving process is stopped, so that no batches are received."""
        return time.monotonic() - self._last_message > _PAUSED_SECONDS

    def run(self) -> None:
        """Handle messages until the serving process ends."""
        for message in _messages(self._connection):
            self._last_message = time.monotonic()
            if isinstance(message, CommitNotice):
                _signal(self._signals, message.kind).notify()
        self.ended.set()
        # No other process would kill a worker that fails to exit.
        time.sleep(_STOP_SECONDS)
        os._exit(1)


def _messages(connection: socket.socket) -> Iterator[Message]:
    """Yield messages until the other process closes its end."""
    while True:
        try:
            message = connection.recv(_MAXIMUM_MESSAGE_BYTES)
        except OSError:
            return
        if not message:
            return
        yield _decoder.decode(message)


def _send(connection: socket.socket | None, message: Message) -> None:
    """Send without blocking. A lost message is harmless: the other process also polls."""
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.send(msgspec.json.encode(message), socket.MSG_DONTWAIT)


def _close(connection: socket.socket | None) -> None:
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)


def _signal(signals: CommitSignals, kind: NoticeKind) -> CommitSignal:
    found: CommitSignal = getattr(signals, kind)
    return found


if __name__ == "__main__":
    main()
