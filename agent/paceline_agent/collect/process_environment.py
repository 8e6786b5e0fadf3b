"""Environment variables of a process."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from paceline_agent.collect.cached_files import read_once

_BYTES_AT_MOST = 1 << 20


def read_environment(procfs_root: Path, pid: int, names: Collection[str]) -> dict[str, str] | None:
    """Return those of `names` that are set; None if the process is gone or not accessible.

    Variables that the process set after its start are not included.
    """
    try:
        content = read_once(procfs_root / str(pid) / "environ", _BYTES_AT_MOST)
    except OSError:
        return None
    pairs = (entry.partition("=") for entry in os.fsdecode(content).split("\0"))
    return {name: value for name, _, value in pairs if name in names}
