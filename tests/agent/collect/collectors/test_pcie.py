from __future__ import annotations

import pytest

from paceline_agent.collect.collectors.pcie import PcieCollector
from paceline_agent.collect.contract import CollectorUnavailable
from paceline_wire.batch import GpuInfo

IB, ETH = "class/infiniband/mlx5_0/device", "class/net/eth0/device"
TREE = {
    f"{IB}/current_link_width": "8\n",
    f"{IB}/max_link_width": "16\n",
    f"{IB}/current_link_speed": "32.0 GT/s PCIe\n",
    f"{IB}/max_link_speed": "32.0 GT/s PCIe\n",
    f"{ETH}/current_link_width": "0\n",
    f"{ETH}/max_link_width": "8\n",
    f"{ETH}/current_link_speed": "Unknown\n",
    "class/net/lo/mtu": "65536\n",
}


def test_golden(context, sysfs, write, series):
    write(sysfs, TREE)
    mlx5 = "{device=mlx5_0,kind=rdma}"
    assert series(PcieCollector(context).collect(1)) == {
        f"paceline_device_pcie_width{mlx5}": 8,
        f"paceline_device_pcie_width_max{mlx5}": 16,
        f"paceline_device_pcie_transfers_per_second{mlx5}": 32e9,
        f"paceline_device_pcie_transfers_per_second_max{mlx5}": 32e9,
        "paceline_device_pcie_width_max{device=eth0,kind=nic}": 8,
    }


def test_a_card_that_is_off_the_bus_has_no_width(context, sysfs, write, series):
    """All bits read as 1: 63 lanes."""
    write(
        sysfs, {**TREE, f"{IB}/current_link_width": "63\n", f"{IB}/current_link_speed": "Unknown\n"}
    )
    found = series(PcieCollector(context).collect(1))
    assert "paceline_device_pcie_width{device=mlx5_0,kind=rdma}" not in found
    assert found["paceline_device_pcie_width_max{device=mlx5_0,kind=rdma}"] == 16


def test_a_machine_without_pcie_devices_is_unavailable(context, sysfs, write):
    write(sysfs, {"class/net/lo/mtu": "65536\n"})
    with pytest.raises(CollectorUnavailable, match="no GPU or network device on PCIe"):
        PcieCollector(context).collect(1)


CARD = "devices/pci0000:15/0000:15:01.0/0000:1b:00.0"
GPU = "bus/pci/devices/0000:3a:00.0"
AER = "RxErr 4\nBadTLP 3\nRollover 0\nTOTAL_ERR_COR 7\n"


def test_a_card_and_a_gpu_under_both_names(context, sysfs, write, series):
    write(
        sysfs,
        {
            f"{CARD}/current_link_width": "16\n",
            f"{CARD}/numa_node": "1\n",
            f"{CARD}/aer_dev_correctable": AER,
            f"{CARD}/aer_dev_fatal": "Undefined 0\nTOTAL_ERR_FATAL 0\n",
            f"{GPU}/current_link_speed": "16.0 GT/s PCIe\n",
            f"{GPU}/numa_node": "-1\n",
        },
    )
    for name in ("net/ib0", "infiniband/mlx5_0"):
        (sysfs / "class" / name).mkdir(parents=True)
        (sysfs / "class" / name / "device").symlink_to(sysfs / CARD)
    context.inventory.gpus = (
        GpuInfo(index=2, uuid="GPU-a", name="H200", pci_bus_id="00000000:3A:00.0"),
    )
    card, gpu = "{bus=1b,device=00,function=0,segment=0000}", "{device=gpu2,kind=gpu}"
    found = series(PcieCollector(context).collect(1))
    for device in ("device=ib0,kind=nic", "device=mlx5_0,kind=rdma"):
        assert found.pop(f"paceline_device_pcie_width{{{device}}}") == 16
        errors = f"paceline_device_pcie_errors_total{{{device},severity=%s}}"
        assert found.pop(errors % "correctable") == 7
        assert found.pop(errors % "fatal") == 0
    assert found == {
        f"node_pcidevice_current_link_width{card}": 16,
        f"node_pcidevice_numa_node{card}": 1,
        f"paceline_device_pcie_transfers_per_second{gpu}": 16e9,
        "node_pcidevice_current_link_transfers_per_second"
        "{bus=3a,device=00,function=0,segment=0000}": 16e9,
    }
