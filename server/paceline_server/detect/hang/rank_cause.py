"""The cause of one blocked rank: its process state, else the operation it is in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paceline_server.detect.causes.catalog import PROCESS_GONE, PROCESS_STOPPED, UNKNOWN
from paceline_server.detect.finding import Evidence, Side
from paceline_server.detect.hang.culprit import launched_by_all
from paceline_server.detect.hang.operation_text import operation_text, section_name
from paceline_server.detect.hang.wait_for_graph import innermost_op
from paceline_server.detect.observation import Generation, LiveRank, Observation
from paceline_server.detect.rank_list import ranks_text
from paceline_server.detect.telemetry import MetricSeries
from paceline_server.percent import percent
from paceline_wire import metric_names
from paceline_wire.ring import StateView
from paceline_wire.spans import COMPUTE_OPS, SECTION_BASE, Op, op_name

# States of a process in /proc/PID/stat; None: there is no such process.
STOPPED_STATES = ("T", "t")
GONE_STATES = (None, "Z", "X")
BUSY_CPU_SHARE = 0.5
BUSY_GPU_PERCENT = 95.0
IDLE_GPU_PERCENT = 5.0
_MAX_OPERATIONS_SHOWN = 8
UNINTERRUPTIBLE_IO = "blocked in uninterruptible I/O"
DEVICE_WAIT = "waits for its GPU"
_IN_DEVICE = "stuck in device"
# Operations in which a script waits for its GPU: between operations it reads a result, as
# `loss.item()` does, and the optimizer reads the scale of the gradients.
_READING_OPS = frozenset({Op.STEP, Op.OPTIMIZER})
# A time slice of a GPU that several processes use. A process without work uses nothing.
_LEAST_OWN_RATIO = 0.02
# Work that was launched before ends within a fraction of the time after which a rank is hung.
_MEASURED_SHARE = 0.6
_LEAST_MEASURED_NS = 1_000_000_000
OWN_UTILIZATION = metric_names.RANK_GPU_UTILIZATION_RATIO
OTHER_PROCESSES = metric_names.RANK_GPU_OTHER_PROCESSES


def operation_of(rank: int, view: StateView, observation: Observation) -> str:
    """Return the innermost operation of the rank as text."""
    if not view.frames:
        return "no operation"
    return operation_text(rank, view.frames[-1], observation.groups, observation.sections)


def process_cause(live: LiveRank) -> tuple[str, list[Evidence]] | None:
    """Return the cause if the process cannot run; None if it is alive and may run."""
    state = live.state.process_state if live.state else None
    evidence = [Evidence(f"its process state is {state or 'gone'}")]
    if state in STOPPED_STATES:
        return PROCESS_STOPPED, evidence
    if state == "D":
        return UNINTERRUPTIBLE_IO, evidence
    return (PROCESS_GONE, evidence) if state in GONE_STATES else None


def side_of(cause: str) -> Side:
    """Return the side that the cause of a single rank names."""
    return "device" if cause == DEVICE_WAIT or cause.startswith(_IN_DEVICE) else "host"


def host_cause(
    live: LiveRank,
    observation: Observation,
    generation: Generation,
    views: Mapping[int, StateView],
) -> tuple[str, list[Evidence]]:
    """Return the operation that a culprit is stuck in: on the host, or waiting for its device.

    Args:
        live: The culprit, which waits for no rank.
        observation: The current tick.
        generation: Placement of the ranks.
        views: State pages of all ranks.
    """
    process = process_cause(live)
    if process is not None or live.state is None:
        return process or (UNKNOWN, [])
    view = live.state.view
    evidence = cpu_evidence(live)
    evidence.append(
        Evidence(
            f"it has been in {operation_of(live.rank, view, observation)} without progress for "
            f"{live.apparently_frozen_seconds:.1f} s"
        )
    )
    if innermost_op(view) in _READING_OPS and launched_by_all(live.rank, views, observation.groups):
        busy, is_own_work = _busy_device(live, observation, generation)
        evidence += [busy] if busy is not None else []
        if is_own_work:
            return DEVICE_WAIT, evidence
    return _operation_cause(live, view, observation, generation), evidence


def _operation_cause(
    live: LiveRank, view: StateView, observation: Observation, generation: Generation
) -> str:
    rank, op = live.rank, innermost_op(view)
    if op >= SECTION_BASE:
        return f"stuck in host code: {section_name(rank, op, observation.sections)}"
    if op == Op.DATA_WAIT:
        return "stuck in data loading"
    if op == Op.CHECKPOINT:
        return "stuck in checkpoint"
    if op in COMPUTE_OPS:
        gpu_percent = gpu_utilization(rank, observation, generation)
        is_busy = gpu_percent is not None and gpu_percent >= BUSY_GPU_PERCENT
        used = _own_use(live, observation, generation)
        if used is not None:
            is_busy = used.lowest >= _LEAST_OWN_RATIO
        return f"{_IN_DEVICE if is_busy else 'stuck in host code'}: {op_name(op)}"
    if op == Op.STEP:
        return "stuck in host code: between operations"
    return f"stuck in {operation_of(rank, view, observation)}"


def cpu_evidence(live: LiveRank) -> list[Evidence]:
    """Return whether the process uses a CPU; empty if that is not known."""
    share = live.cpu_share_while_frozen
    if share is None:
        return []
    activity = "is busy" if share >= BUSY_CPU_SHARE else "sleeps"
    return [Evidence(f"its process {activity} ({percent(share)} of a CPU)", "cpu_share", share)]


def _busy_device(
    live: LiveRank, observation: Observation, generation: Generation
) -> tuple[Evidence | None, bool]:
    """Return evidence that the rank's GPU is busy since it makes no progress, and whether with the
    rank's own work.

    On a GPU that several processes use, only the use of each process shows that. If the driver does
    not report it, nothing is concluded.
    """
    rank, telemetry = live.rank, observation.telemetry
    node, gpu = generation.node(rank), generation.gpus.get(rank)
    if node is None or gpu is None:
        return None, False
    used = _own_use(live, observation, generation)
    if used is not None:
        text = f"its process has used gpu{gpu} of {node} all the while ({percent(used.newest)})"
        is_own_work = used.lowest >= _LEAST_OWN_RATIO
        evidence = Evidence(text, OWN_UTILIZATION, used.newest, 0.0)
        return evidence if is_own_work else None, is_own_work
    used = _use_since(live, telemetry.find(node, metric_names.GPU_UTIL, gpu=str(gpu)), observation)
    if used is None or used.lowest < BUSY_GPU_PERCENT:
        return None, False
    others = telemetry.latest(node, OTHER_PROCESSES, job=generation.job, rank=str(rank))
    is_shared = bool(others) or _shares_gpu(rank, generation)
    text = f"gpu{gpu} of {node} has been busy all the while ({used.newest:.0f}%)"
    text += ", but other processes use it as well" if is_shared else ""
    return Evidence(text, metric_names.GPU_UTIL, used.newest, 0.0), not is_shared


class _Use(NamedTuple):
    """How much a GPU was used since the rank makes no progress."""

    lowest: float
    newest: float


def _own_use(live: LiveRank, observation: Observation, generation: Generation) -> _Use | None:
    """Return how much the rank's own process used a GPU that several processes use."""
    node = generation.node(live.rank)
    if node is None:
        return None
    labels = {"job": generation.job, "rank": str(live.rank)}
    series = observation.telemetry.find(node, OWN_UTILIZATION, **labels)
    return _use_since(live, series, observation)


