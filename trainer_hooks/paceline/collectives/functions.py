"""The functions of torch.distributed that are timed, and how to find their arguments in a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from paceline_wire.spans import Op

Function = Callable[..., Any]

# Function: (op, the argument whose size is the payload: the larger side, as nccl-tests count).
COLLECTIVES: Mapping[str, tuple[Op, str]] = {
    "all_reduce": (Op.ALL_REDUCE, "tensor"),
    "all_reduce_coalesced": (Op.ALL_REDUCE, "tensors"),
    "all_gather": (Op.ALL_GATHER, "tensor_list"),
    "all_gather_coalesced": (Op.ALL_GATHER, "input_tensor_list"),
    "all_gather_into_tensor": (Op.ALL_GATHER, "output_tensor"),
    "all_gather_single": (Op.ALL_GATHER, "output_tensor"),
    "reduce_scatter": (Op.REDUCE_SCATTER, "input_list"),
    "reduce_scatter_tensor": (Op.REDUCE_SCATTER, "input"),
    "reduce_scatter_single": (Op.REDUCE_SCATTER, "input"),
    "broadcast": (Op.BROADCAST, "tensor"),
    "barrier": (Op.BARRIER, ""),
    "monitored_barrier": (Op.BARRIER, ""),
    "all_to_all": (Op.ALL_TO_ALL, "input_tensor_list"),
    "all_to_all_single": (Op.ALL_TO_ALL, "input"),
    "reduce": (Op.REDUCE, "tensor"),
    "gather": (Op.GATHER, "tensor"),
    "scatter": (Op.SCATTER, "tensor"),
}
# Function: (op, the arguments that name the peer: its global rank, its rank in the group).
TRANSFERS: Mapping[str, tuple[Op, str, str]] = {
    "send": (Op.SEND, "dst", "group_dst"),
    "isend": (Op.SEND, "dst", "group_dst"),
    "recv": (Op.RECV, "src", "group_src"),
    "irecv": (Op.RECV, "src", "group_src"),
}


class Argument:
    """One argument of a function, which a call may pass by position or by name."""

    __slots__ = ("name", "position")

    def __init__(self, function: Function, name: str) -> None:
        self.name = name
        parameters = list(inspect.signature(function).parameters)
        self.position = parameters.index(name) if name in parameters else len(parameters)

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument's value in a call, or None if it was not passed."""
        return args[self.position] if len(args) > self.position else kwargs.get(self.name)
