"""Tells those who wait in this process that something was committed.

Only a hint: whoever waits also looks by itself now and then, because other processes commit too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field


class Wake:
    """One signal for threads (`wait`) and for coroutines (`subscribe`)."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0
        self._subscriptions: set[Subscription] = set()
        self._listeners: list[Callable[[], None]] = []
        self.closed = False

    @property
    def count(self) -> int:
        """How often somebody notified."""
        return self._count

    def notify(self) -> None:
        with self._condition:
            self._count += 1
            self._condition.notify_all()
            subscriptions = list(self._subscriptions)
        for subscription in subscriptions:
            subscription.wake()
        for listener in self._listeners:
            listener()

    def close(self) -> None:
        """Everybody who waits stops waiting, now and later."""
        self.closed = True
        self.notify()

    def wait(self, seen: int, timeout_seconds: float) -> int:
        """Until somebody notified after `seen`, or the timeout; returns the new count."""
        with self._condition:
            self._condition.wait_for(lambda: self.closed or self._count != seen, timeout_seconds)
            return self._count

    def tell(self, listener: Callable[[], None]) -> None:
        """Call it at each notification from now on, in whatever thread; it must not block."""
        self._listeners.append(listener)

    def subscribe(self) -> Subscription:
        """For the running event loop. Close it, or it is kept for ever."""
        subscription = Subscription(self, asyncio.get_running_loop())
        with self._condition:
            self._subscriptions.add(subscription)
        return subscription

    def _forget(self, subscription: Subscription) -> None:
        with self._condition:
            self._subscriptions.discard(subscription)

    @property
    def subscribers(self) -> int:
        return len(self._subscriptions)


@dataclass(frozen=True)
class Wakes:
    """One signal for each kind of waiting."""

    work: Wake = field(default_factory=Wake)  # batches, jobs or people's words for the worker
    commands: Wake = field(default_factory=Wake)  # for agents
    changes: Wake = field(default_factory=Wake)  # for those who look on, and the outbox

    def close(self) -> None:
        for wake in (self.work, self.commands, self.changes):
            wake.close()


class Subscription:
    def __init__(self, wake: Wake, loop: asyncio.AbstractEventLoop) -> None:
        self._wake = wake
        self._loop = loop
        self._event = asyncio.Event()

    def wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_seconds: float) -> None:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._event.wait()
        except TimeoutError:
            return
        self._event.clear()

    def close(self) -> None:
        self._wake._forget(self)
