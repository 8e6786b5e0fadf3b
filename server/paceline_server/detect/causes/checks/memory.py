"""Host memory: tasks that wait for memory, page faults, swapping, free memory."""

from __future__ import annotations

from dataclasses import replace

from paceline_server.detect.causes import weighing
from paceline_server.detect.causes.catalog import MEMORY_PRESSURE, SWAPPING
from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import (
    Symptom,
    WeighedEvidence,
    combine,
    stalled,
    weigh_symptoms,
)
from paceline_server.detect.finding import Evidence
from paceline_server.percent import percent
from paceline_wire import metric_names

_AVAILABLE = metric_names.MEMORY_MEMAVAILABLE_BYTES
_SCARCE_SHARE = 0.03
SYMPTOMS = (
    Symptom(
        MEMORY_PRESSURE, metric_names.PRESSURE_MEMORY_WAITING_SECONDS_TOTAL, Scope.NODE,
        "share of time in which tasks wait for memory", "%", "rate", 0.04,
        relative_tolerance=0.5, normal=0.0, predicts=stalled,
    ),
    Symptom(
        MEMORY_PRESSURE, metric_names.VMSTAT_PGMAJFAULT, Scope.NODE,
        "rate of page faults that read the disk", "/s", "rate", 100.0,
        relative_tolerance=1.0, normal=100.0,
    ),
    Symptom(
        MEMORY_PRESSURE, metric_names.RANK_PROCESS_MAJOR_FAULTS_TOTAL, Scope.RANK,
        "rate of page faults that read the disk", "/s", "rate", 30.0,
        relative_tolerance=1.0, normal=30.0,
    ),
    Symptom(
        SWAPPING, metric_names.VMSTAT_PSWPIN, Scope.NODE,
        "rate of pages read back from swap", "/s", "rate", 50.0, relative_tolerance=1.0, normal=0.0,
    ),
    Symptom(
        SWAPPING, metric_names.VMSTAT_PSWPOUT, Scope.NODE,
        "rate of pages written to swap", "/s", "rate", 50.0, relative_tolerance=1.0, normal=0.0,
    ),
)  # fmt: skip


def check(suspect: Suspect) -> list[WeighedEvidence]:
    results = weigh_symptoms(suspect, SYMPTOMS)
    scarce = _available(suspect)
    if scarce is not None:
        results = _add(results, scarce)
    if any(each.cause == SWAPPING and each.weight > 0 for each in results):
        # Swapping is a more specific form of memory pressure.
        results = [
            replace(each, weight=each.weight + weighing.EXPLAINED_AWAY)
            if each.cause == MEMORY_PRESSURE
            else each
            for each in results
        ]
    return results


def _available(suspect: Suspect) -> WeighedEvidence | None:
    telemetry = suspect.observation.telemetry
    free = telemetry.latest(suspect.node, _AVAILABLE)
    total = telemetry.latest(suspect.node, metric_names.MEMORY_MEMTOTAL_BYTES)
    if free is None or not total:
        return None
    text = f"{suspect.node} has {percent(free / total)} of its memory free"
    weight = 1.0 if free / total < _SCARCE_SHARE else -0.5
    return WeighedEvidence(MEMORY_PRESSURE, weight, (Evidence(text, _AVAILABLE, free, total),))


def _add(results: list[WeighedEvidence], added: WeighedEvidence) -> list[WeighedEvidence]:
    same = [each for each in results if each.cause == added.cause]
    if same and added.weight <= 0:
        return results  # free memory is weaker evidence than the other metrics
    others = [each for each in results if each.cause != added.cause]
    return [*others, combine(added.cause, [*same, added])]
