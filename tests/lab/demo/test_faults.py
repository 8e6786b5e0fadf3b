"""Parse, aim, inject and remove faults, and what counts as success."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from paceline_demo import faults
from paceline_demo.cluster import Cluster, EmulatedNode, free_port, remove_stale_rings
from paceline_demo.report import DemoReport, FaultReport


def test_a_list_of_faults_is_parsed() -> None:
    assert faults.parse("throttle:1, crash:7,hang", 8, 4) == [
        faults.FaultRequest("throttle", 1),
        faults.FaultRequest("crash", 7),
        faults.FaultRequest("hang", None),
    ]
    assert faults.parse("none", 8, 4) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("melt", "unknown fault 'melt'; expected throttle"),
        ("throttle:4", "NODE must be a number from 0 to 3"),
        ("crash:8", "RANK must be a number from 0 to 7"),
        ("crash:-1", "RANK must be a number from 0 to 7"),
        ("hang:x", "RANK must be a number from 0 to 7"),
    ],
)
def test_an_invalid_fault_is_refused_with_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(click.BadParameter, match=message):
        faults.parse(text, 8, 4)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(3, 0)
    made.nodes = [EmulatedNode(number, tmp_path / str(number)) for number in range(3)]
    for node in made.nodes:
        node.directory.mkdir()
    yield made
    made.close()
    made.remove_logs()


def ranks(pid: int = 1) -> list[dict[str, Any]]:
    """Ranks 0..3 on nodes 0 and 2."""
    return [
        {"rank": rank, "node": f"node-{rank // 2 * 2}", "local_rank": rank % 2, "pid": pid}
        for rank in range(4)
    ]


def test_a_node_fault_hits_the_first_rank_of_the_node(cluster: Cluster) -> None:
    fault = faults.aim(faults.FaultRequest("node-loss", 2), cluster, ranks(), random.Random(0))
    assert (fault.rank, fault.node.number, fault.local_rank) == (2, 2, 0)


def test_the_seed_selects_a_target_that_is_not_given(cluster: Cluster) -> None:
    def chosen(seed: int) -> int:
        request = faults.FaultRequest("crash", None)
        return faults.aim(request, cluster, ranks(), random.Random(seed)).target

    assert chosen(3) == chosen(3)
    assert {chosen(seed) for seed in range(20)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            faults.FaultRequest("node-loss", 1),
            r"node 1 is not in the job now; its nodes are \[0, 2\]",
        ),
        (faults.FaultRequest("throttle", 0), "throttling needs emulated GPUs"),
    ],
)
def test_a_fault_without_its_target_is_refused_with_the_reason(
    cluster: Cluster, request_: faults.FaultRequest, message: str
) -> None:
    with pytest.raises(faults.NotInjectableError, match=message):
        faults.aim(request_, cluster, ranks(), random.Random(0))


def test_crash_and_hang_signal_the_process_of_the_rank(cluster: Cluster) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        hang = faults.aim(
            faults.FaultRequest("hang", 3), cluster, ranks(process.pid), random.Random(0)
        )
        faults.inject(hang)
        waited, status = os.waitpid(process.pid, os.WUNTRACED)
        assert waited == process.pid
        assert os.WIFSTOPPED(status)
        crash = faults.aim(
            faults.FaultRequest("crash", 3), cluster, ranks(process.pid), random.Random(0)
        )
        faults.inject(crash)
        assert process.wait() == -signal.SIGKILL


def test_slow_data_is_injected_and_removed(cluster: Cluster) -> None:
    fault = faults.aim(faults.FaultRequest("slow-data", 3), cluster, ranks(), random.Random(0))
    faults.inject(fault)
    written = cluster.nodes[2].directory / "faults.json"
    (entry,) = json.loads(written.read_text())
    assert (entry["kind"], entry["local_rank"]) == ("slow_data", 1)
    faults.remove(fault, cluster)
    assert not written.exists()


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({}, True),
        ({"rank": 0}, False),
        ({"node": 0}, False),
        ({"cause": "unknown"}, False),
        ({"kind": "hang"}, False),
    ],
)
def test_a_verdict_must_name_kind_rank_node_and_cause(
    cluster: Cluster, change: dict[str, Any], right: bool
) -> None:
    fault = faults.aim(faults.FaultRequest("crash", 2), cluster, ranks(), random.Random(0))
    verdict = {"kind": "failure", "rank": 2, "node": 2, "cause": "killed by SIGKILL"}
    assert faults.correct(fault, {**verdict, **change}) is right


def repaired() -> FaultReport:
    return FaultReport("crash", 2, correct=True, resumed_at="2026-01-01T00:00:00+00:00")


@pytest.mark.parametrize(
    ("report", "success"),
    [
        (DemoReport(faults=[repaired()]), True),
        (DemoReport(faults=[]), True),
        (DemoReport(faults=[repaired(), FaultReport("hang", 1)]), False),
        (DemoReport(faults=[FaultReport("hang", 1, correct=True)]), False),
        (DemoReport(faults=[FaultReport("hang", 1, correct=True)], mode="observe"), True),
        (DemoReport(faults=[repaired()], findings_while_healthy=1), False),
        (DemoReport(faults=[repaired()], orphans=1), False),
        (DemoReport(faults=[repaired()], failure="the server did not start"), False),
    ],
)
def test_success_needs_correct_verdicts_repairs_and_nothing_left_behind(
    report: DemoReport, success: bool
) -> None:
    assert report.succeeded() is success


def test_a_free_port_is_kept() -> None:
    first = free_port(0)
    assert free_port(first) == first


def test_only_the_rings_of_dead_demos_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    for owner in (dead.pid, os.getpid()):
        (tmp_path / f"paceline-demo-{owner}-x" / "node-0").mkdir(parents=True)
    (tmp_path / "paceline-demo-notes").mkdir()
    remove_stale_rings(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"paceline-demo-{os.getpid()}-x",
        "paceline-demo-notes",
    }


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (FaultReport("hang", None, error="Not steady."), "hang  not injected: Not steady."),
        (
            FaultReport(
                "hang", 1, injected_at="2026-11-20T20:16:13Z", error="Not detected in 60 s."
            ),
            "hang:1  NOT detected: Not detected in 60 s.",
        ),
        (
            FaultReport(
                "crash",
                5,
                injected_at="2026-11-20T20:16:13Z",
                detection_seconds=0.51,
                verdict={"cause": "killed by SIGKILL"},
                correct=True,
                recovery_seconds=8.0,
            ),
            "crash:5  correct verdict after 0.5 s (killed by SIGKILL), training again 8.0 s later",
        ),
    ],
)
def test_the_result_of_a_fault_is_one_line(fault: FaultReport, line: str) -> None:
    assert fault.line() == line
