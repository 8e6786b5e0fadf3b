"""The parts of a state: each kind of object that can be saved, and how it is loaded.

Parameters go by their full names, also in optimizers. So a checkpoint can be loaded with another
data-parallel size, other pipeline stages or another tensor parallelism, as far as names stay the
same and tensors are DTensors.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from paceline.checkpoints.errors import CheckpointError, OtherRunError
from paceline.checkpoints.random_states import OwnGenerator
from paceline.checkpoints.trees import Leaf, encode, leaves_of, put_together, take_apart

_log = logging.getLogger(__name__)


class Captured(NamedTuple):
    """The state of a part: its tensors by name, and the rest."""

    tensors: Mapping[str, Tensor]
    rest: Any


class StatePart(Protocol):
    """An object whose state is saved."""

    is_local: bool  # its state belongs to a rank, and has no meaning for another number of ranks

    def capture(self) -> Captured:
        """Return the state. Its tensors may be the live ones."""

    def targets(self, rest: Any) -> dict[str, Tensor]:
        """Return the tensors to read into, by name. `rest` is what was saved."""

    def restore(self, tensors: Mapping[str, Tensor], rest: Any) -> None:
        """Load the state whose tensors were read."""

    def merge(self, rests: Sequence[Any]) -> Any:
        """Return one rest of those of all ranks, for another number of ranks."""


def _part_of_optimizer(
    optimizer: Optimizer, names_of: Callable[[], Mapping[int, str]]
) -> OptimizerPart:
    sharded = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if sharded is not None and isinstance(optimizer, sharded.ZeroRedundancyOptimizer):
        return ZeroOptimizerPart(optimizer, names_of)
    return OptimizerPart(optimizer, names_of)


def _optimizer_of(value: Any) -> Optimizer | None:
    """Return the optimizer that steps: a wrapper such as Accelerate's has none of torch's hooks."""
    while isinstance(value, Optimizer) and "_optimizer_step_post_hooks" not in vars(value):
        value = getattr(value, "optimizer", None)
    return value if isinstance(value, Optimizer) else None


def optimizers_of(value: Any) -> list[Optimizer]:
    """Return the optimizers whose steps may be those of a state: it, and those that it holds, as a
    scheduler or a wrapper of the script's own does."""
    held = (value, *getattr(value, "__dict__", {}).values())
    return [optimizer for each in held if (optimizer := _optimizer_of(each)) is not None]


def part_of(name: str, value: Any, names_of: Callable[[], Mapping[int, str]]) -> StatePart:
    """Return the part for an object.

    Args:
        name: of the argument.
        value: the object.
        names_of: returns the names of all parameters by `id`.

    Raises:
        TypeError: the object has no state, or one that torch cannot load.
    """
    modules = [value] if isinstance(value, nn.Module) else value
    is_sequence = isinstance(modules, list | tuple)
    if is_sequence and modules and all(isinstance(each, nn.Module) for each in modules):
        for module in modules:
            _refuse_expanded(name, module)
            _refuse_unstorable(name, module)
            _refuse_without_mesh(name, module)
        return ModulePart(modules)
    if (optimizer := _optimizer_of(value)) is not None:
        return _part_of_optimizer(optimizer, names_of)
    if isinstance(value, Tensor | torch.Generator):
        return TensorPart(value)
    if isinstance(value, MutableMapping):
        _refuse_objects(name, value)
        try:
            encode(take_apart(dict(value))[1], name)
        except CheckpointError as error:
            raise TypeError(str(error)) from error
        return DictPart(value)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return ObjectPart(value)
    if OwnGenerator.fits(value):
        return ObjectPart(OwnGenerator(value), is_local=True)
    raise TypeError(
        f"{name} must be a module, a list of modules, an optimizer, a tensor, a random generator, "
        "a dict (for numbers and lists), or have state_dict() and load_state_dict(); "
        f"got {type(value).__name__}"
    )


def _refuse_expanded(name: str, module: nn.Module) -> None:
    """Raise TypeError for a buffer whose elements share memory: torch saves and never loads it."""
    for full, buffer in _saved_buffers(module):
        is_strided = type(buffer) is Tensor and buffer.layout == torch.strided
        if is_strided and 0 in buffer.stride() and not buffer.is_contiguous():
            raise TypeError(
                f"the buffer {full} of {name} is an expanded tensor, which torch cannot load: "
                "register a .clone() of it, or give register_buffer persistent=False"
            )


def _refuse_unstorable(name: str, module: nn.Module) -> None:
    """Raise TypeError for a parameter or buffer of a kind that cannot be stored."""
    for full, tensor in chain(module.named_parameters(), _saved_buffers(module)):
        if (kind := unstorable_kind(tensor)) is not None:
            raise TypeError(
                f"{full} of {name} is a {kind}, which checkpoints do not store: give "
                "register_buffer persistent=False, or keep it as another kind of tensor"
            )


