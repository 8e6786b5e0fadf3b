"""States as torch.distributed.checkpoint stores them: tensors by name, and the rest as bytes.

A state is a tree of dicts, lists and tuples. Its tensors are stored one by one, so that sharded
ones can be read by another number of ranks, and so are arrays of numpy, except small ones in lists.
In the rest each of them is replaced by a `Leaf`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.checkpoints.errors import CheckpointError, DamagedError
from paceline.checkpoints.plain import array_as_plain, as_plain, as_tensor, from_plain

_PICKLE = b"\x80\x02"  # the start of protocol 2
_LEAF = "paceline.tensor"  # marks a leaf in the rest, which may contain only plain types
_LARGE_BYTES = 1 << 20  # arrays in a list below it are stored together: there may be thousands
# Most of a rest are numbers, those of random states: they take the shortest way.
_SCALARS = frozenset({int, float, str, bool, type(None)})
# Dicts of other types that torch loads safely.
_TABLES: tuple[type[dict[Any, Any]], ...] = (Counter, OrderedDict)


class Leaf(NamedTuple):
    """Where a tensor was in its tree."""

    name: str  # path of keys, joined by dots; unique in the tree
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_sharded: bool  # a DTensor; `shape` is that of the whole


def take_apart(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of a tree by name, and the rest."""
    tensors: dict[str, Tensor] = {}

    def take(value: Any, name: str, is_item: bool) -> Any:
        if type(value) in _SCALARS:
            return value
        if isinstance(value, Tensor):
            return leaf_of(value, name)
        if isinstance(value, Mapping):
            content = {k: take(each, _join(name, k), is_item) for k, each in value.items()}
            if type(value) is defaultdict:
                return as_plain(defaultdict(value.default_factory, content))
            return _as_table(value, content)
        if isinstance(value, list | tuple | deque):
            items = [
                each if type(each) in _SCALARS else take(each, _join(name, index), True)
                for index, each in enumerate(value)
            ]
            if isinstance(value, deque):
                return as_plain(deque(items, value.maxlen))
            return items if isinstance(value, list) else tuple(items)
        is_small = is_item and getattr(value, "nbytes", 0) < _LARGE_BYTES
        if not is_small and (array := as_tensor(value)) is not None:
            return array_as_plain(leaf_of(array, name))
        return as_plain(value)

    def leaf_of(tensor: Tensor, name: str) -> tuple[Any, ...]:
        while name in tensors:  # the keys 0 and "0"
            name += "'"
        tensors[name] = tensor
        return (_LEAF, name, tensor.dtype, tuple(tensor.shape), isinstance(tensor, DTensor))

    return tensors, take(tree, "", False)


def put_together(rest: Any, tensor_of: Callable[[Leaf], Tensor]) -> Any:
    """Return the tree with `tensor_of(leaf)` in the place of each tensor."""
    if isinstance(rest, tuple) and len(rest) == 5 and rest[0] == _LEAF:
        return tensor_of(Leaf(*rest[1:]))
    if isinstance(rest, dict):
        return _as_table(rest, {k: put_together(each, tensor_of) for k, each in rest.items()})
    if isinstance(rest, list | tuple):
        items = [put_together(each, tensor_of) for each in rest]
        return items if isinstance(rest, list) else from_plain(tuple(items))
    return rest


def leaves_of(rest: Any) -> dict[str, Leaf]:
    """Return the leaves of a rest by name."""
    found: dict[str, Leaf] = {}

    def note(leaf: Leaf) -> Tensor:
        found[leaf.name] = leaf
        return torch.empty(0)

    put_together(rest, note)
    return found


def serialize(rest: Any) -> bytes:
    """Return a rest as bytes, whatever it contains."""
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    return buffer.getvalue()


def serialize_plain(rest: Any) -> bytes:
    """Return a rest of plain types as bytes, in a tenth of the time of `serialize`."""
    return pickle.dumps(rest, protocol=2)  # that of torch.save


def is_decodable(content: bytes) -> bool:
    """Return whether `decode` reads these bytes. Some types need `serialize`."""
    try:
        decode(content)
    except DamagedError:
        return False
    return True


def refuse_if_unsafe(content: bytes, name: str) -> None:
    """Check the bytes of a rest.

    Raises CheckpointError if it contains objects that cannot be loaded without running their code.
    """
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except pickle.UnpicklingError as error:
        kind = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error))
        raise CheckpointError(
            f"the state of {name!r} contains an object that torch does not load safely: {kind} "
            "Leave it out of the state, or allow it with torch.serialization.add_safe_globals"
        ) from error


def encode(rest: Any, name: str) -> Tensor:
    """Return a rest as bytes.

    Raises CheckpointError if it contains objects that cannot be stored, or not be loaded without
    running their code.
    """
    try:
        content = serialize(rest)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"the state of {name!r} contains an object that cannot be stored: {error}. "
            "Leave it out of the state"
        ) from error
    refuse_if_unsafe(content, name)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def decode(content: bytes) -> Any:
    """Return a rest from its bytes. Raises DamagedError if they contain something else."""
    file = io.BytesIO(content)
    if content[:2] == _PICKLE:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:  # as torch.save writes it, without tensors
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/version", "3\n")
        file.seek(0)
    try:
        return torch.load(file, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise DamagedError(f"a state cannot be decoded: {error}") from error


def _as_table(like: Mapping[Any, Any], content: dict[Any, Any]) -> dict[Any, Any]:
    return next((kind(content) for kind in _TABLES if type(like) is kind), content)


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
