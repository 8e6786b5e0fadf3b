"""What agents have still to do, looked up once for all whose streams ask.

A large job has a thousand agents, each with a stream: were each to look for itself, the database
would answer nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from anyio.to_thread import run_sync

from paceline_server.store.commands import unfinished_commands
from paceline_server.store.database import UNAVAILABLE, Database
from paceline_server.store.wake import Wake

Command = tuple[int, str]  # id and body


class PendingCommands:
    """`wake` tells of new commands; those of other processes are looked for each `poll_seconds`."""

    def __init__(
        self,
        database: Database,
        wake: Wake,
        poll_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._wake = wake
        self._poll_seconds = poll_seconds
        self._clock = clock
        self._lock = asyncio.Lock()
        self._known: Mapping[str, list[Command]] = {}
        self._looked: tuple[int, float] | None = None  # what had been announced by then, and when

    async def of(self, agent_id: str, *, now: bool = False) -> list[Command]:
        """In the order of issue. None while the database is away: a stream outlives that.

        `now`: as of this call or later; a command whose result is stored is not among them.
        """
        asked = self._clock()
        async with self._lock:
            if not self._is_fresh(asked if now else None):
                self._looked = self._wake.count, self._clock()
                self._known = await run_sync(self._look)
        return self._known.get(agent_id, [])

    def _is_fresh(self, since: float | None) -> bool:
        if self._looked is None:
            return False
        announced, at = self._looked
        if since is not None and at < since:
            return False
        return announced == self._wake.count and self._clock() - at < self._poll_seconds

    def _look(self) -> Mapping[str, list[Command]]:
        try:
            with self._database.read() as session:
                return unfinished_commands(session)
        except UNAVAILABLE:
            return {}
