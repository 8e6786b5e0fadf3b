"""CPU contention, and ranks bound to CPUs on a different NUMA node than their GPU."""

from __future__ import annotations

from paceline_server.detect.causes.catalog import CPU_CONTENTION, NUMA_MISBINDING
from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import Symptom, WeighedEvidence, stalled, weigh_symptoms
from paceline_wire import metric_names

SYMPTOMS = (
    Symptom(
        NUMA_MISBINDING, metric_names.RANK_NUMA_MISBOUND, Scope.RANK,
        "binding to a remote NUMA node", "flag", "level", 0.2, normal=0.0,
    ),
    # Counted by the kernel for the main thread of the rank: runnable, but without a CPU.
    Symptom(
        CPU_CONTENTION, metric_names.RANK_PROCESS_RUN_QUEUE_WAIT_SECONDS_TOTAL, Scope.RANK,
        "share of time runnable but without a CPU", "%", "rate",
        0.04, relative_tolerance=0.5, normal=0.0, predicts=stalled, is_lost_time=True,
        per_cpu_second=True,
    ),
    Symptom(
        CPU_CONTENTION, metric_names.PRESSURE_CPU_WAITING_SECONDS_TOTAL, Scope.NODE,
        "share of time in which tasks wait for a CPU", "%", "rate", 0.12,
        relative_tolerance=0.5, normal=0.1, predicts=stalled,
    ),
    Symptom(
        CPU_CONTENTION, metric_names.RANK_PROCESS_CONTEXT_SWITCHES_TOTAL, Scope.RANK,
        "rate of involuntary context switches", "/s", "rate", 40.0,
        relative_tolerance=1.0, normal=40.0,
        labels=(("kind", "involuntary"),), per_cpu_second=True,
    ),
)  # fmt: skip


def check(suspect: Suspect) -> list[WeighedEvidence]:
    return weigh_symptoms(suspect, SYMPTOMS)
