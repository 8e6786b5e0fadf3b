"""Lines of the NCCL Inspector (`plugins/profiler/inspector`, NCCL 2.28 and later) to samples.

Each line is one operation of one communicator on one rank: a collective, in newer versions also a
send or receive, or proxy activity, which is ignored. Since format v4.3 a line with `dump_stats`
names the communicator of the lines behind it. Each sweep is reduced to few series: the bus
bandwidth weighted by time, and quantiles of duration and message size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from paceline_wire.batch import Sample

SERIES_AT_MOST = 32  # pairs of communicator and collective per rank
OTHER = "other"
_QUANTILES = (0.5, 0.99)


class Header(msgspec.Struct):
    id: str | int
    rank: int | None = None  # rank in the communicator
    n_ranks: int | None = None
    nnodes: int | None = None


class InspectorMetadata(msgspec.Struct):
    pid: int | None = None
    hostname: str | None = None
    dump_timestamp_us: int | None = None


class CollectivePerformance(msgspec.Struct):
    coll: str
    coll_msg_size_bytes: float | None = None
    coll_exec_time_us: float | None = None
    coll_busbw_gbs: float | None = None


class PointToPointPerformance(msgspec.Struct, rename=lambda name: name.replace("coll", "p2p", 1)):
    """The same for a send or receive: `p2p`, `p2p_exec_time_us`, ..."""

    coll: str
    coll_msg_size_bytes: float | None = None
    coll_exec_time_us: float | None = None
    coll_busbw_gbs: float | None = None


class ProxyTrace(msgspec.Struct):
    """A proxy line; its content is not used."""


class DumpStatistics(msgspec.Struct):
    """Number of records overwritten in the Inspector's memory before they were written."""

    coll_dropped_since_last_dump: int = 0
    p2p_dropped_since_last_dump: int = 0


class InspectorLine(msgspec.Struct):
    header: Header | None = None
    coll_perf: CollectivePerformance | None = None
    p2p_perf: PointToPointPerformance | None = None
    proxy_trace: ProxyTrace | None = None
    dump_stats: DumpStatistics | None = None
    metadata: InspectorMetadata = msgspec.field(default_factory=InspectorMetadata)

    @property
    def is_known(self) -> bool:
        records = (self.coll_perf, self.p2p_perf, self.proxy_trace, self.dump_stats)
        return any(each is not None for each in records)


_decoder = msgspec.json.Decoder(InspectorLine)


def decode(line: bytes) -> InspectorLine | None:
    """Return the line; None for another format or an incomplete line."""
    try:
        decoded = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return decoded if decoded.is_known else None


@dataclass(slots=True)
class _Collective:
    """Totals and this sweep's values of one collective."""

    count: int = 0
    seconds: float = 0.0
    size_bytes: float = 0.0
    n_ranks: int | None = None
    durations: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    bus_bytes: float = 0.0
    bus_seconds: float = 0.0


class Performance:
    """One rank's collectives, by communicator and name."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._of: defaultdict[tuple[str, str], _Collective] = defaultdict(_Collective)
        self._header: Header | None = None  # header for lines without one of their own
        self._dropped: int | None = None  # None: not reported by this version
        self.unreadable = 0

    def lose_place(self) -> None:
        """Forget the current header, because lines were skipped."""
        self._header = None

    def add(self, text: bytes) -> None:
        if not text.strip():
            return
        line = decode(text)
        if line is None:
            self.unreadable += 1
            return
        if (statistics := line.dump_stats) is not None:
            self._header = line.header
            self._dropped = (self._dropped or 0) + statistics.coll_dropped_since_last_dump
            self._dropped += statistics.p2p_dropped_since_last_dump
        performance = line.coll_perf or line.p2p_perf
        if performance is None:
            return
        header = line.header or self._header
        key = (OTHER if header is None else str(header.id)[:24], performance.coll[:24])
        if key not in self._of and len(self._of) >= SERIES_AT_MOST:
            key = (OTHER, OTHER)
        collective = self._of[key]
        collective.count += 1
        collective.n_ranks = header.n_ranks if header is not None and key[0] != OTHER else None
        self._measure(collective, performance)

    @staticmethod
    def _measure(
        collective: _Collective, performance: CollectivePerformance | PointToPointPerformance
    ) -> None:
        duration_us, size = performance.coll_exec_time_us, performance.coll_msg_size_bytes
        if size is not None and size >= 0:
            collective.size_bytes += size
            collective.sizes.append(size)
        if duration_us is None or duration_us <= 0:  # not measured
            return
        seconds = duration_us * 1e-6
        collective.seconds += seconds
        collective.durations.append(seconds)
        if performance.coll_busbw_gbs is not None and performance.coll_busbw_gbs >= 0:
            collective.bus_bytes += performance.coll_busbw_gbs * 1e9 * seconds
            collective.bus_seconds += seconds

    def samples(self, now_ns: int) -> Iterator[Sample]:
        """Yield totals, and the other values for collectives since the last call."""
        for (communicator, name), of in self._of.items():
            labels = {**self._labels, "communicator": communicator, "collective": name}
            for metric, value in _values(of):
                yield Sample(f"paceline_nccl_{metric}", labels, value, now_ns)
            for metric, found in (
                ("collective_duration_seconds", of.durations),
                ("message_size_bytes", of.sizes),
            ):
                found.sort()
                for quantile in _QUANTILES if found else ():
                    value = found[min(len(found) - 1, int(quantile * len(found)))]
                    with_quantile = {**labels, "quantile": f"{quantile:g}"}
                    yield Sample(f"paceline_nccl_{metric}", with_quantile, value, now_ns)
                found.clear()
            of.bus_bytes = of.bus_seconds = 0.0
        if self._dropped is not None:
            name = "paceline_nccl_inspector_dropped_total"
            yield Sample(name, self._labels, float(self._dropped), now_ns)
        yield Sample(
            "paceline_nccl_inspector_unreadable_lines_total",
            self._labels, float(self.unreadable), now_ns,
        )  # fmt: skip


def _values(of: _Collective) -> Iterator[tuple[str, float]]:
    yield "collectives_total", float(of.count)
    yield "collective_seconds_total", of.seconds
    yield "collective_bytes_total", of.size_bytes
    if of.n_ranks is not None:
        yield "communicator_ranks", float(of.n_ranks)
    if of.bus_seconds > 0:
        yield "bus_bandwidth_bytes_per_second", of.bus_bytes / of.bus_seconds
