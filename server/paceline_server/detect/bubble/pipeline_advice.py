"""The gain of another pipeline schedule, simulated with the recorded durations.

The work of a stage stays the same: its forwards and backwards are only split into more microbatches
or more model chunks, and run in another order. A transfer costs as much as it does now, whatever
its size, so that the gain of a finer split is not overestimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from paceline_server.detect.reporting import gain
from paceline_server.detect.stage_imbalance.layers import stage_layers
from paceline_server.medians import median
from paceline_server.percent import percent
from paceline_server.steps.bubbles import delays, typical_seconds
from paceline_server.steps.phase import PipelinePhase, PipelinePhaseReader
from paceline_server.steps.pipeline import Pipeline, PipelineAction
from paceline_server.steps.timing import StepTiming
from paceline_server.whatif.schedules import SCHEDULES, ScheduleError, actions
from paceline_wire.spans import Op
from paceline_wire.topology import Topology

Floats = npt.NDArray[np.float64]

# Smallest speedup of a change that is listed; a change that saves memory is always listed.
WORTH_NAMING = 1.02
SAVES_MEMORY = 0.8
MAXIMUM_ACTIONS = 1 << 14
# Share of a backward that computes input gradients, where the two halves were not recorded.
INPUT_SHARE = 0.5


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the pipeline. Ratios are relative to the current pipeline."""

    change: str  # "twice as many microbatches of half the size"
    schedule: str
    microbatches: int
    virtual_stages: int
    speedup: float  # current step time over step time with the change
    bubble_ratio: float  # mean idle share of the stages during the phase
    bubble_ratio_now: float
    memory_ratio: float  # activation memory of the stage that holds most


class _Recorded:
    """Seconds per microbatch and stage, and of the transfers between stages."""

    def __init__(self, phase: PipelinePhase) -> None:
        self.pipeline = phase.pipeline
        typical, _ = typical_seconds(phase.pipeline, phase.seconds)
        self.microbatches = np.unique(self.pipeline.microbatch).size
        self.chunks = int(self.pipeline.chunk.max()) + 1
        self.seconds = {
            op: np.bincount(
                self.pipeline.stage,
                weights=np.where(self.pipeline.op == op, typical, 0.0),
                minlength=self.pipeline.stages,
            )
            / self.microbatches
            for op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT)
        }
        self.splits_backward = bool((self.pipeline.op == Op.BACKWARD_WEIGHT).any())
        late = delays(phase)
        crossing = _crossing(self.pipeline)
        self.transfer_seconds = median(late[crossing]) if crossing.any() else 0.0
        order = [
            [
                PipelineAction(*action)
                for action in zip(
                    self.pipeline.op[own].tolist(),
                    self.pipeline.microbatch[own].tolist(),
                    self.pipeline.chunk[own].tolist(),
                    strict=True,
                )
            ]
            for own in (self.pipeline.stage == stage for stage in range(self.pipeline.stages))
        ]
        self.now = self.simulate(order, self.chunks)

    def simulate(
        self, order: Sequence[Sequence[PipelineAction]], chunks: int
    ) -> tuple[float, float, float]:
        """Return (seconds of the phase, mean bubble, peak activations in current microbatches)."""
        pipeline = Pipeline(order)
        microbatches = np.unique(pipeline.microbatch).size
        smaller = self.microbatches / microbatches
        splits = bool((pipeline.op == Op.BACKWARD_WEIGHT).any())
        seconds = np.empty(pipeline.nodes)
        for op, rows in ((op, pipeline.op == op) for op in self.seconds):
            seconds[rows] = self._seconds(op, splits)[pipeline.stage[rows]] * smaller / chunks
        late = np.where(_crossing(pipeline), self.transfer_seconds, 0.0)
        total = float(pipeline.phase_seconds(seconds[:, None], late[:, None])[0])
        busy = pipeline.by_stage(seconds[:, None])[:, 0]
        held = max(_most_held(stage) for stage in order) * smaller / chunks
        return total, float(1.0 - (busy / max(total, 1e-12)).mean()), held

    def _seconds(self, op: Op, splits: bool) -> Floats:
        if splits == self.splits_backward or op == Op.FORWARD:
            return self.seconds[op]
        if not splits:
            both: Floats = self.seconds[Op.BACKWARD] + self.seconds[Op.BACKWARD_WEIGHT]
            return both
        share = INPUT_SHARE if op == Op.BACKWARD else 1.0 - INPUT_SHARE
        part: Floats = self.seconds[Op.BACKWARD] * share
        return part


