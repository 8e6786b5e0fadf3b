"""The collector with a real process: its environment, its mapped library and its files."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline_agent.collect.collectors.nccl import NcclCollector
from paceline_agent.collect.contract import Context, LocalRank
from paceline_agent.collect.nccl.process import read_process

FIXTURES = Path(__file__).parents[2] / "fixtures" / "nccl"
LINE = (
    '{"header":{"id":"0xa","rank":0,"n_ranks":2,"nnodes":1},"metadata":{"pid":%d},'
    '"coll_perf":{"coll":"AllReduce","coll_sn":1,"coll_msg_size_bytes":1048576,'
    '"coll_exec_time_us":100,"coll_algobw_gbs":10.0,"coll_busbw_gbs":20.0}}\n'
)
MAPS_ITS_LIBRARY = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("mapped", flush=True)
sys.stdin.read()
"""


class Rank:
    """A process with an environment that maps a library and waits."""

    def __init__(self, directory: Path, library: str, environment: dict[str, str]) -> None:
        path = directory / library
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x7fELF" + b"\0" * 4096)
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", MAPS_ITS_LIBRARY, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=directory,
            env=environment,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"mapped\n"

    @property
    def local(self) -> LocalRank:
        return LocalRank(job="llm", generation=1, rank=9, local_rank=1, pid=self.process.pid)

    def end(self) -> None:
        self.process.communicate(b"")


@pytest.fixture
def start(tmp_path):
    started: list[Rank] = []

    def one(library: str = "libnccl.so.2.27.3", **environment: str) -> Rank:
        started.append(Rank(tmp_path, library, environment))
        return started[-1]

    yield one
    for rank in started:
        rank.end()


@pytest.fixture
def real(context: Context) -> Context:
    return dataclasses.replace(context, procfs_root=Path("/proc"))


def beside(context: Context, *ranks: Rank) -> NcclCollector:
    locals_ = [rank.local for rank in ranks]
    return NcclCollector(dataclasses.replace(context, local_ranks=lambda: locals_))


def test_version_and_settings_of_a_process(real, start, series):
    rank = start(NCCL_IB_HCA="mlx5", TORCH_NCCL_ASYNC_ERROR_HANDLING="1", HOME="/root")
    collector = beside(real, rank)
    assert series(collector.collect(1)) == {
        "paceline_rank_nccl_info{job=llm,rank=9,version=2.27.3}": 1,
        "paceline_rank_nccl_setting_info{job=llm,name=NCCL_IB_HCA,rank=9,value=mlx5}": 1,
        "paceline_rank_nccl_setting_info"
        "{job=llm,name=TORCH_NCCL_ASYNC_ERROR_HANDLING,rank=9,value=1}": 1,
    }
    collector.close()


def test_the_version_of_a_wheel(tmp_path, start):
    site = "lib/site-packages"
    (tmp_path / site / "nvidia_nccl_cu12-2.26.2.dist-info").mkdir(parents=True)
    rank = start(library=f"{site}/nvidia/nccl/lib/libnccl.so.2")
    process = read_process(Path("/proc"), rank.process.pid)
    assert process is not None
    assert process.version == "2.26.2"


