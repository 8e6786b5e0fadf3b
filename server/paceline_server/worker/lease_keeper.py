"""Renew this worker's leases during its ticks, and decide when another worker's can be taken over.

On a starved host a tick can take longer than a lease, although the worker is not dead. So a thread
renews the leases as long as the worker's own thread advances. It also measures its wake-up delays:
on a host where this worker is late, the owner of a lease is probably late too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from paceline_server.store.database import UNAVAILABLE, Database
from paceline_server.store.leases import renew

_log = logging.getLogger(__name__)
# A worker thread that has not advanced for this long is stuck, and another worker should take over.
_STUCK_SECONDS = 60.0
_DELAYS_SECONDS = 30.0  # period whose longest delay is used
_MOST_PATIENCE_LEASES = 10.0


class LeaseKeeper:
    """Keeps the leases of one worker process. All methods are thread-safe."""

    def __init__(
        self,
        database: Database,
        owner: str,
        lease_ns: int,
        now_ns: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now_ns`: CLOCK_REALTIME, for when leases expire. `clock`: this process's own time."""
        self._database = database
        self._owner = owner
        self._lease_ns = lease_ns
        self._now_ns = now_ns
        self._clock = clock
        self._interval = lease_ns / 4e9
        self._epochs: dict[str, int] = {}  # by name of the lease
        self._lock = threading.Lock()
        self._advanced = clock()
        self._delays: deque[tuple[float, float]] = deque()  # (time, seconds late)
        self._observed: dict[str, tuple[tuple[int, int], float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def hold(self, name: str, epoch: int) -> None:
        """Renew this lease from now on."""
        with self._lock:
            self._epochs[name] = epoch
            self._observed.pop(name, None)

    def drop(self, name: str) -> None:
        """Stop renewing this lease. A renewal in progress is complete when this returns."""
        with self._lock:
            self._epochs.pop(name, None)

    def advance(self) -> None:
        """Report that the worker's thread is not stuck."""
        self._advanced = self._clock()

    def add_delay(self, late: float) -> None:
        """Record a wake-up of this process that was `late` seconds late."""
        now = self._clock()
        self._delays.append((now, late))
        while now - self._delays[0][0] > _DELAYS_SECONDS:
            self._delays.popleft()

    def delay_seconds(self) -> float:
        """Return the longest recent delay of this process."""
        now = self._clock()
        return max(
            (late for at, late in list(self._delays) if now - at < _DELAYS_SECONDS), default=0.0
        )

    def may_take(self, name: str, epoch: int, expires_ns: int) -> bool:
        """Return whether an expired lease of another owner may be taken now.

        Its owner must have made no renewal for two thirds of a lease on this process's own clock,
        and for as long as this process itself is late. So neither clock skew nor a starved host
        looks like a dead owner. Call it with each value read; a released lease has `expires_ns` 0.
        """
        if not expires_ns:
            return True
        now, value = self._clock(), (epoch, expires_ns)
        seen, since = self._observed.get(name, (None, now))
        if seen != value:
            self._observed[name] = value, now
            return False
        lease_seconds = self._lease_ns / 1e9
        late = min(self.delay_seconds(), _MOST_PATIENCE_LEASES * lease_seconds)
        return now - since >= max(lease_seconds * 2 / 3, late)

    def _run(self) -> None:
        while True:
            due = self._clock() + self._interval
            if self._stop.wait(self._interval):
                return
            now = self._clock()
            self.add_delay(now - due)
            if now - self._advanced < _STUCK_SECONDS:
                self._renew()

    def _renew(self) -> None:
        with self._lock:
            if not self._epochs:
                return
            try:
                with self._database.write() as session:
                    for name, epoch in self._epochs.items():
                        # A lost lease stays lost, and the tick's fence reports it.
                        renew(session, name, self._owner, epoch, self._now_ns() + self._lease_ns)
            except UNAVAILABLE as error:
                _log.warning("leases were not renewed: %s", error)
