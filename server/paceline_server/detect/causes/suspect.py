"""The suspect of a diagnosis: what is slow since when, with its series and those of its peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from paceline_server.detect.causes.interfaces import may_be_used
from paceline_server.detect.observation import Generation, LiveRank, Observation
from paceline_server.detect.telemetry import MetricSeries
from paceline_wire import metric_names

# Enough for a median. Reading all 10,000 ranks of a large job would make each diagnosis slow.
MAX_PEERS = 16
_SECOND_NS = 1_000_000_000
_T = TypeVar("_T")


class Scope(Enum):
    """The kind of object that one series of a metric describes."""

    GPU = "gpu"
    RANK = "rank"
    NODE = "node"
    DEVICE = "device"  # one of several on a node: port, disk
    INTERFACE = "interface"  # a network interface that the ranks may use


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """One GPU, rank, port, disk or node with its labels."""

    node: str
    labels: dict[str, str]
    name: str  # "gpu0 of node-1"


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank, or a whole node if `rank` is None, and when it became slow."""

    rank: int | None
    node: str
    onset_ns: int  # server's clock
    onset_step: int | None
    is_chronic: bool  # slow since the first steps, so there is no past to compare with
    kind: str
    slowdown: float | None  # 1: healthy
    tolerance_seconds: float  # uncertainty of the onset relative to the times of samples
    observation: Observation
    generation: Generation
    # Its own work without the slowdown, as a share of the current step; None: not known.
    own_share: float | None = None
    training_since_ns: float = 0.0  # about when the first step began; 0: not known

    @property
    def ranks(self) -> list[int]:
        if self.rank is not None:
            return [self.rank]
        return [rank for rank, node in self.generation.nodes.items() if node == self.node]

    @property
    def has_neighbors(self) -> bool:
        """Return whether it is one rank of a node that has others."""
        return self.rank is not None and list(self.generation.nodes.values()).count(self.node) > 1

    @property
    def live(self) -> list[LiveRank]:
        return [
            self.observation.ranks[rank] for rank in self.ranks if rank in self.observation.ranks
        ]

    @property
    def past_ns(self) -> tuple[float, float]:
        """Return (start, end) of the healthy time: from the start until safely before the onset."""
        until_ns = self.onset_ns - self.tolerance_seconds / 2 * _SECOND_NS
        return float(self.generation.started_ns), until_ns

    @property
    def at_onset(self) -> str:
        return "" if self.onset_step is None else f" at step {self.onset_step}"

    def devices(self, scope: Scope, metric: str, **labels: str) -> list[MeasuredDevice]:
        """Return the devices that the metric describes: the suspect's GPUs, ranks, ports or its
        node."""
        if scope is Scope.NODE:
            return [MeasuredDevice(self.node, labels, self.node)]
        if scope is Scope.GPU:
            return [
                device
                for rank in self.ranks
                if (device := self._gpu_device(rank, labels)) is not None
            ]
        if scope is Scope.RANK:
            return [self._rank_device(rank, labels) for rank in self.ranks]
        return [
            MeasuredDevice(self.node, found, f"{found.get('device', '?')} of {self.node}")
            for found, _ in self.observation.telemetry.all_of(self.node, metric, **labels)
            if scope is Scope.DEVICE or self.may_use(found.get("device", ""))
        ]

    def may_use(self, interface: str) -> bool:
        """Return whether the interface may carry traffic of the suspect's ranks."""
        used = self._used_interfaces()
        if used:
            return interface in used
        telemetry = self.observation.telemetry
        return may_be_used(telemetry, self.node, interface, self.onset_ns)

    def _used_interfaces(self) -> set[str]:
        """Return the interfaces of the ranks' connections; empty if they are not known."""
        telemetry, job = self.observation.telemetry, self.generation.job
        ranks = set(map(str, self.ranks))
        all_ranks = telemetry.all_of(self.node, metric_names.RANK_TCP_INTERFACE_INFO, job=job)
        return {found.get("device", "") for found, _ in all_ranks if found.get("rank") in ranks}

    def series(self, metric: str, device: MeasuredDevice) -> MetricSeries | None:
        found = self.observation.telemetry.find(device.node, metric, **device.labels)
        if found is None and "job" in device.labels:  # the agent serves a single job
            labels = {name: value for name, value in device.labels.items() if name != "job"}
            found = self.observation.telemetry.find(device.node, metric, **labels)
        return found

    def peers(self, scope: Scope, metric: str, device: MeasuredDevice) -> list[MetricSeries]:
        """Return the same metric of at most `MAX_PEERS` comparable devices."""
        found = (self.series(metric, peer) for peer in self.peer_devices(scope, device))
        return [series for series in found if series is not None]

    def peer_devices(self, scope: Scope, device: MeasuredDevice) -> Iterator[MeasuredDevice]:
        """Yield at most `MAX_PEERS` comparable devices."""
        if scope in (Scope.GPU, Scope.RANK):
            yield from self._peer_ranks(scope, device)
            return
        others = sorted(set(self.generation.nodes.values()) - {self.node})
        for node in spread(others):
            yield MeasuredDevice(node, device.labels, node)

    def _peer_ranks(self, scope: Scope, device: MeasuredDevice) -> Iterator[MeasuredDevice]:
        other_labels = {k: v for k, v in device.labels.items() if k not in ("gpu", "rank", "job")}
        own = set(self.ranks)
        others = [rank for rank in sorted(self.generation.nodes) if rank not in own]
        for rank in spread(others):
            peer = (
                self._rank_device(rank, other_labels)
                if scope is Scope.RANK
                else self._gpu_device(rank, other_labels)
            )
            if peer is not None and (peer.node, peer.labels) != (device.node, device.labels):
                yield peer

    def _rank_device(self, rank: int, labels: dict[str, str]) -> MeasuredDevice:
        identity = {"job": self.generation.job, "rank": str(rank), **labels}
        return MeasuredDevice(self.generation.nodes[rank], identity, f"rank {rank}")

    def _gpu_device(self, rank: int, labels: dict[str, str]) -> MeasuredDevice | None:
        gpu, node = self.generation.gpus.get(rank), self.generation.node(rank)
        if gpu is None or node is None:
            return None
        return MeasuredDevice(node, {"gpu": str(gpu), **labels}, f"gpu{gpu} of {node}")


def spread(items: Sequence[_T]) -> Sequence[_T]:
    """Return at most `MAX_PEERS` items, evenly spaced."""
    if len(items) <= MAX_PEERS:
        return items
    return [items[index * len(items) // MAX_PEERS] for index in range(MAX_PEERS)]
