"""The public functions of `paceline`. Errors of Paceline never reach the training script.

A process has at most one `Session`, between `init` and `finish`. Each public function uses it, and
does nothing without one. The flow of a timed step:

    steps()     loop.py: step boundaries        ->  recorder.py, writer/: records in the ring
    section()   sections.py, device.py          ->
    all_reduce  collectives/: torch's operators  ->
"""

from __future__ import annotations

import os
import sys
import threading
from _thread import get_ident
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial, wraps
from operator import index
from time import sleep
from types import FrameType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakMethod

from msgspec.structs import replace

from paceline import awaited_restart, fatal_signals, tracer
from paceline.collectives import coverage
from paceline.collectives.native import NativeRecorder, recorder_of_process_groups
from paceline.device import on_device
from paceline.environment import (
    AXES,
    counts_flops,
    given_flops,
    has_place,
    identify,
    is_descendant_of_writer,
    launched_world_size,
    locate_rank,
    may_be_started_again,
    read_rank_environment,
    recorded_since_ns,
)
from paceline.loaders import count_steps
from paceline.loop import DataWait, Loop, Resumable, StepBlock
from paceline.recorder import Recorder
from paceline.schedules import ScheduleRecognizer
from paceline.sections import INERT
from paceline.session import OPTIMIZER, Session, log_once
from paceline.system_exit import SystemExitWatch, ending_of
from paceline.topology import TopologyRecognizer
from paceline.writer.interface import Timed
from paceline_autostart.exits import before_exit
from paceline_autostart.variable import ON, asked
from paceline_wire.ending import Ending, ending_path, write_ending
from paceline_wire.ring import (
    ACK_COMMAND,
    ACK_STATUS,
    ACK_STEP,
    CONTROL_COMMAND,
    CONTROL_KIND,
    CONTROL_TARGET_STEP,
    AckStatus,
    Control,
    ControlKind,
    Status,
    create,
)
from paceline_wire.spans import NONE_32, Op
from paceline_wire.topology import Topology

Loader = TypeVar("Loader", bound=Iterable[Any])
P = ParamSpec("P")

# Longer than a thread that waits for the GIL needs to get it, once the main thread sleeps.
_RELEASE_SECONDS = 0.03


def _nothing(*_: object) -> None:
    """Return None; replaces the recorder's methods while there is no session."""


_session: Session | None = None
_exit_watch: SystemExitWatch | None = None  # that `watch_exit` started
_has_stopped = False  # on a command to save and stop, which was answered with DONE
_owner = get_ident()
# The recorder's fast paths, as module globals: one lookup less per call.
_find_section: Callable[[object], Timed | None] = _nothing
_try_report: Callable[..., bool | None] = _nothing


def _set_session(session: Session | None) -> Session | None:
    """Make it the process's session. Return the previous one."""
    global _session, _find_section, _try_report
    previous, _session = _session, session
    _find_section = _nothing if session is None else session.recorder.find_section
    _try_report = _nothing if session is None else session.recorder.try_report
    return previous


# Start


