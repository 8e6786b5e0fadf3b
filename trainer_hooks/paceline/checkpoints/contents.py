"""Whether ranks have the same content under one name.

A plain tensor is compared as a whole. A DTensor is spread over the ranks of its mesh: those of two
meshes are the same if each shard has the same content in both.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class Content(NamedTuple):
    """The content that one rank has under a name."""

    digest: bytes  # SHA-256 of type, shape and content, for a DTensor of its shard
    mesh: tuple[int, ...] | None = None  # ranks that a DTensor is spread over
    offset: tuple[int, ...] = ()  # position of the shard in the DTensor


def content_of(tensor: Tensor) -> Content:
    """Return the content of a tensor in the host's memory."""
    if not isinstance(tensor, DTensor):
        return Content(_digest(tensor))
    mesh = tensor.device_mesh
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    local = tensor.to_local()
    return Content(_digest(local), tuple(mesh.mesh.flatten().tolist()), tuple(offset))


def owners_of(contents: Sequence[Content | None]) -> list[int | None]:
    """Return for each rank the lowest rank with the same content; None: it has none."""
    shards: dict[tuple[int, ...] | int, dict[tuple[int, ...], bytes]] = {}
    for rank, content in enumerate(contents):
        if content is not None:
            key = rank if content.mesh is None else content.mesh
            shards.setdefault(key, {})[content.offset] = content.digest
    first: dict[frozenset[tuple[tuple[int, ...], bytes]], int] = {}
    owners: list[int | None] = []
    for rank, content in enumerate(contents):
        if content is None:
            owners.append(None)
        else:
            whole = frozenset(shards[rank if content.mesh is None else content.mesh].items())
            owners.append(first.setdefault(whole, rank))
    return owners


def _digest(tensor: Tensor) -> bytes:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    content = tensor.detach().contiguous().flatten().view(torch.uint8)
    if content.numel():
        # without numpy, which torch does not require
        digest.update((ctypes.c_char * content.numel()).from_address(content.data_ptr()))
    return digest.digest()
