"""The directory of copies is private, and what ended runs leave is deleted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.checkpoints.errors import CheckpointError
from paceline.checkpoints.memory.directory import (
    ABANDONED_SECONDS,
    CopyDirectory,
    CopyName,
    available_bytes,
)


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir(mode=0o755)
    directory = CopyDirectory(tmp_path / "root", "run")
    assert (tmp_path / "root").stat().st_mode & 0o777 == 0o700
    assert directory.path.stat().st_mode & 0o777 == 0o700


def test_a_link_or_the_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="not a directory of this user"):
        CopyDirectory(tmp_path / "root", "run")
    if os.geteuid() == 0:
        os.chown(tmp_path / "elsewhere", 12345, 12345)
        with pytest.raises(CheckpointError, match="not a directory of this user"):
            CopyDirectory(tmp_path / "elsewhere", "run")


def test_a_directory_that_all_users_share_is_refused_and_stays_open(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(CheckpointError, match="open to all users"):
        CopyDirectory(tmp_path, "run")
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777


def test_runs_that_ended_long_ago_are_deleted(tmp_path: Path) -> None:
    old, recent = (CopyDirectory(tmp_path, digit * 32) for digit in "01")
    other = tmp_path / "data"  # the user has put it there
    other.mkdir()
    for directory in (old, recent):
        directory.file(CopyName(1, 2, 3)).touch()
    ended = old.path.stat().st_mtime - ABANDONED_SECONDS - 60
    for path in (old.path, other):
        os.utime(path, (ended, ended))
    CopyDirectory(tmp_path, "2" * 32)
    assert not old.path.exists()
    assert recent.copies() == [CopyName(1, 2, 3)]
    assert other.exists()


def test_parts_of_processes_that_are_gone_are_deleted(tmp_path: Path) -> None:
    directory = CopyDirectory(tmp_path, "run")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid in (ended.pid, os.getpid()):
        (directory.path / f"g00000001.r000000.{pid}.0-0.part").touch()
    directory.delete_leftovers()
    (left,) = directory.path.iterdir()
    assert str(os.getpid()) in left.name


def test_available_memory_is_below_what_the_file_system_has(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    assert 0 < available_bytes(tmp_path) <= space.f_bavail * space.f_frsize


def test_a_rank_that_ends_first_leaves_the_copies_of_others(tmp_path: Path) -> None:
    directory = CopyDirectory(tmp_path, "run")
    ended, others = (1, 2), 4
    for rank in (*ended, others):
        directory.file(CopyName(3, 40, rank)).touch()
        directory.file(CopyName(2, 30, rank)).touch()
    for pid in (os.getpid(), os.getppid()):
        (directory.path / f"g00000003.r000004.{pid}.0-0.part").touch()
    directory.remove(3, ended)
    assert directory.copies() == [CopyName(3, 40, others)]
    assert [path.name.split(".")[2] for path in directory.path.glob("*.part")] == [
        str(os.getppid())
    ]


def test_ranks_of_a_node_may_remove_it_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = CopyDirectory(tmp_path, "run"), CopyDirectory(tmp_path, "run")
    scan = os.scandir

    def scan_late(path: Path) -> object:
        monkeypatch.setattr(os, "scandir", scan)
        other.remove(1, {1})
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_late)
    own.remove(1, {0})
    assert not own.path.exists()