def init(
    *,
    mesh: Any | None = None,
    dp_rank: int | None = None,
    pp_rank: int | None = None,
    tp_rank: int | None = None,
    topology: Topology | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Start recording this rank, if an agent runs on this node.

    Call it once per process, from the thread that trains, before or after `init_process_group`.
    It finds an agent of root or of this user in the default directory. `PACELINE_RING_DIRECTORY`
    selects another agent's rings; set to an empty value it turns the hooks off. It never raises: an
    error is logged and nothing is recorded. If `PACELINE=1` has started the recording already, this
    call adds its arguments.

    Args:
        mesh: a `DeviceMesh` whose dimensions are named pp, dp, tp, cp, ep (or as in
            `environment.AXES`), in any order. Without it, and without the arguments below, the
            topology is recognized from the meshes and groups that the script creates.
        dp_rank: data-parallel coordinate of this rank, where there is no mesh.
        pp_rank: pipeline stage of this rank, where there is no mesh.
        tp_rank: tensor-parallel coordinate of this rank, where there is no mesh.
        topology: sizes of the axes; default `PACELINE_DP`, `PACELINE_PP` and `PACELINE_TP`.
        metadata: anything to store with the run, such as the schedule or the model. Entries
            beyond 3,000 bytes are dropped with a warning.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("pp", "dp"))
        >>> paceline.init(mesh=mesh, metadata={"model": "7b"})
    """
    given = {"dp": dp_rank, "pp": pp_rank, "tp": tp_rank}
    if _session is not None:
        if not _session.is_automatic:
            log_once("twice", "paceline.init() was called again; the first call stands")
            return
        _session.is_automatic = False
        if not (mesh or topology or metadata) and all(each is None for each in given.values()):
            return
        _stop()  # `PACELINE=1` started it without these arguments
    try:
        _start(mesh, given, topology, metadata or {})
    except Exception as error:
        _stop()
        log_once("init", "paceline is off in this process: %s", error)
        return
    if _session is not None:
        _session.guard(_session.watch_optimizers)


def autostart(*, in_optimizer_step: bool = False) -> None:
    """Start recording as `init` does, unless the script has done so (see `paceline_autostart`).

    A later `init` of the script still counts. A thread that only created the process group, as Ray
    has one, is not the one that trains: recording starts again in the thread that calls this.
    """
    session = _session
    if session is not None and session.is_automatic and _owner != get_ident():
        if session.loop.has_begun or _in_backward():
            return
        _stop()
    if _session is not None:
        return
    _enter({"dp": None, "pp": None, "tp": None}, None, {})
    session = _session
    if session is not None and in_optimizer_step:
        session.recognition.probe = None  # this optimizer is torch's
    elif session is not None:
        session.guard(session.watch_optimizers)


def _in_backward() -> bool:
    """Return whether a backward pass calls this, on a GPU from a thread of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch._C._current_graph_task_id() != -1)


def knows_rank(world_size: int) -> bool:
    """Return whether `init_process_group` creates a group of all ranks, of which the environment
    identifies this one.

    Args:
        world_size: as the script passed it; not positive: it did not.
    """
    return has_place() and (world_size <= 0 or world_size == launched_world_size())


def join_process_group() -> Callable[[], None]:
    """Show that this rank is in `init_process_group`, where it waits for all others.

    Returns:
        What shows that the call has returned, or raised.
    """
    session = _session
    if session is None or session.recorder.status != Status.STARTING:
        return _nothing
    recorder = session.recorder
    session.guard(recorder.set_status, Status.JOINING)

    def leave() -> None:
        if recorder.status == Status.JOINING:
            recorder.set_status(Status.STARTING)

    return partial(session.guard, leave)


def start_if_asked() -> None:
    """Start recording if `PACELINE=1` asks for it, and neither the script nor torch has begun.

    A script that imports `paceline` is otherwise started at its first optimizer step.
    """
    if _session is not None or asked() not in ON:
        return
    try:
        autostart()
    except Exception as error:
        _stop()
        log_once("init", "paceline is off in this process: %s", error)


def _start(
    mesh: Any | None,
    given: Mapping[str, int | None],
    topology: Topology | None,
    metadata: Mapping[str, str],
) -> None:
    global _owner, _has_stopped
    _has_stopped = False
    environment = read_rank_environment()
    if environment is None:
        log_once("inert", "paceline is inert: no agent found on this node", info=True)
        return
    if is_descendant_of_writer(environment.ring_path):
        log_once("helper", "paceline is off in this process: its rank is recorded", info=True)
        return
    rank = environment.rank
    sizes, coordinates = locate_rank(rank, topology or environment.topology, mesh, given)
    identity = identify(environment, sizes, coordinates, metadata)
    if (since_ns := recorded_since_ns(environment.ring_path)) is not None:
        identity = replace(identity, started_ns=since_ns)
    ring = create(environment.ring_path, identity, environment.capacity)
    ending_path(ring.path).unlink(missing_ok=True)  # left by an earlier run
    _owner = get_ident()
    session = Session(Recorder(ring))
    session.arguments = (given, topology, metadata)
    session.given = frozenset(map(str, metadata))
    session.counts_flops = counts_flops()
    session.guard(session.describe_flops, given_flops())
    session.has_place = (
        mesh is not None
        or topology is not None
        or any(coordinate is not None for coordinate in given.values())
        or environment.topology.dp != environment.world_size
    )
    _topology.begin(environment.rank, environment.world_size)
    session.loop.at_start = partial(session.guard, _recognize, session, True)
    _set_session(session)
    session.recorder.watch_gc()
    session.guard(session.watch_exit)
    session.guard(_watch_thread)
    session.guard(fatal_signals.watch, ring.path)
    session.guard(tracer.allow_agent, environment.ring_directory)
    if (multiprocessing := sys.modules.get("multiprocessing.util")) is not None:
        multiprocessing.Finalize(None, _at_exit, exitpriority=0)
    session.guard(_wrap_torch, session, mesh)
    session.guard(_recognize, session, False)


