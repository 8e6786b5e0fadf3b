"""The public functions, and the edge past which no error of ours may go.

A process has at most one `Session`, between `init` and `finish`. Each public function asks for it
and does nothing where there is none.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from _thread import get_ident
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from numbers import Integral
from operator import index
from typing import Any, ParamSpec, TypeVar

from paceline.collectives.communication import Wrapped
from paceline.environment import AXES, identify, is_helper_of, place, read_surroundings
from paceline.loop import Loop, Steps
from paceline.recorder import Recorder
from paceline.writer import Pipelining, Section
from paceline.writer.device import (
    DevicePipelining,
    DeviceSection,
    DeviceTimer,
    DeviceTransfer,
    on_device,
)
from paceline.writer.sections import INERT, ElsewhereSection, StatusSection, Timed, Transfer
from paceline_wire.ring import (
    ACK_COMMAND,
    ACK_STATUS,
    ACK_STEP,
    CONTROL_COMMAND,
    CONTROL_KIND,
    CONTROL_TARGET_STEP,
    DEFINITIONS_BYTES,
    STATE_DEFINITIONS,
    AckStatus,
    Control,
    SectionDefinition,
    Status,
    create,
    section_op,
)
from paceline_wire.spans import COMPUTE_OPS, NONE_16, NONE_32, PIPELINE_TRANSFER_OPS, Op
from paceline_wire.topology import Topology

_log = logging.getLogger(__name__)

MAXIMUM_SECTIONS = 4096  # distinct names; more means that a name holds a counter
NAMES_BYTES = DEFINITIONS_BYTES * 3 // 4  # the rest of the definitions is for process groups
LONGEST_NAME = 200
MAXIMUM_ACTIONS = 1 << 14  # distinct (op, microbatch, chunk, peer)

LARGEST_SQUARES = 1 << 62  # a sum of squared lengths that a reader takes for one

OPTIMIZER = object()  # among the names of sections

Batch = TypeVar("Batch")
P = ParamSpec("P")
Actions = list[dict[tuple[int | None, int, int | None], Pipelining]]


class Session:
    """Everything that exists between `init` and `finish`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.control = recorder.ring.control
        self.timer: DeviceTimer | None = None
        self.loop = Loop(recorder)
        self.wrapped: Wrapped | None = None
        self.operations: dict[str, int] = {}
        # By op, then by place; an Op itself hashes slowly.
        self.actions: Actions = [{} for _ in range(Op.BACKWARD_RECV + 1)]
        self.sized: Actions = [{} for _ in range(Op.BACKWARD_RECV + 1)]  # that have lengths
        recorder.sections[OPTIMIZER] = Section(recorder, Op.OPTIMIZER)
        self.checkpoint = StatusSection(recorder, Op.CHECKPOINT, Status.CHECKPOINTING)
        self.evaluate = StatusSection(recorder, Op.EVALUATE, Status.EVALUATING)
        self.made = 0  # sections and actions
        self.command: Control | None = None
        self.answered = 0  # id of the last command with a final answer

    def operation(self, name: str) -> int | None:
        """The op of a section's name, defined in the ring at first sight; None: too many names."""
        op = self.operations.get(name)
        identifier, used = len(self.operations), self.recorder.state[STATE_DEFINITIONS]
        if op is None and identifier < MAXIMUM_SECTIONS and used < NAMES_BYTES:
            self.recorder.define(SectionDefinition(identifier, str(name)[:LONGEST_NAME]))
            op = self.operations[name] = section_op(identifier)
        return op

    def section(self, op: int) -> Section:
        if self.timer is not None:
            made: Section = DeviceSection(self.recorder, op, self.timer)
        else:
            made = Section(self.recorder, op)
        self.made += 1
        return made

    def action(self, op: int, microbatch: int | None, chunk: int, peer: int | None) -> Pipelining:
        place = (self.recorder, op, microbatch, chunk, peer)
        transfers = op in PIPELINE_TRANSFER_OPS
        if self.timer is not None:
            device = DeviceTransfer if transfers else DevicePipelining
            made: Pipelining = device(*place, self.timer)
        else:
            made = Transfer(*place) if transfers else Pipelining(*place)
        self.made += 1
        return made

    def at_boundary(self) -> None:
        """Before each step. The device is looked for until the training has set it up itself."""
        if self.timer is not None:
            self.timer.resolve()
        elif (cuda := sys.modules.get("torch.cuda")) is not None and cuda.is_initialized():
            self.timer = self.recorder.timer = DeviceTimer(cuda, self.recorder)
            for actions in (*self.actions, *self.sized):
                actions.clear()
            self.recorder.sections.clear()
            self.recorder.sections[OPTIMIZER] = self.section(Op.OPTIMIZER)

    def end(self, status: int) -> None:
        self.recorder.leave_loop()
        if self.timer is not None:
            self.timer.resolve()
        self.recorder.set_status(status)

    def detach(self) -> None:
        """In a forked child: the ring is the parent's."""
        self.recorder.detach()
        if self.wrapped is not None:
            self.wrapped.uninstall()


