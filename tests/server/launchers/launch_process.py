"""Carries out the requests to launchers of a database, as the worker process of a server does.

launch_process.py DATABASE_URL LEASE_SECONDS PID_FILE

The work is done in a child, whose pid is written to a file; after its death there is another one.

PACELINE_SERVER_KUBERNETES_URL and _CREDENTIALS are those of the server. If the file of
PACELINE_KILL_AT_STATEMENT has a moment such as "before INSERT INTO commands", the process removes
it and kills itself there; "committed" is after the transaction's end.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine

from paceline_server.launchers.contract import LauncherParts
from paceline_server.launchers.registry import create_launchers, launcher_classes
from paceline_server.settings import Settings
from paceline_server.store.database import Database
from paceline_server.store.signals import CommitSignals
from paceline_server.worker.launch_thread import LaunchThread


class Moments:
    """Kills this process at the moment that a file names."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done: list[str] = []  # statements of the transaction
        event.listen(Engine, "before_cursor_execute", self._before)
        event.listen(Engine, "after_cursor_execute", self._after)

    def _before(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(("BEGIN", "SELECT 1")):
            self._strike("committed", self._done)
            self._done = []
        self._strike("before", [statement])

    def _after(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(("INSERT", "UPDATE")):
            self._done.append(statement)
        self._strike("after", [statement])

    def _strike(self, when: str, statements: list[str]) -> None:
        if not self._path.exists():
            return
        wanted_when, _, wanted = self._path.read_text().partition(" ")
        if when == wanted_when and any(one.startswith(wanted) for one in statements):
            self._path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def carry_out() -> None:
    """Do the work, until the parent is gone."""
    if path := os.environ.get("PACELINE_KILL_AT_STATEMENT"):
        Moments(Path(path))
    parent = os.getppid()
    database = Database(sys.argv[1])
    thread = LaunchThread(
        database,
        CommitSignals(),
        f"{os.getpid()}:{secrets.token_hex(4)}",
        int(float(sys.argv[2]) * 1e9),
        create_launchers(LauncherParts(Settings(), database)),
        time.time_ns,
    )
    thread.start()
    while not thread.unready() and os.getppid() == parent:
        time.sleep(0.2)


launcher_classes()  # imports all backends, once for all children
while True:
    child = os.fork()  # an import of the server takes seconds
    if child == 0:
        Path(sys.argv[3]).write_text(str(os.getpid()))
        carry_out()
        os._exit(0)
    os.waitpid(child, 0)
