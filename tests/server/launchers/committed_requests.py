"""A database with one job of a launcher, and the process that carries out its requests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import select

from paceline_server.decide.types import LaunchRequest, LaunchResult
from paceline_server.engine.types import Launch
from paceline_server.store.database import Database
from paceline_server.store.models import LaunchRow
from paceline_wire.topology import Topology
from tests.server.rows import request_restart, toy_job

PROCESS = Path(__file__).with_name("launch_process.py")


class CommittedRequests:
    """The database and the process that does the work; after its death another one begins."""

    def __init__(
        self,
        directory: Path,
        job_id: str,
        environment: Mapping[str, str],
        lease_seconds: float = 0.6,
    ) -> None:
        self.url = f"sqlite:///{directory}/test.db"
        self.database = Database(self.url, synchronous="normal")
        self.database.migrate()
        self.job_id = job_id
        self._pid = directory / "pid"
        self._parent: subprocess.Popen[bytes] | None = None
        self._environment = dict(environment)
        self._lease_seconds = lease_seconds
        with self.database.write() as session:
            job = toy_job(
                job_id,
                topology=Topology(dp=2),
                state="recovering",
                generation=0,
                created_ns=time.time_ns(),
                watched=True,
            )
            session.add(job)

    def request(
        self, action_id: str, launch: Launch, exclude: list[str], generation: int = 0
    ) -> None:
        """Commit an action and its request, as a tick does.

        `generation`: of the job at the time of the decision.
        """
        intent = LaunchRequest(
            action_id=action_id,
            kind="restart",
            launch=launch,
            exclude=exclude,
            reason="Rank 1 crashed.",
        )
        with self.database.write() as session:
            request_restart(session, self.job_id, intent, time.time_ns(), generation)

    def result(self, action_id: str) -> LaunchResult:
        with self.database.read() as session:
            query = select(LaunchRow.result).where(LaunchRow.action_id == action_id)
            return session.scalars(query).one()

    def ensure_process(self) -> None:
        """Start the process, if that was not done yet."""
        if self._parent is None:
            command = [sys.executable, str(PROCESS), self.url, str(self._lease_seconds)]
            self._parent = subprocess.Popen([*command, str(self._pid)], env=self._environment)

    def kill(self) -> None:
        """Kill the process."""
        os.kill(int(self._pid.read_text()), signal.SIGKILL)

    def close(self) -> None:
        if self._parent is not None:
            self._parent.kill()
            self._parent.wait()
            with contextlib.suppress(OSError, ValueError):
                self.kill()
        self.database.close()
