"""Trainings that call nothing of Paceline but `init`; each is recorded in a ring of its own.

Every scenario trains STEPS steps, whatever its loop looks like.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import hooks
from paceline_wire.spans import Op

STEPS = 6
ACCUMULATED = 4

features = torch.randn(STEPS * ACCUMULATED, 8)
directory = Path(sys.argv[1])


def loader(batches: int = STEPS, **options: Any) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(features[:batches]), batch_size=1, **options)


def model_of(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def plain() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in loader():
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()


def several_epochs() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for (batch,) in loader(STEPS // 2):
            model(batch).sum().backward()
            optimizer.step()


def accumulation() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (batch,) in enumerate(loader(STEPS * ACCUMULATED)):
        model(batch).sum().backward()
        if number % ACCUMULATED == ACCUMULATED - 1:
            optimizer.step()


def accumulation_in_steps() -> None:
    """The rows of the loader are microbatches, also for `paceline.steps`."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (batch,) in enumerate(paceline.steps(loader(STEPS * ACCUMULATED))):
        model(batch).sum().backward()
        if number % ACCUMULATED == ACCUMULATED - 1:
            optimizer.step()


def prefetched_accumulation() -> None:
    """As the HF Trainer does: all microbatches of a step are fetched before the first."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(loader(STEPS * ACCUMULATED))
    for _ in range(STEPS):
        for (batch,) in [next(batches) for _ in range(ACCUMULATED)]:
            model(batch).sum().backward()
        optimizer.step()


def without_loader() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        model(features[:2]).sum().backward()
        optimizer.step()


def one_batch_for_all() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (batch,) = next(iter(loader()))
    for _ in range(STEPS):
        model(batch).sum().backward()
        optimizer.step()


def adversarial(batches: Iterator[Any] | None = None) -> None:
    """Two optimizers per step."""
    generator, critic = model_of(), model_of()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (critic, generator)]
    for _ in range(STEPS):
        batch = next(batches)[0] if batches is not None else features[:1]
        critic(batch).sum().backward()
        optimizers[0].step()
        critic(generator(batch)).sum().backward()
        optimizers[1].step()


def critic_twice() -> None:
    """In no list: the first loops, which show what repeats, are several steps each."""
    generator, critic = model_of(), model_of()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (critic, generator)]
    for _ in range(3 + STEPS):
        for optimizer in (optimizers[0], optimizers[0], optimizers[1]):
            critic(generator(features[:1])).sum().backward()
            optimizer.step()


def actor_now_and_then() -> None:
    """In no list: the first loops, which show what repeats, are several steps each.

    The critic has an optimizer per layer; the actor learns after every fifth step of it.
    """
    actor, critic = model_of(), model_of(3)
    of_layers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in critic]
    of_actor = torch.optim.SGD(actor.parameters(), lr=0.01)
    for number in range(40):
        critic(features[:1]).sum().backward()
        for optimizer in of_layers:
            optimizer.step()
        if number % 5 == 4:
            actor(features[:1]).sum().backward()
            of_actor.step()


def adversarial_with_loader() -> None:
    adversarial(iter(loader()))


def optimizer_in_backward() -> None:
    model = model_of(3)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for (batch,) in loader():
        model(batch).sum().backward()


def optimizer_in_backward_without_loader() -> None:
    model = model_of(3)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(
            lambda _, optimizer=optimizer: optimizer.step()
        )
    for _ in range(STEPS):
        model(features[:1]).sum().backward()


def skipped_by_the_scaler() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for number, (batch,) in enumerate(loader()):
        optimizer.zero_grad()
        factor = float("inf") if number in (1, 4) else 1.0
        scaler.scale(model(batch).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()


def closures() -> None:
    model = model_of()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for (batch,) in loader():

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def closures_without_loader() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        loss = model(features[:1]).sum()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)


def several_calls_per_step() -> None:
    """As DeepSpeed does: one call per group of parameters, and no backward pass in between."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(features[:1]).sum().backward()
        for _ in range(3):
            optimizer.step()


