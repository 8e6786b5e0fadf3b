"""`paceline.Checkpoints` in a process alone: what it takes, and what it does when that fails."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import load
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim import lr_scheduler
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchdata.stateful_dataloader import StatefulDataLoader

import paceline
from paceline.checkpoints.errors import CheckpointError, OtherRunError
from paceline.checkpoints.layout import commit, read_manifest, saved_checkpoints
from paceline.checkpoints.parts import part_of
from paceline_wire.ring import RingReader
from tests import forked_python


class Script:
    """A training of one module, which is made again for each run."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = paceline.Checkpoints(
            directory, **{"every": 2, "model": self.model, "optimizer": self.optimizer} | options
        )
        self.seen: list[int] = []

    def train(self, batches: int, epochs: int = 1, stop_after: int | None = None) -> Script:
        for epoch in range(epochs):
            for number in paceline.steps(range(batches), state=self.state):
                self.model(torch.full((3,), float(number))).sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.seen.append(100 * epoch + number)
                if len(self.seen) == stop_after:
                    break
            if len(self.seen) == stop_after:
                break
        self.state.wait()
        return self


def test_a_run_resumes_after_its_last_checkpoint(tmp_path: Path) -> None:
    whole = Script(tmp_path / "whole").train(9)
    Script(tmp_path / "two").train(9, stop_after=6)  # step 6 is over only at the next batch
    second = Script(tmp_path / "two").train(9)
    assert second.state.resumed_step == 4
    assert second.seen == [4, 5, 6, 7, 8]
    assert torch.equal(second.model.weight, whole.model.weight)


def test_batches_are_counted_on_after_a_resume(tmp_path: Path) -> None:
    Script(tmp_path).train(5, stop_after=4)
    run = Script(tmp_path)
    counts = [run.state.batches for _ in paceline.steps(range(5), state=run.state)]
    assert counts == [3, 4, 5]
    assert [run.state.batches for _ in paceline.steps(range(2), state=run.state)] == [1, 2]


def test_completed_epochs_yield_nothing(tmp_path: Path) -> None:
    Script(tmp_path).train(4, epochs=3, stop_after=7)
    assert Script(tmp_path).train(4, epochs=3).seen == [102, 103, 200, 201, 202, 203]


def test_epochs_leave_out_those_that_were_completed(tmp_path: Path) -> None:
    Script(tmp_path).train(4, epochs=3, stop_after=7)
    script = Script(tmp_path)
    epochs = [
        (epoch, list(paceline.steps(range(4), state=script.state)))
        for epoch in script.state.epochs(3)
    ]
    assert epochs == [(1, [2, 3]), (2, [0, 1, 2, 3])]


def test_an_epoch_without_a_loop_keeps_its_number(tmp_path: Path) -> None:
    def run(stop_after: int) -> list[tuple[int, int]]:
        script, seen = Script(tmp_path, every=1), list[tuple[int, int]]()
        for epoch in script.state.epochs(4):
            if epoch == 1:
                continue
            for number in paceline.steps(range(3), state=script.state):
                seen.append((epoch, number))
                script.model(torch.ones(3)).sum().backward()
                script.optimizer.step()
                if len(seen) == stop_after:
                    script.state.wait()
                    return seen
        return seen

    assert run(8)[-1] == (3, 1)
    assert run(9) == [(3, 1), (3, 2)]


def test_two_loops_in_an_epoch_of_epochs_are_refused(tmp_path: Path) -> None:
    state = Script(tmp_path).state
    next(state.epochs(2))
    list(paceline.steps(range(3), state=state))
    with pytest.raises(ValueError, match=r"one loop .* per epoch"):
        list(paceline.steps(range(3), state=state))
    with pytest.raises(ValueError, match=r"some were before it"):
        next(state.epochs(2))


def test_steps_are_recorded_from_the_resumed_one_on(tmp_path: Path, reader: RingReader) -> None:
    Script(tmp_path / "saved").train(9, stop_after=6)
    assert (reader.view().saved_step, reader.view().can_checkpoint) == (4, True)
    paceline.finish()
    paceline.init()
    again = RingReader(reader.path)
    Script(tmp_path / "saved").train(7)
    assert (again.view().step, again.view().saved_step) == (7, 6)  # 7 began, without a batch
    again.close()


def test_checkpoints_stay_in_their_directory_if_the_script_changes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    script = Script(Path("saved"))
    monkeypatch.chdir("other")
    script.train(4)
    assert [saved.step for saved in saved_checkpoints(tmp_path / "saved")] == [4, 2]


def test_a_step_before_a_break_counts(tmp_path: Path) -> None:
    script = Script(tmp_path, every=0).train(9, stop_after=5)
    assert script.state.step == 5
    script.state.save()
    assert script.state.wait()
    again = Script(tmp_path).train(6)
    assert (again.state.resumed_step, again.seen) == (5, [5])


def test_a_save_is_not_left_out_because_of_a_break(tmp_path: Path) -> None:
    script = Script(tmp_path, every=4)
    for _ in range(2):
        script.seen = []
        script.train(9, stop_after=4)
    assert [saved.step for saved in saved_checkpoints(tmp_path)] == [4], "as the next loop began"
    again = Script(tmp_path)
    again.state.save()
    assert list(paceline.steps(range(2), state=again.state)) == []
    assert again.seen == []


def test_a_save_in_the_loop_contains_the_step_of_its_batch(tmp_path: Path) -> None:
    script = Script(tmp_path, every=1)
    for number in paceline.steps(range(9), state=script.state):
        script.model(torch.full((3,), float(number))).sum().backward()
        script.optimizer.step()
        script.optimizer.zero_grad()
        if number == 4:
            script.state.save()
            assert script.state.wait()
            weight = script.model.weight.detach().clone()
            break
    again = Script(tmp_path)
    assert list(paceline.steps(range(9), state=again.state)) == [5, 6, 7, 8]
    assert again.state.resumed_step == 5
    assert torch.equal(again.model.weight, weight)


