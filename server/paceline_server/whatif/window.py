"""The recent steps of a running job as tables of [operation, step, dp rank, tp rank].

The time a rank spends on its own work is stored per tensor-parallel rank, so that a replay can make
a single rank faster. A worker (dp rank, stage) takes as long as its slowest tensor-parallel rank.
Missing values are filled in from peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_server.steps.timing import StepTiming
from paceline_server.whatif.columns import (
    Layout,
    StepColumns,
    compute_columns,
    transfer_columns,
    without_repeats,
)
from paceline_server.whatif.example import learn_order
from paceline_server.whatif.lost import fill, fill_from_own
from paceline_server.whatif.order import Order

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]

# Steps in which a smaller share of the compute operations was recorded are left out.
LEAST_RECORDED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Window:
    """Durations of the operations of recent steps, in seconds.

    An operation of a worker takes max(`own` over tp ranks) + `shared`. For compute operations `own`
    includes the pause before the operation: the time in which the rank could have started it.
    """

    order: Order
    layout: Layout
    steps: tuple[int, ...]
    own: Seconds  # [operation, step, dp rank, tp rank]
    shared: Seconds  # [operation, step, dp rank]: not caused by a single tp rank
    pauses: Seconds  # [operation, step, dp rank]: the part of `own` before the operation started
    recorded_seconds: Seconds  # [step]
    seen: Bools  # [stage, dp rank, tp rank]: ranks with records; the others are filled in
    coupled: bool  # dp ranks wait for each other within every compute operation

    def times(self) -> Seconds:
        """Return the recorded durations of the workers. [operation, step, dp rank]"""
        times: Seconds = self.own.max(axis=3) + self.shared
        return times


def align(timings: Sequence[StepTiming], layout: Layout) -> Window | None:
    """Return the window; None if too little was recorded to derive the order of operations."""
    if not timings:
        return None
    compute = compute_columns(timings, layout)
    transfers = without_repeats(transfer_columns(timings, layout), compute)
    order = learn_order(compute, transfers, layout)
    if order is None:
        return None
    return _Tables(timings, layout, order, compute, transfers).window()


class _Tables:
    """Timestamps and durations as [operation, step, dp rank, tp rank], in seconds.

    Timestamps count from the start of the step. NaN: not recorded.
    """

    def __init__(
        self,
        timings: Sequence[StepTiming],
        layout: Layout,
        order: Order,
        compute: StepColumns,
        transfers: StepColumns,
    ) -> None:
        self.timings = timings
        self.layout = layout
        self.order = order
        self.cells = (len(timings), layout.dp, layout.tp)
        base_ns = [int(timing.ranks.start_ns.min(initial=1 << 62)) for timing in timings]
        self.base_ns = np.array(base_ns, np.int64)
        op = _operation_numbers(order.compute_of, compute, ("stage", "op", "chunk", "microbatch"))
        self.start = self._timestamps(compute, op, "start_ns")
        self.end = self._timestamps(compute, op, "end_ns")
        self.self_seconds = self._scatter(compute, op, compute.seconds)
        op = _operation_numbers(
            order.transfer_of, transfers, ("source", "target", "op", "chunk", "microbatch")
        )
        self.send_end = self._timestamps(transfers, op, "send_end_ns")
        self.receive_start = self._timestamps(transfers, op, "receive_start_ns")
        self.transfer_end = self._timestamps(transfers, op, "end_ns")
        self.transfer_seconds = self._scatter(transfers, op, transfers.seconds)
        self.step_start, self.step_end, self.optimizer_seconds, *rest = self._ranks()
        self.rank_seconds, self.data_seconds = rest

    def _timestamps(self, columns: StepColumns, op: Ints, name: str) -> Seconds:
        step = columns.cell // self.layout.replicas
        return self._scatter(columns, op, (columns[name] - self.base_ns[step]) / 1e9)

    def _scatter(self, columns: StepColumns, op: Ints, values: Seconds) -> Seconds:
        """Return the table of `values`; `op` is the operation number of each row."""
        count = len(self.order.optype)
        table = np.full(count * columns.cells, np.nan)
        known = op >= 0
        table[op[known] * columns.cells + columns.cell[known]] = values[known]
        return table.reshape(count, *self.cells)

    def window(self) -> Window | None:
        order = self.order
        computes = [op for chain in order.compute for op in chain]
        recorded_share = np.isfinite(self.start[computes]).mean(axis=(0, 2, 3))
        kept = np.flatnonzero(recorded_share >= LEAST_RECORDED_SHARE)
        if not kept.size:
            return None
        coupled = self._are_dp_ranks_coupled(len(computes))
        self.seen = np.stack(
            [np.isfinite(self.start[chain]).any(axis=(0, 1)) for chain in order.compute]
        )
        own = np.zeros_like(self.start)
        shared = np.zeros(own.shape[:3])
        pauses = np.zeros(own.shape[:3])
        for stage, chain in enumerate(order.compute):
            pauses_of_ranks = fill(self._pauses(stage))
            pauses[chain] = pauses_of_ranks.min(axis=3)
            own[chain] = pauses_of_ranks + self._own_seconds(chain)
            self._fill_unseen_ranks(own, stage)
            shared[chain] = self._shared_seconds(chain, coupled)
        transfers = sorted(order.transfer_of.values())
        own[transfers] = fill(self.transfer_seconds[transfers])
        self._fill_outside_compute(own, shared)
        recorded = np.array([timing.ranks.step_seconds.max() for timing in self.timings])
        steps = tuple(self.timings[step].step for step in kept.tolist())
        return Window(
            order,
            self.layout,
            steps,
            own[:, kept],
            shared[:, kept],
            pauses[:, kept],
            recorded[kept],
            self.seen,
            coupled,
        )

    def _ranks(self) -> list[Seconds]:
        """Return start and end of the step, and the times of the optimizer with the checkpoint, of
        the rank's own work, and of its wait for data.

        Each is [stage, step, dp rank, tp rank].
        """
        tables = np.full((5, self.layout.topology.pp, *self.cells), np.nan)
        for step, timing in enumerate(self.timings):
            ranks = timing.ranks
            known = self.layout.known(ranks.rank)
            rank = ranks.rank[known]
            position = (self.layout.stage[rank], step, self.layout.dp_rank[rank])
            with np.errstate(invalid="ignore"):  # corrupted times
                # The optimizer is an operation of its own.
                host_seconds = np.maximum(ranks.host_seconds - ranks.optimizer_seconds, 0.0)
            for table, values in zip(
                tables,
                (
                    (ranks.start_ns - self.base_ns[step]) / 1e9,
                    (ranks.end_ns - self.base_ns[step]) / 1e9,
                    ranks.optimizer_seconds + ranks.checkpoint_seconds,
                    ranks.compute_seconds + host_seconds,
                    ranks.data_wait_seconds,
                ),
                strict=True,
            ):
                plausible = np.where(np.isfinite(values), values, np.nan)
                table[(*position, self.layout.tp_rank[rank])] = plausible[known]
        return list(tables)

    def _fill_unseen_ranks(self, own: Seconds, stage: int) -> None:
        """Set ranks without records to the times of the fastest rank of the stage.

        No rank is then predicted to wait for a rank that has no records.
        """
        unseen = ~self.seen[stage]
        rows = own[self.order.compute[stage]]
        if unseen.any() and not unseen.all():
            rows[:, :, unseen] = rows[:, :, ~unseen].min(axis=2, keepdims=True)
            own[self.order.compute[stage]] = rows

    def _own_seconds(self, chain: list[int]) -> Seconds:
        """Return durations; missing ones are the median of the same rank, type and step."""
        seconds = self.self_seconds[chain]
        rows_by_type: dict[tuple[str, int], list[int]] = {}
        for row, op in enumerate(chain):
            rows_by_type.setdefault((self.order.optype[op], self.order.chunk[op]), []).append(row)
        for rows in rows_by_type.values():
            seconds[rows] = fill_from_own(seconds[rows])
        return fill(seconds)

    def _shared_seconds(self, chain: list[int], coupled: bool) -> Seconds:
        """Return the time of an operation beyond the rank's own. [operation, step, dp rank]

        This is the minimum over the ranks that wait for each other: tp ranks; dp ranks too if
        `coupled`, or if there are no tp ranks to wait for, as in the backward in which
        DistributedDataParallel reduces. The rank with the minimum arrived last and did not wait.
        """
        beyond_own = self.end[chain] - self.start[chain] - self.self_seconds[chain]
        beyond_own = np.where(np.isnan(beyond_own), np.inf, beyond_own)
        among_dp = coupled or self.layout.tp == 1
        least = beyond_own.min(axis=(2, 3) if among_dp else 3, keepdims=True)
        least = fill(np.where(np.isinf(least), np.nan, least))
        shared = np.broadcast_to(least[..., 0], beyond_own.shape[:3])
        return np.maximum(shared, 0.0)

    def _pauses(self, stage: int) -> Seconds:
        """Return the pause before each compute operation. [operation, step, dp rank, tp rank]

        The rank is ready for an operation when its previous operation, the input transfers and
        the sends that block it have ended. If the input transfer was not recorded, the pause is 0.
        """
        order, chain = self.order, self.order.compute[stage]
        ready = np.empty((len(chain), *self.cells))
        ready[1:] = self.end[chain[:-1]]
        ready[0] = -np.inf if chain[0] in order.inputs else self.start[chain[0]]
        for index, op in enumerate(chain):
            for transfer in order.inputs.get(op, ()):
                ready[index] = np.maximum(ready[index], self.transfer_end[transfer])
            for transfer in order.blocking_sends.get(op, ()):
                ready[index] = np.maximum(ready[index], self.send_end[transfer])
            if op in order.unrecorded_input:
                ready[index] = self.start[op]
        return np.maximum(self.start[chain] - ready, 0.0)

    def _fill_outside_compute(self, own: Seconds, shared: Seconds) -> None:
        """Fill in data wait, reduction, exchange and optimizer.

        The recorded time of the reduction and the exchange includes waiting for other ranks. The
        rank with the shortest time arrived last and did not wait, so its time is used for all.
        A rank's own time outside of compute operations, which a script does not mark or torch does
        not show, follows its last one.
        """
        order = self.order
        after_compute = np.empty((len(order.compute), *self.cells))
        for stage, chain in enumerate(order.compute):
            inputs = order.inputs.get(chain[0])
            first = self.receive_start[inputs].min(axis=0) if inputs else self.start[chain[0]]
            if chain[0] in order.unrecorded_input:
                first = np.full_like(first, np.nan)
            own[order.data_wait[stage]] = np.maximum(first - self.step_start[stage], 0.0)
            own[order.optimizer[stage]] = self.optimizer_seconds[stage]
            compute_end = self._last_end(chain, own[chain] + shared[chain][..., None])
            before = np.maximum(own[order.data_wait[stage]] - self.data_seconds[stage], 0.0)
            outside = self.rank_seconds[stage] - before - own[chain].sum(axis=0)
            outside = np.maximum(np.nan_to_num(outside), 0.0)
            own[chain[-1]] += outside
            compute_end += outside
            for transfer in order.blocking_sends.get(order.reduction[stage], ()):
                compute_end = np.fmax(compute_end, self.send_end[transfer])
            since_compute = self.step_end[stage] - compute_end
            after_compute[stage] = since_compute - self.optimizer_seconds[stage]
        for ops in (order.data_wait, order.optimizer):
            own[ops] = fill(own[ops])
        reduction = np.minimum(self._reductions(), _least(after_compute, (2, 3)))
        shared[order.reduction] = reduction[:, :, None]
        exchange = _least(after_compute - reduction[:, :, None, None], (0, 2, 3))
        shared[order.exchange] = exchange[:, None]

    def _last_end(self, chain: list[int], seconds: Seconds) -> Seconds:
        """Return when the last operation of the chain ended. [step, dp rank, tp rank]

        If the end was not recorded, the earliest possible end is returned: the end of a recorded
        operation plus the durations of those after it.
        """
        until_end = seconds[::-1].cumsum(axis=0)[::-1] - seconds
        ends = np.where(np.isnan(self.end[chain]), -np.inf, self.end[chain] + until_end)
        recorded = np.isfinite(self.end[chain[-1]])
        latest: Seconds = np.where(recorded, self.end[chain[-1]], ends.max(axis=0))
        return np.where(np.isfinite(latest), latest, np.nan)

    def _reductions(self) -> Seconds:
        """Return the transfer time of the collectives between dp ranks. [stage, step]"""
        layout = self.layout
        seconds = np.zeros((layout.topology.pp, len(self.timings), layout.tp))
        for step, (stage, tp_rank), rows in self._dp_collectives():
            transfers = self.timings[step].collectives.transfer_seconds[rows]
            seconds[stage, step, tp_rank] += np.nansum(transfers)
        slowest: Seconds = seconds.max(axis=2)
        return slowest

    def _are_dp_ranks_coupled(self, operations: int) -> bool:
        """Return whether dp ranks run a collective in every one of the compute operations.

        Sharded parameters (FSDP) and sequence parallelism do this.
        """
        counts = [int(rows.sum()) for _, _, rows in self._dp_collectives()]
        return max(counts, default=0) * self.layout.topology.pp >= operations

    def _dp_collectives(self) -> Iterator[tuple[int, tuple[int, int], Bools]]:
        """Yield (step, (stage, tp rank), mask of rows) of the collectives between dp ranks."""
        for step, timing in enumerate(self.timings):
            for group, members in timing.groups.items():
                stage_and_tp_rank = self._stage_and_tp_rank(members)
                if stage_and_tp_rank is not None:
                    yield step, stage_and_tp_rank, timing.collectives.group == group

    def _stage_and_tp_rank(self, members: Sequence[int]) -> tuple[int, int] | None:
        """Return (stage, tp rank) if the members are dp ranks of one stage, else None."""
        ranks = np.array(members, np.int64)
        if not ranks.size or not self.layout.known(ranks).all():
            return None
        stages, dp_ranks = self.layout.stage[ranks], self.layout.dp_rank[ranks]
        if (stages != stages[0]).any() or (dp_ranks == dp_ranks[0]).all():
            return None
        return int(stages[0]), int(self.layout.tp_rank[ranks[0]])


def _least(table: Seconds, axes: tuple[int, ...]) -> Seconds:
    """Return the minimum of the recorded values, at least 0; 0 if none was recorded."""
    least: Seconds = np.where(np.isnan(table), np.inf, table).min(axis=axes)
    return np.where(np.isfinite(least), np.maximum(least, 0.0), 0.0)


def _operation_numbers(
    numbers: Mapping[tuple[int, ...], int], columns: StepColumns, names: tuple[str, ...]
) -> Ints:
    """Return the operation number of each row; -1 if the order does not contain it.

    `numbers`: operation number by the values of the columns `names`.
    """
    if not numbers:
        return np.full(len(columns), -1)
    keys = np.array(list(numbers), np.int64)
    low, sizes = keys.min(axis=0), np.ptp(keys, axis=0) + 1
    inside = np.ones(len(columns), np.bool_)
    code = np.zeros(len(columns), np.int64)
    known = np.zeros(len(keys), np.int64)
    for index, name in enumerate(names):
        value = columns[name] - low[index]
        inside &= (value >= 0) & (value < sizes[index])
        code = code * sizes[index] + value
        known = known * sizes[index] + (keys[:, index] - low[index])
    order = np.argsort(known)
    found = np.minimum(np.searchsorted(known[order], code), len(known) - 1)
    found = order[found]
    return np.where(inside & (known[found] == code), np.array(list(numbers.values()))[found], -1)
