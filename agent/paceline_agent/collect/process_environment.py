"""What a process was told in its environment."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from paceline_agent.collect.kept_files import read_once

_BYTES_AT_MOST = 1 << 20


def read_environment(procfs_root: Path, pid: int, names: Collection[str]) -> dict[str, str] | None:
    """Those variables that it has; None if it is gone or not ours to read.

    What it set itself after its start is not there.
    """
    try:
        content = read_once(procfs_root / str(pid) / "environ", _BYTES_AT_MOST)
    except OSError:
        return None
    pairs = (entry.partition("=") for entry in os.fsdecode(content).split("\0"))
    return {name: value for name, _, value in pairs if name in names}
