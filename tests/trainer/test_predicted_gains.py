"""The gain that the replay predicts for a repair equals the actual gain.

A real run of four ranks with temporary faults: their steps are replayed without the fault, and
compared with the healthy steps around them. Kernels are emulated by sleeping, but the machine needs
some idle CPU time, so this is only part of `make campaign`. `-s` shows a table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from paceline_server.steps.model import FinishedStep, StepModel
from paceline_server.steps.timing import StepTiming
from paceline_server.whatif.online import RunReplay
from paceline_wire.batch import SpanBlock
from paceline_wire.ring import GroupDefinition, RingReader
from paceline_wire.spans import to_columns
from paceline_wire.topology import Topology
from tests.ports import free_port

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]

TOPOLOGY = Topology(dp=2, pp=2, tp=1)
MICROBATCHES = 8
KERNELS_MS = "20,40"
PHASE_STEPS = 8
START_SECONDS, STEP_SECONDS = 90.0, 5.0  # upper limits
AGREEMENT = 0.05
DISTURBED = 1.2  # multiple of the typical step


class Fault(NamedTuple):
    name: str
    entry: dict[str, Any]  # entry of faults.json
    repair: dict[str, Any]  # arguments of `speedup`


def slow_rank(rank: int, factor: float) -> Fault:
    entry = {"kind": "slow_compute", "rank": rank, "factor": factor}
    return Fault(f"rank {rank} computes {factor}x as long", entry, {"ranks": [rank]})


FAULTS = [
    slow_rank(1, 1.15),
    slow_rank(2, 1.3),
    slow_rank(3, 1.5),
    slow_rank(0, 1.2),
    Fault(
        "each transfer between ranks 1 and 3 takes 30 ms longer",
        {"kind": "slow_link", "ranks": [1, 3], "seconds": 0.03},
        {"links": [(1, 3)]},
    ),
    Fault(
        "the data of rank 0 comes 150 ms late",
        {"kind": "slow_data", "rank": 0, "seconds": 0.15},
        {"excess_seconds": {0: 0.15}},
    ),
    Fault(
        "rank 2 collects garbage for 120 ms a step",
        {"kind": "gc", "rank": 2, "seconds": 0.12},
        {"excess_seconds": {2: 0.12}},
    ),
]


class Run:
    """A run of the trainer; `steps` are those in the rings at its end."""

    def __init__(self, directory: Path, *more: str) -> None:
        self.directory = directory
        self.model = StepModel(0, TOPOLOGY, {})
        self.readers: dict[int, RingReader] = {}
        self.finished: dict[int, FinishedStep] = {}
        self.port = free_port()
        arguments = {
            "--schedule": "1f1b",
            "--steps": 1_000_000,
            "--global-batch-size": MICROBATCHES * TOPOLOGY.dp,
            "--microbatch-size": 1,
            "--width": 16,
            "--sequence-length": 16,
            "--evaluate-every": 0,
            "--emulate-kernel-ms": KERNELS_MS,
        }
        self.arguments = [str(part) for option in arguments.items() for part in option] + [*more]

    @contextmanager
    def running(self) -> Iterator[None]:
        ranks = [self._start(rank) for rank in range(TOPOLOGY.world_size)]
        try:
            self._wait(0, START_SECONDS)
            yield
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
            for reader in self.readers.values():
                reader.close()

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": TOPOLOGY.world_size,
            "PACELINE_DP": TOPOLOGY.dp,
            "PACELINE_PP": TOPOLOGY.pp,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self.port,
            "PACELINE_RING_DIRECTORY": self.directory,
            "PACELINE_JOB": "local",
            "PACELINE_NODE_DIRECTORY": self.directory,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "paceline_trainer", *self.arguments],
            env=os.environ | {name: str(value) for name, value in place.items()},
            stderr=subprocess.DEVNULL,
        )

    def steps(self, count: int, fault: Fault | None = None) -> list[FinishedStep]:
        """Return this many steps with this fault, after all ranks have applied it."""
        path = self.directory / "faults.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps([] if fault is None else [fault.entry]))
        new.replace(path)
        first = max(self.finished, default=0) + 3  # faults are read at the start of each step
        self._wait(first + count - 1, STEP_SECONDS * count)
        return undisturbed([self.finished[step] for step in range(first, first + count)])

    def _wait(self, step: int, seconds: float) -> None:
        """Read the rings until this step is finished."""
        deadline = time.monotonic() + seconds
        while step not in self.finished:
            assert time.monotonic() < deadline, f"step {step} was not finished in {seconds} s"
            time.sleep(0.1)
            self._read()

    def _read(self) -> None:
        for rank in range(TOPOLOGY.world_size):
            path = self.directory / f"local.g0.r{rank}.ring"
            if rank not in self.readers:
                if not path.exists():
                    continue
                self.readers[rank] = RingReader(path)
                self.model.describe(self.readers[rank].identity.metadata)
            reader = self.readers[rank]
            for definition in reader.new_definitions():
                if isinstance(definition, GroupDefinition):
                    self.model.add_group(rank, definition)
            if records := reader.read():
                self.model.add(SpanBlock("local", 0, rank, to_columns(records), 0))
        for finished in self.model.take_finished():
            self.finished[finished.summary.step] = finished


def undisturbed(steps: list[FinishedStep]) -> list[FinishedStep]:
    """Return the steps that were not disturbed by other load on the machine."""
    usual = median(step.summary.duration_seconds for step in steps)
    return [step for step in steps if step.summary.duration_seconds < DISTURBED * usual]


def typical_seconds(steps: list[FinishedStep]) -> float:
    return median(step.summary.duration_seconds for step in steps)


def predicted(steps: list[FinishedStep], run: Run, repair: dict[str, Any]) -> float:
    timings: list[StepTiming] = [step.timing for step in steps]
    speedup = RunReplay(timings, TOPOLOGY, run.model.metadata).speedup(**repair)
    assert speedup is not None
    return speedup


def disagreement(name: str, predicted: float, measured: float) -> float:
    error = predicted / measured - 1
    print(f"  {name:<60} {measured:6.3f}x {predicted:6.3f}x {error:+7.1%}")
    return abs(error)


def test_a_repair_gives_the_predicted_gain(tmp_path: Path) -> None:
    run = Run(tmp_path, "--layers", "2")
    print(f"\n  {'fault':<60} measured  predicted   error")
    errors = []
    with run.running():
        before = run.steps(PHASE_STEPS)
        for fault in FAULTS:
            faulty = run.steps(PHASE_STEPS, fault)
            after = run.steps(PHASE_STEPS)
            measured = typical_seconds(faulty) / typical_seconds(before + after)
            assert measured > 1.05, f"{fault.name} costs nothing"
            errors.append(disagreement(fault.name, predicted(faulty, run, fault.repair), measured))
            before = after
    print(f"  {'median':<60} {median(errors):>23.1%}")
    assert median(errors) <= AGREEMENT


def test_even_stages_give_the_predicted_gain(tmp_path: Path) -> None:
    """Compares stages of two and four layers, which the replay makes equal, with three and
    three."""
    seconds = {}
    gains = {}
    for layers in ("2,4", "3,3"):
        directory = tmp_path / layers.replace(",", "-")
        directory.mkdir()
        run = Run(directory, "--layers", "6", "--stage-layers", layers)
        with run.running():
            steps = run.steps(PHASE_STEPS)
        seconds[layers] = typical_seconds(steps)
        gains[layers] = predicted(steps, run, {"stages": [0, 1]})
    measured = seconds["2,4"] / seconds["3,3"]
    assert disagreement("stages of 2 and 4 layers", gains["2,4"], measured) <= AGREEMENT
    assert gains["3,3"] == pytest.approx(1.0, abs=AGREEMENT)
