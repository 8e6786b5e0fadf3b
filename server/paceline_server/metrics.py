"""Metrics of the server itself, in a separate registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class ServingMetrics:
    """Metrics of the serving process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.batches = Counter(
            "paceline_ingest_batches",
            "Batches acknowledged, by status.",
            ["status"],
            registry=registry,
        )
        self.rejected = Counter(
            "paceline_ingest_rejected",
            "Ingest requests rejected, by reason.",
            ["reason"],
            registry=registry,
        )
        self.bytes = Counter(
            "paceline_ingest_bytes", "Compressed bytes of stored batches.", registry=registry
        )
        self.commit_seconds = Histogram(
            "paceline_ingest_commit_seconds",
            "Duration of a transaction of the log writer.",
            registry=registry,
        )
        self.streams = Gauge(
            "paceline_streams", "Open streams, by kind.", ["kind"], registry=registry
        )


class BackgroundMetrics:
    """Metrics of the job worker and the outbox."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tick_seconds = Histogram(
            "paceline_worker_tick_seconds", "Duration of a tick of one job.", registry=registry
        )
        self.tick_errors = Counter(
            "paceline_worker_tick_errors",
            "Ticks rolled back, by reason.",
            ["reason"],
            registry=registry,
        )
        self.batches_skipped = Counter(
            "paceline_worker_batches_skipped",
            "Batches that the engine rejected.",
            registry=registry,
        )
        self.leases = Gauge(
            "paceline_worker_leases", "Jobs whose lease this process holds.", registry=registry
        )
        self.deliveries = Counter(
            "paceline_outbox_deliveries",
            "Delivery attempts of alerts, by receiver and result.",
            ["receiver", "result"],
            registry=registry,
        )
