"""The layers to move between pipeline stages that do not take equally long.

The pipeline phase of a step is simulated with the layers in other stages. A layer costs the median
time per layer over the parts of the model; other work of a part (a loss, an embedding) stays with
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_server.medians import median
from paceline_server.steps.bubbles import equal_seconds, typical_seconds
from paceline_server.steps.phase import PipelinePhase
from paceline_server.steps.pipeline import Pipeline
from paceline_wire.spans import Op

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MAXIMUM_MOVES = 12
# Share by which a move must shorten the phase, because the cost of a layer is not known more
# precisely.
_WORTH_MOVING = 0.005


@dataclass(frozen=True, slots=True)
class Balance:
    """Seconds of one step's pipeline phase: now, with equal stages, and with layers moved."""

    now_seconds: float
    even_seconds: float
    moved_seconds: float | None  # None: the layers of the stages are not known
    moves: tuple[tuple[int, int], ...]  # stages (from, to), one layer each
    stage_seconds: Floats  # compute of each stage in a step
    layers: tuple[int, ...]  # layers of each stage; empty: unknown


def balance(phase: PipelinePhase, metadata: Mapping[str, str]) -> Balance:
    """Simulate an even pipeline, and the best one that moving whole layers achieves."""
    pipeline = phase.pipeline
    typical, _ = typical_seconds(pipeline, phase.seconds)
    even = equal_seconds(pipeline, typical)
    now, best = pipeline.phase_seconds(np.stack([typical, even], axis=1)).tolist()
    layers = stage_layers(metadata, int((pipeline.chunk.max() + 1) * pipeline.stages))
    moves: tuple[tuple[int, int], ...] = ()
    moved = None
    if layers is not None:
        moved, moves = _move(pipeline, typical, layers, now)
        layers = layers.reshape(-1, pipeline.stages).sum(axis=0)
    return Balance(
        now_seconds=now,
        even_seconds=best,
        moved_seconds=moved,
        moves=moves,
        stage_seconds=pipeline.by_stage(typical[:, None])[:, 0],
        layers=() if layers is None else tuple(layers.tolist()),
    )


def stage_layers(metadata: Mapping[str, str], parts: int) -> Ints | None:
    """Return the layers of each part of the model, from `stage_layers` ("3,3,3,3").

    None if it is missing or malformed.
    """
    try:
        layers = [int(count) for count in metadata.get("stage_layers", "").split(",")]
    except ValueError:
        return None
    return np.array(layers) if len(layers) == parts and min(layers) > 0 else None


def _move(
    pipeline: Pipeline, typical: Floats, layers: Ints, now: float
) -> tuple[float, tuple[tuple[int, int], ...]]:
    """Move one layer at a time, greedily; return the seconds of the phase, and the moves."""
    part = pipeline.part
    per_layer = _seconds_per_layer(pipeline, typical, part, layers)
    layers, seconds = layers.copy(), typical.copy()
    moves: list[tuple[int, int]] = []
    while len(moves) < MAXIMUM_MOVES:
        stage_seconds = pipeline.by_stage(seconds[:, None])[:, 0]
        slowest = int(stage_seconds.argmax())
        givers = [one for one in range(slowest, layers.size, pipeline.stages) if layers[one] > 1]
        if not givers:
            break
        giver = max(givers, key=lambda one: layers[one])
        takers = [one for one in range(layers.size) if one % pipeline.stages != slowest]
        lanes = np.repeat(seconds[:, None], len(takers), axis=1)
        lanes[part == giver] -= per_layer[part == giver, None]
        for lane, taker in enumerate(takers):
            lanes[part == taker, lane] += per_layer[part == taker]
        phases = pipeline.phase_seconds(np.maximum(lanes, 0.0))
        lane = int(phases.argmin())
        if phases[lane] > now * (1.0 - _WORTH_MOVING):
            break
        now, seconds = float(phases[lane]), np.maximum(lanes[:, lane], 0.0)
        layers[giver] -= 1
        layers[takers[lane]] += 1
        moves.append((slowest, takers[lane] % pipeline.stages))
    return now, tuple(moves)


def _seconds_per_layer(pipeline: Pipeline, typical: Floats, part: Ints, layers: Ints) -> Floats:
    """Return the seconds of one layer in each action: the median over the parts of the model."""
    per_layer = typical / layers[part]
    found = np.zeros_like(typical)
    for op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT):
        rows = pipeline.op == op
        if rows.any():
            by_part = [
                float(per_layer[rows & (part == number)].mean())
                for number in range(layers.size)
                if (rows & (part == number)).any()
            ]
            found[rows] = median(by_part)
    return found


def moves_text(found: Balance) -> str:
    """Return text such as `moving 2 of stage 3's 8 layers to stages 0 and 1`."""
    net = [0] * len(found.layers)
    for source, target in found.moves:
        net[source] -= 1
        net[target] += 1
    givers = [stage for stage, change in enumerate(net) if change < 0]
    takers = [stage for stage, change in enumerate(net) if change > 0]
    given = " and ".join(
        f"{-net[stage]} of stage {stage}'s {found.layers[stage]} layers" for stage in givers
    )
    return f"moving {given} to {_stages(takers)}"


def _stages(stages: Sequence[int]) -> str:
    if len(stages) == 1:
        return f"stage {stages[0]}"
    return f"stages {', '.join(map(str, stages[:-1]))} and {stages[-1]}"