def _watch_thread() -> None:
    """Have an exception that ends the thread that trains, if it is not the main one, end recording.

    The process may go on, and exit with 0.
    """
    report = threading.excepthook
    if threading.main_thread().ident == _owner or hasattr(report, "_paceline"):
        return

    @wraps(report)
    def excepthook(arguments: threading.ExceptHookArgs) -> object:
        error = arguments.exc_value
        if error is not None and not isinstance(error, SystemExit) and get_ident() == _owner:
            _fail(ending_of(error))
        return report(arguments)

    excepthook._paceline = True  # type: ignore[attr-defined]
    threading.excepthook = excepthook


def _find_session() -> Session | None:
    return _session


def _recognize(session: Session, at_first_step: bool) -> None:
    """Recognize the parallelism of what the script has created, and of what it will create."""
    if session.process_groups is not None:
        _schedules.recognize()
        _topology.recognize(all_are_known=at_first_step)


def torch_is_loaded() -> None:
    """Recognize steps and time torch.distributed also if the script imports torch after `init`."""
    session = _session
    if session is not None and not session.watches_torch:
        session.guard(_wrap_torch, session, None)
        session.guard(_recognize, session, False)
        session.guard(session.watch_optimizers)


def _wrap_torch(session: Session, mesh: Any | None) -> None:
    """Recognize steps and time torch.distributed, if they are loaded, as they are by then."""
    if sys.modules.get("torch") is not None:
        session.guard(session.watch_torch)
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    torch = sys.modules["torch"]
    reason = coverage.reason_of_release(torch.__version__)
    if reason is not None:
        session.report_coverage("none", reason)
        return
    try:
        recorder = recorder_of_process_groups(session.recorder)
        recorder.install()
    except Exception as error:
        session.report_coverage("none", coverage.reason_of_error(error))
        raise
    session.process_groups = recorder
    recorder.channels.on_new_group = partial(session.guard, session.report_backend)
    name = "C++ library" if isinstance(recorder, NativeRecorder) else "Python"
    session.report_coverage(name, reason_of_operators(torch))
    if torch.backends.cuda.is_built():
        session.loop.at_boundary = partial(session.guard, session.at_boundary)
    elif isinstance(recorder, NativeRecorder):
        session.loop.at_boundary = recorder.at_boundary
    if mesh is not None and mesh.mesh_dim_names:
        for dimension in mesh.mesh_dim_names:
            group = mesh.get_group(dimension)
            session.process_groups.channels.name(group, dimension, AXES.get(dimension))


# To list all operators of torch takes 5 ms, and each generation of a process asks.
reason_of_operators = cache(coverage.reason_of_operators)
_topology = TopologyRecognizer(_find_session)
_schedules = ScheduleRecognizer(_find_session, _topology.add_stage)

# Steps


state_of_script: Callable[[Callable[[int], object]], Resumable | None] = _nothing  # `requests.py`


