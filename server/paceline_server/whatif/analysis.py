"""The slowdown of a run, and how much each part of the run contributes to it.

`analyze` replays the recorded steps with some operations idealized. Every slowdown is a ratio of
mean step times; 1.0 is a run without stragglers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_server.whatif import dependencies
from paceline_server.whatif import operations as ops
from paceline_server.whatif.errors import TraceError
from paceline_server.whatif.model import Model, lay_out
from paceline_server.whatif.replay import Seconds, replay, step_seconds
from paceline_server.whatif.trace import Floats, Integers, Trace

# Clocks of nodes differ. If a transfer seems to end this long before its last participant started,
# its duration is unknown and counts as 0.
NEGATIVE_TRANSFER_SECONDS = -1e-2

# M_W idealizes this share of the workers.
SLOWEST_WORKERS_PERCENT = 3

# Counterfactuals are replayed in batches of this size. A few MiB keep the interpreter's overhead
# small and still fit into a processor cache.
BATCH_BYTES = 8 << 20

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Analysis:
    """Slowdowns against the ideal run, in which each operation is as fast as its peers.

    `m_s` and `m_w` are the shares of the slowdown that the last stage and the slowest 3% of workers
    explain; None if there is no slowdown, and `m_s` also if there is only one stage.
    `by_microbatch` is the share of the variance of compute times within a worker that its
    microbatches explain; None if unknown.
    """

    slowdown: float
    slowdown_by_step: dict[int, float]
    slowdown_by_optype: dict[str, float]
    slowdown_by_dp_rank: dict[int, float]
    slowdown_by_stage: dict[int, float]
    slowdown_by_worker: dict[int, float]  # by rank
    m_s: float | None
    m_w: float | None
    launch_slowdown: float
    ideal_seconds: float
    original_seconds: float
    slowest_workers: tuple[int, ...]  # the ranks that m_w idealizes, slowest first
    places: dict[int, tuple[int, int]]  # by rank: (dp rank, stage)
    by_microbatch: float | None = None


@dataclass(frozen=True, slots=True)
class PreparedTrace:
    """A trace prepared for replay; the first axis is the position in the model's order."""

    model: Model
    optype: npt.NDArray[np.str_]
    stage: npt.NDArray[np.int64]
    chunk: npt.NDArray[np.int64]
    microbatch: npt.NDArray[np.int64]
    recorded: Seconds  # [position, step, dp rank]: durations without waiting
    ideal: Seconds  # [place]


def prepare(trace: Trace) -> PreparedTrace:
    """Prepare a trace for replay.

    Raises:
        TraceError: the operations do not form a training step.
    """
    operations = trace.operations
    model = lay_out(dependencies.find(operations), operations.optype)
    optype = np.array(operations.optype)[model.order]
    recorded = _without_waiting(model, optype, trace)
    return PreparedTrace(
        model,
        optype,
        operations.stage[model.order],
        operations.chunk[model.order],
        operations.microbatch[model.order],
        recorded,
        ideal_seconds(optype, recorded),
    )


def ideal_seconds(optype: npt.NDArray[np.str_], recorded: Seconds) -> Seconds:
    """Return the ideal duration of each operation. [place]"""
    ideal = np.empty(len(optype))
    for name in dict.fromkeys(optype.tolist()):
        chosen = optype == name
        average = _median if name in ops.IDEAL_IS_MEDIAN else np.mean
        ideal[chosen] = average(recorded[chosen])
    return ideal