def test_a_save_before_the_optimizer_step_leaves_no_step_out(tmp_path: Path) -> None:
    script = Script(tmp_path, every=0)
    for number in paceline.steps(range(5), state=script.state):
        if number == 2:
            script.state.save()
        script.model(torch.ones(3)).sum().backward()
        script.optimizer.step()
    assert script.state.wait()
    assert script.state.step == 5
    assert [saved.step for saved in saved_checkpoints(tmp_path)] == [2]


def test_a_save_while_gradients_are_accumulated_is_made_after_their_step(tmp_path: Path) -> None:
    def run(stop_after: int) -> list[Tensor]:
        script, seen = Script(tmp_path, every=0, memory=False), list[Tensor]()
        for _ in paceline.steps(range(12), state=script.state):
            seen.append(torch.rand(()))
            script.model(seen[-1].expand(3)).sum().backward()
            if script.state.batches % 4 == 0:
                script.optimizer.step()
                script.optimizer.zero_grad()
            if script.state.batches in (5, 7):
                script.state.save()
            if len(seen) == stop_after:
                break
        script.state.wait()
        return seen

    first = run(10)
    assert [saved.step for saved in saved_checkpoints(tmp_path)] == [2]
    assert torch.equal(torch.stack(run(12)[:2]), torch.stack(first[8:]))


def test_a_save_in_the_last_incomplete_step_of_an_epoch_is_made_after_it(tmp_path: Path) -> None:
    script = Script(tmp_path, every=0, memory=False)
    for _ in paceline.steps(range(6), state=script.state):
        script.model(torch.ones(3)).sum().backward()
        if script.state.batches % 4 == 0:
            script.optimizer.step()
        if script.state.batches == 6:
            script.state.save()
    script.state.wait()
    assert [saved.step for saved in saved_checkpoints(tmp_path)] == [1]


def test_batches_of_an_incomplete_step_are_taken_again(tmp_path: Path) -> None:
    script = Script(tmp_path, every=0)
    for number in paceline.steps(range(9), state=script.state):
        script.model(torch.ones(3)).sum().backward()
        if number == 2:
            script.optimizer.step()
        if number == 4:
            break
    script.state.save()
    script.state.wait()
    again = Script(tmp_path)
    assert list(paceline.steps(range(9), state=again.state)) == [3, 4, 5, 6, 7, 8]
    assert again.state.resumed_step == 1


def saved_epochs(
    state: paceline.Checkpoints, last: int, *, uses_epochs: bool = True
) -> Iterator[int]:
    """Yield up to four epochs, of which `last` is the last one; save after each."""
    for epoch in state.epochs(4) if uses_epochs else range(4):
        yield epoch
        state.save()
        if epoch == last:
            break
    state.wait()


def in_two_parts(run: Callable[[Path, int], list[Tensor]], directory: Path) -> Tensor:
    """Return what a run of four epochs has seen that was resumed after two."""
    return torch.stack(run(directory / "two", 1) + run(directory / "two", 3))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("uses_epochs", [True, False])
def test_what_the_script_does_between_epochs_is_not_repeated_after_a_save(
    tmp_path: Path, uses_epochs: bool
) -> None:
    def run(directory: Path, last: int) -> tuple[list[float], Tensor]:
        script, rates = Script(directory, every=0), list[float]()
        scheduler = torch.optim.lr_scheduler.StepLR(script.optimizer, 1, 0.5)
        state = paceline.Checkpoints(
            directory, every=0, model=script.model, optimizer=script.optimizer, scheduler=scheduler
        )
        for _ in saved_epochs(state, last, uses_epochs=uses_epochs):
            for number in paceline.steps(range(3), state=state):
                rates.append(script.optimizer.param_groups[0]["lr"])
                script.model(torch.full((3,), float(number))).sum().backward()
                script.optimizer.step()
                script.optimizer.zero_grad()
            scheduler.step()
        return rates, script.model.weight

    rates, weight = run(tmp_path / "whole", 3)
    first, _ = run(tmp_path / "two", 1)
    second, resumed = run(tmp_path / "two", 3)
    assert first + second == rates
    assert torch.equal(resumed, weight)
    repeated, loaded = run(tmp_path / "two", 3)
    assert repeated == [], "the run is complete"
    assert torch.equal(loaded, weight), "its state is loaded all the same"


@pytest.mark.parametrize("uses_epochs", [True, False])
def test_what_the_script_does_at_the_begin_of_an_epoch_outlives_a_save_before_it(
    tmp_path: Path, uses_epochs: bool
) -> None:
    def run(directory: Path, last: int) -> list[Tensor]:
        script, seen = Script(directory, every=0), list[Tensor]()
        state = script.state
        for epoch in saved_epochs(state, last, uses_epochs=uses_epochs):
            torch.manual_seed(epoch)
            for group in script.optimizer.param_groups:
                group["lr"] = 0.5**epoch
            for _ in paceline.steps(range(2), state=state):
                script.model(torch.rand(3)).sum().backward()
                script.optimizer.step()
                script.optimizer.zero_grad()
                seen.append(script.model.weight.detach().clone())
        return seen

    assert torch.equal(in_two_parts(run, tmp_path), torch.stack(run(tmp_path / "whole", 3)))


def test_a_group_that_is_added_at_the_begin_of_an_epoch_fits_a_save_before_it(
    tmp_path: Path,
) -> None:
    def run(directory: Path, last: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        optimizer = torch.optim.AdamW(model[1].parameters())
        state = paceline.Checkpoints(directory, every=0, model=model, optimizer=optimizer)
        for epoch in saved_epochs(state, last):
            if epoch >= 1 and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": model[0].parameters()})
            for _ in paceline.steps(range(2), state=state):
                model(torch.ones(3)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    run(tmp_path / "two", 1)
    assert torch.equal(run(tmp_path / "two", 3), run(tmp_path / "whole", 3))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata
@pytest.mark.parametrize("uses_epochs", [True, False])
@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.utils.data.DataLoader, {"has_generator": True}),
        (torch.utils.data.DataLoader, {"num_workers": 1, "persistent_workers": True}),
        (StatefulDataLoader, {}),
        (StatefulDataLoader, {"has_generator": True}),
        (StatefulDataLoader, {"num_workers": 1, "persistent_workers": True}),
    ],
)
def test_the_order_of_data_after_a_save_between_epochs_is_that_of_the_whole_run(
    tmp_path: Path, kind: Any, options: dict[str, Any], is_named: bool, uses_epochs: bool
) -> None:
    def run(directory: Path, last: int) -> list[Tensor]:
        torch.manual_seed(3)
        more = {name: value for name, value in options.items() if name != "has_generator"}
        if "has_generator" in options:
            more["generator"] = torch.Generator().manual_seed(4)
        loader, seen = kind(range(8), batch_size=2, shuffle=True, **more), list[Tensor]()
        named = {"loader": loader} if is_named else {}
        state = paceline.Checkpoints(directory, every=0, weight=torch.zeros(1), **named)
        for _ in saved_epochs(state, last, uses_epochs=uses_epochs):
            for batch in paceline.steps(loader, state=state):
                seen.append(torch.cat([batch, torch.rand(1)]))
        return seen

    assert torch.equal(in_two_parts(run, tmp_path), torch.stack(run(tmp_path / "whole", 3)))


