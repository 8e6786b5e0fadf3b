"""Trainings that save by themselves and call nothing of Paceline but `init`.

Prints a JSON object per scenario: the checkpoints as the ring shows them after each of 6 steps, the
number of the first step, where the checkpoints are, and how many saves failed and why.
"""

from __future__ import annotations

import gc
import io
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline import hooks
from paceline_wire.ring import RingReader, StateView

STEPS = 6
directory = Path(sys.argv[1])
features = torch.randn(2, 8)


class Training:
    """A model, its optimizer and the steps that were trained."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        self.optimizer = kind(self.model.parameters(), lr=0.01)  # type: ignore[call-arg]
        self.seen: list[int | None] = []

    def step(self) -> None:
        self.model(features).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self) -> Iterator[int]:
        """Yield the number of completed steps after each one; then note what the ring shows."""
        for done in range(1, STEPS + 1):
            self.step()
            yield done
            self.seen.append(saved_step())

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def page() -> StateView:
    assert hooks._session is not None
    reader = RingReader(hooks._session.recorder.ring.path)
    view = reader.view()
    reader.close()
    return view


def saved_step() -> int | None:
    return page().saved_step


def complete() -> Training:
    run = Training()
    for done in run.steps():
        if done % 2 == 0:
            torch.save({**run.state(), "step": done}, directory / f"step-{done}.pt")
    return run


def in_a_file_object() -> Training:
    run = Training()
    for done in run.steps():
        if done == 3:
            with (directory / "last.pt").open("wb") as file:
                torch.save([run.state()], file)
    return run


def numbered_folders() -> Training:
    run = Training()
    for done in run.steps():
        folder = directory / f"step-{done}"
        folder.mkdir(exist_ok=True)
        torch.save(run.state(), folder / "model.pt")
    return run


def weights_only() -> Training:
    run = Training(torch.optim.SGD)
    for done in run.steps():
        if done == 4:
            torch.save(run.model.state_dict(), directory / "weights.pt")
    return run


def whole_model() -> Training:
    run = Training(torch.optim.SGD)
    for done in run.steps():
        if done == 4:
            torch.save(run.model, directory / "whole.pt")
    return run


def weights_beside_checkpoints() -> Training:
    """The weights for an evaluation are no checkpoint of a script that saves its optimizer."""
    run = Training()
    for done in run.steps():
        if done == 2:
            torch.save(run.state(), directory / "complete.pt")
        else:
            torch.save(run.model.state_dict(), directory / "weights.pt")
    return run


def several_files() -> Training:
    run = Training()
    for done in run.steps():
        if done == 5:
            torch.save(run.model.state_dict(), directory / "model.pt")
            torch.save(run.optimizer.state_dict(), directory / "optimizer.pt")
    return run


def no_checkpoints() -> Training:
    run = Training()
    for done in run.steps():
        torch.save({"loss": torch.tensor(1.0), "step": done}, directory / "metrics.pt")
        torch.save(torch.zeros(8, 8), directory / "attention.pt")
        torch.save([torch.zeros(3)] * 1000, directory / "predictions.pt")
        torch.save(run.state(), io.BytesIO())
        torch.save(run.model[0].state_dict(), directory / "a layer.pt")
    return run


def before_the_optimizer() -> Training:
    """A save at the start of a step does not contain that step."""
    run = Training()
    for done in range(1, STEPS + 1):
        run.model(features).sum().backward()
        if done == 4:
            torch.save(run.state(), directory / "early.pt")
        run.optimizer.step()
        run.seen.append(saved_step())
    return run


def at_the_end_of_each_epoch() -> Training:
    """The loader was asked for one more batch then."""
    run = Training()
    loader = DataLoader(range(2))  # type: ignore[arg-type]
    for epoch in range(3):
        for _ in loader:
            run.step()
            run.seen.append(saved_step())
        torch.save(run.state(), directory / f"epoch-{epoch}.pt")
    return run


def distributed_checkpoint() -> Training:
    run = Training()
    for done in run.steps():
        if done == 3:
            dcp.save(run.state(), checkpoint_id=directory / f"dcp-{done}")
    return run


class Everything:
    """An object of the script that torch.distributed.checkpoint calls for its state."""

    def __init__(self, run: Training) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        return self.run.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def stateful() -> Training:
    run = Training()
    for done in run.steps():
        if done == 3:
            dcp.save({"app": Everything(run)}, checkpoint_id=directory / "app")
    return run


def timed_by_the_script() -> Training:
    run = Training()
    for done in run.steps():
        if done == 3:
            with paceline.checkpoint():
                torch.save(run.state(), directory / "timed.pt")
    return run


def reported_by_the_script() -> Training:
    """Files of a script that reports its checkpoints itself are not counted."""
    run = Training()
    for done in run.steps():
        if done == 2:
            paceline.checkpoint_saved(done)
        torch.save(run.state(), directory / "part.pt")
    return run


def saved_on_command() -> Training:
    """`paceline.Checkpoints` and `should_checkpoint` declare that they report."""
    run = Training()
    paceline.declare(checkpoint=True)
    for _ in run.steps():
        torch.save(run.state(), directory / "other.pt")
    return run


def failed() -> Training:
    run = Training()
    for done in run.steps():
        if done == 3:
            try:
                torch.save(run.state(), directory / "missing folder" / "step.pt")
            except RuntimeError:
                continue
            raise AssertionError
    return run


class Unwritable:
    """Fails in the middle of a save, when the file is open already."""

    def __reduce__(self) -> Any:
        raise OSError(28, "No space left on device")


def overwritten() -> Training:
    """A save that fails destroys the complete checkpoint at its path."""
    run = Training()
    for done in run.steps():
        if done in (1, 2):
            torch.save(run.state(), directory / f"overwritten-{'ab'[done - 1]}.pt")
        elif done in (4, 6):
            try:
                place = directory / f"overwritten-{'ba'[done // 2 - 2]}.pt"
                torch.save({**run.state(), "then": Unwritable()}, place)
            except OSError:
                continue
            raise AssertionError
    return run


def renamed() -> Training:
    """A save to a temporary file that fails leaves the complete checkpoint as it was."""
    run = Training()
    temporary = directory / "renamed.tmp"
    for done in run.steps():
        if done == 2:
            torch.save(run.state(), temporary)
            temporary.rename(directory / "renamed.pt")
        elif done == 4:
            try:
                torch.save({**run.state(), "then": Unwritable()}, temporary)
            except OSError:
                continue
            raise AssertionError
    return run


def renamed_each_time() -> Training:
    """A directory that gets its name once it is complete."""
    run = Training()
    temporary = directory / "saving"
    for done in run.steps():
        dcp.save(run.state(), checkpoint_id=temporary)
        temporary.rename(directory / f"at-{done}")
    return run


def renamed_from_random_names() -> Training:
    run = Training()
    for _ in run.steps():
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as temporary:
            torch.save(run.state(), temporary)
        os.replace(temporary.name, directory / "latest.pt")
    return run


def resumed() -> Training:
    """The steps of a script that loads its checkpoint continue its count."""
    run = Training()
    saved = torch.load(directory / "step-6.pt")
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    for done in run.steps():
        if done == 2:
            torch.save(run.state(), directory / "step-8.pt")
    return run


def resumed_in_marked_steps() -> Training:
    """Steps that the script marks have its numbers."""
    run = Training()
    run.optimizer.load_state_dict(torch.load(directory / "step-6.pt")["optimizer"])
    for _ in paceline.steps(range(STEPS)):
        run.step()
        run.seen.append(saved_step())
    return run


SCENARIOS: list[Callable[[], Training]] = [
    complete,
    in_a_file_object,
    numbered_folders,
    weights_only,
    whole_model,
    weights_beside_checkpoints,
    several_files,
    no_checkpoints,
    before_the_optimizer,
    at_the_end_of_each_epoch,
    distributed_checkpoint,
    stateful,
    timed_by_the_script,
    reported_by_the_script,
    saved_on_command,
    failed,
    overwritten,
    renamed,
    renamed_each_time,
    renamed_from_random_names,
    resumed,
    resumed_in_marked_steps,
]

if __name__ == "__main__":
    for scenario in SCENARIOS:
        os.environ["PACELINE_JOB"] = scenario.__name__
        paceline.init()
        with warnings.catch_warnings(action="ignore"):
            seen = scenario().seen
        session = hooks._session
        assert session is not None
        assert not session.recorder.failures, scenario.__name__
        path = session._described.get("checkpoint_path")
        failures = [page().failed_saves, page().save_failure]
        paceline.finish()
        gc.collect()  # the next one has no optimizer but its own
        name = scenario.__name__
        print(json.dumps({"name": name, "seen": seen, "path": path, "failures": failures}))
