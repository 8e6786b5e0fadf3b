"""Draw the job and the faults of a trial, and tune the faults to the cost they should have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from paceline_evaluation import faults
from paceline_evaluation.conditions import QUIET, Conditions
from paceline_evaluation.faults import COUNTED_MAGNITUDE, HiddenTraffic, TrialFault, TrialPlan
from paceline_evaluation.program import build
from paceline_evaluation.shape import JobShape, draw_shape
from paceline_evaluation.timeline import play

_LARGEST_FACTOR = 10_000.0
_SECONDS_RANGE = (0.1, 100.0)  # least and most seconds to try, relative to the wanted cost
_ROUNDS = 14
_TRIES = 50
_STEPS_OF_STALLS = 16  # averages over the positions of stalls in the schedule
_STEPS_OF_PAUSES = 64  # averages over the number of pauses in a step
_STEPS_OF_LENGTHS = 64  # averages over the drawn sequence lengths


def draw_plan(kind: str, chance: np.random.Generator, onset: int, largest: int) -> TrialPlan:
    """Draw the plan of a trial. Raises ValueError if `kind` is unknown."""
    if kind not in faults.KINDS:
        raise ValueError(f"kind must be one of {', '.join(faults.KINDS)}, got {kind!r}")
    for _ in range(_TRIES):
        pipeline = kind in ("slow_link", "stage_imbalance")
        plan = _draw(kind, chance, draw_shape(chance, largest, pipeline=pipeline), onset)
        if plan is not None:
            return plan
    raise RuntimeError(f"none of {_TRIES} drawn jobs can have a {kind} that costs enough")


def step_seconds(
    shape: JobShape, plan_faults: tuple[TrialFault, ...] = (), steps: int = 1
) -> float:
    """Return the mean step time without noise, except sequence lengths, with all faults active.

    The same number of steps has the same lengths, whatever the faults.
    """
    program = build(shape, extra=has_late_traffic(plan_faults))
    lasting = tuple(replace(fault, onset_step=0, steps=None) for fault in plan_faults)
    conditions = Conditions(shape, program, QUIET, np.random.default_rng(0), lasting)
    durations = conditions.draw(0, steps + 1)  # the first one follows no optimizer step
    durations.checkpoint[:] = 0.0
    carry = np.zeros(conditions.grid)
    return float(play(shape, program, durations, carry).step_seconds[1:].mean())


def has_late_traffic(plan_faults: tuple[TrialFault, ...]) -> bool:
    return any(fault.traffic is not None for fault in plan_faults)


def _draw(kind: str, chance: np.random.Generator, shape: JobShape, onset: int) -> TrialPlan | None:
    """Draw a plan for this job; None if it cannot have such a fault."""
    if kind == "none":
        return TrialPlan(shape)
    if kind == "slow_node" and shape.node_count < 2:
        return None  # a slow node is recognized only by comparison with others
    if kind == "late_link" and shape.topology.dp < 2:
        return None  # a reduction needs replicas
    if kind == "stage_imbalance":
        return _stage_imbalance(chance, shape)
    if kind == "sequence_variance":
        return _sequence_variance(chance, shape)
    if kind == "two_faults":
        return _two_faults(chance, shape, onset)
    if kind in ("hang", "crash"):
        return TrialPlan(shape, (_ending(kind, chance, shape, onset),))
    return _one(kind, chance, shape, onset)


def _ending(kind: str, chance: np.random.Generator, shape: JobShape, onset: int) -> TrialFault:
    """Draw a hang or crash. A mismatch (a rank skips its reduction) needs dp > 1."""
    rank = faults.draw_rank(chance, shape)
    sides = faults.HANG_CAUSES if shape.topology.dp > 1 else faults.HANG_CAUSES[:2]
    cause = str(chance.choice(sides, p=[0.6, 0.2, 0.2][: len(sides)] if len(sides) > 2 else None))
    return TrialFault(kind, onset, 1.0, ranks=(rank,), node=shape.node_number(rank), cause=cause)


def _one(kind: str, chance: np.random.Generator, shape: JobShape, onset: int) -> TrialPlan | None:
    fault = _SINGLE[kind](chance, shape, onset)
    tuned = _tuned(shape, fault)
    return None if tuned is None else TrialPlan(shape, (tuned,))


_SINGLE: dict[str, Callable[[np.random.Generator, JobShape, int], TrialFault]] = {
    "slow_rank": faults.slow_rank,
    "slow_node": faults.slow_node,
    "slow_link": faults.slow_link,
    "data_stall": faults.data_stall,
    "transient_stall": faults.transient_stall,
    "stalled_microbatch": faults.stalled_microbatch,
    "slow_creep": faults.slow_creep,
    "late_link": faults.late_link,
    "gc": lambda chance, shape, _: faults.gc_pauses(chance, shape, 0),
}


def _tuned(shape: JobShape, fault: TrialFault) -> TrialFault | None:
    """Return the fault with the factor or seconds that make the step take `magnitude` longer."""
    if fault.kind in ("slow_rank", "slow_node", "slow_creep"):
        return fault
    if fault.kind == "late_link":
        return _tuned_late(shape, fault)
    steps = 1 if shape.lengths is None else _STEPS_OF_STALLS
    if fault.kind in ("data_stall", "transient_stall"):
        return replace(fault, seconds=fault.magnitude * step_seconds(shape, steps=steps))
    if fault.kind == "stalled_microbatch":
        return _solved_seconds(shape, fault, _STEPS_OF_STALLS)
    if fault.kind == "gc":
        # On average one to two ranks pause per step, and all others wait for them.
        share = min(1.0, 1.5 / shape.world_size)
        return _solved_seconds(shape, replace(fault, factor=share), _STEPS_OF_PAUSES)
    return _solved_factor(shape, fault, steps)


def _tuned_late(shape: JobShape, fault: TrialFault) -> TrialFault | None:
    """Tune the mean cost over all steps, including those without the reduction."""
    assert fault.traffic is not None
    always = replace(
        fault, traffic=HiddenTraffic(0, 1), magnitude=fault.magnitude * fault.traffic.every
    )
    solved = _solved_factor(shape, always, 1 if shape.lengths is None else _STEPS_OF_STALLS)
    return None if solved is None else replace(fault, factor=solved.factor)


def _solved_factor(shape: JobShape, fault: TrialFault, steps: int) -> TrialFault | None:
    limits = (1.0, _LARGEST_FACTOR)
    return _solved(
        shape, lambda factor: replace(fault, factor=factor), fault.magnitude, limits, steps
    )


def _solved_seconds(shape: JobShape, fault: TrialFault, steps: int) -> TrialFault | None:
    wanted = fault.magnitude * step_seconds(shape, steps=steps)
    limits = (_SECONDS_RANGE[0] * wanted, _SECONDS_RANGE[1] * wanted)
    return _solved(
        shape, lambda seconds: replace(fault, seconds=seconds), fault.magnitude, limits, steps
    )


def _solved(
    shape: JobShape,
    candidate: Callable[[float], TrialFault],
    cost: float,
    limits: tuple[float, float],
    steps: int,
) -> TrialFault | None:
    """Find by bisection the candidate that makes the step take `cost` longer.

    Return None if even that of the upper limit costs too little.
    """
    low, high = limits
    wanted = (1.0 + cost) * step_seconds(shape, steps=steps)
    if step_seconds(shape, (candidate(high),), steps) < wanted:
        return None
    for _ in range(_ROUNDS):
        middle = (low * high) ** 0.5
        if step_seconds(shape, (candidate(middle),), steps) < wanted:
            low = middle
        else:
            high = middle
    return candidate(high)


def _stage_imbalance(chance: np.random.Generator, shape: JobShape) -> TrialPlan | None:
    """Draw uneven stages; the cost is relative to the same layers, evenly spread."""
    uneven, part = faults.uneven_stages(chance, replace(shape, head_seconds=0.0))
    even = replace(
        uneven,
        layer_seconds=uneven.layer_seconds * sum(uneven.stage_layers) / sum(shape.stage_layers),
        stage_layers=shape.stage_layers,
    )
    cost = step_seconds(uneven) / step_seconds(even) - 1.0
    if cost < COUNTED_MAGNITUDE:
        return None
    stage = part % shape.topology.pp
    return TrialPlan(uneven, (TrialFault("stage_imbalance", 0, cost, stage=stage),))


def _sequence_variance(chance: np.random.Generator, shape: JobShape) -> TrialPlan | None:
    if shape.topology.dp * shape.topology.pp == 1:
        return None  # no rank waits for another one
    uneven = faults.uneven_sequences(chance, shape)
    cost = (
        step_seconds(uneven, steps=_STEPS_OF_LENGTHS) / step_seconds(replace(uneven, lengths=None))
        - 1.0
    )
    if cost < COUNTED_MAGNITUDE:
        return None
    return TrialPlan(uneven, (TrialFault("sequence_variance", 0, cost),))


def _two_faults(chance: np.random.Generator, shape: JobShape, onset: int) -> TrialPlan | None:
    """Draw a slow rank and a second fault on another node, at most five steps later."""
    if shape.node_count < 2:
        return None
    kinds = ["slow_rank", "data_stall", *(["slow_link"] if shape.topology.pp > 1 else [])]
    first = faults.slow_rank(chance, shape, onset, COUNTED_MAGNITUDE)
    other = _one(str(chance.choice(kinds)), chance, shape, onset + int(chance.integers(0, 6)))
    if other is None or not other.faults[0].counts:
        return None
    second = other.faults[0]
    touched = {shape.node_number(rank) for rank in second.link or second.ranks}
    if first.node in touched:
        return None
    return TrialPlan(shape, (first, second))
