from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from paceline_agent.collect.collectors.host import HostCollector
from paceline_agent.collect.contract import CollectorUnavailable

PROC = {
    "stat": "cpu  100 0 50 1000 7 0 3 0 0 0\ncpu0 100 0 50 1000 7 0 3 0 0 0\n"
    "intr 900 1 2 3\nctxt 42\nbtime 1700000000\nprocesses 77\n"
    "procs_running 3\nprocs_blocked 1\n",
    "loadavg": "1.50 0.75 0.25 2/100 4242\n",
    "meminfo": "MemTotal:       1000 kB\nMemAvailable:    600 kB\n"
    "HugePages_Total: 5\nHugepagesize: 2048 kB\nNewInThisKernel: 1 kB\n",
    "vmstat": "nr_free_pages 5\noom_kill 2\npgfault 6\npswpin 7\n",
    "diskstats": "   8 0 sda 1 2 300 4 5 6 700 8 0 9000 10 0 0 0 0\n"
    "   8 1 sda1 1 2 300 4 5 6 700 8 0 9000 10 0 0 0 0\n   7 0 loop0 " + "1 " * 15 + "\n",
    "pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "pressure/io": "some avg10=0.00 total=1000000\nfull avg10=0.00 total=500000\n",
    "pressure/irq": "full avg10=0.00 avg60=0.00 avg300=0.00 total=3000000\n",
    "sys/fs/file-nr": "1440\t0\t9223372\n",
}
GOLDEN = {
    "node_cpu_seconds_total{cpu=all,mode=user}": 1.0,
    "node_cpu_seconds_total{cpu=all,mode=nice}": 0.0,
    "node_cpu_seconds_total{cpu=all,mode=system}": 0.5,
    "node_cpu_seconds_total{cpu=all,mode=idle}": 10.0,
    "node_cpu_seconds_total{cpu=all,mode=iowait}": 0.07,
    "node_cpu_seconds_total{cpu=all,mode=irq}": 0.0,
    "node_cpu_seconds_total{cpu=all,mode=softirq}": 0.03,
    "node_cpu_seconds_total{cpu=all,mode=steal}": 0.0,
    "node_context_switches_total": 42,
    "node_intr_total": 900,
    "node_forks_total": 77,
    "node_boot_time_seconds": 1_700_000_000,
    "node_procs_running": 3,
    "node_procs_blocked": 1,
    "node_load1": 1.5,
    "node_load5": 0.75,
    "node_load15": 0.25,
    "node_memory_MemTotal_bytes": 1_024_000,
    "node_memory_MemAvailable_bytes": 614_400,
    "node_memory_HugePages_Total": 5,
    "node_memory_Hugepagesize_bytes": 2_097_152,
    "node_vmstat_oom_kill": 2,
    "node_vmstat_pgfault": 6,
    "node_vmstat_pswpin": 7,
    "node_disk_reads_completed_total{device=sda}": 1,
    "node_disk_read_bytes_total{device=sda}": 153_600,
    "node_disk_read_time_seconds_total{device=sda}": 0.004,
    "node_disk_writes_completed_total{device=sda}": 5,
    "node_disk_written_bytes_total{device=sda}": 358_400,
    "node_disk_write_time_seconds_total{device=sda}": 0.008,
    "node_disk_io_now{device=sda}": 0,
    "node_disk_io_time_seconds_total{device=sda}": 9.0,
    "node_disk_io_time_weighted_seconds_total{device=sda}": 0.01,
    "node_pressure_cpu_waiting_seconds_total": 2.5,
    "node_pressure_io_waiting_seconds_total": 1.0,
    "node_pressure_io_stalled_seconds_total": 0.5,
    "node_pressure_irq_stalled_seconds_total": 3.0,
    "node_filefd_allocated": 1440,
    "node_filefd_maximum": 9_223_372,
}


@pytest.fixture
def host(context, procfs, write):
    write(procfs, PROC)
    return HostCollector(context)


@pytest.mark.skipif(os.sysconf("SC_CLK_TCK") != 100, reason="the golden values are for 100 Hz")
def test_golden(host, series):
    assert series(host.collect(1)) == pytest.approx(GOLDEN)


@pytest.mark.parametrize("file", ["stat", "meminfo", "diskstats", "sys/fs/file-nr", "pressure/io"])
def test_a_file_that_is_garbage_costs_only_its_own_values(host, procfs, series, file):
    (procfs / file).write_text("cpu x y\nMemTotal: z\n8 0 sda " + "? " * 15 + "\nsome total=x\n")
    found = series(host.collect(1))
    assert len(found) > 20
    assert found["node_load1"] == 1.5


def test_what_is_below_nothing_is_absent(host, procfs, series):
    (procfs / "meminfo").write_text("Committed_AS: 18446744073708712812 kB\nMemTotal: 8 kB\n")
    (procfs / "sys/fs/file-nr").write_text("1440\t0\t9223372036854775807\n")
    (procfs / "vmstat").write_text("pgfault -1\n")
    found = series(host.collect(1))
    assert "node_memory_Committed_AS_bytes" not in found
    assert "node_vmstat_pgfault" not in found
    assert found["node_memory_MemTotal_bytes"] == 8192
    assert found["node_filefd_maximum"] == 2**63  # as systemd sets it


def test_an_empty_tree_is_unavailable(context):
    with pytest.raises(CollectorUnavailable):
        HostCollector(context).collect(1)


def test_a_kernel_without_pressure_leaves_it_out(host, procfs, series):
    for name in ("cpu", "io", "irq"):
        (procfs / "pressure" / name).unlink()
    found = series(host.collect(1))
    assert not any(name.startswith("node_pressure") for name in found)
    assert "node_load1" in found


def test_the_machine_the_tests_run_on(context, series):
    real = dataclasses.replace(context, procfs_root=Path("/proc"), sysfs_root=Path("/sys"))
    found = series(HostCollector(real).collect(1))
    assert found["node_memory_MemTotal_bytes"] > found["node_memory_MemAvailable_bytes"] > 0