def _refuse_without_mesh(name: str, module: nn.Module) -> None:
    """Raise TypeError for FSDP1 without a mesh: its shards are no DTensors."""
    for each in module.modules():
        is_sharded = (
            isinstance(each, FullyShardedDataParallel)
            and each.sharding_strategy is not ShardingStrategy.NO_SHARD
        )
        if is_sharded and getattr(each, "_device_mesh", None) is None:
            raise TypeError(
                f"{name} is a FullyShardedDataParallel without a device mesh, whose shards "
                "checkpoints do not store: give it device_mesh=init_device_mesh(...), or use "
                "fully_shard"
            )


def _saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the full name and value of each buffer that is part of the module's state."""
    for path, owner in module.named_modules():
        for own, buffer in owner.named_buffers(recurse=False):
            if own not in owner._non_persistent_buffers_set:
                yield f"{path}.{own}" if path else own, buffer


def _refuse_objects(name: str, table: Mapping[Any, Any]) -> None:
    """Raise TypeError for a dict of objects such as optimizers, whose state is not in the dict."""
    for key, value in table.items():
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            raise TypeError(
                f"{name}[{key!r}] is of type {type(value).__name__}: a dict is for tensors, "
                "numbers and lists; save this object under a name of its own, such as "
                f"{name}_{key}"
            )


def unstorable_kind(tensor: Tensor) -> str | None:
    """Return what a tensor is, if its kind cannot be stored; None: it can."""
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    return str(tensor.dtype) if tensor.is_quantized else None


class _Base:
    is_local = False

    def merge(self, rests: Sequence[Any]) -> Any:
        return rests[0]


class ObjectPart(_Base):
    """Anything with `state_dict` and `load_state_dict`."""

    def __init__(self, value: Any, *, is_local: bool = False) -> None:
        self.value = value
        self.is_local = is_local

    def _state(self) -> Any:
        return self.value.state_dict()

    def capture(self) -> Captured:
        return Captured(*take_apart(self._state()))

    def targets(self, rest: Any) -> dict[str, Tensor]:
        leaves = leaves_of(rest)
        if not leaves:
            return {}
        sharded = any(leaf.is_sharded for leaf in leaves.values())
        current = take_apart(self._state())[0] if sharded else {}
        return {name: _empty_for(leaf, current.get(name)) for name, leaf in leaves.items()}

    def restore(self, tensors: Mapping[str, Tensor], rest: Any) -> None:
        self.value.load_state_dict(put_together(rest, lambda leaf: tensors[leaf.name]))


class DictPart(ObjectPart):
    """A dict, whose tensors are filled in place."""

    def _state(self) -> Any:
        return dict(self.value)

    def restore(self, tensors: Mapping[str, Tensor], rest: Any) -> None:
        current = take_apart(self._state())[0]

        def fill(leaf: Leaf) -> Tensor:
            tensor, own = tensors[leaf.name], current.get(leaf.name)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                return tensor
            with torch.no_grad():
                return own.copy_(tensor)

        state = put_together(rest, fill)
        self.value.clear()
        self.value.update(state)


class TensorPart(_Base):
    """A tensor, filled in place, or a random generator."""

    def __init__(self, value: Tensor | torch.Generator) -> None:
        self.value = value
        self.is_local = isinstance(value, torch.Generator)

    def _tensor(self) -> Tensor:
        return self.value if isinstance(self.value, Tensor) else self.value.get_state()

    def capture(self) -> Captured:
        return Captured({"value": self._tensor()}, None)

    def targets(self, rest: Any) -> dict[str, Tensor]:
        return {"value": torch.empty_like(self._tensor())}

    def restore(self, tensors: Mapping[str, Tensor], rest: Any) -> None:
        if isinstance(self.value, torch.Generator):
            self.value.set_state(tensors["value"])
        else:
            with torch.no_grad():
                self.value.copy_(tensors["value"])