def steps(
    loader: Loader,
    *,
    start: int | None = None,
    state: Resumable | None = None,
    save: Callable[[int], object] | None = None,
) -> Loader:
    """Iterate over `loader` and record each step.

    Each iteration is one step, unless optimizers of torch show that it is a microbatch: then a step
    lasts until the next batch after an optimizer step.

    Args:
        loader: yields batches.
        start: number of the first step; default: one after the last step of this process, or 0.
            Iterating over the result again continues the count.
        state: a `paceline.Checkpoints`, which is resumed before the first batch and saved between
            two batches; the steps are numbered from the resumed one on.
        save: saves a checkpoint by the script's own means, with the number of completed steps as
            its argument. On request of the server all ranks call it after the same step, and the
            loop ends if they are asked to stop. Not with `state`.

    Returns:
        An iterable of the loader's batches, with its length and attributes, also for setting them.
        For a `DataLoader` it is an instance of its class, which frameworks can create again.

    Raises:
        TypeError: `state` or `save` is something else.
        ValueError: both are given.

    Example:
        >>> for batch in paceline.steps(loader, start=checkpoint_step + 1):
        ...     train(batch)
    """
    try:
        start = None if start is None else _step_number(start)
    except Exception as error:
        log_once("start", "paceline.steps: counting from 0: %s", error)
        start = 0
    if state is not None and (isinstance(state, type) or not hasattr(state, "boundary")):
        raise TypeError(f"state must be a paceline.Checkpoints object, got {state!r}")
    if save is not None:
        if state is not None:
            raise ValueError("give state= or save=, not both: a paceline.Checkpoints saves itself")
        if not callable(save):
            raise TypeError(f"save must be a function of the number of steps, got {save!r}")
        state = state_of_script(save)
    return count_steps(loader, _loop, start, state)


def _step_number(step: int) -> int:
    step = index(step)
    if not 0 <= step < NONE_32:
        raise ValueError(f"a step is a whole number from 0 to {NONE_32 - 1}, got {step}")
    return step


def _loop() -> Loop | None:
    session = _session
    if session is None:
        return None
    if session.process_groups is None:
        session.guard(_wrap_torch, session, None)
    return session.loop


def mark_evaluations(marked: bool) -> None:
    """Set whether each evaluation is timed by `evaluate`, so that none must be recognized."""
    if _session is not None:
        _session.marks_evaluations = marked


def step_begin(step: int | None = None) -> None:
    """Begin an optimizer step; for callbacks. It ends at `step_end` or at the next `step_begin`.

    A wait for data since the previous step belongs to this one. Once the script marks its steps,
    iterations of `steps` and what Paceline recognizes by itself begin and end none. Inside a
    `with paceline.step():` block it does nothing.

    Args:
        step: number of the step; default: one after the last step of this process, or 0.

    Example:
        >>> def on_step_begin(self, args, state, control, **kwargs):
        ...     paceline.step_begin(state.global_step)
    """
    session = _session
    if session is not None and (loop := _loop()) is not None:
        session.guard(loop.begin, _number_or_none(step))


def step_end() -> None:
    """End the step that `step_begin` began, if one is in progress.

    Example:
        >>> def on_step_end(self, args, state, control, **kwargs):
        ...     paceline.step_end()
    """
    session = _session
    if session is not None:
        session.guard(session.loop.end)


def _number_or_none(step: int | None) -> int | None:
    """Return a valid number of a step; None, logged once, for anything else."""
    try:
        return None if step is None else _step_number(step)
    except Exception as error:
        log_once("number", "paceline.step: counting from the last step: %s", error)
        return None


# Timed blocks


def _uncompiled(make: Callable[P, Timed]) -> Callable[P, Timed]:
    """Have torch.compile trace a null context instead, as torch's own wrappers do.

    A context manager that it does not support would leave the whole frame uncompiled.
    """
    make._torchdynamo_inline = _null_context  # type: ignore[attr-defined]
    return make


def _null_context(*_: object, **__: object) -> nullcontext[None]:
    return nullcontext()


@_uncompiled
def step(step: int | None = None) -> Timed:
    """Mark one optimizer step of a loop that `paceline.steps` does not fit.

    A step inside another one is part of it. A step that an exception ends is not counted.

    Args:
        step: number of the step; default: one after the last step of this process, or 0.

    Returns:
        A context manager. It does nothing in a thread other than the training's.

    Example:
        >>> while not done():
        ...     with paceline.data_wait():
        ...         batch = queue.get()
        ...     with paceline.step():
        ...         train(batch)
    """
    loop = _loop()
    return INERT if loop is None else StepBlock(loop, _number_or_none(step))


@_uncompiled
def data_wait() -> Timed:
    """Time a wait for the next batch, in a step or before it.

    Returns:
        A context manager. It does nothing in a thread other than the training's, or around the
        iteration of `paceline.steps`, which measures its own wait.

    Example:
        >>> with paceline.data_wait():
        ...     batch = queue.get()
    """
    loop = _loop()
    return INERT if loop is None else DataWait(loop)


