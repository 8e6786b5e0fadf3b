"""The lease: a node without contact to the server kills ranks that have stopped to train.

The server may have started them on another node: then their peers are gone, and they finish no
operation any more. As long as they do, the training continues, however long the server is down.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0


class RankLease:
    """Renewed by each contact with the server, and for a generation by each operation it ends."""

    def __init__(
        self,
        lease_seconds: float,
        last_progress: Callable[[], Mapping[tuple[str, int], float]],
        expire: Callable[[str, int], Awaitable[object]],
    ) -> None:
        """Prepare a lease.

        Args:
            lease_seconds: 0 turns it off.
            last_progress: returns for job and generation of all ranks on this node when the newest
                of their operations ended, as `time.monotonic`.
            expire: is awaited with job and generation when their lease has lapsed.
        """
        self.lapses = 0
        self._lease_seconds = lease_seconds
        self._last_progress = last_progress
        self._expire = expire
        self._renewed_at = time.monotonic()

    def renew(self) -> None:
        """Start the lease again: the server responded."""
        self._renewed_at = time.monotonic()

    async def run(self) -> None:
        """Watch the lease until cancelled.

        A lease has lapsed if two checks in succession say so. After the first one that follows a
        pause of this process, the operations that the ranks ended meanwhile are read.
        """
        suspected: set[tuple[str, int]] = set()
        while self._lease_seconds > 0:
            lapsed = self._lapsed()
            for generation in lapsed & suspected:
                await self._lapse(*generation)
            suspected = lapsed
            often = min(CHECK_SECONDS, self._lease_seconds / 10)
            await asyncio.sleep(CHECK_SECONDS if lapsed else often)

    def _lapsed(self) -> set[tuple[str, int]]:
        lapsed_before = time.monotonic() - self._lease_seconds
        if self._renewed_at > lapsed_before:
            return set()
        progress = self._last_progress().items()
        return {generation for generation, at in progress if at <= lapsed_before}

    async def _lapse(self, job: str, generation: int) -> None:
        self.lapses += 1
        log.error(
            "no contact with the server for %.0f s, and the ranks of %s generation %d on this node "
            "have finished no operation for as long: they are killed, because the server may have "
            "started them on another node",
            *(self._lease_seconds, job, generation),
        )
        await self._expire(job, generation)
