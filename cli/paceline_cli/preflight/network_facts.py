"""RDMA ports and interfaces of this node, with addresses and PCI location."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from paceline_agent.collect.cached_files import entries
from paceline_agent.collect.pci_topology import find
from paceline_cli.preflight.facts import Interface, RdmaPort
from paceline_wire import metric_names
from paceline_wire.batch import Sample

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h
_VERBS = Path("/dev/infiniband")


def rdma_ports(sysfs_root: Path, samples: Sequence[Sample]) -> list[RdmaPort]:
    root = sysfs_root / "class" / "infiniband"
    names = [
        (device, port) for device in entries(root) for port in entries(root / device / "ports")
    ]
    return [_rdma_port(root, device, port, samples) for device, port in names]


def _rdma_port(root: Path, device: str, port: str, samples: Sequence[Sample]) -> RdmaPort:
    values = _values(samples, device, port)
    state = values.get(metric_names.INFINIBAND_STATE_ID)
    physical_state = values.get(metric_names.INFINIBAND_PHYSICAL_STATE_ID)
    rate = values.get(metric_names.INFINIBAND_RATE_BYTES_PER_SECOND)
    directory, card = root / device / "ports" / port, root / device / "device"
    place = find(card)
    gid = _text(directory / "gids" / "0")
    return RdmaPort(
        device=device,
        port=port,
        state=None if state is None else int(state),
        physical_state=None if physical_state is None else int(physical_state),
        rate_bits_per_second=None if rate is None else rate * 8,
        link_layer=_text(directory / "link_layer"),
        subnet_prefix=None if gid is None else gid[:19],
        firmware=_text(root / device / "fw_ver"),
        pcie_width=_number(card / "current_link_width"),
        pcie_width_max=_number(card / "max_link_width"),
        pci_path=list(place.way) if place else [],
        numa_node=place.numa_node if place else None,
    )


def interfaces(sysfs_root: Path, samples: Sequence[Sample]) -> list[Interface]:
    root = sysfs_root / "class" / "net"
    return [_interface(root / name, samples) for name in entries(root) if (root / name).is_dir()]


def _interface(directory: Path, samples: Sequence[Sample]) -> Interface:
    """Return an interface; MTU and state are read here, because the agent skips virtual ones."""
    name = directory.name
    values = _values(samples, name)
    speed = values.get(metric_names.NETWORK_SPEED_BYTES)
    carrier = _text(directory / "carrier")
    return Interface(
        name=name,
        up=None if carrier is None else carrier == "1",
        speed_bits_per_second=None if speed is None else speed * 8,
        mtu_bytes=_number(directory / "mtu"),
        addresses=addresses(name),
        physical=(directory / "device").exists(),
    )


def addresses(interface: str) -> list[str]:
    """Return its first IPv4 address with the prefix length, if it has one."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            address = fcntl.ioctl(asked, _SIOCGIFADDR, request)[20:24]
            mask = fcntl.ioctl(asked, _SIOCGIFNETMASK, request)[20:24]
        except OSError:
            return []
    return [f"{socket.inet_ntoa(address)}/{int.from_bytes(mask).bit_count()}"]


def rdma_devices_open(directory: Path = _VERBS) -> bool | None:
    """Return whether this user may open them; None if there are no devices."""
    verbs = [directory / name for name in entries(directory) if name.startswith("uverbs")]
    return all(os.access(path, os.R_OK | os.W_OK) for path in verbs) if verbs else None


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def _values(samples: Sequence[Sample], device: str, port: str | None = None) -> dict[str, float]:
    """Return values by metric of a device, or of one of its ports."""
    return {
        sample.name: sample.value
        for sample in samples
        if sample.labels.get("device") == device and sample.labels.get("port") in (None, port)
    }


def _number(path: Path) -> float | None:
    """Return the number; None also for 0, because a link that is down has no width."""
    text = _text(path) or ""
    return float(text) or None if text.isdecimal() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:  # EINVAL: a link that is down
        return None
