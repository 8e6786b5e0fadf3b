"""Which GPU a process may see, where the driver does not list it: from its environment.

NVIDIA_VISIBLE_DEVICES is what its container was given, CUDA_VISIBLE_DEVICES what it chose of that.
Where neither was set nothing is guessed: it may well compute on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from paceline_agent.collect.process_environment import read_environment
from paceline_wire.batch import GpuInfo

_VARIABLES = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")  # the second counts in the first


def visible_gpu(
    gpus: Sequence[GpuInfo], procfs_root: Path, pid: int, local_rank: int
) -> GpuInfo | None:
    """The one it sees, or of several the one that its local rank numbers."""
    told = _told(procfs_root, pid)
    if told is None:
        return None
    seen: Sequence[GpuInfo | None] = gpus
    for words in told:
        if words is not None and words != ("all",):
            seen = [_find(word, seen) for word in words]
    if len(seen) == 1:
        return seen[0]
    return seen[local_rank] if 0 <= local_rank < len(seen) else None


@lru_cache(maxsize=256)
def _told(procfs_root: Path, pid: int) -> tuple[tuple[str, ...] | None, ...] | None:
    environment = read_environment(procfs_root, pid, _VARIABLES)
    if not environment:
        return None
    return tuple(
        tuple(environment[name].replace(" ", "").split(",")) if name in environment else None
        for name in _VARIABLES
    )


def _find(word: str, among: Sequence[GpuInfo | None]) -> GpuInfo | None:
    """By its place, or by the beginning of its UUID; CUDA takes both."""
    if word.isdecimal():
        return among[int(word)] if int(word) < len(among) else None
    named = word.removeprefix("MIG-") if word.startswith("MIG-GPU-") else word
    uuid = named.partition("/")[0]
    if not uuid.startswith("GPU-"):
        return None
    return next((gpu for gpu in among if gpu is not None and gpu.uuid.startswith(uuid)), None)
