from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline_agent.collect import clock_sync
from paceline_agent.collect.clock_sync import ClockSync
from paceline_agent.collect.collectors.timex import TimexCollector
from paceline_agent.collect.contract import CollectorUnavailable


@pytest.fixture
def real(context):
    return dataclasses.replace(context, procfs_root=Path("/proc"), sysfs_root=Path("/sys"))


def test_this_machines_clock(real, series):
    found = series(TimexCollector(real).collect(1))
    assert found["node_timex_sync_status"] in (0, 1)
    assert found["node_timex_maxerror_seconds"] >= 0
    assert abs(found["node_timex_offset_seconds"]) < 1


def test_an_overflow_is_no_offset(real, series, monkeypatch):
    monkeypatch.setattr(clock_sync, "read", lambda: ClockSync(True, 4.294967296, 0.001, 0.0))
    found = series(TimexCollector(real).collect(1))
    assert found["node_timex_sync_status"] == 1
    assert "node_timex_offset_seconds" not in found


def test_a_copied_tree_has_no_clock_but_its_source(context, sysfs, write, series):
    with pytest.raises(CollectorUnavailable):
        TimexCollector(context).collect(1)
    write(sysfs, {"devices/system/clocksource/clocksource0/current_clocksource": "tsc\n"})
    found = series(TimexCollector(context).collect(1))
    assert found == {"paceline_clock_source_info{source=tsc}": 1}
