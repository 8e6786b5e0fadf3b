"""Unfinished commands of agents, read once for all streams.

A large job has a thousand agents with one stream each. One query per stream would saturate the
database.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from anyio.to_thread import run_sync

from paceline_server.store.commands import unfinished_commands
from paceline_server.store.database import UNAVAILABLE, Database
from paceline_server.store.signals import CommitSignal

Command = tuple[int, str]  # (id, body)


class PendingCommands:
    """Unfinished commands of all agents, cached.

    `signal` announces new commands of this process; those of other processes are found by polling
    every `poll_seconds`.
    """

    def __init__(
        self,
        database: Database,
        signal: CommitSignal,
        poll_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._signal = signal
        self._poll_seconds = poll_seconds
        self._clock = clock
        self._lock = asyncio.Lock()
        self._commands: Mapping[str, list[Command]] = {}
        self._last_read: tuple[int, float] | None = None  # (count of the signal, time)

    async def for_agent(self, agent_id: str, *, now: bool = False) -> list[Command]:
        """Return an agent's commands in the order of issue.

        Empty while the database is unavailable, which streams survive. `now`: read again, so that
        no command with a stored result is returned.
        """
        called = self._clock()
        async with self._lock:
            if not self._is_fresh(called if now else None):
                self._last_read = self._signal.count, self._clock()
                self._commands = await run_sync(self._read)
        return self._commands.get(agent_id, [])

    def _is_fresh(self, since: float | None) -> bool:
        if self._last_read is None:
            return False
        count, at = self._last_read
        if since is not None and at < since:
            return False
        return count == self._signal.count and self._clock() - at < self._poll_seconds

    def _read(self) -> Mapping[str, list[Command]]:
        try:
            with self._database.read() as session:
                return unfinished_commands(session)
        except UNAVAILABLE:
            return {}
