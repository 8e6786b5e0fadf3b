"""The state of a script, captured again and again for its copies in memory.

To ask torch for the state of a module takes about 50 us per parameter, most of what a copy would
cost. So what a module and an optimizer consist of is watched: as long as they have the same tensors
at the same addresses, their state is what it was, in these tensors. Other parts are asked each
time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.checkpoints.memory.file import local_of
from paceline.checkpoints.parts import Captured, ModulePart, OptimizerPart, StatePart
from paceline.checkpoints.trees import take_apart

# Name, type, shape and how it is spread: two states with equal keys have the same places in a file.
TensorKey: TypeAlias = tuple[object, ...]
_Trained: TypeAlias = ModulePart | OptimizerPart
_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


class Captures:
    """The state of all parts, as it was when it was last captured."""

    def __init__(self, parts: Mapping[str, StatePart]) -> None:
        self.parts = [CapturedPart(name, part) for name, part in parts.items()]
        self._modules = [each for each in self.parts if isinstance(each.part, ModulePart)]
        self._others = [each for each in self.parts if each not in self._modules]
        self.optimizers = [p.value for p in parts.values() if isinstance(p, OptimizerPart)]

    def capture(self) -> None:
        """Capture the state. Errors of the script's own objects are raised."""
        before = [module.version for module in self._modules]
        for module in self._modules:
            module.capture()
        # The states of optimizers go by the names of the modules' parameters.
        asks = [module.version for module in self._modules] != before
        for part in self._others:
            part.capture(asks=asks)

    @property
    def version(self) -> tuple[int, ...]:
        """A value that is another one once a module or optimizer may have other tensors."""
        return tuple(each.version for each in self.parts if isinstance(each.part, _Trained))

    @property
    def gpu(self) -> torch.device | None:
        """The first GPU that has a tensor of it."""
        every = (tensor for part in self.parts for tensor in part.locals)
        return next((tensor.device for tensor in every if tensor.is_cuda), None)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for part in self.parts for name, tensor in part.tensors.items()}

    @property
    def rests(self) -> dict[str, Any]:
        """The rest of each part by its name."""
        return {part.name: part.rest for part in self.parts}

    @property
    def key(self) -> list[list[TensorKey]]:
        return [part.key for part in self.parts]


class CapturedPart:
    """The state of one part. Its tensors are the live ones."""

    def __init__(self, name: str, part: StatePart) -> None:
        self.name = name
        self.version = 0  # increases if a tensor is another one or at another address
        self.tensors: dict[str, Tensor] = {}  # by full name
        self.locals: list[Tensor] = []  # what this rank has of each
        self.key: list[TensorKey] = []
        self.rest: Any = None
        self.part = part
        self._addresses: list[int] = []
        self._watch: _Watch | None = None

    def capture(self, *, asks: bool = False) -> None:
        """Capture the state; `asks`: from the part itself, even if nothing seems to have changed.

        Errors of the script's own objects are raised.
        """
        found = None if asks or self._watch is None else self._watch.rest_if_unchanged()
        if found is not None:
            self.rest = found.value
            return
        captured = self.part.capture()
        tensors = {f"{self.name}.{key}": value for key, value in captured.tensors.items()}
        locals_ = [local_of(tensor) for tensor in tensors.values()]
        key = [_key_of(name, tensor) for name, tensor in tensors.items()]
        addresses = [_address_of(tensor) for tensor in locals_]
        is_trained = isinstance(self.part, _Trained)  # the place is what counts for others
        if is_trained or (key, addresses) != (self.key, self._addresses):
            self.version += 1
            self.tensors, self.locals = tensors, locals_
            self.key, self._addresses = key, addresses
        self.rest = captured.rest
        self._watch = _watch(self.part, captured)


class _Rest(NamedTuple):
    value: Any


class _Watch(Protocol):
    """The objects that a captured state was made of."""

    def rest_if_unchanged(self) -> _Rest | None:
        """Return the rest of the state of now, if its tensors are the captured ones."""


def _watch(part: StatePart, captured: Captured) -> _Watch | None:
    """Return a watch of a part, or None if its state may be more than its tensors."""
    if isinstance(part, ModulePart):
        return _ModuleWatch.of(part.modules, captured)
    if isinstance(part, OptimizerPart):
        return _OptimizerWatch.of(part, captured)
    return None


class _WatchedTensor(NamedTuple):
    """A tensor in the dict of its owner."""

    owner: Mapping[Any, Any]
    name: object
    tensor: Tensor
    local: Tensor | None  # its part that this rank has; None if it is no DTensor
    address: int

    @classmethod
    def of(cls, owner: Mapping[Any, Any], name: object, tensor: Tensor) -> _WatchedTensor:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else None
        address = _address_of(tensor if local is None else local)
        return cls(owner, name, tensor, local, address)


