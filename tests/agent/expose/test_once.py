"""`paceline agent --once`, as a process, on trees and logs of other nodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline_agent.collect.contract import Collected, Collector, Context
from paceline_agent.expose.once import sweep
from paceline_wire.batch import Sample

FIXTURES = Path(__file__).parents[1] / "fixtures"

Once = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def once(tmp_path: Path) -> Once:
    """Run `paceline agent --once`; nothing of this machine is read unless a test passes it."""
    empty = tmp_path / "empty"
    empty.mkdir()

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "paceline_agent", "--once", "--agent-id", "node-0"]
        command += ["--sysfs", str(empty), "--procfs", str(empty), "--kmsg", str(empty / "no")]
        command += ["--node-directory", str(tmp_path / "node"), *options]
        environment = dict(os.environ, LD_LIBRARY_PATH=str(empty), TMPDIR=str(tmp_path))
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=60
        )

    return run


@pytest.mark.parametrize(
    ("option", "stdout", "message"),
    [
        ("--once", ">/dev/full", "not everything could be printed: No space left on device"),
        ("--check", "| true", "not everything could be printed: Broken pipe"),
        ("--once", ">&-", "standard output is closed: there is nowhere to print to"),
    ],
)
def test_a_stdout_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, option: str, stdout: str, message: str
) -> None:
    command = [sys.executable, "-m", "paceline_agent", option, "--sysfs", str(tmp_path)]
    command += ["--node-directory", str(tmp_path / "node"), "--server", "http://127.0.0.1:9"]
    shell = f'set -o pipefail; "$@" {stdout}; echo "status $?" >&2'
    done = subprocess.run(
        ["bash", "-c", shell, "bash", *command], capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-2:] == [f"Error: {message}", "status 1"]
    assert "Traceback" not in done.stderr


def test_letters_that_the_locale_has_not_are_replaced(tmp_path: Path) -> None:
    name = tmp_path / "class" / "net" / "é\x010" / "statistics"
    name.mkdir(parents=True)
    (name / "rx_bytes").write_text("5\n")
    command = [sys.executable, "-m", "paceline_agent", "--once", "--sysfs", str(tmp_path)]
    done = subprocess.run(
        [*command, "--kmsg", os.devnull],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )
    assert done.returncode == 0, done.stderr
    assert b'node_network_receive_bytes_total{device="\xe9?0"} 5.0' in done.stdout


async def test_a_call_that_runs_is_waited_for_and_one_that_hangs_is_not(tmp_path: Path) -> None:
    release = threading.Event()

    class Busy(Collector):
        name: ClassVar[str] = "busy"
        deadline_seconds: ClassVar[float] = 0.5

        def collect(self, now_ns: int) -> Collected:
            end = time.thread_time() + 1.0
            while time.thread_time() < end:
                pass
            return Collected(samples=[Sample("busy", {}, 1.0, now_ns)])

    class Stuck(Busy):
        name: ClassVar[str] = "stuck"

        def collect(self, now_ns: int) -> Collected:
            release.wait(60)
            return Collected()

    try:
        busy, stuck = await sweep([Busy, Stuck], Context(node_directory=tmp_path))
    finally:
        release.set()
    assert (busy.trouble, busy.series) == (None, 1)
    assert stuck.trouble == "no answer within 0.5 s"


def values(text: str) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_bare_tree_is_enough(once: Once, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "infiniband", tmp_path / "tree" / "infiniband")
    done = once("--sysfs", str(tmp_path / "tree"))
    assert done.returncode == 0, done.stderr
    found = values(done.stdout)
    port = [("device", "mlx5_1"), ("port", "1")]
    assert found[f"node_infiniband_state_id{port}"] == 4
    assert found[f"node_infiniband_link_downed_total{port}"] == 255
    assert found["paceline_collector_success[('collector', 'rdma')]"] == 1
    assert found["paceline_collector_success[('collector', 'nvml')]"] == 0
    assert "nvml: no usable NVIDIA driver" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("numa: ")]) == 1


def test_nothing_is_left_behind(once: Once, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "infiniband", tmp_path / "tree" / "infiniband")
    before = set(tmp_path.iterdir())
    assert once("--sysfs", str(tmp_path / "tree")).returncode == 0
    assert set(tmp_path.iterdir()) == before
    assert list((tmp_path / "empty").iterdir()) == []


def test_where_no_collector_brings_anything_the_status_says_so(once: Once) -> None:
    assert once().returncode == 1


def test_events_of_a_log_are_printed_beside_the_values_and_in_the_report(once: Once) -> None:
    log = str(FIXTURES / "kmsg" / "xid-119.dmesg")
    lines = [line for line in once("--kmsg", log).stderr.splitlines() if line.startswith("kmsg: ")]
    assert "kmsg: xid 0000:9b:00.0: critical: XID 119: timeout of a call" in lines[0]
    events = json.loads(once("--kmsg", log, "--json").stdout)["events"]
    assert [event["kind"] for event in events].count("xid") == len(lines) - 1 == 3


def test_a_log_that_was_cut_is_read_to_its_last_byte(once: Once, tmp_path: Path) -> None:
    log = b"6,1,2,-;NVRM: Xid (PCI:0000:3b:00): 31, \xff\n6,2,3,-;NVRM: Xid (PCI:0000:3c:00): 79, p"
    (tmp_path / "cut").write_bytes(log)
    events = json.loads(once("--kmsg", str(tmp_path / "cut"), "--json").stdout)["events"]
    assert [event["device"] for event in events] == ["0000:3b:00.0", "0000:3c:00.0"]


@pytest.mark.parametrize(
    "lines",
    [5000, pytest.param(200_000, marks=pytest.mark.campaign)],  # takes more than one deadline
)
def test_a_long_log_is_read_to_its_end(once: Once, tmp_path: Path, lines: int) -> None:
    log = (FIXTURES / "kmsg" / "xid-119.dmesg").read_text()
    first = values(once("--kmsg", str(FIXTURES / "kmsg" / "xid-119.dmesg")).stdout)
    filler = "[Mon Jan  1 00:00:00 2024] nothing of interest\n" * lines
    (tmp_path / "long").write_text(filler + log)
    done = once("--kmsg", str(tmp_path / "long"))
    lines = values(done.stdout)
    xids = {name: value for name, value in first.items() if "kernel_events" in name}
    assert xids
    assert "kmsg: no answer" not in done.stderr
    assert {name: value for name, value in lines.items() if "kernel_events" in name} == xids


def test_a_tree_of_fifos_is_not_waited_for(once: Once, tmp_path: Path) -> None:
    for name in ("stat", "loadavg", "self/mountinfo", "sys/kernel/hostname"):
        (tmp_path / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(tmp_path / "proc" / name)
    assert "host: " in once("--procfs", str(tmp_path / "proc")).stderr


def test_json_has_units(once: Once, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "infiniband", tmp_path / "tree" / "infiniband")
    done = once("--sysfs", str(tmp_path / "tree"), "--json")
    report = json.loads(done.stdout)
    received = [
        value
        for value in report["values"]
        if value["name"] == "node_infiniband_port_data_received_bytes_total"
    ]
    assert [(value["unit"], value["type"]) for value in received] == [("bytes", "counter")] * 2
    assert {"collector": "rdma", "success": True, "trouble": None} in report["collectors"]


@pytest.mark.parametrize(
    "options",
    [("--json", "--once", "--check"), ("--once", "--check"), ("--openmetrics", "--check")],
)
def test_options_that_exclude_each_other_are_refused(once: Once, options: tuple[str, ...]) -> None:
    done = once(*options)
    assert done.returncode == 2
    assert "--once" in done.stderr
