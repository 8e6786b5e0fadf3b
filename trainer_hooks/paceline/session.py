"""The state between `init` and `finish`: the recorder, its timed objects and their limits.

A timed object (section or pipeline action) is created at its first use and reused afterwards. An
invalid name or action is counted, logged once and replaced by an object that does nothing.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

from paceline.collectives.coverage import reason_of_backend
from paceline.collectives.native import NativeRecorder
from paceline.collectives.process_groups import ProcessGroupRecorder
from paceline.cuda import device_in_use, initialized_cuda
from paceline.device import (
    DeviceForward,
    DevicePipelining,
    DeviceSection,
    DeviceTimer,
    DeviceTransfer,
)
from paceline.flops import COUNTED_STEP, FlopCount
from paceline.loop import Loop
from paceline.memory import MemoryMeter, measured_after, write_value
from paceline.recognition import Recognition
from paceline.recorder import Recorder
from paceline.saves import Saves
from paceline.sections import INERT, OtherThreadSection, StatusSection, Transfer
from paceline.system_exit import SystemExitWatch
from paceline.torch_events import CheckpointSections, TorchEvents
from paceline.updates import UpdateProbe
from paceline.writer import Pipelining, Section
from paceline.writer.interface import Timed
from paceline_wire.coverage import NOT_RECORDED, RECORDER
from paceline_wire.ending import Ending
from paceline_wire.metadata import (
    CHECKPOINT_PATH,
    OPTIMIZER_SINCE_STEP,
    REPLICA_MISMATCH,
    ROLL_BACK,
    TOTAL_STEPS,
    TRAINED_PARAMETERS,
    TRAINED_SINCE_STEP,
)
from paceline_wire.ring import (
    DEFINITIONS_BYTES,
    STATE_DEFINITIONS,
    Control,
    RankDescription,
    SectionDefinition,
    Status,
    section_op,
)
from paceline_wire.spans import COMPUTE_OPS, NONE_16, NONE_32, PIPELINE_TRANSFER_OPS, Op
from paceline_wire.topology import Coordinates, Topology

_log = logging.getLogger(__name__)

MAXIMUM_SECTIONS = 4096  # distinct names; more means that a name contains a counter
NAMES_BYTES = DEFINITIONS_BYTES * 3 // 4  # the rest of the definitions is for process groups
LONGEST_NAME = 200
MAXIMUM_ACTIONS = 1 << 14  # distinct (op, microbatch, chunk, peer)

DESCRIBED_AFTER_STEPS = (3, 8, 32, 256)  # what was recognized is reported, if it changed
MOST_MODELS = 24  # new models, and new optimizers, that are reported: the ring has little room

LARGEST_COUNT = 1 << 48  # samples or tokens of one call
LARGEST_SQUARES = 1 << 62  # the largest sum of squared lengths that a reader accepts

OPTIMIZER = object()  # key of the optimizer's section, which no user's name can equal

Actions = list[dict[tuple[int | None, int, int | None], Pipelining]]


class Session:
    """Everything that exists between `init` and `finish`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.control = recorder.ring.control
        self.timer: DeviceTimer | None = None
        self.loop = Loop(recorder)
        self.process_groups: ProcessGroupRecorder | NativeRecorder | None = None
        self.section_ops: dict[str, int] = {}  # by name
        # By op, then by (microbatch, chunk, peer): hashing an Op is slow.
        self.actions: Actions = [{} for _ in range(Op.BACKWARD_RECV + 1)]
        self.sized_actions: Actions = [{} for _ in range(Op.BACKWARD_RECV + 1)]  # with lengths
        self.recognized_actions: Actions = [{} for _ in range(Op.BACKWARD_RECV + 1)]
        self.checkpoint = StatusSection(recorder, Op.CHECKPOINT, Status.CHECKPOINTING)
        self.framework_checkpoint = StatusSection(recorder, Op.CHECKPOINT, Status.CHECKPOINTING)
        self.saves = Saves(recorder, self.loop, self._describe_checkpoints)
        self.evaluate = StatusSection(recorder, Op.EVALUATE, Status.EVALUATING)
        # The script's own `paceline.optimizer`, and the recognized phases.
        self.optimizer = recorder.sections[OPTIMIZER] = Section(recorder, Op.OPTIMIZER)
        self.optimizer_phase = Section(recorder, Op.OPTIMIZER)
        self.backward_phase = Section(recorder, Op.BACKWARD)
        self.recognition = Recognition(self)
        self.steps_ended = 0
        self.exit_watch: SystemExitWatch | None = None
        self._events: TorchEvents | None = None  # set while torch is watched
        self.marks_evaluations = False  # an adapter times each of them: none is recognized
        self.created = 0  # sections and actions
        self.is_automatic = False  # started by `PACELINE=1`, and not yet by the script
        self.command: Control | None = None
        self.answered = 0  # id of the last command with a final answer
        self.counts_flops = False  # the step to count has not begun yet
        self._flop_count: FlopCount | None = None
        self._flops: int | None = None  # FLOPs of this rank in one step, once counted
        self._reports_flops = False
        self._next_measured = measured_after(0)  # step whose memory is measured next
        self._parameters = 0  # numbers in the parameters that the newest optimizers train
        self._models = self._optimizers = 0  # that were reported
        self.has_place = False  # the script gave this rank's coordinates
        self.marks_compute = False  # the script or a recognized schedule times its microbatches
        self.annotates = False  # the script calls `paceline.pipelining` itself
        # Arguments of `init`, for the next generation: coordinates, topology, metadata.
        self.arguments: tuple[Mapping[str, int | None], Topology | None, Mapping[str, str]] = (
            {},
            None,
            {},
        )
        self.given: frozenset[str] = frozenset()  # keys of the metadata that the script passed
        self._described: dict[str, str] = {}
        self._place: tuple[Topology | None, Coordinates | None] = (None, None)

    # Descriptions

    def update(
        self,
        *,
        source: str = "recognized",
        metadata: Mapping[str, str] | None = None,
        topology: Topology | None = None,
        coordinates: Coordinates | None = None,
    ) -> None:
        """Describe this rank further, after its identity was written (owner thread only).

        What was reported before is not repeated, and what the script passed to `init` stays.

        Args:
            source: what this was read from.
            metadata: added to the job's; short texts, the same on all ranks.
            topology: sizes of the axes. The server accepts them once every rank has reported the
                same, with coordinates that fit.
            coordinates: of this rank.
        """
        given = {str(key): str(value) for key, value in (metadata or {}).items()}
        new = {
            key: value
            for key, value in given.items()
            if key not in self.given and self._described.get(key) != value
        }
        place = (topology, coordinates)
        if place == self._place:
            place = (None, None)
        if not new and place == (None, None):
            return
        description = RankDescription(
            source=source, topology=place[0], coordinates=place[1], metadata=new
        )
        if not self.recorder.describe(description):
            log_once("describe", "no room in the ring: what %s reports is not shown", source)
            return
        self._described |= new
        if place != (None, None):
            self._place = place

    def report_coverage(self, recorder: str, reason: str | None) -> None:
        """Report what records communication, and why some of it is not recorded."""
        self.update(
            source="torch",
            metadata={RECORDER: recorder} | ({} if reason is None else {NOT_RECORDED: reason}),
        )

    def report_backend(self, process_group: Any) -> None:
        """Report a process group whose waits cannot be recorded."""
        reason = reason_of_backend(process_group)
        if reason is not None:
            self.update(source="torch", metadata={NOT_RECORDED: reason})

    # Sections

    def add_section(self, name: str, *, in_owner_thread: bool) -> Timed:
        """Return a timed object for a section that the recorder does not have yet."""
        op = self._section_op(name)
        if op is None:
            return INERT
        if not in_owner_thread:
            return OtherThreadSection(self.recorder, op)
        section = self.recorder.sections[name] = self._create_section(op)
        return section

    def _section_op(self, name: str) -> int | None:
        """Return the op of a section's name; None, counted or logged, if it cannot be recorded."""
        try:
            op = self._define_section(name)
        except Exception as error:
            self.recorder.failures += 1
            log_once("name", "paceline.section(%r) is not recorded: %s", name, error)
            return None
        if op is None:
            count = len(self.section_ops)
            log_once("names", "more than %d section names: the others are not recorded", count)
        return op

    def _define_section(self, name: str) -> int | None:
        """Return the op of a section's name; None if there are too many names.

        The first use of a name defines it in the ring.
        """
        op = self.section_ops.get(name)
        identifier, used = len(self.section_ops), self.recorder.state[STATE_DEFINITIONS]
        if op is None and identifier < MAXIMUM_SECTIONS and used < NAMES_BYTES:
            self.recorder.define(SectionDefinition(identifier, str(name)[:LONGEST_NAME]))
            op = self.section_ops[name] = section_op(identifier)
        return op

    def _create_section(self, op: int) -> Section:
        if self.timer is not None:
            section: Section = DeviceSection(self.recorder, op, self.timer)
        else:
            section = Section(self.recorder, op)
        self.created += 1
        return section

    # Recognition

    @property
    def watches_torch(self) -> bool:
        return self._events is not None

    def watch_torch(self) -> None:
        """Recognize steps and their phases from now on. Torch is loaded."""
        if self._events is None:
            self._events = TorchEvents.get()
            sections = CheckpointSections(self.checkpoint, self.framework_checkpoint)
            self._events.start(self.recognition, self.recorder, sections, self.saves)
            self.loop.first_step = self._events.completed_steps
            self.loop.has_optimizer = self._events.has_optimizer
            self.recognition.has_one_optimizer = self._events.has_one_optimizer
            self.recognition.probe = UpdateProbe(
                sys.modules["torch"], self._events.optimized_parameters
            )
            self.loop.watcher = self.recognition
            self.loop.after_step = self.step_ended

    def unwatch_torch(self) -> None:
        """Recognize nothing any more."""
        if self._events is not None:
            self._events.stop()
            self._events = None
            self.loop.watcher = self.loop.after_step = self.loop.first_step = None
            self.recognition.probe = None

    def watch_exit(self) -> None:
        """Keep the `SystemExit` that ends the process from now on."""
        self.exit_watch = SystemExitWatch(sys.stderr, self.loop.completed_steps)

    def unwatch_exit(self) -> None:
        if self.exit_watch is not None:
            self.exit_watch.stop()
            self.exit_watch = None

    def exit_ending(self) -> Ending | None:
        """Return how a `SystemExit` ends the process; None if none does, or with the code 0."""
        return None if self.exit_watch is None else self.exit_watch.ending

    def watch_optimizers(self) -> None:
        """Report optimizer steps from now on; not from inside of one. Without it, they are reported
        from the first backward pass on."""
        if self._events is not None:
            self._events.watch_optimizers()

    def backward_ran(self) -> None:
        """A pipeline schedule ran a backward pass with `torch.autograd.grad`, which torch's events
        do not contain."""
        if self._events is not None:
            self._events.watch_optimizers()
            self.recognition.backward_ran()

    def step_ended(self) -> None:
        """Watch modules that were loaded in the step; after some steps, describe and measure."""
        events, ended = self._events, self.steps_ended
        if events is not None:
            if events.known_modules != len(sys.modules):
                events.watch_modules()
            if events.memory is not None:
                meter, events.memory = events.memory, None
                self.guard(meter.write)
            if events.new_parameters:
                trained, events.new_parameters = events.new_parameters, 0
                self.guard(self._optimizers_began, trained)
        self.steps_ended = ended + 1
        if ended + 1 == self._next_measured:
            self._next_measured = measured_after(ended + 1)
            if events is not None:
                events.memory = MemoryMeter(self.recorder)
            self._reports_flops = True
        if self._flop_count is not None or self.counts_flops:
            self.guard(self._count_flops)
        if self.steps_ended in DESCRIBED_AFTER_STEPS:
            self.guard(self._describe_steps)

    def _optimizers_began(self, parameters: int) -> None:
        """Report another model or optimizer, as in a script that trains several in one process.

        A new optimizer for as many parameters as before trains the same model, or one like it.
        """
        before, self._parameters = self._parameters, parameters
        step = str(self.recorder.step)
        if before not in (0, parameters) and self._models < MOST_MODELS:
            self._models += 1
            metadata = {TRAINED_PARAMETERS: str(parameters), TRAINED_SINCE_STEP: step}
            self.update(source="optimizer", metadata=metadata)
        elif before == parameters and self._optimizers < MOST_MODELS:
            self._optimizers += 1
            self.update(source="optimizer", metadata={OPTIMIZER_SINCE_STEP: step})

    def _describe_steps(self) -> None:
        metadata = {"steps": self.recognition.describe()}
        if self.loop.work.source is not None:
            metadata["counted_from"] = self.loop.work.source
        if (cuda := initialized_cuda()) is not None:
            metadata["gpu_name"] = cuda.get_device_name()
        self.update(source="steps", metadata=metadata)

    def replicas_differ(self, mismatch: str) -> None:
        """Report replicas whose parameters differ, as JSON."""
        self.update(source="torch", metadata={REPLICA_MISMATCH: mismatch})

    def can_roll_back(self) -> None:
        """Report that the script can go back to an earlier checkpoint."""
        self.update(source="torch", metadata={ROLL_BACK: "yes"})

    def expect_steps(self, total: int) -> None:
        """Report the number of steps of the whole training."""
        total = int(total) + self.loop.offset
        self.update(source="framework", metadata={TOTAL_STEPS: str(total)})

    def checkpoint_saved(self, step: int) -> None:
        """Report the step of a complete checkpoint, as the script numbers it."""
        self.recorder.checkpoint_saved(step + self.loop.offset)

    def _describe_checkpoints(self, path: str) -> None:
        self.update(source="torch", metadata={CHECKPOINT_PATH: path})

    def count(self, samples: int | None, tokens: int | None) -> None:
        """Add what the script counted in the open step."""
        given = [
            None if value is None else _whole_number(name, value, 0, LARGEST_COUNT)
            for name, value in (("samples", samples), ("tokens", tokens))
        ]
        self.loop.work.give(*given)

    def describe_flops(self, given: Mapping[str, Any]) -> None:
        """Report the FLOPs of the model and of the device, as the script or environment gives."""
        for name, value in given.items():
            if not 0.0 < float(value) < math.inf:
                raise ValueError(f"{name} must be a positive number, got {value}")
        if given:
            metadata = {name: repr(float(value)) for name, value in given.items()}
            self.update(source="script", metadata=metadata)

    def _count_flops(self) -> None:
        """Count the FLOPs of one step, if a setting asks for it, and report them now and then."""
        if self.counts_flops and self.steps_ended >= COUNTED_STEP:
            self.counts_flops = False
            self._flop_count = FlopCount()
        elif self._flop_count is not None and self._flops is None:
            self._flops = self._flop_count.end()
            self._reports_flops = True
        if self._flops and self._reports_flops:
            self._reports_flops = False
            write_value(self.recorder, Op.FLOPS, self._flops)

    # Pipeline actions

    def add_action(
        self, actions: Actions, op: int, microbatch: int | None, chunk: int, peer: int | None
    ) -> Timed:
        """Return a new action, or an inert one, counted and logged, if it cannot be recorded."""
        try:
            op = _whole_number("op", op, Op.FORWARD, Op.BACKWARD_RECV)
            if microbatch is not None:
                microbatch = _whole_number("microbatch", microbatch, 0, NONE_32 - 1)
            chunk = _whole_number("chunk", chunk, 0, NONE_16 - 1)
            if peer is not None:
                peer = _whole_number("peer", peer, 0, NONE_32 - 1)
            if self.created >= MAXIMUM_SECTIONS + MAXIMUM_ACTIONS:
                raise ValueError(f"more than {MAXIMUM_ACTIONS} different actions")
        except Exception as error:
            self.recorder.failures += 1
            log_once("action", "paceline.pipelining: not recorded: %s", error)
            return INERT
        action = self._create_action(op, microbatch, chunk, peer)
        actions[op][microbatch, chunk, peer] = action
        return action

    def sized_action(
        self, op: int, microbatch: int | None, chunk: int, lengths: Sequence[int]
    ) -> Timed | None:
        """Return an action with sequence lengths; None, counted and logged, if they are invalid.

        The record's `bytes` and `sequence`, which only communications use otherwise, hold the sum
        and the sum of squares. These actions are kept apart from the others, so that an action
        without lengths never shows those of an earlier use.
        """
        try:
            tokens, squares = sum(lengths), sum(length * length for length in lengths)
            if op not in COMPUTE_OPS or not 0 <= tokens <= squares < LARGEST_SQUARES:
                raise ValueError(
                    f"lengths must be whole numbers of a forward or backward, got {lengths}"
                )
            try:
                action: Timed = self.sized_actions[op][microbatch, chunk, None]
            except KeyError:
                action = self.add_action(self.sized_actions, op, microbatch, chunk, None)
            if isinstance(action, Pipelining):
                action.size, action.sequence = int(tokens), int(squares)
            return action
        except Exception as error:
            self.recorder.failures += 1
            log_once("lengths", "paceline.pipelining: recorded without lengths: %s", error)
            return None

    def _create_action(
        self, op: int, microbatch: int | None, chunk: int, peer: int | None
    ) -> Pipelining:
        arguments = (self.recorder, op, microbatch, chunk, peer)
        is_transfer = op in PIPELINE_TRANSFER_OPS
        if self.timer is not None:
            device_class = DeviceTransfer if is_transfer else DevicePipelining
            action: Pipelining = device_class(*arguments, self.timer)
        else:
            action = Transfer(*arguments) if is_transfer else Pipelining(*arguments)
        self.created += 1
        self.marks_compute = self.marks_compute or op in COMPUTE_OPS
        return action

    # The session

    def at_boundary(self) -> None:
        """Resolve device events before each step; start using the device once the script does."""
        if self.timer is not None:
            self.timer.resolve()
        elif (cuda := initialized_cuda()) is not None and (
            device := device_in_use(cuda)
        ) is not None:
            self.timer = self.recorder.timer = DeviceTimer(cuda, self.recorder, device)
            for actions in (*self.actions, *self.sized_actions, *self.recognized_actions):
                actions.clear()
            self.recorder.sections.clear()
            self.optimizer = self._create_section(Op.OPTIMIZER)
            self.recorder.sections[OPTIMIZER] = self.optimizer
            self.optimizer_phase = self._create_section(Op.OPTIMIZER)
            self.backward_phase = self._create_section(Op.BACKWARD)
            self.recognition.measure_forward(DeviceForward(self.recorder, self.timer))
        if isinstance(self.process_groups, NativeRecorder):
            if self.timer is not None:
                self.process_groups.set_anchor(*self.timer.anchor)
            self.process_groups.at_boundary()

    def end(self, status: int) -> None:
        """Write what is pending and show the final status."""
        if self._flop_count is not None:
            self._flop_count.end()
        self.loop.finish()
        if self.process_groups is not None:
            self.process_groups.finish()
        self.recorder.clear_frames()
        self.recorder.drain()
        if self.timer is not None:
            self.timer.resolve()
        self.recorder.set_status(status)

    def detach(self) -> None:
        """Stop writing to the ring, in a forked child: it is the parent's."""
        self.recorder.detach()
        self.unwatch_torch()
        if self.process_groups is not None:
            self.process_groups.uninstall()

    def guard(self, call: Callable[..., None], *args: Any) -> None:
        """Run `call`; count and log an error of Paceline instead of raising it in the training."""
        try:
            call(*args)
        except Exception as error:
            self.recorder.failures += 1
            log_once(call.__name__, "paceline: %s failed: %s", call.__name__, error)


def _whole_number(name: str, value: Any, least: int, most: int) -> int:
    """Return an int for any integer type, numpy's too; not for a tensor, which may be on a device.

    Raises:
        ValueError: not an integer in `least`..`most`.
    """
    if not isinstance(value, Integral) or not least <= int(value) <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value!r}")
    return int(value)


_logged: set[str] = set()


def log_once(topic: str, message: str, *values: object, info: bool = False) -> None:
    """Log a message unless one of the same topic was logged before."""
    if topic not in _logged:
        _logged.add(topic)
        _log.log(logging.INFO if info else logging.WARNING, message, *values)
