"""Who is slow since when, and where the measurements of it and of its peers are found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from paceline_server.detect.observation import Generation, LiveRank, Observation
from paceline_server.detect.telemetry import MetricSeries

# Enough for a median; all 10,000 of a large job would make each diagnosis slow.
PEERS_AT_MOST = 16
_SECOND_NS = 1_000_000_000
_T = TypeVar("_T")


class Scope(Enum):
    """What one series of a metric is about."""

    GPU = "gpu"
    RANK = "rank"
    NODE = "node"
    DEVICE = "device"  # one of several of a node: ports, interfaces, disks


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """One thing that is measured."""

    node: str
    labels: dict[str, str]
    name: str  # "gpu0 of node-1"


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank, or (rank None) a whole node, and when it became slow."""

    rank: int | None
    node: str
    onset_ns: int  # server's clock
    onset_step: int | None
    is_chronic: bool  # slow from the first steps on: there is no past to compare with
    kind: str
    slowdown: float | None  # 1: healthy
    tolerance_seconds: float  # how well onset and samples line up in time
    seen: Observation
    generation: Generation

    @property
    def ranks(self) -> list[int]:
        if self.rank is not None:
            return [self.rank]
        return [rank for rank, node in self.generation.nodes.items() if node == self.node]

    @property
    def live(self) -> list[LiveRank]:
        return [self.seen.ranks[rank] for rank in self.ranks if rank in self.seen.ranks]

    @property
    def past_ns(self) -> tuple[float, float]:
        """Healthy time: since the ranks began to work and surely before they became slow."""
        until_ns = self.onset_ns - self.tolerance_seconds / 2 * _SECOND_NS
        return float(self.generation.started_ns), until_ns

    @property
    def at_onset(self) -> str:
        return "" if self.onset_step is None else f" at step {self.onset_step}"

    def places(self, scope: Scope, metric: str, **labels: str) -> list[MeasuredDevice]:
        """Where this metric is measured of the suspect."""
        if scope is Scope.NODE:
            return [MeasuredDevice(self.node, labels, self.node)]
        if scope is Scope.GPU:
            return [place for rank in self.ranks if (place := self._gpu(rank, labels)) is not None]
        if scope is Scope.RANK:
            return [self._of_rank(rank, labels) for rank in self.ranks]
        return [
            MeasuredDevice(self.node, found, f"{found.get('device', '?')} of {self.node}")
            for found, _ in self.seen.telemetry.all_of(self.node, metric, **labels)
        ]

    def series(self, metric: str, place: MeasuredDevice) -> MetricSeries | None:
        found = self.seen.telemetry.find(place.node, metric, **place.labels)
        if found is None and "job" in place.labels:  # an agent that serves one job only
            labels = {name: value for name, value in place.labels.items() if name != "job"}
            found = self.seen.telemetry.find(place.node, metric, **labels)
        return found

    def peers(self, scope: Scope, metric: str, place: MeasuredDevice) -> list[MetricSeries]:
        """The same metric of things that should behave alike: at most `PEERS_AT_MOST`."""
        found = (self.series(metric, peer) for peer in self._peer_places(scope, metric, place))
        return [series for series in found if series is not None]

    def _peer_places(
        self, scope: Scope, metric: str, place: MeasuredDevice
    ) -> Iterator[MeasuredDevice]:
        if scope in (Scope.GPU, Scope.RANK):
            yield from self._peer_ranks(scope, place)
            return
        others = sorted(set(self.generation.nodes.values()) - {self.node})
        for node in spread(others):
            yield MeasuredDevice(node, place.labels, node)

    def _peer_ranks(self, scope: Scope, place: MeasuredDevice) -> Iterator[MeasuredDevice]:
        more = {k: v for k, v in place.labels.items() if k not in ("gpu", "rank", "job")}
        mine = set(self.ranks)
        others = [rank for rank in sorted(self.generation.nodes) if rank not in mine]
        for rank in spread(others):
            peer = self._of_rank(rank, more) if scope is Scope.RANK else self._gpu(rank, more)
            if peer is not None and (peer.node, peer.labels) != (place.node, place.labels):
                yield peer

    def _of_rank(self, rank: int, labels: dict[str, str]) -> MeasuredDevice:
        where = {"job": self.generation.job, "rank": str(rank), **labels}
        return MeasuredDevice(self.generation.nodes[rank], where, f"rank {rank}")

    def _gpu(self, rank: int, labels: dict[str, str]) -> MeasuredDevice | None:
        gpu, node = self.generation.gpus.get(rank), self.generation.node(rank)
        if gpu is None or node is None:
            return None
        return MeasuredDevice(node, {"gpu": str(gpu), **labels}, f"gpu{gpu} of {node}")


def spread(things: Sequence[_T]) -> Sequence[_T]:
    """At most `PEERS_AT_MOST` of them, evenly."""
    if len(things) <= PEERS_AT_MOST:
        return things
    return [things[index * len(things) // PEERS_AT_MOST] for index in range(PEERS_AT_MOST)]
