"""Dependencies whose absence would not change the replay of a balanced schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from synthetic_trace import SyntheticRun, coded

from paceline_server.whatif import dependencies
from paceline_server.whatif.analysis import analyze
from paceline_server.whatif.errors import TraceError
from paceline_server.whatif.trace import Operations, align

Columns = dict[str, npt.NDArray[Any]]


@pytest.fixture
def columns() -> Columns:
    return SyntheticRun(dp=1, pp=3, microbatches=4, steps=1, data_parallel=False).columns()


def operations(columns: Columns) -> Operations:
    return align(*coded(columns)).operations


def at(found: Operations, optype: str, stage: int, sequence: int) -> int:
    (op,) = (
        op
        for op in range(len(found))
        if (found.optype[op], found.stage[op], found.sequence[op]) == (optype, stage, sequence)
    )
    return op


def row(columns: Columns, optype: str, stage: int, sequence: int) -> int:
    (found,) = np.flatnonzero(
        (columns["optype"] == optype)
        & (columns["stage"] == stage)
        & (columns["seq_id"] == sequence)
    )
    return int(found)


def test_first_backward_receive_follows_the_second_last_forward(columns: Columns) -> None:
    found = operations(columns)
    # Stage 0 runs three forwards before its first backward; the receive follows the second one.
    receive = at(found, "backward-recv", 0, 0)
    expected = [at(found, "forward-compute", 0, 1)]
    assert dependencies.find(found).predecessors[receive] == expected


def test_a_send_and_its_receive_start_together(columns: Columns) -> None:
    found = operations(columns)
    pair = [at(found, "forward-send", 1, 2), at(found, "forward-recv", 2, 2)]
    assert pair in dependencies.find(found).groups


def test_clipping_couples_all_stages_and_embeddings_the_outer_two(columns: Columns) -> None:
    found = operations(columns)
    groups = [sorted(group) for group in dependencies.find(found).groups]
    clip = [at(found, "optimizer-clip-main-grad", stage, 0) for stage in range(3)]
    embedding = [at(found, "embedding-grads-all-reduce", stage, 0) for stage in (0, 2)]
    assert sorted(clip) in groups
    assert sorted(embedding) in groups


def with_late_receive(columns: Columns, seconds: float) -> Columns:
    """Start the last forward receive of stage 1 `seconds` after the start of its compute."""
    compute = row(columns, "forward-compute", 1, 3)
    receive = row(columns, "forward-recv", 1, 3)
    columns["start_ts"][receive] = columns["start_ts"][compute] + seconds
    return columns


def test_small_clock_differences_are_tolerated(columns: Columns) -> None:
    found = operations(with_late_receive(columns, 40e-6))
    compute, receive = at(found, "forward-compute", 1, 3), at(found, "forward-recv", 1, 3)
    assert receive in dependencies.find(found).predecessors[compute]


def test_receive_after_the_last_compute_belongs_to_no_compute(columns: Columns) -> None:
    with pytest.raises(TraceError, match="stage 0 has 4 forward-send operations to stage 1, which"):
        dependencies.find(operations(with_late_receive(columns, 60e-6)))


def with_row(columns: Columns, like: int, **replaced: Any) -> Columns:
    return {
        name: np.append(values, replaced.get(name, values[like]))
        for name, values in columns.items()
    }


def test_extra_transfer_records_do_not_change_the_result(columns: Columns) -> None:
    expected = analyze(align(*coded(columns)))
    end = columns["start_ts"][row(columns, "optimizer", 1, 0)]
    surplus = with_row(
        columns, row(columns, "forward-recv", 1, 3), seq_id=4, start_ts=end, duration=1e-6
    )
    columns = SyntheticRun(dp=1, pp=3, microbatches=4, steps=1, data_parallel=False).columns()
    first = row(columns, "backward-send", 1, 0)
    early = {name: values.copy() for name, values in columns.items()}
    early["seq_id"][(columns["optype"] == "backward-send") & (columns["stage"] == 1)] += 1
    early = with_row(early, first, seq_id=0, start_ts=0.001, duration=1e-6)
    for changed in (surplus, early):
        found = analyze(align(*coded(changed)))
        assert found.original_seconds == pytest.approx(expected.original_seconds, abs=1e-9)


def test_transfers_without_a_peer_may_be_missing() -> None:
    columns = SyntheticRun(dp=2, pp=2, chunks=2, microbatches=4).columns()
    expected = analyze(align(*coded(columns)))
    sent = columns["duration"] > 1e-5
    found = analyze(align(*coded({name: values[sent] for name, values in columns.items()})))
    assert sent.sum() < len(sent)
    assert found.original_seconds == pytest.approx(expected.original_seconds, abs=1e-4)
    assert found.slowdown == pytest.approx(expected.slowdown, abs=1e-4)


def test_nth_clip_of_each_stage_forms_a_group(columns: Columns) -> None:
    clip = np.flatnonzero(columns["optype"] == "optimizer-clip-main-grad")
    again = {name: values[clip] for name, values in columns.items()}
    again["seq_id"], again["start_ts"] = again["seq_id"] + 1, again["start_ts"] + 0.01
    found = operations(
        {name: np.concatenate([values, again[name]]) for name, values in columns.items()}
    )
    groups = [sorted(group) for group in dependencies.find(found).groups]
    for part in (0, 1):
        assert (
            sorted(at(found, "optimizer-clip-main-grad", stage, part) for stage in range(3))
            in groups
        )
