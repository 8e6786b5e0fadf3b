"""The model: a byte-level GPT; each rank has a part of it.

Parameters have global names ("blocks.3.inputs.weight") in every stage. Each whole parameter is
drawn from a generator seeded with its name, and then the rank's shard is taken. So the model is the
same however it is divided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline_trainer.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from paceline_trainer.settings import ModelSettings

WEIGHT_DEVIATION = 0.05


class TransformerBlock(nn.Module):
    """A block with causal attention and feed-forward in parallel on one normalized input.

    Both share one column- and one row-parallel layer, so a block needs one all-reduce in each
    direction instead of two (the "parallel layers" of PaLM, arXiv:2204.02311, section 2). The
    features of the two layers are ordered (head, part), and each head has its share of the hidden
    features, so that the contiguous share of a rank is a whole number of heads.
    """

    def __init__(
        self, settings: ModelSettings, parallel: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        heads, width = settings.heads, settings.width
        head, hidden = width // heads, 4 * width // heads
        self.heads = heads // parallel.size
        self.parts = [head, head, head, hidden]
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.inputs = ColumnParallelLinear(width, heads * sum(self.parts), parallel, dtype)
        self.output = RowParallelLinear(heads * (head + hidden), width, parallel, dtype)

    def forward(self, value: Tensor) -> Tensor:
        batch, length, _ = value.shape
        features = self.inputs(self.norm(value)).view(batch, length, self.heads, -1)
        query, key, content, hidden = features.transpose(1, 2).split_with_sizes(self.parts, -1)
        mixed = F.scaled_dot_product_attention(query, key, content, is_causal=True)
        both = torch.cat([mixed, F.gelu(hidden)], -1).transpose(1, 2)
        result: Tensor = value + self.output(both.reshape(batch, length, -1))
        return result


class Chunk(nn.Module):
    """Contiguous layers of the model, by default all.

    The first chunk takes tokens, the others take activations (batch, length, width). The last one
    also takes the targets and their weights (0 for padding), and returns the loss of its
    microbatch.
    """

    def __init__(
        self,
        settings: ModelSettings,
        parallel: TensorParallel,
        dtype: torch.dtype,
        layers: range | None = None,
    ) -> None:
        super().__init__()
        if layers is None:
            layers = range(settings.layers)
        self.first, self.last = layers.start == 0, layers.stop == settings.layers
        self.parallel = parallel
        if self.first:
            self.tokens = VocabParallelEmbedding(
                settings.vocabulary, settings.width, parallel, dtype
            )
            self.positions = nn.Embedding(settings.sequence_length, settings.width, dtype=dtype)
        self.blocks = nn.ModuleDict(
            {str(layer): TransformerBlock(settings, parallel, dtype) for layer in layers}
        )
        if self.last:
            self.norm = nn.LayerNorm(settings.width, dtype=dtype)
            self.head = ColumnParallelLinear(
                settings.width, settings.vocabulary, parallel, dtype, bias=False
            )

    def forward(
        self, value: Tensor, targets: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        if self.first:
            value = self.tokens(value) + self.positions.weight[: value.shape[1]]
        for block in self.blocks.values():
            value = block(value)
        if not self.last:
            return value
        assert targets is not None, "the last chunk needs the targets"
        logits = self.head(self.norm(value))
        if weights is None:
            weights = torch.full_like(logits[..., 0], 1 / targets.numel())
        return vocab_parallel_cross_entropy(logits, targets, weights, self.parallel)


class NamedShard(NamedTuple):
    """A parameter with its global name; `dimension`: the divided dimension, None if replicated."""

    name: str
    parameter: nn.Parameter
    dimension: int | None


def shards(chunk: nn.Module) -> Iterator[NamedShard]:
    """Yield this rank's parameters in the order of the model."""
    for prefix, module in chunk.named_modules():
        dimensions: dict[str, int] = getattr(module, "sharded_dimension", {})
        for name, parameter in module.named_parameters(prefix, recurse=False):
            yield NamedShard(name, parameter, dimensions.get(name.rpartition(".")[2]))


@torch.no_grad()
def initialize(chunk: nn.Module, parallel: TensorParallel, seed: int) -> None:
    """Draw each whole parameter from its own generator and keep this rank's shard."""
    for name, parameter, dimension in shards(chunk):
        shape = list(parameter.shape)
        if dimension is not None:
            shape[dimension] *= parallel.size
        whole = _draw(name, shape, seed)
        if dimension is not None:
            whole = whole.chunk(parallel.size, dimension)[parallel.rank]
        parameter.copy_(whole)


def _draw(name: str, shape: list[int], seed: int) -> Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.float64)
    if "norm" in name:
        return torch.ones(shape, dtype=torch.float64)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * WEIGHT_DEVIATION
