"""XIDs, a GPU that no longer answers, and NVLinks."""

from __future__ import annotations

import math
from itertools import pairwise

from paceline_server.detect.causes import weighing
from paceline_server.detect.causes.checks import kernel_log
from paceline_server.detect.causes.suspect import MeasuredDevice, Scope, Suspect
from paceline_server.detect.causes.symptom import MetricObservation, Symptom, looks_at
from paceline_server.detect.finding import Evidence

XIDS = "DCGM_EXP_XID_ERRORS_COUNT"
LOST = "paceline_gpu_lost"
XID_INFO = "paceline_kernel_xid_info"
XID_CAUSE = "GPU error (XID)"
# NVIDIA's XID catalogue: a kernel's own fault, and the clean-up after a process that died.
_OF_THE_PROGRAM = frozenset({"13", "31", "43", "45"})
_NAMES = {
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
    Symptom("GPU lost", LOST, Scope.GPU, "lost state", "flag", "level", 0.2, normal=0.0),
    Symptom(
        "GPU hung", "paceline_gpu_hung", Scope.GPU, "hung state", "flag", "level", 0.2, normal=0.0
    ),
    Symptom(
        "NVLink errors", "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", Scope.GPU,
        "NVLink CRC errors", "", "events", 20.0,
    ),
    Symptom(
        "NVLink errors", "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", Scope.GPU,
        "NVLink replays", "", "events", 5.0,
    ),
    Symptom(
        "NVLink errors", "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", Scope.GPU,
        "NVLink recoveries", "", "events", 0.5,
    ),
    Symptom(
        "NVLink errors", "paceline_gpu_nvlink_active_links", Scope.GPU,
        "number of active NVLinks", "", "level", 0.25, rises=False,
    ),
)  # fmt: skip


def check(suspect: Suspect) -> list[MetricObservation]:
    looks = looks_at(suspect, SYMPTOMS)
    told = [each for place in suspect.places(Scope.GPU, XIDS) if (each := _xids(suspect, place))]
    return [*looks, max(told, key=lambda each: each.weight)] if told else looks


def _xids(suspect: Suspect, place: MeasuredDevice) -> MetricObservation | None:
    """Of a GPU that the kernel's log and NVML both tell of, each code counts once.

    An XID's series begins with its first occurrence: so nothing before it means none.
    """
    telemetry = suspect.seen.telemetry
    looks: dict[str, list[MetricObservation]] = {}
    answering = telemetry.find(place.node, LOST, **place.labels)
    is_watched = kernel_log.is_read(telemetry, place.node, suspect.onset_ns)
    if is_watched:
        device = {"kind": "xid", "device": f"gpu{place.labels['gpu']}"}
        for labels, series in telemetry.all_of(place.node, kernel_log.EVENTS, **device):
            points = kernel_log.from_nothing(telemetry, place.node, series).points
            looks[labels["code"]] = [
                _look(suspect, place, labels["code"], start, end)
                for start, end in _moments(points, math.inf)
            ]
    if answering is not None and (answering.latest_ns() or 0.0) >= suspect.onset_ns:
        is_watched = True
        heard_from_ns = answering.points[0][0]
        for labels, series in telemetry.all_of(place.node, XIDS, **place.labels):
            if labels["xid"] not in looks:
                moments = _moments(series.points, heard_from_ns)
                looks[labels["xid"]] = [
                    _look(suspect, place, labels["xid"], start, end) for start, end in moments
                ]
    told = [each for some in looks.values() for each in some]
    if told:
        return max(told, key=lambda each: each.weight)
    none = Evidence(f"{place.name}: no XID", XIDS)
    return MetricObservation(XID_CAUSE, weighing.of_strength(0.0), (none,)) if is_watched else None


def _moments(points: list[tuple[float, float]], heard_from_ns: float) -> list[tuple[float, float]]:
    """(last sample without, first with) of each that came while the GPU was watched."""
    found = []
    first_ns, count = points[0]
    if first_ns > heard_from_ns and count > 0:
        found.append((first_ns, first_ns))
    for (before_ns, before), (after_ns, after) in pairwise(points):
        if after > before:
            found.append((before_ns, after_ns))
    return found


def _meaning(suspect: Suspect, node: str, xid: str) -> str | None:
    """As the node's agent knows it, which has the whole catalogue."""
    for labels, _ in suspect.seen.telemetry.all_of(node, XID_INFO, xid=xid):
        return labels.get("meaning")
    return _NAMES.get(xid)


def _look(
    suspect: Suspect, place: MeasuredDevice, xid: str, start_ns: float, end_ns: float
) -> MetricObservation:
    away = (
        0.0
        if start_ns <= suspect.onset_ns <= end_ns
        else min((start_ns - suspect.onset_ns, end_ns - suspect.onset_ns), key=abs) / 1e9
    )
    weight = weighing.of_strength(4.0 if xid not in _OF_THE_PROGRAM else 2.0)
    weight += weighing.of_time(abs(away), suspect.tolerance_seconds)
    meaning = _meaning(suspect, place.node, xid)
    name = f" ({meaning})" if meaning else ""
    when = (
        "as"
        if abs(away) <= suspect.tolerance_seconds
        else f"{abs(away):.0f} s " + ("before" if away < 0 else "after")
    )
    text = f"{place.name} reported XID {xid}{name} {when} the trouble began"
    return MetricObservation(XID_CAUSE, weight, (Evidence(text, XIDS, float(xid)),))
