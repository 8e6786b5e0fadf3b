"""`paceline agent --check` on nodes where something is missing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from paceline_agent.collect.contract import Collected, Context
from paceline_agent.expose.check import communication, devices, node, privileges, report
from paceline_agent.expose.check.report import NO, PARTLY, YES, CheckRow
from paceline_agent.expose.once import CollectorResult
from paceline_agent.settings import AgentSettings
from paceline_wire.batch import GpuInfo, Sample
from paceline_wire.coverage import NOT_RECORDED, RECORDER
from paceline_wire.ring import Identity, RankDescription, create, describe
from paceline_wire.topology import Coordinates, Topology

FIXTURES = Path(__file__).parents[2] / "fixtures"

Write = Callable[[dict[str, str]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def files(contents: dict[str, str]) -> Path:
        root = tmp_path / "root"
        for name, content in contents.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return root

    return files


def test_a_port_says_which_counters_cannot_be_read_and_why(tmp_path: Path) -> None:
    tree = shutil.copytree(FIXTURES / "infiniband", tmp_path / "class" / "infiniband")
    counters = Path(tree) / "mlx5_1/ports/1/counters"
    (counters / "port_xmit_wait").write_text("N/A (no PMA)\n")
    (counters / "symbol_error").unlink()
    (counters / "symbol_error").mkdir()  # reading it fails
    excluded = frozenset({"mlx5_bond_*"})
    context = Context(node_directory=tmp_path, sysfs_root=tmp_path, excluded_rdma=excluded)
    summary, first, second = devices.rdma(context)
    assert (summary.seen, summary.evidence) == (YES, "2 ports")
    assert (first.what.strip(), first.seen) == ("mlx5_1/1", PARTLY)
    assert "4: ACTIVE, 400 Gb/sec" in first.evidence
    assert "1 not: no performance agent (N/A)" in first.evidence
    assert "1 not: Is a directory" in first.evidence
    assert (second.what.strip(), second.seen) == ("mlx5_bond_0/1", NO)
    assert "excluded" in second.evidence


def test_a_gpu_says_which_signals_it_lacks(tmp_path: Path) -> None:
    every = [
        GpuInfo(index=index, uuid=f"GPU-{index}", name="NVIDIA H200", pci_bus_id="0")
        for index in range(3)
    ]
    lacking = {"DCGM_FI_DEV_MEMORY_TEMP"}
    samples = [
        Sample(name, {"gpu": str(gpu.index)}, 1.0, 1)
        for gpu in every
        for name in devices._gpu_signals()
        if gpu.index != 1 or name not in lacking
    ]
    collected = Collected(samples=samples, gpus=every)
    summary, complete, without = devices.gpus(CollectorResult("nvml", collected, None, samples))
    assert summary.evidence.startswith("3 GPUs")
    assert (complete.what.strip(), complete.seen) == ("gpu0, gpu2", YES)
    assert (without.what.strip(), without.seen) == ("gpu1", PARTLY)
    assert "without MEMORY_TEMP" in without.evidence


def test_a_gpu_without_nvlink_is_one_entry() -> None:
    nvlink = {name for name in devices._gpu_signals() if "_nvlink_" in name}
    assert len(nvlink) > 3
    assert devices._summed_up(nvlink | {"DCGM_FI_DEV_MEMORY_TEMP"}) == ("MEMORY_TEMP", "nvlink_*")


@pytest.mark.parametrize(
    ("scope", "capabilities", "seen"),
    [
        ("0", "0", PARTLY),
        ("1", "0", PARTLY),
        ("1", "80000", YES),
        ("2", "0", NO),
        ("2", "80000", YES),
        ("3", "80000", NO),
    ],
)
def test_stacks_need_what_a_debugger_needs(
    write: Write, scope: str, capabilities: str, seen: str
) -> None:
    root = write(
        {
            "sys/kernel/yama/ptrace_scope": f"{scope}\n",
            "self/status": f"Name:\tpython\nCapEff:\t{capabilities.zfill(16)}\n",
        }
    )
    row = privileges.stacks(root)
    assert row.seen == seen
    assert f"ptrace_scope={scope}" in row.evidence
    assert bool(row.remedy) == (seen != YES)


def test_hidden_processes_are_reported(write: Write) -> None:
    root = write({"self/status": "CapEff:\t0000000000000000\n"})
    write({"self/mounts": f"proc {root} proc rw,nosuid,hidepid=invisible 0 0\n"})
    row = privileges.other_processes(root)
    assert (row.seen, row.evidence) == (NO, "hidden by hidepid=invisible")
    write({"self/mounts": f"proc {root} proc rw,nosuid 0 0\n"})
    assert privileges.other_processes(root).seen == PARTLY
    write({"self/status": "CapEff:\t0000000000080000\n"})
    assert privileges.other_processes(root).seen == YES


def test_a_kernel_without_pressure(write: Write) -> None:
    assert privileges.pressure(write({"version": "x"})).seen == NO
    assert privileges.pressure(write({"pressure/cpu": "some"})).seen == PARTLY


def test_of_two_mounts_on_one_point_the_later_counts(write: Write) -> None:
    mounts = "a / ext4 rw 0 0\nb /nowhere tmpfs rw 0 0\nc /nowhere xfs rw 0 0\n"
    root = write({"self/mounts": mounts})
    assert node.file_system(Path("/nowhere/x"), root) == "xfs"
    assert node.file_system(Path("/elsewhere"), root) == "ext4"
    assert node.file_system(Path("/elsewhere"), root / "no") is None


def test_a_directory_that_cannot_be_made_is_needed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = AgentSettings(
        server_url="http://127.0.0.1:1",
        node_directory=tmp_path / "file" / "node",
        spool_directory=tmp_path / "spool",
        spool_bytes=1 << 62,
    )
    rings, spool = node.rings(settings), node.spool(settings)
    assert (rings.seen, rings.needed) == (NO, True)
    assert (spool.seen, spool.needed) == (PARTLY, True)
    assert report.status([rings]) == 1
    assert report.status([spool]) == 0
    assert not (tmp_path / "spool").exists(), "a check makes nothing"


def test_a_server_that_is_there_but_is_none_of_ours(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.close()
        row = node.server(AgentSettings(server_url=f"http://127.0.0.1:{port}"))
    assert (row.seen, row.needed) == (NO, True)
    assert "does not respond" in row.evidence


class _Page(BaseHTTPRequestHandler):
    content = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(("content", "seen"), [(b"ok\n", YES), (b"<html>welcome</html>", NO)])
def test_another_web_server_is_not_ours(content: bytes, seen: str) -> None:
    handler = type("Handler", (_Page,), {"content": content})
    with HTTPServer(("127.0.0.1", 0), handler) as web:
        Thread(target=web.handle_request).start()
        row = node.server(AgentSettings(server_url=f"http://127.0.0.1:{web.server_port}"))
    assert (row.seen, row.needed) == (seen, True)


@pytest.mark.parametrize(
    ("account", "mode", "others", "directory", "seen"),
    [
        (None, 0o755, [], "paceline-n", YES),
        ("paceline", 0o3777, [], "paceline-n", YES),
        ("paceline", 0o755, [], "paceline-n", PARTLY),
        ("ann", 0o3777, [], "paceline-n", PARTLY),
        (None, 0o3777, ["paceline-m"], "paceline-n", NO),
        (None, 0o3777, [], "elsewhere", NO),
    ],
)
def test_whose_ranks_find_the_agent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    account: str | None,
    mode: int,
    others: list[str],
    directory: str,
    seen: str,
) -> None:
    here = tmp_path / directory
    (here / "rings").mkdir(parents=True)
    (here / "rings").chmod(mode)
    running = [here / "rings", *(tmp_path / other / "rings" for other in others)]
    monkeypatch.setattr(node, "MEMORY", tmp_path)
    monkeypatch.setattr(node, "_account", lambda: account)
    monkeypatch.setattr(node, "rings_of_running_agents", lambda: running)
    row = node.found_by_ranks(AgentSettings(server_url="https://a:1", node_directory=here))
    assert (row.seen, bool(row.remedy)) == (seen, seen != YES)


def test_a_node_directory_that_another_user_prepared_is_needed_to_be_removed(
    tmp_path: Path,
) -> None:
    (tmp_path / "node").symlink_to(tmp_path)
    row = node.rings(AgentSettings(server_url="https://a:1", node_directory=tmp_path / "node"))
    assert (row.seen, row.needed) == (NO, True)
    assert "is a link or belongs to another user" in row.evidence


@pytest.mark.parametrize(
    ("slots", "run_as", "seen"),
    [(0, "no-such-user", YES), (1, "no-such-user", NO), (1, "nobody", YES), (1, "root", PARTLY)],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start ranks as another user")
def test_the_user_of_the_ranks_is_checked(slots: int, run_as: str, seen: str) -> None:
    row = node.rank_user(AgentSettings(server_url="https://a:1", slots=slots, run_as=run_as))
    assert (row.seen, row.needed) == (seen, seen == NO)
    assert bool(row.remedy) == (seen != YES)


def test_the_table_wraps_and_loses_nothing() -> None:
    long = " ".join(f"word{number}" for number in range(40))
    table = report.as_table([CheckRow("thing", PARTLY, long, long, needed=True)])
    lines = table.splitlines()
    assert all(len(line) <= 140 for line in lines)
    words = " ".join(lines).split()
    assert words.count("word39") == 2
    assert "thing" in lines[1]


def test_the_command_says_all_of_it_and_fails_without_a_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline_agent", "--check", "--server", "http://127.0.0.1:1"]
    command += ["--node-directory", str(tmp_path / "node"), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=dict(os.environ)
    )
    assert done.returncode == 1, done.stderr
    rows = json.loads(done.stdout)
    assert rows["ok"] is False
    seen = {row["what"].strip(): row["seen"] for row in rows["checks"]}
    assert seen["server"] == "no"
    assert {"GPUs (NVML)", "ring directory", "spool directory", "pressure (PSI)"} <= seen.keys()
    assert {"clock synchronization", "stacks of ranks (py-spy)"} <= seen.keys()
    assert all(
        row["remedy"]
        or row["seen"] == "yes"
        or ":" in row["evidence"]
        or row["what"].startswith("collector")
        for row in rows["checks"]
    )
    assert not (tmp_path / "node").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_missing_rights_are_reported_with_their_remedy(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline_agent", "--check", "--json"]
    command += ["--server", "http://127.0.0.1:1", "--node-directory", str(tmp_path / "node")]
    home = dict(os.environ, HOME="/root")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60, env=home, user=65534
        )
    except PermissionError:
        pytest.skip("this Python is root's alone")
    rows = {row["what"]: row for row in json.loads(done.stdout)["checks"]}
    assert rows["ring directory"]["seen"] == NO
    assert rows["other users' /proc"]["seen"] == PARTLY
    assert "CAP_SYS_PTRACE" in rows["other users' /proc"]["remedy"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give its own rights up")
def test_a_node_directory_behind_a_closed_one_is_a_finding(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    os.chown(closed, 65534, 65534)
    command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", sys.executable]
    command += ["-m", "paceline_agent", "--check", "--json", "--server", "http://127.0.0.1:1"]
    command += ["--node-directory", str(closed / "node")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert not done.stderr
    rows = {row["what"]: row for row in json.loads(done.stdout)["checks"]}
    assert rows["ring directory"]["seen"] == NO


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_what_lies_behind_a_closed_directory_is_no_surprise() -> None:
    """An example is a spool below another user's home, where even `stat` is denied."""
    closed = Path("/proc/1/root/home/spool")
    settings = AgentSettings(server_url="http://127.0.0.1:1", spool_directory=closed)
    assert node.spool(settings).seen == NO


