"""Type, unit and help of every metric: collected from the collectors and the agent itself.

A metric that no collector declares still gets a type, from the ending of its name, so that a new
collector is exposed before its metrics are described. A test requires a declaration of each.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from paceline_agent.collect.collectors import discover
from paceline_agent.collect.contract import METRIC_ENDINGS, Metric
from paceline_agent.expose.agent_metrics import METRICS

UNLISTED = "As collected."


@dataclass(frozen=True, slots=True)
class Catalog:
    """Metrics by exact name, and those with a pattern for a name, the most specific first."""

    exact: Mapping[str, Metric]
    patterns: Sequence[Metric]

    def describe(self, name: str) -> Metric:
        """Return the metric of this name; for an unknown name, one derived from its ending."""
        metric = self.exact.get(name) or self._pattern(name)
        if metric is None:
            return Metric(name, _type_of(name), _unit_of(name), UNLISTED)
        return replace(metric, name=name)

    def _pattern(self, name: str) -> Metric | None:
        return next((metric for metric in self.patterns if fnmatchcase(name, metric.name)), None)


@functools.cache
def load() -> Catalog:
    """Return the catalog of all collectors. Raises ValueError if two declare one metric."""
    declared = [metric for collector in discover() for metric in collector.metrics]
    return build([*declared, *METRICS])


def build(metrics: Iterable[Metric]) -> Catalog:
    """Return the catalog of `metrics`. Raises ValueError if a name occurs twice."""
    exact: dict[str, Metric] = {}
    patterns: list[Metric] = []
    for metric in metrics:
        if "*" in metric.name:
            patterns.append(metric)
        elif metric.name in exact:
            raise ValueError(f"{metric.name} is declared twice")
        else:
            exact[metric.name] = metric
    return Catalog(exact, sorted(patterns, key=lambda metric: -len(metric.name)))


def _type_of(name: str) -> str:
    return next((kind for kind, end in METRIC_ENDINGS.items() if name.endswith(end)), "unknown")


def _unit_of(name: str) -> str | None:
    stem = name.removesuffix("_total")
    units = ("seconds", "bytes", "celsius", "watts", "ratio")
    return next((unit for unit in units if stem.endswith(f"_{unit}")), None)
