"""The recent steps of a running generation as tables of [operation, step, dp rank, tp rank].

What a rank did itself is kept per tensor-parallel rank, so that any of them can be made faster; a
worker (dp rank, stage) is as slow as its slowest one. What was lost is filled in from its peers.
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

# A step with a smaller share of its operations is not judged.
LEAST_SEEN = 0.5


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds. A worker's operation takes `own.max(tp ranks) + shared`.

    `own` of a compute operation includes the pause before it in which nothing else was waited for.
    """

    order: Order
    layout: Layout
    steps: tuple[int, ...]
    own: Seconds  # [operation, step, dp rank, tp rank]
    shared: Seconds  # [operation, step, dp rank]: not to be blamed on one tp rank
    pauses: Seconds  # [operation, step, dp rank]: the part of `own` before the operation began
    recorded_seconds: Seconds  # [step]
    seen: Bools  # [stage, dp rank, tp rank]: of the others all is filled in
    coupled: bool  # dp ranks wait for each other within each compute operation

    def times(self) -> Seconds:
        """[operation, step, dp rank]: of the workers, as recorded."""
        times: Seconds = self.own.max(axis=3) + self.shared
        return times


def align(timings: Sequence[StepTiming], layout: Layout) -> Window | None:
    """None: too little was seen to know in which order the job works."""
    if not timings:
        return None
    compute = compute_columns(timings, layout)
    transfers = without_repeats(transfer_columns(timings, layout), compute)
    order = learn_order(compute, transfers, layout)
    if order is None:
        return None
    return _Tables(timings, layout, order, compute, transfers).window()


