from __future__ import annotations

import os

import pytest

from paceline_agent.collect.collectors.cpu import CpuCollector
from paceline_agent.collect.contract import CollectorUnavailable

CPU = "devices/system/cpu"


def cpus(count: int, **files: list[str]) -> dict[str, str]:
    tree = {f"{CPU}/cpu{cpu}/online": "1\n" for cpu in range(count)}
    for name, contents in files.items():
        path = name.replace("__", "/")
        tree |= {f"{CPU}/cpu{cpu}/{path}": text for cpu, text in enumerate(contents)}
    return tree


SERVER = cpus(
    4,
    cpufreq__scaling_cur_freq=["3800000", "3700000", "800000", "3900000"],
    cpufreq__cpuinfo_max_freq=["3900000"] * 4,
    thermal_throttle__core_throttle_count=["3", "3", "5", "5"],
    thermal_throttle__package_throttle_count=["7"] * 4,
    thermal_throttle__package_throttle_total_time_ms=["2500"] * 4,
    topology__physical_package_id=["0"] * 4,
    topology__core_id=["0", "0", "1", "1"],  # two threads each
)


def test_a_server(context, sysfs, write, series):
    write(sysfs, SERVER | {f"{CPU}/cpufreq/policy0/scaling_governor": "performance\n"})
    frequency = "paceline_cpu_frequency_hertz{class=all,statistic=%s}"
    assert series(CpuCollector(context).collect(1)) == {
        "paceline_cpus{class=all}": 4,
        frequency % "min": 0.8e9,
        frequency % "mean": 3.05e9,
        frequency % "max": 3.9e9,
        "paceline_cpu_frequency_max_hertz{class=all}": 3.9e9,
        "paceline_cpu_core_throttles_total{package=0}": 8,
        "node_cpu_package_throttles_total{package=0}": 7,
        "paceline_cpu_package_throttled_seconds_total{package=0}": 2.5,
    }


def test_a_cpu_that_is_offline_is_none(context, sysfs, write, series):
    write(sysfs, SERVER | {f"{CPU}/online": "0-1,3\n"})
    assert series(CpuCollector(context).collect(1))["paceline_cpus{class=all}"] == 3


STAT = """cpu  10 0 0 90 0 0 0 0 0 0
cpu0 100 1 2 3 4 5 6 7 0 0
cpu1 100 1 2 3 4 5 6 7 0 0
cpu2 1000 0 0 0 0 0 0 0 0 0
intr 5
"""


@pytest.mark.skipif(os.sysconf("SC_CLK_TCK") != 100, reason="the golden values are for 100 Hz")
@pytest.mark.parametrize(
    ("tree", "fast", "slow"),
    [
        (
            {"devices/cpu_core/cpus": "0-1\n", "devices/cpu_atom/cpus": "2\n"},
            "performance",
            "efficiency",
        ),
        (
            {f"{CPU}/cpu{cpu}/cpu_capacity": of for cpu, of in enumerate(("1024", "1024", "379"))},
            "capacity_1024",
            "capacity_379",
        ),
    ],
)  # fmt: skip
def test_classes_of_cores(context, sysfs, procfs, write, series, tree, fast, slow):
    write(sysfs, cpus(3) | tree)
    write(procfs, {"stat": STAT})
    found = series(CpuCollector(context).collect(1))
    assert found[f"paceline_cpus{{class={fast}}}"] == 2
    assert found[f"paceline_cpus{{class={slow}}}"] == 1
    seconds = "paceline_cpu_class_seconds_total{class=%s,mode=%s}"
    assert found[seconds % (fast, "user")] == 2.0
    assert found[seconds % (fast, "steal")] == 0.14
    assert found[seconds % (slow, "user")] == 10.0
    assert not any("frequency" in name or "throttle" in name for name in found)


def test_many_cpus_have_as_many_series_as_few(context, sysfs, write, series):
    write(sysfs, cpus(300, cpufreq__scaling_cur_freq=["2000000"] * 300))
    assert len(series(CpuCollector(context).collect(1))) == 4


def test_without_cpus_it_is_unavailable(context):
    with pytest.raises(CollectorUnavailable):
        CpuCollector(context).collect(1)