def _nothing(*_: object) -> None:
    """What is found, and done, at once while there is no session."""


_session: Session | None = None
_owner = get_ident()
# The short ways, of the session's recorder.
_known: Callable[[object], Timed | None] = _nothing
_report_here: Callable[..., bool | None] = _nothing
_said: set[str] = set()


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

    Looked for are those of root and of this user in the default place; `PACELINE_RING_DIRECTORY`
    names the rings of any other, and keeps all away where it is set and empty.

    Args:
        mesh: a `DeviceMesh` whose dimensions are named pp, dp, tp (or as `environment.AXES` says),
            in this order: the server takes ranks to lie so.
        dp_rank, pp_rank, tp_rank: this rank's coordinates, where there is no mesh.
        topology: sizes of the axes; default `PACELINE_DP`, `PACELINE_PP` and `PACELINE_TP`.
        metadata: anything worth keeping with the run: schedule, model, emulated kernels. What does
            not fit 3,000 bytes is left out.

    Call it once per process, from the thread that trains, before or after `init_process_group`.
    """
    if _session is not None:
        _say_once("twice", "paceline.init() was called again; the first call stands")
        return
    given = {"dp": dp_rank, "pp": pp_rank, "tp": tp_rank}
    try:
        _start(mesh, given, topology, metadata or {})
    except Exception as error:
        _stop()
        _say_once("init", "paceline is off in this process: %s", error)


def _start(
    mesh: Any | None,
    given: Mapping[str, int | None],
    topology: Topology | None,
    metadata: Mapping[str, str],
) -> None:
    global _owner
    surroundings = read_surroundings(os.environ)
    if surroundings is None:
        _say_once("inert", "paceline is inert: no agent found on this node", info=True)
        return
    if is_helper_of(surroundings.ring_path):
        _say_once("helper", "paceline is off in this process: its rank is watched", info=True)
        return
    rank = surroundings.rank
    sizes, coordinates = place(rank, topology or surroundings.topology, mesh, given)
    if rank < sizes.world_size and coordinates != sizes.coordinates(rank):
        _say_once(
            "layout",
            "paceline.init: rank %d is said to be at %s; ranks are taken to lie as in a mesh of "
            "(pp, dp, tp), and stages and peers will be named by that: %s",
            *(rank, coordinates, sizes.coordinates(rank)),
        )
    identity = identify(surroundings, sizes, coordinates, metadata)
    ring = create(surroundings.ring_path, identity, surroundings.capacity)
    _owner = get_ident()
    session = Session(Recorder(ring))
    _exchange(session)
    session.recorder.watch_gc()
    if (multiprocessing := sys.modules.get("multiprocessing.util")) is not None:
        multiprocessing.Finalize(None, _at_exit, exitpriority=0)
    _guard(session, _wrap_torch, session, mesh)


def _exchange(session: Session | None) -> Session | None:
    """Make it the process's. Returns the one before."""
    global _session, _known, _report_here
    before, _session = _session, session
    _known = _nothing if session is None else session.recorder.known
    _report_here = _nothing if session is None else session.recorder.report_here
    return before


