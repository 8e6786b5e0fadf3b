"""The compute operations and transfers of all recent steps as two tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from paceline_server.steps.grid import grid_of
from paceline_server.steps.timing import ComputeTimes, StepTiming
from paceline_wire.spans import COMPUTE_OPS, RECEIVE_OPS, TRANSFER_OPS, Op
from paceline_wire.topology import Topology

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Larger microbatch and chunk numbers are invalid.
MOST_MICROBATCHES = 1 << 16
MOST_CHUNKS = 1 << 10

# Tolerance between the host and device clocks that time the same rank.
CLOCK_TOLERANCE_NS = 50_000

_SENDS = sorted(TRANSFER_OPS - RECEIVE_OPS)


class StepColumns:
    """A table of named columns; `cell` is (step, dp rank, tp rank) as one number."""

    def __init__(
        self, columns: Mapping[str, Ints], seconds: Floats, cell: Ints, cells: int
    ) -> None:
        self._columns = dict(columns)
        self.seconds = seconds
        self.cell = cell
        self.cells = cells

    def __len__(self) -> int:
        return self.cell.size

    def __getitem__(self, name: str) -> Ints:
        return self._columns[name]

    def rows(self, cell: int) -> StepColumns:
        return self.where(self.cell == cell)

    def where(self, mask: npt.NDArray[np.bool_]) -> StepColumns:
        if mask.all():
            return self
        columns = {name: column[mask] for name, column in self._columns.items()}
        return StepColumns(columns, self.seconds[mask], self.cell[mask], self.cells)

    def tuples(self, *names: str) -> Iterator[tuple[int, ...]]:
        return zip(*(self._columns[name].tolist() for name in names), strict=True)

    def number(self, start: str, *names: str) -> None:
        """Set `microbatch` to a count of the rows that are equal in `names`, ordered by `start`."""
        keys = [self.cell, *(self._columns[name] for name in names)]
        order = np.lexsort((self._columns[start], *reversed(keys)))
        new = np.zeros(len(self), np.bool_)
        new[:1] = True
        for key in keys:
            ordered = key[order]
            new[1:] |= ordered[1:] != ordered[:-1]
        first = np.maximum.accumulate(np.where(new, np.arange(len(self)), 0))
        numbers = np.empty(len(self), np.int64)
        numbers[order] = np.arange(len(self)) - first
        self._columns["microbatch"] = numbers

    def are_named(self, *names: str) -> bool:
        """Return whether every microbatch is known and no two rows are equal in `names`."""
        rows = list(self.tuples(*names))
        return bool((self._columns["microbatch"] >= 0).all()) and len(set(rows)) == len(rows)


class Layout:
    """Coordinates of each rank of a topology, as arrays by rank."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        grid = grid_of(topology)
        self.ranks = grid.ranks  # [stage, dp rank, tp rank]
        # Expert ranks count as dp ranks, context ranks as tp ranks: the replay has three axes.
        self.stage, self.dp_rank, self.tp_rank = grid.stage, grid.replica, grid.shard
        self.dp, self.tp = grid.replicas, grid.shards
        self.replica = self.dp_rank * self.tp + self.tp_rank
        self.replicas = self.dp * self.tp

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return a rank's stage, dp rank and tp rank."""
        return int(self.stage[rank]), int(self.dp_rank[rank]), int(self.tp_rank[rank])

    def known(self, rank: Ints) -> npt.NDArray[np.bool_]:
        """Return a mask of the ranks that exist."""
        exists: npt.NDArray[np.bool_] = (rank >= 0) & (rank < self.topology.world_size)
        return exists


def compute_columns(timings: Sequence[StepTiming], layout: Layout) -> StepColumns:
    """Return the compute operations.

    If none are recorded, a single-stage step is one forward operation.
    """
    tables = [timing.compute for timing in timings]
    if layout.topology.pp == 1 and not any(table.rank.size for table in tables):
        tables = [_whole_step(timing) for timing in timings]
    columns = _join(tables, ("rank", "op", "microbatch", "chunk", "start_ns", "end_ns"))
    step = np.repeat(np.arange(len(tables)), [table.rank.size for table in tables])
    seconds = np.concatenate([table.self_seconds for table in tables])
    usable = layout.known(columns["rank"]) & np.isin(columns["op"], sorted(COMPUTE_OPS))
    usable &= _plausible(columns) & np.isfinite(seconds)
    if not usable.all():
        columns = {name: column[usable] for name, column in columns.items()}
        step, seconds = step[usable], seconds[usable]
    rank = columns.pop("rank")
    columns["stage"] = layout.stage[rank]
    cell = step * layout.replicas + layout.replica[rank]
    return StepColumns(columns, seconds, cell, len(tables) * layout.replicas)


