"""TCP connections of each rank: interfaces, retransmits, bytes, times.

They are gloo's and those of NCCL's sockets. The counts of a rank include its closed connections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from paceline_agent.collect.contract import (
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
    LocalRank,
    Metric,
)
from paceline_agent.collect.interface_addresses import LOOPBACK, carriers, interface_of_address
from paceline_agent.collect.socket_diagnosis import (
    Connection,
    IPAddress,
    connections,
    sockets_of,
)
from paceline_wire import metric_names
from paceline_wire.batch import Sample

METRICS = (
    Metric(
        "paceline_rank_tcp_connections",
        "gauge",
        None,
        "Established TCP connections of the rank's process.",
    ),
    Metric(
        metric_names.RANK_TCP_INTERFACE_INFO,
        "info",
        None,
        "Interface of some of the rank's connections; of a bond or VLAN also those below it.",
    ),
    Metric(
        metric_names.RANK_TCP_RETRANSMITTED_SEGMENTS_TOTAL,
        "counter",
        None,
        "TCP segments the rank's process had to send again.",
    ),
    Metric(
        metric_names.RANK_TCP_SENT_BYTES_TOTAL,
        "counter",
        "bytes",
        "Sent over TCP and acknowledged.",
    ),
    Metric(
        metric_names.RANK_TCP_SENDING_SECONDS_TOTAL,
        "counter",
        "seconds",
        "Time in which sent data was not acknowledged and the receiver had room for it, "
        "summed over connections.",
    ),
    Metric("paceline_rank_tcp_received_bytes_total", "counter", "bytes", "Received over TCP."),
    Metric(
        "paceline_rank_tcp_round_trip_max_seconds",
        "gauge",
        "seconds",
        "Longest smoothed round trip of the rank's connections.",
    ),
)

# Metrics that are sums over connections, also those that have been closed.
_COUNTS = {
    "retransmitted_segments_total": "retransmitted_segments",
    "sent_bytes_total": "acknowledged_bytes",
    "received_bytes_total": "received_bytes",
    "sending_seconds_total": "sending_seconds",
}
# Longest time between scans of the ranks' descriptors, the expensive part. New ranks connect to
# others within seconds, so that this time is at first as long as they are known.
_LOOK_AGAIN_NS = 30 * 10**9


@dataclass(slots=True)
class _Account:
    """The counts of one rank."""

    sockets: set[int] | None = None  # None: not accessible
    live: dict[int, Connection] = field(default_factory=dict)
    closed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTS.values(), 0.0))

    def take(self, found: dict[int, Connection]) -> None:
        now = {inode: found[inode] for inode in self.sockets or () if inode in found}
        for inode, last in self.live.items():
            again = now.get(inode)
            # The inode was reused for another connection, which counts from 0.
            if again is None or again.acknowledged_bytes < last.acknowledged_bytes:
                for count in self.closed:
                    self.closed[count] += getattr(last, count)
        self.live = now

    def interfaces(self, owners: dict[IPAddress, str]) -> set[str]:
        """Return the interfaces that its connections use; between local processes, the loopback."""
        used: set[str] = set()
        for each in self.live.values():
            if each.remote in owners or each.local.is_loopback:
                used.add(LOOPBACK)
            elif each.local in owners:
                used.add(owners[each.local])
        return used

    def values(self) -> dict[str, float]:
        live = self.live.values()
        values = {"connections": float(len(live))}
        for name, count in _COUNTS.items():
            values[name] = self.closed[count] + sum(getattr(each, count) for each in live)
        round_trips = [each.round_trip_seconds for each in live if each.round_trip_seconds > 0]
        slowest = {"round_trip_max_seconds": max(round_trips)} if round_trips else {}
        return values | slowest


class TcpCollector(Collector):
    name: ClassVar[str] = "tcp"
    interval_seconds: ClassVar[float] = 3.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._accounts: dict[tuple[str, int, int, int], _Account] = {}
        self._since_ns = 0  # when the ranks last changed
        self._scanned_ns = 0
        self._sysfs = context.sysfs_root

    def collect(self, now_ns: int) -> Collected:
        if self.context.procfs_root != Path("/proc"):
            raise CollectorUnavailable("the kernel tells of this machine's connections only")
        ranks = self.context.local_ranks()
        if not ranks:
            self._accounts = {}
            return Collected()
        try:
            found = {each.inode: each for each in connections()}
            owners = interface_of_address(self.context.procfs_root)
        except OSError as error:
            raise CollectorUnavailable(f"no TCP diagnosis: {error}") from error
        known = {_key(rank): self._accounts.get(_key(rank)) or _Account() for rank in ranks}
        if known.keys() != self._accounts.keys():
            self._since_ns = self._scanned_ns = now_ns
        if self._is_time_to_look(now_ns):
            self._scanned_ns = now_ns
            for rank in ranks:
                known[_key(rank)].sockets = sockets_of(self.context.procfs_root, rank.pid)
        self._accounts = known
        return Collected(samples=self._samples(ranks, found, owners, now_ns))

    def _is_time_to_look(self, now_ns: int) -> bool:
        pause_ns = min(self._scanned_ns - self._since_ns, _LOOK_AGAIN_NS)
        return not 0 <= now_ns - self._scanned_ns < pause_ns

    def _samples(
        self,
        ranks: Sequence[LocalRank],
        found: dict[int, Connection],
        owners: dict[IPAddress, str],
        now_ns: int,
    ) -> list[Sample]:
        samples = []
        for rank in ranks:
            account = self._accounts[_key(rank)]
            account.take(found)
            if account.sockets is None:
                continue
            labels = {"job": rank.job, "rank": str(rank.rank)}
            for name, value in account.values().items():
                samples.append(Sample(f"paceline_rank_tcp_{name}", labels, value, now_ns))
            used = account.interfaces(owners)
            for device in sorted({each for one in used for each in carriers(self._sysfs, one)}):
                place = labels | {"device": device}
                samples.append(Sample(metric_names.RANK_TCP_INTERFACE_INFO, place, 1.0, now_ns))
        return samples


def _key(rank: LocalRank) -> tuple[str, int, int, int]:
    return rank.job, rank.generation, rank.rank, rank.pid
