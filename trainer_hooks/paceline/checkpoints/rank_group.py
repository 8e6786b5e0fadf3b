"""How the ranks of a job exchange what happened, on a process group of their own or alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from paceline.checkpoints.errors import CheckpointError

T = TypeVar("T")


class RankGroup:
    """The ranks of a gloo group; without a group, this process alone.

    All ranks make the same calls in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """Return the value of each rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: T | None) -> T:
        """Return the value of rank 0."""
        values: list[Any] = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, group=self.group, group_src=0)
        first: T = values[0]
        return first

    def attempt(self, act: Callable[[], object]) -> str | None:
        """Call `act`. Return None, or the reason in one line if it failed on this rank."""
        try:
            act()
        except (OSError, CheckpointError, CheckpointException) as error:
            return f"{reason_of(error)} (rank {self.rank})"
        return None

    def first(self, failure: str | None) -> str | None:
        """Return the first failure of any rank, the same on all ranks."""
        return next((failure for failure in self.gather(failure) if failure), None)

    def on_rank_0(self, act: Callable[[], object]) -> str | None:
        """Call `act` on rank 0. Return why it failed, on all ranks."""
        return self.first(self.attempt(act) if self.rank == 0 else None)


def reason_of(error: BaseException) -> str:
    """Return one line; for torch's collected failures, that of the first one."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
