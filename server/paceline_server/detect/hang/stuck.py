"""What one rank is stuck in: its process, its operation, its Python stack, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline_server.detect.causes.catalog import PROCESS_GONE, PROCESS_STOPPED
from paceline_server.detect.finding import Evidence
from paceline_server.detect.hang.operations import operation_text, section_name
from paceline_server.detect.hang.waiting import innermost_op
from paceline_server.detect.observation import Generation, LiveRank, Observation
from paceline_server.percent import percent
from paceline_wire.batch import RankStackTraces
from paceline_wire.ring import StateView
from paceline_wire.spans import COMPUTE_OPS, SECTION_BASE, Op, op_name
from paceline_wire.stacks import StackFrame, ThreadStack

STOPPED = ("T", "t")
GONE = (None, "Z", "X")
BUSY_CPU_SHARE = 0.5
BUSY_GPU = 95.0  # percent: the device is at work, whatever on
IDLE_GPU = 5.0
_MAIN = "MainThread"
_PLACES_TOLD = 8
_FRAMES_TOLD = 4
# So do our own wrappers, and what they wrap.
_WAITING_PACKAGES = ("paceline/", "torch/distributed/")
# Where the standard library waits on behalf of somebody: the caller says more.
_WAITING_MODULES = frozenset(
    {
        "connection.py",
        "popen_fork.py",
        "queue.py",
        "selectors.py",
        "socket.py",
        "ssl.py",
        "subprocess.py",
        "threading.py",
    }
)


def operation_of(rank: int, view: StateView, seen: Observation) -> str:
    if not view.frames:
        return "no operation"
    return operation_text(rank, view.frames[-1], seen.groups, seen.sections)


def process_cause(live: LiveRank) -> tuple[str, list[Evidence]] | None:
    """None: the process is alive and may run."""
    state = live.state.process_state if live.state else None
    evidence = [Evidence(f"its process state is {state or 'gone'}")]
    if state in STOPPED:
        return PROCESS_STOPPED, evidence
    if state == "D":
        return "blocked in uninterruptible I/O", evidence
    return (PROCESS_GONE, evidence) if state in GONE else None


def host_cause(
    live: LiveRank, seen: Observation, generation: Generation
) -> tuple[str, list[Evidence]]:
    """What a culprit on the host is stuck in."""
    stopped = process_cause(live)
    if stopped is not None or live.state is None:
        return stopped or ("unknown", [])
    view = live.state.view
    evidence = _cpu_evidence(live)
    evidence.append(
        Evidence(
            f"in {operation_of(live.rank, view, seen)} for "
            f"{live.apparently_frozen_seconds:.1f} s, no change since"
        )
    )
    return _operation_cause(live.rank, view, seen, generation), evidence


def _operation_cause(rank: int, view: StateView, seen: Observation, generation: Generation) -> str:
    op = innermost_op(view)
    if op >= SECTION_BASE:
        return f"stuck in host code: {section_name(rank, op, seen.sections)}"
    if op == Op.DATA_WAIT:
        return "stuck in data loading"
    if op == Op.CHECKPOINT:
        return "stuck in checkpoint"
    if op in COMPUTE_OPS:
        busy = gpu_utilization(rank, seen, generation)
        where = "device" if busy is not None and busy >= BUSY_GPU else "host code"
        return f"stuck in {where}: {op_name(op)}"
    if op == Op.STEP:
        return "stuck in host code: between operations"
    return f"stuck in {operation_of(rank, view, seen)}"


def python_cause(stacks: RankStackTraces, cause: str) -> str:
    """One thread that keeps all others from running explains whatever the main one is in."""
    holder = next((thread for thread in stacks.threads if thread.holds_gil), None)
    if holder is None or holder.name == _MAIN or not cause.startswith("stuck in"):
        return cause
    return f"GIL held by thread {holder.name}"


def _cpu_evidence(live: LiveRank) -> list[Evidence]:
    share = live.cpu_share_while_frozen
    if share is None:
        return []
    how = "spins on a CPU" if share >= BUSY_CPU_SHARE else "sleeps"
    return [Evidence(f"its process {how} ({percent(share)} of a CPU)", "cpu_share", share)]


def gpu_utilization(rank: int, seen: Observation, generation: Generation) -> float | None:
    """Percent; None: not known."""
    node, gpu = generation.node(rank), generation.gpus.get(rank)
    if node is None or gpu is None:
        return None
    return seen.telemetry.latest(node, "DCGM_FI_DEV_GPU_UTIL", gpu=str(gpu))


def standing_evidence(views: Mapping[int, StateView], seen: Observation) -> list[Evidence]:
    """Where each rank stands, those at the same place together, the fewest first."""
    places: dict[str, list[int]] = {}
    for rank, view in sorted(views.items()):
        places.setdefault(operation_of(rank, view, seen), []).append(rank)
    ordered = sorted(places.items(), key=lambda place: (len(place[1]), place[1]))
    told = [
        Evidence(f"{ranks_text(ranks)} {_is_in(ranks)} {place}")
        for place, ranks in ordered[:_PLACES_TOLD]
    ]
    rest = sum(len(ranks) for _, ranks in ordered[_PLACES_TOLD:])
    return [*told, Evidence(f"{rest} more ranks are elsewhere")] if rest else told


def _is_in(ranks: list[int]) -> str:
    return "is in" if len(ranks) == 1 else "are in"


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    ordered = sorted(set(ranks))
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(parts)}"


def stack_evidence(stacks: RankStackTraces) -> list[Evidence]:
    """Where the main thread is, and who holds the interpreter's lock."""
    if stacks.error is not None:
        return [Evidence(f"no Python stack of rank {stacks.rank}: {stacks.error}")]
    told = []
    main = _main_thread(stacks)
    if main is not None and main.frames:
        inner, *callers = main.frames[:_FRAMES_TOLD]
        called = f", called from {', '.join(map(str, callers))}" if callers else ""
        told.append(Evidence(f"{main.name} of rank {stacks.rank} is in {inner}{called}"))
    told += [
        Evidence(f"thread {thread.name} of rank {stacks.rank} holds the GIL in {thread.frames[0]}")
        for thread in stacks.threads
        if thread.holds_gil and thread.frames
    ]
    return told


def telling_frame(stacks: RankStackTraces) -> StackFrame | None:
    """The innermost frame of the main thread that is not merely a wait on somebody's behalf."""
    main = _main_thread(stacks)
    for frame in main.frames if main is not None else ():
        if frame.file.rpartition("/")[2] in _WAITING_MODULES:
            continue
        if not frame.file.startswith(_WAITING_PACKAGES):
            return frame
    return main.frames[0] if main is not None and main.frames else None


def _main_thread(stacks: RankStackTraces) -> ThreadStack | None:
    threads = stacks.threads
    return next((one for one in threads if one.name == _MAIN), threads[0] if threads else None)