@_uncompiled
def section(name: str) -> Timed:
    """Time a part of the step under a name.

    Inside code that torch.compile compiles nothing is timed; around it, everything is.

    Args:
        name: one of a few fixed names, without counters; at most 4,096 are recorded.

    Returns:
        A context manager. It may nest, also in itself, and be used in any thread.

    Example:
        >>> with paceline.section("loss"):
        ...     loss = criterion(model(batch), target)
    """
    return _find_section(name) or _add_section(name)


def _add_section(name: str) -> Timed:
    session = _session
    if session is None:
        return INERT
    return session.add_section(name, in_owner_thread=get_ident() == _owner)


@_uncompiled
def pipelining(
    op: Op,
    *,
    microbatch: int | None = None,
    chunk: int = 0,
    peer: int | None = None,
    lengths: Sequence[int] | None = None,
) -> Timed:
    """Time one action of the pipeline schedule.

    A torch.distributed transfer inside a send or receive action is recorded as that action, with
    its microbatch and chunk.

    Args:
        op: `Op.FORWARD` to `Op.BACKWARD_RECV`.
        microbatch: number of the microbatch in the step, from 0.
        chunk: chunk of the model on this stage, from 0 (interleaved schedules).
        peer: global rank of the other end; needed only if something other than torch.distributed
            does the transfer.
        lengths: lengths of the microbatch's sequences, if they vary; for a forward or backward.
            Host numbers, not device tensors.

    Returns:
        A context manager. It does nothing in a thread other than the training's.

    Example:
        >>> with paceline.pipelining(Op.FORWARD, microbatch=3):
        ...     output = stage(activations)
    """
    session = _session
    if session is None or get_ident() != _owner:
        return INERT
    try:
        if lengths is not None:
            sized = session.sized_action(op, microbatch, chunk, lengths)
            if sized is not None:
                return sized
        return session.actions[op][microbatch, chunk, peer]
    except Exception:  # not created yet, or not valid
        session.annotates = True
        return session.add_action(session.actions, op, microbatch, chunk, peer)


@_uncompiled
def optimizer() -> Timed:
    """Time the optimizer's step; returns a context manager."""
    return _find_section(OPTIMIZER) or INERT


@_uncompiled
def checkpoint() -> Timed:
    """Time how long a checkpoint blocks the loop; returns a context manager."""
    return INERT if _session is None or get_ident() != _owner else _session.checkpoint


def framework_checkpoint() -> Timed:
    """Time a checkpoint that an adapter reports with `checkpoint_saved`; for adapters."""
    return INERT if _session is None or get_ident() != _owner else _session.framework_checkpoint


@_uncompiled
def evaluate() -> Timed:
    """Time an evaluation; returns a context manager."""
    return INERT if _session is None or get_ident() != _owner else _session.evaluate


# Names and values


def name_group(process_group: Any, name: str, axis: str | None = None) -> None:
    """Name a process group in the product's tables and verdicts.

    Args:
        process_group: as torch.distributed takes it; None is the default group.
        name: for example "expert".
        axis: "dp", "pp" or "tp" if the group spans that axis.
    """
    session = _session
    if session is None or session.process_groups is None:
        return
    session.guard(session.process_groups.channels.name, process_group, name, axis)


def report(
    loss: Any | None = None,
    gradient_norm: Any | None = None,
    evaluation_loss: Any | None = None,
) -> None:
    """Report values of the current step.

    A value on a device is copied without waiting for it and shown when it arrives.

    Args:
        loss: a number, or a tensor of one element.
        gradient_norm: like `loss`; shown together with it.
        evaluation_loss: like `loss`.

    Example:
        >>> paceline.report(loss=loss, gradient_norm=norm)
    """
    if not _try_report(loss, gradient_norm, evaluation_loss):
        _report(loss, gradient_norm, evaluation_loss)


def _report(*values: Any) -> None:
    session = _session
    if session is None or get_ident() != _owner:
        return
    try:
        if session.timer is not None and any(map(on_device, values)):
            session.timer.report(values)
        else:
            session.recorder.report(session.recorder.step, *values)
    except Exception as error:
        session.recorder.failures += 1
        log_once("report", "paceline.report failed: %s", error)


# Work of a step


