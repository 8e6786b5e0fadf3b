"""AdamW (arXiv:1711.05101) on one flat buffer; all parameters are views of it.

One buffer means one collective for the gradients, one reduction for their norm and a handful of
operations for the update, for any number of parameters.

With ZeRO stage 1 (arXiv:1910.02054, section 5.1) each data-parallel rank keeps the mean and the
variance of its own share of the buffer only: gradients are reduce-scattered instead of reduced,
each rank updates its share, and the updated parameters are gathered again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline_trainer.model import NamedShard
from paceline_trainer.parallel import TensorParallel

BETAS = (0.9, 0.95)
EPSILON = 1e-8


class DataParallel(NamedTuple):
    """The ranks that hold the same parameters; `group` is None if there is only one."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sharded: bool = False  # ZeRO stage 1; only with a group


class AdamW:
    """The optimizer of one rank. The parameters become views of its flat buffers."""

    def __init__(
        self,
        parameters: Sequence[NamedShard],
        parallel: TensorParallel,
        weight_decay: float,
        data: DataParallel | None = None,
    ) -> None:
        self.names = [
            name if dimension is None else f"{name}@tp{parallel.rank}"
            for name, _, dimension in parameters
        ]
        self.shapes = [parameter.shape for _, parameter, _ in parameters]
        self.data = data or DataParallel()
        pieces = [parameter.data.flatten() for _, parameter, _ in parameters]
        padding = -sum(piece.numel() for piece in pieces) % self.data.size  # for equal shares
        self.values = torch.cat([*pieces, pieces[0].new_zeros(padding)])
        self.gradient = torch.zeros_like(self.values)
        for shard, value, gradient in zip(
            parameters, self._views(self.values), self._views(self.gradient), strict=True
        ):
            shard.parameter.data = value
            shard.parameter.grad = gradient
        # In the norm over all ranks, a replicated parameter counts once, on the first tp rank.
        self._counted = self._own(
            self._mask(
                [dimension is not None or parallel.rank == 0 for *_, dimension in parameters]
            )
        )
        self._decay = weight_decay * self._own(
            self._mask([len(shape) > 1 for shape in self.shapes])
        )
        self.reduced = self._own(self.gradient)  # this rank's share of the reduced gradient
        if self.data.sharded:
            self.reduced = self.reduced.clone()
        self.mean = torch.zeros_like(self.reduced)
        self.variance = torch.zeros_like(self.reduced)

    def reduce(self) -> None:
        """Sum the gradients over the data-parallel ranks."""
        group = self.data.group
        if group is None:
            return
        if self.data.sharded:
            dist.reduce_scatter(self.reduced, list(self._shares(self.gradient)), group=group)
        else:
            dist.all_reduce(self.gradient, group=group)

    def gather(self) -> None:
        """Fetch the parameters that other ranks updated."""
        if self.data.sharded:
            own = self._own(self.values).clone()
            dist.all_gather(list(self._shares(self.values)), own, group=self.data.group)

    def counts(self) -> bool:
        """Return whether `squared_norm` of this rank is a term of the sum over all ranks."""
        return self.data.sharded or self.data.rank == 0

    def squared_norm(self) -> Tensor:
        """Return this rank's share of the squared norm of the model's gradient, as float64."""
        return (self.reduced.square() * self._counted).sum(dtype=torch.float64)

    @torch.no_grad()
    def update(self, step: int, learning_rate: float, gradient_scale: float) -> None:
        """Apply gradient_scale x gradient at `step` (from 0), then clear the gradient."""
        gradient, values = self.reduced.mul_(gradient_scale), self._own(self.values)
        self.mean.lerp_(gradient, 1 - BETAS[0])
        self.variance.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        root = (self.variance / (1 - BETAS[1] ** (step + 1))).sqrt_().add_(EPSILON)
        values.addcmul_(values, self._decay, value=-learning_rate)
        values.addcdiv_(self.mean, root, value=-learning_rate / (1 - BETAS[0] ** (step + 1)))
        self.gradient.zero_()

    def state(self) -> dict[str, Tensor]:
        """Return the state to checkpoint, by global name (and tp rank, if sharded by tp).

        Every data-parallel rank returns the whole state, so that a run of any dp and pp size can
        load it, with or without ZeRO. With ZeRO, all ranks must call this together, and call
        `adopt` after loading.
        """
        parts = {
            "value": self.values,
            "mean": self._whole(self.mean),
            "variance": self._whole(self.variance),
        }
        return {
            f"{name}/{part}": view
            for part, flat in parts.items()
            for name, view in zip(self.names, self._views(flat), strict=True)
        }

    def adopt(self, state: dict[str, Tensor]) -> None:
        """Copy a loaded `state`; without ZeRO it is already a view of the buffers."""
        if not self.data.sharded:
            return
        for part, own in (("mean", self.mean), ("variance", self.variance)):
            whole = torch.zeros_like(self.values)
            for name, view in zip(self.names, self._views(whole), strict=True):
                view.copy_(state[f"{name}/{part}"])
            own.copy_(self._own(whole))

    def _whole(self, share: Tensor) -> Tensor:
        if not self.data.sharded:
            return share
        whole = torch.empty_like(self.values)
        dist.all_gather(list(self._shares(whole)), share, group=self.data.group)
        return whole

    def _shares(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.chunk(self.data.size)

    def _own(self, flat: Tensor) -> Tensor:
        """Return the share that this rank updates."""
        return self._shares(flat)[self.data.rank] if self.data.sharded else flat

    def _views(self, flat: Tensor) -> list[Tensor]:
        sizes = [shape.numel() for shape in self.shapes]
        pieces = flat[: sum(sizes)].split_with_sizes(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def _mask(self, chosen: Sequence[bool]) -> Tensor:
        mask = torch.zeros_like(self.values)
        for view, is_chosen in zip(self._views(mask), chosen, strict=True):
            view.fill_(float(is_chosen))
        return mask