@pytest.mark.parametrize("uses_epochs", [True, False])
@pytest.mark.parametrize("seeds", [[0, 1, 2, 3], [5, 5, 5, 5]])
def test_a_loader_that_the_script_seeds_in_each_epoch_keeps_its_seed(
    tmp_path: Path, uses_epochs: bool, seeds: list[int]
) -> None:
    def run(directory: Path, last: int) -> list[int]:
        seen, data = list[int](), range(8)
        state = paceline.Checkpoints(directory, every=0, weight=torch.zeros(1))
        for epoch in saved_epochs(state, last, uses_epochs=uses_epochs):
            loader: Any = torch.utils.data.DataLoader(
                data,  # type: ignore[arg-type]
                shuffle=True,
                generator=torch.Generator().manual_seed(seeds[epoch]),
            )
            seen += map(int, paceline.steps(loader, state=state))
        return seen

    whole = run(tmp_path / "whole", 3)
    assert run(tmp_path / "two", 1) + run(tmp_path / "two", 3) == whole


def test_a_save_before_the_state_is_loaded_saves_nothing(tmp_path: Path) -> None:
    """A checkpoint of step 0 would take precedence, because it is of a newer generation."""

    def train(epochs: int) -> Script:
        script = Script(tmp_path, every=0, memory=False)
        script.state.save()
        for _ in range(epochs):
            script.train(3)
            script.state.save()
        script.state.wait()
        return script

    train(2)
    before = saved_checkpoints(tmp_path)
    assert [each.step for each in before] == [6, 3, 0]
    again = train(2)
    assert (again.seen, again.state.step, again.state.resumed_step) == ([], 6, 6)
    assert saved_checkpoints(tmp_path) == before
    last = train(3)
    assert (last.seen, last.state.step, last.state.resumed_step) == ([0, 1, 2], 9, 6)


def test_a_request_to_stop_before_the_loop_is_not_lost(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.state.request_stop()
    for _ in paceline.steps(iter(int, 1), state=script.state):
        script.model(torch.ones(3)).sum().backward()
        script.optimizer.step()
    assert script.state.stopped
    assert saved_checkpoints(tmp_path)[0].step == script.state.step


def test_a_loop_in_a_loop_with_the_same_state_is_refused(tmp_path: Path) -> None:
    state = Script(tmp_path).state
    outer = iter(paceline.steps(range(3), state=state))
    next(outer)
    list(paceline.steps(range(2), state=state))
    with pytest.raises(CheckpointError, match="leave out `state` in the inner"):
        next(outer)


def test_gradients_of_an_interrupted_step_do_not_outlive_a_resume(tmp_path: Path) -> None:
    whole = Script(tmp_path / "whole").train(5)
    Script(tmp_path / "two").train(5, stop_after=3)
    second = Script(tmp_path / "two")
    second.model(torch.ones(3)).sum().backward()
    second.train(5)
    assert second.state.resumed_step == 2
    assert torch.equal(second.model.weight, whole.model.weight)


def test_any_torch_tool_reads_a_checkpoint(tmp_path: Path) -> None:
    script = Script(tmp_path).train(3)
    path = tmp_path / saved_checkpoints(tmp_path)[0].name
    other = nn.Linear(3, 2)
    load({"model": other.state_dict()}, checkpoint_id=path)
    script.train(0)
    assert other.weight.shape == script.model.weight.shape
    assert not torch.equal(other.weight, nn.Linear(3, 2).weight)


class Counter:
    """An object with a state of its own."""

    def __init__(self) -> None:
        self.value: Any = {"count": 0, "sum": torch.zeros(2), "names": ["a", ("b", None)]}

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def test_objects_tensors_dicts_and_generators_are_restored(tmp_path: Path) -> None:
    def parts() -> dict[str, Any]:
        return {
            "counter": Counter(),
            "tensor": torch.zeros(3),
            "table": {"rows": torch.zeros(2), "epoch": 0},
            "generator": torch.Generator().manual_seed(0),
        }

    first = parts()
    first["counter"].value |= {"count": 5, "sum": torch.ones(2)}
    first["tensor"] += 7
    first["table"]["rows"] += 8
    first["table"]["epoch"] = 9
    torch.rand(3, generator=first["generator"])
    script = Script(tmp_path, **first).train(3)
    second = parts()
    rows = second["table"]["rows"]
    Script(tmp_path, **second).train(2)
    assert second["counter"].value["count"] == 5
    assert second["counter"].value["names"] == ["a", ("b", None)]
    assert second["counter"].value["sum"].tolist() == [1, 1]
    assert second["tensor"].tolist() == [7, 7, 7]
    assert rows.tolist() == [8, 8], "filled in place"
    assert second["table"]["epoch"] == 9
    assert second["generator"].get_state().equal(first["generator"].get_state())
    assert script.state.step == 3


def test_values_of_common_types_are_restored(tmp_path: Path) -> None:
    """Torch refuses to load them; a mean of losses is a number of numpy, for one."""

    def table(fill: int) -> dict[str, Any]:
        return {
            "best": np.float64(fill / 3),
            "rows": np.full((2, 3), fill, np.float32),
            "bits": np.full(3, fill > 0),
            "reversed": np.arange(fill + 3)[::-1],
            "names": np.array([str(fill)]),
            "losses": deque([0.5, np.float32(fill)], maxlen=4),
            "replay": deque([(np.full(2, fill), torch.full((2,), fill), fill)], maxlen=9),
            "large": [np.full(1 << 20, fill, np.uint8)],
            "counts": defaultdict(int, {"a": fill}),
            "seen": frozenset({fill}),
            "rest": (range(fill, 9), datetime(2026, 1, 1 + fill), timedelta(fill), Path(str(fill))),
        }

    first, counter = table(5), Counter()
    counter.value = table(5)
    assert Script(tmp_path, table=first, counter=counter).train(2).state.step == 2
    second, other = table(0), Counter()
    rows = second["rows"]
    assert Script(tmp_path, table=second, counter=other).train(2).state.resumed_step == 2
    assert rows.tolist() == [[5] * 3] * 2, "filled in place"
    for restored in (second, other.value):
        assert restored.keys() == first.keys()
        for name, value in first.items():
            assert type(restored[name]) is type(value)
            assert repr(restored[name]) == repr(value)
        assert restored["counts"]["b"] == 0
        assert restored["losses"].maxlen == 4
        assert restored["rows"].dtype == np.float32


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (random.Random(0).random, "an object that torch does not load safely"),
        (threading.Lock(), "an object that cannot be stored: cannot pickle '_thread.lock' object"),
        (lambda: 0, "an object that cannot be stored: Can't pickle"),
    ],
)
def test_a_dict_that_cannot_be_stored_is_refused_at_the_start(
    tmp_path: Path, value: object, reason: str
) -> None:
    with pytest.raises(TypeError, match=rf"'table' contains {reason}"):
        paceline.Checkpoints(tmp_path, table={"value": value})


