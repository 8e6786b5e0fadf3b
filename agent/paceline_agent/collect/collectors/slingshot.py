"""HPE Slingshot NICs (`cxi`): traffic, time-outs, retries, pauses and errors of their links.

Their traffic bypasses the kernel's network devices. The driver has one file for each of about two
thousand counters, `class/cxi/DEVICE/device/telemetry/NAME`, which contains `VALUE@SECONDS`. Names
are those of the Cassini performance counters. Only counters of an allow-list are collected.
"""

from __future__ import annotations

import os
import re
from typing import ClassVar

from paceline_agent.collect.cached_files import CachedFiles, entries
from paceline_agent.collect.contract import (
    BEYOND_COUNTERS,
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
    Metric,
)
from paceline_wire.batch import Sample

METRICS = (
    Metric(
        "paceline_slingshot_received_bytes_total",
        "counter",
        "bytes",
        "Received by a Slingshot NIC.",
    ),
    Metric(
        "paceline_slingshot_transmitted_bytes_total",
        "counter",
        "bytes",
        "Sent by a Slingshot NIC.",
    ),
    Metric(
        "paceline_slingshot_counter_total",
        "counter",
        None,
        "A counter of the NIC's telemetry, by its name: time-outs, retries, pauses, "
        "errors of the link.",
    ),
)

_DEVICES_AT_MOST = 16
_LOOK_AGAIN_NS = 30 * 10**9
_BYTES = {
    "hni_sts_rx_ok_octets": "paceline_slingshot_received_bytes_total",
    "hni_sts_tx_ok_octets": "paceline_slingshot_transmitted_bytes_total",
}
_WANTED = re.compile(
    r"pct_(sct|spt|tct)_timeouts|pct_no_(tct|trs|mst)_nacks|pct_retry_srb_requests"
    r"|pct_resource_busy|pct_trs_(replay_pend|rsp_nack)_drops|pct_rsp_err_rcvd"
    r"|hni_pcs_(un)?corrected_cw|hni_llr_[rt]x_replay_event|hni_llr_tx_discard"
    r"|hni_[rt]x_paused_[0-7]|hni_discard_cntr_[0-7]|hni_pfc_fifo_oflw_cntr_[0-7]"
)
_VALUE = re.compile(rb"([0-9]{1,20})(?:@[0-9.]+)?\s*")


class SlingshotCollector(Collector):
    name: ClassVar[str] = "slingshot"
    interval_seconds: ClassVar[float] = 5.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._files = CachedFiles()
        self._root = os.path.join(context.sysfs_root, "class", "cxi")
        self._counters: list[tuple[str, str, dict[str, str]]] = []  # path, metric, labels
        self._scanned_ns: int | None = None

    def collect(self, now_ns: int) -> Collected:
        if self._scanned_ns is None or not 0 <= now_ns - self._scanned_ns < _LOOK_AGAIN_NS:
            self._scanned_ns = now_ns
            self._discover()
        if not self._counters:
            raise CollectorUnavailable(f"no Slingshot NIC in {self._root}")
        samples = []
        for path, metric, labels in self._counters:
            value = _VALUE.fullmatch(self._files.read(path, now_ns) or b"")
            if value is not None and int(value[1]) < BEYOND_COUNTERS:
                samples.append(Sample(metric, labels, float(int(value[1])), now_ns))
        return Collected(samples=samples)

    def close(self) -> None:
        self._files.close()

    def _discover(self) -> None:
        self._counters = []
        for device in entries(self._root)[:_DEVICES_AT_MOST]:
            directory = os.path.join(self._root, device, "device", "telemetry")
            for file in entries(directory):
                labels = {"device": device}
                metric = _BYTES.get(file)
                if metric is None:
                    if not _WANTED.fullmatch(file):
                        continue
                    metric = "paceline_slingshot_counter_total"
                    labels["counter"] = file
                self._counters.append((os.path.join(directory, file), metric, labels))
