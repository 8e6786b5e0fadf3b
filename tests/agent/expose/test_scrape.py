"""Values that node_exporter's stock dashboards need beyond the collected ones."""

from __future__ import annotations

import time
from pathlib import Path

from paceline_agent.expose.scrape import completed
from paceline_wire.batch import Sample

ALL_CPUS = Sample("node_cpu_seconds_total", {"cpu": "all", "mode": "idle"}, 30.0, 1)
LOAD = Sample("node_load1", {}, 1.5, 1)


def test_each_cpu_stands_instead_of_their_sum(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(
        "cpu  3 0 0 3000 0 0 0 0 200 0\ncpu0 1 0 0 1000 0 0 0 0 200 0\ncpu1 2 0 0 2000\n"
        "cpux 1 2\nctxt 5\n"
    )
    found = list(completed([ALL_CPUS, LOAD], tmp_path))
    idle = [
        (sample.labels["cpu"], sample.value)
        for sample in found
        if sample.name == "node_cpu_seconds_total" and sample.labels["mode"] == "idle"
    ]
    assert idle == [("0", 10.0), ("1", 20.0)]
    guests = [sample.value for sample in found if sample.name == "node_cpu_guest_seconds_total"]
    assert guests == [2.0, 0.0]
    assert LOAD in found
    assert Sample("paceline_series", {"collector": "scrape"}, 14.0, found[-2].time_ns) in found


def test_where_no_cpu_can_be_read_the_sum_stays(tmp_path: Path) -> None:
    found = list(completed([ALL_CPUS], tmp_path))
    assert [sample.name for sample in found] == ["paceline_series", "node_cpu_seconds_total"]


def test_this_machine_has_a_name_and_a_time() -> None:
    found = {sample.name: sample for sample in completed([], Path("/proc"))}
    labels = found["node_uname_info"].labels
    assert labels["sysname"] == "Linux"
    assert all(labels[label] for label in ("nodename", "release", "machine"))
    assert abs(found["node_time_seconds"].value - time.time()) < 60
