"""Read a checkpoint's `.metadata` without running code from it.

torch.distributed.checkpoint stores the metadata as a pickle, and unpickling may run any code.
Only the classes that such a file needs can be loaded here. `BytesStorageMetadata` cannot: torch
would load the content of such an entry as a pickle of any kind, and Paceline stores tensors only.
"""

from __future__ import annotations

import pickle
from io import IOBase
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from paceline.checkpoints.errors import DamagedError

_ALLOWED = frozenset(
    {
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib", "Path"),
    }
)


class _Unpickler(pickle.Unpickler):
    """An unpickler that resolves the names of checkpoint metadata only."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise DamagedError(f".metadata contains {module}.{name}, which checkpoints do not need")


def load_metadata(file: IOBase) -> Metadata:
    """Return the metadata. Raises DamagedError for anything else."""
    try:
        metadata = _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f".metadata is not valid: {error}") from error
    if not isinstance(metadata, Metadata):
        raise DamagedError(f".metadata is a {type(metadata).__name__}")
    return metadata


class SafeReader(FileSystemReader):
    """torch's reader of checkpoint files, with the safe unpickler."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = load_metadata(file)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