def _use_since(
    live: LiveRank, series: MetricSeries | None, observation: Observation
) -> _Use | None:
    """Return the use; None if it was not measured for most of the time.

    Work that was launched before may keep the GPU busy at first.
    """
    points = [] if series is None else series.points
    since_ns = observation.now_ns - live.apparently_frozen_seconds * 1e9
    since = [(at_ns, value) for at_ns, value in points if at_ns > since_ns]
    measured_ns = _MEASURED_SHARE * (observation.now_ns - since_ns)
    if not since or since[-1][0] - since_ns < max(measured_ns, _LEAST_MEASURED_NS):
        return None
    return _Use(min(value for _, value in since), since[-1][1])


def _shares_gpu(rank: int, generation: Generation) -> bool:
    place = generation.node(rank), generation.gpus.get(rank)
    return any(
        other != rank and (generation.node(other), gpu) == place
        for other, gpu in generation.gpus.items()
    )


def gpu_utilization(rank: int, observation: Observation, generation: Generation) -> float | None:
    """Return the utilization of the rank's GPU in percent; None if it is not known."""
    node, gpu = generation.node(rank), generation.gpus.get(rank)
    if node is None or gpu is None:
        return None
    return observation.telemetry.latest(node, metric_names.GPU_UTIL, gpu=str(gpu))


def operation_evidence(views: Mapping[int, StateView], observation: Observation) -> list[Evidence]:
    """Return which ranks are in which operation, the smallest groups of ranks first."""
    by_operation: dict[str, list[int]] = {}
    for rank, view in sorted(views.items()):
        by_operation.setdefault(operation_of(rank, view, observation), []).append(rank)
    ordered = sorted(by_operation.items(), key=lambda item: (len(item[1]), item[1]))
    lines = [
        Evidence(f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} in {operation}")
        for operation, ranks in ordered[:_MAX_OPERATIONS_SHOWN]
    ]
    rest = sum(len(ranks) for _, ranks in ordered[_MAX_OPERATIONS_SHOWN:])
    return [*lines, Evidence(f"{rest} more ranks are in other operations")] if rest else lines
