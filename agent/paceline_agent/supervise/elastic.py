"""Ends ranks that torchrun started, so that it starts them again, if it still runs.

torchrun restarts all ranks of a node once one of them has ended, as often as --max-restarts allows.
A stopped or hung rank ends only by SIGKILL.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from paceline_agent.rings.reader import Rings
from paceline_wire.commands import EndRanks

_PROGRAMS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "torch/distributed")
_CHILD_OF = 4  # torchrun may be the parent of a wrapper that starts the rank


def end_ranks(rings: Rings, command: EndRanks, procfs_root: Path = Path("/proc")) -> str | None:
    """Kill the ranks of the command, or end their torchrun. Return None, or why it failed."""
    ended, errors = 0, list[str]()
    launchers: dict[int, int] = {}  # a rank of each
    for rank, started_ns in sorted(command.started_ns.items()):
        pid = rings.external_pid(command.job, command.generation, rank, started_ns)
        if pid is None:
            continue  # ended meanwhile, perhaps by torchrun
        launcher = _torchrun_of(procfs_root, pid)
        if launcher is None:
            errors.append(f"rank {rank} is no child of torchrun")
        elif command.leave:
            launchers[launcher] = rank
        else:
            errors += _send(pid, rank, signal.SIGKILL)
            ended += 1
    for launcher, rank in launchers.items():
        errors += _send(launcher, rank, signal.SIGTERM)
        ended += 1
    if not ended and not errors:
        return f"no rank of {command.job} generation {command.generation} runs on this node"
    return "; ".join(errors) or None


def ranks_without_torchrun(
    rings: Rings, job: str, generation: int, procfs_root: Path = Path("/proc")
) -> list[int]:
    """Return the ranks that nothing would start again: their torchrun was killed, or not found."""
    pids = rings.torchrun_pids(job, generation)
    return sorted(rank for rank, pid in pids.items() if _torchrun_of(procfs_root, pid) is None)


def _send(pid: int, rank: int, number: signal.Signals) -> list[str]:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return []
    except PermissionError:
        return [f"the agent may not end rank {rank}: run it as root or as the user of the ranks"]
    return []


def _torchrun_of(procfs_root: Path, pid: int) -> int | None:
    """Return the pid of the torchrun that a process descends from; None if there is none."""
    for _ in range(_CHILD_OF):
        try:
            stat = (procfs_root / str(pid) / "stat").read_bytes()
            pid = int(stat.rpartition(b")")[2].split()[1])
            words = (procfs_root / str(pid) / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError, IndexError):
            return None
        shown = [word.decode(errors="replace") for word in words[:4]]
        if any(program in word for word in shown for program in _PROGRAMS):
            return pid
    return None
