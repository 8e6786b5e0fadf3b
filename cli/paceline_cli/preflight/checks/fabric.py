"""Checks of links: RDMA ports and interfaces are up, equally fast, and have the same MTU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from paceline_cli.preflight.facts import PEER_MEMORY_MODULES, NodeFacts, RdmaPort
from paceline_cli.preflight.traffic import traffic_interface
from paceline_cli.preflight.verdict import Check, equal, faults, skipped

ACTIVE, LINK_UP = 4, 5  # ib_verbs.h
_GIGA = 1e9
_STANDARD_MTU_BYTES = 1500  # IEEE 802.3; clouds use 8244, 8896 or 9001
_JUMBO_FROM_BITS_PER_SECOND = 10e9
_DMA_BUF_KERNEL = (5, 12)


def checks(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    if any(node.rdma_ports for node in nodes):
        yield from _rdma(nodes)
    else:
        yield skipped("RDMA", "no node has an RDMA device")
    yield from _ethernet(nodes)


def _rdma(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    fix = "look at the cable and the switch port: ibstat, mlxlink"
    yield _ports_up(nodes, fix)
    yield equal("RDMA link rate", {n.node: _rates(n) for n in nodes}, fix, unit=" Gb/s")
    layers = {n.node: tuple(sorted({p.link_layer or "?" for p in _active(n)})) for n in nodes}
    yield equal("RDMA link layer", layers, "mlxconfig LINK_TYPE_P1")
    firmware = {
        n.node: tuple(sorted({p.firmware for p in n.rdma_ports if p.firmware})) or None
        for n in nodes
    }
    yield equal("RDMA firmware", firmware, "flash the same firmware", status="warn")
    yield _subnets(nodes)
    widths = {
        node.node: [
            f"{p.device}: x{p.pcie_width:g} of x{p.pcie_width_max:g}"
            for p in node.rdma_ports
            if p.pcie_width and p.pcie_width_max and p.pcie_width < p.pcie_width_max
        ]
        for node in nodes
    }
    yield faults("RDMA PCIe width", widths, "reseat the card", "as wide as the cards can")
    yield _may_open(nodes)
    yield _peer_memory(nodes)


def _active(node: NodeFacts) -> list[RdmaPort]:
    return [port for port in node.rdma_ports if port.state == ACTIVE]


def _ports_up(nodes: Sequence[NodeFacts], fix: str) -> Check:
    """Check port states. A port that is down on all nodes is not cabled."""
    used = {port.name for node in nodes for port in _active(node)}
    found: dict[str, list[str]] = {}
    for node in nodes:
        up = {port.name for port in _active(node)}
        present = {port.name for port in node.rdma_ports}
        found[node.node] = [
            f"{name} {'is down' if name in present else 'is missing'}" for name in sorted(used - up)
        ]
        if not up and not used:
            found[node.node] = ["no port is active"]
    return faults("RDMA ports up", found, fix, f"{len(used)} active ports on every node")


def _rates(node: NodeFacts) -> tuple[str, ...] | None:
    """Return rates such as `8 x 400`: equal cards may have different names."""
    rates = [port.rate_bits_per_second for port in _active(node)]
    known = sorted((rate / _GIGA for rate in rates if rate is not None), reverse=True)
    return tuple(f"{known.count(rate)} x {rate:g}" for rate in dict.fromkeys(known)) or None


def _subnets(nodes: Sequence[NodeFacts]) -> Check:
    """Check subnet prefixes: InfiniBand ports with different ones need a router."""
    subnets = {
        node.node: tuple(
            sorted({p.subnet_prefix or "?" for p in _active(node) if p.link_layer == "InfiniBand"})
        )
        or None
        for node in nodes
    }
    fix = "put the ports in one fabric, or name those that are: NCCL_IB_HCA"
    return equal("InfiniBand subnet", subnets, fix, absent="no active InfiniBand port")


def _may_open(nodes: Sequence[NodeFacts]) -> Check:
    with_rdma = [node for node in nodes if node.rdma_ports]
    words = {None: ["no /dev/infiniband/uverbs*"], False: ["no access"], True: []}
    found = {node.node: words[node.rdma_devices_open] for node in with_rdma}
    fix = "load ib_uverbs; give the container /dev/infiniband; add the user to the group"
    return faults("RDMA devices open", found, fix, "this user may open them")


def _peer_memory(nodes: Sequence[NodeFacts]) -> Check:
    """Check GPUDirect RDMA: a peer memory module, or dma-buf with the open driver."""
    concerned = [node for node in nodes if node.gpus and node.rdma_ports]
    if not concerned:
        return skipped("peer memory", "no node has GPUs and RDMA devices")
    found = {node.node: [] if _has_peer_memory(node) else ["none"] for node in concerned}
    fix = "modprobe nvidia_peermem (or the open driver on Linux 5.12+, for dma-buf)"
    passed = "a module for it is loaded, or dma-buf can be used"
    return faults("peer memory", found, fix, passed)


def _has_peer_memory(node: NodeFacts) -> bool:
    if not set(PEER_MEMORY_MODULES).isdisjoint(node.modules):
        return True
    version = re.match(r"(\d+)\.(\d+)", node.versions.get("kernel", ""))
    recent = version is not None and (int(version[1]), int(version[2])) >= _DMA_BUF_KERNEL
    return recent and "nvidia-open" in node.modules


def _ethernet(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    chosen = {node.node: traffic_interface(node, nodes) for node in nodes}
    found = {node: [] if used else ["no interface is up"] for node, used in chosen.items()}
    names = sorted({used.name for used in chosen.values() if used})
    fix = "bring it up, or name another one: NCCL_SOCKET_IFNAME"
    yield faults("interface", found, fix, f"{', '.join(names)}")
    mtus = {node: used.mtu_bytes if used else None for node, used in chosen.items()}
    yield equal("MTU", mtus, "ip link set dev NAME mtu BYTES, and on the switch", unit=" bytes")
    speeds = {
        node: used.speed_bits_per_second / _GIGA if used and used.speed_bits_per_second else None
        for node, used in chosen.items()
    }
    fix = "look at cable, transceiver and switch port: ethtool NAME"
    yield equal("interface speed", speeds, fix, unit=" Gb/s")
    small = {
        node: [f"{used.name}: {used.mtu_bytes:g} bytes"]
        if used
        and (used.speed_bits_per_second or 0) >= _JUMBO_FROM_BITS_PER_SECOND
        and used.mtu_bytes
        and used.mtu_bytes <= _STANDARD_MTU_BYTES
        else []
        for node, used in chosen.items()
    }
    if all(speed is None for speed in speeds.values()):
        yield skipped("jumbo frames", "no interface tells its speed")
        return
    fix = "MTU 9000, or what the network has at most, on both ends and on the switch"
    passed = "jumbo, or too slow a link to matter"
    yield faults("jumbo frames", small, fix, passed, status="warn")