def evaluation_with_gradients_off() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (batch,) in enumerate(loader()):
        model(batch).sum().backward()
        optimizer.step()
        if number in (2, STEPS - 1):
            with torch.no_grad():
                for (other,) in loader(3):
                    model(other)


def evaluation_by_its_loader() -> None:
    """Gradients are switched off inside the loop only."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    validation = loader(3)
    for number, (batch,) in enumerate(loader()):
        model(batch).sum().backward()
        optimizer.step()
        if number in (2, STEPS - 1):
            predict(model, validation)


def evaluation_without_loader() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        if number == 3:
            model.eval()
            with torch.no_grad():
                model(features[:1])
            model.train()
        model(features[:1]).sum().backward()
        optimizer.step()


def trained_epochs(evaluate: Callable[[nn.Module, Any], None]) -> None:
    """Train two epochs, each followed by an evaluation with the batches that were trained on."""
    model, batches = model_of(), loader(STEPS // 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for (batch,) in batches:
            model(batch).sum().backward()
            optimizer.step()
        evaluate(model, batches)


def predict(model: nn.Module, batches: Any) -> None:
    """Switch gradients off inside the loop only, which reads the batches with gradients on."""
    for (batch,) in batches:
        with torch.no_grad():
            model(batch)


def evaluate(model: nn.Module, batches: Any) -> None:
    model.eval()
    predict(model, batches)
    model.train()


def evaluation_of_training_data() -> None:
    trained_epochs(evaluate)


def evaluation_of_training_data_in_a_block() -> None:
    trained_epochs(torch.no_grad()(evaluate))


def evaluation_of_training_data_by_batch() -> None:
    """As Ignite does: the module is switched for each batch."""

    def evaluate_by_batch(model: nn.Module, batches: Any) -> None:
        for (batch,) in batches:
            model.eval()
            with torch.no_grad():
                model(batch)
        model.train()

    trained_epochs(evaluate_by_batch)


def evaluation_of_training_data_in_training_mode() -> None:
    trained_epochs(torch.inference_mode()(predict))


def marked_evaluation_of_training_data() -> None:
    def marked(model: nn.Module, batches: Any) -> None:
        with paceline.evaluate():
            evaluate(model, batches)

    trained_epochs(marked)


def evaluation_without_return() -> None:
    """The module stays in `eval()` for the next epoch, as in many a script."""

    def evaluate_only(model: nn.Module, batches: Any) -> None:
        model.eval()
        predict(model, batches)

    trained_epochs(evaluate_only)


def trained_in_evaluation_mode() -> None:
    """As with frozen batch normalization."""
    model, batches = model_of(), loader(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS // 2):
        model.eval()
        for (batch,) in batches:
            model(batch).sum().backward()
            optimizer.step()


def read_without_gradients() -> None:
    """A prefetcher reads most batches without gradients, and they are trained on."""
    model, batches = model_of(), iter(loader())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        with torch.set_grad_enabled(number < 2):
            (batch,) = next(batches)
        model(batch).sum().backward()
        optimizer.step()


def frozen_teacher() -> None:
    """`eval()` in each step is no evaluation."""
    model, teacher = model_of(), model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in loader():
        teacher.eval()
        (model(batch) - teacher(batch).detach()).sum().backward()
        optimizer.step()


def two_loaders() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,), (other,) in zip(loader(), loader(), strict=True):
        model(batch + other).sum().backward()
        optimizer.step()


def saving() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (batch,) in enumerate(loader()):
        model(batch).sum().backward()
        optimizer.step()
        if number == 2:
            torch.save(model.state_dict(), directory / "model.pt")
        if number == 4:
            import torch.distributed.checkpoint as dcp  # noqa: PLC0415

            with warnings.catch_warnings(action="ignore"):
                dcp.save(model.state_dict(), checkpoint_id=directory / "dcp")


def own_calls() -> None:
    """Steps and phases that the script marks itself are not recorded again."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in loader():
        with paceline.step():
            with paceline.pipelining(Op.FORWARD, microbatch=0):
                loss = model(batch).sum()
            with paceline.pipelining(Op.BACKWARD, microbatch=0):
                loss.backward()
            with paceline.optimizer():
                optimizer.step()


