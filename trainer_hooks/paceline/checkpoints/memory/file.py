"""The file of a copy: the state of one rank after one step.

    block of 4 KiB    magic, length and SHA-256 of the record, and the record
    table             name, type, shape and offset of each tensor
    tensors           each at a multiple of 64 bytes
    rests             the other parts of the state by the name of the part, as torch.save writes it

The record has the SHA-256 of all that follows the block. It is SHA-256 as on disk: one pass of it
protects the copy in memory and, with an authenticated record, the transfer; processors with its
instructions hash 1.5 to 2 GB/s, and hashlib releases the GIL.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from paceline.checkpoints.errors import DamagedError
from paceline.checkpoints.trees import decode

VERSION = 2
BLOCK_BYTES = 4096
ALIGNMENT = 64
_MAGIC = b"PLCOPY\0\1"
_HEADER = struct.Struct("<8sI32s")


class CopyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a copy. All ranks load copies of one run, generation, step and size."""

    version: int = VERSION
    run: str  # identity of the checkpoint directory
    generation: int
    step: int
    rank: int
    world_size: int
    disk: tuple[int, int] | None  # generation and step of the newest checkpoint on disk then
    table_bytes: int
    rests_offset: int
    total_bytes: int
    sha256: bytes


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a rank in the file; of a DTensor this rank's shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    sharding: str | None  # how a DTensor is spread over ranks, and which part this is


_RECORDS = msgspec.msgpack.Decoder(CopyRecord)
_TABLES = msgspec.msgpack.Decoder(list[TensorPlace])


def pack_record(record: CopyRecord) -> bytes:
    """Return the first block of a file."""
    content = msgspec.msgpack.encode(record)
    header = _HEADER.pack(_MAGIC, len(content), hashlib.sha256(content).digest())
    return (header + content).ljust(BLOCK_BYTES, b"\0")


def unpack_record(block: bytes) -> CopyRecord:
    """Return the record of a first block. Raises DamagedError if it is not one."""
    try:
        magic, length, digest = _HEADER.unpack_from(block)
        content = block[_HEADER.size : _HEADER.size + length]
        if magic != _MAGIC or hashlib.sha256(content).digest() != digest:
            raise DamagedError("the record of the copy does not match its SHA-256")
        record = _RECORDS.decode(content)
    except (struct.error, msgspec.MsgspecError) as error:
        raise DamagedError(f"the copy has no record: {error}") from error
    if record.version != VERSION:
        raise DamagedError(f"the copy has version {record.version}, this Paceline reads {VERSION}")
    return record


def read_record(path: Path) -> CopyRecord:
    """Return the record of a file. Raises DamagedError or OSError."""
    with path.open("rb") as file:
        return unpack_record(file.read(BLOCK_BYTES))


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has, without a history of operations."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            local: Tensor = tensor.to_local()
            return local
    return tensor.detach() if type(tensor) is not Tensor or tensor.requires_grad else tensor


def sharding_of(tensor: Tensor) -> str | None:
    """Return how a DTensor is spread, and which part of it this rank has; None for others."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    ranks = mesh.mesh.tolist()
    return f"{tuple(tensor.shape)} {tensor.placements} {ranks} {tuple(offset)}"


class CopyFile:
    """A copy whose content was verified, mapped for reading."""

    def __init__(self, path: Path, record: CopyRecord, content: mmap.mmap) -> None:
        self.path = path
        self.record = record
        self._content = content
        self._bytes = torch.frombuffer(content, dtype=torch.uint8)
        try:
            table = content[BLOCK_BYTES : BLOCK_BYTES + record.table_bytes]
            places = _TABLES.decode(table)
        except msgspec.MsgspecError as error:
            raise DamagedError(f"{path.name} cannot be decoded: {error}") from error
        rests = decode(content[record.rests_offset : record.total_bytes])
        if not isinstance(rests, dict):
            raise DamagedError(f"{path.name} has no parts")
        self._rests = rests
        self.places: Mapping[str, TensorPlace] = {place.name: place for place in places}

    @classmethod
    def verify(cls, path: Path) -> Self:
        """Open a copy and check its SHA-256. Raises DamagedError or OSError."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            # The pages stay the file's; torch takes only buffers that could be written.
            content = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) if size else None
        finally:
            os.close(descriptor)
        if content is None:
            raise DamagedError(f"{path.name} is empty")
        record = unpack_record(content[:BLOCK_BYTES])
        if record.total_bytes > size:
            raise DamagedError(f"{path.name} is incomplete")
        if hashlib.sha256(hashed_part(content, record.total_bytes)).digest() != record.sha256:
            raise DamagedError(f"{path.name} does not match its SHA-256")
        return cls(path, record, content)

    @property
    def part_names(self) -> set[str]:
        return set(self._rests)

    def rest(self, part: str) -> Any:
        """Return the rest of a part."""
        return self._rests[part]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the file, to copy from."""
        place = self.places[name]
        return view_of(self._bytes, place.offset, dtype_of(place.dtype), place.shape)


def hashed_part(content: mmap.mmap, total_bytes: int) -> memoryview:
    """Return what the record's SHA-256 is of."""
    return memoryview(content)[BLOCK_BYTES:total_bytes]


def dtype_of(name: str) -> torch.dtype:
    """Return the type of a name such as `float32`. Raises DamagedError for any other name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedError(f"the copy has a tensor of type {name!r}")
    return dtype


def view_of(content: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a part of a tensor of bytes as a tensor of its own type."""
    count = 1
    for length in shape:
        count *= length
    return content[offset : offset + count * dtype.itemsize].view(dtype).view(shape)
