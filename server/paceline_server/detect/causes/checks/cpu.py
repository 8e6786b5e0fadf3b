"""CPU contention, and ranks bound to CPUs on a different NUMA node than their GPU."""

from __future__ import annotations

import math
from dataclasses import replace

from paceline_server.detect.causes.catalog import CPU_CONTENTION, NUMA_MISBINDING
from paceline_server.detect.causes.other_processes import other_processes
from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import (
    Symptom,
    WeighedEvidence,
    cpu_use,
    rise_of_cpu_time,
    stalled,
    weigh_symptoms,
)
from paceline_server.detect.causes.weighing import RULED_OUT
from paceline_server.detect.finding import Evidence
from paceline_wire import metric_names

# Share of a slowdown (of its logarithm) from which a rank's own CPU time explains it. A process
# that competes for the CPUs of a rank costs it cache misses and spinning threads as well: up to a
# third of the slowdown, measured with one and two threads on two CPUs.
_OWN_SHARE = 0.5

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
    weighed = weigh_symptoms(suspect, SYMPTOMS)
    return [
        _checked(suspect, found) if found.cause == CPU_CONTENTION and found.weight > 0 else found
        for found in weighed
    ]


def _checked(suspect: Suspect, contention: WeighedEvidence) -> WeighedEvidence:
    """Return it as ruled out if the rank computes more; else with what competes for the CPUs."""
    against = _computes_more(
        suspect, f"and waits for CPUs do not explain {suspect.slowdown or 1.0:.2f}x"
    )
    if against is not None:
        return replace(contention, weight=RULED_OUT, evidence=(against,))
    observation = suspect.observation
    others = other_processes(
        observation.telemetry, [suspect.node], suspect.onset_ns, observation.now_ns
    )
    return replace(contention, evidence=(*contention.evidence, *others))


def added_time(suspect: Suspect) -> Evidence | None:
    """Return whether a slow rank computes or waits in the added time; None if it is not clear."""
    return _computes_more(suspect, "in its main thread or in another one") or _waits_more(suspect)


def _computes_more(suspect: Suspect, detail: str) -> Evidence | None:
    """Return the evidence that a slow rank computes more per step, if that explains the slowdown.

    Such a rank also waits more often for the CPUs of a busy node. One that only waits needs as much
    CPU time for a step as before.
    """
    slowdown = _slowdown_of_rank(suspect)
    rise = rise_of_cpu_time(suspect) if slowdown > 1.0 else None
    if rise is None or math.log(rise) < _OWN_SHARE * math.log(slowdown):
        return None
    return Evidence(
        f"rank {suspect.rank} needs {rise:.2f}x the CPU time for a step, compared with its peers: "
        f"it computes more, {detail}",
        metric_names.RANK_PROCESS_CPU_SECONDS_TOTAL,
        rise,
        1.0,
    )


def _waits_more(suspect: Suspect) -> Evidence | None:
    """Return the evidence that a slow rank sleeps or waits in the added time, if it does.

    Its waits for its peers become shorter: if it computed more, it would use a CPU for a larger
    share of the time.
    """
    slowdown = _slowdown_of_rank(suspect)
    if slowdown <= 1.0:
        return None
    now, before = cpu_use(suspect)
    if now is None or not before or before < now * slowdown**_OWN_SHARE:
        return None
    return Evidence(
        f"rank {suspect.rank} uses {now:.2g} CPUs since it became slow, {before:.2g} before: it "
        "does not compute more, but waits, such as in a sleep or for a lock, a queue or a device",
        metric_names.RANK_PROCESS_CPU_SECONDS_TOTAL,
        now,
        before,
    )


def _slowdown_of_rank(suspect: Suspect) -> float:
    """Return how many times slower a straggler is; 1 for other suspects."""
    is_rank = suspect.rank is not None and suspect.kind == "straggler"
    return (suspect.slowdown or 1.0) if is_rank else 1.0