def count(*, samples: int | None = None, tokens: int | None = None) -> None:
    """Count samples and tokens of the current step.

    Without it, they are counted from the shapes of the batches. From the first call on, only
    what is passed here counts.

    Args:
        samples: that this rank has processed since the last call.
        tokens: like `samples`. Ranks that share a batch (tensor, pipeline) pass the same number.

    Example:
        >>> for batch in packed_sequences():
        ...     paceline.count(samples=len(batch.lengths), tokens=sum(batch.lengths))
    """
    session = _session
    if session is not None and get_ident() == _owner:
        session.guard(session.count, samples, tokens)


def describe_model(
    *,
    flops_per_token: float | None = None,
    flops_per_sample: float | None = None,
    flops_per_step: float | None = None,
    peak_flops: float | None = None,
) -> None:
    """Give the numbers from which the model FLOPs utilization (MFU) is computed.

    One of the first three is enough; docs/efficiency.md has the formulas. All of them are for the
    whole model, forward and backward, without recomputation. The environment may give them too
    (`PACELINE_FLOPS_PER_TOKEN`, ...), or ask for a count of one step (`PACELINE_COUNT_FLOPS=1`).

    Args:
        flops_per_token: floating-point operations of the model per token.
        flops_per_sample: floating-point operations per sample.
        flops_per_step: floating-point operations of all ranks together in one step.
        peak_flops: floating-point operations per second of one device; default: from its name.

    Example:
        >>> paceline.describe_model(flops_per_token=6 * parameters)
    """
    session = _session
    if session is not None and get_ident() == _owner:
        given = {
            "flops_per_token": flops_per_token,
            "flops_per_sample": flops_per_sample,
            "flops_per_step": flops_per_step,
            "peak_flops": peak_flops,
        }
        known = {name: value for name, value in given.items() if value is not None}
        session.guard(session.describe_flops, known)


def expect_steps(total: int) -> None:
    """Report how many steps the whole training has; for adapters.

    A script passes `metadata={"total_steps": "10000"}` to `init`.
    """
    session = _session
    if session is not None and get_ident() == _owner and total > 0:
        session.guard(session.expect_steps, total)


def replicas_differ(mismatch: str) -> None:
    """Report replicas whose parameters differ, as JSON."""
    session = _session
    if session is not None and get_ident() == _owner:
        session.guard(session.replicas_differ, mismatch)


def describe_repair(*, roll_back: bool) -> None:
    """Report whether the script can go back to an earlier checkpoint on request."""
    session = _session
    if session is not None and get_ident() == _owner and roll_back:
        session.guard(session.can_roll_back)


# Commands and checkpoints

on_checkpoint: Callable[[bool], None] = _nothing  # set by `requests.py`
steps_of_framework: Callable[[], int | None] = _nothing  # completed ones; set by its adapter


def completed_steps() -> int | None:
    """Return how many steps are completed at this point; None before the first one."""
    session = _session
    if session is None:
        return None
    counted = steps_of_framework()
    return session.loop.completed_steps() if counted is None else recorded_step(counted)


def recorded_step(step: int) -> int:
    """Return the number under which a step is recorded that the script numbers itself."""
    return step if _session is None else step + _session.loop.offset


def training_begins(step: int) -> None:
    """Note that a training begins with this step; it may be the second one; for adapters."""
    if (loop := _loop()) is not None and _session is not None:
        _session.guard(loop.begin_training, step)


def given_step() -> int | None:
    """Return the number of the open step, if the script gave `steps` its numbers; for adapters."""
    loop = _loop()
    is_given = loop is not None and loop.is_open and loop.is_numbered
    return _session.recorder.step if is_given and _session is not None else None


def known_checkpoints() -> int:
    """Return how many checkpoints were reported, or recognized and may not be complete yet."""
    return 0 if _session is None else _session.saves.count


def forget_saves() -> None:
    """Have `wait_for_saves` consider only the saves from now on."""
    if _session is not None:
        _session.saves.forget_pending()


def wait_for_saves() -> bool:
    """Wait for the newest asynchronous save that was recognized. Return False if it failed."""
    return _session is None or _session.saves.wait()


def declare_abilities(checkpoint: bool, stop: bool) -> None:
    """Declare the commands that this process executes; its checkpoints are still recognized."""
    session = _session
    if session is not None:
        session.guard(session.recorder.declare, checkpoint, stop)