class _Tables:
    """Moments as [operation, step, dp rank, tp rank], in seconds since the start of the step."""

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
        topology = layout.topology
        self.cells = (len(timings), topology.dp, topology.tp)
        base_ns = [int(timing.ranks.start_ns.min(initial=1 << 62)) for timing in timings]
        self.base_ns = np.array(base_ns, np.int64)
        at = _places(order.compute_of, compute, ("stage", "op", "chunk", "microbatch"))
        self.start = self._moments(compute, at, "start_ns")
        self.end = self._moments(compute, at, "end_ns")
        self.self_seconds = self._scatter(compute, at, compute.seconds)
        at = _places(
            order.transfer_of, transfers, ("source", "target", "op", "chunk", "microbatch")
        )
        self.let_go = self._moments(transfers, at, "send_end_ns")
        self.posted = self._moments(transfers, at, "receive_start_ns")
        self.received = self._moments(transfers, at, "end_ns")
        self.transfer_seconds = self._scatter(transfers, at, transfers.seconds)
        self.begun, self.ended, self.alone = self._ranks()

    def _moments(self, columns: StepColumns, at: Ints, name: str) -> Seconds:
        step = columns.cell // self.layout.replicas
        return self._scatter(columns, at, (columns[name] - self.base_ns[step]) / 1e9)

    def _scatter(self, columns: StepColumns, at: Ints, values: Seconds) -> Seconds:
        count = len(self.order.optype)
        table = np.full(count * columns.cells, np.nan)
        known = at >= 0
        table[at[known] * columns.cells + columns.cell[known]] = values[known]
        return table.reshape(count, *self.cells)

    def window(self) -> Window | None:
        order = self.order
        computes = [op for chain in order.compute for op in chain]
        seen = np.isfinite(self.start[computes]).mean(axis=(0, 2, 3))
        kept = np.flatnonzero(seen >= LEAST_SEEN)
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
            paused = fill(self._pauses(stage))
            pauses[chain] = paused.min(axis=3)
            own[chain] = paused + self._own_seconds(chain)
            self._assume_unseen_fast(own, stage)
            shared[chain] = self._together(chain, coupled)
        transfers = sorted(order.transfer_of.values())
        own[transfers] = fill(self.transfer_seconds[transfers])
        self._around_compute(own, shared)
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
        """[stage, step, dp rank, tp rank]: start, end, what is done alone after the exchange."""
        tables = np.full((3, self.layout.topology.pp, *self.cells), np.nan)
        for step, timing in enumerate(self.timings):
            ranks = timing.ranks
            known = self.layout.known(ranks.rank)
            rank = ranks.rank[known]
            place = (self.layout.stage[rank], step, self.layout.dp_rank[rank])
            for table, values in zip(
                tables,
                (
                    (ranks.start_ns - self.base_ns[step]) / 1e9,
                    (ranks.end_ns - self.base_ns[step]) / 1e9,
                    ranks.optimizer_seconds + ranks.checkpoint_seconds,
                ),
                strict=True,
            ):
                plausible = np.where(np.isfinite(values), values, np.nan)
                table[(*place, self.layout.tp_rank[rank])] = plausible[known]
        return list(tables)

    def _assume_unseen_fast(self, own: Seconds, stage: int) -> None:
        """A rank of which nothing was seen keeps nobody waiting, as far as one knows."""
        unseen = ~self.seen[stage]
        rows = own[self.order.compute[stage]]
        if unseen.any() and not unseen.all():
            rows[:, :, unseen] = rows[:, :, ~unseen].min(axis=2, keepdims=True)
            own[self.order.compute[stage]] = rows

    def _own_seconds(self, chain: list[int]) -> Seconds:
        """Fill missing durations with those of the same rank and kind in that step."""
        seconds = self.self_seconds[chain]
        alike: dict[tuple[str, int], list[int]] = {}
        for at, op in enumerate(chain):
            alike.setdefault((self.order.optype[op], self.order.chunk[op]), []).append(at)
        for mine in alike.values():
            seconds[mine] = fill_from_own(seconds[mine])
        return fill(seconds)

    def _together(self, chain: list[int], coupled: bool) -> Seconds:
        """[operation, step, dp rank]: what an operation took beyond what the rank did itself.

        The least of any of those who wait for each other: it waited for nobody.
        """
        beyond = self.end[chain] - self.start[chain] - self.self_seconds[chain]
        beyond = np.where(np.isnan(beyond), np.inf, beyond)
        least = beyond.min(axis=(2, 3) if coupled else 3, keepdims=True)
        least = fill(np.where(np.isinf(least), np.nan, least))
        found = np.broadcast_to(least[..., 0], beyond.shape[:3])
        return np.maximum(found, 0.0)

    def _pauses(self, stage: int) -> Seconds:
        """Before each compute operation of the stage: time in which it could have begun."""
        order, chain = self.order, self.order.compute[stage]
        ready = np.empty((len(chain), *self.cells))
        ready[1:] = self.end[chain[:-1]]
        ready[0] = -np.inf if chain[0] in order.needs else self.start[chain[0]]
        for index, op in enumerate(chain):
            for transfer in order.needs.get(op, ()):
                ready[index] = np.maximum(ready[index], self.received[transfer])
            for transfer in order.held_by.get(op, ()):
                ready[index] = np.maximum(ready[index], self.let_go[transfer])
            if op in order.untimed:
                ready[index] = self.start[op]
        return np.maximum(self.start[chain] - ready, 0.0)

    def _around_compute(self, own: Seconds, shared: Seconds) -> None:
        """The wait for data before, and what follows the last compute operation.

        Of that, the rank that came last everywhere waited for nobody: what it took is the time
        that the reduction and the exchange need.
        """
        order = self.order
        after = np.empty((len(order.compute), *self.cells))
        for stage, chain in enumerate(order.compute):
            received = order.needs.get(chain[0])
            first = self.posted[received].min(axis=0) if received else self.start[chain[0]]
            if chain[0] in order.untimed:
                first = np.full_like(first, np.nan)
            own[order.data_wait[stage]] = np.maximum(first - self.begun[stage], 0.0)
            own[order.optimizer[stage]] = self.alone[stage]
            computed = self._last_end(chain, own[chain] + shared[chain][..., None])
            for transfer in order.held_by.get(order.reduction[stage], ()):
                computed = np.fmax(computed, self.let_go[transfer])
            after[stage] = self.ended[stage] - computed - self.alone[stage]
        for ops in (order.data_wait, order.optimizer):
            own[ops] = fill(own[ops])
        reduction = np.minimum(self._reductions(), _least(after, (2, 3)))
        shared[order.reduction] = reduction[:, :, None]
        rest = _least(after - reduction[:, :, None, None], (0, 2, 3))
        shared[order.exchange] = rest[:, None]

    def _last_end(self, chain: list[int], seconds: Seconds) -> Seconds:
        """[step, dp rank, tp rank]: when the last operation ended; at the earliest, if it is lost,
        as long after the last one that was seen as those between them take."""
        until_end = seconds[::-1].cumsum(axis=0)[::-1] - seconds
        ends = np.where(np.isnan(self.end[chain]), -np.inf, self.end[chain] + until_end)
        seen = np.isfinite(self.end[chain[-1]])
        latest: Seconds = np.where(seen, self.end[chain[-1]], ends.max(axis=0))
        return np.where(np.isfinite(latest), latest, np.nan)

    def _reductions(self) -> Seconds:
        """[stage, step]: transfer time of the collectives between the dp ranks of a stage."""
        topology = self.layout.topology
        seconds = np.zeros((topology.pp, len(self.timings), topology.tp))
        for step, place, mine in self._of_dp_ranks():
            transfers = self.timings[step].collectives.transfer_seconds[mine]
            seconds[place[0], step, place[1]] += np.nansum(transfers)
        slowest: Seconds = seconds.max(axis=2)
        return slowest

    def _are_dp_ranks_coupled(self, operations: int) -> bool:
        """As with sharded parameters or a shared sequence: a collective in every operation."""
        counts = [int(mine.sum()) for _, _, mine in self._of_dp_ranks()]
        return max(counts, default=0) * self.layout.topology.pp >= operations

    def _of_dp_ranks(self) -> Iterator[tuple[int, tuple[int, int], Bools]]:
        """Step, (stage, tp rank) and rows of the collectives between dp ranks."""
        for step, timing in enumerate(self.timings):
            for group, members in timing.groups.items():
                place = self._reduction_place(members)
                if place is not None:
                    yield step, place, timing.collectives.group == group

    def _reduction_place(self, members: Sequence[int]) -> tuple[int, int] | None:
        """(stage, tp rank) if these are dp ranks of one stage."""
        ranks = np.array(members, np.int64)
        if not ranks.size or not self.layout.known(ranks).all():
            return None
        stages, dp_ranks = self.layout.stage[ranks], self.layout.dp_rank[ranks]
        if (stages != stages[0]).any() or (dp_ranks == dp_ranks[0]).all():
            return None
        return int(stages[0]), int(self.layout.tp_rank[ranks[0]])


