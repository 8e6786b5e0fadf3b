"""Whether the kernel's OOM killer ended a rank, by the kernel logs and the memory of its node."""

from __future__ import annotations

import re
import signal
from collections import deque

from paceline_server.detect.finding import Evidence
from paceline_server.detect.observation import Observation, ReportedDeviceEvent, ReportedExit
from paceline_server.detect.raised_error import LOADER_WORKERS
from paceline_server.detect.telemetry import MetricSeries
from paceline_wire import metric_names
from paceline_wire.batch import RankExited

_KILLED = re.compile(r"Killed process (\d+)\b")
KILLS = metric_names.RANK_KERNEL_EVENTS_TOTAL
KERNEL_LOG_READ = metric_names.KERNEL_LOG_LOST_TOTAL  # sent with each sweep of the log
_LOG_IS_READ_NS = 5_000_000_000
_KILL_BEFORE_EXIT_NS = 30_000_000_000  # tearing down a large process takes time
_MAX_KILLS_STORED = 64
_MAX_QUOTE_LENGTH = 200


class OomKills:
    """The newest kills by the OOM killers of all nodes; the agents read them in the kernel logs."""

    def __init__(self) -> None:
        self._newest: deque[ReportedDeviceEvent] = deque(maxlen=_MAX_KILLS_STORED)

    def add(self, observation: Observation) -> None:
        self._newest.extend(
            reported for reported in observation.device_events if reported.event.kind == "oom_kill"
        )

    def find(self, culprit: ReportedExit, observation: Observation) -> Evidence | None:
        """Return evidence that the OOM killer ended this process, or a worker of it."""
        event = culprit.event
        for kill in self._newest:
            if kill.node == culprit.node and _concerns(kill.event.detail, event):
                text = f"kernel log of {kill.node}: {kill.event.detail[:_MAX_QUOTE_LENGTH]}"
                return Evidence(text, KILLS)
        if event.signal != signal.SIGKILL:
            return None
        labels = {"job": event.job, "rank": str(event.rank), "kind": "oom_kill"}
        series = observation.telemetry.find(culprit.node, KILLS, **labels)
        since_ns = culprit.time_ns - _KILL_BEFORE_EXIT_NS
        if series is None or (kills := _increase_since(series, since_ns)) <= 0:
            return None
        text = f"the OOM killer of {culprit.node} killed rank {event.rank}"
        return Evidence(text, KILLS, kills, 0.0)

    def may_arrive(
        self, culprit: ReportedExit, observation: Observation, wait_seconds: float
    ) -> bool:
        """Return whether the agent reads the kernel log but has not yet sent the second of the
        exit."""
        if culprit.event.signal != signal.SIGKILL or self.find(culprit, observation) is not None:
            return False
        read = observation.telemetry.find(culprit.node, KERNEL_LOG_READ)
        if read is None or observation.now_ns >= culprit.received_ns + int(wait_seconds * 1e9):
            return False
        read_ns = read.latest_ns() or 0.0
        return culprit.time_ns - _LOG_IS_READ_NS < read_ns < culprit.time_ns


def memory_evidence(
    culprit: ReportedExit, observation: Observation, *, is_sure: bool
) -> list[Evidence]:
    """Return evidence that memory was nearly exhausted when SIGKILL ended the rank, if it was."""
    if culprit.event.signal != signal.SIGKILL:
        return []
    name = metric_names.MEMORY_MEMAVAILABLE_BYTES
    free = observation.telemetry.latest(culprit.node, name)
    total = observation.telemetry.latest(culprit.node, metric_names.MEMORY_MEMTOTAL_BYTES)
    if free is None or not total or free >= 0.05 * total:
        return []
    text = f"{culprit.node} had only {free / 2**20:,.0f} MiB of memory free"
    text += "" if is_sure else ": the OOM killer may have killed it"
    return [Evidence(text, name, free, total)]


def _concerns(kill: str, event: RankExited) -> bool:
    """Return whether the killed process is the rank, or a data loader worker named at the end of
    its log."""
    if event.signal == signal.SIGKILL and f"[rank {event.rank} of {event.job}]" in kill:
        return True
    found = _KILLED.search(kill)
    if found is None:
        return False
    if event.signal == signal.SIGKILL:
        return int(found[1]) == event.pid
    return any(
        found[1] in named[1].split(", ") for named in LOADER_WORKERS.finditer(event.log_tail)
    )


def _increase_since(series: MetricSeries, since_ns: int) -> float:
    """Return the increase of a counter; a series that starts later starts at zero."""
    before = [value for at, value in series.points if at < since_ns]
    return (series.latest() or 0.0) - (before[-1] if before else 0.0)
