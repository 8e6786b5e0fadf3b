"""NIC statistics that only its driver has: pauses, congestion, losses, link.

Names are node_exporter's. Only statistics of an allow-list are collected, because a driver may have
thousands, most of them per queue. PFC pauses (`received_prio3_pause`) show the state of a RoCE
network. In a copied tree, the output of `ethtool -S DEVICE` is read from
`class/net/DEVICE/ethtool_statistics`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from paceline_agent.collect.cached_files import entries, read_text_once
from paceline_agent.collect.contract import (
    BEYOND_COUNTERS,
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
    Metric,
)
from paceline_agent.collect.ethtool_ioctl import Driver, Ethtool
from paceline_agent.collect.pci_topology import cards_first
from paceline_wire.batch import Sample

METRICS = (
    Metric("node_ethtool_info", "info", None, "Driver and firmware of an interface."),
    Metric("node_ethtool_*_total", "counter", None, "Of the driver's statistics."),
    Metric(
        "node_ethtool_*",
        "unknown",
        None,
        "Of the driver's statistics, as node_exporter names it.",
    ),
)

_DEVICES_AT_MOST = 64
_SERIES_AT_MOST = 96  # per device
_DAY_NS = 86_400 * 10**9
_WANTED = re.compile(
    r"pause|pfc|xoff"  # flow control: mlx5, bnxt_en, ice
    r"|ecn|cnp|cong"
    r"|discard|drop|out_of_buffer|no_buffer|no_dma|missed|overflow|passed_thres"
    r"|crc|fcs|symbol|err_lane|corrected_bits|uncorrectable|bad_|errors?(_phy|\.nic)?$"
    r"|link_down|signal_integrity|pci_stalled|module_|timeout"
    r"|allowance_exceeded"  # ena: limits of the instance
    r"|vport_rdma_unicast"  # mlx5: RoCE traffic
)
# Per queue, ring or channel; XDP and TLS offload.
_UNWANTED = re.compile(
    r"^[rt]x-?_?\d|(^|[._-])(queue|ring|ch|q|channel|cpu|vf|tc)[_-]?\d|\[\d+\]|xdp|xsk|tls_|cache"
)
_WELL_KNOWN = {
    "rx_dropped": "received_dropped_total",
    "rx_errors": "received_errors_total",
    "tx_errors": "transmitted_errors_total",
}
_LINE = re.compile(r"^\s*([^:\n]+): ([0-9]{1,20})$", re.MULTILINE)


@dataclass(slots=True)
class _EthtoolDevice:
    names: list[str]
    wanted: list[tuple[int, str]]  # position in the list, metric
    driver: Driver | None


class EthtoolCollector(Collector):
    name: ClassVar[str] = "ethtool"
    interval_seconds: ClassVar[float] = 10.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._root = context.sysfs_root / "class" / "net"
        self._is_this_machine = context.sysfs_root == Path("/sys")
        self._ethtool: Ethtool | None = None
        self._devices: dict[str, _EthtoolDevice] = {}
        self._silent_until_ns: dict[str, int] = {}

    def collect(self, now_ns: int) -> Collected:
        names = [name for name in entries(self._root) if (self._root / name / "device").exists()]
        for gone in (self._devices.keys() | self._silent_until_ns.keys()) - set(names):
            self._devices.pop(gone, None)
            self._silent_until_ns.pop(gone, None)
        read = self._ask if self._is_this_machine else self._read
        samples: list[Sample] = []
        for name in cards_first(self._root, names)[:_DEVICES_AT_MOST]:
            if now_ns < self._silent_until_ns.get(name, 0):
                continue
            samples += read(name, now_ns)
        if not samples:
            raise CollectorUnavailable("no network driver that tells its statistics")
        return Collected(samples=samples)

    def close(self) -> None:
        if self._ethtool is not None:
            self._ethtool.close()

    def _ask(self, name: str, now_ns: int) -> Iterator[Sample]:
        if self._ethtool is None:
            self._ethtool = Ethtool()
        try:
            device = self._devices.get(name) or self._learn(self._ethtool, name)
            values = self._ethtool.values(name, len(device.names)) if device.wanted else ()
        except OSError:  # most devices do not support it
            self._devices.pop(name, None)
            self._silent_until_ns[name] = now_ns + _DAY_NS
            return
        if values is None:
            del self._devices[name]
            return
        if device.driver is not None:
            yield Sample("node_ethtool_info", _information(name, device.driver), 1.0, now_ns)
        for index, metric in device.wanted:
            if values[index] < BEYOND_COUNTERS:
                yield Sample(metric, {"device": name}, float(values[index]), now_ns)

    def _learn(self, ethtool: Ethtool, name: str) -> _EthtoolDevice:
        names = ethtool.names(name)
        try:
            driver = ethtool.driver(name)
        except OSError:
            driver = None
        device = self._devices[name] = _EthtoolDevice(names, list(wanted(names)), driver)
        return device

    def _read(self, name: str, now_ns: int) -> Iterator[Sample]:
        try:
            text = read_text_once(self._root / name / "ethtool_statistics")
        except OSError:
            return
        lines = _LINE.findall(text)
        for index, metric in wanted(found for found, _ in lines):
            value = int(lines[index][1])
            if value < BEYOND_COUNTERS:
                yield Sample(metric, {"device": name}, float(value), now_ns)


def wanted(names: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield (position, metric) of the collected names: flow control first, each metric once."""
    named = list(enumerate(names))
    named.sort(key=lambda each: not re.search("pause|pfc|xoff|ecn", each[1]))
    taken: set[str] = set()
    for index, name in named:
        if len(taken) < _SERIES_AT_MOST and _WANTED.search(name) and not _UNWANTED.search(name):
            metric = metric_name(name)
            if metric not in taken:
                taken.add(metric)
                yield index, metric


def metric_name(name: str) -> str:
    """Return `node_ethtool_received_prio3_pause` for `rx_prio3_pause`, as node_exporter does."""
    if name in _WELL_KNOWN:
        return f"node_ethtool_{_WELL_KNOWN[name]}"
    made = re.sub(r"_*[^0-9A-Za-z_]+_*", "_", name).lower().lstrip("_")
    made = re.sub(r"(^|_)rx(_|$)", r"\1received\2", made)
    made = re.sub(r"(^|_)tx(_|$)", r"\1transmitted\2", made)
    return f"node_ethtool_{made}"


def _information(device: str, driver: Driver) -> dict[str, str]:
    return {
        "device": device,
        "driver": driver.name,
        "version": driver.version,
        "firmware_version": driver.firmware,
        "bus_info": driver.bus,
        "expansion_rom_version": driver.rom,
    }
