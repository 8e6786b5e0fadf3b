"""Slow nodes and links: the results of the micro-benchmarks compared with each other.

A node is judged by its best pair. A node that is slow in all of its pairs is slow itself; a slow
pair of two nodes that are fast with others is a slow link. Only the typical pair is compared with
the nominal rate of the ports: if it is far below, all nodes may be slow.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline_cli.preflight.facts import NodeFacts
from paceline_cli.preflight.plan import Compute, Exchange, FailedNode, Result, Transport, of_kind
from paceline_cli.preflight.traffic import traffic_interface
from paceline_cli.preflight.verdict import Check, Status, faults, listing, skipped

_GIGA, _TERA = 1e9, 1e12
_IB_ACTIVE = 4  # ib_verbs.h
_LATENCY_RATIO, _LATENCY_MORE_SECONDS = 3.0, 100e-6
_SCALE_KEEPS = 0.5  # expected bus bandwidth of more nodes, as a share of that of two nodes
# Least bandwidth of a typical pair as a share of the port's rate. A stream over sockets is limited
# by one core.
_RDMA_SHARE, _SOCKETS_SHARE, _SOCKETS_BYTES_PER_SECOND = 0.3, 0.2, 1.25e9


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Shares of the typical speed below which a device or link is slow or suspicious.

    CPUs and sockets are shared with other load; GPUs and RDMA are not.
    """

    fail_ratio: float
    warn_ratio: float


_GPU, _CPU = Tolerance(0.85, 0.93), Tolerance(0.25, 0.5)
_RDMA, _SOCKETS = Tolerance(0.75, 0.9), Tolerance(0.5, 0.7)


def checks(results: Sequence[Result], nodes: Sequence[NodeFacts], backend: str) -> Iterator[Check]:
    yield _finished(results)
    yield from _compute([each for each in results if isinstance(each, Compute)])
    tolerance = _RDMA if backend == "nccl" else _SOCKETS
    local = of_kind(results, "node")
    if local:
        yield _within_nodes(local, tolerance)
    pairs = of_kind(results, "pair")
    if len(nodes) > 1:
        yield from _pairs(pairs, tolerance, _floor(nodes, backend))
        yield _scale(pairs, of_kind(results, "scale"))
    if backend == "nccl":
        yield _transport([each for each in results if isinstance(each, Transport)], nodes)


def _finished(results: Sequence[Result]) -> Check:
    found: dict[str, list[str]] = defaultdict(list)
    for each in results:
        if isinstance(each, FailedNode):
            found[each.node].append(each.error)
    fix = "read what it said on stderr"
    return faults("micro-benchmarks", found, fix, "every node ended in time")


def _compute(measured: Sequence[Compute]) -> Iterator[Check]:
    if not measured:
        yield skipped("matrix multiplication", "nothing was measured")
        return
    cpu = all(each.device == "cpu" for each in measured)
    tolerance = _CPU if cpu else _GPU
    fix = "look at clocks, power and temperature while it runs; leave the node out"
    names = {id(each): each.node if cpu else f"{each.node} {each.device}" for each in measured}
    flops = {names[id(each)]: each.matmul_flops_per_second for each in measured}
    yield _outliers("matrix multiplication", flops, tolerance, fix, scale=_TERA, unit="TFLOP/s")
    memory = {names[id(each)]: each.memory_bytes_per_second for each in measured}
    yield _outliers("memory bandwidth", memory, tolerance, fix)
    copies = {
        names[id(each)]: each.host_to_device_bytes_per_second
        for each in measured
        if each.host_to_device_bytes_per_second is not None
    }
    if copies:
        fix = "compare PCIe width, NUMA binding and IOMMU settings"
        yield _outliers("host to GPU", copies, tolerance, fix)


def _within_nodes(local: Sequence[Exchange], tolerance: Tolerance) -> Check:
    name, fix = "all-reduce within a node", "look at NVLink and PCIe"
    failed = {each.nodes[0]: [each.error] for each in local if each.error is not None}
    if failed:
        return faults(name, failed, fix, "")
    speeds = {each.nodes[0]: each.bus_bytes_per_second or 0.0 for each in local}
    return _outliers(name, speeds, tolerance, fix)


