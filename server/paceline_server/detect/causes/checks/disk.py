"""Disks: are they busy, do tasks wait for them, is there space?"""

from __future__ import annotations

from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import MetricObservation, Symptom, looks_at, stalled
from paceline_server.detect.finding import Evidence
from paceline_server.percent import percent

SYMPTOMS = (
    Symptom(
        "slow disk", "node_pressure_io_waiting_seconds_total", Scope.NODE,
        "share of time in which tasks wait for I/O", "%", "rate", 0.08, relative=0.5, normal=0.05,
        predicts=stalled,
    ),
    Symptom(
        "slow disk", "node_disk_io_time_seconds_total", Scope.DEVICE,
        "share of time with I/O in flight", "%", "rate", 0.2, relative=0.2, normal=0.5,
    ),
    Symptom(
        "slow disk", "node_disk_io_time_weighted_seconds_total", Scope.DEVICE,
        "number of requests in flight", "", "rate", 1.0, relative=1.0, normal=4.0,
    ),
)  # fmt: skip
_AVAILABLE = "node_filesystem_avail_bytes"
_FULL_SHARE = 0.01


def check(suspect: Suspect) -> list[MetricObservation]:
    return [*looks_at(suspect, SYMPTOMS), *_space(suspect)]


def _space(suspect: Suspect) -> list[MetricObservation]:
    telemetry, node = suspect.seen.telemetry, suspect.node
    looks = []
    for labels, series in telemetry.all_of(node, _AVAILABLE):
        free = series.latest()
        size = telemetry.latest(node, "node_filesystem_size_bytes", **labels)
        if free is None or not size:
            continue
        share = free / size
        text = f"{labels.get('mountpoint', '?')} of {node} has {percent(share)} of its space left"
        evidence = (Evidence(text, _AVAILABLE, free, size),)
        looks.append(MetricObservation("disk full", 2.5 if share < _FULL_SHARE else -1.5, evidence))
    return [max(looks, key=lambda each: each.weight)] if looks else []
