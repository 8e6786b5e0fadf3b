"""Disks: busy time, tasks that wait for I/O, free space."""

from __future__ import annotations

from paceline_server.detect.causes.catalog import DISK_FULL, SLOW_DISK
from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import (
    Symptom,
    WeighedEvidence,
    combine,
    stalled,
    weigh_symptoms,
)
from paceline_server.detect.causes.timeline import rates
from paceline_server.detect.finding import Evidence
from paceline_server.detect.kinds import SLOW_DATA, STRAGGLER
from paceline_server.percent import percent
from paceline_wire import metric_names

SYMPTOMS = (
    Symptom(
        SLOW_DISK, metric_names.PRESSURE_IO_WAITING_SECONDS_TOTAL, Scope.NODE,
        "share of time in which tasks wait for I/O", "%", "rate", 0.08,
        relative_tolerance=0.5, normal=0.05, predicts=stalled,
    ),
    Symptom(
        SLOW_DISK, metric_names.DISK_IO_TIME_SECONDS_TOTAL, Scope.DEVICE,
        "share of time with I/O in flight", "%", "rate", 0.2, relative_tolerance=0.2, normal=0.5,
    ),
    Symptom(
        SLOW_DISK, metric_names.DISK_IO_TIME_WEIGHTED_SECONDS_TOTAL, Scope.DEVICE,
        "number of requests in flight", "", "rate", 1.0, relative_tolerance=1.0, normal=4.0,
    ),
)  # fmt: skip
_AVAILABLE = metric_names.FILESYSTEM_AVAIL_BYTES
_FULL_SHARE = 0.01
_PAGE_BYTES = 4096.0  # who transfers less per second uses no disk
# Metrics that show whether the ranks use a disk, and the sentence if they do not.
_USES = {
    SLOW_DATA.name: (
        (metric_names.RANK_READ_BYTES_TOTAL,),
        "the processes of {} and their loader workers read nothing from a disk",
    ),
    STRAGGLER.name: (
        (metric_names.RANK_READ_BYTES_TOTAL, metric_names.RANK_PROCESS_WRITTEN_BYTES_TOTAL),
        "the processes of {} read nothing from a disk and write nothing to it",
    ),
}


def check(suspect: Suspect) -> list[WeighedEvidence]:
    return [*_slow_disk(suspect), *_free_space(suspect)]


def _slow_disk(suspect: Suspect) -> list[WeighedEvidence]:
    """Weigh the disks, unless only others use them: other programs, or other ranks of the node.

    Waits for I/O count in any case: a remote file system need not count what a process reads.
    """
    unused = _uses_no_disk(suspect)
    if unused is None:
        return weigh_symptoms(suspect, SYMPTOMS)
    waits = [symptom for symptom in SYMPTOMS if symptom.scope is Scope.NODE]
    return [combine(SLOW_DISK, [unused, *weigh_symptoms(suspect, waits)])]


def _uses_no_disk(suspect: Suspect) -> WeighedEvidence | None:
    """Return that against a slow disk; None if a rank uses a disk, or is not measured."""
    if suspect.kind not in _USES:
        return None
    metrics, text = _USES[suspect.kind]
    most = 0.0
    for metric in metrics:
        for device in suspect.devices(Scope.RANK, metric):
            series = suspect.series(metric, device)
            rate = None if series is None else rates(series).now(suspect.onset_ns)
            if rate is None or rate >= _PAGE_BYTES:
                return None
            most = max(most, rate)
    who = suspect.node if suspect.rank is None else f"rank {suspect.rank}"
    return WeighedEvidence(SLOW_DISK, -1.5, (Evidence(text.format(who), metrics[0], most),))


def _free_space(suspect: Suspect) -> list[WeighedEvidence]:
    telemetry, node = suspect.observation.telemetry, suspect.node
    results = []
    for labels, series in telemetry.all_of(node, _AVAILABLE):
        free = series.latest()
        size = telemetry.latest(node, metric_names.FILESYSTEM_SIZE_BYTES, **labels)
        is_image = telemetry.latest(node, metric_names.FILESYSTEM_READONLY, **labels) == 1
        if free is None or not size or is_image:  # an image never has free space
            continue
        share = free / size
        text = f"{labels.get('mountpoint', '?')} of {node} has {percent(share)} of its space free"
        evidence = (Evidence(text, _AVAILABLE, free, size),)
        results.append(WeighedEvidence(DISK_FULL, 2.5 if share < _FULL_SHARE else -1.5, evidence))
    return [max(results, key=lambda each: each.weight)] if results else []
