from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from paceline_agent.collect.collectors.storage import (
    Mount,
    StorageCollector,
    disk_of,
    mount_of,
    read_mounts,
)
from paceline_agent.collect.contract import LocalRank

MOUNTINFO = r"""25 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw
30 25 0:26 / /mnt/my\040files rw - nfs4 server:/x rw
31 25 0:27 / /scratch rw - xfs /dev/nvme0n1 rw
32 25 0:28 / /scratch rw shared:9 master:2 - lustre mgs@tcp:/fs rw
garbage
"""


def test_mounts(procfs, write):
    write(procfs, {"self/mountinfo": MOUNTINFO})
    mounts = read_mounts(procfs)
    assert mount_of("/mnt/my files/a/b", mounts) == Mount(
        "/mnt/my files", "server:/x", "nfs4", "0:26"
    )
    assert mount_of("/scratch", mounts).fstype == "lustre"  # the mount on top
    assert mount_of("/scratchy", mounts).device == "/dev/sda2"
    assert mount_of("/unknown", {}) == Mount("/unknown", "", "")


@pytest.fixture
def checkpoints(context, procfs, tmp_path, write):
    """A rank with a checkpoint directory, and one whose process is not accessible."""
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    write(procfs, {"7/environ": f"A=1\0PACELINE_CHECKPOINT_DIRECTORY={directory}\0B=2\0"})
    ranks = [
        LocalRank(job="job-a", generation=0, rank=rank, local_rank=rank, pid=7 + rank)
        for rank in (0, 1)
    ]
    return dataclasses.replace(context, local_ranks=lambda: ranks), directory


def test_the_directory_of_the_checkpoints(checkpoints, series):
    context, directory = checkpoints
    found = series(StorageCollector(context).collect(1))
    about = f"{{device=,directory={directory},disk=,fstype=,job=job-a,mountpoint={directory}}}"
    assert found[f"paceline_checkpoint_directory_info{about}"] == 1
    # the tree is another node's
    assert not any(name.startswith("node_filesystem") for name in found)


def test_this_machine(context, series):
    real = dataclasses.replace(context, procfs_root=Path("/proc"))
    found = series(StorageCollector(real).collect(1))
    (root,) = (
        name
        for name in found
        if name.startswith("node_filesystem_size_bytes") and name.endswith(",mountpoint=/}")
    )
    there = os.statvfs("/")
    assert found[root] == there.f_blocks * there.f_frsize
    assert found[root] > found[root.replace("_size_", "_avail_")] > 0


def test_the_disk_behind_a_partition(sysfs, write):
    disk = "devices/pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1"
    write(
        sysfs, {f"{disk}/nvme0n1p2/partition": "2\n", "devices/virtual/block/dm-0/dm/name": "x\n"}
    )
    (sysfs / "dev/block").mkdir(parents=True)
    (sysfs / "dev/block/259:2").symlink_to(sysfs / disk / "nvme0n1p2")
    (sysfs / "dev/block/253:0").symlink_to(sysfs / "devices/virtual/block/dm-0")
    assert disk_of(Mount("/", "/dev/nvme0n1p2", "ext4", "259:2"), sysfs) == "nvme0n1"
    assert disk_of(Mount("/data", "/dev/mapper/x", "xfs", "253:0"), sysfs) == "dm-0"
    assert disk_of(Mount("/nfs", "server:/", "nfs4", "0:26"), sysfs) == ""


MOUNTSTATS = """device /dev/sda2 mounted on / with fstype ext4
device server:/x mounted on %s with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2
\tper-op statistics
\t        READ: 10 10 0 1000 2000 1 20 30 0
\t       WRITE: 100 103 2 4000000 8000 500 6000 7000 0
\t        OPEN: 5 5 0 1 2 3 4 5 0
device other:/y mounted on /y with fstype nfs4 statvers=1.1
\t       WRITE: 9 9 9 9 9 9 9 9 9
"""


def test_how_long_nfs_takes(checkpoints, procfs, series, write):
    context, directory = checkpoints
    mountinfo = f"30 25 0:26 / {directory} rw - nfs4 server:/x rw\n"
    mountstats = MOUNTSTATS % directory
    write(procfs, {"self/mountinfo": mountinfo, "self/mountstats": mountstats})
    found = series(StorageCollector(context).collect(1))
    written = f"{{mountpoint={directory},operation=WRITE}}"
    nfs = {name: value for name, value in found.items() if name.startswith("paceline_nfs")}
    assert {name: value for name, value in nfs.items() if name.endswith(written)} == {
        f"paceline_nfs_operations_total{written}": 100,
        f"paceline_nfs_retransmissions_total{written}": 3,
        f"paceline_nfs_timeouts_total{written}": 2,
        f"paceline_nfs_bytes_total{written}": 4_008_000,
        f"paceline_nfs_operation_seconds_total{written}": 7.0,
    }
    assert len(nfs) == 10
