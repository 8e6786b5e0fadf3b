"""Activity of each rank between the start of its process and its first step.

A rank reports to its agent only after `paceline.init`. Before that the process itself shows how far
it is: PyTorch's library is mapped as soon as `import torch` has begun.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_TORCH_LIBRARY = b"libtorch_cpu"


def describe_startup(ranks: Sequence[Mapping[str, Any]], proc: Path = Path("/proc")) -> str:
    """Return e.g. `6 ranks importing PyTorch, 2 ranks starting Python`, the largest group first.

    Args:
        ranks: as `GET /jobs/{id}/ranks` returns them; they run on this machine.
    """
    counts = Counter(rank_activity(rank, proc) for rank in ranks)
    return ", ".join(
        f"{count} {'rank' if count == 1 else 'ranks'} {activity}"
        for activity, count in counts.most_common()
    )


def rank_activity(rank: Mapping[str, Any], proc: Path = Path("/proc")) -> str:
    """Return what one rank is doing, from its state, its state page and its process."""
    if rank["state"] == "exited":
        return "exited"
    if rank["step"] is not None:
        return "training"
    if rank["state"] == "attached":
        if rank["operation"]:
            return f"in {rank['operation'].split()[0]}"
        return "joining process groups or reading data"
    if rank["pid"] is None:
        return "waiting for a process"
    try:
        maps = (proc / str(rank["pid"]) / "maps").read_bytes()
    except OSError:  # the process ended, or has been replaced
        return "started"
    return "importing PyTorch" if _TORCH_LIBRARY in maps else "starting Python"
