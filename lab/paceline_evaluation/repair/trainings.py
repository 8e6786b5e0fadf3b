"""The trainings of the repair arm, and the log of their steps."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from paceline_demo.cluster import GPUS_PER_NODE, free_port

SCRIPTS = Path(__file__).with_name("trainers")
WORLD = 4  # ranks of each training, on two nodes
LOCAL_RANKS = GPUS_PER_NODE
END_MARGIN_STEPS = 40
_UNINTERRUPTED_SECONDS = 600.0
_DCP = re.compile(r"step-(\d+)\.generation-(\d+)")
_HUGGING_FACE = re.compile(r"checkpoint-(\d+)")

assert WORLD % LOCAL_RANKS == 0


@dataclass(frozen=True, slots=True)
class Training:
    """A training: its script, its parallelism, and how it saves.

    Args:
        name: as in the report.
        axes: sizes of data, pipeline and tensor parallelism.
        script: file in SCRIPTS, and its arguments.
        preload: modules that are imported once per node.
        checkpoint_steps: steps between two checkpoints on disk; 0: Paceline's default interval.
            Only `train.py` saves at other steps than its own.
        pause_seconds: part of each step that takes the place of an accelerator's work.
        emulation: arguments that make its steps longer without a change of the result.
        has_manifests: whether its checkpoints are Paceline's.
        package: that it needs beside torch.
    """

    name: str
    axes: tuple[int, int, int]
    script: tuple[str, ...]
    preload: tuple[str, ...]
    checkpoint_steps: int = 20
    pause_seconds: float = 0.05
    emulation: tuple[str, ...] = ()
    has_manifests: bool = True
    package: str | None = None

    def command(self, *, is_emulated: bool = True) -> list[str]:
        """Return what each rank runs."""
        script, *arguments = self.script
        emulation = self.emulation if is_emulated else ()
        return [sys.executable, str(SCRIPTS / script), *arguments, *emulation]

    def committed(self, directory: Path) -> list[tuple[int, Path]]:
        """Return step and directory of each whole checkpoint, the best one last."""
        found = []
        for path in directory.glob("*"):
            if match := _DCP.fullmatch(path.name):
                if (path / "COMMITTED").exists():
                    found.append((int(match[2]), int(match[1]), path))
            elif (match := _HUGGING_FACE.fullmatch(path.name)) and (
                path / "trainer_state.json"
            ).exists():
                found.append((0, int(match[1]), path))
        return [(step, path) for _, step, path in sorted(found)]


_PLAIN = ("torch.distributed.fsdp", "torch.distributed.pipelining")
TRAININGS = (
    Training("ddp", (4, 1, 1), ("train.py", "ddp"), _PLAIN),
    Training("fsdp2", (4, 1, 1), ("train.py", "fsdp2"), _PLAIN),
    Training("pipelining", (1, 4, 1), ("train.py", "pipelining"), _PLAIN),
    Training(
        "hugging_face",
        (4, 1, 1),
        ("hugging_face.py",),
        ("transformers.trainer",),
        has_manifests=False,
        package="transformers",
    ),
    Training(
        "reference",
        (2, 2, 1),
        (
            *("reference.py", "--steps", "1000000", "--layers", "2", "--width", "32"),
            *("--global-batch-size", "8", "--checkpoint-every", "10", "--evaluate-every", "0"),
        ),
        ("paceline_trainer.train",),
        checkpoint_steps=10,
        pause_seconds=0.0,
        emulation=("--emulate-kernel-ms", "5,10"),
    ),
)


def available_trainings() -> tuple[tuple[Training, ...], tuple[str, ...]]:
    """Return the trainings that can run here, and a sentence for each that cannot."""
    missing = [
        training
        for training in TRAININGS
        if training.package and find_spec(training.package) is None
    ]
    skipped = tuple(f"{one.name}: the package {one.package} is not installed" for one in missing)
    return tuple(one for one in TRAININGS if one not in missing), skipped


class LoggedStep(NamedTuple):
    """A step that a rank finished."""

    pid: int
    completed: int  # number of completed steps, over all processes of the rank
    at_seconds: float  # time.monotonic()


class StepLog:
    """The finished steps of all ranks, read from their files as these grow."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._steps: list[list[LoggedStep]] = [[] for _ in range(WORLD)]
        self._offsets = [0] * WORLD

    def read(self) -> list[list[LoggedStep]]:
        """Return the steps of each rank, in the order in which they were finished."""
        for rank in range(WORLD):
            path = self.directory / f"steps.{rank}"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._offsets[rank])
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._offsets[rank] += len(whole)
            for line in whole.splitlines():
                pid, completed, at_ns = line.split()
                self._steps[rank].append(LoggedStep(int(pid), int(completed), int(at_ns) / 1e9))
        return self._steps

    def newest(self) -> int:
        """Return how many steps all ranks have completed; 0 before the first."""
        return min(steps[-1].completed if steps else 0 for steps in self.read())

    def pids(self) -> dict[int, int]:
        """Return the pid of the newest process of each rank that has finished a step."""
        return {rank: steps[-1].pid for rank, steps in enumerate(self.read()) if steps}

    def processes(self, rank: int, since_seconds: float = 0.0) -> list[int]:
        """Return the pids with which a rank has finished steps, oldest first."""
        steps = self.read()[rank]
        return list(dict.fromkeys(step.pid for step in steps if step.at_seconds >= since_seconds))

    def of_process(self, pids: Mapping[int, int]) -> list[list[LoggedStep]]:
        """Return the steps that these processes have finished, by rank."""
        return [
            [step for step in steps if step.pid == pids.get(rank)]
            for rank, steps in enumerate(self.read())
        ]

    def first_common(self, pids: Mapping[int, int]) -> LoggedStep | None:
        """Return the first step that all of these processes finished, at the time of the last."""
        firsts = [steps[0] if steps else None for steps in self.of_process(pids)]
        known = [step for step in firsts if step is not None]
        if len(known) < WORLD:
            return None
        return max(known, key=lambda step: step.at_seconds)

    def longest_pause(self, begin_seconds: float, end_seconds: float) -> float:
        """Return the longest time without a finished step of rank 0."""
        times = [
            step.at_seconds
            for step in self.read()[0]
            if begin_seconds <= step.at_seconds <= end_seconds
        ]
        edges = [begin_seconds, *times, end_seconds]
        return max(later - earlier for earlier, later in pairwise(edges))

    def step_seconds(self) -> float | None:
        """Return the median time between two steps of rank 0; None before the third step."""
        steps = self.read()[0]
        times = sorted(
            after.at_seconds - before.at_seconds
            for before, after in pairwise(steps)
            if after.pid == before.pid
        )
        return times[len(times) // 2] if times else None


def run_uninterrupted(
    training: Training, steps: int, directory: Path, environment: Mapping[str, str]
) -> Path | None:
    """Train so many steps without a fault, a pause or Paceline.

    Return the last checkpoint; None if it was not saved within _UNINTERRUPTED_SECONDS.
    """
    checkpoints = directory / "checkpoints"
    checkpoints.mkdir(parents=True)
    (directory / "end").write_text(str(steps))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1"),
        *("--nproc-per-node", str(WORLD), "--master-port", str(free_port(0))),
        *training.command(is_emulated=False)[1:],
    ]
    with (
        (directory / "log").open("w") as log,
        contextlib.suppress(subprocess.TimeoutExpired),
    ):
        subprocess.run(
            command,
            stdout=log,
            stderr=log,
            env={**environment, **plain_environment(training, checkpoints, directory)}
            | {"STEP_SECONDS": "0", "GLOO_SOCKET_IFNAME": "lo"},
            timeout=_UNINTERRUPTED_SECONDS,
            check=False,
        )
    return last_checkpoint(training, checkpoints, steps)


