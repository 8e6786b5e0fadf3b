"""A state that is captured again is what torch would return, also if it is not asked."""

from __future__ import annotations

import collections
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from paceline.checkpoints import parts as parts_module
from paceline.checkpoints.errors import DamagedError
from paceline.checkpoints.memory.captures import Captures
from paceline.checkpoints.parts import StatePart, part_of
from paceline.checkpoints.trees import decode, is_decodable, serialize_plain


class ExtraState(nn.Module):
    """A module whose state is more than its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = 0

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


class Training:
    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]
        self.step()

    def step(self) -> None:
        self.model(torch.randn(5, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parts(self) -> dict[str, StatePart]:
        def names() -> dict[int, str]:
            return {id(parameter): name for name, parameter in self.model.named_parameters()}

        return {
            "model": part_of("model", self.model, names),
            "optimizer": part_of("optimizer", self.optimizer, names),
        }


def assert_as_asked(captures: Captures, parts: dict[str, StatePart]) -> None:
    """Compare with a state that torch is asked for now."""
    captures.capture()
    asked = Captures(parts)
    asked.capture()
    assert captures.rests == asked.rests
    assert captures.key == asked.key
    for name, tensor in asked.tensors.items():
        assert torch.equal(captures.tensors[name], tensor), name
    for one, other in zip(captures.parts, asked.parts, strict=True):
        for own, local in zip(one.locals, other.locals, strict=True):
            assert own.data_ptr() == local.data_ptr()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules whose state torch was asked for."""
    modules: list[nn.Module] = []

    def get_model_state_dict(module: nn.Module) -> dict[str, Any]:
        modules.append(module)
        return original(module)

    original = parts_module.get_model_state_dict
    monkeypatch.setattr(parts_module, "get_model_state_dict", get_model_state_dict)
    return modules


def test_torch_is_not_asked_again_while_tensors_stay(asked: list[nn.Module]) -> None:
    training = Training()
    captures = Captures(training.parts())
    captures.capture()
    version = captures.version
    for step in range(3):
        training.step()
        training.optimizer.param_groups[0]["lr"] = step / 10
        captures.capture()
        assert captures.rests["optimizer"]["groups"][0]["lr"] == step / 10
    assert len(asked) == 1
    assert captures.version == version
    assert_as_asked(captures, training.parts())


def replace_parameter(training: Training) -> None:
    training.model[0].weight = nn.Parameter(torch.ones(8, 4))


def replace_data(training: Training) -> None:
    training.model[0].weight.data = torch.ones(8, 4)


def replace_buffer(training: Training) -> None:
    training.model[1].running_mean = torch.ones(8)


def add_module(training: Training) -> None:
    training.model.append(nn.Linear(4, 4))


def replace_module(training: Training) -> None:
    training.model[2] = nn.Linear(8, 4)


def add_parameter(training: Training) -> None:
    training.model[0].register_parameter("scale", nn.Parameter(torch.ones(1)))


def add_group(training: Training) -> None:
    training.model.append(nn.Linear(4, 4))
    training.optimizer.add_param_group({"params": list(training.model[3].parameters()), "lr": 9.0})


def add_state(training: Training) -> None:
    training.optimizer.state[training.model[0].weight]["average"] = torch.ones(2)


def replace_state(training: Training) -> None:
    training.optimizer.state[training.model[0].weight]["exp_avg"] = torch.ones(8, 4)


def load_state(training: Training) -> None:
    training.optimizer.load_state_dict(training.optimizer.state_dict())


def clear_state(training: Training) -> None:
    training.optimizer.state.clear()


def use_rate_tensor(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)


def count_in_state(training: Training) -> None:
    training.optimizer.state[training.model[0].weight]["count"] = 7


@pytest.mark.parametrize(
    "change",
    [
        *(replace_parameter, replace_data, replace_buffer, add_module, replace_module),
        *(add_parameter, add_group, add_state, replace_state, load_state, clear_state),
        *(use_rate_tensor, count_in_state),
    ],
)
def test_a_change_is_captured(change: Callable[[Training], None]) -> None:
    training = Training()
    captures = Captures(training.parts())
    captures.capture()
    change(training)
    assert_as_asked(captures, training.parts())
    captures.capture()
    assert_as_asked(captures, training.parts())


def test_numbers_in_the_state_of_an_optimizer_are_read_each_time() -> None:
    training = Training()
    state = training.optimizer.state[training.model[0].weight]
    state["count"] = 1
    captures = Captures(training.parts())
    captures.capture()
    state["count"] = 2
    assert_as_asked(captures, training.parts())