def test_a_scheduler_whose_state_is_more_than_plain_dicts_is_restored(tmp_path: Path) -> None:
    def schedule(batches: int, stop_after: int | None = None) -> list[float]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        warm_up = lr_scheduler.ConstantLR(optimizer, factor=0.5)
        milestones = lr_scheduler.MultiStepLR(optimizer, [1, 1], gamma=0.1)  # it keeps a Counter
        scheduler = lr_scheduler.SequentialLR(optimizer, [warm_up, milestones], [4])
        script = Script(tmp_path, optimizer=optimizer, scheduler=scheduler)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        script.optimizer = optimizer
        script.train(batches, stop_after=stop_after)
        return scheduler.get_last_lr()

    schedule(7, stop_after=3)
    assert schedule(7) == pytest.approx([0.01])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile
@pytest.mark.parametrize(
    "wrap",
    [checkpoint_wrapper, partial(torch.compile, backend="eager")],
    ids=["activation checkpointing", "torch.compile"],
)
@pytest.mark.parametrize("wrapped_run", [0, 1])
def test_a_wrapper_that_only_one_run_has_changes_no_names(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module], wrapped_run: int
) -> None:
    plain = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    wrapped = nn.Sequential(nn.Linear(3, 2), wrap(nn.Linear(2, 2)))
    runs = [wrapped, plain] if wrapped_run == 0 else [plain, wrapped]
    moments = []
    for model in runs:
        optimizer = torch.optim.AdamW(model.parameters())
        state = paceline.Checkpoints(tmp_path, every=1, model=model, optimizer=optimizer)
        for _ in paceline.steps(range(1), state=state):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        assert state.wait()
        moments.append([optimizer.state[each]["exp_avg"] for each in model.parameters()])
    assert state.resumed_step == 1
    assert all(map(torch.equal, *moments))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fnuz], ids=str)
def test_tensors_of_rare_types_are_restored(tmp_path: Path, dtype: torch.dtype) -> None:
    content = torch.arange(16, dtype=torch.uint8)
    Script(tmp_path, values=content.view(dtype).clone()).train(3)
    restored = torch.zeros(16, dtype=torch.uint8).view(dtype)
    assert Script(tmp_path, values=restored).train(3).state.resumed_step == 2
    assert torch.equal(restored.view(torch.uint8), content)


def test_optimizer_states_keep_their_precision(tmp_path: Path) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.full(
                parameter.shape, 1 / 3, dtype=torch.float64
            )
        return optimizer

    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    first = paceline.Checkpoints(tmp_path, every=1, model=model, optimizer=optimizer_of(model))
    for _ in first.begin([]):
        pass
    first.save()
    assert first.wait()
    fresh = torch.optim.SGD(model.parameters(), momentum=0.9)
    second = paceline.Checkpoints(tmp_path, model=model, optimizer=fresh)
    second.begin([])
    buffer = fresh.state[model.weight]["momentum_buffer"]
    assert buffer.dtype == torch.float64
    assert buffer[0, 0].item() == 1 / 3


class Failing(Counter):
    def state_dict(self) -> Any:
        raise RuntimeError("the state is not there")


class Unsafe(Counter):
    def state_dict(self) -> Any:
        return {"function": print}


class Sparse(Counter):
    def state_dict(self) -> Any:
        return {"rows": torch.eye(3).to_sparse()}


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Failing(), "the state is not there"),
        (Unsafe(), "does not load safely"),
        (Sparse(), "part.rows is a torch.sparse_coo"),
    ],
)
def test_a_state_that_cannot_be_saved_is_reported_and_training_continues(
    tmp_path: Path,
    reader: RingReader,
    caplog: pytest.LogCaptureFixture,
    part: Counter,
    reason: str,
) -> None:
    script = Script(tmp_path / "saved", part=part).train(5)
    assert script.seen == [0, 1, 2, 3, 4]
    assert reader.view().failed_saves == 2
    assert reason in caplog.text
    assert saved_checkpoints(tmp_path / "saved") == []


