"""Trees that were taken from a node, whatever part of `/sys` they start at.

What may not be looked at is not there: pathlib would raise an error instead.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

_CLASSES = ("infiniband", "net")  # of /sys/class that are worth a tree of their own


@contextlib.contextmanager
def sysfs_of(directory: Path) -> Iterator[Path]:
    """A root with `class/...` in it.

    `directory` may be a copy of `/sys`, of a node's `/`, of `/sys/class`, or of
    `/sys/class/infiniband`; where it is none of these it is taken as it is.
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
    """`directory` may be a copy of `/proc`, or of a node's `/`."""
    inside = directory / "proc"
    is_root = os.path.isdir(inside) and not os.path.exists(directory / "stat")
    return inside if is_root else directory


def _class_of(directory: Path) -> tuple[str, Path] | None:
    """Where in a root the directory belongs, if it is only a part of one."""
    if any(os.path.isdir(directory / name) for name in ("class", "devices", "bus", "sys")):
        return None
    if any(os.path.isdir(directory / name) for name in _CLASSES):
        return "class", directory
    if glob.glob("*/ports/*/state", root_dir=directory):
        return "class/infiniband", directory
    return None