def test_extra_state_is_asked_for_each_time(asked: list[nn.Module]) -> None:
    module = ExtraState()
    captures = Captures({"model": part_of("model", module, dict)})
    for seen in range(3):
        module.seen = seen
        captures.capture()
        assert list(captures.rests["model"].values()) == [seen]
    assert len(asked) == 3


def test_a_module_with_a_hook_is_asked_each_time(asked: list[nn.Module]) -> None:
    module = nn.Linear(4, 4)

    def double(module: nn.Module, state: dict[str, Tensor], *_: object) -> None:
        state["weight"] = 2 * state["weight"]

    module._register_state_dict_hook(double)
    captures = Captures({"model": part_of("model", module, dict)})
    for _ in range(2):
        captures.capture()
        assert torch.equal(captures.tensors["model.weight"], 2 * module.weight)
        with torch.no_grad():
            module.weight.add_(1.0)
    assert len(asked) == 2


def test_a_module_with_a_state_of_its_own_is_asked_each_time(asked: list[nn.Module]) -> None:
    class Trainable(nn.Linear):
        """A module that saves only the parameters that are trained."""

        def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
            state = super().state_dict(*args, **options)
            return {k: v for k, v in state.items() if getattr(self, k).requires_grad}

    module = Trainable(4, 4)
    captures = Captures({"model": part_of("model", module, dict)})
    captures.capture()
    module.bias.requires_grad_(False)
    captures.capture()
    assert list(captures.tensors) == ["model.weight"]
    assert len(asked) == 2


@pytest.mark.parametrize("of_instance", [False, True])
def test_an_optimizer_with_a_state_of_its_own_is_asked_each_time(of_instance: bool) -> None:
    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**torch.optim.SGD.state_dict(self), "own": self.own}

    training = Training(torch.optim.SGD if of_instance else Own)
    if of_instance:
        training.optimizer.state_dict = partial(Own.state_dict, training.optimizer)  # type: ignore
    captures = Captures(training.parts())
    for number in range(3):
        training.optimizer.own = number  # type: ignore[attr-defined]
        captures.capture()
        assert captures.rests["optimizer"]["own"] == number


def test_the_version_stays_as_long_as_addresses_do() -> None:
    """A part that returns other tensors of the same memory each time is at the same place."""
    tensor = torch.zeros(4)
    generator = torch.Generator()
    captures = Captures(
        {
            "same": part_of("same", {"tensor": tensor}, dict),
            "other": part_of("other", generator, dict),
        }
    )
    versions = []
    for _ in range(3):
        captures.capture()
        versions.append([part.version for part in captures.parts])
    assert [same for same, _ in versions] == [1, 1, 1]
    assert len({other for _, other in versions}) == 3


def test_shards_are_watched(asked: list[nn.Module]) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        module = nn.Linear(4, 4)
        for name in ("weight", "bias"):
            full = getattr(module, name)
            shard = nn.Parameter(DTensor.from_local(full.detach(), mesh, [Replicate()]))
            setattr(module, name, shard)
        parts = {"model": part_of("model", module, dict)}
        captures = Captures(parts)
        captures.capture()
        captures.capture()
        assert len(asked) == 1
        module.weight._local_tensor = torch.ones(4, 4)
        captures.capture()
        assert captures.parts[0].locals[0].eq(1.0).all()
        assert len(asked) == 2
    finally:
        torch.distributed.destroy_process_group()


def test_plain_rests_are_decoded() -> None:
    rest = {
        "leaf": ("paceline.tensor", "a.b", torch.bfloat16, (2, 3), False),
        "bytes": bytes(range(256)),
        "random": (3, tuple(range(625)), None),
        "size": torch.Size([2]),
        "ordered": collections.OrderedDict(a=1.5),
        1: [True, None, -(1 << 70), "é"],
    }
    content = serialize_plain(rest)
    assert is_decodable(content)
    assert decode(content) == rest


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02", b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00lsq\x00\x85R."]
)
def test_damaged_or_hostile_rests_are_refused(content: bytes) -> None:
    assert not is_decodable(content)
    with pytest.raises(DamagedError):
        decode(content)


def test_a_tensor_in_an_object_needs_the_other_way() -> None:
    assert not is_decodable(serialize_plain({"tensor": torch.zeros(2)}))
