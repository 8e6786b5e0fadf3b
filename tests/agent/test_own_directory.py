"""A user who creates an agent's directory first cannot redirect the agent's privileges
elsewhere."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline_agent import own_directory
from paceline_agent.errors import UnsafeDirectoryError

Fixture = Callable[..., Any]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A directory open to all, as /dev/shm is."""
    memory = tmp_path / "shm"
    memory.mkdir()
    memory.chmod(0o1777)
    return memory


def refused(agent: Any, reason: str) -> None:
    assert agent.process.wait(60) == 1
    assert reason in agent.log_text()
    assert "Traceback" not in agent.log_text()


def test_a_new_directory_lists_nothing_to_other_users(memory: Path) -> None:
    os.close(own_directory.prepare(memory / "node", shared=True))
    modes = {name: mode(memory / "node" / name) for name in (".", "rings", "logs")}
    assert modes == {".": 0o711, "rings": 0o3777, "logs": 0o700}


def test_rings_stay_private_where_no_other_user_needs_them(memory: Path) -> None:
    os.close(own_directory.prepare(memory / "node", shared=False))
    assert mode(memory / "node" / "rings") == 0o700
    (memory / "node" / "rings").chmod(0o777)  # by an administrator, without the sticky bit
    os.close(own_directory.prepare(memory / "node", shared=False))
    assert mode(memory / "node" / "rings") == 0o3777


@pytest.mark.parametrize("place", [".", "rings", "logs"])
def test_a_link_in_its_place_is_refused_and_not_followed(
    start_agent: Fixture, memory: Path, tmp_path: Path, place: str
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    node = memory / "node"
    if place == ".":
        node.symlink_to(secret)
    else:
        node.mkdir()
        (node / place).symlink_to(secret)
    agent = start_agent("--node-directory", str(node))
    refused(agent, "is a symbolic link or not a directory: remove it")
    assert mode(secret) == 0o700
    assert list(secret.iterdir()) == []


@needs_root
@pytest.mark.parametrize("place", [".", "rings", "logs"])
def test_a_directory_of_another_user_is_refused(
    start_agent: Fixture, memory: Path, place: str
) -> None:
    theirs = memory / "node" / place
    theirs.mkdir(parents=True)
    os.chown(theirs, 65534, 65534)
    agent = start_agent("--node-directory", str(memory / "node"))
    refused(agent, "belongs to user nobody, not to root or the agent's user: remove it")
    assert theirs.stat().st_uid == 65534


@needs_root
def test_a_spool_of_another_user_is_refused(start_agent: Fixture, memory: Path) -> None:
    """Its owner could take away the node's key and the batches."""
    spool = memory / "spool"
    spool.mkdir()
    os.chown(spool, 65534, 65534)
    agent = start_agent("--spool-directory", str(spool))
    refused(agent, "belongs to user nobody, not to root or the agent's user: change its owner")
    assert list(spool.iterdir()) == []


@needs_root
def test_a_lock_that_is_a_link_is_not_followed(
    start_agent: Fixture, memory: Path, tmp_path: Path
) -> None:
    (memory / "node").mkdir()
    (memory / "node" / "agent.lock").symlink_to(tmp_path / "created")
    refused(start_agent("--node-directory", str(memory / "node")), "cannot be used")
    assert not (tmp_path / "created").exists()


def test_a_parent_that_anyone_can_rename_in_is_refused(memory: Path) -> None:
    memory.chmod(0o777)
    with pytest.raises(UnsafeDirectoryError, match="any user can replace"):
        own_directory.prepare(memory / "node", shared=True)
    assert list(memory.iterdir()) == []


@needs_root
def test_an_agent_that_is_not_root_uses_what_root_prepared_unless_others_may_write(
    memory: Path,
) -> None:
    os.close(own_directory.prepare(memory / "node", shared=True))
    (memory / "node" / "rings").chmod(0o777)
    within = os.open(memory / "node", os.O_PATH)
    child = os.fork()
    if not child:
        os.setuid(65534)
        try:
            own_directory.open_own(memory / "node" / "rings", 0o700, within=within)
        except UnsafeDirectoryError:
            os._exit(3)
        os._exit(0)
    os.close(within)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
