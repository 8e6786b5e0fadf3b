"""The state of torch's PowerSGD, a communication hook of DistributedDataParallel.

Each rank has its own: the parts of gradients that it has not sent yet. They go by DDP's buckets,
which DDP forms again after the first backward pass of a process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.checkpoints.random_states import OwnGenerator

_TENSORS = ("error_dict", "p_memory_dict", "q_memory_dict")  # by bucket
_NUMBERS = (
    "iter",
    "total_numel_before_compression",
    "total_numel_after_compression",
    "next_stats_report",
)


class PowerSGD:
    """A `PowerSGDState` with `state_dict` and `load_state_dict`."""

    def __init__(self, name: str, hook: Any, modules: Iterable[nn.Module]) -> None:
        """Find the model that the hook is registered for.

        Raises:
            TypeError: it is registered for none of them.
            ValueError: the buckets of the model will change.
        """
        models = [
            each
            for module in modules
            for each in module.modules()
            if isinstance(each, DistributedDataParallel)
            and any(state is hook for _, state in each._comm_hooks)
        ]
        if not models:
            raise TypeError(
                f"{name} is a PowerSGDState of no DistributedDataParallel in this state: register "
                "it with register_comm_hook, and give the model to Checkpoints"
            )
        self._hook, self._model = hook, models[0]
        is_final = self._model.find_unused_parameters and not self._model.static_graph
        if not (is_final or self._model._has_rebuilt_buckets):
            raise ValueError(
                f"{name} belongs to the buckets of DistributedDataParallel, which a process forms "
                "after its first backward pass: before Checkpoints, run the model forward and "
                "backward twice with any batch, then call zero_grad()"
            )

    @staticmethod
    def fits(value: object) -> bool:
        """Return whether an object is such a state."""
        module = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
        return module is not None and isinstance(value, module.PowerSGDState)

    def state_dict(self) -> dict[str, Any]:
        """Return what changes in the training."""
        state = {name: getattr(self._hook, name) for name in (*_TENSORS, *_NUMBERS)}
        return state | {"rng": OwnGenerator(self._hook.rng).state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set it."""
        device = next(self._model.parameters()).device

        def moved(tensors: dict[int, Tensor]) -> dict[int, Tensor]:
            return {bucket: tensor.to(device) for bucket, tensor in tensors.items()}

        for name in _TENSORS:
            setattr(self._hook, name, moved(state[name]))
        for name in _NUMBERS:
            setattr(self._hook, name, state[name])
        OwnGenerator(self._hook.rng).load_state_dict(state["rng"])