def test_a_full_disk_stops_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = Script(tmp_path / "saved")
    (tmp_path / "saved" / "step-00000002.generation-00000001").touch()  # no directory can be made
    script.train(5)
    assert script.seen == [0, 1, 2, 3, 4]
    assert [saved.step for saved in saved_checkpoints(tmp_path / "saved")] == [4]
    errors = [record for record in caplog.records if record.name == "paceline.checkpoints.storage"]
    (error,) = [record for record in errors if record.levelno == logging.ERROR]
    assert "The checkpoint of step 2 was not committed" in error.getMessage()


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    Script(tmp_path).train(6)
    newest = tmp_path / saved_checkpoints(tmp_path)[0].name
    (file,) = newest.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert Script(tmp_path).train(6).state.resumed_step == 4


def test_a_loader_of_another_length_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(batch_size: int) -> None:
        script = Script(tmp_path, every=1)
        loader = torch.utils.data.DataLoader(range(12), batch_size)  # type: ignore[arg-type]
        for _ in paceline.steps(loader, state=script.state):
            script.model(torch.ones(3)).sum().backward()
            script.optimizer.step()
            if script.state.batches == 2:
                break
        script.state.wait()

    run(batch_size=2)
    run(batch_size=2)
    assert "The loader has" not in caplog.text
    run(batch_size=4)
    assert "The loader has 3 batches, and had 6 at step 1." in caplog.text


def test_a_checkpoint_that_was_copied_to_another_directory_is_continued(tmp_path: Path) -> None:
    for batches in (2, 4, 6):  # three generations
        Script(tmp_path / "first", keep=2).train(batches)
    for path in (tmp_path / "first").glob("step-*"):
        shutil.copytree(path, tmp_path / "second" / path.name)
    assert Script(tmp_path / "second", keep=2).train(9).state.resumed_step == 6
    assert Script(tmp_path / "second", keep=2).train(9).state.resumed_step == 8


def test_a_restart_that_finds_no_checkpoint_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Script(tmp_path / "first").train(1)
    assert "contains no checkpoint" not in caplog.text
    monkeypatch.setenv("PACELINE_SAVED_STEP", "40")
    Script(tmp_path / "second").train(1)
    assert f"has saved step 40, and {tmp_path / 'second'} contains no checkpoint" in caplog.text


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    Script(tmp_path).train(3)
    with pytest.raises(OtherRunError, match=r"model.weight has shape \[2, 3\] .* use another dir"):
        Script(tmp_path, model=nn.Linear(4, 2)).train(3)
    with pytest.raises(OtherRunError, match="has no state 'more'; it has model, optimizer"):
        Script(tmp_path, more=Counter()).train(3)


def test_a_job_that_is_refused_leaves_the_directory_to_the_one_that_trains(tmp_path: Path) -> None:
    first = Script(tmp_path).train(2)
    with pytest.raises(OtherRunError):
        Script(tmp_path, model=nn.Linear(4, 2)).train(3)
    first.state.step = 4
    first.state.save()
    assert first.state.wait()


def test_options_of_the_script_that_those_of_the_checkpoint_replace_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(kind: type[torch.optim.Optimizer], rate: float, **options: Any) -> list[str]:
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=rate, **options)  # type: ignore[call-arg]
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        caplog.clear()
        state = paceline.Checkpoints(
            tmp_path, every=2, model=model, optimizer=optimizer, scheduler=scheduler
        )
        for _ in paceline.steps(range(9), state=state):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            scheduler.step()
        state.wait()
        return [record.getMessage() for record in caplog.records if "differ" in record.msg]

    assert run(torch.optim.AdamW, 0.1, weight_decay=0.1) == []
    assert run(torch.optim.AdamW, 0.1, weight_decay=0.1) == [], "the scheduler has changed the rate"
    (message,) = run(torch.optim.Adam, 0.2, weight_decay=0.1)
    assert ": decoupled_weight_decay is True and not False, initial_lr is 0.1 and not 0.2. " in (
        message
    )


def test_a_lazy_model_is_refused_before_it_has_seen_a_batch(tmp_path: Path) -> None:
    def state_of(model: nn.Module) -> paceline.Checkpoints:
        return paceline.Checkpoints(tmp_path, model=model)

    with pytest.raises(ValueError, match=r"^model\.0\.weight has no shape before the first"):
        next(iter(paceline.steps(range(2), state=state_of(nn.Sequential(nn.LazyLinear(2))))))
    model = nn.Sequential(nn.LazyLinear(2))
    state = state_of(model)
    model(torch.ones(3))
    assert len(list(paceline.steps(range(2), state=state))) == 2


def test_parameters_of_another_type_are_refused_if_an_optimizer_has_states_of_them(
    tmp_path: Path,
) -> None:
    def run(dtype: torch.dtype, *, with_optimizer: bool) -> Tensor:
        model = nn.Linear(3, 2).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        parts: dict[str, Any] = {"optimizer": optimizer} if with_optimizer else {}
        state = paceline.Checkpoints(tmp_path / f"{len(parts)}", every=1, model=model, **parts)
        for _ in paceline.steps(range(2), state=state):
            model(torch.ones(3, dtype=dtype)).sum().backward()
            optimizer.step()
        state.wait()
        return model.weight.detach()

    run(torch.float32, with_optimizer=True)
    with pytest.raises(
        OtherRunError, match=r"model\.weight is torch\.float32 .* torch\.bfloat16 here"
    ):
        run(torch.bfloat16, with_optimizer=True)
    weight = run(torch.float32, with_optimizer=False)
    assert torch.equal(run(torch.bfloat16, with_optimizer=False), weight.bfloat16())


