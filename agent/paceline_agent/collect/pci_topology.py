"""How far apart two PCI devices are, in the words of `nvidia-smi topo -m`.

A device's real path in sysfs is the way from the host bridge to it, a directory for each bridge:
`devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0`. NVLink is not in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from paceline_agent.collect.kept_files import Location, read_text_once

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_NUMBER_DIGITS = 6
_FUNCTION = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class Distance(IntEnum):
    """nvml.h, nvmlGpuTopologyLevel_t."""

    PIX = 10  # through at most one PCIe switch
    PXB = 20  # through several, but not the host bridge
    PHB = 30  # through a host bridge, as a rule the CPU
    NODE = 40  # between host bridges of one NUMA node
    SYS = 50  # between NUMA nodes


@dataclass(frozen=True, slots=True)
class PciDevice:
    """`way`: host bridge, bridges, the function itself."""

    way: tuple[str, ...]
    numa_node: int | None  # None: the firmware does not say
    local_cpus: str  # as the kernel lists them; empty if it does not

    @property
    def address(self) -> str:
        return self.way[-1]


def cards_first(directory: Location, names: Iterable[str]) -> list[str]:
    """Devices of a class: cards, then what is no card (a bond), then virtual functions (SR-IOV).

    Where there is room for some only, the node's own come before those made for its guests.
    """

    def standing(name: str) -> int:
        device = os.path.join(directory, name, "device")
        if not os.path.exists(device):
            return 1
        return 2 if os.path.exists(os.path.join(device, "physfn")) else 0

    return sorted(names, key=standing)


def find(sysfs_path: Path) -> PciDevice | None:
    """Of `class/infiniband/mlx5_0/device` or `bus/pci/devices/0000:18:00.0`.

    None if there is no such device, or it is none of PCI. What sits on a PCI function without
    being one (virtio, a port of a multi-port card's driver) counts as that function.
    """
    try:
        path = os.path.realpath(sysfs_path, strict=True)
    except OSError:
        return None
    parts = path.split(os.sep)
    start = next((i for i, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)), None)
    if start is None:
        return None
    end = start + 1
    while end < len(parts) and _FUNCTION.fullmatch(parts[end]):
        end += 1
    if end == start + 1:
        return None
    function = Path(os.sep.join(parts[:end]))
    node = _read(function / "numa_node")
    return PciDevice(
        way=tuple(parts[start:end]),
        numa_node=int(node) if node.isdecimal() and len(node) < _NUMBER_DIGITS else None,
        local_cpus=_read(function / "local_cpulist"),
    )


def find_gpu(sysfs_root: Path, pci_bus_id: str) -> PciDevice | None:
    return find(sysfs_root / "bus" / "pci" / "devices" / sysfs_address(pci_bus_id))


def sysfs_address(pci_bus_id: str) -> str:
    """NVML writes `00000000:1A:00.0`, sysfs `0000:1a:00.0`."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}"


def distance(one: PciDevice, other: PciDevice, numa_nodes: int) -> Distance | None:
    """`numa_nodes`: how many the machine has. None where the firmware leaves it open."""
    known = one.numa_node is not None and other.numa_node is not None
    if known and one.numa_node != other.numa_node:
        return Distance.SYS
    if one.way[0] != other.way[0]:
        return Distance.NODE if known or numa_nodes == 1 else None
    shared = _shared(one.way[:-1], other.way[:-1])
    if shared == 1:
        # Two functions that sit on the host bridge itself, or behind different root ports.
        return Distance.PHB
    # Below what they share, each side of one switch has one downstream port.
    beyond = max(len(one.way), len(other.way)) - 1 - shared
    return Distance.PIX if beyond <= 1 else Distance.PXB


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    differing = (index for index, (mine, its) in pairs if mine != its)
    return next(differing, min(len(one), len(other)))


def _read(path: Path) -> str:
    try:
        return read_text_once(path).strip()
    except OSError:
        return ""
