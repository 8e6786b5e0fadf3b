"""What the server counts about itself, in its own registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.batches = Counter(
            "paceline_ingest_batches",
            "Batches that were acknowledged.",
            ["status"],
            registry=self.registry,
        )
        self.rejected = Counter(
            "paceline_ingest_rejected",
            "Requests to ingest that stored nothing.",
            ["reason"],
            registry=self.registry,
        )
        self.bytes = Counter(
            "paceline_ingest_bytes", "Compressed bytes stored.", registry=self.registry
        )
        self.commit_seconds = Histogram(
            "paceline_ingest_commit_seconds",
            "One transaction of the log writer.",
            registry=self.registry,
        )
        self.tick_seconds = Histogram(
            "paceline_worker_tick_seconds", "One pass over one job.", registry=self.registry
        )
        self.tick_errors = Counter(
            "paceline_worker_tick_errors",
            "Passes that were rolled back.",
            ["reason"],
            registry=self.registry,
        )
        self.batches_skipped = Counter(
            "paceline_worker_batches_skipped",
            "Batches that the engine could not take.",
            registry=self.registry,
        )
        self.leases = Gauge(
            "paceline_worker_leases", "Jobs this process works on.", registry=self.registry
        )
        self.deliveries = Counter(
            "paceline_outbox_deliveries",
            "Attempts to deliver.",
            ["receiver", "result"],
            registry=self.registry,
        )
        self.streams = Gauge(
            "paceline_streams", "Open long-lived responses.", ["kind"], registry=self.registry
        )
