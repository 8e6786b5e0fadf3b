"""The facts of one node, from frozen trees, emulated GPUs and this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from paceline_cli.preflight import host_facts
from paceline_cli.preflight.collect import collect
from paceline_cli.preflight.facts import NodeFacts
from paceline_cli.preflight.gpu_facts import read_apart
from paceline_demo.fake_nvml import CompilerMissing, FakeGpus, build, environment


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    """/sys and /proc of a node with one HCA below the same switch as GPU 0."""
    sysfs, procfs = tmp_path / "sys", tmp_path / "proc"
    switch = "devices/pci0000:15/0000:15:01.0/0000:16:00.0"
    gpu, hca = f"{switch}/0000:17:00.0/0000:1a:00.0", f"{switch}/0000:17:01.0/0000:18:00.0"
    write(
        sysfs,
        {
            f"{gpu}/numa_node": "0",
            f"{hca}/numa_node": "0",
            f"{hca}/current_link_width": "8",
            f"{hca}/max_link_width": "16",
            "class/infiniband/mlx5_0/fw_ver": "28.39.2048",
            "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
            "class/infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp",
            "class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
            "class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
            "class/infiniband/mlx5_0/ports/1/gids/0": "fe80:0000:0000:0000:a088:c203:0030:1e2a",
            "class/net/eth9/mtu": "9000",
            "class/net/eth9/speed": "100000",
            "class/net/eth9/carrier": "1",
            "class/net/eth9/statistics/rx_bytes": "1",
            "module/nvidia_peermem/version": "570.86.15",
            "module/efa_nv_peermem/version": "1.1.1",
            "module/mlx5_core/version": "24.10-1.1.4",
        },
    )
    (sysfs / "class/infiniband/mlx5_0/device").symlink_to(sysfs / hca)
    (sysfs / "bus/pci/devices").mkdir(parents=True)
    (sysfs / "bus/pci/devices/0000:1a:00.0").symlink_to(sysfs / gpu)
    write(procfs, {"meminfo": "MemTotal: 1048576 kB", "sys/kernel/numa_balancing": "1"})
    return sysfs, procfs


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build(tmp_path_factory.mktemp("library"))
    except CompilerMissing as missing:
        pytest.skip(f"NOT TESTED: {missing}")


@pytest.fixture
def gpus(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    """Two emulated GPUs for processes that the test starts."""
    state = FakeGpus.create(tmp_path / "gpus", 2)
    for name, value in environment(library, state.path).items():
        monkeypatch.setenv(name, value)
    yield state
    state.close()


def test_a_tree_is_read(trees: tuple[Path, Path], gpus: FakeGpus) -> None:
    gpus.set(1, pcie_width=8, remap_pending=1, throttle_reasons=["hw_thermal_slowdown"])
    facts = collect((), *trees)
    (port,) = facts.rdma_ports
    assert (port.state, port.rate_bits_per_second, port.link_layer) == (4, 400e9, "InfiniBand")
    assert (port.pcie_width, port.pcie_width_max, port.firmware) == (8, 16, "28.39.2048")
    assert port.subnet_prefix == "fe80:0000:0000:0000"
    first, second = facts.gpus
    assert (first.name, first.power_limit_watts, first.nvlinks_active) == ("NVIDIA H200", 700, 18)
    assert first.pci_path[-1] == "0000:1a:00.0"
    assert (first.numa_node, second.numa_node) == (0, None)
    assert (second.pcie_width, second.pcie_width_max, second.remap_pending) == (8, 16, 1)
    assert second.throttle_reasons == ["hw_thermal_slowdown"]
    (nic,) = facts.interfaces
    assert (nic.mtu_bytes, nic.speed_bits_per_second, nic.up) == (9000, 100e9, True)
    assert facts.modules == ["nvidia_peermem", "efa_nv_peermem"]
    assert facts.versions["mlx5_core"] == "24.10-1.1.4"
    assert facts.versions["driver"]
    assert (facts.memory_bytes, facts.numa_balancing) == (1 << 30, True)
    assert msgspec.json.decode(msgspec.json.encode(facts), type=NodeFacts) == facts


def test_a_hung_driver_costs_its_timeout_and_is_reported(gpus: FakeGpus) -> None:
    gpus.set(0, hang_seconds=30)
    facts = read_apart(Path("/sys"), patience_seconds=0.3)
    assert facts.gpus == []
    assert "did not answer" in (facts.problem or "")


@pytest.mark.parametrize(
    ("condition", "trouble"), [({"lost": 1}, "is lost"), ({"hang_seconds": 30}, "does not answer")]
)
def test_a_gpu_that_does_not_answer_leaves_the_others(
    gpus: FakeGpus, condition: dict[str, float], trouble: str
) -> None:
    gpus.set(0, **condition)
    facts = read_apart(Path("/sys"))
    assert [gpu.trouble for gpu in facts.gpus] == [trouble, None], facts
    assert facts.gpus[1].sm_clock_max_mhz == 1980


def test_nothing_is_made_up_where_there_is_nothing(tmp_path: Path) -> None:
    facts = collect((), tmp_path, tmp_path)
    assert (facts.rdma_ports, facts.interfaces, facts.modules) == ([], [], [])
    assert (facts.memory_bytes, facts.numa_balancing, facts.cpu_governors) == (None, None, [])


def test_a_checkpoint_path_is_written_to_and_left_as_it_was(tmp_path: Path) -> None:
    facts = host_facts.checkpoint(tmp_path, Path("/proc"))
    assert facts.problem is None
    assert facts.write_bytes_per_second
    assert facts.filesystem
    assert list(tmp_path.iterdir()) == []
    assert host_facts.checkpoint(tmp_path / "absent", Path("/proc")).problem


def test_the_facts_of_this_machine_are_one_line() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "paceline_cli", "preflight", "--facts"],
        env={**os.environ, "NCCL_DEBUG": "WARN"},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = ended.stdout.splitlines()
    facts = json.loads(line)
    assert facts["environment"]["NCCL_DEBUG"] == "WARN"
    assert facts["limits"]["nofile"] is None or facts["limits"]["nofile"] > 0
    assert facts["versions"]["kernel"]
