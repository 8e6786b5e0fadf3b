"""Progress lines of the demo before the first step of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline_demo.startup import describe_startup, rank_activity


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc in which process 1 has begun to import torch and process 2 has not."""
    for pid, library in ((1, "/site-packages/torch/lib/libtorch_cpu.so"), (2, "/lib/libc.so.6")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "maps").write_text(f"7f00-7f01 r-xp 0 00:00 0 {library}\n")
    return tmp_path


def rank(**changes: Any) -> dict[str, Any]:
    return {"state": "started", "pid": 1, "step": None, "operation": None, **changes}


@pytest.mark.parametrize(
    ("changes", "activity"),
    [
        ({"state": "assigned", "pid": None}, "waiting for a process"),
        ({"pid": 2}, "starting Python"),
        ({"pid": 1}, "importing PyTorch"),
        ({"pid": 3}, "started"),
        ({"state": "attached"}, "joining process groups or reading data"),
        ({"state": "attached", "operation": "all_reduce world#0"}, "in all_reduce"),
        ({"state": "attached", "step": 0}, "training"),
        ({"state": "exited"}, "exited"),
    ],
)
def test_activity_is_read_from_the_rank_and_its_process(
    proc: Path, changes: dict[str, Any], activity: str
) -> None:
    assert rank_activity(rank(**changes), proc) == activity


def test_ranks_are_counted_by_activity_the_largest_group_first(proc: Path) -> None:
    ranks = [rank(pid=2), *(rank(pid=1) for _ in range(3))]
    assert describe_startup(ranks, proc) == "3 ranks importing PyTorch, 1 rank starting Python"


def test_without_ranks_nothing_is_reported() -> None:
    assert describe_startup([]) == ""
