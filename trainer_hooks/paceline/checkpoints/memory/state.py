"""The state of a script in a copy, as this rank loads it: the counterpart of `StoredState`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.errors import CheckpointError, OtherRunError
from paceline.checkpoints.memory.file import CopyFile, local_of, sharding_of
from paceline.checkpoints.parts import (
    HAS_NAMES,
    LATE_PARTS,
    ModulePart,
    OptimizerPart,
    StatePart,
)
from paceline.checkpoints.trees import leaves_of, put_together


class MemoryState:
    """The state in a verified copy."""

    is_of_same_ranks = True

    def __init__(self, copy: CopyFile) -> None:
        self._copy = copy

    def tree(self, name: str) -> Any:
        """Return the state of a part without sharded tensors."""
        rest = self._copy.rest(name)
        tensors = {key: self._copy.tensor(f"{name}.{key}").clone() for key in leaves_of(rest)}
        return put_together(rest, lambda leaf: tensors[leaf.name])

    def unfit(
        self, parts: Mapping[str, StatePart], *, may_add_parameters: bool = False
    ) -> str | None:
        """Return why the copy cannot be loaded into these parts, before anything is changed.

        `may_add_parameters`: the script may still give an optimizer those that it lacks.
        """
        for name, part in parts.items():
            if name not in self._copy.part_names:
                return f"they have no state {name!r}"
            try:
                rest = self._copy.rest(name)
                targets = part.targets(rest)
            except (KeyError, RuntimeError, ValueError, CheckpointError) as error:
                return f"the state {name!r} does not fit: {error}"
            differences = (self._compare(name, *each) for each in targets.items())
            reason = next(filter(None, differences), None)
            if not (may_add_parameters and isinstance(part, OptimizerPart)):
                reason = reason or self._unused(name, part, rest, targets)
            reason = reason or self._poison(name, part)
            if reason is not None:
                return reason
        return None

    def restore(self, parts: Mapping[str, StatePart]) -> set[str]:
        """Load the parts. Return their names.

        Raises OtherRunError if one lacks something, or refuses its state.
        """
        for name, part in parts.items():
            rest = self._copy.rest(name)
            targets = part.targets(rest)
            if (unused := self._unused(name, part, rest, targets)) is not None:
                raise OtherRunError(
                    f"the copies in memory do not fit: {unused}. {LATE_PARTS}. memory=False "
                    "continues from the checkpoint on disk"
                )
            with torch.no_grad():
                for key, tensor in targets.items():
                    local_of(tensor).copy_(self._copy.tensor(f"{name}.{key}"))
            try:
                part.restore(targets, rest)
            except (KeyError, RuntimeError, ValueError) as error:
                raise OtherRunError(
                    f"the state {name!r} in {self._copy.path} does not fit: {error}"
                ) from error
        return set(parts)

    def _compare(self, name: str, key: str, target: Tensor) -> str | None:
        """Return how a tensor differs from the one that was copied."""
        place = self._copy.places.get(f"{name}.{key}")
        if place is None:
            return f"they have no tensor {name}.{key}"
        local = local_of(target)
        here = (str(local.dtype).removeprefix("torch."), tuple(local.shape), sharding_of(target))
        there = (place.dtype, place.shape, place.sharding)
        if here != there:
            return f"{name}.{key} is {_described(*there)} there and {_described(*here)} here"
        return None

    def _unused(
        self, name: str, part: StatePart, rest: Any, targets: Mapping[str, Tensor]
    ) -> str | None:
        """Return the first parameter or tensor that was copied and has no place here."""
        if not isinstance(part, HAS_NAMES):
            return None
        if isinstance(part, OptimizerPart) and (missing := part.missing(rest)):
            return f"they have the parameter {name}.{missing[0]}, which is not here"
        for full in self._copy.places:
            key = full.removeprefix(f"{name}.")
            if key != full and key not in targets:
                return f"they have {full}, which is not here"
        return None

    def _poison(self, name: str, part: StatePart) -> str | None:
        """Return the first parameter or optimizer state that contains NaN."""
        if not isinstance(part, HAS_NAMES):
            return None
        parameters = None
        if isinstance(part, ModulePart):  # buffers may contain anything
            parameters = {parameter for _, parameter in part.parameter_names()}
        for full in self._copy.places:
            key = full.removeprefix(f"{name}.")
            if key != full and (parameters is None or key in parameters):
                tensor = self._copy.tensor(full)
                is_float = tensor.is_floating_point() and tensor.itemsize > 1
                if is_float and bool(tensor.isnan().any()):
                    return f"{full} contains NaN"
        return None


def _described(dtype: str, shape: tuple[int, ...], sharding: str | None) -> str:
    return f"{dtype} {list(shape)}" + ("" if sharding is None else f", sharded {sharding}")
