"""The output of ranks: its end is reported, and its size is limited."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline_agent.supervise import logs
from paceline_agent.supervise.logs import LogFile, prune_logs


def test_the_tail_is_the_last_fifty_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    file.write_text("".join(f"line {n}\n" for n in range(5000)))
    tail = LogFile(file).tail().splitlines()
    assert tail == [f"line {n}" for n in range(4950, 5000)]
    assert LogFile(tmp_path / "none.log").tail() == ""


def test_an_endless_line_does_not_create_an_endless_tail(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    file.write_bytes(b"\xff" * 1_000_000)
    assert len(LogFile(file).tail()) <= logs.TAIL_BYTES


def test_a_long_log_is_truncated_while_its_writer_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LIMIT_BYTES", 10_000)
    monkeypatch.setattr(logs, "KEPT_BYTES", 1_000)
    path = tmp_path / "a.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * 20_000 + b"last words\n")
        LogFile(path).truncate()
        writer.write(b"and more\n")
    assert path.stat().st_size < 1_200
    assert path.read_bytes().endswith(b"last words\nand more\n")


def test_old_logs_are_pruned(tmp_path: Path) -> None:
    for number in range(logs.FILES_KEPT + 5):
        file = tmp_path / f"{number}.log"
        file.write_text("")
        os.utime(file, (number, number))
    prune_logs(tmp_path)
    left = {int(path.stem) for path in tmp_path.iterdir()}
    assert left == set(range(5, logs.FILES_KEPT + 5))


def test_cpp_frames_and_repeated_device_assertions_do_not_fill_the_tail(tmp_path: Path) -> None:
    """As recorded on an H200: the traceback came before 190 lines of them."""
    kernel = "/pytorch/aten/src/ATen/native/cuda/IndexKernelUtils.cu:16: vectorized_gather_kernel"
    asserted = [
        f"{kernel}: block: [772,0,0], thread: [{thread},0,0] Assertion `{what}` failed."
        for what in ("ind >=0", "ind < ind_dim_size")
        for thread in range(500)
    ]
    frame = "frame #{}: <unknown function> + 0x129ecc (0x7fd5c4929ecc in /lib/libc.so.6)"
    frames = [frame.format(number) for number in range(100)]
    words = ["Traceback (most recent call last):", "RuntimeError: CUDA error", "terminate called"]
    file = tmp_path / "a.log"
    file.write_text("\n".join([*asserted, *words, *frames]))
    assert LogFile(file).tail().splitlines() == [asserted[0], asserted[500], *words]
