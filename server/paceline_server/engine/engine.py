"""The engine of one job: turns batches and time into steps, findings, progress and the ledger.

Pure and deterministic: the same calls give the same outcomes. All times are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from paceline_server.detect.contract import Detector
from paceline_server.detect.registry import detector_classes
from paceline_server.detect.telemetry import Telemetry
from paceline_server.engine.clocks import NodeClocks
from paceline_server.engine.definitions import Definitions
from paceline_server.engine.generation import RunningGeneration
from paceline_server.engine.types import Outcome, Placement
from paceline_server.policy import Policy
from paceline_server.steps.ledger import GoodputLedger, LedgerState
from paceline_server.steps.types import Efficiency, Ledger, StepSummary, UsualStep
from paceline_wire.batch import Batch


class _Memory(msgspec.Struct):
    """State that survives generations and workers."""

    ledger: LedgerState
    highest_step: int | None = None
    efficiency: Efficiency = Efficiency()
    usual: UsualStep | None = None
    definitions: Definitions | None = None  # in the generation that is running


class _Defined(msgspec.Struct):
    """The part of `_Memory` that analyses need."""

    definitions: Definitions | None = None


_memory = msgspec.msgpack.Decoder(_Memory)
_defined = msgspec.msgpack.Decoder(_Defined)


def definitions_in(memory: bytes) -> Definitions | None:
    """Return what the ranks of the newest generation have defined, from an engine's memory.

    Raises msgspec.DecodeError for invalid `memory`.
    """
    return _defined.decode(memory).definitions


class Engine:
    """The engine of one job. Call `place` at each start of a generation, `feed` per batch, `tick`
    regularly.

    Call `suspend` when an action begins to stop the generation (job state `recovering`,
    `stopping` or finished): nothing is detected from then until the next `place`.

    Feed every batch of the nodes that run ranks, including empty ones, which show that a node is
    alive. A worker that takes the job over passes what `memory` returned to the previous one.
    """

    def __init__(
        self,
        job_id: str,
        policy: Policy | None = None,
        memory: bytes | None = None,
        detectors: Sequence[type[Detector]] | None = None,
    ) -> None:
        """`detectors`: default all. Raises msgspec.DecodeError for invalid `memory`."""
        self.job_id = job_id
        self._detectors = detector_classes() if detectors is None else detectors
        self._policy = policy or Policy()
        restored = _Memory(LedgerState()) if memory is None else _memory.decode(memory)
        self._ledger = GoodputLedger(restored.ledger)
        self._highest_step = restored.highest_step
        self._efficiency = restored.efficiency
        self._usual = restored.usual  # fastest of the generations; None also: of several models
        self._definitions = restored.definitions  # until their generation is placed
        self._telemetry = Telemetry()
        self._clocks = NodeClocks()
        self._last_seen_ns: dict[str, int] = {}
        self._lateness_ns: dict[str, int] = {}
        self._running: RunningGeneration | None = None
        self._suspended = False
        self._left_over: list[StepSummary] = []  # steps not returned yet

    def memory(self) -> bytes:
        """Return what the log does not have any more, stored in one transaction with the cursor."""
        running = self._running
        memory = _Memory(
            self._ledger.state(),
            self._highest_step,
            self._efficiency,
            self._usual,
            self._definitions if running is None else running.definitions,
        )
        return msgspec.msgpack.encode(memory)

    def place(self, placement: Placement) -> None:
        """Begin a generation. All state of the previous one is dropped except the ledger.

        The same placement again changes nothing.
        """
        if self._running is not None and self._running.placement == placement:
            return
        known = self._definitions if self._running is None else self._running.definitions
        if self._running is not None:
            self._left_over += self._running.take_complete(None)
            if self._running.placement.topology.world_size != placement.topology.world_size:
                self._efficiency = Efficiency()  # the throughput of another number of ranks
        self._running = RunningGeneration(
            self.job_id, placement, self._policy, self._detectors, self._usual
        )
        if known is not None and known.are_of(placement):
            self._running.restore(known)
        self._suspended = False
        self._ledger.begin(placement.generation, placement.started_ns, placement.resume_step)

    def use_policy(self, policy: Policy) -> None:
        """Use another policy for detection, from the next generation on."""
        self._policy = policy

    def suspend(self) -> None:
        """Detect nothing until the next `place`; steps and the ledger continue. Idempotent."""
        self._suspended = True

    def resume(self) -> None:
        """Undo `suspend` within the same generation (the action was canceled)."""
        self._suspended = False

    def feed(self, batch: Batch, received_ns: int) -> None:
        """Process one agent's batch; `received_ns` is the server's CLOCK_REALTIME.

        Events of other jobs and generations are ignored.
        """
        node = batch.agent_id
        self._last_seen_ns[node] = max(received_ns, self._last_seen_ns.get(node, 0))
        self._clocks.add_batch(node, batch.packed_ns, received_ns)
        self._lateness_ns[node] = self._clocks.lateness_ns(node)
        shift_ns = self._clocks.shift_ns(node)
        self._telemetry.extend(node, batch.samples, shift_ns)
        if self._running is not None:
            self._running.feed(batch, received_ns, shift_ns)

    def tick(self, now_ns: int, others_seen_ns: int = 0) -> Outcome:
        """Return the changes since the last tick.

        Args:
            now_ns: server's CLOCK_REALTIME.
            others_seen_ns: when the newest batch of a node without ranks of the job was received.
        """
        running = self._running
        if running is None:
            return Outcome(ledger=self.ledger(now_ns), highest_step=self._highest_step)
        steps = running.take_steps(now_ns)
        if running.placement.was_found:
            for attached in running.attached.values():
                self._ledger.extend_back(self._clocks.server_time_ns(attached))
        for summary in steps:
            self._ledger.add(summary, now_ns)
            self._highest_step = max(summary.step, self._highest_step or 0)
        if steps:
            self._efficiency = running.efficiency()
            usual = _faster(self._usual, running.usual_step)
            self._usual = None if running.has_several_models else usual
        findings = []
        # A time after now is from before the clock was set back.
        self._last_seen_ns = {node: min(ns, now_ns) for node, ns in self._last_seen_ns.items()}
        if not self._suspended:
            findings = running.detect(
                now_ns,
                steps,
                self._last_seen_ns,
                others_seen_ns,
                self._lateness_ns,
                self._telemetry,
            )
            if (onset := running.take_straggler_onset()) is not None:
                self._ledger.blame_straggler(onset)
        left_over, self._left_over = self._left_over, []
        return Outcome(
            placement=running.placement,
            steps=left_over + running.take_complete(now_ns),
            findings=findings,
            progress=running.progress(),
            ledger=self.ledger(now_ns),
            step_seconds=running.step_seconds(),
            highest_step=self._highest_step,
            can_checkpoint=running.can_checkpoint(),
            saved_step=running.saved_step(),
            checkpoint_interval_steps=running.checkpoint_interval_steps(),
            checkpoint_seconds=running.checkpoint_seconds(),
            checkpoint_saving_steps=running.checkpoint_saving_steps(),
            first_step=running.first_step,
            step_times=running.step_times,
            ended_ns=max(map(self._clocks.server_time_ns, running.exit_times), default=None),
            ended_received_ns=max(
                (exited.received_ns for exited in running.exit_times), default=None
            ),
        )

    def ledger(self, as_of_ns: int) -> Ledger:
        """Return the ledger of a job that ended at `as_of_ns`."""
        return replace(self._ledger.read(as_of_ns), efficiency=self._efficiency)


def _faster(one: UsualStep | None, other: UsualStep | None) -> UsualStep | None:
    """Return the faster of two usual steps; `other` where only it is of the current topology."""
    if one is None or other is None:
        return one or other
    return one if one.topology == other.topology and one.seconds <= other.seconds else other
