"""The file that describes how a rank ended; any user can write one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline_wire.ending import (
    ERROR_CHARACTERS,
    Ending,
    ending_path,
    read_ending,
    reported_ns,
    write_ending,
)


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    return tmp_path / "job.g0.r0.ring"


def test_an_ending_is_read_as_it_was_written(ring: Path) -> None:
    for ending in (Ending(3, None, "error"), Ending(None, 9, "error")):
        write_ending(ring, ending)
        assert read_ending(ring, os.getuid()) == ending
    assert [path.name for path in ring.parent.iterdir()] == ["job.g0.r0.end"]


def test_the_first_error_is_kept_and_a_long_one_is_cut_at_its_beginning(ring: Path) -> None:
    write_ending(ring, Ending(1, None, "x" * ERROR_CHARACTERS + "end"))
    write_ending(ring, Ending(2, None, "of the launcher"))
    ending = read_ending(ring, os.getuid())
    assert ending is not None
    assert ending.exit_code == 2
    assert ending.error.endswith("xend")
    assert len(ending.error) == ERROR_CHARACTERS


def test_a_process_that_exits_with_0_after_an_error_has_failed(ring: Path) -> None:
    """As torchrun reports one whose training thread has ended by an error."""
    write_ending(ring, Ending(1, error="KeyError: 'label 17'"))
    write_ending(ring, Ending(0))
    assert read_ending(ring, os.getuid()) == Ending(1, error="KeyError: 'label 17'")


def test_the_time_of_the_first_report_is_kept(ring: Path) -> None:
    assert reported_ns(ring) is None
    write_ending(ring, Ending(error="of the rank"))
    os.utime(ending_path(ring), ns=(5, 5))
    write_ending(ring, Ending(1))
    assert reported_ns(ring) == 5


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b'{"exit_code": 256}',
        b'{"exit_code": -1}',
        b'{"signal": 65}',
        b"\xff" * 99,
    ],
)
def test_a_malformed_file_is_no_ending(ring: Path, content: bytes) -> None:
    ending_path(ring).write_bytes(content)
    assert read_ending(ring, os.getuid()) is None


def test_neither_a_link_nor_a_pipe_nor_a_folder_is_read(ring: Path, tmp_path: Path) -> None:
    path = ending_path(ring)
    assert read_ending(ring, os.getuid()) is None
    path.symlink_to(tmp_path / "other")
    (tmp_path / "other").write_text("{}")
    assert read_ending(ring, os.getuid()) is None
    path.unlink()
    os.mkfifo(path)
    assert read_ending(ring, os.getuid()) is None
    path.unlink()
    path.mkdir()
    assert read_ending(ring, os.getuid()) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user are root's to make")
def test_another_user_cannot_report_the_end_of_a_rank(ring: Path) -> None:
    write_ending(ring, Ending(1))
    os.chown(ending_path(ring), 4242, 4242)
    assert read_ending(ring, 4243) is None
    assert read_ending(ring, 4242) == Ending(1)
