"""The efficiency of a job in its recent steps; docs/efficiency.md has the definitions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paceline_server.steps.devices import peak_flops
from paceline_server.steps.timing import Floats, Ints, RankTimes
from paceline_server.steps.types import Efficiency, MemoryUse, RankEfficiency, StepSummary
from paceline_server.steps.work import RankValues
from paceline_wire.spans import MemoryKind

_GIVE = "pass {0} to paceline.describe_model, or set PACELINE_{1}"
_LONGEST_NAME = 100
MOST_RANKS = 64  # ranks that are listed


class MeasuredStep(NamedTuple):
    """The input of a job's efficiency from one step. Arrays have one row per rank."""

    duration_seconds: float  # mean over the ranks: some may be ahead of others
    rank: Ints
    rank_seconds: Floats
    exposed_seconds: Floats
    overlapped_seconds: Floats
    samples: int | None
    tokens: int | None

    @classmethod
    def of(cls, summary: StepSummary, ranks: RankTimes) -> MeasuredStep:
        """Return the figures of a step from its summary and the times of its ranks."""
        return cls(
            summary.mean_seconds,
            ranks.rank,
            ranks.step_seconds,
            ranks.communication_seconds,
            ranks.overlapped_seconds,
            summary.samples,
            summary.tokens,
        )


def efficiency(
    steps: Sequence[MeasuredStep],
    metadata: Mapping[str, str],
    values: RankValues,
    world_size: int,
) -> Efficiency:
    """Return the efficiency over `steps`.

    Args:
        metadata: of the job, with what its ranks reported: device, FLOPs, how work is counted.
        values: memory and FLOPs of the ranks.
    """
    memory = _memory(values)
    if not steps:
        return Efficiency(memory=memory)
    samples, tokens = (
        _rate(steps, [getattr(step, name) for step in steps]) for name in ("samples", "tokens")
    )
    per_second, unknown = _model_flops(steps, metadata, values, world_size, samples, tokens)
    peak, peak_unknown = _peak(metadata)
    times = np.zeros((3, world_size))  # step, exposed, overlapped
    for step in steps:
        columns = step.rank_seconds, step.exposed_seconds, step.overlapped_seconds
        times[:, step.rank] += np.stack(columns)
    whole, exposed, overlapped = times.sum(axis=1).tolist()
    return Efficiency(
        steps=len(steps),
        samples_per_second=samples,
        tokens_per_second=tokens,
        counted_from=metadata.get("counted_from", "")[:_LONGEST_NAME] or None,
        model_flops_per_second=per_second,
        peak_flops_per_second=peak,
        mfu_ratio=per_second / (peak * world_size) if per_second and peak else None,
        mfu_unknown=unknown or peak_unknown,
        exposed_communication_ratio=exposed / whole if whole else None,
        overlapped_communication_ratio=overlapped / whole if whole else None,
        memory=memory,
        ranks=_ranks(times, values),
    )


def _ranks(times: Floats, values: RankValues) -> list[RankEfficiency]:
    """Return the ranks; of a large job those with the least exposed communication.

    The others wait for them.
    """
    present = np.flatnonzero(times[0])
    exposed, overlapped = times[1:, present] / times[0, present]
    listed = np.sort(np.argsort(exposed, kind="stable")[:MOST_RANKS])
    return [
        RankEfficiency(
            rank=rank,
            exposed_communication_ratio=float(exposed[row]),
            overlapped_communication_ratio=float(overlapped[row]),
            peak_bytes=values.memory.get(rank, {}).get(MemoryKind.PEAK),
        )
        for row, rank in zip(listed.tolist(), present[listed].tolist(), strict=True)
    ]


def _rate(steps: Sequence[MeasuredStep], counts: Sequence[int | None]) -> float | None:
    """Return the sum of the counts over the duration of the steps that have one."""
    counted = [
        (count, step.duration_seconds)
        for count, step in zip(counts, steps, strict=True)
        if count is not None
    ]
    seconds = sum(duration for _, duration in counted)
    return sum(count for count, _ in counted) / seconds if seconds > 0 else None


def _model_flops(
    steps: Sequence[MeasuredStep],
    metadata: Mapping[str, str],
    values: RankValues,
    world_size: int,
    samples_per_second: float | None,
    tokens_per_second: float | None,
) -> tuple[float | None, str | None]:
    """Return the model FLOP/s of the job, or None and why they are not known."""
    steps_per_second = len(steps) / (sum(step.duration_seconds for step in steps) or math.nan)
    for name, rate, work in (
        ("flops_per_step", _known(steps_per_second), "steps"),
        ("flops_per_token", tokens_per_second, "tokens"),
        ("flops_per_sample", samples_per_second, "samples"),
    ):
        given = _positive(metadata.get(name))
        if given is not None and rate is not None:
            return given * rate, None
        if given is not None:
            return None, f"{name} is given, but {work} are not counted: call paceline.count"
    if len(values.flops) == world_size:
        return _known(sum(values.flops.values()) * steps_per_second), None
    counted = "token" if tokens_per_second else "sample" if samples_per_second else "step"
    give = _GIVE.format(f"flops_per_{counted}", "COUNT_FLOPS=1")
    return None, f"the FLOPs of the model are not known: {give}"


def _peak(metadata: Mapping[str, str]) -> tuple[float | None, str | None]:
    """Return the peak of one device, or None and why it is not known."""
    name = metadata.get("gpu_name", "")[:_LONGEST_NAME]
    peak = _positive(metadata.get("peak_flops")) or peak_flops(name)
    if peak is not None:
        return peak, None
    what = f"the peak of {name} is not known" if name else "the ranks report no GPU"
    return None, f"{what}: {_GIVE.format('peak_flops', 'PEAK_FLOPS')}"


def _positive(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0.0 < value < math.inf else None


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _memory(values: RankValues) -> MemoryUse | None:
    fullest = values.fullest()
    if fullest is None:
        return None
    rank, known = fullest
    held = [known.get(kind) for kind in _HELD]
    peak, reserved = known.get(MemoryKind.PEAK), known.get(MemoryKind.RESERVED)
    inactive = known.get(MemoryKind.INACTIVE)
    sizes = [size for size in held if size is not None]
    complete = peak is not None and len(sizes) == len(_HELD)
    return MemoryUse(
        rank=rank,
        parameters_bytes=held[0],
        gradients_bytes=held[1],
        optimizer_bytes=held[2],
        activations_bytes=max((peak or 0) - sum(sizes), 0) if complete else None,
        allocated_bytes=known.get(MemoryKind.ALLOCATED),
        reserved_bytes=reserved,
        peak_bytes=peak,
        fragmentation_ratio=inactive / reserved if reserved and inactive is not None else None,
        after_forward_bytes=known.get(MemoryKind.AFTER_FORWARD),
        after_backward_bytes=known.get(MemoryKind.AFTER_BACKWARD),
        after_optimizer_bytes=known.get(MemoryKind.AFTER_OPTIMIZER),
    )


_HELD = (MemoryKind.PARAMETERS, MemoryKind.GRADIENTS, MemoryKind.OPTIMIZER)
