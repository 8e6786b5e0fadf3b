"""expose/metrics.txt: what each metric is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline_agent.expose import catalogue

NO_METRICS = {"node_directory", "paceline_agent"}  # but other words with that beginning


def test_the_list_is_sound():
    known = catalogue.load()
    assert len(known.exact) > 80
    for row in [*known.exact.values(), *known.patterns]:
        assert row.text.endswith("."), row.name


def test_a_name_of_its_own_comes_before_a_pattern():
    known = catalogue.load()
    assert known.describe("DCGM_FI_DEV_GPU_TEMP").unit == "celsius"
    assert known.describe("DCGM_FI_DEV_SOMETHING_NEW").type == "unknown"
    assert known.describe("node_infiniband_vl15_dropped_total").type == "counter"


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
def test_families_are_named_as_openmetrics_has_it(name, kind, family, unit):
    row = catalogue.load().describe(name)
    assert (row.type, row.family, row.suffix_unit) == (kind, family, unit)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a gauge", "expected NAME TYPE UNIT HELP"),
        ("a number - Text.", "expected NAME TYPE UNIT HELP"),
        ("a counter - Text.", "ends in _total"),
        ("a gauge - Text.\na gauge - Text.", "listed twice"),
    ],
)
def test_a_row_that_cannot_be_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        catalogue.parse(text)


def test_every_name_in_the_agents_sources_is_listed():
    known = catalogue.load()
    sources = Path(catalogue.__file__).parents[1].rglob("*.py")
    names = {
        name
        for source in sources
        for name in re.findall(
            r'"((?:node|paceline|DCGM_FI|DCGM_EXP)_[A-Za-z0-9_]*[A-Za-z0-9])"', source.read_text()
        )
    }
    assert len(names) > 150
    unlisted = {name for name in names if known.describe(name).text == catalogue.UNLISTED}
    assert unlisted <= NO_METRICS, "give each a line in expose/metrics.txt"
