"""CPU contention, and ranks bound to the CPUs of another NUMA node than their GPU's."""

from __future__ import annotations

from paceline_server.detect.causes.catalog import CPU_CONTENTION, NUMA_MISBINDING
from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import Symptom, WeighedEvidence, stalled, weigh_symptoms

SYMPTOMS = (
    Symptom(
        NUMA_MISBINDING, "paceline_rank_numa_misbound", Scope.RANK,
        "binding to a remote NUMA node", "flag", "level", 0.2, normal=0.0,
    ),
    # Counted by the kernel for the main thread of the rank: runnable, but without a CPU.
    Symptom(
        CPU_CONTENTION, "paceline_rank_process_run_queue_wait_seconds_total", Scope.RANK,
        "share of time runnable but without a CPU", "%", "rate",
        0.04, relative_tolerance=0.5, normal=0.0, predicts=stalled,
    ),
    Symptom(
        CPU_CONTENTION, "node_pressure_cpu_waiting_seconds_total", Scope.NODE,
        "share of time in which tasks wait for a CPU", "%", "rate", 0.12,
        relative_tolerance=0.5, normal=0.1, predicts=stalled,
    ),
    Symptom(
        CPU_CONTENTION, "paceline_rank_process_context_switches_total", Scope.RANK,
        "rate of involuntary context switches", "/s", "rate", 40.0,
        relative_tolerance=1.0, normal=40.0,
        labels=(("kind", "involuntary"),),
    ),
)  # fmt: skip


def check(suspect: Suspect) -> list[WeighedEvidence]:
    return weigh_symptoms(suspect, SYMPTOMS)