def _wrap_torch(session: Session, mesh: Any | None) -> None:
    """Where torch is not loaded yet there is nothing to wrap: a training loop has loaded it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    session.wrapped = Wrapped(session.recorder)
    session.wrapped.install()
    if sys.modules["torch"].backends.cuda.is_built():
        session.loop.at_boundary = partial(_guard, session, session.at_boundary)
    if mesh is not None and mesh.mesh_dim_names:
        for dimension in mesh.mesh_dim_names:
            group = mesh.get_group(dimension)
            session.wrapped.channels.name(group, dimension, AXES.get(dimension))


def steps(loader: Iterable[Batch], *, start: int | None = None) -> Steps[Batch]:
    """Iterate over `loader`; each iteration is one optimizer step, numbered from `start`.

    By default the numbers go on where the previous loop of this process ended (0 at first); so do
    they when what this returns is iterated over again.
    """
    try:
        start = None if start is None else _whole("start", index(start), 0, NONE_32 - 1)
    except Exception as error:
        _say_once("start", "paceline.steps: counting from 0: %s", error)
        start = 0
    return Steps(loader, _loop, start)


def _loop() -> Loop | None:
    session = _session
    if session is None:
        return None
    if session.wrapped is None:
        _guard(session, _wrap_torch, session, None)
    return session.loop


def _uncompiled(make: Callable[P, Timed]) -> Callable[P, Timed]:
    """Have torch.compile trace what it knows in its place, as torch's own wrappers do.

    One manager that it does not know, and a whole frame stays uncompiled.
    """
    make._torchdynamo_inline = _null_context  # type: ignore[attr-defined]
    return make


def _null_context(*_: object, **__: object) -> nullcontext[None]:
    return nullcontext()


@_uncompiled
def section(name: str) -> Timed:
    """A context manager that times a part of the step under a name. Names are few and fixed.

    Within what torch.compile compiles nothing is timed; around it, all is.
    """
    return _known(name) or _new_section(name)


def _new_section(name: str) -> Timed:
    session = _session
    op = None if session is None else _operation(session, name)
    if session is None or op is None:
        return INERT
    if get_ident() != _owner:
        return ElsewhereSection(session.recorder, op)
    section = session.recorder.sections[name] = session.section(op)
    return section


def _operation(session: Session, name: str) -> int | None:
    """The edge: None, counted and said once, for a name that cannot be recorded."""
    try:
        op = session.operation(name)
    except Exception as error:
        session.recorder.failures += 1
        _say_once("name", "paceline.section(%r) is not recorded: %s", name, error)
        return None
    if op is None:
        known = len(session.operations)
        _say_once("names", "more than %d section names: the rest is not recorded", known)
    return op


@_uncompiled
def pipelining(
    op: Op,
    *,
    microbatch: int | None = None,
    chunk: int = 0,
    peer: int | None = None,
    lengths: Sequence[int] | None = None,
) -> Timed:
    """A context manager around one pipeline action: `Op.FORWARD` to `Op.BACKWARD_RECV`.

    torch.distributed transfers made inside a send or receive action are recorded as that action,
    with its microbatch and chunk; `peer` (a global rank) is needed only where something else
    transfers. `lengths`: of the microbatch's sequences, where they vary, for a forward or
    backward; numbers of the host, not of a device.
    """
    session = _session
    if session is None or get_ident() != _owner:
        return INERT
    try:
        if lengths is not None:
            return _sized_action(session, op, microbatch, chunk, lengths)
        return session.actions[op][microbatch, chunk, peer]
    except Exception:  # not there yet, or nothing that could be
        return _new_action(session, session.actions, op, microbatch, chunk, peer)


def _sized_action(
    session: Session, op: int, microbatch: int | None, chunk: int, lengths: Sequence[int]
) -> Timed:
    """The record's bytes and sequence, free in what is no communication, hold sum and squares.

    These actions are kept apart, so that one without lengths never shows those of another time.
    """
    try:
        tokens, squares = sum(lengths), sum(length * length for length in lengths)
        if op not in COMPUTE_OPS or not 0 <= tokens <= squares < LARGEST_SQUARES:
            raise ValueError(f"lengths are whole numbers of a forward or backward, got {lengths}")
        try:
            action: Timed = session.sized[op][microbatch, chunk, None]
        except KeyError:
            action = _new_action(session, session.sized, op, microbatch, chunk, None)
        if isinstance(action, Pipelining):
            action.size, action.sequence = int(tokens), int(squares)
        return action
    except Exception as error:
        session.recorder.failures += 1
        _say_once("lengths", "paceline.pipelining: recorded without lengths: %s", error)
        return pipelining(op, microbatch=microbatch, chunk=chunk)  # type: ignore[arg-type]


def _new_action(
    session: Session,
    actions: Actions,
    op: int,
    microbatch: int | None,
    chunk: int,
    peer: int | None,
) -> Timed:
    """The edge: inert, counted and said once, for an action that cannot be recorded."""
    try:
        op = _whole("op", op, Op.FORWARD, Op.BACKWARD_RECV)
        if microbatch is not None:
            microbatch = _whole("microbatch", microbatch, 0, NONE_32 - 1)
        chunk = _whole("chunk", chunk, 0, NONE_16 - 1)
        if peer is not None:
            peer = _whole("peer", peer, 0, NONE_32 - 1)
        if session.made >= MAXIMUM_SECTIONS + MAXIMUM_ACTIONS:
            raise ValueError(f"more than {MAXIMUM_ACTIONS} different actions")
    except Exception as error:
        session.recorder.failures += 1
        _say_once("action", "paceline.pipelining: not recorded: %s", error)
        return INERT
    action = actions[op][microbatch, chunk, peer] = session.action(op, microbatch, chunk, peer)
    return action


def _whole(name: str, value: Any, least: int, most: int) -> int:
    """An int of any integer, numpy's too; of no tensor, which may be on a device."""
    if not isinstance(value, Integral) or not least <= int(value) <= most:
        raise ValueError(f"{name} must be a number from {least} to {most}, got {value!r}")
    return int(value)


