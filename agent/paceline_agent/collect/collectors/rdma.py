"""InfiniBand and RoCE ports: state, rate, data, errors, congestion.

Names are node_exporter's. Counters of other drivers with the same meaning (bnxt_re, irdma) get the
same name; all others are `paceline_rdma_hardware_counter_total`. The kernel counts port data in
4-byte words, converted here to bytes. Counters of the classic performance attributes stop at their
width instead of wrapping (some adapters have wider ones): `paceline_rdma_counter_saturated` reports
a counter at its end. An excluded port is never opened.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from operator import lt, mul
from typing import ClassVar, cast

from paceline_agent.collect import blocks
from paceline_agent.collect.blocks import SeriesBlock
from paceline_agent.collect.cached_files import CachedFiles, FileGroup, entries, inode_of
from paceline_agent.collect.contract import (
    BEYOND_COUNTERS,
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
    Metric,
)
from paceline_agent.collect.pci_topology import cards_first
from paceline_wire import metric_names
from paceline_wire.batch import CollectorEvent, DeviceEvent, Sample, Series

METRICS = (
    Metric(
        metric_names.INFINIBAND_STATE_ID,
        "gauge",
        None,
        "State of the port: 1 down, 2 init, 3 armed, 4 active, 5 active defer.",
    ),
    Metric(
        metric_names.INFINIBAND_PHYSICAL_STATE_ID,
        "gauge",
        None,
        "Physical state: 2 polling, 3 disabled, 4 training, 5 link up, 6 recovering.",
    ),
    Metric(
        metric_names.INFINIBAND_RATE_BYTES_PER_SECOND,
        "gauge",
        "bytes/second",
        "Greatest rate of the port.",
    ),
    Metric("node_infiniband_port_data_received_bytes_total", "counter", "bytes", "Data received."),
    Metric("node_infiniband_port_data_transmitted_bytes_total", "counter", "bytes", "Data sent."),
    Metric(
        "node_infiniband_legacy_data_received_bytes_total",
        "counter",
        "bytes",
        "Data received, from counters_ext.",
    ),
    Metric(
        "node_infiniband_legacy_data_transmitted_bytes_total",
        "counter",
        "bytes",
        "Data sent, from counters_ext.",
    ),
    Metric(
        metric_names.INFINIBAND_PORT_TRANSMIT_WAIT_TOTAL,
        "counter",
        None,
        "Ticks in which data waited and could not be sent.",
    ),
    Metric(
        metric_names.INFINIBAND_SYMBOL_ERROR_TOTAL, "counter", None, "Symbol errors of the link."
    ),
    Metric(
        metric_names.INFINIBAND_LINK_DOWNED_TOTAL,
        "counter",
        None,
        "Times the link failed to recover and went down.",
    ),
    Metric(
        metric_names.INFINIBAND_LINK_ERROR_RECOVERY_TOTAL,
        "counter",
        None,
        "Times the link recovered from errors.",
    ),
    Metric(
        metric_names.INFINIBAND_NP_CNP_PACKETS_SENT_TOTAL,
        "counter",
        None,
        "Congestion notifications sent: this receiver saw congestion marks.",
    ),
    Metric(
        metric_names.INFINIBAND_RP_CNP_PACKETS_HANDLED_TOTAL,
        "counter",
        None,
        "Congestion notifications taken: this sender slowed down.",
    ),
    Metric("node_infiniband_*_total", "counter", None, "Of sysfs, as node_exporter names it."),
    Metric(
        "paceline_rdma_counter_saturated",
        "gauge",
        None,
        "1: the counter stands at its end and counts no more.",
    ),
    Metric(
        "paceline_rdma_hardware_counter_total",
        "counter",
        None,
        "A counter of this HCA's driver that node_exporter has no name for.",
    ),
    Metric("node_infiniband_info", "info", None, "Board and firmware of an HCA."),
    Metric(
        "node_infiniband_lifespan_seconds",
        "gauge",
        "seconds",
        "For how long a hardware counter's value is repeated.",
    ),
    Metric("paceline_rdma_port_info", "info", None, "Link layer and network device of a port."),
)

_ACTIVE = 4  # ib_verbs.h, IB_PORT_ACTIVE
_WORD_BYTES = 4
_LOOK_AGAIN_SECONDS = 30  # between scans for new devices
_ENDS = (15, 255, 65_535, 4_294_967_295)
_OTHERS_AT_MOST = 64  # counters of a port without a known name; hfi1 has hundreds

# file: (metric without its prefix, width in bits at which it stops; InfiniBand 1.x, PortCounters).
# Data and packets have 64 bits, except on adapters without the extended attributes.
_COUNTERS: dict[str, tuple[str, int | None]] = {
    "excessive_buffer_overrun_errors": ("excessive_buffer_overrun_errors_total", 4),
    "link_downed": ("link_downed_total", 8),
    "link_error_recovery": ("link_error_recovery_total", 8),
    "local_link_integrity_errors": ("local_link_integrity_errors_total", 4),
    "multicast_rcv_packets": ("multicast_packets_received_total", None),
    "multicast_xmit_packets": ("multicast_packets_transmitted_total", None),
    "port_rcv_constraint_errors": ("port_constraint_errors_received_total", 8),
    "port_rcv_data": ("port_data_received_bytes_total", 32),
    "port_rcv_discards": ("port_discards_received_total", 16),
    "port_rcv_errors": ("port_errors_received_total", 16),
    "port_rcv_packets": ("port_packets_received_total", 32),
    "port_rcv_remote_physical_errors": ("port_receive_remote_physical_errors_total", 16),
    "port_rcv_switch_relay_errors": ("port_receive_switch_relay_errors_total", 16),
    "port_xmit_constraint_errors": ("port_constraint_errors_transmitted_total", 8),
    "port_xmit_data": ("port_data_transmitted_bytes_total", 32),
    "port_xmit_discards": ("port_discards_transmitted_total", 16),
    "port_xmit_packets": ("port_packets_transmitted_total", 32),
    "port_xmit_wait": ("port_transmit_wait_total", 32),
    "symbol_error": ("symbol_error_total", 16),
    "unicast_rcv_packets": ("unicast_packets_received_total", None),
    "unicast_xmit_packets": ("unicast_packets_transmitted_total", None),
    "VL15_dropped": ("vl15_dropped_total", 16),
}
_EXTENDED_COUNTERS = {  # kernels before 4.5
    "port_multicast_rcv_packets": "legacy_multicast_packets_received_total",
    "port_multicast_xmit_packets": "legacy_multicast_packets_transmitted_total",
    "port_rcv_data_64": "legacy_data_received_bytes_total",
    "port_rcv_packets_64": "legacy_packets_received_total",
    "port_unicast_rcv_packets": "legacy_unicast_packets_received_total",
    "port_unicast_xmit_packets": "legacy_unicast_packets_transmitted_total",
    "port_xmit_data_64": "legacy_data_transmitted_bytes_total",
    "port_xmit_packets_64": "legacy_packets_transmitted_total",
}
_HARDWARE_COUNTERS = {
    "duplicate_request": "duplicate_requests_packets_total",
    "implied_nak_seq_err": "implied_nak_seq_errors_total",
    "local_ack_timeout_err": "local_ack_timeout_errors_total",
    "np_cnp_sent": "np_cnp_packets_sent_total",
    "np_ecn_marked_roce_packets": "np_ecn_marked_roce_packets_received_total",
    "out_of_buffer": "out_of_buffer_drops_total",
    "out_of_sequence": "out_of_sequence_packets_received_total",
    "packet_seq_err": "packet_sequence_errors_total",
    "req_cqe_error": "req_cqes_errors_total",
    "req_cqe_flush_error": "req_cqes_flush_errors_total",
    "req_remote_access_errors": "req_remote_access_errors_total",
    "req_remote_invalid_request": "req_remote_invalid_request_errors_total",
    "resp_cqe_error": "resp_cqes_errors_total",
    "resp_cqe_flush_error": "resp_cqes_flush_errors_total",
    "resp_local_length_error": "resp_local_length_errors_total",
    "resp_remote_access_errors": "resp_remote_access_errors_total",
    "rnr_nak_retry_err": "rnr_nak_retry_packets_total",
    "roce_adp_retrans": "roce_adp_retransmits_total",
    "roce_adp_retrans_to": "roce_adp_retransmits_timeout_total",
    "roce_slow_restart": "roce_slow_restart_used_total",
    "roce_slow_restart_cnps": "roce_slow_restart_cnps_total",
    "roce_slow_restart_trans": "roce_slow_restart_total",
    "rp_cnp_handled": "rp_cnp_packets_handled_total",
    "rp_cnp_ignored": "rp_cnp_ignored_packets_received_total",
    "rx_atomic_requests": "rx_atomic_requests_total",
    "rx_dct_connect": "rx_dct_connect_requests_total",
    "rx_icrc_encapsulated": "rx_icrc_encapsulated_errors_total",
    "rx_read_requests": "rx_read_requests_total",
    "rx_write_requests": "rx_write_requests_total",
    # drivers/infiniband/hw/bnxt_re/hw_counters.c
    "dup_req": "duplicate_requests_packets_total",
    "rnr_naks_rcvd": "rnr_nak_retry_packets_total",
    "rx_cnp_pkts": "rp_cnp_packets_handled_total",
    "rx_ecn_marked_pkts": "np_ecn_marked_roce_packets_received_total",
    "rx_out_of_buffer": "out_of_buffer_drops_total",
    "rx_out_of_sequence": "out_of_sequence_packets_received_total",
    "seq_err_naks_rcvd": "packet_sequence_errors_total",
    "to_retransmits": "local_ack_timeout_errors_total",
    "tx_cnp_pkts": "np_cnp_packets_sent_total",
    # drivers/infiniband/hw/irdma/verbs.c
    "RxECNMrkd": "np_ecn_marked_roce_packets_received_total",
    "cnpHandled": "rp_cnp_packets_handled_total",
    "cnpIgnored": "rp_cnp_ignored_packets_received_total",
    "cnpSent": "np_cnp_packets_sent_total",
    # drivers/infiniband/hw/hns/hns_roce_main.c
    "rx_cnp_pkt": "rp_cnp_packets_handled_total",
    "tx_cnp_pkt": "np_cnp_packets_sent_total",
    # drivers/infiniband/hw/mana/counters.c
    "received_cnps": "rp_cnp_packets_handled_total",
    "requester_implicit_nak": "implied_nak_seq_errors_total",
    "requester_oos_nak": "packet_sequence_errors_total",
    "requester_rnr_nak": "rnr_nak_retry_packets_total",
    "requester_timeout": "local_ack_timeout_errors_total",
    "responder_dup_request": "duplicate_requests_packets_total",
    "responder_oos": "out_of_sequence_packets_received_total",
    # drivers/infiniband/hw/ionic/ionic_hw_stats.c
    "req_rx_impl_nak_seq_err": "implied_nak_seq_errors_total",
    "req_rx_pkt_seq_err": "packet_sequence_errors_total",
    "resp_rx_dup_request": "duplicate_requests_packets_total",
    "rx_rdma_cnp_pkts": "rp_cnp_packets_handled_total",
    "rx_rdma_ecn_pkts": "np_ecn_marked_roce_packets_received_total",
    "rx_rdma_ucast_bytes": "port_data_received_bytes_total",
    "rx_rdma_ucast_pkts": "port_packets_received_total",
    "tx_rdma_ack_timeout": "local_ack_timeout_errors_total",
    "tx_rdma_cnp_pkts": "np_cnp_packets_sent_total",
    "tx_rdma_ucast_bytes": "port_data_transmitted_bytes_total",
    "tx_rdma_ucast_pkts": "port_packets_transmitted_total",
    # drivers/infiniband/hw/erdma/erdma_verbs.c
    "rx_bytes_cnt": "port_data_received_bytes_total",
    "rx_packets_cnt": "port_packets_received_total",
    "tx_bytes_cnt": "port_data_transmitted_bytes_total",
    "tx_packets_cnt": "port_packets_transmitted_total",
    # drivers/infiniband/sw/rxe/rxe_hw_counters.c
    "rcvd_pkts": "port_packets_received_total",
    "sent_pkts": "port_packets_transmitted_total",
    # drivers/infiniband/hw/efa/efa_verbs.c, and another name of bnxt_re: these drivers have no
    # classic counters
    "rx_bytes": "port_data_received_bytes_total",
    "rx_drops": "port_discards_received_total",
    "rx_pkts": "port_packets_received_total",
    "tx_bytes": "port_data_transmitted_bytes_total",
    "tx_pkts": "port_packets_transmitted_total",
}
_STATE = (
    metric_names.INFINIBAND_STATE_ID,
    metric_names.INFINIBAND_PHYSICAL_STATE_ID,
    metric_names.INFINIBAND_RATE_BYTES_PER_SECOND,
)
# these are gauges
_NO_COUNTER = re.compile(r"^(active|watermark)_|^num_qps_congested$|^current_rate$")
_TELLING = re.compile(
    r"err|drop|discard|retr|timeout|nak|cnp|[bf]?ecn|seq|pause|wait|bytes|pkts|packets|recover|event",
    re.IGNORECASE,
)
_OF_THE_LINK = re.compile(
    r"cnp|[bf]?ecn|wait|retr|replay|drop|discard|crc|lnk|link|timeout|pause|seq|nak|words|pkt",
    re.IGNORECASE,
)
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,4})?) Gb/sec")


@dataclass(slots=True)
class _Counter:
    path: str
    metric: str
    labels: dict[str, str]
    file: str
    unit: float = 1
    end: int | None = None  # the value at which it stops; None: never reached


@dataclass(slots=True)
class _Port:
    name: str  # "mlx5_1/1"
    directory: str
    inode: int  # changes if the device was removed and added again
    labels: dict[str, str]
    information: list[Series] = field(default_factory=list)
    counters: list[_Counter] = field(default_factory=list)
    files: FileGroup = field(default_factory=lambda: FileGroup([]))  # the counters' files
    units: list[float] = field(default_factory=list)  # per counter
    ends: list[int] = field(default_factory=list)  # each counter is valid below its end
    active: bool | None = None

    @property
    def series(self) -> list[Series]:
        """Return the series in the order of the values."""
        counters = [(counter.metric, counter.labels) for counter in self.counters]
        return [*self.information, *((name, self.labels) for name in _STATE), *counters]

    def set_counters(self, counters: Iterable[_Counter]) -> None:
        self.counters = list(counters)
        self.files = FileGroup(counter.path for counter in self.counters)
        self.units = [float(counter.unit) for counter in self.counters]
        self.learn_ends()

    def learn_ends(self) -> None:
        ends = (counter.end for counter in self.counters)
        self.ends = [BEYOND_COUNTERS if end is None else end for end in ends]


class RdmaCollector(Collector):
    name: ClassVar[str] = "rdma"
    interval_seconds: ClassVar[float] = 1.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._root = os.path.join(context.sysfs_root, "class", "infiniband")
        self._files = CachedFiles(share=0.6)  # 16 adapters have a thousand files
        self._ports: dict[str, _Port] = {}
        self._series = blocks.Series([])
        self._scan_ns: int | None = None  # time of the last scan of the directory; None: scan now

    def collect(self, now_ns: int) -> Collected:
        saturated: list[Sample] = []
        values: list[float] = []
        events: list[DeviceEvent | CollectorEvent] = []
        if self._is_time_to_look(now_ns):
            self._scan_ns = now_ns
            events += self._discover(now_ns)
        if not self._ports:
            raise CollectorUnavailable(f"no RDMA ports in {self._root}")
        for port in self._ports.values():
            values += [1.0] * len(port.information)
            values += self._state(port, events, now_ns)
            values += self._counters(port, saturated, now_ns)
        return Collected(
            samples=[SeriesBlock(self._series, values, now_ns), *saturated], events=events
        )

    def close(self) -> None:
        self._files.close()

    def _is_time_to_look(self, now_ns: int) -> bool:
        if self._scan_ns is None or not self._ports:
            return True
        if any(inode_of(port.directory) != port.inode for port in self._ports.values()):
            return True
        return not 0 <= now_ns - self._scan_ns < _LOOK_AGAIN_SECONDS * 10**9

    def _discover(self, now_ns: int) -> list[DeviceEvent]:
        found: dict[str, _Port] = {}
        for device in cards_first(self._root, entries(self._root)):
            if self.context.excludes_rdma(device):
                continue
            ports = os.path.join(self._root, device, "ports")
            numbers = filter(str.isdecimal, entries(ports))
            places = {f"{device}/{number}": (ports, number) for number in numbers}
            is_first = True
            for name, (parent, number) in places.items():
                directory = os.path.join(parent, number)
                inode = inode_of(directory)
                if inode is None or self.context.excludes_rdma(name):
                    continue
                known = self._ports.get(name)
                if known is None or known.inode != inode:
                    self._files.close_below(directory)
                    known = self._port(device, number, directory, inode, now_ns, is_first)
                found[name] = known
                is_first = False
        unlisted = [port for name, port in self._ports.items() if name not in found]
        # Without a free file descriptor, a directory cannot be listed.
        found |= {port.name: port for port in unlisted if inode_of(port.directory) == port.inode}
        gone = [port for port in unlisted if port.name not in found]
        for port in gone:
            self._files.close_below(port.directory)
        if list(found.values()) != list(self._ports.values()):
            self._series = blocks.Series([row for port in found.values() for row in port.series])
        self._ports = found
        return [
            DeviceEvent(time_ns=now_ns, kind="link_down", device=port.name, detail="device gone")
            for port in gone
            if port.active
        ]

    def _port(
        self, device: str, number: str, directory: str, inode: int, now_ns: int, is_first: bool
    ) -> _Port:
        """Read a port; counters of the whole device are reported with its first port."""
        labels = {"device": device, "port": number}
        port = _Port(f"{device}/{number}", directory, inode, labels)
        counters: list[_Counter] = []
        port.information.append(self._port_information(device, number, now_ns))
        classic = os.path.join(directory, "counters")
        for file in _present(classic, _COUNTERS):
            metric, width = _COUNTERS[file]
            counters.append(_classic_counter(classic, file, metric, labels, width))
        extended = os.path.join(directory, "counters_ext")
        for file in _present(extended, _EXTENDED_COUNTERS):
            metric = _EXTENDED_COUNTERS[file]
            counters.append(_classic_counter(extended, file, metric, labels, None))
        hardware = os.path.join(directory, "hw_counters")
        reported = {counter.metric for counter in counters}
        counters += _hardware_counters(hardware, labels, reported)
        if is_first:
            port.information.append(self._device_information(device, now_ns))
            # For efa, and for i40iw, which has no other counters.
            own = os.path.join(self._root, device, "hw_counters")
            counters += _hardware_counters(own, {"device": device}, known={})
        port.set_counters(counters)
        return port

    def _device_information(self, device: str, now_ns: int) -> Series:
        named = {"board_id": "board_id", "firmware_version": "fw_ver", "hca_type": "hca_type"}
        about = {label: self._text(now_ns, device, file) for label, file in named.items()}
        return "node_infiniband_info", {"device": device, **about}

    def _port_information(self, device: str, number: str, now_ns: int) -> Series:
        port = (device, "ports", number)
        about = {
            "link_layer": self._text(now_ns, *port, "link_layer"),
            "netdev": self._text(now_ns, *port, "gid_attrs", "ndevs", "0"),
        }
        return "paceline_rdma_port_info", {"device": device, "port": number, **about}

    def _text(self, now_ns: int, *parts: str) -> str:
        return self._files.read_text(os.path.join(self._root, *parts), now_ns) or ""

    def _state(
        self, port: _Port, events: list[DeviceEvent | CollectorEvent], now_ns: int
    ) -> tuple[float, ...]:
        """Return the values of `_STATE`."""
        directory, read = port.directory, self._files.read
        state = leading_number(read(f"{directory}/state", now_ns))
        physical = leading_number(read(f"{directory}/phys_state", now_ns))
        rate = rate_bytes(read(f"{directory}/rate", now_ns))
        if state is None:
            self._scan_ns = None
        else:
            active = state == _ACTIVE
            if port.active is not None and active != port.active:
                kind = "link_up" if active else "link_down"
                detail = f"port state {state:g}"
                events.append(
                    DeviceEvent(time_ns=now_ns, kind=kind, device=port.name, detail=detail)
                )
            port.active = active
        return tuple(math.nan if value is None else value for value in (state, physical, rate))

    def _counters(self, port: _Port, saturated: list[Sample], now_ns: int) -> Iterable[float]:
        counts = self._files.read_numbers(port.files, now_ns)
        if None not in counts:
            there = cast("list[int]", counts)
            if min(there, default=0) >= 0 and all(map(lt, there, port.ends)):
                return map(mul, there, port.units)
        return [
            math.nan
            if count is None or not 0 <= count < BEYOND_COUNTERS
            else self._count(port, counter, count, saturated, now_ns)
            for counter, count in zip(port.counters, counts, strict=True)
        ]

    def _count(
        self, port: _Port, counter: _Counter, count: int, saturated: list[Sample], now_ns: int
    ) -> float:
        if counter.end is not None and count > counter.end:  # this adapter's counter is wider
            counter.end = next((end for end in _ENDS if end >= count), None)
            port.learn_ends()
        if count == counter.end:
            labels = {**port.labels, "counter": counter.file}
            saturated.append(Sample("paceline_rdma_counter_saturated", labels, 1.0, now_ns))
        return float(count * counter.unit)


@lru_cache(maxsize=64)
def leading_number(content: bytes | None) -> float | None:
    """Return 4 for `4: ACTIVE`."""
    number = (content or b"").decode(errors="replace").strip().partition(":")[0]
    return float(number) if number.isdecimal() and len(number) < 4 else None


@lru_cache(maxsize=64)
def rate_bytes(content: bytes | None) -> float | None:
    """Return 5e10 for `400 Gb/sec (4X NDR)`."""
    match = _RATE.match((content or b"").decode(errors="replace").strip())
    return float(match[1]) * 1e9 / 8 if match else None


def _present(directory: str, names: Iterable[str]) -> list[str]:
    there = set(entries(directory))
    return [name for name in names if name in there]


def _classic_counter(
    directory: str, file: str, metric: str, labels: dict[str, str], width: int | None
) -> _Counter:
    unit = _WORD_BYTES if metric.endswith("_bytes_total") else 1
    path = os.path.join(directory, file)
    end = None if width is None else (1 << width) - 1
    return _Counter(path, f"node_infiniband_{metric}", labels, file, unit, end)


def _hardware_counters(
    directory: str,
    labels: dict[str, str],
    reported: Collection[str] = (),
    known: dict[str, str] = _HARDWARE_COUNTERS,
) -> Iterator[_Counter]:
    """Return counters with a known name, and a limited number of the others.

    `reported`: metrics that the port already has from another source.
    """
    others = []
    taken = set(reported)
    for file in entries(directory):
        metric = f"node_infiniband_{known[file]}" if file in known else None
        if metric is not None and metric not in taken:
            taken.add(metric)
            path = os.path.join(directory, file)
            yield _Counter(path, metric, labels, file)
        elif file == "lifespan":  # not a counter: milliseconds for which a value is cached
            path = os.path.join(directory, file)
            yield _Counter(path, "node_infiniband_lifespan_seconds", labels, file, 1e-3)
        elif not _NO_COUNTER.search(file):
            others.append(file)
    if len(others) > _OTHERS_AT_MOST:
        others = sorted(filter(_TELLING.search, others), key=_order)[:_OTHERS_AT_MOST]
    for file in others:
        path = os.path.join(directory, file)
        own = {**labels, "counter": file}
        yield _Counter(path, "paceline_rdma_hardware_counter_total", own, file)


def _order(file: str) -> tuple[bool, bool]:
    """Sort key: counters of the link first, those of each lane or context last."""
    return not _OF_THE_LINK.search(file), file[-1:].isdecimal()
