"""Tensor parallelism: layers whose weights are divided over the ranks of one group.

Method: "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism"
(arXiv:1909.08053), section 3. A column-parallel layer followed by a row-parallel one needs one
all-reduce in the forward pass (after the row) and one in the backward pass (before the column).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(slots=True)
class TensorParallel:
    """The group over which weights are divided; `group` is None if the size is 1."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    blocked_seconds: float = 0.0  # host time in all-reduces so far

    def sum(self, value: Tensor) -> Tensor:
        """All-reduce in place."""
        return self._all_reduce(value, dist.ReduceOp.SUM)

    def maximum(self, value: Tensor) -> Tensor:
        """All-reduce in place."""
        return self._all_reduce(value, dist.ReduceOp.MAX)

    def _all_reduce(self, value: Tensor, operation: Any) -> Tensor:
        if self.group is not None:
            started = time.perf_counter()
            dist.all_reduce(value, operation, group=self.group)
            self.blocked_seconds += time.perf_counter() - started
        return value


class _EnterParallel(torch.autograd.Function):
    """Identity in the forward pass, all-reduce in the backward pass: each rank uses the value for
    its own columns."""

    @staticmethod
    def forward(context: Any, value: Tensor, parallel: TensorParallel) -> Tensor:
        context.parallel = parallel
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parallel: TensorParallel = context.parallel
        return parallel.sum(gradients[0].clone()), None


class _LeaveParallel(torch.autograd.Function):
    """All-reduce in the forward pass, identity in the backward pass: each rank has a term of the
    sum."""

    @staticmethod
    def forward(context: Any, value: Tensor, parallel: TensorParallel) -> Tensor:
        return parallel.sum(value.clone())

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy with logits divided over the vocabulary; a weighted sum over the targets.

    No rank ever holds a whole row of logits.
    """

    @staticmethod
    def forward(
        context: Any, logits: Tensor, targets: Tensor, weights: Tensor, parallel: TensorParallel
    ) -> Tensor:
        width = logits.shape[-1]
        local = targets - parallel.rank * width
        is_local = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1).unsqueeze(-1)
        shifted = logits - parallel.maximum(logits.amax(-1)).unsqueeze(-1)
        target_logit = shifted.gather(-1, local).squeeze(-1) * is_local
        exponentials = shifted.exp()
        total, target_logit = parallel.sum(torch.stack([exponentials.sum(-1), target_logit]))
        context.save_for_backward(exponentials / total.unsqueeze(-1), local, is_local, weights)
        loss: Tensor = ((total.log() - target_logit) * weights).sum()
        return loss

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local, is_local, weights = context.saved_tensors
        gradient = softmax.scatter_add(-1, local, -is_local.unsqueeze(-1).to(softmax.dtype))
        weighted: Tensor = gradient * (weights * gradients[0]).unsqueeze(-1).to(gradient.dtype)
        return weighted, None, None, None


def enter_parallel(value: Tensor, parallel: TensorParallel) -> Tensor:
    if parallel.size == 1:
        return value
    result: Tensor = _EnterParallel.apply(value, parallel)  # type: ignore[no-untyped-call]
    return result


def leave_parallel(value: Tensor, parallel: TensorParallel) -> Tensor:
    if parallel.size == 1:
        return value
    result: Tensor = _LeaveParallel.apply(value, parallel)  # type: ignore[no-untyped-call]
    return result


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor, parallel: TensorParallel
) -> Tensor:
    result: Tensor = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, weights, parallel
    )
    return result


class ColumnParallelLinear(nn.Module):
    """y = x W' with the outputs divided over ranks; each rank has all inputs."""

    sharded_dimension: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        inputs: int,
        outputs: int,
        parallel: TensorParallel,
        dtype: torch.dtype,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        share = outputs // parallel.size
        self.weight = nn.Parameter(torch.empty(share, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(share, dtype=dtype)) if bias else None

    def forward(self, value: Tensor) -> Tensor:
        return F.linear(enter_parallel(value, self.parallel), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = x W' + b with the inputs divided over ranks; each rank gets all outputs."""

    sharded_dimension: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(
        self, inputs: int, outputs: int, parallel: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = nn.Parameter(torch.empty(outputs, inputs // parallel.size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype))

    def forward(self, value: Tensor) -> Tensor:
        return leave_parallel(F.linear(value, self.weight), self.parallel) + self.bias


class VocabParallelEmbedding(nn.Module):
    """Each rank embeds its own part of the vocabulary; the sum over ranks is the embedding."""

    sharded_dimension: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(
        self, vocabulary: int, width: int, parallel: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.share = vocabulary // parallel.size
        self.weight = nn.Parameter(torch.empty(self.share, width, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.parallel.rank * self.share
        is_local = (local >= 0) & (local < self.share)
        embedded = F.embedding(local.clamp(0, self.share - 1), self.weight)
        return leave_parallel(embedded * is_local.unsqueeze(-1), self.parallel)
