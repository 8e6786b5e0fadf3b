from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from paceline_agent.collect.collectors.process import ProcessCollector
from paceline_agent.collect.contract import LocalRank

STAT = "77 (py) x) (y) S 1 1 1 0 -1 0 10 0 3 0 250 50 0 0 20 0 6 0 100 9999 25" + " 0" * 17
PROC = {
    "77/stat": STAT + " 150 0 0\n",
    "77/schedstat": "2500000000 750000000 1234\n",
    "77/status": "VmHWM:\t   2000 kB\nVmSwap:\t   3 kB\nThreads:\t6\n"
    "voluntary_ctxt_switches:\t11\nnonvoluntary_ctxt_switches:\t22\n",
    "77/io": "rchar: 1\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 5\n",
    "sys/kernel/task_delayacct": "1\n",
}
GOLDEN = {
    "cpu_seconds_total": 3.0,
    "resident_memory_bytes": 25 * os.sysconf("SC_PAGE_SIZE"),
    "resident_memory_max_bytes": 2_048_000,
    "swapped_bytes": 3072,
    "minor_faults_total": 10,
    "major_faults_total": 3,
    "threads": 6,
    "io_wait_seconds_total": 1.5,
    "run_queue_wait_seconds_total": 0.75,
    "read_bytes_total": 4096,
    "written_bytes_total": 8192,
}
RANK = "{job=job-a,rank=3}"


@pytest.fixture
def process(context, procfs, write):
    write(procfs, PROC)
    ranks = [
        LocalRank(job="job-a", generation=0, rank=3, local_rank=0, pid=77),
        LocalRank(job="job-a", generation=0, rank=4, local_rank=1, pid=78),  # the process is gone
    ]
    return ProcessCollector(dataclasses.replace(context, local_ranks=lambda: ranks))


@pytest.mark.skipif(os.sysconf("SC_CLK_TCK") != 100, reason="the golden values are for 100 Hz")
def test_golden(process, series):
    switches = "paceline_rank_process_context_switches_total{job=job-a,kind=%s,rank=3}"
    assert series(process.collect(1)) == {
        **{f"paceline_rank_process_{name}{RANK}": value for name, value in GOLDEN.items()},
        switches % "voluntary": 11,
        switches % "involuntary": 22,
    }


def test_a_kernel_that_does_not_count_waits_for_io_leaves_them_out(process, procfs, series):
    (procfs / "sys/kernel/task_delayacct").write_text("0\n")
    found = series(process.collect(1))
    assert not any("io_wait" in name for name in found)
    assert f"paceline_rank_process_cpu_seconds_total{RANK}" in found


def test_a_kernel_that_does_not_account_for_run_queues_leaves_them_out(process, procfs, series):
    (procfs / "77" / "schedstat").unlink()
    found = series(process.collect(1))
    assert not any("run_queue" in name for name in found)
    assert f"paceline_rank_process_cpu_seconds_total{RANK}" in found


def test_a_process_of_this_machine(context, series):
    ranks = [LocalRank(job="job-a", generation=0, rank=3, local_rank=0, pid=os.getpid())]
    real = dataclasses.replace(context, procfs_root=Path("/proc"), local_ranks=lambda: ranks)
    found = series(ProcessCollector(real).collect(1))
    assert found[f"paceline_rank_process_open_fds{RANK}"] >= 3
    most = found[f"paceline_rank_process_resident_memory_max_bytes{RANK}"]
    assert most >= found[f"paceline_rank_process_resident_memory_bytes{RANK}"] > 1 << 20
