"""Copies of a node's `/sys` and `/proc`, complete or only a part of them.

A path that cannot be accessed counts as missing; pathlib would raise an error.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

_CLASSES = ("infiniband", "net")  # parts of /sys/class that may be copied on their own


@contextlib.contextmanager
def sysfs_of(directory: Path) -> Iterator[Path]:
    """Yield a root that contains `class/...`.

    `directory` may be a copy of `/sys`, of a node's `/`, of `/sys/class`, or of
    `/sys/class/infiniband`; any other directory is returned unchanged.
    """
    found = _class_of(directory)
    if found is None:
        yield directory / "sys" if os.path.isdir(directory / "sys") else directory
        return
    name, target = found
    with TemporaryDirectory(prefix="paceline-sysfs-") as made:
        link = Path(made) / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(target.resolve())
        yield Path(made)


def procfs_of(directory: Path) -> Path:
    """Return the procfs in `directory`, a copy of `/proc` or of a node's `/`."""
    inside = directory / "proc"
    is_root = os.path.isdir(inside) and not os.path.exists(directory / "stat")
    return inside if is_root else directory


def _class_of(directory: Path) -> tuple[str, Path] | None:
    """Return the path that the directory has in a full tree, if it is a part of one."""
    if any(os.path.isdir(directory / name) for name in ("class", "devices", "bus", "sys")):
        return None
    if any(os.path.isdir(directory / name) for name in _CLASSES):
        return "class", directory
    if glob.glob("*/ports/*/state", root_dir=directory):
        return "class/infiniband", directory
    return None
