"""A recorded trace as arrays of [operation, step, dp rank].

All steps and data-parallel ranks run the same operations, so the rows of a trace fit into such
arrays. A worker is one (dp rank, stage). Its tensor- and sequence-parallel ranks do the same work,
so one of them is recorded.
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

# A larger value in a rank column means that columns were mixed up.
MOST_RANKS = 1_000_000

# A longer duration means that another unit was recorded.
LONGEST_SECONDS = 1e5

# The type of start_ts must have at least this resolution; coarser values were rounded.
COARSEST_SECONDS = 0.01

# If a smaller share of the entries is recorded, dp ranks or steps run different operations.
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

    `chunk` counts within the stage and `global_chunk` within the model; -1: none. `start_seconds`
    and `end_seconds` are those of the step that the dependencies are derived from.
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
    """Recorded steps. Times are [operation, step, dp rank], in seconds, of the recorded type."""

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
    """Arrange the rows of a trace in arrays of [operation, step, dp rank].

    Args:
        columns: an array per name of `COLUMNS`, `optype` as an index into `optypes`.
    Raises:
        TraceError: the rows do not form training steps.
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
            f"dp ranks and steps do not run the same operations: only {len(code)} operations are "
            f"recorded of {shape[0]} x {shape[1]} steps x {shape[2]} dp ranks"
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
        raise TraceError("the trace has no operations")
    for name in ("start_ts", "duration"):
        wrong = np.flatnonzero(~np.isfinite(columns[name]))
        if len(wrong):
            raise TraceError(
                f"column {name} is not a finite number in {len(wrong)} of {len(columns[name])} "
                f"rows, the first is row {wrong[0]}"
            )
    latest = np.abs(columns["start_ts"]).max()
    if np.spacing(latest) > COARSEST_SECONDS:
        raise TraceError(
            f"column start_ts goes up to {latest:.4g} in {latest.dtype}, which has a resolution of "
            f"{np.spacing(latest):.4g} s there: record it as double"
        )
    longest = float(columns["duration"].max())
    if longest > LONGEST_SECONDS:
        raise TraceError(
            f"column duration goes up to {longest:.4g}, expected seconds: was it recorded in "
            "another unit?"
        )
    used = {optypes[code] for code in np.flatnonzero(np.bincount(columns["optype"]))}
    if unknown := sorted(used - operations.KNOWN):
        raise TraceError(
            f"unknown operation type {unknown[0]!r}, expected one of "
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
            f"the trace has stages up to {len(present) - 1}, but no operations of stage "
            f"{present.argmin()}"
        )


def _dense(values: npt.NDArray[Any]) -> tuple[Integers, Integers]:
    """Return the sorted distinct values, and the index of each value in them."""
    low, high = int(values.min()), int(values.max())
    if high - low > 4 * len(values) + 65_536:
        distinct, index = np.unique(values, return_inverse=True)
        return distinct.astype(np.int64), index.astype(np.int64)
    # A table is faster than a sort; in most traces the values lie close together.
    shifted = values.astype(np.int64) - low
    table = np.zeros(high - low + 1, np.int64)
    table[shifted] = 1
    distinct = np.flatnonzero(table)
    table[distinct] = np.arange(len(distinct))
    return distinct + low, table[shifted]


def _one_rank_per_worker(
    columns: Mapping[str, npt.NDArray[Any]],
) -> tuple[dict[str, npt.NDArray[Any]], tuple[str, ...]]:
    """Keep only the lowest rank of each (dp rank, stage), with a note if others were recorded."""
    stages = int(columns["stage"].max()) + 1
    worker = columns["dp_rank"].astype(np.int64) * stages + columns["stage"]
    rank = columns["rank"].astype(np.int64)
    seen = np.zeros(int(worker.max()) + 1, np.int64)
    seen[worker] = rank
    if (seen[worker] == rank).all():
        return dict(columns), ()
    np.minimum.at(seen, worker, rank)
    kept = seen[worker] == rank
    note = (
        "tensor- and sequence-parallel peers are recorded too: only the lowest rank of each worker "
        "is analyzed"
    )
    return {name: column[kept] for name, column in columns.items()}, (note,)


def _template_rows(
    columns: Mapping[str, npt.NDArray[Any]], step: Integers, dp: Integers, code: Integers
) -> Integers:
    """Return the rows of the first dp rank in the first step with the usual number of rows."""
    counts = np.bincount(step)
    usual = np.bincount(counts).argmax()
    rows = np.flatnonzero((step == (counts == usual).argmax()) & (dp == 0))
    rows = rows[
        np.lexsort((columns["optype"][rows], columns["seq_id"][rows], columns["start_ts"][rows]))
    ]
    if not len(rows):
        raise TraceError("no step has operations of the first dp rank")
    counts_by_code = np.bincount(code[rows])  # not np.unique, which imports numpy.ma
    if counts_by_code.max() > 1:
        repeated = counts_by_code.argmax()
        row = rows[(code[rows] == repeated).argmax()]
        raise TraceError(
            f"stage {columns['stage'][row]} of dp rank {columns['dp_rank'][row]} has two operations"
            f" of one type with seq_id {columns['seq_id'][row]} in step {columns['step'][row]}: "
            "are rows duplicated in the file?"
        )
    return rows


def _scatter(
    columns: Mapping[str, npt.NDArray[Any]],
    index: tuple[Integers, Integers, Integers],
    shape: tuple[int, int, int],
) -> tuple[list[Floats], npt.NDArray[np.bool_]]:
    """Return [start, end, duration], and a mask of the steps with each operation exactly once."""
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
    # The end is computed in the recorded type, like in the published figures.
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
        f"{len(steps)} of {total} steps left out, because they have missing or extra operations: "
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
            f"the trace has no operations of dp rank {dp_ranks[replica]} in stage {stage}, "
            "expected operations of every stage on every dp rank"
        )
    return ranks
