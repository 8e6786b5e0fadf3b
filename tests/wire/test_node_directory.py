"""The agents that a process finds on its node."""

from __future__ import annotations

import fcntl
import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_wire import node_directory
from paceline_wire.node_directory import rings_of_running_agents


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=node_directory.MEMORY) as scratch:
        monkeypatch.setattr(node_directory, "MEMORY", Path(scratch))
        yield Path(scratch)


def lay_out(memory: Path, agent: str) -> Path:
    (memory / f"paceline-{agent}" / "rings").mkdir(parents=True)
    lock = memory / f"paceline-{agent}" / "agent.lock"
    lock.touch()
    return lock


def test_an_agent_is_found_while_it_runs(memory: Path) -> None:
    lay_out(memory, "gone")
    with lay_out(memory, "here").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert rings_of_running_agents() == [memory / "paceline-here" / "rings"]
    assert rings_of_running_agents() == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives directories away")
@pytest.mark.parametrize("place", [".", "rings"])
def test_only_the_service_agent_of_another_user_is_found(
    memory: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with lay_out(memory, "theirs").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.chown(memory / "paceline-theirs" / place, 65534, 65534)
        assert rings_of_running_agents() == []
        monkeypatch.setattr(node_directory, "ACCOUNT", pwd.getpwuid(65534).pw_name)
        assert rings_of_running_agents() == [memory / "paceline-theirs" / "rings"]
        # the owner has no account
        os.chown(memory / "paceline-theirs" / place, 4_000_000, 4_000_000)
        assert rings_of_running_agents() == []


def test_without_proc_locks_no_agent_is_found(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_directory, "_LOCKS", memory / "locks")
    with lay_out(memory, "here").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert rings_of_running_agents() == []
        (memory / "locks").write_text("1: POSIX  ADVISORY  READ 5 00:01:2 0 EOF\nnonsense\n\n")
        assert rings_of_running_agents() == []