@pytest.mark.skipif(os.geteuid() != 0, reason="starts a process as another user")
def test_a_process_that_is_not_dumpable_has_its_own_user():
    """Its files in /proc belong to root, and it could have the agent read files of root."""
    code = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0);"
        "print(flush=True); sys.stdin.read()"
    )
    argv = ["/usr/bin/python3", "-S", "-c", code]
    with subprocess.Popen(
        argv, user=65534, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        assert os.stat(f"/proc/{rank.pid}/environ").st_uid == 0
        process = read_process(Path("/proc"), rank.pid)
        assert process is not None
        assert process.user == 65534
        rank.kill()


def test_a_library_that_does_not_tell_has_no_version(start):
    process = read_process(Path("/proc"), start(library="libnccl.so.2").process.pid)
    assert process is not None
    assert process.version is None


def test_lines_of_the_inspector_belong_to_their_rank(real, start, tmp_path, series):
    rank = start(NCCL_INSPECTOR_ENABLE="1", NCCL_INSPECTOR_DUMP_DIR=str(tmp_path / "dump"))
    collector = beside(real, rank)
    collector.collect(1)
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "node-pid1.log").write_text(LINE % 1)
    log = tmp_path / "dump" / f"node-pid{rank.process.pid}.log"
    log.write_text(LINE % rank.process.pid * 3)
    found = series(collector.collect(2))
    labels = "{collective=AllReduce,communicator=0xa,job=llm,rank=9}"
    assert found[f"paceline_nccl_collectives_total{labels}"] == 3
    assert found[f"paceline_nccl_bus_bandwidth_bytes_per_second{labels}"] == pytest.approx(20e9)
    with log.open("a") as file:
        file.write(LINE % rank.process.pid)
    assert series(collector.collect(3))[f"paceline_nccl_collectives_total{labels}"] == 4
    collector.close()


def test_the_inspectors_directory_of_its_own_choice_is_below_the_working_directory(
    real, start, tmp_path, series
):
    rank = start(NCCL_INSPECTOR_ENABLE="1", SLURM_JOBID="77")
    directory = tmp_path / "nccl-inspector-77"
    directory.mkdir()
    (directory / f"node-pid{rank.process.pid}.log").write_text(LINE % rank.process.pid)
    collector = beside(real, rank)
    assert any("collectives_total" in name for name in series(collector.collect(1)))
    collector.close()


def test_a_directory_of_the_agents_settings_also_shows_processes_that_are_no_ranks(
    real, start, tmp_path, series
):
    rank = start()
    directory = tmp_path / "all"
    directory.mkdir()
    (directory / "node-pid1.log").write_text(LINE % 1)
    (directory / f"node-pid{rank.process.pid}.log").write_text(LINE % rank.process.pid)
    (directory / "else.txt").write_text("nothing of ours")
    collector = beside(dataclasses.replace(real, nccl_inspector_directory=directory), rank)
    found = {n for n in series(collector.collect(1)) if n.startswith("paceline_nccl_collectives")}
    assert found == {
        "paceline_nccl_collectives_total{collective=AllReduce,communicator=0xa,job=llm,rank=9}",
        "paceline_nccl_collectives_total{collective=AllReduce,communicator=0xa,pid=1}",
    }
    (directory / "node-pid1.log").unlink()
    assert not any("pid=1" in name for name in series(collector.collect(2)))
    collector.close()


def test_the_log_of_a_rank_under_nccl_debug(real, start, tmp_path, series):
    rank = start(NCCL_DEBUG="INFO")
    (tmp_path / "logs").mkdir()
    shutil.copy(FIXTURES / "debug.log", tmp_path / "logs" / "llm.g1.r9.log")
    collector = beside(real, rank)
    collected = collector.collect(1)
    found = series(collected)
    assert (
        "paceline_rank_nccl_info{devices=mlx5_0,mlx5_1,graphs=ring,tree,job=llm,network=IB,"
        "rank=9,version=2.21.5}" in found
    )
    of = "paceline_rank_nccl_connections{job=llm,rank=9,transport="
    assert (found[f"{of}NET/IB/GDRDMA}}"], found[f"{of}NET/Socket}}"]) == (2, 1)
    assert found["paceline_rank_nccl_warnings_total{job=llm,rank=9}"] == 1
    (event,) = collected.events
    assert (event.kind, event.device) == ("nccl_warning", "rank9")
    assert collector.collect(2).events == []
    collector.close()


def test_a_log_without_nccl_debug_is_not_opened(real, start, tmp_path, series):
    rank = start()
    (tmp_path / "logs").mkdir()
    shutil.copy(FIXTURES / "debug.log", tmp_path / "logs" / "llm.g1.r9.log")
    collector = beside(real, rank)
    assert not any("connections" in name for name in series(collector.collect(1)))