def declare(*, checkpoint: bool = False, stop: bool = False) -> None:
    """Declare the commands that this script executes when `pending` returns them.

    A planned repair asks for a checkpoint only if every rank has declared it. For other scripts it
    is proposed to a person, with the steps that it would cost.

    Args:
        checkpoint: the script saves a checkpoint on command (`ControlKind.CHECKPOINT`).
        stop: the script ends on command, after the checkpoint (`ControlKind.CHECKPOINT_AND_STOP`).

    Example:
        >>> paceline.declare(checkpoint=True, stop=True)
    """
    if _session is not None:
        _session.saves.are_reported |= bool(checkpoint)
        declare_abilities(checkpoint, stop)


def checkpoint_saved(step: int, path: str | os.PathLike[str] | None = None) -> None:
    """Report that a checkpoint is complete on storage: a restart can resume from it.

    What `torch.save` and `torch.distributed.checkpoint` save is recognized until the first call.

    Args:
        step: number of completed steps that it contains.
        path: where it is, to be shown with the job. Numbers in it may differ between ranks.

    Example:
        >>> paceline.checkpoint_saved(500, "/ckpt/step-500")
    """
    session = _session
    if session is not None:
        session.saves.are_reported = True
        session.saves.count += 1
        session.guard(session.checkpoint_saved, step)
        if path is not None and get_ident() == _owner:
            session.guard(session.saves.describe, path)
        session.guard(on_checkpoint, True)


def checkpoint_failed(reason: str) -> None:
    """Report that a checkpoint could not be saved. It becomes an incident with this reason.

    Args:
        reason: one line, such as "[Errno 28] No space left on device"; 128 bytes are kept.

    Example:
        >>> paceline.checkpoint_failed(str(error))
    """
    session = _session
    if session is not None:
        session.guard(session.recorder.checkpoint_failed, reason)
        session.guard(on_checkpoint, False)


def pending() -> Control | None:
    """Return the newest command for this rank without a final answer. Costs well under 1 µs.

    All ranks of a job must obey a command at the same step. `Checkpoints`, `should_checkpoint` and
    `should_stop` agree on it and answer by themselves; this is for a framework with an agreement of
    its own (docs/repair.md).

    Returns:
        The command, with `kind` (a `ControlKind`) and `target_step`, the first step to obey it at;
        None if no command is pending. A `CANCEL` withdraws the command before it: answer it with
        DONE.

    Example:
        >>> command = paceline.pending()
        >>> if command is not None and command.kind == ControlKind.CHECKPOINT:
        ...     save()
        ...     paceline.acknowledge(command.command_id, AckStatus.DONE, step)
    """
    session = _session
    if session is None:
        return None
    control = session.control
    command_id = control[CONTROL_COMMAND]
    if command_id == session.answered:
        return None
    command = session.command
    if command is None or command.command_id != command_id:
        command = session.command = Control(
            command_id, control[CONTROL_KIND], control[CONTROL_TARGET_STEP]
        )
    return command


def acknowledge(command_id: int, status: int, step: int) -> None:
    """Answer a command.

    The server goes ahead with a repair only if all ranks answered DONE with the same step.

    Args:
        command_id: id of the command that `pending` returned; it differs between nodes.
        status: an `AckStatus`: SEEN once the ranks have agreed on a step; DONE and FAILED are
            final, and `pending` no longer returns the command.
        step: number of completed steps: those in the checkpoint, or the agreed ones for SEEN.

    Example:
        >>> paceline.acknowledge(command.command_id, AckStatus.DONE, step)
    """
    global _has_stopped
    session = _session
    if session is None:
        return
    try:
        control = session.control
        control[ACK_STATUS] = status
        control[ACK_STEP] = step
        control[ACK_COMMAND] = command_id
        if status != AckStatus.SEEN:
            session.answered = command_id
        command = session.command
        if status == AckStatus.DONE and command is not None and command.command_id == command_id:
            _has_stopped = command.kind == ControlKind.CHECKPOINT_AND_STOP
    except Exception:
        session.recorder.failures += 1


def has_stopped_on_command() -> bool:
    """Return whether a command had this rank save and stop in this generation, and it has saved."""
    return _has_stopped


# End


