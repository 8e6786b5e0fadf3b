"""The GPU of a process from its environment, if the driver does not list the process.

NVIDIA_VISIBLE_DEVICES lists the GPUs of its container, CUDA_VISIBLE_DEVICES those that it uses.
If neither is set, nothing is guessed: the process may compute on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from paceline_agent.collect.process_environment import read_environment
from paceline_agent.collect.processes import ProcessKey, process_key
from paceline_wire.batch import GpuInfo

_VARIABLES = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")  # the second indexes the first


def visible_gpu(
    gpus: Sequence[GpuInfo], procfs_root: Path, pid: int, local_rank: int
) -> GpuInfo | None:
    """Return the visible GPU; if there are several, the one whose position is the local rank."""
    process = process_key(procfs_root, pid)
    visible = None if process is None else _visible_words(procfs_root, process)
    if visible is None:
        return None
    seen: Sequence[GpuInfo | None] = gpus
    for words in visible:
        if words is not None and words != ("all",):
            seen = [_find(word, seen) for word in words]
    if len(seen) == 1:
        return seen[0]
    return seen[local_rank] if 0 <= local_rank < len(seen) else None


@lru_cache(maxsize=256)
def _visible_words(
    procfs_root: Path, process: ProcessKey
) -> tuple[tuple[str, ...] | None, ...] | None:
    environment = read_environment(procfs_root, process.pid, _VARIABLES)
    if not environment:
        return None
    return tuple(
        tuple(environment[name].replace(" ", "").split(",")) if name in environment else None
        for name in _VARIABLES
    )


def _find(word: str, among: Sequence[GpuInfo | None]) -> GpuInfo | None:
    """Return a GPU by its index or the beginning of its UUID; CUDA accepts both."""
    if word.isdecimal():
        return among[int(word)] if int(word) < len(among) else None
    named = word.removeprefix("MIG-") if word.startswith("MIG-GPU-") else word
    uuid = named.partition("/")[0]
    if not uuid.startswith("GPU-"):
        return None
    return next((gpu for gpu in among if gpu is not None and gpu.uuid.startswith(uuid)), None)
