"""Counterfactuals of recent steps, in which slow parts are as fast as their peers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from paceline_server.medians import quantiles
from paceline_server.whatif import operations as ops
from paceline_server.whatif.lost import medians
from paceline_server.whatif.window import Window

Seconds = npt.NDArray[np.float64]

# Operations of one type have different amounts of work if their quartiles differ by more than this
# share of the median.
UNEVEN_RATIO = 0.1


class Fixes:
    """Durations of the recent steps with some parts idealized.

    Call any number of the methods, then read `seconds`. `without_peers` is set if a part has no
    peers to compare with.
    """

    def __init__(self, window: Window, recorded: Seconds, layers: Mapping[int, int]) -> None:
        """Start from the recorded durations.

        Args:
            recorded: the durations of the window, [operation, step, dp rank].
            layers: number of layers by global chunk, if known.
        """
        self.seconds = recorded.copy()  # [operation, step, dp rank]
        self.without_peers = False
        self._recorded = recorded
        self._window = window
        self._layout = window.layout
        self._order = window.order
        self._layers = layers

    def idealize_ranks(self, ranks: Collection[int]) -> None:
        """Make the own work of these ranks as fast as that of the other ranks of the stage."""
        topology = self._layout.topology
        fixed: dict[int, list[tuple[int, int]]] = {}
        for rank in sorted(set(ranks)):
            if 0 <= rank < topology.world_size:
                stage, *place = self._layout.place(rank)
                fixed.setdefault(stage, []).append((place[0], place[1]))
        for stage, places in fixed.items():
            rows = self._rows(stage)
            own = self._window.own[rows]
            dp_ranks, tp_ranks = np.array(places).T
            idealized = ~self._window.seen[stage]  # ranks without records are not peers
            idealized[dp_ranks, tp_ranks] = True
            if idealized.all():
                typical = self._typical_of_other_stages(stage, rows, set(fixed))
            else:
                typical = np.median(own[:, :, ~idealized], axis=2)
            own[:, :, idealized] = self._as_fast(stage, rows, own[:, :, idealized], typical)
            for dp_rank in np.flatnonzero(idealized.any(axis=1)).tolist():
                shared = self._window.shared[rows][:, :, dp_rank]
                self.seconds[rows, :, dp_rank] = own[:, :, dp_rank].max(axis=2) + shared

    def _as_fast(self, stage: int, rows: list[int], own: Seconds, typical: Seconds) -> Seconds:
        """Return durations that are as fast as `typical` ([row, step]). [row, step, rank]

        If microbatches differ in length, each rank keeps its own microbatches: all its operations
        of one type are scaled by the same factor.
        """
        result = np.repeat(typical[:, :, None], own.shape[2], axis=2)
        kinds = np.array([f"{self._order.optype[row]} {self._order.chunk[row]}" for row in rows])
        for kind in np.unique(kinds):
            of_kind = kinds == kind
            low, middle, high = quantiles(typical[of_kind], (0.25, 0.5, 0.75))
            if high - low > UNEVEN_RATIO * middle:
                mean_seconds = own[of_kind].mean(axis=(0, 1))
                scale = np.divide(
                    typical[of_kind].mean(),
                    mean_seconds,
                    out=np.ones_like(mean_seconds),
                    where=mean_seconds > 0,
                )
                result[of_kind] = own[of_kind] * scale
        return result

    def _rows(self, stage: int) -> list[int]:
        """Return the operations that the ranks of a stage execute themselves."""
        order = self._order
        return [order.data_wait[stage], *order.compute[stage], order.optimizer[stage]]

    def _typical_of_other_stages(self, stage: int, rows: list[int], without: set[int]) -> Seconds:
        """Return the durations on the other stages, scaled by the number of layers. [row, step]

        Used for a stage whose ranks are all idealized, so that it has no peers of its own. Rows
        without peers keep their mean duration. `without`: stages that are not peers.
        """
        own = self._window.own
        typical: Seconds = own[rows].mean(axis=(2, 3))
        others = [other for other in range(len(self._order.compute)) if other not in without]
        for index, row in enumerate(rows):
            optype = self._order.optype[row]
            peers = [
                (other, self._layers_of(other))
                for other_stage in others
                for other in self._rows(other_stage)
                if self._order.optype[other] == optype
            ]
            if not peers:
                self.without_peers |= optype in ops.COMPUTE
                continue
            layers = self._layers_of(row) if optype in ops.COMPUTE else 1.0
            scaled = [
                own[other].mean(axis=(1, 2))
                * (layers / other_layers if optype in ops.COMPUTE else 1.0)
                for other, other_layers in peers
            ]
            typical[index] = np.mean(scaled, axis=0)
        return typical

    def _layers_of(self, row: int) -> float:
        stages = len(self._order.compute)
        part = max(self._order.chunk[row], 0) * stages + self._order.stage[row]
        return float(self._layers.get(part, 1)) or 1.0

    def idealize_stages(self, stages: Collection[int]) -> None:
        """Set compute operations of these stages to the mean duration over all stages."""
        order = self._order
        all_computes = [op for chain in order.compute for op in chain]
        optypes = np.array(order.optype)
        for stage in sorted(set(stages) & set(range(len(order.compute)))):
            for optype in ops.COMPUTE:
                of_stage = [op for op in order.compute[stage] if order.optype[op] == optype]
                of_type = [op for op in all_computes if optypes[op] == optype]
                if of_stage:
                    self.seconds[of_stage] = self._recorded[of_type].mean(axis=0)

    def idealize_links(self, links: Collection[tuple[int, int]]) -> None:
        """Set communication between these ranks, in both directions, to the median duration of its
        type."""
        topology = self._layout.topology
        for rank, peer_rank in links:
            if not (0 <= rank < topology.world_size and 0 <= peer_rank < topology.world_size):
                continue
            stage, dp_rank, tp_rank = self._layout.place(rank)
            peer_stage, peer_dp_rank, peer_tp_rank = self._layout.place(peer_rank)
            if stage != peer_stage:
                if dp_rank == peer_dp_rank:
                    self._idealize_transfers({stage, peer_stage}, dp_rank)
            elif dp_rank != peer_dp_rank:
                self._idealize_reduction(stage)
            elif tp_rank != peer_tp_rank:
                self._idealize_tensor_parallel(stage, dp_rank)

    def _idealize_transfers(self, stages: set[int], dp_rank: int) -> None:
        order = self._order
        for optype in (ops.FORWARD_SEND, ops.BACKWARD_SEND):
            of_type = [op for op in order.transfer_of.values() if order.optype[op] == optype]
            of_link = [
                op
                for (source, target, *_), op in order.transfer_of.items()
                if order.optype[op] == optype and {source, target} == stages
            ]
            if of_link:
                others = self._recorded[of_type].copy()
                others[np.isin(of_type, of_link), :, dp_rank] = np.nan
                typical = float(medians(others.ravel()))
                self.without_peers |= bool(np.isnan(typical))
                link_seconds = self.seconds[of_link, :, dp_rank]
                self.seconds[of_link, :, dp_rank] = np.fmin(link_seconds, typical)

    def _idealize_reduction(self, stage: int) -> None:
        reduction = self._order.reduction[stage]
        others = [op for op in self._order.reduction if op != reduction]
        self.without_peers |= not others
        if others:
            typical = np.median(self._recorded[others], axis=0)
            self.seconds[reduction] = np.minimum(self.seconds[reduction], typical)

    def _idealize_tensor_parallel(self, stage: int, dp_rank: int) -> None:
        rows = self._order.compute[stage]
        shared = self._window.shared[rows]
        others = np.delete(shared, dp_rank, axis=2)
        self.without_peers |= not others.size
        if others.size:
            gain = shared[:, :, dp_rank] - np.median(others, axis=2)
            self.seconds[rows, :, dp_rank] -= np.maximum(gain, 0.0)

    def idealize_optypes(self, optypes: Collection[str]) -> None:
        """Set all operations of these types to the ideal duration of their type."""
        for optype in sorted(set(self._order.optype)):
            if ops.group(optype) in optypes:
                of_type = [op for op, other in enumerate(self._order.optype) if other == optype]
                average = np.median if optype in ops.IDEAL_IS_MEDIAN else np.mean
                self.seconds[of_type] = average(self._recorded[of_type])

    def remove_excess(self, excess_seconds: Mapping[int, float]) -> None:
        """Shorten every step of these ranks by this many seconds.

        The time is removed from the data wait first, then from the optimizer, then from compute
        operations that took longer than usual, then from all compute operations in proportion.
        """
        topology = self._layout.topology
        # by (stage, dp rank): excess of its slowest tp rank
        excess: dict[tuple[int, int], float] = {}
        for rank, seconds in excess_seconds.items():
            if 0 <= rank < topology.world_size and seconds > 0:
                stage, dp_rank, _ = self._layout.place(rank)
                key = (stage, dp_rank)
                excess[key] = max(excess.get(key, 0.0), seconds)
        for (stage, dp_rank), seconds in excess.items():
            left = np.full(self.seconds.shape[1], seconds)
            for row in (self._order.data_wait[stage], self._order.optimizer[stage]):
                left = self._remove([row], dp_rank, left, self.seconds[[row], :, dp_rank])
            rows = self._order.compute[stage]
            left = self._remove(rows, dp_rank, left, self._beyond_typical(rows, dp_rank))
            rest = self.seconds[rows, :, dp_rank]
            total = rest.sum(axis=0)
            share = np.divide(left, total, out=np.zeros_like(left), where=total > 0)
            self._remove(rows, dp_rank, left, rest * np.minimum(share, 1.0))

    def limit_data_waits(self, limits: Mapping[int, float]) -> None:
        """Shorten each wait of these ranks for their data to at most this many seconds."""
        for rank, seconds in limits.items():
            if 0 <= rank < self._layout.topology.world_size:
                stage, dp_rank, _ = self._layout.place(rank)
                row = self._order.data_wait[stage]
                waits = self.seconds[row, :, dp_rank]
                self.seconds[row, :, dp_rank] = np.minimum(waits, max(seconds, 0.0))

    def _beyond_typical(self, rows: list[int], dp_rank: int) -> Seconds:
        """Return by how much operations exceed the median of their type and worker. [row, step]"""
        seconds = self.seconds[rows, :, dp_rank]
        optypes = np.array([self._order.optype[row] for row in rows])
        for optype in np.unique(optypes):
            of_type = optypes == optype
            seconds[of_type] -= np.median(seconds[of_type], axis=0)
        beyond: Seconds = np.maximum(seconds, 0.0)
        return beyond

    def _remove(self, rows: list[int], dp_rank: int, left: Seconds, most: Seconds) -> Seconds:
        """Remove `left` seconds per step from the rows, the largest `most` first.

        Args:
            left: seconds to remove, [step].
            most: most seconds to remove from each row, [row, step].
        Returns:
            The seconds that could not be removed, [step].
        """
        largest_first = np.argsort(-most, axis=0)
        ordered = np.take_along_axis(most, largest_first, axis=0)
        before = np.cumsum(ordered, axis=0) - ordered
        removed = np.clip(left - before, 0.0, ordered)
        amounts = np.zeros_like(most)
        np.put_along_axis(amounts, largest_first, removed, axis=0)
        self.seconds[rows, :, dp_rank] -= amounts
        remaining: Seconds = left - removed.sum(axis=0)
        return remaining
