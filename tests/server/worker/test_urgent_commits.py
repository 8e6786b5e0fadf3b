"""The end of a rank is processed at once, also between two ticks; other batches can wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry
from simulated_node import bearer, hello

from paceline_server.background import Background
from paceline_server.policy import Policy
from paceline_server.settings import Settings
from paceline_server.store.database import Database
from paceline_server.store.signals import CommitSignals
from paceline_wire import batch as wire
from paceline_wire.batch import Batch, RankExited
from tests.server.rows import toy_job


def test_an_urgent_commit_ends_the_pause_between_ticks(
    database: Database, wait_for: Callable[..., Any]
) -> None:
    with database.write() as session:
        session.add(toy_job("job-1", state="pending", generation=0, policy=Policy()))
    signals, registry = CommitSignals(), CollectorRegistry()
    settings = Settings(tick_minimum_seconds=3600.0, tick_seconds=0.01)
    background = Background(settings, database, signals, registry)

    def ticks() -> float:
        return registry.get_sample_value("paceline_worker_tick_seconds_count") or 0.0

    background.start()
    try:
        wait_for(lambda: ticks() == 1)
        signals.urgent.notify()
        wait_for(lambda: ticks() > 1)
    finally:
        signals.close()
        background.stop()


def test_the_end_of_a_rank_is_urgent(server: Any) -> None:
    exited = RankExited(time_ns=1, job="job-1", generation=0, rank=0, pid=1, signal=9)
    urgent = server.program.signals.urgent
    counts = []
    for sequence, events in enumerate(([hello()], [exited])):
        content = wire.encode(
            Batch(
                agent_id="node-0",
                boot_id="boot-1",
                sequence=sequence,
                packed_ns=time.time_ns(),
                events=events,
            )
        )
        headers = {"Content-Type": wire.CONTENT_TYPE, **bearer(server.url, "agent")}
        server.client.post("/api/v1/ingest", content=content, headers=headers).raise_for_status()
        counts.append(urgent.count)
    assert counts == [0, 1]
