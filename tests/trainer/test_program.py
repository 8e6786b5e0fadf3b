"""The program `python -m paceline_trainer`: real processes, rings, signals."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from paceline.checkpoints.layout import saved_checkpoints
from paceline_trainer.__main__ import main
from paceline_trainer.errors import TrainerSettingsError
from paceline_trainer.settings import read_place
from paceline_wire.ring import AckStatus, ControlKind, RingError, RingReader
from paceline_wire.topology import Topology
from tests.forked_python import ForkedPython
from tests.ports import free_port

SMALL = ["--layers", "2", "--width", "16", "--sequence-length", "16", "--global-batch-size", "8"]
PATIENCE_SECONDS = 60


class Job:
    """The ranks of one generation, started as by the agent."""

    def __init__(self, directory: Path, dp: int, generation: int, arguments: list[str]) -> None:
        self.directory = directory
        self.generation = generation
        port = free_port()
        self.logs = [directory / f"rank-{rank}.g{generation}.log" for rank in range(dp)]
        self.ranks = [
            self._start(rank, dp, {"MASTER_PORT": str(port)}, arguments) for rank in range(dp)
        ]

    def _start(
        self, rank: int, dp: int, more: dict[str, str], arguments: list[str]
    ) -> ForkedPython:
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(dp),
            "MASTER_ADDR": "127.0.0.1",
            "PACELINE_DP": str(dp),
            "PACELINE_GENERATION": str(self.generation),
            "PACELINE_RING_DIRECTORY": str(self.directory),
            "PACELINE_JOB": "local",
            "PACELINE_RING_CAPACITY": "4096",
            "PACELINE_CHECKPOINT_DIRECTORY": str(self.directory / "checkpoints"),
            **more,
        }
        with self.logs[rank].open("wb") as log:
            program = ["-m", "paceline_trainer", *SMALL, *arguments]
            output = log.fileno()
            return ForkedPython(program, environment, stdout=output, stderr=output)

    def ring(self, rank: int) -> RingReader:
        path = self.directory / f"local.g{self.generation}.r{rank}.ring"
        return self.eventually(lambda: _open(path))

    def log(self, rank: int) -> str:
        return self.logs[rank].read_text()

    def eventually(self, look: Callable[[], Any]) -> Any:
        """Return the first true value that `look` returns."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if seen := look():
                return seen
            time.sleep(0.02)
        raise AssertionError("".join(self.log(rank) for rank in range(len(self.ranks))))

    def exit_codes(self) -> list[int]:
        return [rank.wait(PATIENCE_SECONDS) for rank in self.ranks]

    def losses(self) -> dict[int, float]:
        """Return the losses in rank 0's log by completed steps."""
        found = re.findall(r"^step (\d+)  loss ([0-9.]+)", self.log(0), re.MULTILINE)
        return {int(step): float(loss) for step, loss in found}


def _open(path: Path) -> RingReader | None:
    try:
        return RingReader(path)
    except RingError:
        return None


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start_job(*arguments: str, dp: int, generation: int = 0) -> Job:
        jobs.append(Job(tmp_path, dp, generation, list(arguments)))
        return jobs[-1]

    yield start_job
    for job in jobs:
        for rank in job.ranks:
            rank.kill()
            rank.wait()


def test_a_planned_stop_loses_no_step_and_the_next_generation_continues(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    job = start("--steps", "100000", "--emulate-kernel-ms", "2,2", dp=2)
    rings = [job.ring(rank) for rank in range(2)]
    job.eventually(lambda: rings[1].view().step >= 3)
    assert rings[0].identity.metadata["emulated_kernel_ms"] == "2,2"
    rings[1].command(5, ControlKind.CHECKPOINT_AND_STOP, 0)  # rank 0 gets no command
    assert job.exit_codes() == [0, 0], job.log(0)

    answers = [ring.acknowledgement() for ring in rings]
    assert answers[0] == answers[1]
    assert answers[0] is not None
    assert (answers[0].command_id, answers[0].status) == (5, AckStatus.DONE)
    stopped_at = answers[0].step
    assert max(job.losses()) == stopped_at
    assert saved_checkpoints(tmp_path / "checkpoints")[0].step == stopped_at
    for ring in rings:
        ring.close()

    after = start("--steps", str(stopped_at + 3), dp=1, generation=1)
    assert after.exit_codes() == [0], after.log(0)
    assert [*after.losses()] == [stopped_at + 1, stopped_at + 2, stopped_at + 3]
    assert f"Resuming at step {stopped_at}." in after.log(0)


def test_all_ranks_end_when_one_dies_and_sigterm_ends_a_rank(
    start: Callable[..., Job],
) -> None:
    job = start("--steps", "100000", dp=2)
    job.eventually(lambda: job.losses())
    job.ranks[1].kill()
    assert job.exit_codes() == [1, -signal.SIGKILL]
    assert job.log(0).splitlines()[-1].startswith("Rank 0 failed: ")
    assert "Traceback" in job.log(0)

    alone = start("--steps", "100000", dp=1, generation=1)
    alone.eventually(lambda: alone.losses())
    alone.ranks[0].send_signal(signal.SIGTERM)
    assert alone.exit_codes() == [-signal.SIGTERM]


def test_help_documents_every_option() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for option in main.params:
        assert option.opts[0] in result.output


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--emulate-kernel-ms", "20"], {}, "two numbers FORWARD,BACKWARD such as 20,40"),
        (["--emulate-kernel-ms", "-1,2"], {}, "kernel times must be at least 0 ms"),
        (["--global-batch-size", "7"], {}, "must be a multiple of the data-parallel size"),
        (
            ["--pp", "8"],
            {"WORLD_SIZE": "8"},
            "8 pipeline stages, including virtual ones, need at least as many layers",
        ),
        (["--virtual-stages", "2"], {}, "needs --schedule interleaved, got 1f1b"),
        (["--schedule", "interleaved"], {}, "needs --virtual-stages 2 or more, on two"),
        (["--stage-layers", "3,x"], {}, "numbers of layers such as 3,3,2,4"),
        (["--stage-layers", "2,3"], {}, "needs 1 numbers from 1 that sum to --layers (4), got 2,3"),
        (["--tp", "8"], {"WORLD_SIZE": "8"}, "multiple of the tensor-parallel size (8)"),
        (["--dp", "3"], {"WORLD_SIZE": "2"}, "is 3 ranks, but this is rank 0 of WORLD_SIZE 2"),
        ([], {"RANK": "two"}, "RANK must be a whole number, got 'two'"),
    ],
)
def test_invalid_settings_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    environment: dict[str, str],
    message: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_the_placement_is_read_from_the_environment() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "PACELINE_PP": "2", "PACELINE_TP": "2"}
    place = read_place(environment)
    assert place.topology == Topology(2, 2, 2)
    assert place.coordinates == Topology(2, 2, 2).coordinates(5)
    assert read_place({"WORLD_SIZE": "4"}).topology == Topology(4, 1, 1)
    with pytest.raises(TrainerSettingsError):
        read_place({"RANK": "4", "WORLD_SIZE": "4"})
