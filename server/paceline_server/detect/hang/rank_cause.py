"""The cause of one blocked rank: its process state, else the operation it is in."""

from __future__ import annotations

from collections.abc import Mapping

from paceline_server.detect.causes.catalog import PROCESS_GONE, PROCESS_STOPPED, UNKNOWN
from paceline_server.detect.finding import Evidence
from paceline_server.detect.hang.operation_text import operation_text, section_name
from paceline_server.detect.hang.wait_for_graph import innermost_op
from paceline_server.detect.observation import Generation, LiveRank, Observation
from paceline_server.detect.rank_list import ranks_text
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


def host_cause(
    live: LiveRank, observation: Observation, generation: Generation
) -> tuple[str, list[Evidence]]:
    """Return the host operation that a culprit is stuck in."""
    process = process_cause(live)
    if process is not None or live.state is None:
        return process or (UNKNOWN, [])
    view = live.state.view
    evidence = _cpu_evidence(live)
    evidence.append(
        Evidence(
            f"it has been in {operation_of(live.rank, view, observation)} without progress for "
            f"{live.apparently_frozen_seconds:.1f} s"
        )
    )
    return _operation_cause(live.rank, view, observation, generation), evidence


def _operation_cause(
    rank: int, view: StateView, observation: Observation, generation: Generation
) -> str:
    op = innermost_op(view)
    if op >= SECTION_BASE:
        return f"stuck in host code: {section_name(rank, op, observation.sections)}"
    if op == Op.DATA_WAIT:
        return "stuck in data loading"
    if op == Op.CHECKPOINT:
        return "stuck in checkpoint"
    if op in COMPUTE_OPS:
        gpu_percent = gpu_utilization(rank, observation, generation)
        is_busy = gpu_percent is not None and gpu_percent >= BUSY_GPU_PERCENT
        return f"stuck in {'device' if is_busy else 'host code'}: {op_name(op)}"
    if op == Op.STEP:
        return "stuck in host code: between operations"
    return f"stuck in {operation_of(rank, view, observation)}"


def _cpu_evidence(live: LiveRank) -> list[Evidence]:
    share = live.cpu_share_while_frozen
    if share is None:
        return []
    activity = "is busy" if share >= BUSY_CPU_SHARE else "sleeps"
    return [Evidence(f"its process {activity} ({percent(share)} of a CPU)", "cpu_share", share)]


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