def _median(values: Seconds) -> float:
    """Return the median. numpy.median imports numpy.ma, which is 5% of the time of `paceline
    analyze`."""
    middle = [(values.size - 1) // 2, values.size // 2]
    return float(np.partition(values, middle, axis=None)[middle].mean())


def _without_waiting(model: Model, optype: npt.NDArray[np.str_], trace: Trace) -> Seconds:
    """Return the recorded durations of compute and the transfer durations of communication."""
    durations = trace.duration_seconds[model.order].astype(np.float64)
    began: Floats = trace.start_seconds[model.order]
    if len(model.pairs):
        send, receive = model.pairs.T
        began[send] = began[receive] = np.maximum(began[send], began[receive])
    for group in model.larger_groups:
        began[group] = began[group].max(axis=0)
    synchronized = np.flatnonzero(np.isin(optype, list(ops.SYNCHRONIZED)))
    began[synchronized] = began[synchronized].max(axis=2, keepdims=True)
    transferring = np.flatnonzero(np.isin(optype, list(ops.TRANSFERRING)))
    ended = trace.end_seconds[model.order[transferring]]
    transfer = (ended - began[transferring]).astype(np.float64)
    transfer[transfer <= NEGATIVE_TRANSFER_SECONDS] = 0
    durations[transferring] = transfer
    return durations


def analyze(trace: Trace, step: PreparedTrace | None = None) -> Analysis:
    """Analyze a trace.

    Args:
        step: the prepared trace, if it exists already.
    Raises:
        TraceError: the operations do not form a training step, or all durations are 0.
    """
    step = prepare(trace) if step is None else step
    recorded = trace.end_seconds.max(axis=(0, 2)) - trace.start_seconds.min(axis=(0, 2))
    return judge_step(step, trace.steps, trace.dp_ranks, trace.ranks, float(recorded.mean()))


def judge_step(
    step: PreparedTrace,
    steps: Integers,
    dp_ranks: Integers,
    ranks: Integers,
    recorded_seconds: float,
) -> Analysis:
    """Analyze prepared steps.

    Args:
        steps: step numbers.
        dp_ranks: dp rank numbers.
        ranks: the rank of each worker, [dp rank, stage].
        recorded_seconds: mean recorded step time.
    Raises:
        TraceError: all durations are 0.
    """
    ideal = ideal_step_seconds(step)
    if ideal <= 0:
        raise TraceError("all operations of the trace have a duration of 0")
    group = np.array([ops.group(name) for name in step.optype])
    names = list(dict.fromkeys(group.tolist()))
    stages = range(ranks.shape[1])
    all_kept = np.ones(len(step.ideal), bool)
    times = _keeping_operations(
        step,
        [
            all_kept,
            step.stage != stages[-1],
            *(step.stage == stage for stage in stages),
            *(group == name for name in names),
        ],
    )
    original = float(times[0].mean())
    slowdowns = times.mean(axis=1) / ideal
    by_stage = slowdowns[2 : 2 + len(stages)]
    by_dp_rank = _keeping_dp_ranks(step) / ideal
    by_worker = np.minimum.outer(by_dp_rank, by_stage)
    slowest = _slowest(by_worker, ranks)
    return Analysis(
        slowdown=float(slowdowns[0]),
        slowdown_by_step=_by(steps, times[0] / ideal),
        slowdown_by_optype=dict(zip(names, slowdowns[2 + len(stages) :].tolist(), strict=True)),
        slowdown_by_dp_rank=_by(dp_ranks, by_dp_rank),
        slowdown_by_stage=dict(zip(stages, by_stage.tolist(), strict=True)),
        slowdown_by_worker=_by(ranks, by_worker),
        m_s=_explained(original, ideal, float(times[1].mean())) if len(stages) > 1 else None,
        m_w=_explained(original, ideal, _without_workers(step, slowest)),
        launch_slowdown=recorded_seconds / original,
        original_seconds=original,
        ideal_seconds=ideal,
        slowest_workers=tuple(ranks[slowest].tolist()),
        places={
            int(rank): (int(dp_ranks[at]), int(stage))
            for (at, stage), rank in np.ndenumerate(ranks)
        },
        by_microbatch=_by_microbatch(step),
    )


def _by_microbatch(step: PreparedTrace) -> float | None:
    """Return the squared correlation of forward and backward times of the same microbatch.

    A long sequence is slow in both directions; a pause or a busy host is not. Times are relative
    to the mean of their worker and step. Source: "Understanding Stragglers in Large Model Training
    Using What-if Analysis", OSDI 2025, section 5.3.
    """
    deviations = []
    for stage, chunk in sorted(set(zip(step.stage.tolist(), step.chunk.tolist(), strict=True))):
        of_chunk = (step.stage == stage) & (step.chunk == chunk)
        places = [
            _numbered(step.microbatch, np.flatnonzero(of_chunk & (step.optype == op)))
            for op in (ops.FORWARD_COMPUTE, ops.BACKWARD_COMPUTE)
        ]
        both = sorted(places[0].keys() & places[1].keys())
        if len(both) > 1:
            seconds = np.array(
                [step.recorded[[place[number] for number in both]] for place in places],
                dtype=np.float64,
            )
            means = seconds.mean(axis=1, keepdims=True)
            deviations.append((seconds / np.maximum(means, 1e-12) - 1.0).reshape(2, -1))
    if not deviations:
        return None
    forward, backward = np.concatenate(deviations, axis=1)
    # Plain sums, because starting the threads of a linear algebra library takes longer than the
    # rest.
    variance = float((forward * forward).sum() * (backward * backward).sum())
    return float((forward * backward).sum() ** 2 / variance) if variance > 0 else 0.0


def _numbered(microbatch: Integers, places: npt.NDArray[np.intp]) -> dict[int, int]:
    """Return the position of each microbatch.

    Microbatches without a number are numbered in order.
    """
    numbers = microbatch[places]
    if (numbers < 0).all():
        numbers = np.arange(places.size)
    return dict(zip(numbers.tolist(), places.tolist(), strict=True))


def _by(keys: npt.NDArray[np.int64], values: Seconds) -> dict[int, float]:
    return dict(zip(keys.ravel().tolist(), values.ravel().tolist(), strict=True))


def _explained(original: float, ideal: float, without: float) -> float | None:
    return (original - without) / (original - ideal) if original > ideal else None


def ideal_step_seconds(step: PreparedTrace) -> float:
    """Return the ideal step time; all steps and dp ranks are equal, so only one is replayed."""
    ends = replay(step.model, step.ideal[:, None, None].copy())
    return float(step_seconds(step.model, ends)[0])


def _keeping_operations(step: PreparedTrace, kept: list[Mask]) -> Seconds:
    """Return step times with only the `kept` operations as recorded. [counterfactual, step]"""
    count, steps, dp_ranks = step.recorded.shape
    results = []
    for first, stop in _batches(len(kept), step.recorded.nbytes):
        times = np.empty((count, stop - first, steps, dp_ranks))
        times[:] = step.ideal[:, None, None, None]
        for at, mask in enumerate(kept[first:stop]):
            times[mask, at] = step.recorded[mask]
        ends = replay(step.model, times.reshape(count, -1, dp_ranks))
        results.append(step_seconds(step.model, ends).reshape(-1, steps))
    return np.concatenate(results)


def _keeping_dp_ranks(step: PreparedTrace) -> Seconds:
    """Return mean step times with one dp rank as recorded and all others ideal. [dp rank]

    The ideal dp ranks are equal, so only one of them is replayed, next to the recorded one.
    """
    count, steps, dp_ranks = step.recorded.shape
    width = min(dp_ranks, 2)
    by_dp_rank = step.recorded.transpose(0, 2, 1)
    results = []
    for first, stop in _batches(dp_ranks, count * steps * width * 8):
        times = np.empty((count, stop - first, steps, width))
        times[:] = step.ideal[:, None, None, None]
        times[..., 0] = by_dp_rank[:, first:stop]
        ends = replay(step.model, times.reshape(count, -1, width))
        results.append(step_seconds(step.model, ends).reshape(-1, steps).mean(axis=1))
    return np.concatenate(results)


def _batches(total: int, bytes_each: int) -> Iterator[tuple[int, int]]:
    size = max(1, BATCH_BYTES // bytes_each)
    for first in range(0, total, size):
        yield first, min(first + size, total)


def _slowest(scores: Seconds, ranks: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.intp], ...]:
    """Return the index of the slowest workers in [dp rank, stage]; ties go to the lower rank."""
    order = np.lexsort((ranks.ravel(), -scores.ravel()))
    count = -(-scores.size * SLOWEST_WORKERS_PERCENT // 100)
    return np.unravel_index(order[:count], scores.shape)


def _without_workers(step: PreparedTrace, workers: tuple[npt.NDArray[np.intp], ...]) -> float:
    """Return the mean step time with these workers, (dp rank, stage), idealized."""
    times = step.recorded.copy()
    for dp_rank, stage in zip(*workers, strict=True):
        rows = np.flatnonzero(step.stage == stage)
        times[rows, :, dp_rank] = step.ideal[rows, None]
    return float(step_seconds(step.model, replay(step.model, times)).mean())
