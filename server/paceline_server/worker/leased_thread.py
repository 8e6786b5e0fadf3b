"""A thread whose passes need leases: its start, its end, and whether it still makes passes."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod

from paceline_server.worker.lease_keeper import LeaseKeeper


class LeasedThread(ABC):
    """The thread; a subclass makes the passes in `_run`, and notes each in `_last_pass`."""

    def __init__(self, name: str, leases: LeaseKeeper, stalled_seconds: float) -> None:
        """`stalled_seconds`: without a pass for longer, the thread counts as stalled."""
        self._name, self._stalled_seconds = name, stalled_seconds
        self._leases = leases
        self._stop = threading.Event()
        self._last_pass = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._last_pass = time.monotonic()
        self._thread.start()
        self._leases.start()

    def stop(self) -> None:
        """End the thread after its current pass, which releases its leases."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._leases.stop()

    def unready(self) -> list[str]:
        """Return the reasons why the server is not ready; empty if it is."""
        if not self._thread.is_alive():
            return [f"{self._name}: not running"]
        is_stalled = time.monotonic() - self._last_pass > self._stalled_seconds
        return [f"{self._name}: stalled"] if is_stalled else []

    @abstractmethod
    def _run(self) -> None:
        """Make passes until `_stop` is set."""