def _outliers(
    name: str,
    speeds: Mapping[str, float],
    tolerance: Tolerance,
    fix: str,
    *,
    scale: float = _GIGA,
    unit: str = "GB/s",
) -> Check:
    """Return the outliers among items that should be equally fast: those far below the upper
    median."""
    usual = statistics.median_high(speeds.values())
    slow = {each: speed for each, speed in speeds.items() if speed < tolerance.warn_ratio * usual}
    if not slow:
        lowest = min(speeds.values())
        evidence = f"{lowest / scale:.3g} to {max(speeds.values()) / scale:.3g} {unit}"
        return Check(name=name, status="pass", evidence=evidence)
    failed = any(speed < tolerance.fail_ratio * usual for speed in slow.values())
    shown = [f"{each}: {speed / scale:.3g} {unit}" for each, speed in slow.items()]
    return Check(
        name=name,
        status="fail" if failed else "warn",
        evidence=f"{listing(shown)}; usual {usual / scale:.3g} {unit}",
        fix=fix,
        nodes=list(dict.fromkeys(each.partition(" ")[0] for each in slow)),
    )


def _floor(nodes: Sequence[NodeFacts], backend: str) -> float | None:
    """Return the bytes per second expected of a typical pair of nodes.

    None if no port's rate is known.

    The most common rate counts; other checks report ports that differ.
    """
    if backend == "nccl":
        rates = [
            max((port.rate_bits_per_second or 0.0 for port in node.rdma_ports), default=0.0) / 8
            for node in nodes
        ]
        if rate := statistics.median_high(rates):
            return _RDMA_SHARE * rate
    used = (traffic_interface(node, nodes) for node in nodes)
    rates = [(port.speed_bits_per_second or 0.0) / 8 if port else 0.0 for port in used]
    rate = min(statistics.median_high(rates), _SOCKETS_BYTES_PER_SECOND)
    return _SOCKETS_SHARE * rate or None


def _pairs(pairs: Sequence[Exchange], tolerance: Tolerance, floor: float | None) -> Iterator[Check]:
    speeds = {
        (each.nodes[0], each.nodes[1]): each.bus_bytes_per_second
        for each in pairs
        if each.bus_bytes_per_second is not None
    }
    yield _reached(pairs, set(speeds))
    if not speeds:
        yield skipped("node pairs", "no pair could be measured")
        return
    best = best_of_nodes(speeds)
    yield _usual(best, floor)
    if len(best) == 2:
        return
    fix = "look at the node's NIC, cable and switch port, and for a rate limit (tc qdisc)"
    yield _outliers("node pairs: slow nodes", best, tolerance, fix)
    yield _slow_links(speeds, best, tolerance)
    yield _latencies(pairs)


def _usual(best: Mapping[str, float], floor: float | None) -> Check:
    """Return a check of all pairs together: with two nodes, or if all pairs are slow, there is no
    outlier."""
    usual = statistics.median_high(best.values())
    evidence = f"{usual / _GIGA:.3g} GB/s"
    if len(best) == 2:
        evidence += "; with two nodes the slow one cannot be identified"
    if floor is None or usual >= floor:
        return Check(name="node pairs: usual speed", status="pass", evidence=evidence)
    return Check(
        name="node pairs: usual speed",
        status="warn",
        evidence=f"{evidence}; by the ports' rate at least {floor / _GIGA:.3g} GB/s",
        fix="look for a rate limit (tc qdisc), a shared or failed switch port, CPUs that are busy",
        nodes=sorted(best),
    )


def best_of_nodes(speeds: Mapping[tuple[str, str], float]) -> dict[str, float]:
    best: dict[str, float] = {}
    for pair, speed in speeds.items():
        for node in pair:
            best[node] = max(speed, best.get(node, 0.0))
    return best


def _reached(pairs: Sequence[Exchange], measured: set[tuple[str, str]]) -> Check:
    """Return a check for pairs without a connection.

    Only a node that reaches no other node is named.
    """
    errors = {(e.nodes[0], e.nodes[1]): e.error for e in pairs if e.error is not None}
    errors = {pair: error for pair, error in errors.items() if pair not in measured}
    alive = {node for pair in measured for node in pair}
    alone = {node for pair in errors for node in pair} - alive
    found: dict[str, list[str]] = {}
    for (one, other), error in errors.items():
        if one in alone or other in alone:
            for node in alone & {one, other}:
                found.setdefault(node, [f"reaches no other node: {error}"])
        else:
            found.setdefault(f"{one} - {other}", [f"do not reach each other: {error}"])
    fix = "look at firewalls, routes and NCCL_SOCKET_IFNAME"
    check = faults(
        "nodes reach each other",
        found,
        fix,
        "1 pair does" if len(measured) == 1 else f"{len(measured)} pairs do",
    )
    named = [node for each in check.nodes for node in each.split(" - ")]
    return Check(
        name=check.name,
        status=check.status,
        evidence=check.evidence,
        fix=check.fix,
        nodes=list(dict.fromkeys(named)),
    )


