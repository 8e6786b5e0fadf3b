"""The host's memory: tasks that wait for it, and pages that come from disk."""

from __future__ import annotations

from dataclasses import replace

from paceline_server.detect.causes import weighing
from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import (
    MetricObservation,
    Symptom,
    looks_at,
    stalled,
    together,
)
from paceline_server.detect.finding import Evidence
from paceline_server.percent import percent

_AVAILABLE = "node_memory_MemAvailable_bytes"
_SCARCE_SHARE = 0.03
SYMPTOMS = (
    Symptom(
        "memory pressure", "node_pressure_memory_waiting_seconds_total", Scope.NODE,
        "share of time in which tasks wait for memory", "%", "rate", 0.04, relative=0.5, normal=0.0,
        predicts=stalled,
    ),
    Symptom(
        "memory pressure", "node_vmstat_pgmajfault", Scope.NODE,
        "rate of page faults that read the disk", "/s", "rate", 100.0, relative=1.0, normal=100.0,
    ),
    Symptom(
        "memory pressure", "paceline_rank_process_major_faults_total", Scope.RANK,
        "rate of page faults that read the disk", "/s", "rate", 30.0, relative=1.0, normal=30.0,
    ),
    Symptom(
        "swapping", "node_vmstat_pswpin", Scope.NODE,
        "rate of pages read back from swap", "/s", "rate", 50.0, relative=1.0, normal=0.0,
    ),
    Symptom(
        "swapping", "node_vmstat_pswpout", Scope.NODE,
        "rate of pages written to swap", "/s", "rate", 50.0, relative=1.0, normal=0.0,
    ),
)  # fmt: skip


def check(suspect: Suspect) -> list[MetricObservation]:
    looks = looks_at(suspect, SYMPTOMS)
    scarce = _available(suspect)
    if scarce is not None:
        looks = _joined(looks, scarce)
    if any(each.cause == "swapping" and each.weight > 0 for each in looks):
        # Swapping is memory pressure, said more exactly.
        looks = [
            replace(each, weight=each.weight + weighing.EXPLAINED_AWAY)
            if each.cause == "memory pressure"
            else each
            for each in looks
        ]
    return looks


def _available(suspect: Suspect) -> MetricObservation | None:
    telemetry = suspect.seen.telemetry
    free = telemetry.latest(suspect.node, _AVAILABLE)
    total = telemetry.latest(suspect.node, "node_memory_MemTotal_bytes")
    if free is None or not total:
        return None
    text = f"{suspect.node} has {percent(free / total)} of its memory left"
    weight = 1.0 if free / total < _SCARCE_SHARE else -0.5
    return MetricObservation("memory pressure", weight, (Evidence(text, _AVAILABLE, free, total),))


def _joined(looks: list[MetricObservation], more: MetricObservation) -> list[MetricObservation]:
    same = [each for each in looks if each.cause == more.cause]
    if same and more.weight <= 0:
        return looks  # that there is some left is the weaker statement
    rest = [each for each in looks if each.cause != more.cause]
    return [*rest, together(more.cause, [*same, more])]
