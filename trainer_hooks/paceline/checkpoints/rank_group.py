"""How the ranks of a job exchange what happened, on a process group of their own or alone.

Most values are small. So their length and content are exchanged together, by one collective where
torch's functions for objects need two: with many ranks per core each one takes milliseconds.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from paceline.checkpoints.errors import CheckpointError

T = TypeVar("T")

_BLOCK_BYTES = 4096  # that are exchanged at first
_LENGTH = struct.Struct("<Q")
_ROOM = _BLOCK_BYTES - _LENGTH.size


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
        return _exchange(pickle.dumps(value), self._all_gather)

    def from_first(self, value: T | None) -> T:
        """Return the value of rank 0."""
        if self.group is None:
            return cast("T", value)
        content = pickle.dumps(value) if self.rank == 0 else b""
        first: T = _exchange(content, self._broadcast)[0]
        return first

    def _all_gather(self, content: bytes) -> list[bytes]:
        """Return the bytes of each rank, as many as of this one."""
        gathered = torch.empty((self.size, len(content)), dtype=torch.uint8)
        dist.all_gather(list(gathered.unbind()), _tensor_of(content), group=self.group)
        return [row.numpy().tobytes() for row in gathered]

    def _broadcast(self, content: bytes) -> list[bytes]:
        """Return the bytes of rank 0, as many as of this one."""
        tensor = _tensor_of(content)
        dist.broadcast(tensor, group=self.group, group_src=0)
        return [tensor.numpy().tobytes()]

    def attempt(self, act: Callable[[], object]) -> str | None:
        """Call `act`. Return None, or the reason in one line if it failed on this rank."""
        try:
            act()
        except (OSError, CheckpointError, CheckpointException) as error:
            rank = _failed_rank(error)
            return f"{reason_of(error)} (rank {self.rank if rank is None else rank})"
        return None

    def first(self, failure: str | None) -> str | None:
        """Return the first failure of any rank, the same on all ranks."""
        return first_of(self.gather(failure))

    def on_rank_0(self, act: Callable[[], object]) -> str | None:
        """Call `act` on rank 0. Return why it failed, on all ranks."""
        return self.first(self.attempt(act) if self.rank == 0 else None)


def first_of(failures: Iterable[str | None]) -> str | None:
    """Return the first failure, or None if nothing failed."""
    return next(filter(None, failures), None)


def _exchange(content: bytes, exchange: Callable[[bytes], list[bytes]]) -> list[Any]:
    """Return the values that arrive; `exchange` sends the same number of bytes on all ranks."""
    block = (_LENGTH.pack(len(content)) + content[:_ROOM]).ljust(_BLOCK_BYTES, b"\0")
    begins = exchange(block)
    lengths = [_LENGTH.unpack_from(begin)[0] for begin in begins]
    rests, missing = [b""] * len(begins), max(lengths) - _ROOM
    if missing > 0:
        rests = exchange(content[_ROOM:].ljust(missing, b"\0"))
    return [
        pickle.loads((begin[_LENGTH.size :] + rest)[:length])
        for begin, rest, length in zip(begins, rests, lengths, strict=True)
    ]


def _tensor_of(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _failed_rank(error: BaseException) -> int | None:
    """Return the first rank of torch's collected failures; None: the error is this rank's own."""
    for each in (error, error.__cause__):
        if isinstance(each, CheckpointException) and each.failures:
            return next(iter(each.failures))
    return None


def reason_of(error: BaseException) -> str:
    """Return one line; for torch's collected failures, that of the first one."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
