"""Network interfaces: bytes, errors, drops, speed, duplex, MTU, carrier; TCP and UDP of the node.

Names are node_exporter's. Further driver statistics are in `ethtool.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

from paceline_agent.collect.cached_files import CachedFiles, FileGroup, entries, inode_of
from paceline_agent.collect.contract import BEYOND_COUNTERS, Collected, Collector, Context, Metric
from paceline_agent.collect.pci_topology import cards_first
from paceline_wire import metric_names
from paceline_wire.batch import CollectorEvent, DeviceEvent, Sample

METRICS = (
    Metric("node_network_info", "info", None, "Address, duplex and state of an interface."),
    Metric("paceline_network_jumbo", "gauge", None, "1: packets may be larger than 1500 bytes."),
    Metric(metric_names.NETWORK_RECEIVE_BYTES_TOTAL, "counter", "bytes", "Received."),
    Metric(metric_names.NETWORK_TRANSMIT_BYTES_TOTAL, "counter", "bytes", "Sent."),
    Metric("node_network_mtu_bytes", "gauge", "bytes", "Largest packet."),
    Metric(
        metric_names.NETWORK_SPEED_BYTES, "gauge", "bytes", "Bytes per second the link can carry."
    ),
    Metric(metric_names.NETWORK_CARRIER, "gauge", None, "1: there is a carrier."),
    Metric(
        metric_names.NETWORK_CARRIER_CHANGES_TOTAL,
        "counter",
        None,
        "Times the carrier came or went.",
    ),
    Metric("node_network_up", "gauge", None, "1: operstate is up."),
    Metric(
        "node_network_*_total",
        "counter",
        None,
        "Of /sys/class/net statistics, as node_exporter names it.",
    ),
    Metric("node_network_*", "gauge", None, "Of /sys/class/net, as node_exporter names it."),
    Metric("node_netstat_*", "unknown", None, "Of /proc/net/snmp and /proc/net/netstat."),
)

_DEVICES_AT_MOST = 64
_LOOK_AGAIN_NS = 5_000_000_000  # between scans for new interfaces
_ASK_AGAIN_NS = 10_000_000_000  # between reads: `speed` and `duplex` take a kernel lock
_INFORMATION = ("address", "broadcast", "duplex", "ifalias")
_NOT_THE_NODES = re.compile(r"^(lo$|veth|docker|br-|cali|cni|flannel|virbr|ifb|dummy|nodelocal)")

_NUMBERS = {
    "statistics/rx_bytes": "receive_bytes_total",
    "statistics/rx_packets": "receive_packets_total",
    "statistics/rx_errors": "receive_errs_total",
    "statistics/rx_dropped": "receive_drop_total",
    "statistics/rx_fifo_errors": "receive_fifo_total",
    "statistics/rx_frame_errors": "receive_frame_total",
    "statistics/rx_crc_errors": "receive_crc_errors_total",
    "statistics/rx_missed_errors": "receive_missed_errors_total",
    "statistics/multicast": "receive_multicast_total",
    "statistics/tx_bytes": "transmit_bytes_total",
    "statistics/tx_packets": "transmit_packets_total",
    "statistics/tx_errors": "transmit_errs_total",
    "statistics/tx_dropped": "transmit_drop_total",
    "statistics/tx_fifo_errors": "transmit_fifo_total",
    "statistics/tx_carrier_errors": "transmit_carrier_total",
    "statistics/collisions": "transmit_colls_total",
    "mtu": "mtu_bytes",
    "carrier": "carrier",
    "carrier_changes": "carrier_changes_total",
    "carrier_up_count": "carrier_up_changes_total",
    "carrier_down_count": "carrier_down_changes_total",
}
_DIGITS = 20  # digits of a 64-bit number
_UNKNOWN_SPEEDS = {0xFFFF, 0xFFFFFFFF}  # -1 as written by older kernels
_MEGABIT_BYTES = 125_000
_STANDARD_MTU_BYTES = 1500  # IEEE 802.3; anything larger is a jumbo frame
_PROTOCOLS: dict[str, dict[str, tuple[str, ...]]] = {
    "snmp": {
        "Tcp": ("ActiveOpens", "PassiveOpens", "CurrEstab", "InSegs", "OutSegs", "RetransSegs",
                "InErrs", "OutRsts"),
        "Udp": ("InDatagrams", "OutDatagrams", "InErrors", "RcvbufErrors", "SndbufErrors"),
    },
    "netstat": {
        "TcpExt": ("ListenDrops", "ListenOverflows", "TCPTimeouts", "TCPSynRetrans",
                   "TCPLostRetransmit", "TCPOFOQueue", "TCPRcvQDrop"),
    },
}  # fmt: skip


@dataclass(slots=True)
class _Interface:
    name: str
    directory: str
    inode: int
    labels: dict[str, str]
    files: FileGroup
    metrics: list[str]  # one per file
    carrier: bool | None = None
    state: str | None = None
    speed_mbits: int | None = None
    about: dict[str, str] = field(default_factory=dict)
    asked_ns: int | None = None  # when `speed` and `duplex` were read


class NicCollector(Collector):
    name: ClassVar[str] = "nic"
    interval_seconds: ClassVar[float] = 1.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._root = os.path.join(context.sysfs_root, "class", "net")
        # Patient: reading a link that is down fails with EINVAL until it is up.
        self._files = CachedFiles(patient=True, bytes_at_most=1 << 14, share=0.2)
        self._protocols_root = os.path.join(context.procfs_root, "net")
        self._devices: dict[str, _Interface] = {}
        self._look_ns: int | None = None  # time of the last scan of the directory

    def collect(self, now_ns: int) -> Collected:
        if self._is_time_to_look(now_ns):
            self._look_ns = now_ns
            self._discover()
        samples: list[Sample] = []
        events: list[DeviceEvent | CollectorEvent] = []
        for device in self._devices.values():
            self._ask(device, now_ns)
            values = self._values(device, now_ns)
            samples += [Sample(name, device.labels, value, now_ns) for name, value in values]
            samples.append(Sample("node_network_info", device.about, 1.0, now_ns))
            events += _link_events(device, dict(values).get(metric_names.NETWORK_CARRIER), now_ns)
        for file, protocols in _PROTOCOLS.items():
            samples += self._protocols(file, protocols, now_ns)
        return Collected(samples=samples, events=events)

    def close(self) -> None:
        self._files.close()

    def _is_time_to_look(self, now_ns: int) -> bool:
        if self._look_ns is None or not 0 <= now_ns - self._look_ns < _LOOK_AGAIN_NS:
            return True
        return any(
            inode_of(f"{one.directory}/statistics") != one.inode for one in self._devices.values()
        )

    def _discover(self) -> None:
        found: dict[str, _Interface] = {}
        listed = entries(self._root)
        if not listed:  # the loopback always exists: no file descriptor was left
            return
        names = [name for name in listed if not _NOT_THE_NODES.match(name)]
        if len(names) > _DEVICES_AT_MOST:
            names = cards_first(self._root, names)[:_DEVICES_AT_MOST]
        for name in names:
            directory = os.path.join(self._root, name)
            inode = inode_of(f"{directory}/statistics")
            if inode is None:
                continue
            known = self._devices.get(name)
            if known is None or known.inode != inode:  # another interface with that name
                self._files.close_below(directory)
                numbers = {
                    path: f"node_network_{metric}"
                    for file, metric in _NUMBERS.items()
                    if os.path.exists(
                        path := os.path.join(directory, file)
                    )  # the fields depend on the kernel
                }
                files, metrics = FileGroup(numbers), list(numbers.values())
                known = _Interface(name, directory, inode, {"device": name}, files, metrics)
            found[name] = known
        for gone in self._devices.keys() - found.keys():
            self._files.close_below(self._devices[gone].directory)
        self._devices = found

    def _values(self, device: _Interface, now_ns: int) -> list[tuple[str, float]]:
        values = [
            (metric, float(value))
            for metric, value in zip(
                device.metrics, self._files.read_numbers(device.files, now_ns), strict=True
            )
            if value is not None and 0 <= value < BEYOND_COUNTERS
        ]
        speed = device.speed_mbits
        if speed is not None and speed > 0 and speed not in _UNKNOWN_SPEEDS:
            values.append((metric_names.NETWORK_SPEED_BYTES, float(speed * _MEGABIT_BYTES)))
        if device.state is not None and device.state != "unknown":
            values.append(("node_network_up", float(device.state == "up")))
        mtu = dict(values).get("node_network_mtu_bytes")
        if mtu is not None:
            values.append(("paceline_network_jumbo", float(mtu > _STANDARD_MTU_BYTES)))
        return values

    def _ask(self, device: _Interface, now_ns: int) -> None:
        """Read speed, duplex and labels; a label that the interface lacks is empty."""
        was, device.state = device.state, self._text(device, "operstate", now_ns)
        asked_ns = device.asked_ns
        if asked_ns is None or was != device.state or not 0 <= now_ns - asked_ns < _ASK_AGAIN_NS:
            device.asked_ns = now_ns
            device.speed_mbits = self._files.read_number(f"{device.directory}/speed", now_ns)
            about = {file: self._text(device, file, now_ns) or "" for file in _INFORMATION}
            device.about = {**device.labels, **about, "operstate": device.state or ""}

    def _text(self, device: _Interface, file: str, now_ns: int) -> str | None:
        return self._files.read_text(f"{device.directory}/{file}", now_ns)

    def _protocols(
        self, file: str, protocols: dict[str, tuple[str, ...]], now_ns: int
    ) -> Iterator[Sample]:
        """Parse /proc/net/snmp: for each protocol a line of names and a line of values."""
        text = self._files.read_text(f"{self._protocols_root}/{file}", now_ns) or ""
        lines = text.splitlines()
        for names, values in zip(lines[::2], lines[1::2], strict=False):
            protocol, _, rest = values.partition(": ")
            if protocol not in protocols or not names.startswith(f"{protocol}: "):
                continue
            words = rest.split()
            for metric, position in _positions(names, protocols[protocol]):
                value = words[position] if position < len(words) else ""
                if value.isdecimal() and len(value) <= _DIGITS:
                    yield Sample(metric, {}, float(value), now_ns)


@lru_cache(maxsize=16)
def _positions(line: str, wanted: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return metrics with the position of their values, from the line of names."""
    protocol, *names = line.replace(":", "").split()
    return [
        (f"node_netstat_{protocol}_{name}", names.index(name)) for name in wanted if name in names
    ]


def _link_events(device: _Interface, carrier: float | None, now_ns: int) -> list[DeviceEvent]:
    if carrier is None and device.state != "down":
        return []  # not read, such as for lack of file descriptors
    now = bool(carrier)  # EINVAL if administratively down
    was, device.carrier = device.carrier, now
    if was is None or was == now:
        return []
    kind = "link_up" if now else "link_down"
    return [DeviceEvent(time_ns=now_ns, kind=kind, device=device.name, detail="carrier")]