def ring_of(
    directory: Path, rank: int, torch: str, reported: dict[str, str], pid: int | None = None
) -> None:
    rings = directory / "rings"
    rings.mkdir(exist_ok=True)
    identity = Identity(
        job="job",
        generation=0,
        rank=rank,
        local_rank=rank,
        world_size=2,
        topology=Topology(dp=2),
        coordinates=Coordinates(dp_rank=rank),
        pid=pid or os.getpid(),
        host="h",
        clock_offset_ns=0,
        started_ns=0,
        metadata={"torch": torch},
    )
    ring = create(rings / f"job.g0.r{rank}.ring", identity)
    if reported:
        describe(ring, RankDescription(source="torch", metadata=reported))
    ring.close()


@pytest.mark.parametrize(
    ("torch", "reported", "seen", "evidence"),
    [
        ("2.13.0+cu130", {RECORDER: "Python"}, YES, "torch 2.13.0+cu130, recorded by Python"),
        ("2.99.0", {RECORDER: "C++ library"}, PARTLY, "tested with torch 2.6 to 2.14"),
        (
            "2.4.1",
            {RECORDER: "none", NOT_RECORDED: "torch 2.4.1 is older than 2.6"},
            NO,
            "torch 2.4.1 is older than 2.6; waits count as compute",
        ),
        ("2.13.0", {}, NO, "torch.distributed is not in use"),
    ],
)
def test_communication_that_cannot_be_seen_is_named(
    tmp_path: Path, torch: str, reported: dict[str, str], seen: str, evidence: str
) -> None:
    for rank in range(2):
        ring_of(tmp_path, rank, torch, reported)
    settings = AgentSettings(server_url="http://127.0.0.1:1", node_directory=tmp_path)
    (row,) = communication.of_ranks(settings)
    assert row.seen == seen
    assert row.evidence.startswith("job, ranks 0, 1: ")
    assert evidence in row.evidence


def test_ended_ranks_are_no_evidence(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    ring_of(tmp_path, 0, "2.4.1", {NOT_RECORDED: "old"}, pid=child.pid)
    (row,) = communication.of_ranks(
        AgentSettings(server_url="http://127.0.0.1:1", node_directory=tmp_path)
    )
    assert (row.seen, row.evidence) == (YES, "no rank runs here; recorded with torch 2.6 to 2.14")
