"""Background work of the server in this process: the job worker and the outbox."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from paceline_server.act.announce import IncidentReceiver
from paceline_server.alerts.outbox import AlertDelivery
from paceline_server.alerts.receivers import receivers
from paceline_server.launchers.contract import LauncherParts
from paceline_server.launchers.registry import create_launchers
from paceline_server.metrics import BackgroundMetrics
from paceline_server.policy_file import load_policy
from paceline_server.settings import Settings
from paceline_server.store.database import Database
from paceline_server.store.signals import CommitSignals
from paceline_server.worker.commit import AlertTargets
from paceline_server.worker.launch_thread import LaunchThread
from paceline_server.worker.tick import TickSettings
from paceline_server.worker.worker import Worker


def database_of(settings: Settings) -> Database:
    """Return the configured database, which connects at its first use."""
    return Database(
        settings.database_url,
        timeout_seconds=settings.database_timeout_seconds,
        synchronous=settings.sqlite_synchronous,
    )


class Background:
    """The job worker and the outbox. The caller migrates and closes the database."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        signals: CommitSignals,
        registry: CollectorRegistry,
        is_ingest_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_ingest_paused`: returns whether the serving process currently receives no batches."""
        metrics = BackgroundMetrics(registry)
        owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        targets = receivers(settings)
        tick_settings = TickSettings(
            lease_ns=int(settings.lease_seconds * 1e9),
            batches=settings.batches_per_tick,
            batch_bytes=settings.bytes_per_tick,
            alert_targets=AlertTargets(
                incidents=tuple(
                    IncidentReceiver(target.name, target.minimum_severity)
                    for target in targets
                    if target.takes_incidents
                ),
                actions=tuple(target.name for target in targets if target.takes_actions),
            ),
        )
        self._worker = Worker(
            database,
            signals,
            metrics,
            owner,
            tick_settings,
            settings,
            load_policy(settings.policy),
            time.time_ns,
            is_ingest_paused,
        )
        self._launches = LaunchThread(
            database,
            signals,
            owner,
            tick_settings.lease_ns,
            create_launchers(LauncherParts(settings, database)),
            time.time_ns,
        )
        self._outboxes = [
            AlertDelivery(database, signals, metrics, owner, target, settings, time.time_ns)
            for target in targets
        ]

    def start(self) -> None:
        """Start all threads."""
        self._worker.start()
        self._launches.start()
        for outbox in self._outboxes:
            outbox.start()

    def stop(self) -> None:
        """Finish current work, release all leases and end all threads."""
        self._worker.stop()
        self._launches.stop()
        for outbox in self._outboxes:
            outbox.ask_to_stop()
        for outbox in self._outboxes:
            outbox.stop()

    def unready(self) -> list[str]:
        """Return the reasons why the server is not ready; empty if it is."""
        outboxes = (reason for outbox in self._outboxes for reason in outbox.unready())
        return [*self._worker.unready(), *self._launches.unready(), *outboxes]
