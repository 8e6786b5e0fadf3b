"""PCIe links of GPUs and network devices: current and maximum width and speed, and errors.

A card that trained to a lower speed (a bad contact, a riser) transfers a fraction of what its port
supports; a card with correctable errors repeats transfers. `node_pcidevice_*` holds the same values
with node_exporter's names and labels.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from paceline_agent.collect.cached_files import CachedFiles, entries
from paceline_agent.collect.contract import (
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
    Metric,
)
from paceline_agent.collect.pci_topology import cards_first, sysfs_address
from paceline_wire import metric_names
from paceline_wire.batch import Sample

METRICS = (
    Metric(
        "paceline_device_pcie_errors_total",
        "counter",
        None,
        "PCIe errors the device reported (AER), by severity.",
    ),
    Metric(
        "node_pcidevice_*",
        "gauge",
        None,
        "PCIe link and NUMA node of GPUs and network devices, as node_exporter names it.",
    ),
    Metric(metric_names.DEVICE_PCIE_WIDTH, "gauge", "lanes", "PCIe lanes in use."),
    Metric(metric_names.DEVICE_PCIE_WIDTH_MAX, "gauge", "lanes", "PCIe lanes there could be."),
    Metric(
        metric_names.DEVICE_PCIE_TRANSFERS_PER_SECOND,
        "gauge",
        None,
        "PCIe transfers per second and lane.",
    ),
    Metric(
        metric_names.DEVICE_PCIE_TRANSFERS_PER_SECOND_MAX,
        "gauge",
        None,
        "PCIe transfers per second and lane there could be.",
    ),
)

_CLASSES = {"net": "nic", "infiniband": "rdma"}
_DEVICES_AT_MOST = 64
# pci_regs.h, PCI_EXP_LNKCAP_MLW. 0 and 255: no link, or a virtual device; 63: the device is off the
# bus.
_LANES = (1, 2, 4, 8, 12, 16, 32)
_WIDTHS = {"current_link_width": "pcie_width", "max_link_width": "pcie_width_max"}
_SPEEDS = {
    "current_link_speed": "pcie_transfers_per_second",
    "max_link_speed": "pcie_transfers_per_second_max",
}
_NODE_EXPORTERS = {
    "pcie_width": "node_pcidevice_current_link_width",
    "pcie_width_max": "node_pcidevice_max_link_width",
    "pcie_transfers_per_second": "node_pcidevice_current_link_transfers_per_second",
    "pcie_transfers_per_second_max": "node_pcidevice_max_link_transfers_per_second",
}
_ERRORS = {  # Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats
    "correctable": "aer_dev_correctable",
    "nonfatal": "aer_dev_nonfatal",
    "fatal": "aer_dev_fatal",
}
_TOTAL = re.compile(r"^TOTAL_ERR_\w+ ([0-9]{1,20})$", re.MULTILINE)
_SPEED = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,4})?) GT/s")
_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")


@dataclass(frozen=True, slots=True)
class _PcieDevice:
    directory: str
    labels: dict[str, str]
    address: dict[str, str] | None  # node_exporter's labels


class PcieCollector(Collector):
    name: ClassVar[str] = "pcie"
    interval_seconds: ClassVar[float] = 5.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._files = CachedFiles(patient=True)

    def collect(self, now_ns: int) -> Collected:
        samples: list[Sample] = []
        reported: set[str] = set()
        for device in self._devices():
            values = list(self._link(device.directory, now_ns))
            for name, value in values:
                metric = f"paceline_device_{name}"
                samples.append(Sample(metric, device.labels, value, now_ns))
            samples += self._errors(device, now_ns)
            address = device.address
            if address is None or str(address) in reported:  # eth0 and mlx5_0 can be the same card
                continue
            reported.add(str(address))
            for name, value in values:
                samples.append(Sample(_NODE_EXPORTERS[name], address, value, now_ns))
            node = self._files.read_number(f"{device.directory}/numa_node", now_ns)
            if node is not None and node >= 0:  # -1: not reported by the firmware
                samples.append(Sample("node_pcidevice_numa_node", address, float(node), now_ns))
        if not samples:
            raise CollectorUnavailable("no GPU or network device on PCIe")
        return Collected(samples=samples)

    def close(self) -> None:
        self._files.close()

    def _devices(self) -> Iterator[_PcieDevice]:
        root = os.path.join(self.context.sysfs_root, "bus", "pci", "devices")
        for gpu in self.context.inventory.gpus:
            name = sysfs_address(gpu.pci_bus_id)
            labels = {"device": f"gpu{gpu.index}", "kind": "gpu"}
            yield _PcieDevice(os.path.join(root, name), labels, _address(name))
        for class_name, kind in _CLASSES.items():
            root = os.path.join(self.context.sysfs_root, "class", class_name)
            for name in cards_first(root, entries(root))[:_DEVICES_AT_MOST]:
                if self.context.excludes_rdma(name):
                    continue
                directory = os.path.join(root, name, "device")
                function = os.path.basename(os.path.realpath(directory))
                yield _PcieDevice(directory, {"device": name, "kind": kind}, _address(function))

    def _link(self, directory: str, now_ns: int) -> Iterator[tuple[str, float]]:
        for file, name in _WIDTHS.items():
            width = self._files.read_number(f"{directory}/{file}", now_ns)
            if width is not None and width in _LANES:
                yield name, float(width)
        for file, name in _SPEEDS.items():
            speed = _SPEED.match(self._files.read_text(f"{directory}/{file}", now_ns) or "")
            if speed is not None:  # for example "Unknown"
                yield name, float(speed[1]) * 1e9

    def _errors(self, device: _PcieDevice, now_ns: int) -> Iterator[Sample]:
        for severity, file in _ERRORS.items():
            found = _TOTAL.search(self._files.read_text(f"{device.directory}/{file}", now_ns) or "")
            if found is not None:
                labels = {**device.labels, "severity": severity}
                yield Sample("paceline_device_pcie_errors_total", labels, float(found[1]), now_ns)


def _address(name: str) -> dict[str, str] | None:
    found = _ADDRESS.fullmatch(name)
    if found is None:
        return None
    return dict(zip(("segment", "bus", "device", "function"), found.groups(), strict=True))
