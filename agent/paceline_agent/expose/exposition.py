"""Samples in the Prometheus and OpenMetrics formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from paceline_agent.expose import catalog
from paceline_agent.printable import printable
from paceline_agent.settings import HOSTNAME_LABEL
from paceline_wire.batch import Sample


class Families(Collector):
    """Source of a registry; `read` returns the current samples at each scrape."""

    def __init__(
        self, read: Callable[[], Iterable[Sample]], *, hostname_label: str = HOSTNAME_LABEL
    ) -> None:
        self._read = read
        self._hostname_label = hostname_label

    def describe(self) -> list[Metric]:
        return []  # the metrics are not known before the first scrape

    def collect(self) -> Iterator[Metric]:
        """Yield families by name; the last value of a repeated series counts."""
        families: dict[str, dict[tuple[tuple[str, str], ...], Sample]] = {}
        for sample in self._read():
            series = families.setdefault(sample.name, {})
            printed = ((label, printable(text)) for label, text in sample.labels.items())
            series[tuple(sorted(printed))] = sample
        known = catalog.load()
        for name in sorted(families):
            row = known.describe(name)
            family = Metric(row.family, row.help, row.type, row.suffix_unit)
            for labels, sample in families[name].items():
                family.add_sample(name, self._named(dict(labels)), sample.value)
            yield family

    def _named(self, labels: dict[str, str]) -> dict[str, str]:
        if self._hostname_label != HOSTNAME_LABEL and HOSTNAME_LABEL in labels:
            labels[self._hostname_label] = labels.pop(HOSTNAME_LABEL)
        return labels


def render(
    samples: Iterable[Sample], *, hostname_label: str = HOSTNAME_LABEL, as_openmetrics: bool = False
) -> str:
    """Return the response of /metrics for these samples."""
    registry = CollectorRegistry()
    registry.register(Families(lambda: samples, hostname_label=hostname_label))
    write = openmetrics.generate_latest if as_openmetrics else generate_latest
    return write(registry).decode()
