"""The lease: a node without contact to the server kills its ranks.

The server may have started them on another node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class RankLease:
    """Renewed by each contact with the server; `expire` is awaited when it lapses."""

    def __init__(
        self,
        lease_seconds: float,
        has_ranks: Callable[[], bool],
        expire: Callable[[], Awaitable[object]],
    ) -> None:
        self.lapses = 0
        self._lease_seconds = lease_seconds
        self._has_ranks = has_ranks
        self._expire = expire
        self._renewed_at = time.monotonic()

    def renew(self) -> None:
        """Start the lease again: the server responded."""
        self._renewed_at = time.monotonic()

    async def run(self) -> None:
        """Watch the lease until cancelled."""
        while self._lease_seconds > 0:
            left_seconds = self._renewed_at + self._lease_seconds - time.monotonic()
            if left_seconds > 0 or not self._has_ranks():
                await asyncio.sleep(left_seconds if left_seconds > 0 else 1.0)
                continue
            self.lapses += 1
            log.error(
                "no contact with the server for %.0f s: killing the ranks of this node, "
                "because the server may have started them on another one",
                self._lease_seconds,
            )
            await self._expire()
            await asyncio.sleep(0.1)