def own_optimizer_in_steps() -> None:
    """No optimizer of torch: each iteration is a step."""
    model = model_of()
    for (batch,) in paceline.steps(loader()):
        model(batch).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad


def updated_by_hand() -> None:
    model = model_of()
    for (batch,) in loader():
        model(batch).sum().backward()
        descend(model)
        model.zero_grad()


def updated_by_hand_after_accumulation() -> None:
    model = model_of()
    for number, (batch,) in enumerate(loader(STEPS * ACCUMULATED)):
        model(batch).sum().backward()
        if number % ACCUMULATED == ACCUMULATED - 1:
            descend(model)
            model.zero_grad()


def updated_through_data() -> None:
    """No change of a tensor is counted by torch."""
    model = model_of()
    for _ in range(STEPS):
        model(features[:2]).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data -= 0.1 * parameter.grad.data
            parameter.grad.data.zero_()


def accumulated_without_loader() -> None:
    model = model_of()
    for _ in range(STEPS):
        for _ in range(ACCUMULATED):
            model(features[:2]).sum().backward()
        torch._foreach_add_(
            [parameter.data for parameter in model.parameters()],
            [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
            alpha=-0.1,
        )
        model.zero_grad(set_to_none=False)


class OwnOptimizer:
    """An optimizer that does not derive from torch's."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def step(self) -> None:
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.data = parameter.data - 0.1 * parameter.grad

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def own_optimizer() -> None:
    """Gradients are removed after the next batch is there. Each epoch has a loader of its own."""
    model = model_of()
    optimizer = OwnOptimizer(model.parameters())
    for epoch in [loader(STEPS // 2), loader(STEPS // 2)]:
        for (batch,) in epoch:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()


def adversarial_by_hand() -> None:
    """Two updates per batch."""
    generator, critic = model_of(), model_of()
    for (batch,) in loader():
        critic(batch).sum().backward()
        descend(critic)
        critic.zero_grad()
        critic(generator(batch)).sum().backward()
        descend(generator)
        generator.zero_grad()


def gradients_as_values() -> None:
    """`torch.autograd.grad` instead of `backward()`."""
    model = model_of()
    parameters = list(model.parameters())
    for (batch,) in loader():
        gradients = torch.autograd.grad(model(batch).sum(), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.1 * gradient


def replaced_parameters() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    for _ in range(STEPS):
        (gradient,) = torch.autograd.grad((features[:2] @ weight).sum(), [weight])
        weight = (weight - 0.1 * gradient).detach().requires_grad_()


def penalty_of_gradients() -> None:
    """`torch.autograd.grad` in a forward pass is no backward pass."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in loader():
        batch.requires_grad_()
        for _ in range(2):
            output = model(batch).square().sum()
            (gradient,) = torch.autograd.grad(output, [batch], create_graph=True)
        (output + gradient.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def without_warnings(scenario: Callable[[], None]) -> Callable[[], None]:
    """The compiler of torch calls functions of torch that are deprecated."""

    @wraps(scenario)
    def run() -> None:
        with warnings.catch_warnings(action="ignore"):
            scenario()

    return run


@without_warnings
def compiled_optimizer() -> None:
    """Takes 10 s or more, and so is in no list: the compiler is loaded."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(optimizer.step, backend="aot_eager")
    for (batch,) in loader():
        model(batch).sum().backward()
        step()
        optimizer.zero_grad()


def without_hooks(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return the optimizer's step without torch's hooks, as a replayed graph of a device is one."""
    step: Any = type(optimizer).step
    return partial(step.__wrapped__, optimizer)


def begins_left_out_of_the_second_training() -> None:
    """As in a compiled training step: torch.compile leaves out what is called before the step."""
    hooks_of_torch = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    for number in range(2):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS // 2):
            model(features[:2]).sum().backward()
            left_out = dict(hooks_of_torch)
            if number == 1:
                hooks_of_torch.clear()
            optimizer.step()
            hooks_of_torch.update(left_out)


def unhooked_optimizer_in_steps() -> None:
    """Accumulation, and a learning rate of 0 in the first step."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = without_hooks(optimizer)
    for number, (batch,) in enumerate(paceline.steps(loader(STEPS * ACCUMULATED))):
        model(batch).sum().backward()
        if number % ACCUMULATED == ACCUMULATED - 1:
            step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 0.1


def unhooked_after_two_steps() -> None:
    """The third step has the 4 backward passes that it takes to notice the change."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = without_hooks(optimizer)
    for number, (batch,) in enumerate(loader(STEPS + 3)):
        model(batch).sum().backward()
        (optimizer.step if number < 2 else step)()
        optimizer.zero_grad()


def unhooked_without_loader() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = without_hooks(optimizer)
    for _ in range(STEPS):
        for _ in range(ACCUMULATED):
            model(features[:2]).sum().backward()
        step()
        optimizer.zero_grad()


def replayed_after_two_steps() -> None:
    """As with a graph of the whole step on a device: batches are steps after 64 of them."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replayed = STEPS - 2 + 63
    for number, (batch,) in enumerate(DataLoader(TensorDataset(torch.randn(2 + replayed, 8)))):
        if number < 2:
            model(batch).sum().backward()
            optimizer.step()


def trained_without_a_trace() -> None:
    """Neither parameters nor gradients are visible: batches are steps after some."""
    weight = torch.randn(8, 8)
    for (batch,) in loader(STEPS + 7):
        gradient = torch.func.grad(lambda values, batch=batch: (batch @ values).sum())(weight)
        weight = weight - 0.1 * gradient


def optimizer_without_a_hash() -> None:
    class Comparable(torch.optim.SGD):
        def __eq__(self, other: object) -> bool:
            return self is other

    model = model_of()
    optimizer = Comparable(model.parameters(), lr=0.1)
    for (batch,) in loader():
        model(batch).sum().backward()
        optimizer.step()


# Those without an optimizer of torch are first: later ones find a class of them that was used.
SCENARIOS: list[Callable[[], None]] = [
    own_optimizer_in_steps,
    updated_by_hand,
    updated_by_hand_after_accumulation,
    updated_through_data,
    accumulated_without_loader,
    own_optimizer,
    adversarial_by_hand,
    gradients_as_values,
    replaced_parameters,
    trained_without_a_trace,
    plain,
    several_epochs,
    accumulation,
    accumulation_in_steps,
    prefetched_accumulation,
    without_loader,
    one_batch_for_all,
    several_calls_per_step,
    penalty_of_gradients,
    unhooked_optimizer_in_steps,
    unhooked_after_two_steps,
    unhooked_without_loader,
    replayed_after_two_steps,
    adversarial,
    adversarial_with_loader,
    # These optimizers are never freed, because hooks of their parameters hold them: from here on,
    # a scenario's optimizer is not the only one of its process.
    optimizer_in_backward,
    optimizer_in_backward_without_loader,
    skipped_by_the_scaler,
    closures,
    closures_without_loader,
    evaluation_with_gradients_off,
    evaluation_by_its_loader,
    evaluation_without_loader,
    evaluation_of_training_data,
    evaluation_of_training_data_in_a_block,
    evaluation_of_training_data_by_batch,
    evaluation_of_training_data_in_training_mode,
    marked_evaluation_of_training_data,
    evaluation_without_return,
    trained_in_evaluation_mode,
    read_without_gradients,
    frozen_teacher,
    two_loaders,
    saving,
    own_calls,
    begins_left_out_of_the_second_training,
    optimizer_without_a_hash,
]

if __name__ == "__main__":
    for scenario in [globals()[name] for name in sys.argv[2:]] or SCENARIOS:
        os.environ["PACELINE_JOB"] = scenario.__name__
        paceline.init()
        scenario()
        assert hooks._session is not None
        assert not hooks._session.recorder.failures, scenario.__name__
        paceline.finish()
        gc.collect()  # the next one has no optimizer but its own
