"""Selection of the interface that reaches other nodes, and the syntax of NCCL's name lists."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from paceline_cli.preflight.facts import Interface, NodeFacts

_ASKED = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def matches(setting: str, name: str, port: str | None = None) -> bool:
    """Return whether a list selects `name`: `eth,ib` are prefixes, `=eth0` is exact, `^` excludes.

    A device with a port (`mlx5_0:1`) selects that port only.
    """
    exclude = setting.startswith("^")
    wanted = setting.removeprefix("^")
    exact = wanted.startswith("=")
    names = [each.strip() for each in wanted.removeprefix("=").split(",") if each.strip()]
    found = any(_matches_one(each, exact, name, port) for each in names)
    return found != exclude


def _matches_one(wanted: str, exact: bool, name: str, port: str | None) -> bool:
    device, _, wanted_port = wanted.partition(":") if port is not None else (wanted, "", "")
    if wanted_port and wanted_port != port:
        return False
    return name == device if exact else name.startswith(device)


def traffic_interface(node: NodeFacts, nodes: Sequence[NodeFacts]) -> Interface | None:
    """Return the interface that NCCL would use: the selected one, one in a shared network, or any.

    None: no interface is up and has an address.
    """
    usable = [each for each in node.interfaces if each.up is not False and each.addresses]
    usable = [each for each in usable if each.name != "lo"]
    for name in _ASKED:
        setting = node.environment.get(name)
        if setting:
            return next((each for each in usable if matches(setting, each.name)), None)
    # docker0 and virbr0 have the same address on all nodes: they connect no nodes.
    holders = Counter(_addresses(each for other in nodes for each in other.interfaces))
    usable = [each for each in usable if holders[each.addresses[0]] < 2] or usable
    networks = [_networks(each.interfaces) for each in nodes]
    shared = set.intersection(*filter(None, networks)) if any(networks) else set()
    in_shared = [each for each in usable if _networks([each]) & shared]
    return next(iter([*sorted(in_shared, key=_fastest), *sorted(usable, key=_fastest)]), None)


def address(node: NodeFacts, nodes: Sequence[NodeFacts]) -> str | None:
    """Return the address at which other nodes reach this one."""
    chosen = traffic_interface(node, nodes)
    return chosen.addresses[0].partition("/")[0] if chosen else None


def _addresses(interfaces: Iterable[Interface]) -> Iterator[str]:
    for interface in interfaces:
        if interface.name != "lo":
            yield from interface.addresses


def _networks(interfaces: Iterable[Interface]) -> set[str]:
    return {str(ipaddress.ip_interface(each).network) for each in _addresses(interfaces)}


def _fastest(interface: Interface) -> tuple[bool, float, str]:
    return not interface.physical, -(interface.speed_bits_per_second or 0), interface.name
