"""The distance between two PCI devices, in the terms of `nvidia-smi topo -m`.

The real path of a device in sysfs starts at the host bridge and has one directory per bridge:
`devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0`. It does not include
NVLink.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from paceline_agent.collect.cached_files import Location, read_text_once

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_NUMBER_DIGITS = 6
_FUNCTION = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class Distance(IntEnum):
    """Values of nvmlGpuTopologyLevel_t in nvml.h."""

    PIX = 10  # through at most one PCIe switch
    PXB = 20  # through several switches, but no host bridge
    PHB = 30  # through a host bridge, usually the CPU
    NODE = 40  # between host bridges of one NUMA node
    SYS = 50  # between NUMA nodes


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A PCI function; `way`: its path from the host bridge over each bridge to itself."""

    way: tuple[str, ...]
    numa_node: int | None  # None: not reported by the firmware
    local_cpus: str  # in the kernel's list format; empty if unknown

    @property
    def address(self) -> str:
        return self.way[-1]


def cards_first(directory: Location, names: Iterable[str]) -> list[str]:
    """Return devices of a class: cards, other devices (a bond), then virtual functions (SR-IOV).

    If only some can be collected, the node's own devices come before those of its guests.
    """

    def standing(name: str) -> int:
        device = os.path.join(directory, name, "device")
        if not os.path.exists(device):
            return 1
        return 2 if os.path.exists(os.path.join(device, "physfn")) else 0

    return sorted(names, key=standing)


def find(sysfs_path: Path) -> PciDevice | None:
    """Return the device of `class/infiniband/mlx5_0/device` or `bus/pci/devices/0000:18:00.0`.

    None if it does not exist or is not a PCI device. A device on top of a PCI function (virtio, a
    port of a multi-port card) counts as that function.
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
    """Convert NVML's `00000000:1A:00.0` to sysfs' `0000:1a:00.0`."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}"


def distance(one: PciDevice, other: PciDevice, numa_nodes: int) -> Distance | None:
    """Return the distance; None if the firmware does not determine it.

    `numa_nodes` is the number of NUMA nodes of the machine.
    """
    known = one.numa_node is not None and other.numa_node is not None
    if known and one.numa_node != other.numa_node:
        return Distance.SYS
    if one.way[0] != other.way[0]:
        return Distance.NODE if known or numa_nodes == 1 else None
    shared = _shared(one.way[:-1], other.way[:-1])
    if shared == 1:
        # Both are directly on the host bridge, or behind different root ports.
        return Distance.PHB
    # Behind one switch, each path has one downstream port below the shared part.
    beyond = max(len(one.way), len(other.way)) - 1 - shared
    return Distance.PIX if beyond <= 1 else Distance.PXB


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    differing = (index for index, (own, other) in pairs if own != other)
    return next(differing, min(len(one), len(other)))


def _read(path: Path) -> str:
    try:
        return read_text_once(path).strip()
    except OSError:
        return ""
