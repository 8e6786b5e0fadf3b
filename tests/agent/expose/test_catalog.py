"""The catalog: type, unit and help of each metric, as its collector declares them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline_agent.collect.contract import Metric
from paceline_agent.expose import catalog
from paceline_wire import metric_names

NO_METRICS = {"node_directory", "paceline_agent"}  # other words that look like metric names


def test_every_metric_has_help():
    known = catalog.load()
    assert len(known.exact) > 80
    for metric in [*known.exact.values(), *known.patterns]:
        assert metric.help.endswith("."), metric.name


def test_an_exact_name_wins_over_a_pattern():
    known = catalog.load()
    assert known.describe("DCGM_FI_DEV_GPU_TEMP").unit == "celsius"
    assert known.describe("DCGM_FI_DEV_SOMETHING_NEW").type == "unknown"
    assert known.describe("node_infiniband_vl15_dropped_total").type == "counter"


def test_the_most_specific_pattern_wins():
    known = catalog.load()
    assert known.describe("node_memory_Cached_bytes").type == "gauge"
    assert known.describe("node_memory_numa_numa_miss_total").type == "counter"


@pytest.mark.parametrize(
    ("name", "kind", "family", "unit"),
    [
        ("node_disk_read_bytes_total", "counter", "node_disk_read_bytes", "bytes"),
        ("node_cpu_seconds_total", "counter", "node_cpu_seconds", "seconds"),
        ("DCGM_FI_DEV_POWER_USAGE", "gauge", "DCGM_FI_DEV_POWER_USAGE", ""),
        ("paceline_driver_info", "info", "paceline_driver", ""),
        ("not_listed_seconds_total", "counter", "not_listed_seconds", "seconds"),
        ("not_listed", "unknown", "not_listed", ""),
    ],
)
def test_families_are_named_as_openmetrics_requires(name, kind, family, unit):
    metric = catalog.load().describe(name)
    assert (metric.type, metric.family, metric.suffix_unit) == (kind, family, unit)


def test_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match="expected one of counter, gauge, info, unknown"):
        Metric("a", "number", None, "Text.")


def test_a_counter_without_its_ending_is_refused():
    with pytest.raises(ValueError, match="ends in _total"):
        Metric("a", "counter", None, "Text.")


def test_a_metric_that_is_declared_twice_is_refused():
    metric = Metric("a", "gauge", None, "Text.")
    with pytest.raises(ValueError, match="declared twice"):
        catalog.build([metric, metric])


def test_every_name_in_the_agents_sources_is_declared():
    known = catalog.load()
    sources = Path(catalog.__file__).parents[1].rglob("*.py")
    names = {
        name
        for source in sources
        for name in re.findall(
            r'"((?:node|paceline|DCGM_FI|DCGM_EXP)_[A-Za-z0-9_]*[A-Za-z0-9])"', source.read_text()
        )
    }
    names |= {name for key, name in vars(metric_names).items() if key.isupper()}
    assert len(names) > 150
    undeclared = {name for name in names if known.describe(name).help == catalog.UNLISTED}
    assert undeclared <= NO_METRICS, "declare each in the `metrics` of its collector"
