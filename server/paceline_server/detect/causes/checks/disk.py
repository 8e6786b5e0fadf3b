"""Disks: busy time, tasks that wait for I/O, free space."""

from __future__ import annotations

from paceline_server.detect.causes.catalog import DISK_FULL, SLOW_DISK
from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import Symptom, WeighedEvidence, stalled, weigh_symptoms
from paceline_server.detect.finding import Evidence
from paceline_server.percent import percent

SYMPTOMS = (
    Symptom(
        SLOW_DISK, "node_pressure_io_waiting_seconds_total", Scope.NODE,
        "share of time in which tasks wait for I/O", "%", "rate", 0.08,
        relative_tolerance=0.5, normal=0.05, predicts=stalled,
    ),
    Symptom(
        SLOW_DISK, "node_disk_io_time_seconds_total", Scope.DEVICE,
        "share of time with I/O in flight", "%", "rate", 0.2, relative_tolerance=0.2, normal=0.5,
    ),
    Symptom(
        SLOW_DISK, "node_disk_io_time_weighted_seconds_total", Scope.DEVICE,
        "number of requests in flight", "", "rate", 1.0, relative_tolerance=1.0, normal=4.0,
    ),
)  # fmt: skip
_AVAILABLE = "node_filesystem_avail_bytes"
_FULL_SHARE = 0.01


def check(suspect: Suspect) -> list[WeighedEvidence]:
    return [*weigh_symptoms(suspect, SYMPTOMS), *_free_space(suspect)]


def _free_space(suspect: Suspect) -> list[WeighedEvidence]:
    telemetry, node = suspect.observation.telemetry, suspect.node
    results = []
    for labels, series in telemetry.all_of(node, _AVAILABLE):
        free = series.latest()
        size = telemetry.latest(node, "node_filesystem_size_bytes", **labels)
        if free is None or not size:
            continue
        share = free / size
        text = f"{labels.get('mountpoint', '?')} of {node} has {percent(share)} of its space free"
        evidence = (Evidence(text, _AVAILABLE, free, size),)
        results.append(WeighedEvidence(DISK_FULL, 2.5 if share < _FULL_SHARE else -1.5, evidence))
    return [max(results, key=lambda each: each.weight)] if results else []