class ModulePart(_Base):
    """A module, or the modules of this rank's pipeline stages. Tensors are read in place."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)

    def allows_uneven_steps(self) -> bool:
        """Return whether ranks may make different numbers of steps now: inside DDP's `join()`."""
        joined = (each for module in self.modules for each in module.modules())
        configs = (getattr(e, "_join_config", None) for e in joined if isinstance(e, Joinable))
        return any(each.enable and not each.throw_on_early_termination for each in configs if each)

    def uninitialized(self) -> str | None:
        """Return a parameter or buffer of a lazy module that has no shape yet, if there is one."""
        for module in self.modules:
            for name, tensor in chain(module.named_parameters(), module.named_buffers()):
                if is_lazy(tensor):
                    return name
        return None

    def _states(self) -> Iterator[tuple[nn.Module, dict[str, tuple[str, Any]]]]:
        """Yield each module with its entries: by stored name, the module's name and the value."""
        states = [get_model_state_dict(module) for module in self.modules]
        names = [name for state in states for name in state]
        collide = len(set(names)) < len(names)
        for index, (module, state) in enumerate(zip(self.modules, states, strict=True)):
            prefix = f"{index}." if collide else ""
            yield module, {f"{prefix}{name}": (name, value) for name, value in state.items()}

    def _entries(self) -> dict[str, Any]:
        return {name: value for _, state in self._states() for name, (_, value) in state.items()}

    def capture(self) -> Captured:
        entries = self._entries()
        tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
        return Captured(tensors, {k: v for k, v in entries.items() if k not in tensors})

    def targets(self, rest: Any) -> dict[str, Tensor]:
        return {k: v for k, v in self._entries().items() if isinstance(v, Tensor)}

    def restore(self, tensors: Mapping[str, Tensor], rest: Any) -> None:
        for module, state in self._states():
            content = {
                name: tensors[stored] if isinstance(value, Tensor) else rest[stored]
                for stored, (name, value) in state.items()
            }
            set_model_state_dict(module, content)
            module.zero_grad()  # the model may have outlived an interrupted step

    def merge(self, rests: Sequence[Any]) -> Any:
        return {name: value for rest in reversed(rests) for name, value in rest.items()}

    def is_buffer(self, stored: str) -> bool:
        """Return whether an entry is a buffer, which replicas may have with other content."""
        for module, state in self._states():
            if stored in state:
                name = state[stored][0]
                return all(name != full for full, _ in full_names(module))
        return False

    def parameter_names(self) -> Iterator[tuple[int, str]]:
        """Yield the `id` and full name of each parameter."""
        names = [name for module in self.modules for name, _ in full_names(module)]
        collide = len(set(names)) < len(names)
        for index, module in enumerate(self.modules):
            for name, parameter in full_names(module):
                yield id(parameter), f"{index}.{name}" if collide else name


