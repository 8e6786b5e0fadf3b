"""Facts of this node: the agent's collectors, run once, and additional facts."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

from paceline_agent.collect.collectors.nic import NicCollector
from paceline_agent.collect.collectors.rdma import RdmaCollector
from paceline_agent.collect.contract import CollectorUnavailable, Context
from paceline_cli.preflight import gpu_facts, host_facts, network_facts
from paceline_cli.preflight.facts import NodeFacts
from paceline_wire.batch import Sample

_COLLECTORS = (NicCollector, RdmaCollector)


def collect(
    checkpoints: Sequence[Path] = (),
    sysfs_root: Path = Path("/sys"),
    procfs_root: Path = Path("/proc"),
) -> NodeFacts:
    hostname = socket.gethostname()
    context = Context(
        node_directory=Path("/nonexistent"),
        sysfs_root=sysfs_root,
        procfs_root=procfs_root,
        hostname=hostname,
    )
    samples = _sweep(context)
    gpus = gpu_facts.read_apart(sysfs_root)
    return NodeFacts(
        node=hostname,
        hostname=hostname,
        versions=host_facts.versions(sysfs_root) | gpus.versions,
        gpus=gpus.gpus,
        gpu_absence=gpus.absence,
        gpu_problem=gpus.problem,
        rdma_ports=network_facts.rdma_ports(sysfs_root, samples),
        interfaces=network_facts.interfaces(sysfs_root, samples),
        environment=host_facts.environment(),
        modules=host_facts.modules(sysfs_root),
        rdma_devices_open=network_facts.rdma_devices_open(),
        limits=host_facts.limits(),
        **host_facts.shared_memory(),
        **host_facts.clock(),
        **host_facts.machine(sysfs_root, procfs_root),
        checkpoints=[host_facts.checkpoint(path, procfs_root) for path in checkpoints],
        free_port=network_facts.free_port(),
        time_ns=time.time_ns(),
    )


def _sweep(context: Context) -> list[Sample]:
    samples: list[Sample] = []
    for kind in _COLLECTORS:
        collector = kind(context)
        try:
            collected = collector.collect(time.time_ns())
            samples += collected.everything()
        except CollectorUnavailable:
            pass  # the missing facts show the failure
        finally:
            collector.close()
    return samples