def advise(phase: PipelinePhase, metadata: Mapping[str, str], step_seconds: float) -> list[Advice]:
    """Return the useful changes, best first. `step_seconds`: of the phase's step."""
    recorded = _Recorded(phase)
    found = []
    for change, schedule, microbatches, chunks in _candidates(recorded, metadata):
        try:
            order = actions(schedule, recorded.pipeline.stages, microbatches, chunks)
            total, bubble, held = recorded.simulate(
                [[PipelineAction(*action) for action in stage] for stage in order], chunks
            )
        except (ScheduleError, ValueError):
            continue
        now_total, now_bubble, now_held = recorded.now
        advice = Advice(
            change=change,
            schedule=schedule,
            microbatches=microbatches,
            virtual_stages=chunks,
            speedup=gain((now_total - total) / max(step_seconds, 1e-12)),
            bubble_ratio=bubble,
            bubble_ratio_now=now_bubble,
            memory_ratio=held / now_held,
        )
        saves = advice.memory_ratio <= SAVES_MEMORY and advice.speedup >= 0.995
        if advice.speedup >= WORTH_NAMING or saves:
            found.append(advice)
    return sorted(found, key=lambda advice: -advice.speedup)


def advise_step(
    timing: StepTiming, topology: Topology, metadata: Mapping[str, str]
) -> list[Advice]:
    """Return the same for a recorded step.

    Empty without a pipeline or if too many spans were lost.
    """
    phase = PipelinePhaseReader(topology).read(timing)
    if phase is None or not timing.ranks.rank.size:
        return []
    return advise(phase, metadata, median(timing.ranks.step_seconds))


def advice_text(advice: Advice) -> str:
    return (
        f"{advice.change[0].upper()}{advice.change[1:]} gives {advice.speedup:.2f}x (bubble "
        f"{percent(advice.bubble_ratio_now)} to {percent(advice.bubble_ratio)}) with "
        f"{advice.memory_ratio:.2f}x the activations."
    )


def _candidates(
    recorded: _Recorded, metadata: Mapping[str, str]
) -> list[tuple[str, str, int, int]]:
    """Return (change, schedule, microbatches, chunks per stage) of each candidate."""
    stages, microbatches, chunks = (
        recorded.pipeline.stages,
        recorded.microbatches,
        recorded.chunks,
    )
    if recorded.pipeline.nodes * 4 > MAXIMUM_ACTIONS:
        return []
    schedule = metadata.get("schedule", "").lower()
    found = []
    if schedule in SCHEDULES:
        change = "twice as many microbatches of half the size"
        found.append((change, schedule, 2 * microbatches, chunks))
    if schedule == "gpipe" and chunks == 1:
        found.append(("1F1B instead of GPipe", "1f1b", microbatches, 1))
    if not microbatches % stages and _can_divide(metadata, stages, chunks):
        change = f"interleaving with {2 * chunks} virtual stages per rank"
        found.append((change, "interleaved", microbatches, 2 * chunks))
    if chunks == 1 and not recorded.splits_backward:
        found.append(("a zero-bubble schedule (ZB-H1)", "zero_bubble", microbatches, 1))
    return found


def _can_divide(metadata: Mapping[str, str], stages: int, chunks: int) -> bool:
    """Return whether each chunk has enough layers to be split in two; unknown counts as enough."""
    layers = stage_layers(metadata, stages * chunks)
    return layers is None or int(layers.min()) >= 2


def _crossing(pipeline: Pipeline) -> npt.NDArray[np.bool_]:
    """Return a mask of the actions that need the result of another stage."""
    stage = np.append(pipeline.stage, -1)
    found: npt.NDArray[np.bool_] = (pipeline.needs < pipeline.nodes) & (
        stage[pipeline.needs] != pipeline.stage
    )
    return found


def _most_held(order: Sequence[PipelineAction]) -> int:
    """Return the peak number of activations: held from a forward to the end of its backward."""
    splits = any(action.op == Op.BACKWARD_WEIGHT for action in order)
    frees = Op.BACKWARD_WEIGHT if splits else Op.BACKWARD
    held = most = 0
    for action in order:
        held += (action.op == Op.FORWARD) - (action.op == frees)
        most = max(most, held)
    return most
