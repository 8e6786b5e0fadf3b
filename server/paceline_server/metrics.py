"""What the server counts about itself, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class ServingMetrics:
    """Of the process that takes batches in and answers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.batches = Counter(
            "paceline_ingest_batches",
            "Batches that were acknowledged.",
            ["status"],
            registry=registry,
        )
        self.rejected = Counter(
            "paceline_ingest_rejected",
            "Requests to ingest that stored nothing.",
            ["reason"],
            registry=registry,
        )
        self.bytes = Counter("paceline_ingest_bytes", "Compressed bytes stored.", registry=registry)
        self.commit_seconds = Histogram(
            "paceline_ingest_commit_seconds",
            "One transaction of the log writer.",
            registry=registry,
        )
        self.streams = Gauge(
            "paceline_streams", "Open long-lived responses.", ["kind"], registry=registry
        )


class BackgroundMetrics:
    """Of the job worker and the outbox."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tick_seconds = Histogram(
            "paceline_worker_tick_seconds", "One pass over one job.", registry=registry
        )
        self.tick_errors = Counter(
            "paceline_worker_tick_errors",
            "Passes that were rolled back.",
            ["reason"],
            registry=registry,
        )
        self.batches_skipped = Counter(
            "paceline_worker_batches_skipped",
            "Batches that the engine could not take.",
            registry=registry,
        )
        self.leases = Gauge(
            "paceline_worker_leases", "Jobs this process works on.", registry=registry
        )
        self.deliveries = Counter(
            "paceline_outbox_deliveries",
            "Attempts to deliver.",
            ["receiver", "result"],
            registry=registry,
        )
