"""End-to-end: `paceline demo` as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port

DEMO = (sys.executable, "-m", "paceline_cli", "demo", "--port")
LEDGER_PARTS = (
    *("compute", "communication", "bubble", "data_wait", "optimizer", "evaluation"),
    *("checkpoint", "straggler", "imbalance", "peer_wait", "bubble_excess"),
    *("lost", "restart", "startup", "idle"),
)


def run_demo(report: Path, *options: str) -> dict[str, object]:
    """Run the demo to its end; fail with its output unless the exit status is 0."""
    ended = subprocess.run(
        [*DEMO, str(free_port()), "--exit", "--report", str(report), *options],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    written: dict[str, object] = json.loads(report.read_text())
    return written


@pytest.mark.alone
@pytest.mark.timeout(660)
def test_every_fault_is_detected_explained_and_repaired(tmp_path: Path) -> None:
    report = run_demo(tmp_path / "demo.json", "--faults", "throttle:1,crash:5")

    throttle, crash = report["faults"]  # type: ignore[misc]
    assert throttle["verdict"]["rank"] == 2
    assert throttle["verdict"]["node"] == 1
    assert throttle["verdict"]["cause"] == "thermal throttle"
    assert throttle["lost_steps"] == 0
    assert crash["verdict"]["rank"] == 5
    assert all(fault["correct"] and fault["resumed_at"] for fault in (throttle, crash))
    assert report["findings_while_healthy"] == 0
    assert report["restarts"] == 2
    assert report["orphans"] == 0
    losses, ledger = report["losses"], report["ledger"]
    assert losses["last"] < losses["first"]  # type: ignore[index]
    parts = sum(ledger[f"{part}_seconds"] for part in LEDGER_PARTS)  # type: ignore[index]
    assert parts == pytest.approx(ledger["wall_seconds"], rel=1e-6)  # type: ignore[index]


def marked(mark: str) -> list[int]:
    """Return the live processes whose environment contains `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture
def running_demo(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A demo whose ranks are running, and the mark of its processes."""
    mark = f"PACELINE_TEST={uuid.uuid4().hex}"
    environment = {**os.environ, **dict([mark.split("=")])}
    with (tmp_path / "errors").open("w+") as errors:
        process = subprocess.Popen(
            [*DEMO, str(free_port()), "--faults", "none", "--dp", "1", "--pp", "2", "--tp", "1"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # Like a process that a script starts in the background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        )
        assert process.stdout is not None
        try:
            is_training = any("training:" in line for line in process.stdout)
            errors.seek(0)
            assert is_training, f"the demo ended with {process.wait()}: {errors.read()}"
            yield process, mark
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            for pid in marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.campaign)]
)
def test_no_process_is_left_when_the_demo_is_killed_or_interrupted(
    running_demo: tuple[subprocess.Popen[str], str], number: signal.Signals
) -> None:
    process, mark = running_demo
    assert len(marked(mark)) >= 7  # demo, server, worker, agent, guard, two ranks
    process.send_signal(number)
    process.wait()
    deadline = time.monotonic() + 30
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


@pytest.mark.campaign
def test_a_healthy_minute_has_no_finding(tmp_path: Path) -> None:
    report = run_demo(tmp_path / "demo.json", "--faults", "none")
    assert report["findings_while_healthy"] == 0
    assert report["restarts"] == 0


@pytest.mark.campaign
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--faults", "throttle:0,node-loss:3,slow-data:6"),
        ("--faults", "throttle,crash,hang", "--schedule", "gpipe", "--seed", "7"),
        ("--faults", "crash,hang", "--dp", "1", "--pp", "2", "--tp", "1"),
        ("--faults", "throttle:2,crash:1", "--mode", "approve"),
        ("--faults", "throttle:3,hang:4", "--mode", "observe"),
    ],
    ids=" ".join,
)
def test_other_demos_succeed(tmp_path: Path, options: tuple[str, ...]) -> None:
    run_demo(tmp_path / "demo.json", *options)
