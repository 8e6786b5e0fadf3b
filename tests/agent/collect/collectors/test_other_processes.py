"""Processes that compete with the ranks for CPUs."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

import pytest

from paceline_agent.collect.collectors.other_processes import OtherProcessesCollector
from paceline_agent.collect.contract import LocalRank

SECOND = 1_000_000_000
HZ = os.sysconf("SC_CLK_TCK")
RANK = LocalRank(job="job-a", generation=0, rank=0, local_rank=0, pid=50)


@pytest.fixture
def node(procfs, write):
    """Return a function that writes processes: by PID their parent, command and CPU seconds."""

    def node(processes, *, pressure=40.0, cmdlines=None):
        files = {
            f"{pid}/stat": f"{pid} ({command}) R {parent} 0 0 0 -1 0 0 0 0 0 "
            f"{round(seconds * HZ)} 0 0 0 20 0 1 0 {pid}\n"
            for pid, (parent, command, seconds) in processes.items()
        }
        files |= {f"{pid}/cmdline": text for pid, text in (cmdlines or {}).items()}
        if pressure is not None:
            files["pressure/cpu"] = f"some avg10={pressure} avg60=0.00 avg300=0.00 total=1\n"
        write(procfs, files)

    return node


@pytest.fixture
def collector(context):
    return OtherProcessesCollector(dataclasses.replace(context, local_ranks=lambda: [RANK]))


def test_the_busiest_processes_that_belong_to_no_rank(collector, node, series):
    def at(seconds):
        return {
            40: (1, "torchrun", 1.0),
            50: (40, "python", seconds),  # the rank
            51: (50, "pt_data_worker", seconds),  # its worker
            60: (1, "stress (ng)", 0.9 * seconds),
            61: (60, "stress (ng)", 0.4 * seconds),
            70: (2, "kworker/0:1", 0.3 * seconds),
            71: (2, "kswapd0", 0.2 * seconds),
            80: (1, "sshd", 0.05 * seconds),
        }

    node(at(10))
    assert series(collector.collect(10 * SECOND)) == {}, "two readings are needed"
    node(at(12))
    found = series(collector.collect(12 * SECOND))
    assert found == {
        "paceline_other_processes_cpus{command=stress (ng)}": pytest.approx(1.3, abs=0.02),
        "paceline_other_processes_pid{command=stress (ng)}": 60,
        "paceline_other_processes_cpus{command=kernel threads}": pytest.approx(0.5, abs=0.02),
        "paceline_other_processes_pid{command=kernel threads}": 70,
    }


@pytest.mark.parametrize("pressure", [0.0, 4.9])
def test_nothing_is_read_while_no_task_waits_for_a_cpu(collector, node, series, pressure):
    for seconds in (10, 12, 14):
        node({60: (1, "other", seconds)}, pressure=pressure)
        assert series(collector.collect(seconds * SECOND)) == {}
    assert collector._before == {}


def test_a_process_that_began_since_counts_and_a_reused_number_too(collector, node, series, procfs):
    node({60: (1, "first", 100.0)})
    collector.collect(10 * SECOND)
    stat = procfs / "60/stat"
    node({60: (1, "second", 1.0), 61: (1, "third", 2.0)})
    stat.write_text(stat.read_text().replace(" 1 0 60\n", " 1 0 99\n"))
    found = series(collector.collect(12 * SECOND))
    assert found["paceline_other_processes_cpus{command=second}"] == pytest.approx(0.5)
    assert found["paceline_other_processes_cpus{command=third}"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("cmdline", "name"),
    [
        ("python3\0/home/a/train.py\0--token=secret\0", "python train.py"),
        ("python\0-u\0-X\0dev\0-m\0package.tool\0secret\0", "python -m package.tool"),
        ("/usr/bin/python3.11\0-c\0secret()\0", "python -c"),
        ("python3\0", "python3"),
        ("", "python3"),
        ("python3\0-m\0", "python3"),
    ],
)
def test_of_python_the_script_is_named_and_no_argument(collector, node, series, cmdline, name):
    for seconds in (10, 12):
        node({60: (1, "python3", seconds)}, cmdlines={60: cmdline})
        found = series(collector.collect(seconds * SECOND))
    assert found[f"paceline_other_processes_cpus{{command={name}}}"] == pytest.approx(1.0)


def test_names_are_bounded(collector, node, series):
    names = set()
    for second in range(10, 300, 2):
        node({1000 + second: (1, f"job-{second}", 1.0)})
        names |= series(collector.collect(second * SECOND)).keys()
    assert len({name for name in names if "_cpus" in name}) == 65
    assert "paceline_other_processes_cpus{command=others}" in names


def test_without_pressure_information_the_load_counts(collector, node, series, procfs):
    for load, expected in ((0.5, 0), (1e6, 2)):
        (procfs / "loadavg").write_text(f"{load} 0 0 1/2 3\n")
        for seconds in (10, 12):
            node({60: (1, "other", seconds)}, pressure=None)
            found = series(collector.collect(seconds * SECOND))
        assert len(found) == expected


def test_a_busy_process_of_this_machine_is_named(collector, node, series, procfs, wait_for):
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            (procfs / str(busy.pid)).symlink_to(f"/proc/{busy.pid}")
            node({})
            found = wait_for(lambda: series(collector.collect(time.time_ns())), 60)
        finally:
            busy.kill()
    assert found["paceline_other_processes_pid{command=python -c}"] == busy.pid
    assert 0.1 <= found["paceline_other_processes_cpus{command=python -c}"] <= 1.1
