"""The complete /metrics of frozen nodes, value by value.

Values that depend on the test machine (durations, its clock, its disks) are written as `*`: they
must exist, with any value. After an intended change run `make goldens` and read the diff.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from paceline_agent.expose import catalog
from paceline_demo.fake_nvml import CompilerMissing, FakeGpus, build, environment
from paceline_wire import ring
from paceline_wire.ring import Identity
from paceline_wire.topology import Coordinates, Topology

GPUS = 8
RANKS = {0: (8, 4242), 7: (15, 4249)}  # by GPU: (rank, pid)
FIXTURES = Path(__file__).parents[1] / "fixtures"
NODES = FIXTURES / "nodes"
WRITE = "PACELINE_WRITE_GOLDEN"

pytestmark = pytest.mark.skipif(
    (os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")) != (100, 4096),
    reason="the values are for ticks of 10 ms and pages of 4 KiB",
)
OF_THIS_MACHINE = re.compile(
    r"^(paceline_collector_duration_seconds|node_timex_\w+"
    r"|DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION|paceline_gpu_pcie_\w+_bytes_total)(\{.*\})? .*$"
)


def unpack(tree: Path, root: Path) -> None:
    """Create a tree from lines `= FILE` (then its content), `> LINK TARGET`, `@ DIRECTORY
    ARCHIVE`."""
    content: list[str] = []
    path: Path | None = None
    for line in [*tree.read_text().splitlines(), "#"]:
        if line[:2] not in ("= ", "> ", "@ ") and not line.startswith("#"):
            content.append(line)
            continue
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            ends = "\0" if path.name == "environ" else "\n"
            path.write_text(ends.join(content) + ends)
        path, content = None, []
        match line.split():
            case ["=", name]:
                path = root / name
            case [">", name, target]:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).symlink_to(target)
            case ["@", name, archive]:
                (root / name).mkdir(parents=True, exist_ok=True)
                subprocess.run(["tar", "-xf", FIXTURES / archive, "-C", root / name], check=True)


def once(root: Path, gpus: dict[str, str], *options: str) -> str:
    command = [sys.executable, "-m", "paceline_agent", "--once", "--agent-id", "node-0"]
    command += ["--sysfs", str(root / "sys"), "--procfs", str(root / "proc")]
    command += ["--kmsg", str(FIXTURES / "kmsg" / "xid-119.dmesg")]
    command += ["--node-directory", str(root), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=os.environ | gpus
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def normalized(text: str, root: Path) -> str:
    uuids: dict[str, str] = {}
    text = re.sub(
        r"GPU-[0-9a-f]{8}-[0-9a-f-]{27}",
        lambda match: uuids.setdefault(match[0], f"GPU-{len(uuids)}"),
        text.replace(str(root), "/frozen"),
    )
    return "".join(
        OF_THIS_MACHINE.sub(lambda match: f"{match[1]}{match[2] or ''} *", line) + "\n"
        for line in text.splitlines()
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build(tmp_path_factory.mktemp("fake-nvml"))
    except CompilerMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(params=["h200", "roce", "edr", "grace"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    unpack(NODES / f"{request.param}.tree", tmp_path)
    return str(request.param)


@pytest.fixture
def gpus(node: str, library: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Emulated GPUs of the h200 node; the other nodes have no driver."""
    if node != "h200":
        yield {"LD_LIBRARY_PATH": str(tmp_path)}
        return
    fake = FakeGpus.create(tmp_path / "gpus", GPUS, "h200")
    fake.set(3, nvlink_links_active=17, throttle_reasons=["sw_power_cap"], sm_clock_mhz=1650)
    for gpu, (rank, pid) in RANKS.items():
        fake.set_processes(gpu, {pid: 30 << 30})
        write_ring(tmp_path, rank, gpu, pid)
    yield environment(library, fake.path)
    fake.close()


def write_ring(root: Path, rank: int, gpu: int, pid: int) -> None:
    """Write the ring of a rank that reports its GPU; its process is in the frozen tree."""
    uuid = uuid5(NAMESPACE_URL, f"{(root / 'gpus').resolve()}#{gpu}")
    identity = Identity(
        job="pretrain",
        generation=2,
        rank=rank,
        local_rank=gpu,
        world_size=16,
        topology=Topology(dp=16),
        coordinates=Coordinates(dp_rank=rank),
        pid=pid,
        host="node-0",
        clock_offset_ns=0,
        started_ns=0,
        gpu_uuid=f"GPU-{uuid}",
    )
    (root / "rings").mkdir(exist_ok=True)
    ring.create(root / "rings" / f"pretrain.g2.r{rank}.ring", identity, capacity=64).close()


def test_metrics_of_a_frozen_node_are_unchanged(
    node: str, gpus: dict[str, str], tmp_path: Path
) -> None:
    text = once(tmp_path, gpus, "--openmetrics")
    check_families(text)
    golden = NODES / f"{node}.metrics"
    found = normalized(text, tmp_path)
    if os.environ.get(WRITE):
        golden.write_text(found)
    assert found.splitlines() == golden.read_text().splitlines()


def check_families(text: str) -> None:
    """Check that the text is valid OpenMetrics and that every metric is in the catalog."""
    for family in openmetrics(text):
        assert family.documentation not in ("", catalog.UNLISTED), family.name
        assert not family.unit or family.name.endswith(family.unit)
        seen = [tuple(sorted(sample.labels.items())) for sample in family.samples]
        assert len(seen) == len(set(seen)), f"{family.name}: one series was written twice"
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total")
            assert family.type != "counter" or sample.value >= 0