def test_a_checkpoint_with_more_than_the_script_has_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())

    def run(**options: Any) -> None:
        state = paceline.Checkpoints(tmp_path, every=1, **options)
        for _ in paceline.steps(range(2), state=state):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        state.wait()

    run(model=model, optimizer=optimizer)
    with pytest.raises(OtherRunError, match=r"has a tensor model.1.bias, and this script"):
        run(model=model[:1])
    with pytest.raises(OtherRunError, match=r"a parameter optimizer.1.bias, and the optimizer"):
        run(model=model, optimizer=torch.optim.AdamW(model[0].parameters()))
    with pytest.raises(OtherRunError, match="another kind of optimizer: SGD has the options"):
        run(model=model, optimizer=torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("memory", [False, True])
def test_a_group_that_was_added_while_the_script_trained_is_not_lost(
    tmp_path: Path, memory: bool
) -> None:
    """Plain SGD has no states of parameters, by whose tensors this would be noticed."""

    def run(stop_after: int, add_in: Callable[[int], bool]) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        state = paceline.Checkpoints(
            tmp_path, every=1, memory=memory, model=model, optimizer=optimizer
        )
        for epoch in state.epochs(5):
            if len(optimizer.param_groups) == 1 and add_in(epoch):
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.2})
            for _ in paceline.steps(range(2), state=state):
                model(torch.ones(3)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if epoch == stop_after:
                break
        state.wait()
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    run(3, lambda epoch: epoch == 2)
    with pytest.raises(OtherRunError, match=r"parameter optimizer.0.bias, .* add at a resume, too"):
        run(4, lambda epoch: epoch == 2)
    resumed = run(4, lambda epoch: epoch >= 2)
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert torch.equal(resumed, run(4, lambda epoch: epoch == 2))


def test_layers_that_a_resume_leaves_frozen_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(stop_after: int, thaw_in: Callable[[int], bool]) -> None:
        script = Script(tmp_path, every=1)
        script.model.bias.requires_grad = False
        for epoch in script.state.epochs(4):
            if thaw_in(epoch):
                script.model.bias.requires_grad = True
            for _ in paceline.steps(range(2), state=script.state):
                script.model(torch.ones(3)).sum().backward()
                script.optimizer.step()
            if epoch == stop_after:
                break
        script.state.wait()

    run(1, lambda epoch: epoch == 1)
    run(2, lambda epoch: epoch >= 1)
    assert "requires_grad" not in caplog.text
    run(3, lambda epoch: epoch == 1)
    assert "1 parameters are not frozen (requires_grad), and 2 were not at step 6" in caplog.text


def test_what_has_no_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="scheduler must be a module"):
        paceline.Checkpoints(tmp_path, scheduler=object())
    with pytest.raises(TypeError, match="got SystemRandom"):
        paceline.Checkpoints(tmp_path, order=random.SystemRandom())
    with pytest.raises(ValueError, match="every must be"):
        paceline.Checkpoints(tmp_path, every=-1)
    with pytest.raises(ValueError, match="Paceline's own"):
        paceline.Checkpoints(tmp_path, position=Counter())


def test_a_part_with_the_name_of_an_argument_is_refused(tmp_path: Path) -> None:
    queue: Any = torch.zeros(3)
    with pytest.raises(ValueError, match="of type Tensor: a part of the state needs another name"):
        paceline.Checkpoints(tmp_path, memory=queue)


def test_objects_in_a_dict_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizers = {"generator": torch.optim.SGD(model.parameters())}
    with pytest.raises(TypeError, match=r"'generator'\] is of type SGD: .* optimizers_generator"):
        paceline.Checkpoints(tmp_path, model=model, optimizers=optimizers)


def test_a_sparse_buffer_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].register_buffer("adjacency", torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match=r"0\.adjacency of model is a torch\.sparse_coo"):
        paceline.Checkpoints(tmp_path, model=model)
    model[0].register_buffer("adjacency", torch.eye(3).to_sparse(), persistent=False)
    paceline.Checkpoints(tmp_path, model=model)


def test_shards_without_a_mesh_are_refused() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        layer = nn.Linear(3, 2)
        model = nn.Sequential(FullyShardedDataParallel(layer, device_id=torch.device("cpu")))
        with pytest.raises(TypeError, match="model is a FullyShardedDataParallel without a device"):
            part_of("model", model, dict)
    finally:
        dist.destroy_process_group()


def test_an_evaluation_between_two_steps_changes_no_names(tmp_path: Path) -> None:
    """FSDP2's root uses other parameters from a forward pass to the next backward pass."""

    def train() -> int | None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters())
        state = paceline.Checkpoints(tmp_path, every=1, optimizer=optimizer, model=model)
        for _ in paceline.steps(range(2), state=state):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.ones(3))
        state.wait()
        return state.resumed_step

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert [train(), train()] == [None, 2]
    finally:
        dist.destroy_process_group()


def test_a_script_that_shards_its_model_only_with_several_ranks_resumes_with_one_and_back(
    tmp_path: Path,
) -> None:
    def train(directory: Path, batches: int, *, shards: bool) -> tuple[int | None, list[float]]:
        torch.manual_seed(0)
        model: Any = nn.Linear(3, 2)
        if shards:
            fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters())
        state = paceline.Checkpoints(directory, every=1, optimizer=optimizer, model=model)
        for _ in paceline.steps(range(batches), state=state):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state.wait()
        weight = model.weight.full_tensor() if shards else model.weight
        return state.resumed_step, weight.flatten().tolist()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _, whole = train(tmp_path / "whole", 4, shards=False)
        assert train(tmp_path / "parts", 2, shards=False)[0] is None
        assert train(tmp_path / "parts", 3, shards=True)[0] == 2
        assert train(tmp_path / "parts", 4, shards=False) == (3, whole)
    finally:
        dist.destroy_process_group()


def test_generators_of_a_rank_are_not_loaded_by_another_number_of_ranks(tmp_path: Path) -> None:
    script = Script(tmp_path, every=1, order=random.Random(1), noise=torch.Generator())
    script.train(3)
    saved = saved_checkpoints(tmp_path)[0]
    manifest = read_manifest(tmp_path / saved.name)
    commit(tmp_path / saved.name, manifest | {"world_size": 2}, saved.generation)
    order, noise = random.Random(2), torch.Generator().manual_seed(2)
    again = Script(tmp_path, order=order, noise=noise).train(1)
    assert again.state.resumed_step == 3
    assert order.getstate() == random.Random(2).getstate()
    assert noise.initial_seed() == 2
    assert noise.get_state().equal(torch.Generator().manual_seed(2).get_state())


def test_a_state_that_no_loop_has_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    Script(tmp_path / "used").train(30)
    assert not caplog.messages
    script = Script(tmp_path / "unused")
    for _ in paceline.steps(range(30)):
        script.optimizer.step()
    (warning,) = caplog.messages
    assert "paceline.steps(loader, state=state)" in warning


