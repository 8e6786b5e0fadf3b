"""What works without being asked, the job worker and the outbox, in this process."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from paceline_server.alerts.outbox import AlertDelivery
from paceline_server.alerts.receivers import receivers
from paceline_server.metrics import BackgroundMetrics
from paceline_server.policy_file import load_policy
from paceline_server.settings import Settings
from paceline_server.store.database import Database
from paceline_server.store.wake import Wakes
from paceline_server.worker.commit import AlertTargets
from paceline_server.worker.tick import TickSettings
from paceline_server.worker.worker import Worker


def database_of(settings: Settings) -> Database:
    """Opened at its first use."""
    return Database(
        settings.database_url,
        timeout_seconds=settings.database_timeout_seconds,
        synchronous=settings.sqlite_synchronous,
    )


class Background:
    """On a migrated database, which whoever made it closes."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        wakes: Wakes,
        registry: CollectorRegistry,
        is_deaf: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_deaf`: whether nobody takes batches in at the moment."""
        metrics = BackgroundMetrics(registry)
        owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        targets = receivers(settings)
        tick_settings = TickSettings(
            lease_ns=int(settings.lease_seconds * 1e9),
            batches=settings.batches_per_tick,
            batch_bytes=settings.bytes_per_tick,
            alert_targets=AlertTargets(
                incidents=tuple(target.name for target in targets if target.takes_incidents),
                actions=tuple(target.name for target in targets if target.takes_actions),
            ),
        )
        self._worker = Worker(
            database,
            wakes,
            metrics,
            owner,
            tick_settings,
            settings,
            load_policy(settings.policy),
            time.time_ns,
            is_deaf,
        )
        self._outboxes = [
            AlertDelivery(database, wakes, metrics, owner, target, settings, time.time_ns)
            for target in targets
        ]

    def start(self) -> None:
        self._worker.start()
        for outbox in self._outboxes:
            outbox.start()

    def stop(self) -> None:
        """What is under way is finished first, and leases are given back."""
        self._worker.stop()
        for outbox in self._outboxes:
            outbox.ask_to_stop()
        for outbox in self._outboxes:
            outbox.stop()

    def unready(self) -> list[str]:
        outboxes = (told for outbox in self._outboxes for told in outbox.unready())
        return [*self._worker.unready(), *outboxes]
