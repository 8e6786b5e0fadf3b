"""Every nanosecond of a step belongs to exactly one part."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_server.steps.breakdown import (
    Intervals,
    Part,
    allocate,
    break_down,
    compute_rows,
    rank_times,
)
from paceline_server.steps.columns import FIELDS, Spans
from paceline_server.steps.replicas import ReplicaPhases
from paceline_server.steps.timeline import StepTimeline
from paceline_wire.spans import Flag, Op

MS = 1_000_000
NONE = np.empty(0, dtype=np.int64)


def spans(*rows: tuple[int, int, int], flags: int = 0, chunk: int = 0) -> Spans:
    """Return spans of rows (op, start ms, end ms). Chunk -1: recognized, not marked."""
    table = np.full((FIELDS, len(rows)), -1, dtype=np.int64)
    for column, (op, start, end) in enumerate(rows):
        table[:, column] = [
            0, column, op, 0, chunk, flags, 0, -1, -1, 0, 0, start * MS, (end - start) * MS,
        ]  # fmt: skip
    return Spans(table)


def parts_of(
    *rows: tuple[int, int, int],
    waits_ms: list[int] | None = None,
    phase_ms: tuple[int, int] | None = None,
    flags: int = 0,
    chunk: int = 0,
) -> dict[str, float]:
    """Return seconds by part. The rows contain a STEP; `waits_ms` has one value per row."""
    one = spans(*rows, flags=flags, chunk=chunk)
    timeline = StepTimeline(one)
    alone = ReplicaPhases(timeline.end_ns, timeline.end_ns)
    if phase_ms is not None:
        alone = ReplicaPhases(*(np.array([moment * MS]) for moment in phase_ms))
    waits = np.array(waits_ms or [0] * len(rows)) * MS
    breakdown = break_down(one, waits, timeline, alone, compute_rows(one, timeline))
    times = rank_times(one, waits, timeline, breakdown, NONE)
    return {
        name.removesuffix("_seconds"): float(getattr(times, name)[0])
        for name in times.__slots__
        if name.endswith("_seconds")
    }


def test_a_collective_inside_a_forward_is_not_compute():
    part = parts_of(
        (Op.FORWARD, 0, 10), (Op.ALL_REDUCE, 4, 7), (Op.STEP, 0, 20), waits_ms=[0, 2, 0]
    )
    assert part["compute"] == part["self"] == 0.007
    assert part["communication"] == pytest.approx(0.003)
    assert part["wait"] == pytest.approx(0.002)


def test_an_async_collective_takes_no_host_time():
    rows = ((Op.FORWARD, 0, 10), (Op.ALL_REDUCE, 2, 9), (Op.STEP, 0, 10))
    assert parts_of(*rows, flags=Flag.ASYNC)["compute"] == 0.010


def test_a_gc_pause_is_not_compute():
    part = parts_of((Op.FORWARD, 0, 10), (Op.GC, 2, 5), (Op.STEP, 0, 10))
    assert (part["compute"], part["gc"]) == (0.007, 0.003)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_a_step_that_other_parts_fill_has_no_time_of_its_own(lengths: list[int]):
    """Not even the rounding of a sum, compared with which any other step would be slow."""
    ops = [Op.DATA_WAIT, Op.EVALUATE, Op.GC, Op.CHECKPOINT, Op.DATA_WAIT, Op.EVALUATE]
    ends = np.cumsum(lengths).tolist()
    rows = list(zip(ops, [0, *ends], ends, strict=False))
    part = parts_of(*rows, (Op.STEP, 0, ends[-1]), chunk=-1)
    assert part["self"] == part["compute"] == 0.0


def test_checkpoints_and_evaluations_are_neither_compute_nor_communication():
    part = parts_of(
        (Op.FORWARD, 0, 10),
        (Op.CHECKPOINT, 10, 20),
        (Op.BARRIER, 12, 18),
        (Op.EVALUATE, 20, 40),
        (Op.FORWARD, 22, 38),
        (Op.ALL_REDUCE, 25, 30),
        (Op.STEP, 0, 40),
    )
    assert (part["compute"], part["communication"], part["checkpoint"]) == (0.010, 0.0, 0.010)
    assert part["evaluation"] == 0.020


def test_a_rank_does_not_evaluate_while_it_waits_for_another():
    rows = ((Op.EVALUATE, 20, 40), (Op.ALL_REDUCE, 25, 30), (Op.BARRIER, 1, 9), (Op.STEP, 0, 40))
    part = parts_of(*rows, waits_ms=[0, 4, 7, 0])
    assert part["evaluation"] == pytest.approx(0.016)


def test_waiting_for_another_stage_is_the_bubble_only_within_the_pipeline_phase():
    part = parts_of(
        (Op.FORWARD_RECV, 0, 10),
        (Op.FORWARD, 10, 20),
        (Op.STEP, 0, 30),
        waits_ms=[10, 0, 0],
        phase_ms=(4, 26),
    )
    assert part["bubble"] == pytest.approx(0.006 + 0.006)  # in the receive and at the end
    assert part["wait"] == pytest.approx(0.004)


def test_time_beside_marked_microbatches_is_the_hosts_if_waits_are_recorded():
    rows = (
        (Op.FORWARD_RECV, 6, 10),
        (Op.FORWARD, 10, 20),
        (Op.OPTIMIZER, 20, 24),
        (Op.STEP, 0, 30),
    )
    waits, phase = [3, 0, 0, 0], (4, 26)
    part = parts_of(*rows, waits_ms=waits, phase_ms=phase)
    assert part["host"] == pytest.approx(0.006 + 0.010)  # before the receive, after the forward
    assert part["self"] == pytest.approx(0.010)
    assert parts_of(*rows, waits_ms=waits, phase_ms=phase, chunk=-1)["host"] == 0.0
    assert parts_of(*rows, waits_ms=waits, phase_ms=phase, flags=Flag.DEVICE)["host"] == 0.0
    assert parts_of(*rows[1:], phase_ms=phase)["host"] == 0.0


def test_without_microbatch_hooks_unexplained_time_is_compute():
    part = parts_of((Op.DATA_WAIT, 0, 2), (Op.ALL_REDUCE, 8, 10), (Op.STEP, 0, 12))
    assert part["self"] == pytest.approx(0.008)


def test_without_microbatch_hooks_the_optimizer_is_the_ranks_own_work_unless_on_a_device():
    rows = ((Op.ALL_REDUCE, 6, 8), (Op.OPTIMIZER, 8, 11), (Op.STEP, 0, 12))
    part = parts_of(*rows)
    assert part["self"] == pytest.approx(0.010)
    assert (part["compute"], part["optimizer"]) == (pytest.approx(0.007), 0.003)
    assert parts_of(*rows, flags=Flag.DEVICE)["self"] == pytest.approx(0.007)


def test_recognized_forwards_and_backwards_leave_the_rest_of_the_step_as_compute():
    rows = ((Op.FORWARD, 2, 5), (Op.BACKWARD, 5, 9), (Op.ALL_REDUCE, 8, 9), (Op.STEP, 0, 12))
    part = parts_of(*rows, waits_ms=[0, 0, 1, 0], chunk=-1)
    assert part["self"] == part["compute"] == pytest.approx(0.011)
    assert part["wait"] == pytest.approx(0.001)


def test_a_step_begins_with_the_wait_for_its_data():
    timeline = StepTimeline(spans((Op.DATA_WAIT, 1, 4), (Op.STEP, 4, 9)))
    assert (timeline.begin_ns[0], timeline.end_ns[0]) == (1 * MS, 9 * MS)


@given(
    st.lists(
        st.tuples(st.integers(-50, 150), st.integers(0, 100), st.integers(0, len(Part) - 1)),
        max_size=30,
    )
)
def test_parts_never_exceed_the_interval_and_match_a_naive_count(rows):
    starts = np.array([row[0] for row in rows], dtype=np.int64)
    ends = starts + np.array([row[1] for row in rows], dtype=np.int64)
    parts = np.array([row[2] for row in rows], dtype=np.int64)
    owners = np.zeros(starts.size, dtype=np.int64)
    claims = Intervals(np.clip(starts, 0, 100), np.clip(ends, 0, 100), parts, owners)
    parts_ns = allocate(claims, 1, owners, owners).part_ns[:, 0]
    naive = [0] * len(Part)
    for moment in range(100):
        active = [part for start, length, part in rows if start <= moment < start + length]
        if active:
            naive[min(active)] += 1
    assert parts_ns.tolist() == naive
