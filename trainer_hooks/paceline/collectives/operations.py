"""The operators of torch's c10d library: every collective and transfer passes through one of them.

`torch.distributed`'s functions, DistributedDataParallel's reducer, FSDP, functional collectives and
DTensor all call a method of `ProcessGroup`, and each method calls its operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline_wire.spans import Op

# Operator: (op, position of the argument whose size is the payload: the larger side, as in
# nccl-tests). That of an all-to-all is what the rank receives, which is its share of the work if a
# model routes tokens to it. The tensor of a barrier carries no data.
OPERATORS: Mapping[str, tuple[Op, int | None]] = {
    "allreduce_": (Op.ALL_REDUCE, 0),
    "allreduce_coalesced_": (Op.ALL_REDUCE, 0),
    "allgather_": (Op.ALL_GATHER, 0),
    "allgather_coalesced_": (Op.ALL_GATHER, 0),
    "_allgather_base_": (Op.ALL_GATHER, 0),
    "allgather_into_tensor_coalesced_": (Op.ALL_GATHER, 0),
    "reduce_scatter_": (Op.REDUCE_SCATTER, 1),
    "_reduce_scatter_base_": (Op.REDUCE_SCATTER, 1),
    "reduce_scatter_tensor_coalesced_": (Op.REDUCE_SCATTER, 1),
    "broadcast_": (Op.BROADCAST, 0),
    "barrier": (Op.BARRIER, None),
    "monitored_barrier_": (Op.BARRIER, None),
    "alltoall_": (Op.ALL_TO_ALL, 0),
    "alltoall_base_": (Op.ALL_TO_ALL, 0),
    "reduce_": (Op.REDUCE, 0),
    "gather_": (Op.GATHER, 1),
    "gather_into_tensor_": (Op.GATHER, 1),
    "scatter_": (Op.SCATTER, 0),
    "send": (Op.SEND, 0),
    "recv_": (Op.RECV, 0),
    "recv_any_source_": (Op.RECV, 0),
}
ADDED = frozenset({"gather_into_tensor_"})  # by torch 2.14, where gloo has no such call
TRANSFERS = (Op.SEND, Op.RECV)


class CallSignature(NamedTuple):
    """The argument positions of one operator, from which its calls are read."""

    op: int
    payload: int | None
    group: int
    peer: int | None  # position of the peer's rank in the group; None: a collective, or any sender
    # position of the argument for whether the caller waits later; None: not in this torch
    is_async: int | None

    @property
    def is_transfer(self) -> bool:
        """Return whether the operation has one peer."""
        return self.op in TRANSFERS


def read_signature(op: Op, payload: int | None, arguments: Sequence[str]) -> CallSignature:
    """Return how to read a call, from the names of the operator's arguments in its schema."""

    def position(*names: str) -> int | None:
        return next((at for at, name in enumerate(arguments) if name in names), None)

    group = position("process_group")
    if group is None:
        raise LookupError(f"no process group among the arguments {', '.join(arguments)}")
    return CallSignature(
        int(op), payload, group, position("dst", "src"), position("async_op", "asyncOp")
    )


def payload_bytes(payload: Any) -> int:
    """Return the bytes of a tensor or of nested lists of tensors; 0 for None and sparse tensors."""
    if payload is None:
        return 0
    if type(payload) is list or type(payload) is tuple:
        return sum(map(payload_bytes, payload))
    try:
        size: int = payload.nbytes
    except (RuntimeError, TypeError):
        return 0
    return size


def first_tensor(value: Any) -> Any:
    """Return the first tensor of nested lists; None if they are empty."""
    while type(value) is list or type(value) is tuple:
        if not value:
            return None
        value = value[0]
    return value
