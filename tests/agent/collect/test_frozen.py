"""Trees of other nodes that contain any part of /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline_agent.collect import frozen_tree as frozen

PORT = "class/infiniband/mlx5_1/ports/1/state"


@pytest.mark.parametrize("layout", ["sys/class/infiniband", "class/infiniband", "infiniband", "."])
def test_a_tree_is_found_whatever_part_of_sys_it_is(tmp_path: Path, layout: str) -> None:
    state = tmp_path / layout / "mlx5_1/ports/1/state"
    state.parent.mkdir(parents=True)
    state.write_text("4: ACTIVE")
    with frozen.sysfs_of(tmp_path) as root:
        assert (root / PORT).read_text() == "4: ACTIVE"
    assert not root.exists() or root.is_relative_to(tmp_path), "nothing is left behind"
    assert state.exists()


@pytest.mark.parametrize("layout", ["proc", "."])
def test_proc_is_found_below_a_nodes_root(tmp_path: Path, layout: str) -> None:
    (tmp_path / layout).mkdir(exist_ok=True)
    (tmp_path / layout / "stat").touch()
    assert frozen.procfs_of(tmp_path) == tmp_path / layout


def test_what_is_no_tree_is_taken_as_it_is(tmp_path: Path) -> None:
    assert frozen.procfs_of(tmp_path) == tmp_path
    with frozen.sysfs_of(tmp_path) as root:
        assert root == tmp_path
    with frozen.sysfs_of(tmp_path / "absent") as root:
        assert root == tmp_path / "absent"