def _slow_links(
    speeds: Mapping[tuple[str, str], float], best: Mapping[str, float], tolerance: Tolerance
) -> Check:
    """Return slow pairs whose nodes are fast with every other peer."""
    usual = statistics.median_high(best.values())
    well = {node for node, speed in best.items() if speed >= tolerance.warn_ratio * usual}
    slow = {
        pair: speed
        for pair, speed in speeds.items()
        if set(pair) <= well and speed < tolerance.fail_ratio * usual
    }
    name = "node pairs: slow links"
    if not slow:
        return Check(name=name, status="pass", evidence=f"none between {len(well)} nodes")
    shown = [f"{one} - {other}: {v / _GIGA:.3g} GB/s" for (one, other), v in slow.items()]
    return Check(
        name=name,
        status="fail",
        evidence=f"{listing(shown)}; usual {usual / _GIGA:.3g} GB/s",
        fix="look at the way between the two: routes, spine links, switch counters",
        nodes=list(dict.fromkeys(node for pair in slow for node in pair)),
    )


def _latencies(pairs: Sequence[Exchange]) -> Check:
    lowest: dict[str, float] = {}
    for each in pairs:
        if each.latency_seconds is not None:
            for node in each.nodes:
                lowest[node] = min(each.latency_seconds, lowest.get(node, each.latency_seconds))
    usual = statistics.median_low(lowest.values())
    limit = max(_LATENCY_RATIO * usual, usual + _LATENCY_MORE_SECONDS)
    found = {
        node: [f"{value * 1e6:.0f} us"] if value > limit else [] for node, value in lowest.items()
    }
    fix = "look at power saving of CPU and NIC, and at the route"
    passed = f"usually {usual * 1e6:.0f} us for 8 bytes"
    return faults("node pairs: latency", found, fix, passed, status="warn")


def _scale(pairs: Sequence[Exchange], steps: Sequence[Exchange]) -> Check:
    """Check 2, 3 and N nodes: an oversubscribed fabric is fast for pairs and slow for all nodes."""
    name = "2, 3, N nodes"
    failed = {len(each.nodes): each.error for each in steps if each.error is not None}
    if failed:  # the report of one node is enough
        words = [f"{count} nodes: {error}" for count, error in sorted(failed.items())]
        return Check(name=name, status="fail", evidence=listing(words), fix="see the pairs")
    bandwidths = {len(e.nodes): e.bus_bytes_per_second for e in steps if e.bus_bytes_per_second}
    if len(bandwidths) < 2:
        return skipped(name, "needs three nodes")
    evidence = ", ".join(
        f"{count}: {speed / _GIGA:.3g} GB/s" for count, speed in bandwidths.items()
    )
    usual = statistics.median_high(
        [each.bus_bytes_per_second for each in pairs if each.bus_bytes_per_second] or [0.0]
    )
    status: Status = "pass" if min(bandwidths.values()) >= _SCALE_KEEPS * usual else "warn"
    fix = "if no pair is slow: look for oversubscribed or failed links between switches"
    return Check(name=name, status=status, evidence=evidence, fix=fix if status == "warn" else None)


def _transport(transports: Sequence[Transport], nodes: Sequence[NodeFacts]) -> Check:
    """Check that NCCL used RDMA if the nodes have it."""
    networks = {each.node: each.network for each in transports}
    name = "NCCL network"
    if not networks:
        return skipped(name, "NCCL did not say")
    found = {
        node.node: [networks[node.node]]
        if networks.get(node.node) == "Socket"
        and any(port.state == _IB_ACTIVE for port in node.rdma_ports)
        else []
        for node in nodes
    }
    fix = "see RDMA devices, NCCL_IB_HCA and NCCL_IB_DISABLE; NCCL_DEBUG=INFO says why"
    return faults(name, found, fix, ", ".join(sorted(set(networks.values()))))
