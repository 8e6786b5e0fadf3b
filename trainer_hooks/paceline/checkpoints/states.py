"""The whole state of a script: its parts under their names, as they are in a checkpoint.

The tensors of part `model` are `model.NAME`, as torch.distributed.checkpoint would name those of
`{"model": model.state_dict()}`; the rest of it is `model/rest`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from paceline.checkpoints.errors import CheckpointError, OtherRunError
from paceline.checkpoints.parts import (
    HAS_NAMES,
    LATE_PARTS,
    REMEDY,
    ModulePart,
    OptimizerPart,
    StatePart,
    unstorable_kind,
)
from paceline.checkpoints.storage import Checkpointer, Verified
from paceline.checkpoints.trees import decode, encode, leaves_of, put_together


def capture(parts: Mapping[str, StatePart]) -> dict[str, Tensor]:
    """Return the state of all parts. Raises CheckpointError if one cannot be stored."""
    state: dict[str, Tensor] = {}
    for name, part in parts.items():
        tensors, rest = part.capture()
        for key, tensor in tensors.items():
            if (kind := unstorable_kind(tensor)) is not None:
                raise CheckpointError(
                    f"{name}.{key} is a {kind}, which checkpoints do not store: leave it out of "
                    "the state, or keep it as another kind of tensor"
                )
        state |= {f"{name}.{key}": value for key, value in tensors.items()}
        state[_rest(name)] = encode(rest, name)
    return state


class _Plan(NamedTuple):
    """The contents to load, by the names of parts."""

    rests: dict[str, Any]
    targets: dict[str, dict[str, Tensor]]
    into: dict[str, Tensor]  # by the stored name


class StoredState:
    """The state in a checkpoint, as this rank loads it. All ranks make the same calls."""

    def __init__(self, checkpointer: Checkpointer, found: Verified) -> None:
        self._checkpointer = checkpointer
        self._found = found
        self._rank = checkpointer.peers.rank
        self.is_of_same_ranks = found.world_size == checkpointer.peers.size

    def tree(self, name: str) -> Any:
        """Return the state of a part of this rank; with another number of ranks, of rank 0."""
        names = self._rest_names(name)[:1]
        (rest,) = self._read_rests({name: names})[name]
        stored = {key: f"{name}.{key}" for key in leaves_of(rest)}
        if self.is_of_same_ranks:
            stored = {k: self._found.stored_name(v, self._rank) or v for k, v in stored.items()}
        tensors = {key: self._empty(each) for key, each in stored.items()}
        self._checkpointer.read(self._found, {stored[k]: v for k, v in tensors.items()})
        return put_together(rest, lambda leaf: tensors[leaf.name])

    def restore(self, parts: Mapping[str, StatePart]) -> set[str]:
        """Load the parts. Return the names of those that were loaded.

        Parts that belong to a rank are left out if there is another number of ranks.

        Raises:
            OtherRunError: a part does not fit what was saved.
            CheckpointError: it cannot be loaded with this number of ranks.
        """
        wanted = self._wanted(parts)
        plan = self._plan(wanted)
        self._refuse_missing(wanted, plan.rests)
        self._refuse_unused(wanted, plan.targets)
        self._checkpointer.read(self._found, plan.into)
        for name, part in wanted.items():
            try:
                part.restore(plan.targets[name], plan.rests[name])
            except (KeyError, RuntimeError, ValueError) as error:
                raise OtherRunError(
                    f"the state {name!r} in {self._found.path} does not fit: {error}: {REMEDY}"
                ) from error
        return set(wanted)

    def fits(self, parts: Mapping[str, StatePart], *, is_ready: bool) -> bool:
        """Return whether `restore` would load the parts; `is_ready`: of this rank."""
        wanted, plan = self._wanted(parts), None
        with suppress(CheckpointError, KeyError, RuntimeError, ValueError):
            plan = self._plan(wanted)
        # All ranks agree first: those that refuse parts compare them.
        if not all(self._checkpointer.peers.gather(plan is not None and is_ready)):
            return False
        assert plan is not None, "all ranks have one"
        try:
            self._refuse_missing(wanted, plan.rests)
            self._refuse_unused(wanted, plan.targets)
        except OtherRunError:
            return False
        return True

    def _wanted(self, parts: Mapping[str, StatePart]) -> dict[str, StatePart]:
        """Return the parts to load."""
        return {
            name: part for name, part in parts.items() if self.is_of_same_ranks or not part.is_local
        }

    def _plan(self, wanted: Mapping[str, StatePart]) -> _Plan:
        """Return what to read, and where. Raises OtherRunError if this rank's parts do not fit."""
        names = {name: self._rest_names(name) for name in wanted}
        for name, found in names.items():
            if not found:
                raise OtherRunError(
                    f"{self._found.path} has no state {name!r}; it has "
                    f"{', '.join(sorted(self._part_names()))}: {REMEDY}, without {name!r}"
                )
        rests = self._read_rests(names)
        whole = {
            name: found[0] if self.is_of_same_ranks else wanted[name].merge(found)
            for name, found in rests.items()
        }
        targets = {name: part.targets(whole[name]) for name, part in wanted.items()}
        trains = any(isinstance(part, OptimizerPart) for part in wanted.values())
        into = {
            self._stored_name(name, key, wanted[name], tensor, trains=trains): tensor
            for name, tensors in targets.items()
            for key, tensor in tensors.items()
        }
        return _Plan(whole, targets, into)

    def _refuse_missing(self, parts: Mapping[str, StatePart], rests: Mapping[str, Any]) -> None:
        """Raise OtherRunError if an optimizer lacks parameters that it had: not all would train."""
        own = {
            f"{name}.{key}"
            for name, part in parts.items()
            if isinstance(part, OptimizerPart)
            for key in part.missing(rests[name])
        }
        every = self._checkpointer.peers.gather(own)
        # With another number of ranks, a parameter may be one of another rank now.
        lost = set().union(*every) if self.is_of_same_ranks else own.intersection(*every)
        if lost:
            raise OtherRunError(
                f"{self._found.path} has a parameter {min(lost)}, and the optimizer here has none: "
                f"use the same one. {LATE_PARTS}"
            )

    def _refuse_unused(
        self, parts: Mapping[str, StatePart], targets: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Raise OtherRunError if a tensor of a module or optimizer was saved that no rank has."""
        unused = []
        for full in self._found.names():
            name, _, key = full.partition(".")
            if isinstance(parts.get(name), HAS_NAMES) and key not in targets[name]:
                unused.append(full)
        every = self._checkpointer.peers.gather(unused)
        if lost := set(unused).intersection(*every):
            raise OtherRunError(
                f"{self._found.path} has a tensor {min(lost)}, and this script has none: {REMEDY}"
            )

    def _part_names(self) -> set[str]:
        stored = self._found.metadata.state_dict_metadata
        return {name.partition("/")[0] for name in stored if "/rest" in name}

    def _rest_names(self, name: str) -> list[str]:
        """Return the stored names of a part's rest: this rank's, or those of all ranks."""
        if not self.is_of_same_ranks:
            return self._found.all_variants(_rest(name))
        own = self._found.stored_name(_rest(name), self._rank)
        return [] if own is None else [own]

    def _read_rests(self, names: Mapping[str, list[str]]) -> dict[str, list[Any]]:
        contents = {each: self._empty(each) for found in names.values() for each in found}
        self._checkpointer.read(self._found, contents)
        return {
            name: [decode(bytes(contents[each].tolist())) for each in found]
            for name, found in names.items()
        }

    def _empty(self, stored: str) -> Tensor:
        metadata = self._found.metadata.state_dict_metadata[stored]
        assert isinstance(metadata, TensorStorageMetadata), "only tensors are stored"
        return torch.empty(metadata.size, dtype=metadata.properties.dtype)

    def _stored_name(
        self, name: str, key: str, part: StatePart, tensor: Tensor, *, trains: bool
    ) -> str:
        """Return the stored name of a tensor, after checking that it fits.

        `trains`: an optimizer is loaded, too, whose states have the type of their parameters.
        """
        full, found = f"{name}.{key}", self._found
        if self.is_of_same_ranks:
            stored = found.stored_name(full, self._rank)
        else:
            variants = found.all_variants(full)
            if len(variants) > 1 and not (isinstance(part, ModulePart) and part.is_buffer(key)):
                raise CheckpointError(
                    f"{full} differs between the {found.world_size} ranks of {found.path}, so it "
                    f"cannot be loaded by {self._checkpointer.peers.size}: give the tensors of "
                    "each pipeline stage names of their own, or start as many ranks"
                )
            stored = variants[0] if variants else None
        metadata = None if stored is None else found.metadata.state_dict_metadata.get(stored)
        if stored is None or not isinstance(metadata, TensorStorageMetadata):
            raise OtherRunError(f"{found.path} has no tensor {full}: {REMEDY}")
        if metadata.size != tensor.size():
            raise OtherRunError(
                f"{full} has shape {list(metadata.size)} in {found.path}, and "
                f"{list(tensor.size())} here: {REMEDY}"
            )
        saved = metadata.properties.dtype
        if (
            trains
            and isinstance(part, ModulePart)
            and saved != tensor.dtype
            and not part.is_buffer(key)
        ):
            raise OtherRunError(
                f"{full} is {saved} in {found.path}, and {tensor.dtype} here: {REMEDY}"
            )
        return stored


def _rest(name: str) -> str:
    return f"{name}/rest"