class WarmUp:
    """A wrapper that is no optimizer of torch, as in many scripts."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class TwoPasses(torch.optim.Optimizer):
    """An optimizer with a step of its own, as of sharpness-aware minimization."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    def second_step(self) -> None:
        self.base.step()


@pytest.mark.parametrize("wrapper", [WarmUp, TwoPasses])
def test_the_steps_of_an_optimizer_in_another_object_are_counted(
    tmp_path: Path, wrapper: type[Any]
) -> None:
    model = nn.Linear(2, 2)
    optimizer = wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    state = paceline.Checkpoints(tmp_path, every=1, model=model, optimizer=optimizer)
    for number in paceline.steps(range(12), state=state):
        model(torch.ones(2)).sum().backward()
        if number % 4 == 3:
            getattr(optimizer, "second_step", optimizer.step)()
            model.zero_grad()
    assert state.step == 3


@pytest.mark.parametrize("batches", [255, 600])
def test_an_optimizer_that_never_steps_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batches: int
) -> None:
    state = Script(tmp_path).state
    assert len(list(paceline.steps(range(batches), state=state))) == batches
    assert caplog.text.count("has made no step in 256 batches") == (batches > 256)


def test_steps_refuse_what_is_no_state_and_two_ways_to_save(tmp_path: Path) -> None:
    wrong: Any = "/ckpt"
    with pytest.raises(TypeError, match=r"must be a paceline\.Checkpoints object, got '/ckpt'"):
        paceline.steps([], state=wrong)
    wrong = paceline.Checkpoints
    with pytest.raises(TypeError, match=r"must be a paceline\.Checkpoints object"):
        paceline.steps([], state=wrong)
    wrong = "/ckpt"
    with pytest.raises(TypeError, match="save must be a function"):
        paceline.steps([], save=wrong)
    with pytest.raises(ValueError, match="not both"):
        paceline.steps([], state=Script(tmp_path).state, save=print)


def test_a_directory_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(directory: Path) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("paceline.checkpoints.checkpoints.run_of", fail)
    with pytest.raises(CheckpointError, match=f"saved in {tmp_path}: No space left on device"):
        Script(tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"#!/bin/sh", b"\x7fELF\xff"])
def test_a_file_of_the_script_in_place_of_paceline_s_own_is_named(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "run"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path} is damaged, or not Paceline's"):
        Script(tmp_path)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_torch_cannot_load_is_refused(tmp_path: Path, persistent: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].register_buffer("position", torch.arange(3).expand(1, 3))
    expanded = torch.zeros(1).expand(3)
    model[0].register_buffer("mask", expanded, persistent=persistent)
    if not persistent:
        paceline.Checkpoints(tmp_path, model=model)
        return
    with pytest.raises(RuntimeError):
        model.load_state_dict({**model.state_dict(), "0.mask": torch.ones(3)})
    with pytest.raises(TypeError, match=r"0\.mask of model is an expanded tensor"):
        paceline.Checkpoints(tmp_path, model=model)


def test_a_directory_that_cannot_be_used_ends_the_script(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing" / "there")
    for name in ("file", "file/below", "link"):
        with pytest.raises(CheckpointError, match="name a directory that all ranks share"):
            paceline.Checkpoints(tmp_path / name, weight=torch.zeros(1))


def test_ranks_without_a_process_group_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="after torch"):
        paceline.Checkpoints(tmp_path, weight=torch.zeros(1))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_shuffled_batches_and_random_numbers_continue_as_if_never_interrupted(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    def run(directory: Path, stop_after: int | None = None) -> list[Tensor]:
        torch.manual_seed(3)
        weight, seen = torch.zeros(1), list[Tensor]()
        data: Any = range(12)
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, **options)
        state = paceline.Checkpoints(directory, every=1, weight=weight)
        for _ in range(2):
            for batch in paceline.steps(loader, state=state):
                seen.append(torch.cat([batch.float(), torch.rand(1)]))
                if len(seen) == stop_after:
                    state.wait()
                    return seen
        state.wait()
        return seen

    whole = run(tmp_path / "whole")
    first = run(tmp_path / "two", stop_after=9)
    second = run(tmp_path / "two")
    assert torch.equal(torch.stack(first[:8] + second), torch.stack(whole))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_inside_another_iterable_continues_if_it_is_part_of_the_state(
    tmp_path: Path, workers: int
) -> None:
    def run(directory: Path, stop_after: int) -> list[int]:
        weight, seen = torch.zeros(1), list[int]()
        data: Any = range(12)
        generator = torch.Generator().manual_seed(3)
        loader = torch.utils.data.DataLoader(
            data,
            shuffle=True,
            generator=generator,
            num_workers=workers,
            persistent_workers=workers > 0,
        )

        def numbers() -> Iterator[int]:
            yield from map(int, loader)

        state = paceline.Checkpoints(directory, every=1, weight=weight, loader=loader)
        for _ in range(2):
            for batch in paceline.steps(numbers(), state=state):
                seen.append(batch)
                if len(seen) == stop_after:
                    state.wait()
                    return seen
        return seen

    whole = run(tmp_path / "whole", 24)
    first = run(tmp_path / "two", 15)
    assert first[:14] + run(tmp_path / "two", 10) == whole


@pytest.mark.parametrize(
    ("wrap", "is_reported"),
    [
        (lambda loader: enumerate(zip(loader, range(9), strict=False)), True),
        (lambda loader: (each for each in loader), True),
        (iter, True),
        (lambda loader: (each for _ in range(1) for each in loader), False),
        (lambda loader: loader, False),
    ],
)
def test_a_loader_that_is_read_before_the_state_is_restored_is_reported(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    wrap: Callable[[Any], Any],
    is_reported: bool,
) -> None:
    data: Any = range(3)
    loader = torch.utils.data.DataLoader(data, num_workers=1)
    state = paceline.Checkpoints(tmp_path, weight=torch.zeros(1))
    assert len(list(paceline.steps(wrap(loader), state=state))) == 3
    assert ("has begun to read a DataLoader" in caplog.text) == is_reported


