"""The CPUs: does the rank get them, and those next to its GPU?"""

from __future__ import annotations

from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import MetricObservation, Symptom, looks_at, stalled

SYMPTOMS = (
    Symptom(
        "NUMA misbinding", "paceline_rank_numa_misbound", Scope.RANK,
        "binding to another NUMA node than its GPU's", "flag", "level", 0.2, normal=0.0,
    ),
    # The kernel's own account of the rank's main thread: ready to run, and no CPU.
    Symptom(
        "CPU contention", "paceline_rank_process_run_queue_wait_seconds_total", Scope.RANK,
        "share of time ready but without a CPU", "%", "rate",
        0.04, relative=0.5, normal=0.0, predicts=stalled,
    ),
    Symptom(
        "CPU contention", "node_pressure_cpu_waiting_seconds_total", Scope.NODE,
        "share of time in which tasks wait for a CPU", "%", "rate", 0.12, relative=0.5, normal=0.1,
        predicts=stalled,
    ),
    Symptom(
        "CPU contention", "paceline_rank_process_context_switches_total", Scope.RANK,
        "rate of involuntary context switches", "/s", "rate", 40.0, relative=1.0, normal=40.0,
        labels=(("kind", "involuntary"),),
    ),
)  # fmt: skip


def check(suspect: Suspect) -> list[MetricObservation]:
    return looks_at(suspect, SYMPTOMS)