def plain_environment(training: Training, checkpoints: Path, orders: Path) -> dict[str, str]:
    """Return the variables of a training that Paceline neither starts nor records."""
    dp, pp, tp = (str(axis) for axis in training.axes)
    return {
        "ORDERS": str(orders),
        "STEP_SECONDS": str(training.pause_seconds),
        "CHECKPOINT_STEPS": str(training.checkpoint_steps),
        "PACELINE_CHECKPOINT_DIRECTORY": str(checkpoints),
        "PACELINE_RING_DIRECTORY": "",  # the hooks are inert
        "PACELINE_MEMORY_DIRECTORY": "",  # no copies in memory
        "PACELINE_DP": dp,
        "PACELINE_PP": pp,
        "PACELINE_TP": tp,
    }


def last_checkpoint(training: Training, checkpoints: Path, steps: int) -> Path | None:
    """Return the complete checkpoint of this step, or None if it does not exist."""
    found = [path for step, path in training.committed(checkpoints) if step == steps]
    return found[-1] if found else None


class StateComparison(NamedTuple):
    """Two checkpoints of one step, compared value by value."""

    values: int
    different: list[str]  # names of those that differ
    largest: float  # difference of two tensors, relative to the largest value of the tensor


def compare(one: Path, other: Path) -> StateComparison:
    """Compare two checkpoints.

    Raises:
        subprocess.CalledProcessError: one of them cannot be read.
    """
    command = [sys.executable, str(SCRIPTS / "compare.py"), str(one), str(other)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PACELINE": ""}
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return StateComparison(found["values"], found["different"], found["largest"])
