"""Signals about commits to waiters within this process.

A signal is only a hint. Waiters also poll the database, because other processes commit too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field


class CommitSignal:
    """One signal for threads (`wait`) and for coroutines (`subscribe`)."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0
        self._subscriptions: set[Subscription] = set()
        self._listeners: list[Callable[[], None]] = []
        self.closed = False

    @property
    def count(self) -> int:
        """Number of notifications so far."""
        return self._count

    def notify(self) -> None:
        """Release all waiters."""
        with self._condition:
            self._count += 1
            self._condition.notify_all()
            subscriptions = list(self._subscriptions)
        for subscription in subscriptions:
            subscription.notify()
        for listener in self._listeners:
            listener()

    def close(self) -> None:
        """Release all waiters, now and in the future."""
        self.closed = True
        self.notify()

    def wait(self, last_count: int, timeout_seconds: float) -> int:
        """Wait for a notification after `last_count` or the timeout; return the new count."""
        with self._condition:
            self._condition.wait_for(
                lambda: self.closed or self._count != last_count, timeout_seconds
            )
            return self._count

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` at each notification, in the notifying thread. It must not block."""
        self._listeners.append(listener)

    def subscribe(self) -> Subscription:
        """Return a subscription for the running event loop. The caller closes it."""
        subscription = Subscription(self, asyncio.get_running_loop())
        with self._condition:
            self._subscriptions.add(subscription)
        return subscription

    def _remove(self, subscription: Subscription) -> None:
        with self._condition:
            self._subscriptions.discard(subscription)

    @property
    def subscribers(self) -> int:
        """Number of open subscriptions."""
        return len(self._subscriptions)


@dataclass(frozen=True)
class CommitSignals:
    """One signal for each kind of waiter."""

    work: CommitSignal = field(default_factory=CommitSignal)  # the worker: batches, jobs, decisions
    urgent: CommitSignal = field(default_factory=CommitSignal)  # the worker: a rank has ended
    commands: CommitSignal = field(default_factory=CommitSignal)  # streams to agents
    changes: CommitSignal = field(default_factory=CommitSignal)  # event streams and the outbox

    def close(self) -> None:
        """Close all signals."""
        for signal in (self.work, self.urgent, self.commands, self.changes):
            signal.close()


class Subscription:
    """A coroutine's view of one signal. A notification between two waits is not lost."""

    def __init__(self, signal: CommitSignal, loop: asyncio.AbstractEventLoop) -> None:
        self._signal = signal
        self._loop = loop
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Release the waiter; may be called from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_seconds: float) -> None:
        """Wait for a notification or the timeout."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._event.wait()
        except TimeoutError:
            return
        self._event.clear()

    def close(self) -> None:
        """Stop receiving notifications."""
        self._signal._remove(self)