def _are_unchanged(tensors: Sequence[_WatchedTensor]) -> bool:
    for owner, name, tensor, local, address in tensors:
        if owner.get(name) is not tensor:
            return False
        if local is None:
            if tensor.data_ptr() != address:
                return False
        elif tensor._local_tensor is not local or local.data_ptr() != address:
            return False
    return True


class _ModuleWatch:
    """The parameters and buffers of modules."""

    def __init__(self, modules: Sequence[nn.Module], tensors: Sequence[_WatchedTensor]) -> None:
        self._sizes = [(each, _sizes_of(each)) for each in modules]
        self._children = [
            (module._modules, name, child)
            for module in modules
            for name, child in module._modules.items()
        ]
        self._tensors = tensors

    @classmethod
    def of(cls, roots: Sequence[nn.Module], captured: Captured) -> _ModuleWatch | None:
        if captured.rest:  # such as a module's `get_extra_state`
            return None
        modules = list(dict.fromkeys(each for root in roots for each in root.modules()))
        if not all(_is_usual(each, nn.Module) for each in modules):
            return None
        tensors = [
            _WatchedTensor.of(owner, name, tensor)
            for module in modules
            for owner in (module._parameters, module._buffers)
            for name, tensor in owner.items()
            if tensor is not None and name not in module._non_persistent_buffers_set
        ]
        own = {_place_of(each.tensor) for each in tensors}
        if any(_place_of(tensor) not in own for tensor in captured.tensors.values()):
            return None  # a hook makes another tensor of it
        return cls(modules, tensors)

    def rest_if_unchanged(self) -> _Rest | None:
        same = all(_sizes_of(module) == sizes for module, sizes in self._sizes) and all(
            owner.get(name) is child for owner, name, child in self._children
        )
        return _Rest({}) if same and _are_unchanged(self._tensors) else None


def _sizes_of(module: nn.Module) -> tuple[int, int, int]:
    return len(module._modules), len(module._parameters), len(module._buffers)


class _OptimizerWatch:
    """The parameters of an optimizer and its states, if these are tensors."""

    def __init__(self, part: OptimizerPart, state: Any) -> None:
        """`state`: its part of the rest."""
        self._part = part
        self._names = list(part.parameters())
        self._state = state
        self._parameters = _parameters_of(part.groups())
        self._entries = [
            (values, len(values), parameter) for parameter, values in part.value.state.items()
        ]
        self._tensors = [
            _WatchedTensor.of(values, name, value)
            for values, _, _ in self._entries
            for name, value in values.items()
        ]

    @classmethod
    def of(cls, part: OptimizerPart, captured: Captured) -> _OptimizerWatch | None:
        optimizer, rest = part.value, captured.rest
        values = chain.from_iterable(state.values() for state in optimizer.state.values())
        has_hooks = any(vars(optimizer).get(name) for name in _HOOKS)
        if has_hooks or not _is_usual(optimizer, Optimizer):
            return None
        if rest.keys() != {"state", "groups"}:
            return None
        if not all(isinstance(value, Tensor) for value in values):
            return None
        watch = cls(part, rest["state"])
        found = watch.rest_if_unchanged()
        return watch if found is not None and found.value == rest else None

    def rest_if_unchanged(self) -> _Rest | None:
        optimizer, param_groups = self._part.value, self._part.groups()
        parameters = _parameters_of(param_groups)
        if (
            len(parameters) != len(self._parameters)
            or any(a is not b for a, b in zip(parameters, self._parameters, strict=True))
            or len(optimizer.state) != len(self._entries)
            or any(
                optimizer.state.get(parameter) is not values
                for values, _, parameter in self._entries
            )
            or any(len(values) != count for values, count, _ in self._entries)
            or not _are_unchanged(self._tensors)
        ):
            return None
        groups, first = [], 0
        for group in param_groups:
            end = first + len(group["params"])
            groups.append(group | {"params": self._names[first:end]})
            first = end
        tensors, rest = take_apart(groups)
        return None if tensors else _Rest({"state": self._state, "groups": rest})


def _is_usual(value: nn.Module | Optimizer, base: type[nn.Module | Optimizer]) -> bool:
    """Return whether the state of an object is what torch makes of it."""
    return type(value).state_dict is base.state_dict and "state_dict" not in vars(value)


def _parameters_of(groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    return [each for group in groups for each in group["params"]]


def _place_of(tensor: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    local = local_of(tensor)
    return _address_of(local), local.shape, local.dtype


def _address_of(tensor: Tensor) -> int:
    """Return the address of a tensor; 0 for a kind that has none, and that is not copied."""
    try:
        return tensor.data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _key_of(name: str, tensor: Tensor) -> TensorKey:
    if isinstance(tensor, DTensor):
        return name, tensor.dtype, tensor.shape, tensor.device_mesh, tensor.placements
    return name, tensor.dtype, tensor.shape