def test_a_debug_file_of_its_own(real, start, tmp_path, series):
    rank = start(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(tmp_path / "nccl.%h.%p"))
    collector = beside(real, rank)
    collector.collect(1)
    shutil.copy(FIXTURES / "debug.log", tmp_path / f"nccl.node-a.{rank.process.pid}")
    assert any("connections" in name for name in series(collector.collect(2)))
    collector.close()


def test_a_debug_file_that_leads_to_other_files_is_not_read(real, start, tmp_path, series):
    rank = start(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(tmp_path / "nccl.log"))
    shutil.copy(FIXTURES / "debug.log", tmp_path / "secret")
    (tmp_path / "nccl.log").symlink_to(tmp_path / "secret")
    collector = beside(real, rank)
    assert not any("connections" in name for name in series(collector.collect(1)))
    collector.close()


def test_what_an_ended_rank_wrote_last_is_still_read(real, start, tmp_path, series):
    rank = start(NCCL_INSPECTOR_ENABLE="1", NCCL_INSPECTOR_DUMP_DIR=str(tmp_path))
    log = tmp_path / f"node-pid{rank.process.pid}.log"
    log.write_text(LINE % 1)
    ranks = [rank.local]
    collector = NcclCollector(dataclasses.replace(real, local_ranks=lambda: list(ranks)))
    collector.collect(1)
    with log.open("a") as file:
        file.write(LINE % 1)
    rank.end()
    ranks.clear()
    total = "paceline_nccl_collectives_total"
    (value,) = [v for n, v in series(collector.collect(2)).items() if n.startswith(total)]
    assert value == 2
    assert series(collector.collect(3)) == {}


def test_a_process_that_is_gone_or_not_ours_to_read_is_left_out(context, procfs, write, series):
    local = LocalRank(job="llm", generation=1, rank=0, local_rank=0, pid=5)
    collector = NcclCollector(dataclasses.replace(context, local_ranks=lambda: [local]))
    assert series(collector.collect(1)) == {}
    write(
        procfs,
        {
            "5/environ": "NCCL_DEBUG=INFO\0NCCL_SOCKET_IFNAME=eth0\0\0=x\0garbage",
            "5/status": "Name:\tpython\nUid:\t5\t5\t5\t5\n",
        },
    )
    found = series(collector.collect(2))
    assert "paceline_rank_nccl_setting_info{job=llm,name=NCCL_SOCKET_IFNAME,rank=0,value=eth0}" in (
        found
    )


def test_in_a_container_a_process_writes_under_its_own_number(
    context, procfs, write, tmp_path, series
):
    write(
        procfs,
        {
            "5/environ": f"NCCL_INSPECTOR_ENABLE=1\0NCCL_INSPECTOR_DUMP_DIR={tmp_path}/d\0",
            "5/status": f"Name:\tpython\nUid:\t{os.getuid()}\nNSpid:\t5\t1\n",
        },
    )
    write(tmp_path, {"d/pod-pid1.log": LINE % 1})
    local = LocalRank(job="llm", generation=1, rank=0, local_rank=0, pid=5)
    collector = NcclCollector(dataclasses.replace(context, local_ranks=lambda: [local]))
    assert any("collectives_total" in name for name in series(collector.collect(1)))
    collector.close()


def test_a_flight_recorder_dump_is_reported_when_it_is_complete(real, start, tmp_path):
    rank = start(TORCH_NCCL_DEBUG_INFO_TEMP_FILE=str(tmp_path / "trace_"))
    dump = tmp_path / "trace_9"
    dump.write_bytes(b"of another run")
    collector = beside(real, rank)
    kinds = [event.kind for sweep in (1, 2) for event in collector.collect(sweep).events]
    assert kinds == []
    dump.write_bytes(b"x" * 100)
    assert collector.collect(3).events == [], "it may still be written"
    (event,) = collector.collect(4).events
    assert (event.kind, event.device) == ("flight_recorder_dump", "rank9")
    assert event.detail.endswith("trace_9, 100 bytes")
    assert collector.collect(5).events == []
    collector.close()


def test_no_ranks(context):
    collected = NcclCollector(context).collect(1)
    assert (collected.samples, collected.events) == ([], [])
