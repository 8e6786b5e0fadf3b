"""XIDs, lost and hung GPUs, and NVLink errors."""

from __future__ import annotations

import math
from itertools import pairwise

from paceline_server.detect.causes import weighing
from paceline_server.detect.causes.catalog import GPU_HUNG, GPU_LOST, GPU_XID, NVLINK_ERRORS
from paceline_server.detect.causes.checks import kernel_log
from paceline_server.detect.causes.suspect import MeasuredDevice, Scope, Suspect
from paceline_server.detect.causes.symptom import Symptom, WeighedEvidence, weigh_symptoms
from paceline_server.detect.finding import Evidence
from paceline_wire import metric_names

XIDS = metric_names.GPU_XID_ERRORS_COUNT
LOST = metric_names.GPU_LOST
XID_INFO = metric_names.KERNEL_XID_INFO
# NVIDIA's XID catalog: XIDs caused by the program's own kernels or by a process that died. Those of
# another process on the GPU explain nothing.
PROGRAM_XIDS = frozenset({"13", "31", "43", "45"})
_MEANINGS = {
    "13": "graphics engine exception",
    "31": "memory page fault",
    "43": "GPU stopped processing",
    "45": "preemptive clean-up",
    "48": "double-bit ECC error",
    "63": "row remapping recorded",
    "64": "row remapping failed",
    "74": "NVLink error",
    "79": "GPU has fallen off the bus",
    "94": "contained ECC error",
    "95": "uncontained ECC error",
    "119": "GSP timeout",
    "120": "GSP error",
}
SYMPTOMS = (
    Symptom(GPU_LOST, LOST, Scope.GPU, "lost state", "flag", "level", 0.2, normal=0.0),
    Symptom(
        GPU_HUNG, metric_names.GPU_HUNG, Scope.GPU, "hung state", "flag", "level", 0.2, normal=0.0
    ),
    Symptom(
        NVLINK_ERRORS, metric_names.NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, Scope.GPU,
        "NVLink CRC errors", "", "events", 20.0,
    ),
    Symptom(
        NVLINK_ERRORS, metric_names.NVLINK_REPLAY_ERROR_COUNT_TOTAL, Scope.GPU,
        "NVLink replays", "", "events", 5.0,
    ),
    Symptom(
        NVLINK_ERRORS, metric_names.NVLINK_RECOVERY_ERROR_COUNT_TOTAL, Scope.GPU,
        "NVLink recoveries", "", "events", 0.5,
    ),
    Symptom(
        NVLINK_ERRORS, metric_names.GPU_NVLINK_ACTIVE_LINKS, Scope.GPU,
        "number of active NVLinks", "", "level", 0.25, rises=False,
    ),
)  # fmt: skip


def check(suspect: Suspect) -> list[WeighedEvidence]:
    results = weigh_symptoms(suspect, SYMPTOMS)
    xids = [
        weighed
        for gpu in suspect.devices(Scope.GPU, XIDS)
        if (weighed := _weigh_xids(suspect, gpu)) is not None
    ]
    return [*results, max(xids, key=lambda weighed: weighed.weight)] if xids else results


