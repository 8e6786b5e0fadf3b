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
        f"paceline_rank_read_bytes_total{RANK}": 4096,
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


def test_reads_of_loader_workers_count_for_their_rank(process, procfs, write, series):
    def worker(pid: int, parent: int, read: int) -> None:
        write(procfs, {
            f"{pid}/stat": f"{pid} (pt_data) S {parent} " + STAT.split("S 1 ")[1],
            f"{pid}/io": f"read_bytes: {read}\nwrite_bytes: 0\n",
        })  # fmt: skip

    def total() -> float | None:
        return series(process.collect(1)).get(f"paceline_rank_read_bytes_total{RANK}")

    worker(90, parent=77, read=1000)
    worker(91, parent=90, read=500)  # started by a fork server
    worker(92, parent=1, read=7_000_000)  # another program
    assert total() == 4096 + 1500
    worker(91, parent=90, read=800)
    assert total() == 4096 + 1800
    for name in ("stat", "io"):
        (procfs / "91" / name).unlink()
    (procfs / "91").rmdir()
    assert total() == 4096 + 1800, "what an ended worker has read stays counted"
    (procfs / "90/io").unlink()  # another user may not read it
    assert total() is None
    worker(90, parent=77, read=2000)
    assert total() is None, "what was read in between is not known"
