"""Reading many files together returns the same as reading each one alone."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from paceline_agent.collect.cached_files import CachedFiles, FileGroup, entries, read_once

CONTENTS = {
    "counter": b"18446744073709551615\n",
    "negative": b"-1\n",
    "none": b"N/A (no PMA)\n",
    "empty": b"",
    "long": b"1" * 33,
}


def test_numbers_of_many_files_are_those_of_each(tmp_path: Path) -> None:
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    paths = [*(str(tmp_path / name) for name in CONTENTS), str(tmp_path / "absent"), str(tmp_path)]
    one, many, together = CachedFiles(), CachedFiles(), FileGroup(paths)
    for _ in range(2):  # the first read opens the file, the second uses the open descriptor
        assert many.read_numbers(together, 1) == [one.read_number(path, 1) for path in paths]
    assert many.read_numbers(together, 1) == [2**64 - 1, -1, None, None, None, None, None]
    (tmp_path / "counter").write_bytes(b"7\n")
    os.unlink(tmp_path / "none")
    (tmp_path / "absent").write_bytes(b"8\n")
    assert many.read_numbers(together, 1) == [7, -1, None, None, None, 8, None]
    many.close_below(tmp_path)  # its descriptors are now other files'
    others = [os.open(tmp_path / "negative", os.O_RDONLY) for _ in range(8)]
    assert many.read_numbers(together, 1) == [7, -1, None, None, None, 8, None]
    for other in others:
        os.close(other)
    assert many.read_numbers(FileGroup([]), 1) == []
    one.close()
    many.close()


def test_a_file_that_the_kernel_gives_page_by_page_is_read_whole() -> None:
    """/proc/vmstat and /proc/diskstats of a large node are such files."""
    files = CachedFiles(bytes_at_most=1 << 20)
    for _ in range(2):
        content = files.read("/proc/self/maps", 1) or b""
        assert len(content) > os.sysconf("SC_PAGE_SIZE")
        assert b"[stack]" in content
        assert content.endswith(b"\n")
    files.close()


def test_nothing_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert read_once(tmp_path / "fifo") == b""
    assert len(read_once("/dev/zero", 100)) == 100
    with pytest.raises(IsADirectoryError):
        read_once(tmp_path)


def test_a_name_that_is_not_utf8_is_left_out(tmp_path: Path) -> None:
    for name in (b"mlx5_0", "é0".encode(), b"e\xff"):
        os.mkdir(os.fsencode(tmp_path) + b"/" + name)
    assert entries(tmp_path) == ["mlx5_0", "é0"]


def test_a_file_that_always_fails_is_in_the_end_read_once_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, minute, pread = CachedFiles(), 0, os.pread
    read_at: list[int] = []

    def record(descriptor: int, length: int, offset: int) -> bytes:
        read_at.append(minute)
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", record)
    for minute in range(10 * 1440):
        assert files.read(tmp_path, minute * 60 * 1_000_000_000) is None  # a directory
    assert read_at[:5] == [0, 1, 3, 7, 15]
    assert [later - earlier for earlier, later in pairwise(read_at)][-3:] == [1440] * 3