def _whole_step(timing: StepTiming) -> ComputeTimes:
    ranks = timing.ranks
    start_ns = ranks.start_ns + (ranks.data_wait_seconds * 1e9).astype(np.int64)
    zeros = np.zeros_like(ranks.rank)
    return ComputeTimes(
        rank=ranks.rank,
        op=zeros + Op.FORWARD,
        microbatch=zeros,
        chunk=zeros,
        start_ns=start_ns,
        end_ns=start_ns + (ranks.compute_seconds * 1e9).astype(np.int64),
        self_seconds=ranks.compute_seconds,
        tokens=zeros,
        squared_tokens=zeros,
    )


def transfer_columns(timings: Sequence[StepTiming], layout: Layout) -> StepColumns:
    """Return the transfers between stages of the same dp and tp rank."""
    tables = [timing.transfers for timing in timings]
    names = ("source", "destination", "op", "microbatch", "chunk")
    moments = ("send_start_ns", "send_end_ns", "receive_start_ns", "end_ns")
    columns = _join(tables, (*names, *moments))
    step = np.repeat(np.arange(len(tables)), [table.source.size for table in tables])
    seconds = np.concatenate([table.transfer_seconds for table in tables])
    source, target = columns["source"], columns["destination"]
    usable = layout.known(source) & layout.known(target) & np.isin(columns["op"], _SENDS)
    usable &= _plausible(columns) & np.isfinite(seconds)
    if not usable.all():
        columns = {name: column[usable] for name, column in columns.items()}
        step, seconds = step[usable], seconds[usable]
    source, target = columns.pop("source"), columns.pop("destination")
    columns["source"], columns["target"] = layout.stage[source], layout.stage[target]
    cell = step * layout.replicas + layout.replica[source]
    found = StepColumns(columns, seconds, cell, len(tables) * layout.replicas)
    along = layout.replica[source] == layout.replica[target]
    return found.where(along & (columns["source"] != columns["target"]))


def without_repeats(transfers: StepColumns, compute: StepColumns) -> StepColumns:
    """Drop repeated transfers of a step; the first one after its data was computed is kept.

    An evaluation within the step repeats the microbatch numbers of training.
    """
    route = ("source", "target", "op", "chunk", "microbatch")
    (code,) = _codes([(transfers.cell, *(transfers[name] for name in route))])
    in_order = np.sort(code)
    repeated_codes = in_order[1:][in_order[1:] == in_order[:-1]]
    if not repeated_codes.size:
        return transfers
    repeated = np.flatnonzero(np.isin(code, repeated_codes) & (transfers["microbatch"] >= 0))
    sent_ns = transfers["send_start_ns"][repeated]
    early = sent_ns < _computed_ns(transfers, repeated, compute) - CLOCK_TOLERANCE_NS
    order = np.lexsort((sent_ns, early, code[repeated]))
    ordered = code[repeated][order]
    kept = np.ones(len(transfers), np.bool_)
    kept[repeated[order[1:][ordered[1:] == ordered[:-1]]]] = False
    return transfers.where(kept)


def _computed_ns(transfers: StepColumns, rows: Ints, compute: StepColumns) -> Ints:
    """Return when the data of each transfer was computed.

    A very early time if that was not recorded.
    """
    op = transfers["op"][rows]
    forwards = (op == Op.FORWARD_SEND) | (
        (op != Op.BACKWARD_SEND) & (transfers["target"][rows] > transfers["source"][rows])
    )
    wanted, made = _codes(
        [
            (
                transfers.cell[rows],
                transfers["source"][rows],
                np.where(forwards, int(Op.FORWARD), int(Op.BACKWARD)),
                transfers["chunk"][rows],
                transfers["microbatch"][rows],
            ),
            (compute.cell, *(compute[name] for name in ("stage", "op", "chunk", "microbatch"))),
        ]
    )
    if not made.size:
        return np.full(rows.size, -(1 << 62))
    order = np.argsort(made)
    found = order[np.minimum(np.searchsorted(made[order], wanted), made.size - 1)]
    return np.where(made[found] == wanted, compute["end_ns"][found], -(1 << 62))


def _codes(tables: Sequence[tuple[Ints, ...]]) -> list[Ints]:
    """Return one number per row, equal for equal rows of any table; values must be -1 or more."""
    codes = [np.zeros(table[0].size, np.int64) for table in tables]
    for columns in zip(*tables, strict=True):
        size = 2 + max(int(column.max(initial=0)) for column in columns)
        codes = [code * size + column + 1 for code, column in zip(codes, columns, strict=True)]
    return codes


def _join(tables: Sequence[object], names: Sequence[str]) -> dict[str, Ints]:
    return {name: np.concatenate([getattr(table, name) for table in tables]) for name in names}


def _plausible(columns: Mapping[str, Ints]) -> npt.NDArray[np.bool_]:
    microbatch, chunk = columns["microbatch"], columns["chunk"]
    plausible: npt.NDArray[np.bool_] = (microbatch >= -1) & (microbatch < MOST_MICROBATCHES)
    return plausible & (chunk >= -1) & (chunk < MOST_CHUNKS)