def leave() -> Callable[[], None]:
    """End recording in this generation. Return what begins it in the next one."""
    session = _session
    if session is None:
        return _nothing
    session.guard(session.end, Status.STARTING)
    _stop()
    return partial(_enter, *session.arguments)


def _enter(
    given: Mapping[str, int | None], topology: Topology | None, metadata: Mapping[str, str]
) -> None:
    """Start recording with the arguments of the script, which may be given again."""
    try:
        _start(None, given, topology, metadata)
    except Exception as error:
        _stop()
        log_once("init", "paceline is off in this process: %s", error)
    if _session is not None:
        _session.is_automatic = True


def finish() -> None:
    """End recording: the training is over.

    It is also called at exit, where an uncaught exception ends the rank as `failed`.
    """
    session = _session
    if session is None:
        return
    session.guard(session.end, Status.FINISHED)
    _stop()


def fail(error: BaseException) -> None:
    """End recording: this exception ended the training. The agent reports its traceback."""
    _fail(ending_of(error))


def _fail(ending: Ending) -> None:
    session = _session
    if session is None:
        return
    session.guard(session.end, Status.FAILED)
    session.guard(write_ending, session.recorder.ring.path, ending)
    _stop()


def watch_exit(
    completed_steps: Callable[[], int | None], call: WeakMethod[Callable[[FrameType], object]]
) -> None:
    """Let `exits_with_error` know how the process ends also if nothing is recorded.

    Args:
        completed_steps: see `SystemExitWatch`.
        call: made with the calling frame when the main thread calls `sys.exit`.
    """
    global _exit_watch
    watch = None if _session is None else _session.exit_watch
    if watch is None:
        if _exit_watch is None:
            _exit_watch = SystemExitWatch(sys.stderr, completed_steps)
        watch, _exit_watch.completed_steps = _exit_watch, completed_steps
    watch.add(call)


def exits_with_error() -> bool:
    """Return whether a `SystemExit` ends this process with an error; known if it is watched."""
    if _session is not None and _session.exit_ending() is not None:
        return True
    return _exit_watch is not None and _exit_watch.ending is not None


def stopping() -> None:
    """Show that a signal arrived after which the script ends in good order. For its handler."""
    session = _session
    if session is not None:
        session.guard(session.recorder.set_status, Status.STOPPING)


def terminated(signal: int) -> None:
    """End recording: the script stops because this signal arrived, with an exit code of its own."""
    _fail(Ending(None, signal))


def _stop() -> None:
    """Return to inert. The ring file stays, because the agent reads it to its end."""
    session = _set_session(None)
    if session is None:
        return
    session.recorder.unwatch_gc()
    session.unwatch_torch()
    session.unwatch_exit()
    if session.process_groups is not None:
        session.process_groups.uninstall()


def _at_exit() -> None:
    """Finish as failed if an exception ends the process, and let threads of torch go on.

    A thread of gloo may still hold the tensors of the last collective. To release them it takes the
    GIL. If the interpreter ends before that, it ends the thread inside a destructor of C++, which
    aborts the process: so do some short trainings without Paceline.
    """
    session = _session
    _finish_at_exit()
    if session is not None and session.process_groups is not None:
        sleep(_RELEASE_SECONDS)


def _finish_at_exit() -> None:
    """Finish as failed if an exception ends the process.

    A child of multiprocessing runs no atexit; there the exception is still being handled.
    """
    error, ending = sys.exc_info()[1], None
    if not hasattr(sys, "ps1"):  # in an interactive shell the last error ended nothing
        error = getattr(sys, "last_value", error)
        ending = None if error is not None or _session is None else _session.exit_ending()
    if error is not None and not (isinstance(error, SystemExit) and not error.code):
        ending = ending_of(error)
    awaits_restart = ending is None and _has_stopped and may_be_started_again()
    if awaits_restart:
        awaited_restart.wait()
        ending = ending_of(SystemExit(awaited_restart.EXIT_CODE))
    if ending is not None:
        _fail(ending)
    finish()
    if awaits_restart:
        awaited_restart.end()


def _in_child() -> None:
    global _has_stopped
    _has_stopped = False
    session = _set_session(None)
    if session is not None:
        session.detach()


before_exit(_at_exit)
os.register_at_fork(after_in_child=_in_child)
