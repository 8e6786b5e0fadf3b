"""Other processes that compute on the GPU of a rank.

The driver divides the time of the GPU between processes. If it reports how much each of them uses,
that decides. Else their presence is a hint: how busy they are may change at any time.
"""

from __future__ import annotations

from paceline_server.detect.causes.catalog import GPU_SHARED
from paceline_server.detect.causes.suspect import MeasuredDevice, Scope, Suspect
from paceline_server.detect.causes.symptom import (
    Symptom,
    WeighedEvidence,
    stalled,
    weigh_symptom,
)
from paceline_server.detect.causes.timeline import levels
from paceline_server.detect.finding import Evidence
from paceline_wire import metric_names

UTILIZATION = Symptom(
    GPU_SHARED, metric_names.RANK_GPU_OTHERS_UTILIZATION_RATIO, Scope.RANK,
    "share of time in which other processes use the GPU", "%", "level", 0.05, normal=0.0,
    predicts=stalled,
)  # fmt: skip
PROCESSES = Symptom(
    GPU_SHARED, metric_names.RANK_GPU_OTHER_PROCESSES, Scope.RANK,
    "number of other processes on the GPU", "", "level", 0.2, normal=0.0,
)  # fmt: skip
SYMPTOMS = (UTILIZATION, PROCESSES)
# Ten to one: on a GPU for training, another process is rare and competes for all of its time.
_PRESENT = 1.0


def check(suspect: Suspect) -> list[WeighedEvidence]:
    weighed = weigh_symptom(suspect, UTILIZATION) or weigh_symptom(suspect, PROCESSES)
    if weighed is None:
        return []
    if weighed.weight > 0 or weighed.evidence[0].metric != PROCESSES.metric:
        return [weighed]
    found = [
        hint
        for device in suspect.devices(Scope.RANK, PROCESSES.metric)
        if (hint := _present(suspect, device)) is not None
    ]
    return found[:1] or [weighed]


def _present(suspect: Suspect, device: MeasuredDevice) -> WeighedEvidence | None:
    """Return the hint that others were on the rank's GPU before the slowdown and still are."""
    series = suspect.series(PROCESSES.metric, device)
    count = None if series is None else levels(series).now(suspect.onset_ns)
    if count is None or count < 1:
        return None
    others = "1 other process computes" if count == 1 else f"{count:.0f} other processes compute"
    text = f"{others} on the GPU of {device.name}, as before the slowdown"
    return WeighedEvidence(GPU_SHARED, _PRESENT, (Evidence(text, PROCESSES.metric, count, 0.0),))
