"""Code, documentation and collectors use the same causes and metrics."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from paceline_agent.collect.collectors import discover
from paceline_agent.collect.collectors.nvml import NvmlCollector
from paceline_agent.collect.collectors.other_processes import OtherProcessesCollector
from paceline_agent.collect.collectors.storage import StorageCollector
from paceline_agent.collect.collectors.tcp import TcpCollector
from paceline_agent.collect.contract import CollectorUnavailable, Context, LocalRank
from paceline_agent.collect.pool import ProcessLane
from paceline_demo.fake_nvml import CompilerMissing, FakeGpus, build, environment
from paceline_server.detect.causes import catalog
from paceline_server.detect.causes.catalog import CAUSES
from paceline_server.detect.causes.checks.pcie import LINKS
from paceline_server.detect.causes.registry import SYMPTOMS
from paceline_server.detect.telemetry import STORED_METRICS
from paceline_wire import metric_names
from paceline_wire.batch import GpuInfo, Sample

ROOT = Path(__file__).parents[4]
DETECT = ROOT / "server" / "paceline_server" / "detect"
DECIDE = ROOT / "server" / "paceline_server" / "decide"
OTHER_CAUSES = {catalog.OUT_OF_MEMORY, catalog.PROCESS_GONE, catalog.PROCESS_STOPPED}
METRIC = re.compile(r"^(DCGM_FI_|DCGM_EXP_|node_|paceline_(gpu|rank|device|kernel|other)_)\w+$")


def documented() -> dict[str, tuple[set[str], str]]:
    """Return (metrics, advice) by cause from the table in docs/concepts.md."""
    section = (ROOT / "docs" / "concepts.md").read_text().partition("## Causes")[2]
    rows = re.findall(r"^\| `([^`|]+)` \| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return {name: (set(re.findall(r"`(\w+)`", read)), advice) for name, read, advice in rows}


def test_every_cause_is_documented_with_its_metrics_and_advice():
    page = documented()
    assert page.keys() == CAUSES.keys()
    assert {name: advice for name, (_, advice) in page.items()} == {
        name: info.advice for name, info in CAUSES.items()
    }
    for symptom in SYMPTOMS:
        assert symptom.metric in page[symptom.cause][0], symptom


def test_every_symptom_has_a_cause_and_a_stored_metric():
    for symptom in SYMPTOMS:
        assert symptom.cause in CAUSES
        assert symptom.metric in STORED_METRICS, symptom.metric
        assert {name for name, _ in symptom.labels} <= set(STORED_METRICS[symptom.metric])


def test_cause_names_are_spelled_out_in_the_catalog_only():
    """Other modules use the constants, so that a name exists once."""
    catalog_path = DETECT / "causes" / "catalog.py"
    for path in {*DETECT.rglob("*.py"), *DECIDE.rglob("*.py")} - {catalog_path}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant):
                assert node.value not in CAUSES.keys() | OTHER_CAUSES, f"{path}:{node.lineno}"


def test_priors_are_shares():
    kinds = {kind for info in CAUSES.values() for kind in info.priors}
    for kind in kinds:
        assert 0 < sum(info.priors.get(kind, 0.0) for info in CAUSES.values()) <= 1.0 + 1e-9, kind


def metrics_read() -> set[str]:
    """Return the metrics that modules of detect/ name, as constants or literals."""
    found = set()
    for path in set(DETECT.rglob("*.py")) - {DETECT / "telemetry.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "metric_names":
                text = getattr(metric_names, node.attr)
            if isinstance(text, str) and METRIC.match(text) and not text.endswith("_"):
                found.add(text)
    return found


def test_exactly_the_metrics_that_detectors_read_are_stored():
    """A stored metric that is never read would cost memory on every node."""
    read = metrics_read() | {symptom.metric for symptom in SYMPTOMS}
    read |= {f"{link.metric}_max" for link in LINKS}
    assert read == STORED_METRICS.keys()


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """A machine with two NUMA nodes, a GPU, an HCA, an Ethernet port and a disk."""
    files = {
        "sys/devices/system/node/node0/cpulist": "0-3\n",
        "sys/devices/system/node/node1/cpulist": "4-7\n",
        "sys/bus/pci/devices/0000:1a:00.0/numa_node": "1\n",
        "proc/stat": "ctxt 42\nprocs_running 3\nprocs_blocked 1\n",
        "proc/loadavg": "1.50 0.75 0.25 2/100 4242\n",
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 600 kB\n",
        "proc/vmstat": "oom_kill 2\npgmajfault 1\npswpin 3\npswpout 4\n",
        "proc/diskstats": "8 0 sda 1 2 300 4 5 6 700 8 0 9000 10 0 0 0 0\n",
        "proc/net/snmp": "Tcp: OutSegs RetransSegs\nTcp: 10 1\n",
        "proc/77/stat": "77 (py) S 1 1 1 0 -1 0 10 0 3 0 250 50 0 0 20 0 1 0 100 9999 25 0\n",
        "proc/77/schedstat": "2 7 1\n",
        "proc/77/io": "read_bytes: 1\nwrite_bytes: 1\n",
        "proc/77/status": "voluntary_ctxt_switches:\t1\nnonvoluntary_ctxt_switches:\t2\n"
        "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0\n",
    }
    files["kmsg"] = "".join(
        f"{4 * sequence + 3},{sequence},{sequence},-;{message}\n"
        for sequence, message in enumerate(
            (
                "NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.",
                "NVRM: Xid (PCI:0000:1a:00): 31, pid=77, name=python, Ch 00000008",
                "Out of memory: Killed process 77 (py) total-vm:1kB, anon-rss:1kB",
            )
        )
    )
    for resource in ("cpu", "memory", "io"):
        files[f"proc/pressure/{resource}"] = "some avg10=50.00 total=5\nfull total=5\n"
    for device in ("net/eth0", "infiniband/mlx5_bond_0"):
        for name, value in (("width", "16"), ("speed", "32.0 GT/s PCIe")):
            files[f"sys/class/{device}/device/current_link_{name}"] = value
            files[f"sys/class/{device}/device/max_link_{name}"] = value
    for counter in ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped"):
        files[f"sys/class/net/eth0/statistics/{counter}"] = "1\n"
    for name, value in (("speed", "100000"), ("carrier", "1"), ("carrier_changes", "2")):
        files[f"sys/class/net/eth0/{name}"] = f"{value}\n"
    shutil.copytree(ROOT / "tests/agent/fixtures/infiniband", tmp_path / "sys/class/infiniband")
    # The recorded adapter runs InfiniBand, which has no congestion notifications.
    for counter in ("np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets"):
        files[f"sys/class/infiniband/mlx5_bond_0/ports/1/hw_counters/{counter}"] = "5\n"
    for link, address in (
        ("bus/pci/devices/0000:1a:00.0", "0000:1a:00.0"),
        ("class/infiniband/mlx5_bond_0/device", "0000:1b:00.0"),
    ):
        function = tmp_path / "sys/devices/pci0000:15/0000:15:01.0" / address
        function.mkdir(parents=True)
        (tmp_path / "sys" / link).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / link).symlink_to(function)
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    ranks = [LocalRank(job="j", generation=0, rank=0, local_rank=0, pid=77, gpu_index=0)]
    found = Context(
        node_directory=tmp_path,
        sysfs_root=tmp_path / "sys",
        procfs_root=tmp_path / "proc",
        kmsg_path=tmp_path / "kmsg",
        local_ranks=lambda: ranks,
    )
    bus = "00000000:1A:00.0"
    found.inventory.gpus = (GpuInfo(index=0, uuid="GPU-a", name="H200", pci_bus_id=bus),)
    return found


async def nvml_samples(context: Context, tmp_path: Path) -> list[Sample]:
    """Return samples that the real pynvml reads from an emulated GPU that has had an XID."""
    try:
        library = build(tmp_path / "library")
    except CompilerMissing as missing:
        pytest.skip(str(missing))
    gpus = FakeGpus.create(tmp_path / "gpus", 1)
    gpus.set_processes(0, {77: 5 << 30, 78: 1 << 30})  # the rank and another process
    gpus.set_utilization(0, {77: 60, 78: 30})
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment(library, gpus.path).items():
            patched.setenv(name, value)
        lane = ProcessLane(NvmlCollector, context)
        samples = (await lane.collect(1)).everything()
        gpus.set(0, xid=79)
        for sweep in (2, 3):
            samples += (await lane.collect(sweep * 1_000_000_000)).everything()
        await lane.close()
    return samples


def samples_of_another_process(context: Context) -> list[Sample]:
    """Return the samples of a process that uses one CPU and belongs to no rank."""
    collector = OtherProcessesCollector(context)
    stat = context.procfs_root / "90/stat"
    stat.parent.mkdir()
    samples: list[Sample] = []
    for seconds in (1, 2):
        ticks = seconds * os.sysconf("SC_CLK_TCK")
        stat.write_text(f"90 (stress) R 1 0 0 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 5\n")
        samples += collector.collect(seconds * 1_000_000_000).everything()
    return samples


async def test_every_metric_that_is_read_is_emitted_by_a_collector(context, tmp_path):
    samples = await nvml_samples(context, tmp_path)
    for collector in discover():
        if not collector.isolated:
            with contextlib.suppress(CollectorUnavailable):
                samples += collector(context).collect(1).everything()
    samples += samples_of_another_process(context)
    here = replace(context, procfs_root=Path("/proc"))  # read no file systems of another tree
    samples += StorageCollector(here).collect(1).everything()
    here = replace(here, local_ranks=lambda: [replace(context.local_ranks()[0], pid=os.getpid())])
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()):
        samples += TcpCollector(here).collect(1).everything()
    emitted = {sample.name: sample.labels.keys() for sample in samples}
    assert STORED_METRICS.keys() - emitted.keys() == set()
    for name, labels in STORED_METRICS.items():
        assert set(labels) <= emitted[name], name
