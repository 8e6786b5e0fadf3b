"""Requests of the server reach every rank's script, which saves and stops at one step."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from paceline.checkpoints.layout import saved_checkpoints
from paceline_wire.ring import Acknowledgement, AckStatus, ControlKind, RingError, RingReader
from tests.ports import free_port
from tests.trainer_hooks.integrations.conftest import python_with, start_python

PROGRAM = Path(__file__).with_name("requested_run.py")
FRAMEWORKS = Path(__file__).with_name("requested_framework.py")


class Ranks:
    """Two ranks with rings, to which a test writes commands like an agent."""

    def __init__(
        self, directory: Path, program: Path, *arguments: str, python: str = sys.executable
    ) -> None:
        port = free_port()
        self.processes = [
            start_python(
                python,
                [program, arguments[0], directory / "saved", *arguments[1:]],
                os.environ
                | {
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "LOCAL_RANK": str(rank),
                    "TORCHELASTIC_RUN_ID": "none",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "TORCHDYNAMO_DISABLE": "1",  # torchtitan's attention, compiled, needs a GPU
                    "PACELINE_RING_DIRECTORY": str(directory),
                    "PACELINE_JOB": "local",
                },
            )
            for rank in range(2)
        ]
        self._directory = directory
        self.rings = [self._ring(rank) for rank in range(2)]

    def _ring(self, rank: int) -> RingReader:
        found: list[RingReader] = []

        def is_there() -> bool:
            try:
                found.append(RingReader(self._directory / f"local.g0.r{rank}.ring"))
            except RingError:
                return False
            return True

        self.wait_until(is_there)
        return found[0]

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, "the condition never held"
            assert not any(process.poll() for process in self.processes), self.errors()
            time.sleep(0.01)

    def train(self, steps: int) -> None:
        """Wait until both ranks have completed more steps."""
        goal = max(ring.view().step for ring in self.rings) + steps
        self.wait_until(lambda: all(ring.view().step >= goal for ring in self.rings))

    def answers(self, command_id: int) -> list[Acknowledgement]:
        """Return the final answers to a command; command + 1 on rank 1, as agents number theirs."""

        def final() -> list[Acknowledgement]:
            found = [ring.acknowledgement() for ring in self.rings]
            return [
                answer
                for rank, answer in enumerate(found)
                if answer is not None
                and answer.command_id in (command_id, command_id + rank)
                and answer.status != AckStatus.SEEN
            ]

        self.wait_until(lambda: len(final()) == 2)
        return final()

    def command(self, command_id: int, kind: int) -> None:
        target = max(ring.view().step for ring in self.rings) + 2
        for rank, ring in enumerate(self.rings):
            ring.command(command_id + rank, kind, target)

    def ended_after(self) -> list[int]:
        """Return the completed steps of each rank once both have ended well."""
        ended = [process.communicate(timeout=120) for process in self.processes]
        assert [process.returncode for process in self.processes] == [0, 0], ended
        return [int(output.split()[-1]) for output, _ in ended]

    def errors(self) -> str:
        for process in self.processes:
            process.kill()
        return "\n".join(process.communicate()[1] for process in self.processes)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def start_ranks(
        *arguments: str, program: Path = PROGRAM, python: str = sys.executable
    ) -> Ranks:
        (tmp_path / "saved").mkdir(exist_ok=True)
        for ring in tmp_path.glob("*.ring"):  # left by the run before
            ring.unlink()
        made.append(Ranks(tmp_path, program, *arguments, python=python))
        if len(made) == 1:
            made[-1].train(3)
        return made[-1]

    yield start_ranks
    for ranks in made:
        for process in ranks.processes:
            process.kill()
            process.communicate()
        for ring in ranks.rings:
            ring.close()


@pytest.mark.parametrize(
    "mode", ["checkpoints", pytest.param("accumulating", marks=pytest.mark.campaign)]
)
def test_checkpoints_save_on_request_and_stop_on_request(
    start: Callable[..., Ranks], tmp_path: Path, mode: str
) -> None:
    ranks = start(mode)
    assert all(ring.view().can_checkpoint and ring.view().can_stop for ring in ranks.rings)
    ranks.command(10, ControlKind.CHECKPOINT)
    first = ranks.answers(10)
    assert [answer.status for answer in first] == [AckStatus.DONE] * 2
    assert first[0].step == first[1].step
    assert [ring.view().saved_step for ring in ranks.rings] == [first[0].step] * 2
    ranks.train(5)
    ranks.command(20, ControlKind.CHECKPOINT_AND_STOP)
    second = ranks.answers(20)
    steps = ranks.ended_after()
    assert steps == [second[0].step] * 2
    assert second[1].step == second[0].step
    assert [s.step for s in saved_checkpoints(tmp_path / "saved")] == [steps[0], first[0].step]


def test_a_loop_of_its_own_saves_and_stops_on_request(
    start: Callable[..., Ranks], tmp_path: Path
) -> None:
    ranks = start("own_loop")
    ranks.command(10, ControlKind.CHECKPOINT)
    (first, other) = ranks.answers(10)
    assert (first.status, other.status) == (AckStatus.DONE, AckStatus.DONE)
    assert first.step == other.step
    assert torch.load(tmp_path / "saved" / "saved.pt")["step"] == first.step
    ranks.command(20, ControlKind.CHECKPOINT_AND_STOP)
    (second, other) = ranks.answers(20)
    assert ranks.ended_after() == [second.step, second.step]
    assert torch.load(tmp_path / "saved" / "saved.pt")["step"] == second.step


def test_a_function_that_saves_is_called_on_request_and_waited_for(
    start: Callable[..., Ranks], tmp_path: Path
) -> None:
    """It saves in a thread, as one checkpoint of both ranks, after a step of two batches."""
    ranks = start("saving_function")
    assert all(ring.view().can_checkpoint and ring.view().can_stop for ring in ranks.rings)
    ranks.command(10, ControlKind.CHECKPOINT)
    first, other = ranks.answers(10)
    assert [first.status, other.status] == [AckStatus.DONE] * 2
    assert first.step == other.step > 100
    assert [ring.view().saved_step for ring in ranks.rings] == [first.step] * 2
    assert batches_in(tmp_path / "saved" / f"step-{first.step}") == 2 * (first.step - 100)
    ranks.train(3)
    ranks.command(20, ControlKind.CHECKPOINT_AND_STOP)
    second, _ = ranks.answers(20)
    assert ranks.ended_after() == [second.step] * 2
    assert batches_in(tmp_path / "saved" / f"step-{second.step}") == 2 * (second.step - 100)
    paths = [described(ring)["checkpoint_path"] for ring in ranks.rings]
    assert paths == [str(tmp_path / "saved" / "step-*")] * 2


def batches_in(checkpoint: Path) -> int:
    """Return the number of batches in a complete checkpoint."""
    state = {"batches": torch.tensor(0)}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # no process group
        dcp.load(state, checkpoint_id=checkpoint)
    return int(state["batches"])


def described(ring: RingReader) -> dict[str, str]:
    return {k: v for each in ring.new_descriptions() for k, v in each.metadata.items()}


def test_no_rank_stops_if_the_checkpoint_fails(start: Callable[..., Ranks]) -> None:
    ranks = start("failing_loop")
    ranks.command(10, ControlKind.CHECKPOINT_AND_STOP)
    assert [answer.status for answer in ranks.answers(10)] == [AckStatus.FAILED] * 2
    ranks.train(5)
    ranks.command(20, ControlKind.CHECKPOINT_AND_STOP)
    assert [answer.status for answer in ranks.answers(20)] == [AckStatus.DONE] * 2
    first, second = ranks.ended_after()
    assert first == second


def test_a_stop_without_a_checkpoint_ends_all_ranks_at_one_step(
    start: Callable[..., Ranks],
) -> None:
    ranks = start("own_loop")
    ranks.command(10, ControlKind.STOP)
    first, second = ranks.ended_after()
    assert first == second


def test_a_stopped_run_resumes_where_it_stopped(
    start: Callable[..., Ranks],
) -> None:
    ranks = start("checkpoints")
    ranks.command(10, ControlKind.CHECKPOINT_AND_STOP)
    stopped, _ = ranks.ended_after()
    assert start("checkpoints", str(stopped + 5)).ended_after() == [stopped + 5] * 2


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("framework", "package"),
    [
        ("accelerate", "accelerate"),
        ("hugging_face", "transformers"),
        ("lightning", "lightning"),
        ("fabric", "lightning"),
        ("deepspeed", "deepspeed"),
    ],
)
def test_a_framework_saves_stops_and_resumes_by_its_own_means(
    start: Callable[..., Ranks], tmp_path: Path, framework: str, package: str
) -> None:
    python = python_with(package)
    ranks = start(framework, program=FRAMEWORKS, python=python)
    assert all(ring.view().can_checkpoint and ring.view().can_stop for ring in ranks.rings)
    ranks.command(10, ControlKind.CHECKPOINT)
    first, other = ranks.answers(10)
    assert (first.status, other.status, other.step) == (AckStatus.DONE, AckStatus.DONE, first.step)
    assert ranks.rings[0].view().saved_step == first.step
    assert str(tmp_path / "saved") in described(ranks.rings[0])["checkpoint_path"]
    ranks.train(3)
    ranks.command(20, ControlKind.CHECKPOINT_AND_STOP)
    answers = ranks.answers(20)
    stopped = answers[0].step
    assert [(answer.status, answer.step) for answer in answers] == [(AckStatus.DONE, stopped)] * 2
    assert ranks.ended_after() == [stopped, stopped]
    again = start(framework, str(stopped + 20), program=FRAMEWORKS, python=python)
    assert again.ended_after() == [stopped + 20] * 2
    # Numbered from the resumed one. An engine begins the next step once its optimizer has stepped.
    begun = 0 if framework in ("hugging_face", "lightning") else 1
    assert again.rings[0].view().step == stopped + 19 + begun


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("framework", "package", "completed"),
    # torchtitan's steps have the numbers 1, 2, ...: Paceline reports the number of the next one.
    [("megatron", "megatron.core", 0), ("torchtitan", "torchtitan", 1)],
)
def test_a_framework_of_several_shards_saves_and_stops_on_request(
    start: Callable[..., Ranks], tmp_path: Path, framework: str, package: str, completed: int
) -> None:
    ranks = start(framework, program=FRAMEWORKS, python=python_with(package))
    assert all(ring.view().can_checkpoint and ring.view().can_stop for ring in ranks.rings)
    ranks.command(10, ControlKind.CHECKPOINT)
    first, other = ranks.answers(10)
    assert (first.status, other.status, other.step) == (AckStatus.DONE, AckStatus.DONE, first.step)
    ranks.train(3)
    ranks.command(20, ControlKind.CHECKPOINT_AND_STOP)
    second, _ = ranks.answers(20)
    assert [ring.view().saved_step for ring in ranks.rings] == [second.step] * 2
    assert ranks.ended_after() == [second.step - completed] * 2
    for ring in ranks.rings:
        path = described(ring)["checkpoint_path"]
        assert path.startswith(str(tmp_path / "saved"))
        assert path.endswith("step-*")
        for answer in (first, second):
            saved = Path(path.replace("*", str(answer.step - completed)))
            assert (saved / ".metadata").exists()
