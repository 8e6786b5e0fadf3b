"""Copies in memory of two ranks that are killed: what the next start resumes from, and what not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.checkpoints.layout import run_of
from paceline.checkpoints.memory.directory import CopyDirectory, CopyName

PROGRAM = Path(__file__).with_name("copied_run.py")


@pytest.fixture(scope="module")
def trainings() -> Iterator[subprocess.Popen[str]]:
    """Start the process that runs trainings."""
    pipe = subprocess.PIPE
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


class CopiedJob:
    """Ranks with a node each, or all on one."""

    def __init__(self, trainings: subprocess.Popen[str], directory: Path, nodes: int) -> None:
        self.directory = directory
        self.nodes = nodes
        self._trainings = trainings

    def run(self, steps: int, world_size: int = 2) -> tuple[str | None, int | None]:
        """Train until `steps`, and be killed. Return the tier and step that ranks resumed from."""
        return self.results(steps, world_size)[:2]

    def weights(self, steps: int) -> str:
        return self.results(steps)[2]

    def results(self, steps: int, world_size: int = 2) -> tuple[str | None, int | None, str]:
        self.directory.mkdir(exist_ok=True)
        memory = [str(self.memory(rank)) for rank in range(world_size)]
        job = {"directory": str(self.directory), "steps": steps, "memory": memory}
        assert self._trainings.stdin is not None
        assert self._trainings.stdout is not None
        self._trainings.stdin.write(json.dumps(job) + "\n")
        self._trainings.stdin.flush()
        first, *others = json.loads(self._trainings.stdout.readline())
        assert "error" not in first, first["error"]
        assert others == [first] * (world_size - 1)
        return first["from"], first["step"], first["weights"]

    def memory(self, rank: int) -> Path:
        return self.directory / f"memory-{rank % self.nodes}"

    def copies(self, rank: int) -> CopyDirectory:
        run = run_of(self.directory / "checkpoints")
        return CopyDirectory(self.memory(rank), run)

    def newest(self, rank: int) -> Path:
        """Return the newest copy of a rank on its node."""
        directory = self.copies(rank)
        return directory.file(max(name for name in directory.copies() if name.rank == rank))


Open = Callable[[int], CopiedJob]


@pytest.fixture
def job(trainings: subprocess.Popen[str], tmp_path: Path) -> Open:
    """Return a function that opens a job on a number of nodes."""
    return lambda nodes: CopiedJob(trainings, tmp_path, nodes)


def flip(path: Path, position: int = 20_000) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_killed_ranks_resume_from_the_memory_of_their_node(
    job: Open, trainings: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert job(1).run(8) == (None, None)
    tier, step, weights = job(1).results(12)
    assert (tier, step) == ("memory", 8)
    assert weights == CopiedJob(trainings, tmp_path / "whole", 1).weights(12)


def test_a_lost_node_is_restored_from_the_other_one(job: Open) -> None:
    job(2).run(8)
    shutil.rmtree(job(2).memory(1))
    assert job(2).run(9) == ("peer", 8)


def test_a_flipped_bit_has_the_other_node_give_its_copy(job: Open) -> None:
    job(2).run(8)
    flip(job(2).newest(1))
    assert job(2).run(9) == ("peer", 8)


def test_a_flipped_bit_without_another_node_has_all_ranks_load_an_earlier_step(job: Open) -> None:
    job(1).run(8)
    flip(job(1).newest(1))
    assert job(1).run(9) == ("memory", 7)


def test_copies_that_are_all_damaged_are_not_loaded(job: Open) -> None:
    job(1).run(8)
    directory = job(1).copies(0)
    for name in directory.copies():
        flip(directory.file(name))
    assert job(1).run(3) == (None, None)


def test_a_copy_of_another_step_under_the_name_of_the_newest_is_not_loaded(job: Open) -> None:
    job(1).run(8)
    directory = job(1).copies(1)
    earlier, newest = CopyName(1, 7, 1), CopyName(1, 8, 1)
    shutil.copy(directory.file(earlier), directory.file(newest))
    assert job(1).run(9) == ("memory", 7)


def test_ranks_whose_copies_are_of_different_steps_load_none_of_them(job: Open) -> None:
    job(1).run(8)
    job(1).copies(0).delete(lambda name: (name.rank, name.step) not in ((0, 8), (1, 7)))
    assert job(1).run(3) == (None, None)


def test_a_new_directory_at_the_same_path_resumes_from_nothing(job: Open) -> None:
    job(1).run(8)
    shutil.rmtree(job(1).directory / "checkpoints")
    assert job(1).run(3) == (None, None)


def test_copies_of_another_number_of_ranks_are_not_loaded(job: Open) -> None:
    job(1).run(8)
    assert job(1).run(3, world_size=1) == (None, None)
