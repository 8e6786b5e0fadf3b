"""Aligning the rows of a trace in arrays, and the errors for invalid traces."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from synthetic_trace import SyntheticRun, coded

from paceline_server.whatif.analysis import analyze
from paceline_server.whatif.errors import TraceError
from paceline_server.whatif.trace import align

Columns = dict[str, npt.NDArray[Any]]


@pytest.fixture
def columns() -> Columns:
    return SyntheticRun(dp=3, pp=3, tp=2, jitter=0.1).columns()


def without(columns: Columns, rows: npt.NDArray[np.bool_]) -> Columns:
    return {name: values[~rows] for name, values in columns.items()}


def test_order_of_rows_does_not_matter(columns: Columns) -> None:
    order = np.random.default_rng(3).permutation(len(columns["step"]))
    shuffled = {name: values[order] for name, values in columns.items()}
    assert analyze(align(*coded(shuffled))) == analyze(align(*coded(columns)))


def test_step_with_a_missing_operation_is_left_out_and_reported(columns: Columns) -> None:
    lost = np.zeros(len(columns["step"]), bool)
    lost[np.flatnonzero((columns["step"] == 17) & (columns["dp_rank"] == 2))[:1]] = True
    trace = align(*coded(without(columns, lost)))
    assert trace.steps.tolist() == [7, 27]
    assert trace.notes == (
        "1 of 3 steps left out, because they have missing or extra operations: 17",
    )
    assert analyze(trace) == analyze(align(*coded(without(columns, columns["step"] == 17))))


def test_first_step_with_a_missing_operation_is_left_out(columns: Columns) -> None:
    lost = np.zeros(len(columns["step"]), bool)
    lost[np.flatnonzero((columns["step"] == 7) & (columns["dp_rank"] == 0))[:1]] = True
    assert align(*coded(without(columns, lost))).steps.tolist() == [17, 27]


def test_only_the_lowest_tensor_parallel_rank_is_analyzed(columns: Columns) -> None:
    peers = {name: np.concatenate([values, values]) for name, values in columns.items()}
    count = len(columns["rank"])
    peers["rank"][:count] += 1
    trace = align(*coded(peers))
    assert trace.ranks.tolist() == [[0, 6, 12], [2, 8, 14], [4, 10, 16]]
    assert "peers are recorded too" in trace.notes[0]
    assert analyze(trace) == analyze(align(*coded(columns)))


def test_step_numbers_may_be_far_apart(columns: Columns) -> None:
    columns["step"] = columns["step"].astype(np.int64) * 10**12
    assert align(*coded(columns)).steps.tolist() == [7 * 10**12, 17 * 10**12, 27 * 10**12]


def with_value(columns: Columns, name: str, row: int, value: Any) -> Columns:
    columns[name] = columns[name].copy()
    columns[name][row] = value
    return columns


def without_operation(columns: Columns, optype: str, stage: int, sequence: int = 0) -> Columns:
    return without(
        columns,
        (columns["optype"] == optype)
        & (columns["stage"] == stage)
        & (columns["seq_id"] == sequence),
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: without(c, np.ones(len(c["step"]), bool)), "no operations"),
        (lambda c: with_value(c, "duration", 5, np.nan), "duration is not a finite number in 1 of"),
        (lambda c: with_value(c, "start_ts", 5, np.inf), "the first is row 5"),
        (lambda c: with_value(c, "optype", 5, "all-to-all"), "unknown operation type 'all-to-all'"),
        (lambda c: without(c, c["optype"] == "backward-compute"), "has no backward-compute"),
        (lambda c: without(c, c["stage"] == 1), "no operations of stage 1"),
        (
            lambda c: without(c, (c["stage"] == 1) & (c["dp_rank"] == 2)),
            "no operations of dp rank 2 in stage 1",
        ),
        (lambda c: {**c, "duration": c["duration"] * 1e9}, "expected seconds"),
        (
            lambda c: {**c, "start_ts": (c["start_ts"] + 1.7e9).astype(np.float32)},
            "in float32, which has a resolution of 128 s there: record it as double",
        ),
        (lambda c: with_value(c, "stage", 5, 2_000_000), "column stage goes from 0 to 2000000"),
        (lambda c: with_value(c, "dp_rank", 5, -1), "column dp_rank goes from -1"),
        (
            lambda c: without(c, (c["dp_rank"] == 1) & (c["seq_id"] == 0)),
            "no step has the same operations on every dp rank",
        ),
        (
            lambda c: {**c, "duration": c["duration"] * 0, "start_ts": c["duration"] * 0},
            "have a duration of 0",
        ),
        (lambda c: {**c, "seq_id": np.zeros_like(c["seq_id"])}, "two operations of one type"),
        (
            lambda c: without_operation(
                without_operation(c, "forward-recv", 1), "forward-recv", 1, 1
            ),
            "2 forward-recv",
        ),
        (lambda c: without_operation(c, "forward-send", 0), "to stage 1, which has 4 forward-recv"),
    ],
)
def test_invalid_trace_is_rejected(columns: Columns, change: Any, sentence: str) -> None:
    with pytest.raises(TraceError, match=sentence):
        analyze(align(*coded(change(columns))))


def test_impossible_order_is_rejected(columns: Columns) -> None:
    """According to its timestamps, stage 1 runs its first backward before any forward."""
    first = (columns["optype"] == "backward-compute") & (columns["stage"] == 1)
    columns["start_ts"] = np.where(
        first & (columns["seq_id"] == 0), columns["start_ts"] - 1.0, columns["start_ts"]
    )
    with pytest.raises(TraceError, match="wait for each other in a cycle"):
        analyze(align(*coded(columns)))