class OptimizerPart(_Base):
    """An optimizer of torch. Its state goes by the names of the parameters."""

    def __init__(self, value: Optimizer, names_of: Callable[[], Mapping[int, str]]) -> None:
        self.value = value
        self._names_of = names_of

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of parameters, with their options of now."""
        groups: list[dict[str, Any]] = self.value.param_groups
        return groups

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name, in the order of their numbers in `state_dict`."""
        names = self._names_of()
        found: dict[str, Tensor] = {}
        for number, group in enumerate(self.groups()):
            for place, parameter in enumerate(group["params"]):
                found[names.get(id(parameter), f"group{number}.{place}")] = parameter
        return found

    def capture(self) -> Captured:
        # In this order: `parameters` takes the options of groups over from a sharded optimizer.
        names, state = list(self.parameters()), self.value.state_dict()
        tree = {
            "state": {names[number]: values for number, values in state["state"].items()},
            "groups": [
                group | {"params": [names[number] for number in group["params"]]}
                for group in state["param_groups"]
            ],
        }
        tree |= {k: v for k, v in state.items() if k not in ("state", "param_groups")}
        return Captured(*take_apart(tree))

    def targets(self, rest: Any) -> dict[str, Tensor]:
        self._refuse_other_kind(rest["groups"])
        parameters, found = self.parameters(), dict[str, Tensor]()
        for name, parameter in parameters.items():
            current = self.value.state.get(parameter, {})
            for leaf in leaves_of(rest["state"].get(name, {})).values():
                own = current.get(leaf.name.rpartition(".")[2])
                found[leaf.name] = _empty_for(leaf, own, parameter)
        rest = {key: value for key, value in rest.items() if key != "state"}
        return found | {leaf.name: _empty_for(leaf) for leaf in leaves_of(rest).values()}

    def missing(self, rest: Any) -> list[str]:
        """Return the parameters that it had when it was saved, and has not now."""
        own = self.parameters()
        return [name for group in rest["groups"] for name in group["params"] if name not in own]

    def _refuse_other_kind(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise OtherRunError for the options of another optimizer; a release may only add some."""
        saved = {option for group in groups for option in group}
        missing = self.value.defaults.keys() - saved
        unknown = saved.difference(*self.groups())
        if saved and missing and unknown:
            raise OtherRunError(
                f"the checkpoint is of another kind of optimizer: {type(self.value).__name__} has "
                f"the options {sorted(missing)}, which it lacks, and it has {sorted(unknown)}: "
                f"{REMEDY}"
            )

    def restore(self, tensors: Mapping[str, Tensor], rest: Any) -> None:
        parameters = self.parameters()
        numbers = {name: number for number, name in enumerate(parameters)}
        kept = rest | {"state": {k: v for k, v in rest["state"].items() if k in numbers}}
        tree = put_together(kept, lambda leaf: tensors[leaf.name])
        saved = {name: group for group in tree["groups"] for name in group["params"]}
        missing = [name for name in numbers if name not in saved]
        if missing:
            raise OtherRunError(f"the checkpoint has no optimizer state of {missing[0]}: {REMEDY}")
        state = self.value.state_dict()
        names = list(parameters)
        groups = [
            saved[names[group["params"][0]]] | {"params": group["params"]}
            if group["params"]
            else group
            for group in state["param_groups"]
        ]
        _warn_of_other_options(state["param_groups"], groups)
        others = {k: v for k, v in tree.items() if k not in ("state", "groups")}
        values = {numbers[name]: value for name, value in tree["state"].items()}
        self.value.load_state_dict({**others, "state": values, "param_groups": groups})
        # `load_state_dict` converts states to the parameter's type, which may be less precise.
        for name, value in tree["state"].items():
            own = self.value.state.get(parameters[name], {})
            for key, saved_value in value.items():
                loaded = own.get(key)
                if isinstance(loaded, Tensor) and loaded.dtype != saved_value.dtype:
                    own[key] = saved_value.to(loaded.device)

    def merge(self, rests: Sequence[Any]) -> Any:
        merged: dict[str, Any] = dict(rests[0])
        merged["groups"] = [group for rest in rests for group in rest["groups"]]
        merged["state"] = {k: v for rest in reversed(rests) for k, v in rest["state"].items()}
        return merged


class ZeroOptimizerPart(OptimizerPart):
    """A ZeroRedundancyOptimizer: the optimizer in it, of the parameters that this rank updates.

    The options of groups, such as the learning rate, are set at the outer one, which hands them on
    when it steps.
    """

    def __init__(self, outer: Any, names_of: Callable[[], Mapping[int, str]]) -> None:
        super().__init__(outer.optim, names_of)
        self._outer = outer

    def groups(self) -> list[dict[str, Any]]:
        groups = super().groups()
        _copy_options(self._outer.param_groups, groups)
        return groups

    def restore(self, tensors: Mapping[str, Tensor], rest: Any) -> None:
        super().restore(tensors, rest)
        _copy_options(self.value.param_groups, self._outer.param_groups)


# In the names of parameters: torch.compile, and activation checkpointing of a module.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
LATE_PARTS = (
    "What the script adds while it trains (add_param_group), it has to add at a resume, too, "
    "before paceline.steps"
)
REMEDY = "use another directory, or the same model and optimizer"
_CHANGED_BY_SCHEDULERS = ("lr", "momentum")  # `initial_lr` shows another learning rate
HAS_NAMES = (ModulePart, OptimizerPart)  # each tensor is one of this script's own


def _warn_of_other_options(
    own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Log which options of groups, as the script has set them, those of the checkpoint replace."""
    replaced = {
        f"{name} is {saved_group[name]!r} and not {value!r}"
        for own_group, saved_group in zip(own, saved, strict=True)
        for name, value in own_group.items()
        if name in saved_group
        and name not in _CHANGED_BY_SCHEDULERS
        and isinstance(value, bool | int | float)
        and isinstance(saved_group[name], bool | int | float)
        and value != saved_group[name]
    }
    if replaced:
        _log.warning(
            "The optimizer has the options of the checkpoint, which differ from those of the "
            "script: %s. To change one, set it in optimizer.param_groups in the loop.",
            ", ".join(sorted(replaced)),
        )


def _copy_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    for of, to in zip(source, target, strict=True):
        to.update({name: value for name, value in of.items() if name != "params"})


def full_names(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yield the parameters with their names in the original model, without wrappers."""
    wrapped = [
        (f"{name}.module." if name else "module.", f"{name}." if name else "")
        for name, each in module.named_modules()
        if isinstance(each, DistributedDataParallel)
    ]
    for name, parameter in module.named_parameters():
        for prefix, replacement in reversed(wrapped):
            if name.startswith(prefix):
                name = replacement + name.removeprefix(prefix)
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        yield name, parameter


def _empty_for(leaf: Leaf, *templates: Tensor | None) -> Tensor:
    """Return a tensor to read into: sharded, or not, like the first template of its shape."""
    if leaf.shape:  # a number, such as the one of steps, is never sharded
        for template in templates:
            if template is None or tuple(template.shape) != leaf.shape:
                continue
            if isinstance(template, DTensor):
                return torch.empty_like(template, dtype=leaf.dtype, requires_grad=False)
            return torch.empty(leaf.shape, dtype=leaf.dtype)
    if not leaf.is_sharded:
        return torch.empty(leaf.shape, dtype=leaf.dtype)
    raise CheckpointError(
        f"{leaf.name} of shape {list(leaf.shape)} was sharded, and nothing here shows how it is "
        "sharded now: create the state before `paceline.steps` begins"
    )