@_uncompiled
def optimizer() -> Timed:
    """A context manager around the optimizer's step."""
    return _known(OPTIMIZER) or INERT


@_uncompiled
def checkpoint() -> Timed:
    """A context manager around the time the loop is blocked by a checkpoint."""
    return INERT if _session is None or get_ident() != _owner else _session.checkpoint


@_uncompiled
def evaluate() -> Timed:
    """A context manager around an evaluation."""
    return INERT if _session is None or get_ident() != _owner else _session.evaluate


def _guard(session: Session, call: Callable[..., None], *args: Any) -> None:
    """The edge: an error of ours is counted, and training goes on."""
    try:
        call(*args)
    except Exception as error:
        session.recorder.failures += 1
        _say_once(call.__name__, "paceline: %s failed: %s", call.__name__, error)


def name_group(process_group: Any, name: str, axis: str | None = None) -> None:
    """Give a process group a name, and the axis it spans: "dp", "pp" or "tp"."""
    session = _session
    if session is None or session.wrapped is None:
        return
    _guard(session, session.wrapped.channels.name, process_group, name, axis)


def report(
    loss: Any | None = None,
    gradient_norm: Any | None = None,
    evaluation_loss: Any | None = None,
) -> None:
    """Values of the current step: numbers, or tensors of one element."""
    if not _report_here(loss, gradient_norm, evaluation_loss):
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
        _say_once("report", "paceline.report failed: %s", error)


def pending() -> Control | None:
    """The newest command for this rank that has no final answer yet. Costs well under 1 µs."""
    session = _session
    if session is None:
        return None
    control = session.control
    command_id = control[CONTROL_COMMAND]
    if command_id == session.answered:
        return None
    known = session.command
    if known is None or known.command_id != command_id:
        known = session.command = Control(
            command_id, control[CONTROL_KIND], control[CONTROL_TARGET_STEP]
        )
    return known


def acknowledge(command_id: int, status: int, step: int) -> None:
    """Answer a command with an `AckStatus`; DONE and FAILED are final."""
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
    except Exception:
        session.recorder.failures += 1


def finish() -> None:
    """The training is over. Called at exit too, where an uncaught exception says `failed`."""
    session = _session
    if session is None:
        return
    _guard(session, session.end, Status.FINISHED)
    _stop()


def _stop() -> None:
    """Back to inert. The ring file stays: the agent reads it to its end."""
    session = _exchange(None)
    if session is None:
        return
    session.recorder.unwatch_gc()
    if session.wrapped is not None:
        session.wrapped.uninstall()


def _at_exit() -> None:
    """In a child of multiprocessing, which runs no atexit, the exception is still on its way."""
    error = sys.exc_info()[1]
    if not hasattr(sys, "ps1"):  # where people type, the last error ended nothing
        error = getattr(sys, "last_value", error)
    ended_well = error is None or (isinstance(error, SystemExit) and not error.code)
    if _session is not None and not ended_well:
        _guard(_session, _session.end, Status.FAILED)
        _stop()
    finish()


def _in_child() -> None:
    session = _exchange(None)
    if session is not None:
        session.detach()


def _say_once(topic: str, message: str, *values: object, info: bool = False) -> None:
    if topic not in _said:
        _said.add(topic)
        _log.log(logging.INFO if info else logging.WARNING, message, *values)


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