def _least(table: Seconds, axes: tuple[int, ...]) -> Seconds:
    """Over what was seen; 0 where nothing was, and never less."""
    least: Seconds = np.where(np.isnan(table), np.inf, table).min(axis=axes)
    return np.where(np.isfinite(least), np.maximum(least, 0.0), 0.0)


def _places(
    numbers: Mapping[tuple[int, ...], int], columns: StepColumns, names: tuple[str, ...]
) -> Ints:
    """The operation of each row; -1: not one of the order's."""
    if not numbers:
        return np.full(len(columns), -1)
    keys = np.array(list(numbers), np.int64)
    low, sizes = keys.min(axis=0), np.ptp(keys, axis=0) + 1
    inside = np.ones(len(columns), np.bool_)
    code = np.zeros(len(columns), np.int64)
    known = np.zeros(len(keys), np.int64)
    for at, name in enumerate(names):
        value = columns[name] - low[at]
        inside &= (value >= 0) & (value < sizes[at])
        code = code * sizes[at] + value
        known = known * sizes[at] + (keys[:, at] - low[at])
    order = np.argsort(known)
    found = np.minimum(np.searchsorted(known[order], code), len(known) - 1)
    found = order[found]
    return np.where(inside & (known[found] == code), np.array(list(numbers.values()))[found], -1)
