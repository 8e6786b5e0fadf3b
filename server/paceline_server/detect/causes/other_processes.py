"""Evidence that names the processes which compete with the ranks of a node for its CPUs."""

from __future__ import annotations

from collections.abc import Iterable

from paceline_server.detect.finding import Evidence
from paceline_server.detect.telemetry import Telemetry
from paceline_wire import metric_names

_LEAST_CPUS = 0.2
_MOST_SHOWN = 2
_RECENT_NS = 20_000_000_000  # an older value is that of a process which has ended or is idle


def other_processes(
    telemetry: Telemetry, nodes: Iterable[str], since_ns: int, now_ns: int
) -> list[Evidence]:
    """Return the busiest processes that belong to no rank, with the CPUs that they use.

    Args:
        telemetry: Measurements of all nodes.
        nodes: Nodes whose processes are compared.
        since_ns: Start of the time for which the typical use counts, on the server's clock.
        now_ns: The current time on the same clock.
    """
    found = []
    for node in nodes:
        for labels, series in telemetry.all_of(node, metric_names.OTHER_PROCESSES_CPUS):
            cpus, newest_ns = series.typical_since(since_ns), series.latest_ns()
            if cpus is None or newest_ns is None or newest_ns < now_ns - _RECENT_NS:
                continue
            if cpus >= _LEAST_CPUS:
                found.append((cpus, node, labels.get("command", "?")))
    found.sort(reverse=True)
    return [
        Evidence(
            f"`{command}`{_pid_text(telemetry, node, command)} of {node}, which belongs to no "
            f"rank, uses {cpus:.2g} CPUs",
            metric_names.OTHER_PROCESSES_CPUS,
            cpus,
        )
        for cpus, node, command in found[:_MOST_SHOWN]
    ]


def _pid_text(telemetry: Telemetry, node: str, command: str) -> str:
    pid = telemetry.latest(node, metric_names.OTHER_PROCESSES_PID, command=command)
    return "" if pid is None else f" (PID {pid:.0f})"