class StatefulLoader:
    """A loader that returns to its position by itself."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 12:
            self.position += 1
            yield self.position - 1

    def state_dict(self) -> Any:
        return {"position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("name", ["loader", "train_loader"])
def test_a_loader_with_a_state_of_its_own_skips_nothing_more(tmp_path: Path, name: str) -> None:
    def run(stop_after: int) -> list[int]:
        seen: list[int] = []
        loader = StatefulLoader()
        state = paceline.Checkpoints(tmp_path, every=1, weight=torch.zeros(1), **{name: loader})
        for number in paceline.steps(loader, state=state):
            seen.append(number)
            if len(seen) == stop_after:
                break
        state.wait()
        return seen

    assert run(5)[:4] + run(12) == list(range(12))


ACCELERATE = """
import sys, torch, accelerate, paceline

def run(directory, stop_after):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    loader = torch.utils.data.DataLoader(torch.randn(32, 9), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    state = paceline.Checkpoints(
        directory, every=1, model=model, optimizer=optimizer, loader=loader, scheduler=scheduler
    )
    seen = []
    for epoch in state.epochs(3):
        for batch in paceline.steps(loader, state=state):
            if state.step == stop_after:
                state.wait()
                return seen
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append((state.step, loss.item(), optimizer.param_groups[0]["lr"]))
    return seen

whole = run(sys.argv[1] + "/whole", None)
parts = run(sys.argv[1] + "/broken", 5) + run(sys.argv[1] + "/broken", None)
print(len(whole), [step for step, *_ in whole[:4]], parts == whole)
"""


def test_what_accelerate_prepares_is_resumed(tmp_path: Path) -> None:
    environment = os.environ | {"PACELINE_MEMORY_DIRECTORY": "", "PACELINE_RING_DIRECTORY": ""}
    ended = forked_python.run(["-c", ACCELERATE, tmp_path], environment, timeout=100)
    assert ended.stdout == "24 [0, 0, 1, 1] True\n", ended.stderr


SHARED_OUT = """
import sys, torch, paceline
from accelerate.data_loader import prepare_data_loader

directory, sampler, stop = sys.argv[1:]

def run(directory, stop_after):
    torch.manual_seed(3)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    loader = torch.utils.data.DataLoader(torch.arange(32.0)[:, None], batch_size=4, shuffle=True)
    loader = prepare_data_loader(
        loader,
        num_processes=2,
        process_index=1,
        use_seedable_sampler=sampler == "seedable",
        use_stateful_dataloader=sampler == "stateful",
    )
    is_within = stop in ("within", "after the last batch")
    named = {} if stop in ("within", "between") else {"loader": loader}
    state = paceline.Checkpoints(directory, every=0, model=model, optimizer=optimizer, **named)
    seen = []
    for epoch in state.epochs(4):
        for batch in paceline.steps(loader, state=state):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            seen.append((batch.flatten().tolist(), torch.rand(1).item()))
            if is_within and len(seen) == stop_after:
                state.save()
                state.wait()
                return seen
        if not is_within and len(seen) == stop_after:
            state.save()
            state.wait()
            return seen
    return seen

whole = run(directory + "/whole", None)
count = 10 if stop == "within" else 8
parts = run(directory + "/broken", count) + run(directory + "/broken", None)
print(len(whole), parts == whole)
"""


@pytest.mark.parametrize("sampler", ["random", "seedable", "stateful"])
@pytest.mark.parametrize("stop", ["within", "between", "named", "after the last batch"])
def test_what_accelerate_shares_out_among_ranks_continues_in_the_same_order(
    tmp_path: Path, sampler: str, stop: str
) -> None:
    environment = os.environ | {"PACELINE_MEMORY_DIRECTORY": "", "PACELINE_RING_DIRECTORY": ""}
    ended = forked_python.run(["-c", SHARED_OUT, tmp_path, sampler, stop], environment, timeout=100)
    assert ended.stdout == "16 True\n", ended.stderr


ENDED = """
import sys, time
import torch
from torch.distributed import HashStore, destroy_process_group, init_process_group
import paceline
from paceline.checkpoints import storage

write = storage.save
storage.save = lambda *args, **kwargs: (time.sleep(0.3), write(*args, **kwargs))
init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
state = paceline.Checkpoints(sys.argv[1], every=2, weight=torch.zeros(1))
if "loop" in sys.argv:
    list(paceline.steps(range(4), state=state))
else:
    state.save()
del state
def fail():
    raise OSError

paceline.requests.before_end(fail)
destroy_process_group()
assert not torch.distributed.is_initialized()
"""


@pytest.mark.parametrize(("how", "step"), [("loop", 4), ("alone", 0)])
def test_the_end_of_the_process_group_waits_for_the_last_save(
    tmp_path: Path, how: str, step: int
) -> None:
    environment = os.environ | {"PACELINE_MEMORY_DIRECTORY": "", "PACELINE_RING_DIRECTORY": ""}
    ended = forked_python.run(["-c", ENDED, tmp_path, how], environment, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert saved_checkpoints(tmp_path)[0].step == step, ended.stderr


@pytest.mark.parametrize("throws", [True, False])
def test_ranks_that_make_different_numbers_of_steps_are_refused(
    tmp_path: Path, throws: bool
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        state = paceline.Checkpoints(tmp_path, model=model, memory=False)
        with model.join(throw_on_early_termination=throws):
            batches = iter(paceline.steps(range(2), state=state))
            if throws:
                assert list(batches) == [0, 1]
            else:
                with pytest.raises(ValueError, match="different numbers of steps"):
                    next(batches)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("training", "expected"), [(2, 10), (120, 120), (None, 30)])
def test_a_save_waits_for_a_rank_as_long_as_the_training(
    tmp_path: Path, training: float | None, expected: float
) -> None:
    timeout = None if training is None else timedelta(minutes=training)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        group = paceline.Checkpoints(tmp_path, weight=torch.zeros(1))._checkpointer.peers.group
        assert group is not None
        options = group._get_backend(torch.device("cpu")).options
        assert options._timeout == timedelta(minutes=expected)
    finally:
        dist.destroy_process_group()
