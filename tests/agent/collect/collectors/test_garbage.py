"""Every collector that reads files, with trees full of invalid content."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import shutil
from pathlib import Path

import pytest

from paceline_agent.collect.collectors import discover
from paceline_agent.collect.contract import CollectorUnavailable, LocalRank
from paceline_wire.batch import GpuInfo

ROOTS = ("sys", "proc")
PORT = "sys/class/infiniband/mlx5_0/ports/1"
NET = "sys/class/net/eth0"
CPU = "sys/devices/system/cpu/cpu0"
NODE = "sys/devices/system/node/node0"
FUNCTION = "sys/devices/pci0000:15/0000:15:01.0/0000:1a:00.0"
FILES = {
    f"{PORT}/state": "4: ACTIVE",
    f"{PORT}/phys_state": "5: LinkUp",
    f"{PORT}/rate": "400 Gb/sec (4X NDR)",
    f"{PORT}/link_layer": "InfiniBand",
    f"{PORT}/counters/link_downed": "1",
    f"{PORT}/counters/port_rcv_data": "1",
    f"{PORT}/counters_ext/port_xmit_data_64": "1",
    f"{PORT}/hw_counters/out_of_sequence": "1",
    f"{PORT}/hw_counters/lifespan": "10",
    f"{NET}/statistics/rx_bytes": "1",
    f"{NET}/speed": "100000",
    f"{NET}/mtu": "9000",
    f"{NET}/carrier": "1",
    f"{NET}/operstate": "up",
    f"{NET}/duplex": "full",
    f"{NET}/ethtool_statistics": "     rx_prio3_pause: 1",
    f"{CPU}/cpufreq/scaling_cur_freq": "1000",
    f"{CPU}/cpu_capacity": "1024",
    f"{CPU}/thermal_throttle/core_throttle_count": "1",
    f"{CPU}/topology/physical_package_id": "0",
    f"{CPU}/topology/core_id": "0",
    f"{NODE}/cpulist": "0-3",
    f"{NODE}/numastat": "numa_miss 1",
    f"{NODE}/meminfo": "Node 0 MemFree: 1 kB",
    f"{FUNCTION}/numa_node": "0",
    f"{FUNCTION}/local_cpulist": "0-3",
    f"{FUNCTION}/current_link_width": "16",
    f"{FUNCTION}/current_link_speed": "32.0 GT/s PCIe",
    f"{FUNCTION}/aer_dev_fatal": "TOTAL_ERR_FATAL 1",
    "sys/class/cxi/cxi0/device/telemetry/pct_sct_timeouts": "7@1683033431.5",
    "proc/stat": "cpu  1 2 3 4\nctxt 1",
    "proc/loadavg": "1 2 3 4/5 6",
    "proc/meminfo": "MemTotal: 1 kB",
    "proc/vmstat": "pgfault 1",
    "proc/diskstats": "8 0 sda 1 2 300 4 5 6 700 8 0 9000 10 0 0 0 0",
    "proc/pressure/io": "some avg10=0.00 total=1",
    "proc/pressure/cpu": "some avg10=50.00 total=1",
    "proc/sys/fs/file-nr": "1 0 2",
    "proc/net/snmp": "Tcp: OutSegs\nTcp: 1",
    "proc/net/netstat": "TcpExt: TCPTimeouts\nTcpExt: 1",
    "proc/self/mountinfo": "25 1 8:2 / / rw shared:1 - ext4 /dev/sda2 rw",
    "proc/77/stat": "77 (py) S 1 1 1 0 -1 0 10 0 3 0 250 50 0 0 20 0 1 0 100 9999 25 0",
    "proc/77/status": "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0\nVmHWM:\t1 kB",
    "proc/77/schedstat": "1 2 3",
    "proc/77/io": "read_bytes: 1",
    "proc/77/numa_maps": "7f00 bind:0 anon=1 N0=1 kernelpagesize_kB=4",
    "proc/77/environ": "NCCL_IB_HCA=mlx5\0PACELINE_CHECKPOINT_DIRECTORY=/x\0",
}
GARBAGE = (
    b"", b"\n", b"-1", b"-1\n-1 -1 -1", b"\xff\xfe\x00", b"N/A (no PMA)\n", b"nan", b"inf", b"0x10",
    b"9" * 30, b"9" * 5000, b"1.2.3 Gb/sec", b"4:", b": : :", b"0-99999999999", b"1 kB\n1",
    b"a b c", b"cpu\ncpu x\nctxt\nTcp: \nTcp: ",
    "\N{SUPERSCRIPT TWO}\N{ARABIC-INDIC DIGIT FOUR}".encode(),
    b"8 0 sda" + b" x" * 14, b"77 () ) S", b"some total=\nfull total=x", b"Node 0 MemFree: x",
)  # fmt: skip


@pytest.fixture
def node(context, tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    for link in ("class/infiniband/mlx5_0/device", "class/net/eth0/device",
                 "bus/pci/devices/0000:1a:00.0"):  # fmt: skip
        path = tmp_path / "sys" / link
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(tmp_path / FUNCTION)
    bus = "00000000:1A:00.0"
    context.inventory.gpus = (GpuInfo(index=0, uuid="GPU-a", name="H200", pci_bus_id=bus),)
    rank = LocalRank(job="j", generation=0, rank=0, local_rank=0, pid=77, gpu_index=0)
    return dataclasses.replace(context, local_ranks=lambda: [rank])


def spoil(path: Path, number: int, refusing: Path) -> None:
    if number < len(GARBAGE):
        path.write_bytes(GARBAGE[number])  # in place, because descriptors are kept open
        return
    path.unlink()
    if number == len(GARBAGE):
        path.mkdir()
    elif number == len(GARBAGE) + 1:
        path.symlink_to(refusing)
    elif number == len(GARBAGE) + 2:
        os.mkfifo(path)


def collectors():
    return [each for each in discover() if not each.isolated and each.name != "kmsg"]


def check(collector) -> int:
    try:
        samples = collector.collect(1).everything()
    except CollectorUnavailable:
        return 0
    assert all(math.isfinite(sample.value) for sample in samples)
    assert len({(each.name, *sorted(each.labels.items())) for each in samples}) == len(samples)
    return len(samples)


def test_the_whole_tree_is_read(node):
    silent = {each.name for each in collectors() if not check(each(node))}
    # They read this machine only, need NCCL, or compare two readings.
    assert silent <= {"timex", "tcp", "nccl", "other_processes"}


@pytest.mark.parametrize("seed", range(3))
def test_garbage_costs_no_collector(node, tmp_path, refusing, seed):
    chance = random.Random(seed)
    running = [each(node) for each in collectors()]
    for collector in running:
        check(collector)
    for name in chance.sample(sorted(FILES), len(FILES)):
        spoil(tmp_path / name, chance.randrange(len(GARBAGE) + 4), refusing)
        fresh = [each(node) for each in collectors()]
        for collector in (*running, *fresh):
            check(collector)
        for collector in fresh:
            collector.close()
    for root in ROOTS:
        shutil.rmtree(tmp_path / root)
    for collector in running:
        check(collector)
        collector.close()
