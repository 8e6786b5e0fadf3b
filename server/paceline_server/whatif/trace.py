"""A recorded trace as arrays: one row per operation of a worker's step, all steps side by side.

All steps and data-parallel ranks run the same operations, so the trace is a table of
[operation, step, dp rank] once its rows are put in their places. A worker is one (dp rank, stage);
its tensor- and sequence-parallel peers do the same work and are recorded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline_server.whatif import operations
from paceline_server.whatif.errors import TraceError

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]

# More is no rank but a column that was mixed up.
MOST_RANKS = 1_000_000

# More is no operation of a step but another unit.
LONGEST_SECONDS = 1e5

# Moments that lie further apart than this are rounded, not measured.
COARSEST_SECONDS = 0.01

# A trace whose table would be emptier than this has no two dp ranks or steps alike.
LEAST_FILLED_RATIO = 0.01

# Columns of the trace layout; times in seconds, `optype` as text or as codes of `optypes`.
COLUMNS = (
    "dp_rank",
    "stage",
    "rank",
    "step",
    "optype",
    "start_ts",
    "duration",
    "seq_id",
    "mc",
    "mb_id",
    "gmc",
)


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations of one pipeline (all stages of a dp rank) in one step, one entry each.

    `chunk` is local to the stage, `global_chunk` counts over the model; -1 where there is none, as
    recorded. `start_seconds` and `end_seconds` are those of the step the model is built from.
    """

    optype: tuple[str, ...]
    sequence: Integers
    stage: Integers
    chunk: Integers
    global_chunk: Integers
    microbatch: Integers
    start_seconds: Floats
    end_seconds: Floats

    def __len__(self) -> int:
        return len(self.optype)


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded steps. Times are [operation, step, dp rank], in seconds, as precise as recorded."""

    operations: Operations
    steps: Integers
    dp_ranks: Integers
    ranks: Integers  # [dp rank, stage]: the rank that was recorded as this worker
    start_seconds: Floats
    end_seconds: Floats
    duration_seconds: Floats
    notes: tuple[str, ...] = ()

    @property
    def stage_count(self) -> int:
        return int(self.ranks.shape[1])


def align(columns: Mapping[str, npt.NDArray[Any]], optypes: tuple[str, ...]) -> Trace:
    """Put the rows of a trace in their places.

    Args:
        columns: an array per name of `COLUMNS`, `optype` as an index into `optypes`.
    Raises:
        TraceError: the rows are no training steps.
    """
    columns = {name: np.asarray(columns[name]) for name in COLUMNS}
    _check_values(columns, optypes)
    columns, notes = _one_rank_per_worker(columns)
    stage = columns["stage"].astype(np.int64)
    stages = int(stage.max()) + 1
    steps, step_index = _dense(columns["step"])
    dp_ranks, dp_index = _dense(columns["dp_rank"])
    sequences, sequence_index = _dense(columns["seq_id"])
    code = (columns["optype"].astype(np.int64) * len(sequences) + sequence_index) * stages + stage

    ranks = _ranks(columns, dp_ranks, dp_index, stages)
    rows = _template_rows(columns, step_index, dp_index, code)
    place = np.full(len(optypes) * len(sequences) * stages, -1)
    place[code[rows]] = np.arange(len(rows))
    row_place = place[code]
    shape = (len(rows), len(steps), len(dp_ranks))
    if shape[0] * shape[1] * shape[2] * LEAST_FILLED_RATIO > len(code):
        raise TraceError(
            f"dp ranks and steps do not repeat the same operations: {len(code)} are recorded of "
            f"{shape[0]} operations x {shape[1]} steps x {shape[2]} dp ranks"
        )
    times, whole = _scatter(columns, (row_place, step_index, dp_index), shape)
    if not whole.all():
        notes += (_left_out(steps[~whole], len(steps)),)
        times = [part[:, whole] for part in times]
    return Trace(
        _template(columns, rows, optypes),
        steps[whole],
        dp_ranks,
        ranks,
        start_seconds=times[0],
        end_seconds=times[1],
        duration_seconds=times[2],
        notes=notes,
    )


def _check_values(columns: Mapping[str, npt.NDArray[Any]], optypes: tuple[str, ...]) -> None:
    if not len(columns["step"]):
        raise TraceError("the trace has no operation")
    for name in ("start_ts", "duration"):
        wrong = np.flatnonzero(~np.isfinite(columns[name]))
        if len(wrong):
            raise TraceError(
                f"column {name} has no number in {len(wrong)} of {len(columns[name])} rows, "
                f"the first is row {wrong[0]}"
            )
    latest = np.abs(columns["start_ts"]).max()
    if np.spacing(latest) > COARSEST_SECONDS:
        raise TraceError(
            f"column start_ts goes up to {latest:.4g} in {latest.dtype}, which tells moments "
            f"{np.spacing(latest):.4g} s apart: record it as double"
        )
    longest = float(columns["duration"].max())
    if longest > LONGEST_SECONDS:
        raise TraceError(
            f"column duration goes up to {longest:.4g}, expected seconds: was it recorded in "
            "another unit?"
        )
    used = {optypes[code] for code in np.flatnonzero(np.bincount(columns["optype"]))}
    if strange := sorted(used - operations.KNOWN):
        raise TraceError(
            f"operation type {strange[0]!r} is not one of a training step's, expected "
            f"{', '.join(sorted(operations.KNOWN))}"
        )
    if missing := [optype for optype in operations.COMPUTE[:2] if optype not in used]:
        raise TraceError(f"the trace has no {missing[0]} operation")
    for name in ("stage", "dp_rank"):
        low, high = int(columns[name].min()), int(columns[name].max())
        if low < 0 or high > MOST_RANKS:
            raise TraceError(f"column {name} goes from {low} to {high}, expected 0 to {MOST_RANKS}")
    present = np.bincount(columns["stage"])
    if not present.all():
        raise TraceError(
            f"the trace has stages up to {len(present) - 1}, but none of stage {present.argmin()}"
        )


def _dense(values: npt.NDArray[Any]) -> tuple[Integers, Integers]:
    """Sorted distinct values, and the index of each value among them."""
    low, high = int(values.min()), int(values.max())
    if high - low > 4 * len(values) + 65_536:
        distinct, index = np.unique(values, return_inverse=True)
        return distinct.astype(np.int64), index.astype(np.int64)
    # A table instead of a sort: the values lie close together in all but odd traces.
    shifted = values.astype(np.int64) - low
    table = np.zeros(high - low + 1, np.int64)
    table[shifted] = 1
    distinct = np.flatnonzero(table)
    table[distinct] = np.arange(len(distinct))
    return distinct + low, table[shifted]


def _one_rank_per_worker(
    columns: Mapping[str, npt.NDArray[Any]],
) -> tuple[dict[str, npt.NDArray[Any]], tuple[str, ...]]:
    """Keep the lowest rank of each (dp rank, stage) where its peers were recorded as well."""
    stages = int(columns["stage"].max()) + 1
    worker = columns["dp_rank"].astype(np.int64) * stages + columns["stage"]
    rank = columns["rank"].astype(np.int64)
    seen = np.zeros(int(worker.max()) + 1, np.int64)
    seen[worker] = rank
    if (seen[worker] == rank).all():
        return dict(columns), ()
    np.minimum.at(seen, worker, rank)
    kept = seen[worker] == rank
    note = "tensor- and sequence-parallel peers are recorded too: the lowest rank of each is judged"
    return {name: column[kept] for name, column in columns.items()}, (note,)


def _template_rows(
    columns: Mapping[str, npt.NDArray[Any]], step: Integers, dp: Integers, code: Integers
) -> Integers:
    """Rows of the first dp rank in the first step that is as long as most steps are."""
    counts = np.bincount(step)
    usual = np.bincount(counts).argmax()
    rows = np.flatnonzero((step == (counts == usual).argmax()) & (dp == 0))
    rows = rows[
        np.lexsort((columns["optype"][rows], columns["seq_id"][rows], columns["start_ts"][rows]))
    ]
    if not len(rows):
        raise TraceError("no step has operations of the first dp rank")
    times_recorded = np.bincount(code[rows])  # not np.unique, which imports numpy.ma
    if times_recorded.max() > 1:
        twice = times_recorded.argmax()
        row = rows[(code[rows] == twice).argmax()]
        raise TraceError(
            f"stage {columns['stage'][row]} of dp rank {columns['dp_rank'][row]} has two operations"
            f" of one type with seq_id {columns['seq_id'][row]} in step {columns['step'][row]}: "
            "are its rows in the file twice?"
        )
    return rows


def _scatter(
    columns: Mapping[str, npt.NDArray[Any]],
    index: tuple[Integers, Integers, Integers],
    shape: tuple[int, int, int],
) -> tuple[list[Floats], npt.NDArray[np.bool_]]:
    """Start, end and duration by place, and which steps have each operation exactly once."""
    place, step, dp = index
    flat = (place * shape[1] + step) * shape[2] + dp
    known = place >= 0
    if not known.all():
        flat = flat[known]
    filled = np.bincount(flat, minlength=shape[0] * shape[1] * shape[2])
    whole = (filled.reshape(shape) == 1).all(axis=(0, 2))
    whole[step[~known]] = False
    if not whole.any():
        raise TraceError(
            "no step has the same operations on every dp rank: the first has "
            f"{shape[0]} per dp rank, {shape[2]} dp ranks are recorded"
        )
    times = []
    # The end in the precision of the recording: what the published figures were computed from.
    for values in (
        columns["start_ts"],
        columns["start_ts"] + columns["duration"],
        columns["duration"],
    ):
        part = np.zeros(shape[0] * shape[1] * shape[2], values.dtype)
        part[flat] = values if known.all() else values[known]
        times.append(part.reshape(shape))
    return times, whole


def _left_out(steps: Integers, total: int) -> str:
    named = ", ".join(str(step) for step in steps[:5]) + (", ..." if len(steps) > 5 else "")
    return (
        f"{len(steps)} of {total} steps left out, as operations are missing in them or surplus: "
        f"{named}"
    )


def _template(
    columns: Mapping[str, npt.NDArray[Any]], rows: Integers, optypes: tuple[str, ...]
) -> Operations:
    start = columns["start_ts"][rows]
    return Operations(
        optype=tuple(optypes[code] for code in columns["optype"][rows]),
        sequence=columns["seq_id"][rows].astype(np.int64),
        stage=columns["stage"][rows].astype(np.int64),
        chunk=columns["mc"][rows].astype(np.int64),
        global_chunk=columns["gmc"][rows].astype(np.int64),
        microbatch=columns["mb_id"][rows].astype(np.int64),
        start_seconds=start,
        end_seconds=start + columns["duration"][rows],
    )


def _ranks(
    columns: Mapping[str, npt.NDArray[Any]], dp_ranks: Integers, dp_index: Integers, stages: int
) -> Integers:
    ranks = np.full((len(dp_ranks), stages), -1)
    ranks[dp_index, columns["stage"]] = columns["rank"]
    missing = np.argwhere(ranks < 0)
    if len(missing):
        replica, stage = missing[0]
        raise TraceError(
            f"the trace has nothing of dp rank {dp_ranks[replica]} in stage {stage}, expected the "
            "operations of each stage of each dp rank"
        )
    return ranks