def _weigh_xids(suspect: Suspect, gpu: MeasuredDevice) -> WeighedEvidence | None:
    """Weigh the XIDs of one GPU. A code that the kernel log and NVML both report counts once.

    The series of an XID starts with its first occurrence, so no series means no XID.
    """
    telemetry = suspect.observation.telemetry
    by_xid: dict[str, list[WeighedEvidence]] = {}
    nvml = telemetry.find(gpu.node, LOST, **gpu.labels)
    is_watched = is_logged = kernel_log.is_read(telemetry, gpu.node, suspect.onset_ns)
    if is_logged:
        labels_of_gpu = {"kind": "xid", "device": f"gpu{gpu.labels['gpu']}"}
        for labels, series in telemetry.all_of(gpu.node, kernel_log.EVENTS, **labels_of_gpu):
            points = kernel_log.from_zero(telemetry, gpu.node, series).points
            if labels["code"] in PROGRAM_XIDS:
                points = _without_other_processes(suspect, gpu, labels["code"], points)
            by_xid[labels["code"]] = [
                _weigh_xid(suspect, gpu, labels["code"], start, end)
                for start, end in _occurrences(points, math.inf)
            ]
    if nvml is not None and (nvml.latest_ns() or 0.0) >= suspect.onset_ns:
        is_watched = True
        watched_from_ns = nvml.points[0][0]
        for labels, series in telemetry.all_of(gpu.node, XIDS, **gpu.labels):
            is_in_log = by_xid.keys() | (PROGRAM_XIDS if is_logged else set())
            if labels["xid"] not in is_in_log:
                occurrences = _occurrences(series.points, watched_from_ns)
                by_xid[labels["xid"]] = [
                    _weigh_xid(suspect, gpu, labels["xid"], start, end)
                    for start, end in occurrences
                ]
    weighed = [each for occurrences in by_xid.values() for each in occurrences]
    if weighed:
        return max(weighed, key=lambda each: each.weight)
    no_xid = Evidence(f"{gpu.name}: no XID", XIDS)
    return (
        WeighedEvidence(GPU_XID, weighing.strength_weight(0.0), (no_xid,)) if is_watched else None
    )


def _without_other_processes(
    suspect: Suspect, gpu: MeasuredDevice, code: str, points: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return the counts less those of XIDs that name a process that is not the suspect's."""
    own = {f"{suspect.generation.job}/{rank}" for rank in suspect.ranks}
    labels_of_gpu = {"code": code, "device": f"gpu{gpu.labels['gpu']}"}
    others = [
        series.points
        for labels, series in suspect.observation.telemetry.all_of(
            gpu.node, metric_names.KERNEL_PROCESS_XIDS_TOTAL, **labels_of_gpu
        )
        if labels.get("owner") not in own
    ]
    return [
        (at_ns, count - sum(_value_at(other, at_ns) for other in others)) for at_ns, count in points
    ]


def _value_at(points: list[tuple[float, float]], at_ns: float) -> float:
    return max((value for time_ns, value in points if time_ns <= at_ns), default=0.0)


def _occurrences(
    points: list[tuple[float, float]], watched_from_ns: float
) -> list[tuple[float, float]]:
    """Return (last sample before, first sample after) of each XID while the GPU was watched."""
    found = []
    first_ns, count = points[0]
    if first_ns > watched_from_ns and count > 0:
        found.append((first_ns, first_ns))
    for (before_ns, before), (after_ns, after) in pairwise(points):
        if after > before:
            found.append((before_ns, after_ns))
    return found


def _meaning(suspect: Suspect, node: str, xid: str) -> str | None:
    """Return the meaning from the agent, which has the complete catalog, or from the table here."""
    for labels, _ in suspect.observation.telemetry.all_of(node, XID_INFO, xid=xid):
        return labels.get("meaning")
    return _MEANINGS.get(xid)


def _weigh_xid(
    suspect: Suspect, device: MeasuredDevice, xid: str, start_ns: float, end_ns: float
) -> WeighedEvidence:
    distance_seconds = (
        0.0
        if start_ns <= suspect.onset_ns <= end_ns
        else min((start_ns - suspect.onset_ns, end_ns - suspect.onset_ns), key=abs) / 1e9
    )
    weight = weighing.strength_weight(4.0 if xid not in PROGRAM_XIDS else 2.0)
    weight += weighing.time_weight(abs(distance_seconds), suspect.tolerance_seconds)
    meaning = _meaning(suspect, device.node, xid)
    explained = f" ({meaning})" if meaning else ""
    when = "when"
    if abs(distance_seconds) > suspect.tolerance_seconds:
        order = "before" if distance_seconds < 0 else "after"
        when = f"{abs(distance_seconds):.0f} s {order}"
    text = f"{device.name} reported XID {xid}{explained} {when} the problem began"
    return WeighedEvidence(GPU_XID, weight, (Evidence(text, XIDS, float(xid)),))
