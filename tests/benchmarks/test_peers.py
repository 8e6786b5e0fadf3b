"""Peers of the restart benchmark: nothing of them stays, and one that does not work is reported."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness import restarts
from benchmarks.peers.environment import PeerError, PeerProcesses, peer_environment

DAEMON = """
import os, pathlib, time
if not os.fork():
    os.setsid()
    pathlib.Path("daemon").write_text(str(os.getpid()))
time.sleep(600)
"""


def test_daemons_of_a_peer_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    processes = PeerProcesses(tmp_path)
    started = processes.start(sys.executable, "-c", DAEMON)
    pid = tmp_path / "daemon"
    while not pid.exists() or not pid.read_text():
        assert started.poll() is None
    processes.close()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is gone
        while " Z " not in Path("/proc", pid.read_text(), "stat").read_text():
            time.sleep(0.01)


def test_a_peer_that_cannot_be_installed_is_an_error_of_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(PeerError, match="cannot be installed: ") as raised,
        peer_environment(str(tmp_path)),  # no Python project
    ):
        pass
    assert "\n" not in str(raised.value)


def test_ranks_that_do_not_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def nothing(directory: Path) -> Iterator[None]:
        assert (directory / "train.py").read_text().endswith("train()")
        yield

    monkeypatch.setattr(restarts, "START_SECONDS", 0.1)
    with pytest.raises(restarts.NotTrainingError, match="did not start within"):
        restarts.recovery_seconds(nothing, "train()")
