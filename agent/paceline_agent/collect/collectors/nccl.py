"""NCCL of each rank: version, settings, transports and speed of its collectives.

Three sources, each optional: the rank's process, its log if NCCL_DEBUG is set, and the files of the
NCCL Inspector if it is loaded.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from paceline_agent.collect.cached_files import entries
from paceline_agent.collect.contract import Collected, Collector, Context, LocalRank, Metric
from paceline_agent.collect.nccl.debug_log import DebugLog
from paceline_agent.collect.nccl.flight_recorder import DumpWatch, dump_names
from paceline_agent.collect.nccl.inspector import Performance
from paceline_agent.collect.nccl.process import NcclProcess, read_process
from paceline_agent.collect.nccl.tail import Tail
from paceline_wire.batch import DeviceEvent, Sample

METRICS = (
    Metric(
        "paceline_rank_nccl_info",
        "info",
        None,
        "NCCL's version, network, devices and graphs as the rank has them.",
    ),
    Metric(
        "paceline_rank_nccl_setting_info",
        "info",
        None,
        "What the rank's environment sets of NCCL, one series each.",
    ),
    Metric(
        "paceline_rank_nccl_connections",
        "gauge",
        None,
        "Channels the rank has set up, by transport.",
    ),
    Metric(
        "paceline_rank_nccl_algorithm_total",
        "counter",
        None,
        "Collectives launched, by algorithm and protocol, where the log tells.",
    ),
    Metric(
        "paceline_rank_nccl_warnings_total",
        "counter",
        None,
        "Warnings of NCCL in the rank's log.",
    ),
    Metric(
        "paceline_nccl_bus_bandwidth_bytes_per_second",
        "gauge",
        None,
        "Bus bandwidth of the last sweep, weighed by time.",
    ),
    Metric(
        "paceline_nccl_collective_duration_seconds",
        "gauge",
        "seconds",
        "Quantiles of the durations of the last sweep.",
    ),
    Metric(
        "paceline_nccl_message_size_bytes",
        "gauge",
        "bytes",
        "Quantiles of the message sizes of the last sweep.",
    ),
    Metric(
        "paceline_nccl_collectives_total",
        "counter",
        None,
        "Collectives, sends and receives the Inspector wrote.",
    ),
    Metric("paceline_nccl_collective_seconds_total", "counter", "seconds", "Time in them."),
    Metric(
        "paceline_nccl_collective_bytes_total",
        "counter",
        "bytes",
        "Data in them, as NCCL counts a message.",
    ),
    Metric("paceline_nccl_communicator_ranks", "gauge", None, "Ranks of the communicator."),
    Metric(
        "paceline_nccl_inspector_dropped_total",
        "counter",
        None,
        "Operations that the Inspector overwrote before it wrote them.",
    ),
    Metric(
        "paceline_nccl_inspector_unreadable_lines_total",
        "counter",
        None,
        "Lines that were none of the Inspector's.",
    ),
    Metric(
        "paceline_nccl_inspector_skipped_bytes_total",
        "counter",
        "bytes",
        "Passed over because the Inspector wrote faster than the agent may read.",
    ),
)

_RANKS_AT_MOST = 64
_LOG_LOOK_BYTES = 1 << 18
_LOG_BYTES_AT_MOST = 64 << 20  # bytes of a rank's log that are read; the beginning matters most
_WARNING_SECONDS = 60.0
_SEEK_SWEEPS = 12  # sweeps between two searches for a missing file
_INSPECTOR_FILE = re.compile(r".*-pid(\d+)\.log")


class NcclCollector(Collector):
    name: ClassVar[str] = "nccl"
    interval_seconds: ClassVar[float] = 5.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._ranks: dict[tuple[int, int], _NcclRank] = {}  # by pid and generation
        self._unclaimed_files: dict[
            Path, _Inspected
        ] = {}  # processes that are not ranks of this agent

    def collect(self, now_ns: int) -> Collected:
        samples: list[Sample] = []
        events: list[DeviceEvent] = []
        running, ended = self._update_ranks()
        for rank in (*running, *ended):
            samples += rank.samples(now_ns)
            events += rank.events(now_ns)
        for rank in ended:
            rank.close()
        for inspected in self._unclaimed():
            samples += inspected.samples(now_ns)
        return Collected(samples=samples, events=[*events])

    def close(self) -> None:
        for rank in self._ranks.values():
            rank.close()
        for inspected in self._unclaimed_files.values():
            inspected.close()

    def _update_ranks(self) -> tuple[list[_NcclRank], list[_NcclRank]]:
        """Return running ranks, and ended ranks whose last output has not been read yet."""
        local = {(rank.pid, rank.generation): rank for rank in self.context.local_ranks()}
        ended = [self._ranks.pop(key) for key in self._ranks.keys() - local.keys()]
        for key, rank in list(local.items())[:_RANKS_AT_MOST]:
            if key not in self._ranks:
                process = read_process(self.context.procfs_root, rank.pid)
                if process is not None:
                    self._ranks[key] = _NcclRank(rank, process, self.context)
        return list(self._ranks.values()), ended

    def _unclaimed(self) -> Iterator[_Inspected]:
        directory = self.context.nccl_inspector_directory
        if directory is None:
            return
        claimed = {rank.inspected.path for rank in self._ranks.values() if rank.inspected}
        present = {directory / name: name for name in entries(directory)[:_RANKS_AT_MOST]}
        for path in self._unclaimed_files.keys() - (present.keys() - claimed):
            self._unclaimed_files.pop(path).close()
        for path in present.keys() - claimed:
            named = _INSPECTOR_FILE.fullmatch(path.name)
            if named is None:
                continue
            if path not in self._unclaimed_files:
                self._unclaimed_files[path] = _Inspected(path, {"pid": named[1]})
            yield self._unclaimed_files[path]


class _Inspected:
    """The Inspector file of one process."""

    def __init__(self, path: Path, labels: dict[str, str], owner: int | None = None) -> None:
        self.path = path
        self._labels = labels
        self._tail = Tail(path, owner=owner)
        self._performance = Performance(labels)

    def samples(self, now_ns: int) -> Iterator[Sample]:
        before = self._tail.skipped_bytes
        lines = self._tail.read_lines()
        if self._tail.skipped_bytes != before:
            self._performance.lose_place()
        for line in lines:
            self._performance.add(line)
        yield from self._performance.samples(now_ns)
        skipped = float(self._tail.skipped_bytes)
        yield Sample("paceline_nccl_inspector_skipped_bytes_total", self._labels, skipped, now_ns)

    def close(self) -> None:
        self._tail.close()


class _NcclRank:
    """One rank and the files it writes."""

    def __init__(self, rank: LocalRank, process: NcclProcess, context: Context) -> None:
        self._rank = rank
        self._process = process
        self._context = context
        self._labels = {"job": rank.job, "rank": str(rank.rank)}
        self.inspected: _Inspected | None = None
        self._log: Tail | None = None
        self._debug_log = DebugLog()
        named = dump_names(process.environment, rank.rank)
        places = [process.seen_from_here(name) for name in named]
        self._dumps = [DumpWatch(place) for place in places if place is not None]
        self._sweep = 0
        self._warned_seconds: float | None = None
        self._warned = 0

    def samples(self, now_ns: int) -> Iterator[Sample]:
        if self._sweep % _SEEK_SWEEPS in (0, 1):  # twice: the first search may have been too early
            self._find_files()
        self._sweep += 1
        for line in self._log.read_lines() if self._log is not None else ():
            if b"NCCL" in line:
                self._debug_log.add(line.decode(errors="replace"))
        for name, labels, value in self._values():
            all_labels = {**self._labels, **labels}
            yield Sample(f"paceline_rank_nccl_{name}", all_labels, value, now_ns)
        if self.inspected is not None:
            yield from self.inspected.samples(now_ns)

    def events(self, now_ns: int) -> Iterator[DeviceEvent]:
        if (warning := self._newest_warning()) is not None:
            yield self._event("nccl_warning", warning, now_ns)
        for dump in self._dumps:
            if (size := dump.new_bytes()) is not None:
                yield self._event("flight_recorder_dump", f"{dump.path}, {size} bytes", now_ns)

    def _event(self, kind: str, detail: str, now_ns: int) -> DeviceEvent:
        device = f"rank{self._rank.rank}"
        return DeviceEvent(time_ns=now_ns, kind=kind, device=device, detail=detail)

    def _newest_warning(self) -> str | None:
        """Return the newest warning, at most once a minute."""
        now = time.monotonic()
        waits = self._warned_seconds is not None and now - self._warned_seconds < _WARNING_SECONDS
        if not self._debug_log.news or waits:
            return None
        more = self._debug_log.warnings - self._warned - 1
        newest = self._debug_log.news[-1] + (f" ({more} more)" if more else "")
        self._debug_log.news.clear()
        self._warned_seconds, self._warned = now, self._debug_log.warnings
        return newest

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        if self.inspected is not None:
            self.inspected.close()

    def _find_files(self) -> None:
        """Search for the files that have not been found yet."""
        if self.inspected is None and (path := self._inspector_file()) is not None:
            self.inspected = _Inspected(path, self._labels, self._process.user)
        if self._process.version is None:  # NCCL may not be loaded yet
            again = read_process(self._context.procfs_root, self._rank.pid)
            self._process = again or self._process
        if self._log is None and (found := self._log_file()) is not None:
            path, owner = found
            self._log = Tail(
                path,
                owner=owner,
                look_bytes=_LOG_LOOK_BYTES,
                first_bytes=_LOG_BYTES_AT_MOST,
                lag_bytes=_LOG_BYTES_AT_MOST,
            )

    def _log_file(self) -> tuple[Path, int | None] | None:
        """Return NCCL_DEBUG_FILE and its owner, or the log file that the agent created."""
        process, rank = self._process, self._rank
        if not process.debugs:
            return None
        if "NCCL_DEBUG_FILE" in process.environment:
            path = process.debug_file
            return None if path is None else (path, process.user)
        name = f"{rank.job}.g{rank.generation}.r{rank.rank}.log"
        return self._context.node_directory / "logs" / name, None

    def _inspector_file(self) -> Path | None:
        places = (self._process.inspector_directory, self._context.nccl_inspector_directory)
        for directory in filter(None, places):
            for name in entries(directory):
                named = _INSPECTOR_FILE.fullmatch(name)
                if named is not None and int(named[1]) in self._process.pids:
                    return directory / name
        return None

    def _values(self) -> Iterator[tuple[str, dict[str, str], float]]:
        log, process = self._debug_log, self._process
        info = {
            "version": log.version or process.version,
            "network": log.network,
            "graphs": ",".join(sorted(log.graphs)),
            "devices": ",".join(log.devices)[:128],
        }
        known = {name: value for name, value in info.items() if value}
        if known:
            yield "info", known, 1.0
        for name, value in process.settings.items():
            yield "setting_info", {"name": name, "value": value}, 1.0
        for transport, count in log.connections.items():
            yield "connections", {"transport": transport}, float(count)
        for (collective, algorithm, protocol), count in log.algorithms.items():
            chosen = {"collective": collective, "algorithm": algorithm, "protocol": protocol}
            yield "algorithm_total", chosen, float(count)
        if self._log is not None:
            yield "warnings_total", {}, float(log.warnings)
