"""The rank to which a process belongs: it is the rank, or descends from it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline_agent.collect.cached_files import read_once
from paceline_agent.collect.child_processes import ChildProcesses
from paceline_agent.collect.contract import LocalRank
from paceline_agent.collect.process_environment import read_environment
from paceline_agent.collect.processes import namespace_pids

_GENERATIONS = 8  # most ancestors searched between a process and its rank
_RANKS_REMEMBERED = 512  # the kernel may report a rank after it is gone
_INITIAL_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO in include/linux/proc_ns.h
_REFRESH_SECONDS = 10.0


class ProcessOwners:
    """Which rank owns a process that the kernel names by its pid, also after it has ended."""

    def __init__(self, procfs_root: Path) -> None:
        self._procfs_root = procfs_root
        self._ranks: dict[int, LocalRank] = {}  # by pid
        self._children = ChildProcesses(procfs_root)
        self._refresh_at = 0.0

    def remember(self, ranks: Iterable[LocalRank]) -> None:
        for rank in ranks:
            self._ranks.pop(rank.pid, None)
            self._ranks[rank.pid] = rank
        while len(self._ranks) > _RANKS_REMEMBERED:
            del self._ranks[next(iter(self._ranks))]

    def remember_children(self, now_seconds: float) -> None:
        """Look for processes that ranks started; call it after the newest messages were judged."""
        if self._ranks and now_seconds >= self._refresh_at:
            self._refresh_at = now_seconds + _REFRESH_SECONDS
            self._children.refresh()

    def rank(self, pid: int) -> LocalRank | None:
        """Return the rank with this pid, not those of the processes that it started."""
        return self._ranks.get(pid)

    def rank_of(self, pid: int) -> LocalRank | None:
        """Return the rank; None if it is another process, or not known."""
        found = rank_of(pid, self._ranks, self._procfs_root)
        if found is not None:
            return found
        children = ((rank, self._children.of(rank.pid)) for rank in self._ranks.values())
        return next((rank for rank, pids in children if pid in pids), None)

    def has_pids_of_the_kernel(self) -> bool:
        """Return whether /proc shows the pids that the kernel logs.

        In a container with PIDs of its own it does not, and no pid of the log is known to be that
        of another process.
        """
        for process in ("1", "self"):
            try:
                namespace = os.readlink(self._procfs_root / process / "ns" / "pid")
            except OSError:  # only root may read that of another user's process
                continue
            return namespace == _INITIAL_NAMESPACE
        return False


def rank_of(pid: int, by_pid: Mapping[int, LocalRank], procfs_root: Path) -> LocalRank | None:
    """Return the rank of a process or of its ancestors; `pid` is the node's pid."""
    at = pid
    for _ in range(_GENERATIONS):
        if at in by_pid:
            return by_pid[at]
        if at <= 1 or not by_pid:
            break
        try:
            stat = read_once(procfs_root / str(at) / "stat")
            at = int(stat[stat.rindex(b")") + 2 :].split()[1])
        except (OSError, ValueError, IndexError):  # gone, or in another PID namespace
            break
    return _rank_within(pid, by_pid, procfs_root)


def _rank_within(pid: int, by_pid: Mapping[int, LocalRank], procfs_root: Path) -> LocalRank | None:
    """Return the rank of a process in a container; another rank may have the same pid there."""
    for inner in namespace_pids(procfs_root, pid)[1:]:
        rank = by_pid.get(inner)
        if rank is not None:
            environment = read_environment(procfs_root, pid, ("RANK",)) or {}
            return rank if environment.get("RANK", str(rank.rank)) == str(rank.rank) else None
    return None
