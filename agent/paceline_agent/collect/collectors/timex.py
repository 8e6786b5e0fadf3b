"""The node's clock: whether it is synchronized, its possible error, and its source.

Names are node_exporter's. Times of different nodes are compared, and a clock without correction
drifts by seconds per day.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from paceline_agent.collect import clock_sync
from paceline_agent.collect.cached_files import CachedFiles
from paceline_agent.collect.contract import (
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
    Metric,
)
from paceline_wire.batch import Sample

METRICS = (
    Metric("node_timex_sync_status", "gauge", None, "1: the clock is synchronized."),
    Metric(
        "node_timex_offset_seconds",
        "gauge",
        "seconds",
        "Time offset between the clock and its reference.",
    ),
    Metric("node_timex_maxerror_seconds", "gauge", "seconds", "Greatest error of the clock."),
    Metric(
        "node_timex_estimated_error_seconds",
        "gauge",
        "seconds",
        "Estimated error of the clock.",
    ),
    Metric(
        "paceline_clock_source_info",
        "info",
        None,
        "What the node's clock counts; tsc is the quick one.",
    ),
)

_OFFSET_LIMIT_SECONDS = 4.0  # the kernel's limit is 0.5 s; some guests report an overflow


class TimexCollector(Collector):
    name: ClassVar[str] = "timex"
    interval_seconds: ClassVar[float] = 10.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._files = CachedFiles(patient=True)
        self._source = (
            context.sysfs_root / "devices/system/clocksource/clocksource0/current_clocksource"
        )

    def collect(self, now_ns: int) -> Collected:
        samples = []
        source = self._files.read_text(self._source, now_ns)
        if source:
            samples.append(Sample("paceline_clock_source_info", {"source": source}, 1.0, now_ns))
        # otherwise the tree is a copy of another node's
        if self.context.procfs_root == Path("/proc"):
            values = _values()
            samples += [Sample(name, {}, value, now_ns) for name, value in values.items()]
        if not samples:
            raise CollectorUnavailable("a copied tree tells nothing of the node's clock")
        return Collected(samples=samples)

    def close(self) -> None:
        self._files.close()


def _values() -> dict[str, float]:
    try:
        clock = clock_sync.read()
    except OSError as error:
        raise CollectorUnavailable(f"the kernel does not tell: {error.strerror}") from error
    values = {
        "node_timex_sync_status": float(clock.is_synchronised),
        "node_timex_maxerror_seconds": clock.maximum_error_seconds,
        "node_timex_estimated_error_seconds": clock.estimated_error_seconds,
    }
    if abs(clock.offset_seconds) < _OFFSET_LIMIT_SECONDS:
        values["node_timex_offset_seconds"] = clock.offset_seconds
    return values
