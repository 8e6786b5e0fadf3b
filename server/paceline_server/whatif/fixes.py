"""Counterfactuals of the recent steps: parts of them made as fast as their peers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from paceline_server.whatif import operations as ops
from paceline_server.whatif.lost import medians
from paceline_server.whatif.window import Window

Seconds = npt.NDArray[np.float64]

# Operations of one kind with quartiles this far apart have different amounts of work.
UNEVEN = 0.1


class Fixes:
    """Call any number of the methods, then read `seconds`.

    `without_peers`: a part to be idealized has no peers to compare with.
    """

    def __init__(self, window: Window, recorded: Seconds, layers: Mapping[int, int]) -> None:
        """`recorded`: times of the window; `layers`: of each global chunk, if known."""
        self.seconds = recorded.copy()  # [operation, step, dp rank]
        self.without_peers = False
        self._recorded = recorded
        self._window = window
        self._layout = window.layout
        self._order = window.order
        self._layers = layers

    def idealise_ranks(self, ranks: Collection[int]) -> None:
        """Counterfactual: own work takes as long as for the other ranks of the stage."""
        topology = self._layout.topology
        fixed: dict[int, list[tuple[int, int]]] = {}
        for rank in sorted(set(ranks)):
            if 0 <= rank < topology.world_size:
                place = topology.coordinates(rank)
                fixed.setdefault(place.pp_rank, []).append((place.dp_rank, place.tp_rank))
        for stage, places in fixed.items():
            rows = self._rows(stage)
            own = self._window.own[rows]
            dp_ranks, tp_ranks = np.array(places).T
            idealised = ~self._window.seen[stage]  # ranks without records do not prevent it
            idealised[dp_ranks, tp_ranks] = True
            if idealised.all():
                typical = self._of_other_stages(stage, rows, set(fixed))
            else:
                typical = np.median(own[:, :, ~idealised], axis=2)
            own[:, :, idealised] = self._as_fast(stage, rows, own[:, :, idealised], typical)
            for dp_rank in np.flatnonzero(idealised.any(axis=1)).tolist():
                shared = self._window.shared[rows][:, :, dp_rank]
                self.seconds[rows, :, dp_rank] = own[:, :, dp_rank].max(axis=2) + shared

    def _as_fast(self, stage: int, rows: list[int], own: Seconds, typical: Seconds) -> Seconds:
        """[row, step, rank]: as fast as `typical` ([row, step]).

        If microbatches differ in length, a rank keeps its own lengths, which others did not have:
        each kind of its operations is scaled as a whole.
        """
        result = np.repeat(typical[:, :, None], own.shape[2], axis=2)
        kinds = np.array([f"{self._order.optype[row]} {self._order.chunk[row]}" for row in rows])
        for kind in np.unique(kinds):
            mine = kinds == kind
            low, middle, high = np.percentile(typical[mine], [25, 50, 75])
            if high - low > UNEVEN * middle:
                took = own[mine].mean(axis=(0, 1))
                scale = np.divide(
                    typical[mine].mean(), took, out=np.ones_like(took), where=took > 0
                )
                result[mine] = own[mine] * scale
        return result

    def _rows(self, stage: int) -> list[int]:
        """Return the operations that the ranks of a stage execute themselves."""
        order = self._order
        return [order.data_wait[stage], *order.compute[stage], order.optimizer[stage]]

    def _of_other_stages(self, stage: int, rows: list[int], without: set[int]) -> Seconds:
        """[row, step]: what a layer of the same kind of operation takes elsewhere; a stage whose
        ranks are all idealised has no peers of its own."""
        own = self._window.own
        typical: Seconds = own[rows].mean(axis=(2, 3))
        others = [other for other in range(len(self._order.compute)) if other not in without]
        for at, row in enumerate(rows):
            optype = self._order.optype[row]
            peers = [
                (other, self._layers_of(other))
                for stage_of in others
                for other in self._rows(stage_of)
                if self._order.optype[other] == optype
            ]
            if not peers:
                self.without_peers |= optype in ops.COMPUTE
                continue
            layers = self._layers_of(row) if optype in ops.COMPUTE else 1.0
            scaled = [
                own[other].mean(axis=(1, 2)) * (layers / of if optype in ops.COMPUTE else 1.0)
                for other, of in peers
            ]
            typical[at] = np.mean(scaled, axis=0)
        return typical

    def _layers_of(self, row: int) -> float:
        stages = len(self._order.compute)
        part = max(self._order.chunk[row], 0) * stages + self._order.stage[row]
        return float(self._layers.get(part, 1)) or 1.0

    def idealise_stages(self, stages: Collection[int]) -> None:
        """Let operations of these stages take the mean over all stages."""
        order = self._order
        everywhere = [op for chain in order.compute for op in chain]
        optypes = np.array(order.optype)
        for stage in sorted(set(stages) & set(range(len(order.compute)))):
            for optype in ops.COMPUTE:
                mine = [op for op in order.compute[stage] if order.optype[op] == optype]
                alike = [op for op in everywhere if optypes[op] == optype]
                if mine:
                    self.seconds[mine] = self._recorded[alike].mean(axis=0)

    def idealise_links(self, links: Collection[tuple[int, int]]) -> None:
        """Let transfers between these ranks, in both directions, take the median of their kind."""
        topology = self._layout.topology
        for one, other in links:
            if not (0 <= one < topology.world_size and 0 <= other < topology.world_size):
                continue
            here, there = topology.coordinates(one), topology.coordinates(other)
            if here.pp_rank != there.pp_rank:
                if here.dp_rank == there.dp_rank:
                    self._idealise_transfers({here.pp_rank, there.pp_rank}, here.dp_rank)
            elif here.dp_rank != there.dp_rank:
                self._idealise_reduction(here.pp_rank)
            elif here.tp_rank != there.tp_rank:
                self._idealise_tensor_parallel(here.pp_rank, here.dp_rank)

    def _idealise_transfers(self, stages: set[int], dp_rank: int) -> None:
        order = self._order
        for optype in (ops.FORWARD_SEND, ops.BACKWARD_SEND):
            alike = [op for op in order.transfer_of.values() if order.optype[op] == optype]
            mine = [
                op
                for (source, target, *_), op in order.transfer_of.items()
                if order.optype[op] == optype and {source, target} == stages
            ]
            if mine:
                others = self._recorded[alike].copy()
                others[np.isin(alike, mine), :, dp_rank] = np.nan
                typical = float(medians(others.ravel()))
                self.without_peers |= bool(np.isnan(typical))
                self.seconds[mine, :, dp_rank] = np.fmin(self.seconds[mine, :, dp_rank], typical)

    def _idealise_reduction(self, stage: int) -> None:
        rows = [row for at, row in enumerate(self._order.reduction) if at != stage]
        mine = self._order.reduction[stage]
        self.without_peers |= not rows
        if rows:
            typical = np.median(self._recorded[rows], axis=0)
            self.seconds[mine] = np.minimum(self.seconds[mine], typical)

    def _idealise_tensor_parallel(self, stage: int, dp_rank: int) -> None:
        rows = self._order.compute[stage]
        shared = self._window.shared[rows]
        others = np.delete(shared, dp_rank, axis=2)
        self.without_peers |= not others.size
        if others.size:
            gain = shared[:, :, dp_rank] - np.median(others, axis=2)
            self.seconds[rows, :, dp_rank] -= np.maximum(gain, 0.0)

    def idealise_optypes(self, optypes: Collection[str]) -> None:
        """Let all operations of these types take the typical duration of their type."""
        for optype in sorted(set(self._order.optype)):
            if ops.group(optype) in optypes:
                mine = [op for op, other in enumerate(self._order.optype) if other == optype]
                figure = np.median if optype in ops.IDEAL_IS_MEDIAN else np.mean
                self.seconds[mine] = figure(self._recorded[mine])

    def take_away(self, excess_seconds: Mapping[int, float]) -> None:
        """Per rank and step: from its wait for data first, then from what comes after the
        exchange, then from its longest compute operations, at last from all of them alike."""
        topology = self._layout.topology
        worst: dict[tuple[int, int], float] = {}
        for rank, seconds in excess_seconds.items():
            if 0 <= rank < topology.world_size and seconds > 0:
                place = topology.coordinates(rank)
                key = (place.pp_rank, place.dp_rank)
                worst[key] = max(worst.get(key, 0.0), seconds)
        for (stage, dp_rank), seconds in worst.items():
            left = np.full(self.seconds.shape[1], seconds)
            for row in (self._order.data_wait[stage], self._order.optimizer[stage]):
                left = self._take([row], dp_rank, left, self.seconds[[row], :, dp_rank])
            rows = self._order.compute[stage]
            left = self._take(rows, dp_rank, left, self._beyond_typical(rows, dp_rank))
            rest = self.seconds[rows, :, dp_rank]
            total = rest.sum(axis=0)
            share = np.divide(left, total, out=np.zeros_like(left), where=total > 0)
            self._take(rows, dp_rank, left, rest * np.minimum(share, 1.0))

    def _beyond_typical(self, rows: list[int], dp_rank: int) -> Seconds:
        """[row, step]: what operations took longer than most of their kind on this worker."""
        seconds = self.seconds[rows, :, dp_rank]
        optypes = np.array([self._order.optype[row] for row in rows])
        for optype in np.unique(optypes):
            mine = optypes == optype
            seconds[mine] -= np.median(seconds[mine], axis=0)
        beyond: Seconds = np.maximum(seconds, 0.0)
        return beyond

    def _take(self, rows: list[int], dp_rank: int, left: Seconds, most: Seconds) -> Seconds:
        """Take up to `most` ([row, step]) from each, the largest first; returns what is left."""
        largest_first = np.argsort(-most, axis=0)
        ordered = np.take_along_axis(most, largest_first, axis=0)
        before = np.cumsum(ordered, axis=0) - ordered
        taken = np.clip(left - before, 0.0, ordered)
        amounts = np.zeros_like(most)
        np.put_along_axis(amounts, largest_first, taken, axis=0)
        self.seconds[rows, :, dp_rank] -= amounts
        remaining: Seconds = left - taken.sum(axis=0)
        return remaining
