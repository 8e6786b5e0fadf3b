"""Queries of Paceline's dashboard, and of stock dashboards that must work unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/paceline.json").read_text())

# grafana.com 12239, in the version that dcgm-exporter ships and the one before.
DCGM_EXPORTER = (
    'max(DCGM_FI_DEV_GPU_TEMP{Hostname=~"$Hostname", gpu=~"$gpu"}) by (Hostname, gpu, uuid)',
    'avg(DCGM_FI_DEV_GPU_TEMP{Hostname=~"$Hostname", gpu=~"$gpu"})',
    'max(DCGM_FI_DEV_POWER_USAGE{Hostname=~"$Hostname", gpu=~"$gpu"}) by (Hostname, gpu, uuid)',
    'sum(max(DCGM_FI_DEV_POWER_USAGE{Hostname=~"$Hostname", gpu=~"$gpu"}) by (gpu))',
    'max(DCGM_FI_DEV_SM_CLOCK{Hostname=~"$Hostname", gpu=~"$gpu"} * 1000000)'
    " by (Hostname, UUID, gpu)",
    'max(DCGM_FI_PROF_GR_ENGINE_ACTIVE{Hostname=~"$Hostname", gpu=~"$gpu"})'
    " by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)",
    'max(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{Hostname=~"$Hostname", gpu=~"$gpu"})'
    " by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)",
    'max(DCGM_FI_DEV_FB_USED{Hostname=~"$Hostname", gpu=~"$gpu"})'
    " by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)",
    'DCGM_FI_DEV_GPU_UTIL{instance=~"$instance", gpu=~"$gpu"}',
    'DCGM_FI_DEV_SM_CLOCK{instance=~"$instance", gpu=~"$gpu"} * 1000000',
)
# grafana.com 1860, "Node Exporter Full": the metrics that both exporters have.
NODE_EXPORTER = (
    'node_uname_info{job="$job", nodename="$nodename"}',
    'irate(node_pressure_cpu_waiting_seconds_total{instance="$node",job="$job"}[$__rate_interval])',
    'irate(node_pressure_memory_waiting_seconds_total{instance="$node"}[$__rate_interval])',
    'irate(node_pressure_io_waiting_seconds_total{instance="$node",job="$job"}[$__rate_interval])',
    '100 * (1 - avg(rate(node_cpu_seconds_total{mode="idle"}[$__rate_interval])))',
    'scalar(node_load1{instance="$node",job="$job"}) * 100 / '
    'count(count(node_cpu_seconds_total{instance="$node",job="$job"}) by (cpu))',
    '(1 - (node_memory_MemAvailable_bytes{instance="$node"}'
    ' / node_memory_MemTotal_bytes{instance="$node"})) * 100',
    'node_time_seconds{instance="$node",job="$job"} - '
    'node_boot_time_seconds{instance="$node",job="$job"}',
    'irate(node_network_receive_bytes_total{instance="$node",job="$job"}[$__rate_interval])*8',
    'irate(node_network_transmit_bytes_total{instance="$node",job="$job"}[$__rate_interval])*8',
    'node_filesystem_size_bytes{instance="$node",device!~"rootfs"} - '
    'node_filesystem_avail_bytes{instance="$node",device!~"rootfs"}',
    'irate(node_disk_reads_completed_total{instance="$node",device=~".+"}[$__rate_interval])',
    'irate(node_disk_read_bytes_total{instance="$node",device=~".+"}[$__rate_interval])',
    'irate(node_disk_io_time_seconds_total{instance="$node",device=~".+"}[$__rate_interval])',
    "node_memory_SwapTotal_bytes - node_memory_SwapFree_bytes",
    'irate(node_vmstat_pgmajfault{instance="$node",job="$job"}[$__rate_interval])',
    'irate(node_context_switches_total{instance="$node",job="$job"}[$__rate_interval])',
    "node_timex_sync_status and node_timex_offset_seconds and node_timex_maxerror_seconds",
    'node_procs_blocked{instance="$node"} + node_procs_running{instance="$node"}',
    "node_filefd_allocated / node_filefd_maximum",
    'irate(node_netstat_Tcp_RetransSegs{instance="$node",job="$job"}[$__rate_interval])',
)
_VARIABLE = re.compile(r'"\$\w+"')
_NAME = re.compile(r"\b(?:paceline|node|DCGM)_[A-Za-z0-9_]+")


def own_queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def names(queries: list[str]) -> set[str]:
    return {name for query in queries for name in _NAME.findall(query)}


def substituted(query: str, scrape_seconds: float) -> str:
    """Return the query as Grafana sends it: all values of each variable, the last half hour."""
    query = query.replace("$__rate_interval", f"{4 * scrape_seconds:g}s")
    query = query.replace("$__range", "1800s")
    return _VARIABLE.sub('".+"', query).replace('=".+"', '=~".+"')
