"""Metrics that the agent itself exposes: of its collectors, its spool and its scrapes."""

from __future__ import annotations

from paceline_agent.collect.contract import Metric

METRICS = (
    Metric(
        "paceline_collector_success",
        "gauge",
        None,
        "1: the last call of the collector brought something.",
    ),
    Metric(
        "paceline_collector_duration_seconds",
        "gauge",
        "seconds",
        "How long the last call took.",
    ),
    Metric(
        "paceline_collector_not_taken_total",
        "counter",
        None,
        "Results the agent could not take in.",
    ),
    Metric("paceline_series", "gauge", None, "Series the collector brings."),
    Metric(
        "paceline_series_refused_total",
        "counter",
        None,
        "Values left out because the collector brought too many series.",
    ),
    Metric("paceline_agent_batches_sent_total", "counter", None, "Batches the server has."),
    Metric("paceline_agent_batch_duplicates_total", "counter", None, "Batches it had already."),
    Metric("paceline_agent_send_retries_total", "counter", None, "Sends that were tried again."),
    Metric("paceline_agent_batches_dropped_total", "counter", None, "Batches cut by a full spool."),
    Metric("paceline_agent_spool_lost_spans_total", "counter", None, "Spans cut by a full spool."),
    Metric(
        "paceline_agent_spool_lost_samples_total",
        "counter",
        None,
        "Samples cut by a full spool.",
    ),
    Metric(
        "paceline_agent_spool_lost_events_total",
        "counter",
        None,
        "Events cut by a full spool.",
    ),
    Metric("paceline_agent_batches_rejected_total", "counter", None, "Batches the server refused."),
    Metric("paceline_agent_batches_corrupt_total", "counter", None, "Damaged files of the spool."),
    Metric("paceline_agent_spool_bytes", "gauge", "bytes", "Size of the waiting batches."),
    Metric("paceline_agent_spool_batches", "gauge", None, "Batches that wait."),
    Metric("paceline_agent_spool_writable", "gauge", None, "1: the disk takes batches."),
    Metric("paceline_agent_rings", "gauge", None, "Rings being read."),
    Metric("paceline_agent_rings_corrupt_total", "counter", None, "Rings that were skipped."),
    Metric("paceline_agent_spans_total", "counter", None, "Spans read."),
    Metric("paceline_agent_spans_lost_total", "counter", None, "Spans overwritten unread."),
    Metric("paceline_agent_command_stream_up", "gauge", None, "1: commands can come."),
    Metric("paceline_agent_command_stream_reconnects_total", "counter", None, "Streams ended."),
    Metric("paceline_agent_lease_lapses_total", "counter", None, "Kills without the server."),
    Metric(
        "paceline_agent_clock_stepped_seconds",
        "gauge",
        "seconds",
        "How far the node's clock was set since the agent began.",
    ),
    Metric(
        "paceline_agent_clock_server_offset_seconds",
        "gauge",
        "seconds",
        "The server's clock less the agent's, short of it by the quickest delivery.",
    ),
    Metric("paceline_agent_failed_ticks_total", "counter", None, "Parts that failed."),
    Metric("node_cpu_seconds_total", "counter", "seconds", "Time the CPUs spent in each mode."),
    Metric(
        "node_cpu_guest_seconds_total",
        "counter",
        "seconds",
        "Time the CPUs ran guests, contained in user and nice.",
    ),
    Metric("node_uname_info", "info", None, "Name, kernel and machine of the node."),
    Metric("node_time_seconds", "gauge", "seconds", "Unix time of the node."),
)
