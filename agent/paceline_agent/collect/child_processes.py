"""Which processes a rank has started, such as the workers of its data loader."""

from __future__ import annotations

import os
from pathlib import Path

from paceline_agent.collect.cached_files import read_text_once


class ChildProcesses:
    """The parents of all processes. A process keeps the parent that it had when first seen."""

    def __init__(self, procfs_root: Path) -> None:
        self._root = procfs_root
        self._parents: dict[int, int] = {}  # by pid

    def refresh(self) -> None:
        """Look for new and ended processes; only the new ones are read."""
        try:
            pids = {int(name) for name in os.listdir(self._root) if name.isdigit()}
        except OSError:
            pids = set()
        self._parents = {pid: parent for pid, parent in self._parents.items() if pid in pids}
        for pid in pids - self._parents.keys():
            try:
                text = read_text_once(self._root / str(pid) / "stat")
                self._parents[pid] = int(text.rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):  # it has ended
                continue

    def of(self, pid: int) -> set[int]:
        """Return the children of a process, their children, and so on."""
        found: set[int] = set()
        newest = {pid}
        while newest:
            newest = {
                child
                for child, parent in self._parents.items()
                if parent in newest and child not in found
            }
            found |= newest
        return found
